"""Opens trace files (plain, gzip, tar, tar.gz and zip) as one stream of bytes with a known position in the file.

The JSON inside an archive is found by name, and may itself be compressed with gzip. Nothing is unpacked to disk and
nothing is read whole; of a truncated compressed file, everything that can be decompressed is returned. `RankTrace` says
where one rank's trace is among those of a distributed program. Imports no torch.
"""

from __future__ import annotations

import gzip
import io
import lzma
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import IO, Any

from replayfmt.errors import CaptureNotFound, InvalidCapture
from replayfmt.format.source import Closing
from replayfmt.format.validation import some_of

MOST_RANKS = 1 << 24


@dataclass(frozen=True)
class RankTrace:
    """The trace of `rank`: the file `path`, or the file `member` in that archive. `told` says how the rank is known,
    `world_size` is the minimum number of ranks."""

    path: str
    member: str
    rank: int
    told: str
    world_size: int

    @property
    def name(self) -> str:
        """The file's name, for people."""
        return f"{self.path}: {self.member}" if self.member else self.path


def rank_fields(rank: int | None, world_size: int, place: RankTrace | None) -> dict[str, Any]:
    """The session's rank and world size: from the trace itself, or from its place; None if neither says. Raises
    InvalidCapture if the two differ."""
    if place is not None:
        if rank is not None and rank != place.rank:
            raise InvalidCapture(
                f"{place.name}: is assumed to be rank {place.rank} ({place.told}), but contains rank {rank}; "
                f"rename it, or import it alone without --rank"
            )
        rank, world_size = place.rank, max(world_size, place.world_size)
    return {"rank": rank or 0, "world_size": max(world_size, (rank or 0) + 1)}


Progress = Callable[[int, int], None]  # bytes of the file read so far, and its length
_BLOCK_BYTES = 1 << 20
_SHOWN_NAMES = 16
_GZIP = b"\x1f\x8b"
_LONGEST_HEADER = 1 << 20  # of a tar member: names and attributes
# RuntimeError: a zip's member is encrypted, or compressed with a method that this Python does not support.
_CUT = (
    EOFError,
    zlib.error,
    lzma.LZMAError,
    gzip.BadGzipFile,
    tarfile.TarError,
    zipfile.BadZipFile,
    OSError,
    RuntimeError,
)


def regular_length(path: str | PathLike[str]) -> int:
    """A file's length in bytes. Raises CaptureNotFound if it does not exist or is not a regular file: a pipe cannot be
    read twice, and opening one waits for a writer."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CaptureNotFound(f"{os.fspath(path)}: {reason}; expected a trace file") from error
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "no regular file"
        hint = "; --rank=N or --rank=all imports the traces in it" if stat.S_ISDIR(found.st_mode) else ""
        raise CaptureNotFound(f"{os.fspath(path)}: is {kind}; expected a trace file{hint}")
    return found.st_size


def _damage(error: BaseException) -> str:
    """What is wrong with a file that could be opened but not read to its end, as a clause."""
    if isinstance(error, EOFError):
        return f"the compressed data is cut off: {error}"
    if isinstance(error, gzip.BadGzipFile | zlib.error):
        return f"the gzip data is damaged: {error}"
    return f"{type(error).__name__}: {error}"


class _Headers:
    """A stream of a tar file for tarfile, which would read headers of any declared length whole."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.seek, self.tell = stream.seek, stream.tell

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _LONGEST_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._stream.read(size)


class _Part(io.RawIOBase):
    """A section of a seekable stream: a tar member that is itself compressed with gzip."""

    def __init__(self, stream: IO[bytes], start: int, length: int) -> None:
        super().__init__()
        self._stream, self._start, self._length, self._place = stream, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), max(0, self._length - self._place))
        self._stream.seek(self._start + self._place)
        data = self._stream.read(wanted)
        if wanted and not data:
            raise EOFError(f"{self._length - self._place} bytes of the archive's file are missing")
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


class TraceFile(Closing):
    """The JSON of a trace file as a byte stream. `read` returns b"" at the end; `broken` says why it ended early."""

    def __init__(
        self,
        path: str | PathLike[str],
        wanted: Callable[[str], bool] | None = None,
        progress: Progress | None = None,
        *,
        member: str = "",
    ) -> None:
        """Open it. `member` is the name of one file of an archive, which may be gzip itself; without it, `wanted`
        chooses by name; by default the first that ends in `.json`.

        Raises CaptureNotFound if it cannot be read, InvalidCapture if an archive has no such member.
        """
        self.path = os.fspath(path)
        self.member = ""
        self.broken = ""
        self.bytes_given = 0
        self._start, self._left = 0, -1  # where a tar member begins in the stream, and what is left of it
        self._progress = progress
        if member:
            wanted = member.__eq__
        wanted = wanted or (lambda name: name.endswith(".json"))
        try:
            self.length = regular_length(self.path)
            self._raw: IO[bytes] = open(self.path, "rb")  # noqa: SIM115 - closed by close()
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise CaptureNotFound(f"{self.path}: {reason}; expected a trace file") from error
        self._packed: IO[bytes] = self._raw  # what contains the gzip data
        try:
            self._stream = self._unpacked(wanted)
        except _CUT as error:
            self.close()
            raise InvalidCapture(f"{self.path}: cannot be unpacked: {type(error).__name__}: {error}") from error
        except BaseException:
            self.close()
            raise

    def _unpacked(self, wanted: Callable[[str], bool]) -> IO[bytes]:
        head = self._raw.read(4)
        self._raw.seek(0)
        if head[:2] == b"PK":
            return self._zip_member(zipfile.ZipFile(self._raw), wanted)
        plain: IO[bytes] = self._raw
        if head[:2] == _GZIP:
            plain = self._gzip(self._raw)
            try:
                start = plain.read(512)
            except _CUT:
                start = b""  # truncated within the first bytes: reading from the beginning returns them
            plain.seek(0)
        else:
            start = plain.read(512)
            plain.seek(0)
        if start[257:262] == b"ustar":
            return self._tar_member(plain, wanted)
        if start == bytes(512):
            raise InvalidCapture(
                f"{self.path}: begins with 512 zero bytes: an empty tar archive, or a file that was never written; "
                "expected a trace, or an archive with one in it"
            )
        return plain

    def _gzip(self, packed: IO[bytes]) -> IO[bytes]:
        self._packed = packed
        return gzip.GzipFile(fileobj=packed)  # type: ignore[return-value]

    def _zip_member(self, archive: zipfile.ZipFile, wanted: Callable[[str], bool]) -> IO[bytes]:
        for name in archive.namelist():
            if wanted(name):
                self.member = name
                stream = archive.open(name)
                return self._gzip(stream) if name.endswith(".gz") else stream
        raise self._without_trace(archive.namelist())

    def _tar_member(self, plain: IO[bytes], wanted: Callable[[str], bool]) -> IO[bytes]:
        """The stream itself, positioned at the member's beginning: tarfile returns nothing of a truncated block."""
        archive = tarfile.open(fileobj=_Headers(plain), mode="r:")  # type: ignore[call-overload]  # noqa: SIM115
        names = []
        for member in archive:
            names.append(member.name)
            # macOS adds hidden files (`._name`) of its own.
            if (
                member.isfile()
                and not member.issparse()
                and wanted(member.name)
                and not Path(member.name).name.startswith(".")
            ):
                self.member = member.name
                if member.name.endswith(".gz"):
                    return self._gzip(io.BufferedReader(_Part(plain, member.offset_data, member.size)))
                plain.seek(member.offset_data)
                self._start, self._left = member.offset_data, member.size
                return plain
        raise self._without_trace(names)

    def _without_trace(self, names: list[str]) -> InvalidCapture:
        hint = "; --rank=N or --rank=all imports those of ranks" if any(map(is_json, names)) else ""
        return InvalidCapture(f"{self.path}: the archive has no trace in it; it has {names[:8]}{hint}")

    def read(self, size: int) -> bytes:
        """The next bytes, b"" at the end. Damage ends the stream and is described in `broken`."""
        if self.broken:
            return b""
        if self._left >= 0:
            size = min(size, self._left)
        try:
            data: bytes = self._stream.read(size)
        except _CUT as error:
            self.broken = _damage(error)
            data = self._rest()
        if self._left > 0 and not data and not self.broken:
            self.broken = f"the archive is cut off: {self._left} bytes of {self.member} are missing"
        if self._left >= 0:
            data = data[: self._left]
            self._left -= len(data)
        self.bytes_given += len(data)
        if self._progress is not None:
            self._progress(min(self._raw.tell(), self.length), self.length)
        return data

    def _rest(self) -> bytes:
        """The data that was decompressed before the damage and has not been returned yet."""
        if not isinstance(self._stream, gzip.GzipFile):
            return b""
        self._packed.seek(0)
        decompressor = zlib.decompressobj(wbits=31)
        skip, pieces = self._start + self.bytes_given, io.BytesIO()
        block, data = b"", b""
        while True:
            try:
                if not block and len(data) < _BLOCK_BYTES and not (block := self._packed.read(_BLOCK_BYTES)):
                    break
                data = decompressor.decompress(block, _BLOCK_BYTES)
            except _CUT:
                break  # or the container of the gzip data is itself damaged
            pieces.write(data[skip:])
            skip = max(0, skip - len(data))
            block = decompressor.unconsumed_tail
        return pieces.getvalue()

    def close(self) -> None:
        self._raw.close()


def others_note(path: str | PathLike[str], member: str) -> str:
    """A sentence on which file of an archive was read and which similar ones were not; "" if the file is not an
    archive."""
    if not member:
        return ""
    others = [name for name in archive_names(path)[0] if is_json(name) and name != member]
    read = f"of the archive, {member} was read, its first JSON file"
    if not others:
        return read
    return f"{read}; not read: {shown_names(others)}; --rank=N or --rank=all imports the traces of other ranks"


def shown_names(names: Sequence[str]) -> str:
    """A list of files for people: the first few, and the number of the others."""
    return some_of(names, _SHOWN_NAMES)


def is_json(name: str) -> bool:
    """Whether a file may be a trace, by its name. macOS adds hidden files (`._name`) of its own."""
    return name.endswith((".json", ".json.gz")) and not Path(name).name.startswith(".")


def is_archive(path: str | PathLike[str]) -> bool:
    """Whether a file, by its content, is a zip or a tar, compressed or not."""
    with open(path, "rb") as raw:
        head = raw.read(2)
        raw.seek(0)
        stream: Any = gzip.GzipFile(fileobj=raw) if head == _GZIP else raw
        try:
            return head == b"PK" or stream.read(512)[257:262] == b"ustar"
        except _CUT:
            return False


def archive_names(path: str | PathLike[str]) -> tuple[list[str], str]:
    """The files of an archive as far as it can be read, and what is wrong with it, "" if nothing is."""
    names: dict[str, None] = {}
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return list(dict.fromkeys(archive.namelist())), ""
        with open(path, "rb") as raw:
            packed = raw.read(2) == _GZIP
            raw.seek(0)
            stream: Any = _Headers(gzip.GzipFile(fileobj=raw) if packed else raw)  # type: ignore[arg-type]
            for member in tarfile.open(fileobj=stream, mode="r:"):  # noqa: SIM115
                if member.isfile():
                    names[member.name] = None
    except _CUT as error:
        return list(names), _damage(error)
    return list(names), ""


def archive_texts(
    path: str | PathLike[str], wanted: Callable[[str], bool], limit: int = 64 << 20
) -> tuple[dict[str, bytes], str]:
    """The contents of an archive's members that are wanted by name (an execution trace's Triton sources, for instance),
    up to `limit` bytes in all, and what is wrong with the archive, "" where nothing is. Nothing for a file that is not
    an archive. Raises CaptureNotFound."""
    found: dict[str, bytes] = {}
    left = limit
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for info in archive.infolist():
                    if wanted(info.filename) and info.file_size <= left:
                        found[info.filename] = archive.read(info)
                        left -= info.file_size
        elif tarfile.is_tarfile(path):
            with tarfile.open(path) as tar:
                for member in tar:
                    stream = tar.extractfile(member) if member.isfile() and wanted(member.name) else None
                    if stream is not None and member.size <= left:
                        found[member.name] = stream.read()
                        left -= member.size
    except FileNotFoundError as error:
        raise CaptureNotFound(f"{os.fspath(path)}: no such file; expected a trace file") from error
    except _CUT as error:
        return found, _damage(error)
    return found, ""
