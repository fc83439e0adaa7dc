"""The writer's payloads: content-addressed, the large written at once, the small collected into one frame.

Small payloads are copied when they are given, because their memory belongs to a running program; a large one is written
from the caller's buffer without a copy, and takes the small ones that wait along in its frame. Rows are kept as packed
structs: they, and a map from content to id, are all that stays in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import zstandard
from xxhash import xxh3_128_intdigest

from ..codes import Codec
from .frame_output import Buffer, FrameOutput
from .frames import ALIGNMENT, HEADER_BYTES, PAYLOAD_ROW, align, body_hash, halves

SMALL_BYTES = 64 << 10  # below it a payload is copied and waits for others
BATCH_BYTES = 1 << 20  # that many waiting bytes are written
BATCH_ROWS = 4096
COMPRESS_BELOW = 0.7  # of the sample's length
COMPRESS_FROM_BYTES = 512
COMPRESS_UP_TO_BYTES = 64 << 20  # larger payloads stay mappable, and need no second buffer of their size
_SAMPLE_BYTES = 64 << 10
_SAMPLE_PIECES = 4


def _bytes_of(data: Buffer) -> memoryview:
    view = memoryview(data)
    if not view.nbytes:
        return memoryview(b"")
    return view if view.format == "B" and view.ndim == 1 and view.c_contiguous else view.cast("B")


class PayloadOutput:
    """Payloads of one capture, on their way into its frames."""

    def __init__(self, frames: FrameOutput) -> None:
        self._frames = frames
        self._ids: dict[int, int] = {}
        self._rows = bytearray()
        self._waiting: list[tuple[int, int, int, int]] = []  # hash, raw bytes, stored bytes, codec
        self._waiting_data = bytearray()
        self._compressor = zstandard.ZstdCompressor(level=1, write_content_size=True, write_checksum=False)
        self.raw_bytes = 0

    @property
    def count(self) -> int:
        """How many payloads there are: the largest id."""
        return len(self._ids)

    def length(self, number: int) -> int:
        """How many bytes of content a payload has. Raises ValueError for an id that is none."""
        if not 1 <= number <= self.count:
            raise ValueError(f"payload {number} is not there; there are {self.count}")
        written = len(self._rows) // PAYLOAD_ROW.itemsize
        if number > written:
            return self._waiting[number - written - 1][1]
        return int(np.frombuffer(self._rows, PAYLOAD_ROW, 1, (number - 1) * PAYLOAD_ROW.itemsize)["raw_bytes"][0])

    def rows(self) -> bytes:
        """The PayloadRow structs of everything written, sorted by id."""
        return bytes(self._rows)

    def add(self, data: Buffer, whole: Callable[[], AbstractContextManager[None]]) -> int:
        """The id of this content. The buffer must not change during the call, and may afterwards. `whole` is entered
        where something is changed; hashing and compressing can be interrupted."""
        view = _bytes_of(data)
        digest = xxh3_128_intdigest(view)
        known = self._ids.get(digest)
        if known is not None:
            return known
        stored, codec = self._compressed(view)
        with whole():
            number = self._ids[digest] = len(self._ids) + 1
            self.raw_bytes += len(view)
            self._waiting.append((digest, len(view), len(stored), codec))
            if len(stored) < SMALL_BYTES:
                self._waiting_data += stored
                self._waiting_data += bytes(-len(stored) % ALIGNMENT)
                if len(self._waiting_data) >= BATCH_BYTES or len(self._waiting) >= BATCH_ROWS:
                    self.flush()
            else:
                self.flush(stored)
        return number

    def _compressed(self, view: memoryview) -> tuple[bytes | memoryview, int]:
        """What to store of some content, and its codec."""
        if COMPRESS_FROM_BYTES <= len(view) <= COMPRESS_UP_TO_BYTES:
            sample: bytes | memoryview = view
            if len(view) > _SAMPLE_BYTES:
                piece, last = _SAMPLE_BYTES // _SAMPLE_PIECES, _SAMPLE_PIECES - 1
                starts = [(len(view) - piece) * i // last for i in range(_SAMPLE_PIECES)]
                sample = b"".join(view[start : start + piece] for start in starts)
            if len(self._compressor.compress(sample)) < COMPRESS_BELOW * len(sample):
                data = self._compressor.compress(view)
                if len(data) < len(view):
                    return data, Codec.zstd
        return view, Codec.none

    def flush(self, large: bytes | memoryview = b"") -> None:
        """Write what waits as one frame, `large` (the last one waiting, not copied) included."""
        if not self._waiting:
            return
        rows = np.zeros(len(self._waiting), PAYLOAD_ROW)
        rows_bytes = rows.nbytes
        begin = self._frames.position + HEADER_BYTES
        offset = begin + align(rows_bytes)
        body_bytes = 0
        first_id = len(self._rows) // PAYLOAD_ROW.itemsize + 1
        for index, (digest, raw, stored, codec) in enumerate(self._waiting):
            rows[index] = (*halves(digest), offset, stored, raw, first_id + index, codec, 0)
            body_bytes = offset + stored - begin
            offset += align(stored)
        packed = rows.tobytes()
        parts: list[Buffer] = [
            packed,
            bytes(-rows_bytes % ALIGNMENT),
            self._waiting_data,
            large,
            bytes(-len(large) % ALIGNMENT),
        ]
        self._frames.write_payloads(body_bytes, len(self._waiting), parts, body_hash(packed))
        self._rows += packed
        self._waiting = []
        self._waiting_data = bytearray()
