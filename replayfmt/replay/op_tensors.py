"""The arguments and results of ops: what the capture itself holds of them, and what a verified replay computes.

`CapturedValues` runs nothing: it finds content that entered from outside and that no op has written since. Everything
else was computed; `observe_ops` replays the capture up to the last of some ops and shows their tensors while they
exist. Nothing is copied there: an observer copies what it wants to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from replayfmt.errors import ContentNotCaptured, ExternalFileProblem, InvalidCapture, ReplayRefused, first_line
from replayfmt.format.codes import RecordKind, StorageOrigin, TensorFlag, ValueKind
from replayfmt.format.model import Record, TensorValue, tensors_of
from replayfmt.format.reader import CaptureReader
from replayfmt.format.source import Closing
from replayfmt.pytorch.tensors.memory import TORCH_DTYPE, byte_tensor, host_view, new_storage, view_inside

from .plan import Plan
from .planning.external_files import ExternalFiles
from .planning.kernels import Effects, effects_of
from .planning.records import GiveTensor, Slicer, describe, python_values, unseen_before
from .planning.scan import NOTHING, ContentSource, source_of
from .resolution.kernel_lookup import AllowedImports, resolve
from .results import Verification, VerifyMode
from .run.content import Clones
from .run.run_twice import RunTwice

_BORN_WITH = {
    StorageOrigin.payload: ValueKind.payload,
    StorageOrigin.external_file: ValueKind.range,
    StorageOrigin.initializer: ValueKind.recipe,
}


class CapturedValues(Closing):
    """The content around one op. Use it as a context manager: it keeps files open."""

    def __init__(self, reader: CaptureReader, file_remaps: Sequence[str] = ()) -> None:
        """Raises UsageError if a remap is wrong."""
        self._reader = reader
        self._files = ExternalFiles(reader, file_remaps)
        self._sources: dict[int, ContentSource | str] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def look(self, record: Record, *, results: bool) -> None:
        """Find out where the content of an op's arguments comes from; with `results`, as the op left it."""
        wanted = {value.storage for value in tensors_of(record.results if results else record.args)} - {0}
        slicer = Slicer(self._reader, self._effects, lambda number: False)
        self._sources = {}
        missing = set(wanted)
        unseen = next(unseen_before(self._reader, record.ordinal), -1)
        for row in slicer.rows(record.ordinal + results, backwards=True):
            if not missing:
                return
            if row.ordinal < unseen:
                break
            if row.kind is RecordKind.op:
                for storage in missing & row.written:
                    self._sources[storage] = self._computed(row.ordinal, record.ordinal)
            elif row.kind is RecordKind.storage_import:
                for storage in missing & row.touched:
                    self._sources[storage] = source_of(self._reader.record(row.ordinal).argument("payload"))
            elif row.kind is RecordKind.storage_resize:
                for storage in missing & row.touched:
                    self._sources[storage] = f"its memory was resized at ordinal {row.ordinal}"
            missing -= set(self._sources)
        for storage in missing:
            if unseen >= 0:
                self._sources[storage] = (
                    f"the work of the {self._reader.record(unseen).kind.name} record at ordinal "
                    f"{unseen} may have written it"
                )
                continue
            born = self._reader.storage(storage)
            if born.origin in (StorageOrigin.uninitialized, StorageOrigin.op):
                self._sources[storage] = "nothing that was captured wrote its memory"
            else:
                held = ContentSource(_BORN_WITH[born.origin], born.payload) if born.payload else NOTHING
                self._sources[storage] = held

    def tensor(self, value: TensorValue, name: str) -> torch.Tensor:
        """A strided tensor of that op, on the CPU; tensors of one storage share new memory. `name` is what errors call
        it.

        Raises ContentNotCaptured if the capture does not hold its content, InvalidCapture if it lies outside of
        it.
        """
        meta = value.meta
        if meta.dtype not in TORCH_DTYPE:
            raise ContentNotCaptured(f"{self._reader.path}: {name}: this torch has no dtype {meta.dtype.name}")
        dtype = TORCH_DTYPE[meta.dtype]
        device = self._reader.devices[meta.device]
        try:
            if meta.flags & TensorFlag.zero:
                return torch.zeros(meta.sizes, dtype=dtype)
            if device is not None and device.kind == "meta":
                return torch.empty_strided(meta.sizes, meta.strides, dtype=dtype, device="meta")
        except RuntimeError as error:
            raise InvalidCapture(f"{self._reader.path}: {name}: {first_line(error)}") from None
        storage = self._storage(value.storage, name)
        try:
            return view_inside(storage, dtype, meta.sizes, meta.strides, value.offset, meta.flags)
        except RuntimeError as error:
            raise InvalidCapture(f"{self._reader.path}: {name}: {error}") from None

    def _storage(self, number: int, name: str) -> torch.UntypedStorage:
        if not number:
            return torch.UntypedStorage(0)
        known = self._storages.get(number)
        if known is None:
            known = self._storages[number] = self._load(self._sources[number], name)
        return known

    def _load(self, source: ContentSource | str, name: str) -> torch.UntypedStorage:
        path = self._reader.path
        if isinstance(source, str):
            raise ContentNotCaptured(
                f"{path}: {name}: the capture does not hold its content: {source}; replay=True computes it"
            )
        if source.kind is ValueKind.payload:
            storage = new_storage(self._reader.payload_info(source.id).raw_bytes, torch.device("cpu"))
            self._reader.read_payload_into(source.id, host_view(storage))
            return storage
        if source.kind is ValueKind.range:
            captured = self._reader.file_ranges[source.id]
            findings = self._files.validate(ranges=(source.id,))
            if findings:
                raise ExternalFileProblem(f"{path}: {name}: {findings[0]}")
            storage = new_storage(captured.bytes, torch.device("cpu"))
            self._files.read_into(source.id, host_view(storage), 0)
            return storage
        policy = self._reader.session.policies.get("payload", "unknown")
        raise ContentNotCaptured(
            f"{path}: {name}: its content was left out of the capture (payload={policy}); "
            "replay=True makes it up as a replay does"
        )

    def _computed(self, giver: int, asked: int) -> str:
        if giver == asked:
            return "this op computed it"
        return f"ordinal {giver} ({describe(self._reader, giver)[0]}) wrote it, or may have"

    def _effects(self, signature_id: int) -> Effects:
        layout = self._reader.layouts[signature_id]
        kernel = self._reader.kernels[layout.signature.kernel]
        return effects_of(resolve(kernel, self._reader.session.torch_version, AllowedImports()), layout, kernel)

    def close(self) -> None:
        self._files.close()


# Comparisons that directly follow an op, and what may come between.
_PASSED = (
    RecordKind.digest,
    RecordKind.host_read,
    RecordKind.scope_begin,
    RecordKind.scope_end,
    RecordKind.storage_release,
)


class OpObserver(Protocol):
    """Is shown chosen ops. `give` turns a record's tensor values into the replay's own tensors, in their order."""

    def takes(self, record: Record, give: GiveTensor) -> None:
        """The op runs next; `give` returns its arguments."""

    def gives(self, record: Record, give: GiveTensor) -> None:
        """The op has run; `give` returns its arguments as it left them, then its results. Not called for an op that
        raised under capture."""


Observer = TypeVar("Observer", bound=OpObserver)


@dataclass(frozen=True)
class Observed(Generic[Observer]):
    """What observed a replay, how that was verified, and what ran its ops twice, if anything did."""

    observer: Observer
    verification: Verification
    twice: RunTwice | None


def observe_ops(
    plan: Plan,
    ordinals: Collection[int],
    make: Callable[[], Observer],
    verify: VerifyMode = "auto",
    *,
    twice: bool = False,
) -> Observed[Observer]:
    """Replay the capture up to the last of these ops, and show them to what `make` makes.

    Results that hold bytes which no replay reproduces may be found on the way: then it is done once more, with another
    observer. `twice`: the ops are run twice to look for them. The plan must be made with keep_going. Raises
    ReplayMismatch if the replay differs, ReplayRefused if something stands against this part of it, and ReplayFailed.
    """
    stop = _with_checks(plan.reader, max(ordinals) + 1)
    _refuse_unseen(plan.reader, stop)
    born = _born_unwritten(plan.reader, stop)
    while True:
        observer = make()
        watcher = _Showing(plan.reader, frozenset(ordinals), born, observer)
        search = RunTwice(plan.generators, ordinals) if twice else None
        verification, divergence = plan.watch(watcher, stop, verify, stand_in=search)
        if plan.may_be_taken(search, divergence, verify):
            return Observed(observer, verification, search)


def _with_checks(reader: CaptureReader, stop: int) -> int:
    """Where to stop instead, so that the last op's results are compared with the capture, too."""
    for record in reader.records(stop):
        if record.kind not in _PASSED:
            break
        stop = record.ordinal + 1
    return stop


def _refuse_unseen(reader: CaptureReader, stop: int) -> None:
    unseen = list(unseen_before(reader, stop))[::-1]
    if unseen:
        findings = []
        for ordinal in unseen:
            record = reader.record(ordinal)
            texts = ", ".join(str(each) for each in record.args if each)
            findings.append(f"{record.kind.name} at ordinal {ordinal}: {texts}")
        raise ReplayRefused(
            f"{reader.path}: the inputs of ops before ordinal {stop} cannot be computed: the records below "
            f"cannot be replayed, and may have written any of them",
            tuple(findings),
        )


def _born_unwritten(reader: CaptureReader, stop: int) -> dict[int, set[int]]:
    """The ops before an ordinal that return memory which nothing has written, with the storages that are it."""
    found: dict[int, set[int]] = {}
    for index, info in enumerate(reader.record_frames):
        if info.first_ordinal >= stop:
            break
        frame = reader.frame(index)
        born = np.flatnonzero(frame.storage_origin == StorageOrigin.uninitialized) + frame.first_storage
        storages = frame.tensor_storage[frame.tensor_slots]
        places = np.flatnonzero(np.isin(storages, born))
        rows = np.searchsorted(frame.tensor_first, places, "right") - 1
        known: set[int] = set()
        for row, storage in zip(rows.tolist(), storages[places].tolist(), strict=True):
            if storage not in known:
                known.add(storage)
                found.setdefault(info.first_ordinal + row, set()).add(storage)
    return found


class _Showing:
    """A Watcher of the ops at `ordinals`. Memory that is allocated unwritten, by ordinals in `born`, is filled with
    zeros: it may hold anything, but what is taken from it must be the same each time and nothing of this process's."""

    def __init__(
        self, reader: CaptureReader, ordinals: frozenset[int], born: dict[int, set[int]], looker: OpObserver
    ) -> None:
        self._reader, self._ordinals, self._born, self._looker = reader, ordinals, born, looker

    def watches(self, ordinal: int) -> bool:
        return ordinal in self._ordinals or ordinal in self._born

    def before(self, ordinal: int, storages: dict[int, torch.UntypedStorage]) -> None:
        if ordinal not in self._ordinals:
            return

        def give(value: TensorValue, _name: str) -> torch.Tensor:
            meta = value.meta
            if meta.flags & TensorFlag.zero:
                device = next(iter(storages.values())).device if storages else "cpu"
                return torch.zeros(meta.sizes, dtype=TORCH_DTYPE[meta.dtype], device=device)
            return view_inside(
                storages[value.storage], TORCH_DTYPE[meta.dtype], meta.sizes, meta.strides, value.offset, meta.flags
            )

        self._looker.takes(self._reader.record(ordinal), give)

    def after(self, ordinal: int, results: dict[int, torch.Tensor], args: dict[int, torch.Tensor]) -> None:
        record = self._reader.record(ordinal)
        # One tensor may be in several slots: they hold the same. The record keeps the values, whose ids these are.
        slots = {id(value): slot for slot, value in enumerate(tensors_of((*record.args, *record.results)))}
        for value in tensors_of(record.results):
            if value.storage in self._born.get(ordinal, ()) and slots[id(value)] in results:
                storage = results[slots[id(value)]].untyped_storage()
                if storage.device.type != "meta" and storage.nbytes():
                    byte_tensor(storage).zero_()
        if ordinal not in self._ordinals:
            return

        def give(value: TensorValue, _name: str) -> torch.Tensor:
            slot = slots[id(value)]
            return results[slot] if slot in results else args[slot]

        self._looker.gives(record, give)


class _Taken:
    """Copies what one op takes or returns."""

    def __init__(self, reader: CaptureReader, *, results: bool) -> None:
        self._reader, self._results = reader, results
        self.values: list[Any] | None = None

    def takes(self, record: Record, give: GiveTensor) -> None:
        if not self._results:
            self.values = Clones().of(python_values(self._reader, record.signature.args, record.args, give, ""))

    def gives(self, record: Record, give: GiveTensor) -> None:
        if self._results:
            values = python_values(self._reader, record.signature.results, record.results, give, "result ")
            self.values = Clones().of(values)


def replayed_values(plan: Plan, ordinal: int, *, results: bool) -> list[Any]:
    """What the op at an ordinal takes in a verified replay, or with `results` what it returns, in memory of its own.

    Raises what `observe_ops` raises, and ContentNotCaptured for values that a capture only describes.
    """
    values = observe_ops(plan, (ordinal,), lambda: _Taken(plan.reader, results=results)).observer.values
    assert values is not None, "a replay that ran did not reach the op"
    return values
