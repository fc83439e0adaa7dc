"""Opening trace files: plain, gzip, tar, tar.gz and zip, as one stream of bytes with a known place in the file.

The JSON inside an archive is found by name. Nothing is unpacked to disk and nothing is read whole; a compressed file
that was cut off gives what can be decompressed, and says so.
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
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import IO, Any

from replayfmt.errors import CaptureNotFound, InvalidCapture

Progress = Callable[[int, int], None]  # bytes of the file read so far, and its length
_BLOCK_BYTES = 1 << 20
_SHOWN_NAMES = 16
_LONGEST_HEADER = 1 << 20  # of a tar member: names and attributes
# RuntimeError: a zip's member is encrypted, or compressed in a way that this Python does not know.
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
    """How long a file is, in bytes. Raises CaptureNotFound where there is none, or it is no regular file: a pipe cannot
    be read twice, and opening one waits for somebody to write to it."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CaptureNotFound(f"{os.fspath(path)}: {reason}; expected a trace file") from error
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "no regular file"
        raise CaptureNotFound(f"{os.fspath(path)}: is {kind}; expected a trace file")
    return found.st_size


def _damage(error: BaseException) -> str:
    """What is wrong with a file that could be opened, but not read to its end, as a clause."""
    if isinstance(error, EOFError):
        return f"the compressed data is cut off: {error}"
    if isinstance(error, gzip.BadGzipFile | zlib.error):
        return f"the gzip data is damaged: {error}"
    return f"{type(error).__name__}: {error}"


class _Headers:
    """A tar file's stream for tarfile, which reads headers of any declared length whole."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.seek, self.tell = stream.seek, stream.tell

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _LONGEST_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._stream.read(size)


class TraceFile:
    """The JSON of a trace file as a byte stream. `read` gives b"" at the end; `broken` says why it ended early."""

    def __init__(
        self, path: str | PathLike[str], wanted: Callable[[str], bool] | None = None, progress: Progress | None = None
    ) -> None:
        """Open it. `wanted` chooses among an archive's members by name; by default the first that ends in `.json`.

        Raises CaptureNotFound where it cannot be read, InvalidCapture where an archive has no such member.
        """
        self.path = os.fspath(path)
        self.member = ""
        self.broken = ""
        self.bytes_given = 0
        self._start, self._left = 0, -1  # where a tar member begins in the stream, and what is left of it
        self._progress = progress
        wanted = wanted or (lambda name: name.endswith(".json"))
        try:
            self.length = regular_length(self.path)
            self._raw: IO[bytes] = open(self.path, "rb")  # noqa: SIM115 - closed by close()
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise CaptureNotFound(f"{self.path}: {reason}; expected a trace file") from error
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
        if head[:2] == b"\x1f\x8b":
            plain = gzip.GzipFile(fileobj=self._raw)  # type: ignore[assignment]
            try:
                start = plain.read(512)
            except _CUT:
                start = b""  # cut off within the first bytes: reading from the beginning gives what there is
            plain.seek(0)
        else:
            start = plain.read(512)
            plain.seek(0)
        if start[257:262] == b"ustar":
            return self._tar_member(plain, wanted)
        return plain

    def _zip_member(self, archive: zipfile.ZipFile, wanted: Callable[[str], bool]) -> IO[bytes]:
        for name in archive.namelist():
            if wanted(name):
                self.member = name
                return archive.open(name)
        raise InvalidCapture(f"{self.path}: the archive has no trace in it; it has {archive.namelist()[:8]}")

    def _tar_member(self, plain: IO[bytes], wanted: Callable[[str], bool]) -> IO[bytes]:
        """The stream itself, at the member's begin: tarfile gives nothing of a block that is cut off."""
        archive = tarfile.open(fileobj=_Headers(plain), mode="r:")  # type: ignore[call-overload]  # noqa: SIM115
        names = []
        for member in archive:
            names.append(member.name)
            # Hidden files (`._name`) are what macOS adds for its own.
            if (
                member.isfile()
                and not member.issparse()
                and wanted(member.name)
                and not Path(member.name).name.startswith(".")
            ):
                self.member, self._start, self._left = member.name, member.offset_data, member.size
                plain.seek(self._start)
                return plain
        raise InvalidCapture(f"{self.path}: the archive has no trace in it; it has {names[:8]}")

    def read(self, size: int) -> bytes:
        """The next bytes, b"" at the end. Damage ends the stream and is told in `broken`."""
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
        """What could be decompressed before the damage, and was not given yet."""
        if not isinstance(self._stream, gzip.GzipFile):
            return b""
        self._raw.seek(0)
        decompressor = zlib.decompressobj(wbits=31)
        skip, pieces = self._start + self.bytes_given, io.BytesIO()
        block = self._raw.read(_BLOCK_BYTES)
        while True:
            try:
                data = decompressor.decompress(block, _BLOCK_BYTES)
            except zlib.error:
                break
            pieces.write(data[skip:])
            skip = max(0, skip - len(data))
            block = decompressor.unconsumed_tail
            if not block and len(data) < _BLOCK_BYTES and not (block := self._raw.read(_BLOCK_BYTES)):
                break
        return pieces.getvalue()

    def close(self) -> None:
        """Close the file."""
        self._raw.close()

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, *_exception: Any) -> None:
        self.close()


def others_note(path: str | PathLike[str], member: str) -> str:
    """A sentence on which file of an archive was read and which like it were not; "" for a file that is no archive."""
    if not member:
        return ""
    others = [
        name
        for name in archive_names(path)
        if name.endswith(Path(member).suffix) and name != member and not Path(name).name.startswith(".")
    ]
    read = f"of the archive, {member} was read, its first JSON file"
    if not others:
        return read
    more = f" and {len(others) - _SHOWN_NAMES} more" if len(others) > _SHOWN_NAMES else ""
    return f"{read}; not read, unpack them to import each: {', '.join(others[:_SHOWN_NAMES])}{more}"


def archive_names(path: str | PathLike[str]) -> list[str]:
    """The files of an archive, as far as it can be read."""
    names: list[str] = []
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return archive.namelist()
        with open(path, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            stream: Any = _Headers(gzip.GzipFile(fileobj=raw) if packed else raw)  # type: ignore[arg-type]
            names += (member.name for member in tarfile.open(fileobj=stream, mode="r:") if member.isfile())  # noqa: SIM115
    except _CUT:
        pass  # the trace itself was read; what is after it is cut off
    return names


def archive_texts(
    path: str | PathLike[str], wanted: Callable[[str], bool], limit: int = 64 << 20
) -> tuple[dict[str, bytes], str]:
    """The contents of an archive's members that are wanted by name (an execution trace's Triton sources, for instance),
    up to `limit` bytes in all, and what is wrong with the archive, "" where nothing is. Nothing for a file that is no
    archive. Raises CaptureNotFound."""
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
