"""Decides where the content of a storage that no captured op produced comes from, by the capture's policies.

Four answers: it is in a file that the capture refers to, it is embedded, a recipe replaces it, or it is absent.

A storage belongs to a file if it is an untouched mapping of it (file_mappings.py), or if its content equals a range of
a file that the user named (known_files.py), or, if mappings cannot be read, of the file in its `filename`. Files that a
capture refers to instead of embedding them must still be unchanged at its end: what was removed or replaced is embedded
then, from a descriptor that was kept, and `changed` reports the others. Memory that the program may write, and the file
with it, is embedded at once.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from replayfmt.errors import CaptureFailed, ExternalFileProblem, UsageError
from replayfmt.format.codes import StorageOrigin, ValueKind
from replayfmt.format.external_files import OpenedFile
from replayfmt.format.model import ExternalFile, FileIdentity, FileRange
from replayfmt.format.output import BEYOND_THE_PROGRAM, moved_up
from replayfmt.format.redaction import Redaction
from replayfmt.format.writer import CaptureWriter
from replayfmt.pytorch.tensors.memory import address_of

from ..known_files import KnownFile, KnownFiles, dtypes_in, format_of, hash_of_range, look_at
from ..options import CaptureOptions
from .file_mappings import FileMappings, MappedRange, identity_of
from .storage_content import content_hash, embed, is_monotonous, is_readable, is_synthesized, recipe

DIGESTING = "file-digest"  # prefix of the names of the threads that hash files
_PROGRESS_FROM_BYTES = 1 << 30
_KEPT_OPEN = 64  # files


@dataclass(frozen=True)
class FoundRange:
    """Where a storage's bytes are. `range`: its id in the capture. `mapped`: the storage is that very file's memory."""

    range: int
    mapped: MappedRange | None


@dataclass(frozen=True)
class _Place:
    """A range of a file, as found."""

    path: str
    file_bytes: int
    identity: FileIdentity
    format: str
    offset: int


class _Referenced:
    """A file that the capture refers to: its ranges by id, as (offset, length), and a descriptor of it while that is
    open, else -1."""

    def __init__(self, place: _Place, *, keep: bool) -> None:
        self.place = place
        self.ranges: dict[int, tuple[int, int]] = {}
        self._descriptor = -1
        if keep:
            with suppress(OSError):  # then it is looked at again at the end
                opened = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                self._descriptor = moved_up(opened, BEYOND_THE_PROGRAM)

    def change(self) -> str:
        """What happened to the file at its path, "" if it is what it was."""
        try:
            status = os.stat(self.place.path)
        except OSError as error:
            return f"can no longer be found: {error.strerror}"
        if (status.st_dev, status.st_ino) != (self.place.identity.device, self.place.identity.inode):
            return "was replaced by another file"
        return "" if self._is(status) else "was modified"

    def _is(self, status: os.stat_result) -> bool:
        return identity_of(status) == self.place.identity and status.st_size == self.place.file_bytes

    def embed(self, writer: CaptureWriter) -> bool:
        """Embed the ranges as they were, although the path has another file or none; False if that is not possible."""
        if self._descriptor < 0 or not self._is_open():
            return False
        with mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
            for number, (offset, length) in self.ranges.items():
                with view[offset : offset + length] as part:
                    if not writer.embed_range(number, writer.payload(part)):
                        return False
        return self._is_open()

    def _is_open(self) -> bool:
        """Whether the descriptor is still the unchanged file: the program may have closed it, and opened another."""
        try:
            return self._is(os.fstat(self._descriptor))
        except OSError:
            return False

    def close(self) -> None:
        if self._descriptor >= 0 and self._is_open():
            os.close(self._descriptor)
        self._descriptor = -1


class FileBackedStorages:
    """The files of one capture. Callers hold the recorder's lock."""

    def __init__(self, writer: CaptureWriter, options: CaptureOptions, redaction: Redaction | None) -> None:
        """Raises UsageError if a file that the user named cannot be used."""
        self._writer = writer
        self._policy = options.file_policy
        self._digests = options.file_validation == "digest"
        self._redaction = redaction
        self._mappings = FileMappings()
        self._known_files = KnownFiles(options.known_files)
        self._ids: dict[tuple[str, FileIdentity], int] = {}
        self._referenced: dict[tuple[str, FileIdentity], _Referenced] = {}
        self._names: dict[str, list[str]] = {}  # by redacted name: the paths that have it
        self._writable: set[str] = set()  # paths of files that the program can write through a mapping

    def find(self, storage: torch.UntypedStorage, length: int, foreign: bool) -> FoundRange | None:
        """The range that holds the storage's bytes, or None. `foreign`: torch did not allocate its memory.

        Raises CaptureFailed if the policy forbids known files, or one cannot be embedded or digested as asked.
        """
        mapped = None
        if foreign and storage.device.type == "cpu":
            mapped = self._mappings.find(address_of(storage), length)
        if mapped is not None:
            place = _Place(mapped.path, mapped.file_bytes, mapped.identity, format_of(mapped.path), mapped.offset)
            if mapped.mapping.shared and mapped.mapping.writable:
                self._writable.add(place.path)
                known = self._referenced.get((place.path, place.identity))
                if known is not None and known.embed(self._writer):
                    known.ranges.clear()
            number = self._range(place, storage, length, embedded=place.path in self._writable)
            if number is not None:
                return FoundRange(number, mapped)
        named = self._named(storage, length)
        if named is None and foreign and not self._mappings.available:
            named = self._by_filename(storage, length)
        if named is None:
            return None
        file, offset = named
        number = self._range(_Place(file.path, file.bytes, file.identity, file.format, offset), storage, length)
        return None if number is None else FoundRange(number, None)

    def keep(self, found: FoundRange, alive: Callable[[], object | None]) -> None:
        """`alive` returns something other than None as long as the storage lives."""
        if found.mapped is not None:
            self._mappings.keep(found.mapped, alive)

    def changed(self) -> list[str]:
        """One message for each referenced file that has changed since, saying what happened to it."""
        sentences = []
        for each in self._referenced.values():
            change = each.change() if each.ranges else ""
            if change and not each.embed(self._writer):
                sentences.append(f"{self._shown(each.place.path)} {change}")
            each.close()
        self._referenced.clear()
        return sentences

    # ------------------------------------------------------------------------------------------------------ by content

    def may_know(self, length: int) -> bool:
        """Whether a file that the user named holds content of so many bytes."""
        return self._known_files.has_length(length)

    def _named(self, storage: torch.UntypedStorage, length: int) -> tuple[KnownFile, int] | None:
        if not self.may_know(length):
            return None
        if self._policy == "fail" and is_monotonous(storage):
            return None  # a counter at zero could come from anywhere
        return self._known_files.find(length, content_hash(storage))

    def _by_filename(self, storage: torch.UntypedStorage, length: int) -> tuple[KnownFile, int] | None:
        """The file that a storage says it was made from, if the bytes are the same."""
        if not storage.filename:
            return None
        path = os.path.realpath(storage.filename)
        try:
            file = look_at(path, raw=True)
        except UsageError:  # missing or unreadable: the content is embedded
            return None
        if file.bytes < length or hash_of_range(file, 0, length) != content_hash(storage):
            return None
        return file, 0

    # ------------------------------------------------------------------------------------------------------- recording

    def _range(
        self, place: _Place, storage: torch.UntypedStorage, length: int, *, embedded: bool = False
    ) -> int | None:
        """The id of a range, after applying the policy. None: it cannot be referred to. `embedded`: its bytes have to
        be in the capture."""
        if not _storable(place.path):
            return None
        if self._policy == "fail":
            raise CaptureFailed(
                f"{self._writer.path}: a storage of {length} bytes on {storage.device} is in the file "
                f"{self._shown(place.path)} at {place.offset}, and file-policy=fail allows no content of known files; "
                "capture with another file policy, or load the content from elsewhere"
            )
        file = self._file(place)
        embedded |= self._policy == "capture-ranges"
        payload = embed(self._writer, storage) if embedded and self._policy != "capture-all" else 0
        number = self._writer.range(FileRange(file, place.offset, length, payload))
        if self._policy == "reference" and not payload:
            key = place.path, place.identity
            if key not in self._referenced:
                self._referenced[key] = _Referenced(place, keep=len(self._referenced) < _KEPT_OPEN)
            self._referenced[key].ranges[number] = place.offset, length
        return number

    def _file(self, place: _Place) -> int:
        key = (place.path, place.identity)
        number = self._ids.get(key)
        if number is None:
            digest = self._digest(place) if self._digests else None
            payload = self._embedded(place) if self._policy == "capture-all" else 0
            file = ExternalFile(
                self._shown(place.path), place.file_bytes, place.identity, digest, payload, place.format
            )
            number = self._ids[key] = self._writer.file(file)
        return number

    def _opened(self, place: _Place) -> OpenedFile:
        try:
            opened = OpenedFile(place.path)
        except ExternalFileProblem as error:
            raise CaptureFailed(f"{self._writer.path}: {self._told(str(error))}") from None
        if opened.identity != place.identity:
            opened.close()
            raise self._changed(place)
        return opened

    def _digest(self, place: _Place) -> str:
        with self._opened(place) as opened, _progress(place.path, place.file_bytes) as progress:
            try:
                return opened.digest(progress)
            except ExternalFileProblem as error:
                raise CaptureFailed(f"{self._writer.path}: {self._told(str(error))}") from None

    def _embedded(self, place: _Place) -> int:
        """The payload id of a whole file. Its pages pass through the page cache, not through this process's memory."""
        with self._opened(place), open(place.path, "rb") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
                payload = self._writer.payload(view)
            if identity_of(os.fstat(file.fileno())) != place.identity:
                raise self._changed(place)
        return payload

    def _changed(self, place: _Place) -> CaptureFailed:
        return CaptureFailed(f"{self._writer.path}: the file {self._shown(place.path)} changed while it was captured")

    def _shown(self, path: str) -> str:
        """The path as written in the capture. With redaction, files of the same name in different folders stay
        distinct."""
        if self._redaction is None:
            return path
        name = self._redaction.file(ExternalFile(path, 0)).path
        paths = self._names.setdefault(name, [])
        if path not in paths:
            paths.append(path)
        place = paths.index(path) + 1
        return name if place == 1 else f"{place}/{name}"

    def _told(self, text: str) -> str:
        return text if self._redaction is None else self._redaction.text(text)


def _storable(path: str) -> bool:
    """Whether a capture can store this path: it must be valid Unicode."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def _progress(path: str, length: int) -> Iterator[Callable[[int], None] | None]:
    """A progress bar on stderr for a large file, if that is a terminal."""
    if length < _PROGRESS_FROM_BYTES or sys.stderr is None or sys.stderr.closed or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    # Without rich's refresh thread, which could be mistaken for one of the program's.
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(f"opreplay: digest of {os.path.basename(path)}", total=length)
        yield lambda done: bar.update(task, advance=done, refresh=True)


# The safetensors names of the dtypes whose content is left out if only integers are embedded.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
    "C64": torch.complex64,
}


class FirstContent(NamedTuple):
    """A storage's content: its origin, and the kind and id of its holder (0: none)."""

    origin: StorageOrigin
    kind: ValueKind
    id: int
    found: FoundRange | None = None


ABSENT = FirstContent(StorageOrigin.absent, ValueKind.none, 0)
UNREADABLE = ABSENT._replace()  # it should be recorded but cannot be read


class FirstContents:
    """Decides the first content of each storage. Callers hold the recorder's lock."""

    def __init__(self, writer: CaptureWriter, options: CaptureOptions, files: FileBackedStorages | None) -> None:
        self._writer = writer
        self._policy = options.payload
        self._files = files
        self._recipes = 0
        self._mappings = FileMappings()
        self._dtypes: dict[tuple[str, FileIdentity], dict[tuple[int, int], str]] = {}

    @property
    def recorded(self) -> bool:
        """Whether any content is recorded at all."""
        return self._policy != "none"

    @property
    def exact(self) -> bool:
        """Whether a replay has all content as it was."""
        return self._policy == "full"

    def first(
        self, storage: torch.UntypedStorage, dtype: torch.dtype | None, foreign: bool, private: bool
    ) -> FirstContent:
        """The content at the first use, as `dtype` (None: as bytes). `foreign`: memory that torch did not allocate and
        that may be a file's. `private`: see `is_private`.

        Raises CaptureFailed if it cannot be written, or is in a file although the policy forbids that.
        """
        if not self.recorded:
            loaded = self._loaded_as(storage) if foreign and dtype is torch.uint8 else None
            return ABSENT if loaded is None else self._recipe(storage, loaded, statistics=False)
        if self._files is not None:
            found = self._files.find(storage, storage.nbytes(), foreign)
            if found is not None:
                return FirstContent(StorageOrigin.external_file, ValueKind.range, found.range, found)
        if self._policy == "integers" and foreign and dtype is torch.uint8:
            loaded = self._loaded_as(storage)
            if loaded is None and self._is_of_lost_file(storage):
                return ABSENT  # these bytes may be floats, and there is no way left to tell
            dtype = loaded or dtype
        return self.again(storage, dtype, private)

    def embeds(self, length: int) -> bool:
        """Whether new content of so many bytes is embedded, whatever it is."""
        return self.exact and (self._files is None or not self._files.may_know(length))

    def embedded(self, content: memoryview) -> FirstContent:
        """The content, as it is now, embedded. Raises CaptureFailed."""
        return FirstContent(StorageOrigin.payload, ValueKind.payload, self._writer.payload(content))

    def again(self, storage: torch.UntypedStorage, dtype: torch.dtype | None, private: bool = False) -> FirstContent:
        """The content after a write from outside. UNREADABLE if its memory cannot be read. Raises CaptureFailed."""
        if not self.recorded:
            return ABSENT
        if not private and not is_readable(storage):
            return UNREADABLE
        if self._policy == "integers" and dtype is not None and is_synthesized(dtype):
            return self._recipe(storage, dtype)
        return FirstContent(StorageOrigin.payload, ValueKind.payload, embed(self._writer, storage))

    def _recipe(self, storage: torch.UntypedStorage, dtype: torch.dtype, statistics: bool = True) -> FirstContent:
        self._recipes += 1
        number = self._writer.recipe(recipe(storage, dtype, self._recipes, statistics=statistics))
        return FirstContent(StorageOrigin.initializer, ValueKind.recipe, number)

    def _loaded_as(self, storage: torch.UntypedStorage) -> torch.dtype | None:
        """The dtype that a loader is about to give to bytes that are a tensor in a safetensors file. It views them as
        bytes before it says that they are floats."""
        if storage.device.type != "cpu":
            return None
        found = self._mappings.find(address_of(storage), storage.nbytes())
        if found is None:
            return None
        key = found.path, found.identity
        if key not in self._dtypes:
            self._dtypes[key] = dtypes_in(found.path)
        name = self._dtypes[key].get((found.offset, found.bytes))
        return None if name is None else _DTYPES.get(name)

    def is_private(self, storage: torch.UntypedStorage) -> bool:
        """Whether its bytes are in host memory of this process alone, and in no file."""
        if storage.device.type != "cpu" or not storage.nbytes() or storage.is_shared():
            return False
        return storage.resizable() or self._mappings.holds_no_file(address_of(storage), storage.nbytes())

    def _is_of_lost_file(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is mapped from a file that has since been removed, replaced or written, and whose header is
        therefore lost."""
        if storage.device.type != "cpu" or not storage.nbytes():
            return False
        address, length = address_of(storage), storage.nbytes()
        return self._mappings.find(address, length) is None and self._mappings.is_file(address, length)

    def keep(self, found: FoundRange, alive: Callable[[], object | None]) -> None:
        """`alive` returns something other than None as long as the storage of a found range lives."""
        if self._files is not None:
            self._files.keep(found, alive)

    def changed_files(self) -> list[str]:
        """One message for each file that the capture refers to and that has changed since, saying what happened to
        it."""
        return [] if self._files is None else self._files.changed()
