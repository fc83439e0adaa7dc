"""The storages that enter a replay from outside, and their fresh state before each run.

What nothing writes is prepared once for a plan (`PreparedWindow`). Whether a file's private map was written is found
without reading it: `PrivateMaps` asks Linux for the map's own pages. `Restoring` puts content in place without running
ops, to measure what that takes. `Clones` copies the whole storages that an op works on, so that it can be run again
without changing what the replay continues with, and arguments that share memory also share the copy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from replayfmt.errors import InvalidCapture
from replayfmt.format.codes import TensorFlag, ValueKind
from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch import accelerators
from replayfmt.pytorch.tensors.composites import is_composite, put_together, take_apart
from replayfmt.pytorch.tensors.memory import byte_tensor, fill_from, hash_storage, host_view, make_view, new_storage

from ..codegen.windows import StagedStorage, Window
from ..operations import View
from ..planning.devices import system_bytes
from ..planning.external_files import ExternalFiles
from ..planning.scan import ContentSource, Scan
from ..planning.synthesis import Synthesis
from ..verification import CompareLocation, Judge

_SMAPS = Path("/proc/self/smaps")
_MAP = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ", re.MULTILINE)
_OWN = re.compile(rb"^(?:Anonymous|Swap): +([0-9]+) kB$", re.MULTILINE)


class PrivateMaps:
    """The maps of this process as they are now."""

    def __init__(self) -> None:
        self._clean: list[tuple[int, int]] | None = None  # (begin, end) of maps without pages of the process's own

    def is_clean(self, storage: torch.UntypedStorage) -> bool:
        """Whether a host storage is known to lie in a map of which no page was written. False where the system does not
        tell."""
        if self._clean is None:
            self._clean = _clean_maps()
        begin = storage.data_ptr()
        return any(low <= begin and begin + storage.nbytes() <= high for low, high in self._clean)


def _clean_maps() -> list[tuple[int, int]]:
    try:
        text = _SMAPS.read_bytes()
    except OSError:
        return []
    maps = list(_MAP.finditer(text))
    ends = [*(found.start() for found in maps[1:]), len(text)]
    return [
        (int(found[1], 16), int(found[2], 16))
        for found, end in zip(maps, ends, strict=True)
        if [int(count) for count in _OWN.findall(text, found.end(), end)] == [0, 0]
    ]


@dataclass(frozen=True)
class PreparedWindow:
    """A window's beginning where part of it was prepared before. `values` are variables by key; `staged`, `hoisted` and
    `dropped` are what is left of the window's own."""

    values: dict[int, Any]
    staged: list[StagedStorage]
    hoisted: list[tuple[int, int, View]]
    dropped: list[int]


class PreparedWindows:
    """The beginnings of a plan's windows, for as long as the plan keeps these."""

    def __init__(self) -> None:
        self._ready: WeakKeyDictionary[Window, PreparedWindow] = WeakKeyDictionary()

    def get(self, window: Window) -> PreparedWindow | None:
        """What was kept for a window; None before its first run."""
        return self._ready.get(window)

    def add(self, window: Window, values: Mapping[int, Any], stays: Callable[[int], bool]) -> None:
        """Keep what was prepared for a window, `values` by key. `stays` says of a storage whether it is the same one,
        with the same bytes, in every run."""
        kept = {staged.storage for staged in window.staged if stays(staged.storage)}
        dropped = set(window.dropped)
        hoisted = [(key, base) for key, base, _view in window.hoisted if stays(-base)]
        ready = {key: values[key] for key in [*(-storage for storage in kept), *(key for key, _base in hoisted)]}
        tensors = {key for key, _base in hoisted}
        self._ready[window] = PreparedWindow(
            {key: value for key, value in ready.items() if key not in dropped},
            [staged for staged in window.staged if staged.storage not in kept],
            [each for each in window.hoisted if each[0] not in tensors],
            [key for key in window.dropped if key not in ready],
        )

    def clear(self) -> None:
        """Let go of everything: the next run prepares its windows anew."""
        self._ready.clear()

    def altered(self, storages: Mapping[int, torch.UntypedStorage]) -> set[int]:
        """Which of these storages have tensors that are no longer the views as which they were made."""
        found = set()
        for window, ready in self._ready.items():
            for key, base, view in window.hoisted:
                tensor = ready.values.get(key)
                storage = storages.get(-base)
                if tensor is not None and storage is not None and not view.is_on(tensor, storage):
                    found.add(-base)
        return found


# How much of a device's free memory pristine copies may take.
_COPY_SHARE = 4
# What the program freed stays between runs, too, up to this part of the most memory that it is known to have had; the
# objects for each storage are counted in.
_FREED_SHARE = 64
_OBJECT_BYTES = 1 << 10
# Storages from this size on are compared with the free memory first.
_LARGE_BYTES = 1 << 30


class _Kept(NamedTuple):
    """A storage that stays between runs, and how it entered; `mapped` from a file, of which pages are read as they are
    touched."""

    staged: StagedStorage
    storage: torch.UntypedStorage
    mapped: bool


class Content:
    """Owns the storages it keeps between runs with the tensors on them, and pristine copies; `release` lets go of them.

    `synthesis` fills what is neither in the capture nor in a file.
    """

    def __init__(self, reader: CaptureReader, scan: Scan, files: ExternalFiles, synthesis: Synthesis) -> None:
        self._reader = reader
        self._scan = scan
        self._files = files
        self._synthesis = synthesis
        self._kept: dict[int, _Kept] = {}
        self._ready = PreparedWindows()
        self._found_written: set[int] = set()  # changed, although nothing is known to write them
        self._compared = False  # what is kept, since it was first used
        self._used = False  # since it was last compared
        self._stale: set[int] = set()  # what this run found changed
        self._pristine: dict[int, torch.UntypedStorage] = {}
        self._budget: dict[torch.device, int] = {}
        self._freed_bytes = 0  # kept of what the program freed

    def release(self) -> None:
        self._kept.clear()
        self._ready.clear()
        self._pristine.clear()
        self._budget.clear()
        self._freed_bytes = 0

    def stage(self, staged: StagedStorage) -> torch.UntypedStorage:
        """A storage with its first content."""
        kept = self._kept.get(staged.storage)
        written = self._is_restored(staged.storage)
        if kept is not None and kept.storage.nbytes() == staged.length_bytes:
            if written:
                self.restore(staged, kept.storage)
            return kept.storage
        storage, mapped = None, False
        if staged.device.type == "cpu" and staged.source.kind is ValueKind.range:
            if not written:
                storage = self._files.mapped(staged.source.id, in_place=staged.in_file)
                mapped = storage is not None
            if storage is None and staged.in_file:
                storage = self._files.placed_alike(staged.source.id)
                self._fill(staged, storage)
        if storage is None:
            _require_free(staged)
            storage = new_storage(staged.length_bytes, staged.device)
            self._fill(staged, storage)
        if self._stays(staged):
            self._kept[staged.storage] = _Kept(staged, storage, mapped)
        return storage

    def _stays(self, staged: StagedStorage) -> bool:
        """Whether a storage stays allocated between runs."""
        if not self._scan.is_released(staged.storage):
            return True
        after = self._freed_bytes + staged.length_bytes + _OBJECT_BYTES
        if (
            self._is_restored(staged.storage)
            or after > self._scan.known_peak_bytes // _FREED_SHARE
            or not self._fits(staged)
        ):
            return False
        self._freed_bytes = after
        return True

    def _is_restored(self, storage: int) -> bool:
        return self._scan.is_written(storage) or storage in self._found_written

    def ready(self, window: Window) -> PreparedWindow | None:
        """What an earlier run left of a window's beginning; None if nothing."""
        return self._ready.get(window)

    def keep_ready(self, window: Window, values: dict[int, Any]) -> None:
        """Keep what was prepared for a window (`values` by key) and no run changes."""
        self._ready.add(window, values, lambda storage: storage in self._kept and not self._is_restored(storage))

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each storage that was found changed although no op is known to write it."""
        return tuple(
            f"storage {storage} changed in an execution, although no op is known to write it; since that was found, it "
            "is restored before each execution"
            for storage in sorted(self._found_written)
        )

    def begin(self, *, verified: bool) -> None:
        """Ops are about to run on what is kept; what is compared now, and changed, is made fresh again."""
        self._stale = self._compare() if self._used and (verified or not self._compared) else set()
        self._used = True
        if verified:
            self._compared = False  # until it has ended well

    @property
    def changed(self) -> bool:
        """Whether the run that begins found content changed that nothing is known to write."""
        return bool(self._stale)

    def unwritten(self) -> set[int]:
        """The storages, by identity, that stay between runs and that nothing writes."""
        return {kept.storage._cdata for number, kept in self._kept.items() if not self._is_restored(number)}

    def end_verified(self, judge: Judge) -> None:
        """A run that verifies is over, and found nothing yet. What it changed although nothing is known to write it, or
        those before it that did not verify, differs from the capture, which has no digest of what it became."""
        for storage in sorted(self._stale | self._compare()):
            last = max(self._scan.last_use_of(storage), 0)
            expected = f"storage {storage} as it entered, because no op up to here is known to write it"
            judge.diverged(CompareLocation(last, None, last), expected, "other content")

    def _compare(self) -> set[int]:
        """The storages that nothing is known to write and that are not any more what they were when they entered; they
        enter anew in the next run, and are restored before each after it. Reads all of them but maps of files, and what
        they were filled from where the hash of that is not known."""
        unwritten = {number: kept for number, kept in self._kept.items() if not self._scan.is_written(number)}
        changed = self._ready.altered({number: kept.storage for number, kept in unwritten.items()})
        maps = PrivateMaps()
        changed |= {
            number for number, kept in unwritten.items() if number not in changed and not self._is_intact(kept, maps)
        }
        for number in changed:
            del self._kept[number]
        if changed:
            self._ready.clear()
        self._found_written |= changed
        self._compared, self._used = True, False
        return changed

    def _is_intact(self, kept: _Kept, maps: PrivateMaps) -> bool:
        staged, storage = kept.staged, kept.storage
        if storage.nbytes() != staged.length_bytes:
            return False
        known = staged.length_bytes and staged.device.type != "meta"
        if not known or self.missing(staged.storage, staged.source, 0) is not None:
            return True  # it has no bytes, or none that are known
        if kept.mapped and maps.is_clean(storage):
            return True
        found = hash_storage(storage)
        if staged.source.kind is ValueKind.payload:
            return f"{found:032x}" == self._reader.payload_info(staged.source.id).digest
        if staged.source.kind is ValueKind.range:
            return found == self._files.hash_range(staged.source.id)
        self._fill(staged, storage)  # made again, from the same seed
        return hash_storage(storage) == found

    def missing(self, storage: int, source: ContentSource, version: int) -> str | None:
        """Why there is no content to put into a storage; None if there is some."""
        if source.kind is ValueKind.payload:
            return None
        if source.kind is ValueKind.range:
            return self._files.problem(source.id)
        return self._synthesis.missing(storage, version)

    def load(self, storage: int, source: ContentSource, version: int, target: torch.UntypedStorage) -> None:
        """Put content into the first bytes of an existing storage: what the program wrote from outside.

        Raises InvalidCapture if it does not fit, ReplayRefused if its file has changed.
        """
        length = self._length(source)
        if length is None:
            self._synthesis.fill(storage, version, target)
            return
        if length > target.nbytes():
            raise InvalidCapture(
                f"{self._reader.path}: new content of {length} bytes for storage {storage}, which has {target.nbytes()}"
            )
        self._load(source, length, target)

    def _load(self, source: ContentSource, length: int, target: torch.UntypedStorage) -> None:
        if source.kind is ValueKind.range:
            fill_from(target, length, lambda buffer, offset: self._files.read_into(source.id, buffer, offset))
        elif target.device.type == "cpu":
            self._reader.read_payload_into(source.id, host_view(target)[:length])
        else:
            content = memoryview(self._reader.payload(source.id))

            def read(buffer: memoryview, offset: int) -> None:
                buffer[:] = content[offset : offset + len(buffer)]

            fill_from(target, length, read)

    def _length(self, source: ContentSource) -> int | None:
        """How long captured content is, in bytes; None if it is not captured."""
        if source.kind is ValueKind.payload:
            return self._reader.payload_info(source.id).raw_bytes
        if source.kind is ValueKind.range:
            return self._reader.file_ranges[source.id].bytes
        return None

    def restore(self, staged: StagedStorage, storage: torch.UntypedStorage) -> None:
        """Put first content into the storage that has it, where it is."""
        pristine = self._pristine.get(staged.storage)
        if pristine is None and self._fits(staged):
            pristine = self._pristine[staged.storage] = new_storage(staged.length_bytes, staged.device)
            self._fill(staged, pristine)
        if pristine is None:
            self._fill(staged, storage)
        else:
            byte_tensor(storage).copy_(byte_tensor(pristine))

    def _fits(self, staged: StagedStorage) -> bool:
        if staged.device not in self._budget:
            self._budget[staged.device] = (free_bytes(staged.device) or 0) // _COPY_SHARE
        if staged.length_bytes > self._budget[staged.device]:
            return False
        self._budget[staged.device] -= staged.length_bytes
        return True

    def _fill(self, staged: StagedStorage, storage: torch.UntypedStorage) -> None:
        if not staged.length_bytes or self.missing(staged.storage, staged.source, 0) is not None:
            return  # what reads it is refused; only plans that keep going get here without it
        length = self._length(staged.source)
        if length is None:
            self._synthesis.fill(staged.storage, 0, storage)
            return
        if length != staged.length_bytes:
            raise InvalidCapture(
                f"{self._reader.path}: storage {staged.storage} has {staged.length_bytes} bytes, its "
                f"{staged.source.kind.name} {staged.source.id} has {length}"
            )
        self._load(staged.source, length, storage)


def free_bytes(device: torch.device) -> int | None:
    """Memory that could still be allocated on a device; None if that is unknown."""
    if device.type != "cpu":
        return accelerators.free_memory(device)
    return system_bytes("MemAvailable", "SwapFree")


def _require_free(staged: StagedStorage) -> None:
    """Linux gives more memory than there is, and ends the process that fills it. Raises MemoryError instead."""
    if staged.length_bytes < _LARGE_BYTES or staged.device.type != "cpu":
        return
    free = free_bytes(staged.device)
    if free is not None and staged.length_bytes > free:
        raise MemoryError(f"it takes {staged.length_bytes:,} bytes, and {free:,} are free on {staged.device}")


class Restoring:
    """`windows` are those of unverified executions. The next execution does all of it again."""

    def __init__(
        self, content: Content, windows: Iterable[Window], surroundings: Callable[[], AbstractContextManager[None]]
    ) -> None:
        staged = [each for window in windows for each in (content.ready(window) or window).staged]
        self._content, self._staged, self._surroundings = content, staged, surroundings

    def __bool__(self) -> bool:
        """Whether executions after the first put anything in place. Known once there was one."""
        return bool(self._staged)

    def __call__(self) -> None:
        with self._surroundings():
            for each in self._staged:
                self._content.stage(each)


def storages_of(values: Sequence[Any], places: Iterable[int]) -> dict[int, torch.UntypedStorage]:
    """The storages behind the tensors at some places, each once, by identity."""
    storages = (values[place].untyped_storage() for place in places)
    return {storage._cdata: storage for storage in storages}


def copied(storage: torch.UntypedStorage, device: torch.device | None = None) -> torch.UntypedStorage:
    """A storage of its own with the same bytes, on the same device or another."""
    copy = new_storage(storage.nbytes(), device or storage.device)
    copy_bytes(copy, storage)
    return copy


def copy_bytes(to: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
    """Overwrite a storage with the bytes of one of the same length."""
    byte_tensor(to).copy_(byte_tensor(source))


def moved(values: Sequence[Any], to: dict[int, torch.UntypedStorage]) -> list[Any]:
    """The values, those on storages that are keys of `to` (by identity) as the same views on their counterparts."""
    result: list[Any] = []
    for value in values:
        storage = value if isinstance(value, torch.UntypedStorage) else value.untyped_storage()
        other = to.get(storage._cdata)
        if other is None:
            result.append(value)
        elif isinstance(value, torch.UntypedStorage):
            result.append(other)
        else:
            offset = int(value.storage_offset())
            result.append(make_view(other, value.dtype, value.shape, value.stride(), offset, _lazy_flags(value)))
    return result


def _lazy_flags(tensor: torch.Tensor) -> TensorFlag:
    flags = TensorFlag(0)
    if tensor.is_conj():
        flags |= TensorFlag.conj
    if tensor.is_neg():
        flags |= TensorFlag.neg
    return flags


class Clones:
    """Makes copies, on `device` if that is given; `originals` and `copies` are their storages, by the address of the
    original. With `only`, of these storages alone, and everything else stays as it is."""

    def __init__(self, device: torch.device | None = None, only: Container[int] | None = None) -> None:
        self._device, self._only = device, only
        self.originals: dict[int, torch.UntypedStorage] = {}
        self.copies: dict[int, torch.UntypedStorage] = {}

    def of(self, value: Any) -> Any:
        """The same value on copied memory; generators, numbers and tensors without memory are returned as they are."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.UntypedStorage):
            return self._storage(value)
        if isinstance(value, list | tuple):
            return type(value)(self.of(each) for each in value)
        if isinstance(value, dict):
            return {name: self.of(each) for name, each in value.items()}
        if isinstance(value, torch.device) and self._device is not None:
            return self._device
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_composite(tensor):
            form, parts = take_apart(tensor)
            return put_together(form, [self.of(part) for part in parts])
        if not has_memory(tensor):
            return tensor
        storage = tensor.untyped_storage()
        if self._only is not None and storage._cdata not in self._only:
            return tensor
        (clone,) = moved([tensor], {storage._cdata: self._storage(storage)})
        return clone

    def _storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        copy = self.copies.get(storage._cdata)
        if self._only is not None and storage._cdata not in self._only:
            return storage
        if copy is None:
            copy = copy_of(storage) if self._device is None else copied(storage, self._device)
            self.originals[storage._cdata], self.copies[storage._cdata] = storage, copy
        return copy


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor has memory: not if it is on the meta device, or reads as zeros without any memory."""
    return tensor.device.type != "meta" and not tensor._is_zerotensor()


def copy_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A new storage with the same bytes."""
    if storage.device.type != "cpu" or not storage.nbytes():
        return copied(storage)
    copy = new_storage(storage.nbytes(), storage.device)
    host_view(copy)[:] = host_view(storage)  # not with torch, whose thread count is set for the captured work
    return copy


def same_bytes(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    """Whether two storages of the same device and length hold the same bytes."""
    if one.device.type == "cpu":
        return np.array_equal(np.frombuffer(host_view(one), np.uint8), np.frombuffer(host_view(other), np.uint8))
    return bool(torch.equal(byte_tensor(one), byte_tensor(other)))


def strided_parts(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """The tensors and numbers in a value, each with its place; composites as their parts, tensors that implement their
    own dispatch (they need not have memory) as their class."""
    if isinstance(value, torch.Tensor) and type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        yield place, type(value)
    elif isinstance(value, torch.Tensor) and is_composite(value):
        form, parts = take_apart(value)
        yield place, form
        for index, part in enumerate(parts):
            yield from strided_parts(part, f"{place}, part {index} of {form}")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from strided_parts(each, f"{place}[{index}]")
    else:
        yield place, value
