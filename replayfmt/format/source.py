"""Reading bytes and payloads of a capture that may be damaged, truncated, hostile or still growing.

A read returns bytes that are there, or raises one kind of error. A payload is verified against the hash that names it.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, overload

import numpy as np
import zstandard
from xxhash import xxh3_128, xxh3_128_intdigest

from replayfmt.errors import CaptureNotFound, InvalidCapture, UsageError

from .codes import Codec, FrameKind
from .frames import HEADER_BYTES, PAYLOAD_ROW, FrameHeader, align, body_hash, parse_header
from .validation import path_of


class DamagedBody(InvalidCapture):
    """A body is not what its header says was written."""


class Closing:
    """Closed at the end of a `with` block, however that ends."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def fill(fd: int, offset: int, view: memoryview) -> int:
    """Fill `view` with the bytes of an open file from `offset` on; how many there were. Raises OSError."""
    done = 0
    while done < len(view) and (count := os.preadv(fd, [view[done:]], offset + done)):
        done += count
    return done


class Source:
    """A capture's bytes. `length` is the file's length when it was opened; a file that grows is read up to there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a file for reading. Raises CaptureNotFound if there is none or it cannot be read."""
        self.path = path_of("path", path)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise CaptureNotFound(_why_not(self.path, error)) from None
        except ValueError as error:  # a NUL inside the name
            raise CaptureNotFound(f"{self.path!r}: {error}") from None
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
                raise CaptureNotFound(f"{self.path}: is {kind}; expected a capture file")
            self.length = status.st_size
        except BaseException:
            self.close()
            raise

    @property
    def fd(self) -> int:
        """The descriptor, which stays this object's."""
        return self._fd

    def close(self) -> None:
        """Close the descriptor. Closing twice does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, offset: int, length: int, what: str) -> bytes:
        """Exactly `length` bytes from `offset`. Raises InvalidCapture if the file does not have them."""
        if offset + length <= self.length:
            try:
                data = os.pread(self._fd, length, offset)
            except OSError as error:
                raise self._unreadable(offset, error) from None
            if len(data) == length:
                return data
        # More than one read returns, or less than there should be: the slow way decides which.
        self._check_bounds(offset, length, what)
        buffer = bytearray(length)
        self.read_into(offset, memoryview(buffer), what)
        return bytes(buffer)

    def read_into(self, offset: int, view: memoryview, what: str) -> None:
        """Fill `view` with the bytes from `offset`. Raises InvalidCapture if the file does not have them."""
        self._check_bounds(offset, len(view), what)
        try:
            done = fill(self._fd, offset, view)
        except OSError as error:
            raise self._unreadable(offset, error) from None
        if done < len(view):
            raise InvalidCapture(
                f"{self.path}: the file was truncated while it was read: {what} of {len(view)} "
                f"bytes at {offset:#x} has only {done}"
            )

    def _check_bounds(self, offset: int, length: int, what: str) -> None:
        if offset + length > self.length:
            raise InvalidCapture(
                f"{self.path}: {what} of {length} bytes at {offset:#x} runs past the end of the file "
                f"({max(0, self.length - offset)} left)"
            )

    def _unreadable(self, offset: int, error: OSError) -> CaptureNotFound | UsageError:
        if self._fd < 0:
            return UsageError(f"{self.path}: this capture was closed; open it again")
        return CaptureNotFound(f"{self.path}: cannot be read at {offset:#x}: {error.strerror}")

    def where(self, offset: int, header: FrameHeader | None = None) -> str:
        """How errors name a place: `step.opreplay: frame 17 (records 65536..69631) at 0x4f20`."""
        if header is None:
            return f"{self.path}: at {offset:#x}"
        what = header.name
        if header.kind == FrameKind.records:
            what += f" {header.first_ordinal}..{header.first_ordinal + header.count - 1}"
        return f"{self.path}: frame {header.sequence} ({what}) at {offset:#x}"

    def header(self, offset: int) -> FrameHeader:
        """The frame header at `offset`, verified, with a body that fits the file. Raises BadHeader and its like."""
        raw = self.read(offset, min(HEADER_BYTES, max(0, self.length - offset)), "frame header")
        return parse_header(raw, self.where(offset))

    def body(self, offset: int, header: FrameHeader) -> bytes:
        """A frame's body, decompressed, after its padding and hash were verified; of a payload frame only its rows."""
        where = self.where(offset, header)
        begin = offset + HEADER_BYTES
        hashed = header.stored_bytes
        if header.kind == FrameKind.payload:
            hashed = header.count * PAYLOAD_ROW.itemsize
            if hashed > header.stored_bytes:
                raise InvalidCapture(
                    f"{where}: {header.count} payload rows do not fit a body of {header.stored_bytes} bytes"
                )
            self._check_bounds(begin, align(header.stored_bytes), f"frame {header.sequence} (payload): body")
        data = self.read(begin, align(hashed), f"frame {header.sequence} ({header.name}): body")
        body, padding = memoryview(data)[:hashed], data[hashed:]
        if body_hash(body) != header.hash:
            raise DamagedBody(
                f"{where}: the body is damaged: XXH3-128 {body_hash(body):032x}, expected {header.hash:032x}"
            )
        if any(padding):
            raise DamagedBody(f"{where}: the padding after the body is not zero")
        if header.codec == Codec.zstd:
            return decompress(body, header.raw_bytes, where)
        return bytes(body)

    def frame_end(self, offset: int, header: FrameHeader) -> int:
        """Where the next frame begins."""
        return offset + HEADER_BYTES + align(header.stored_bytes)


def decompress(stored: bytes | memoryview, raw_bytes: int, where: str) -> bytes:
    """One whole zstd frame of exactly `raw_bytes`. The caller has bounded `raw_bytes`. Raises InvalidCapture."""
    try:
        # The declared size decides how much is allocated, so it is compared before anything is decompressed.
        declared = zstandard.frame_content_size(stored)
        if declared != raw_bytes:
            raise InvalidCapture(f"{where}: the zstd frame declares {declared} bytes, the header {raw_bytes}")
        data = zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InvalidCapture(f"{where}: cannot be decompressed: {error}") from None
    except MemoryError:
        raise InvalidCapture(f"{where}: not enough memory to decompress {raw_bytes} bytes") from None
    if len(data) != raw_bytes:
        raise InvalidCapture(f"{where}: decompresses to {len(data)} bytes, expected {raw_bytes}")
    return data


def _why_not(path: str, error: OSError) -> str:
    partial = f"{path}.partial"
    if error.errno == errno.ENOENT and os.path.isfile(partial):
        return (
            f"{path}: no such file, but {partial} is there: that capture is still being written or was never "
            f"closed; opreplay-check {partial} explains it, and opreplay-check {partial} --recover {path} makes a "
            "valid capture of it"
        )
    return f"{path}: {(error.strerror or 'cannot be opened').lower()}; expected a capture file"


_MAP_FROM_BYTES = 64 << 10
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class PayloadInfo:
    """A payload's place. `digest` is the XXH3-128 of the raw bytes as 32 hexadecimal digits, high half first."""

    id: int
    raw_bytes: int
    stored_bytes: int
    offset: int
    codec: Codec
    digest: str


class PayloadInput(Sequence[PayloadInfo]):
    """The payloads of one capture, a sequence of PayloadInfo that begins with id 1."""

    def __init__(self, source: Source, rows: np.ndarray) -> None:
        self._source = source
        self._rows = rows
        self._map: mmap.mmap | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> PayloadInfo: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PayloadInfo]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self._rows[index]
        return PayloadInfo(
            int(row["id"]),
            int(row["raw_bytes"]),
            int(row["stored_bytes"]),
            int(row["offset"]),
            Codec(int(row["codec"])),
            f"{int(row['hash_high']):016x}{int(row['hash_low']):016x}",
        )

    def __iter__(self) -> Iterator[PayloadInfo]:
        return (self[i] for i in range(len(self)))

    def info(self, number: int) -> PayloadInfo:
        """A payload by id. Raises IndexError."""
        if not 1 <= number <= len(self):
            raise IndexError(f"{self._source.path}: payload {number} of {len(self)}")
        return self[number - 1]

    @property
    def raw_bytes(self) -> int:
        """Length of all contents together."""
        return int(self._rows["raw_bytes"].sum(dtype=np.uint64))

    def _where(self, info: PayloadInfo) -> str:
        return f"{self._source.path}: payload {info.id} at {info.offset:#x}"

    def _verify(self, info: PayloadInfo, digest: int) -> None:
        if f"{digest:032x}" != info.digest:
            raise InvalidCapture(
                f"{self._where(info)}: the content is damaged: XXH3-128 {digest:032x}, expected {info.digest}"
            )

    def content(self, number: int) -> bytes | memoryview:
        """The verified content."""
        info = self.info(number)
        if info.codec == Codec.none and info.raw_bytes >= _MAP_FROM_BYTES:
            view = self._mapped(info)
            self._verify(info, xxh3_128_intdigest(view))
            return view
        if info.codec == Codec.none:
            data = self._source.read(info.offset, info.stored_bytes, f"payload {number}")
        else:
            data = self._decompressed(info)
        self._verify(info, xxh3_128_intdigest(data))
        return data

    def _mapped(self, info: PayloadInfo) -> memoryview:
        # A map of a file that was truncated since it was opened would end the process, so look before every use.
        if os.fstat(self._source.fd).st_size < info.offset + info.stored_bytes:
            raise InvalidCapture(f"{self._where(info)}: the file was truncated after it was opened")
        if self._map is None:
            self._map = mmap.mmap(self._source.fd, self._source.length, access=mmap.ACCESS_READ)
        return memoryview(self._map)[info.offset : info.offset + info.stored_bytes]

    def read_into(self, number: int, buffer: bytearray | memoryview) -> None:
        """Fill a writable buffer of exactly raw_bytes."""
        info = self.info(number)
        view = memoryview(buffer)
        if view.nbytes != info.raw_bytes:
            raise ValueError(f"a buffer of {view.nbytes} bytes for payload {number} of {info.raw_bytes}")
        if not info.raw_bytes:
            self._verify(info, xxh3_128_intdigest(b""))
            return
        view = view.cast("B")
        if info.codec == Codec.none:
            self._source.read_into(info.offset, view, f"payload {number}")
            self._verify(info, xxh3_128_intdigest(view))
            return
        data = self._decompressed(info)
        view[:] = data
        self._verify(info, xxh3_128_intdigest(data))

    def verify(self, number: int) -> None:
        """Read a payload in pieces, and raise InvalidCapture unless content and padding are as they must be."""
        info = self.info(number)
        digest = xxh3_128()
        if info.codec == Codec.zstd:
            digest.update(self._decompressed(info))
        else:
            for start in range(0, info.stored_bytes, _CHUNK_BYTES):
                count = min(_CHUNK_BYTES, info.stored_bytes - start)
                digest.update(self._source.read(info.offset + start, count, f"payload {number}"))
        self._verify(info, digest.intdigest())
        end = info.offset + info.stored_bytes
        padding = self._source.read(end, align(end) - end, "padding")
        if any(padding):
            raise InvalidCapture(f"{self._where(info)}: the padding after the payload is not zero")

    def _decompressed(self, info: PayloadInfo) -> bytes:
        stored = self._source.read(info.offset, info.stored_bytes, f"payload {info.id}")
        return decompress(stored, info.raw_bytes, self._where(info))

    def close(self) -> None:
        """Release the map; views returned keep it alive until they are gone."""
        if self._map is not None:
            # Where a view is still in use, the map goes with the last one.
            with suppress(BufferError):
                self._map.close()
            self._map = None
