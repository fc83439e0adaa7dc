"""Payloads of a capture that is read: where they are, and their content, verified against the hash that names them.

Content goes into the caller's buffer with pread, or comes as a view of a private map of the file where it is large and
not compressed. A compressed payload is decompressed only to the length its row declares, which contents.py bounded.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from xxhash import xxh3_128, xxh3_128_intdigest

from replayfmt.errors import InvalidCapture

from ..codes import Codec
from .frames import align
from .source import Source, decompress

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
