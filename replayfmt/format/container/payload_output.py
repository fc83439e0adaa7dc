"""The writer's payloads: content-addressed, the large written at once, the small collected into one frame.

The memory of a running program may change while it is read. So a copy is stored, with the hash of the copy: small
payloads are copied as a whole, a large one piece by piece on its way into the file, behind the small ones that wait.
The header and rows of its frame are written last, when its hash is known. Rows are kept as packed structs: they, and a
map from content to id, are all that stays in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import zstandard
from xxhash import xxh3_128, xxh3_128_intdigest

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
_COPIED_BYTES = 1 << 20  # of a large payload at once
_NOTHING = memoryview(b"")


def _bytes_of(data: Buffer) -> memoryview:
    view = memoryview(data)
    if not view.nbytes:
        return _NOTHING
    return view if view.format == "B" and view.ndim == 1 and view.c_contiguous else view.cast("B")


def _is_steady(view: memoryview) -> bool:
    """Whether nobody can change what is there."""
    return isinstance(view.obj, bytes)


def _steady(view: memoryview) -> memoryview:
    return view if _is_steady(view) else memoryview(bytes(view))


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
        self.count = 0  # of payloads: the largest id

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
        """The id of this content; of some mixture, if the buffer changes during the call. `whole` is entered where
        something is changed; hashing and compressing can be interrupted."""
        given = _bytes_of(data)
        view = _steady(given) if len(given) < SMALL_BYTES else given
        digest = xxh3_128_intdigest(view)
        known = self._ids.get(digest)
        if known is not None:
            return known
        stored, codec = view, Codec.none
        if self._compresses(view):
            if not _is_steady(view):
                view = _steady(view)
                digest = xxh3_128_intdigest(view)
            data = self._compressor.compress(view)
            if len(data) < len(view):
                stored, codec = memoryview(data), Codec.zstd
        with whole():
            self.count += 1
            number = self.count
            self.raw_bytes += len(view)
            self._waiting.append((digest, len(view), len(stored), codec))
            if len(stored) < SMALL_BYTES:
                self._waiting_data += stored
                self._waiting_data += bytes(-len(stored) % ALIGNMENT)
                if len(self._waiting_data) >= BATCH_BYTES or len(self._waiting) >= BATCH_ROWS:
                    self.flush()
            else:
                digest = self.flush(stored)
            return self._ids.setdefault(digest, number)

    def _compresses(self, view: memoryview) -> bool:
        """Whether a sample of some content gets short enough."""
        if not COMPRESS_FROM_BYTES <= len(view) <= COMPRESS_UP_TO_BYTES:
            return False
        piece, last = min(_SAMPLE_BYTES, len(view)) // _SAMPLE_PIECES, _SAMPLE_PIECES - 1
        starts = [(len(view) - piece) * i // last for i in range(_SAMPLE_PIECES)]
        sample = b"".join(view[start : start + piece] for start in starts)
        return len(self._compressor.compress(sample)) < COMPRESS_BELOW * len(sample)

    def flush(self, large: memoryview = _NOTHING) -> int:
        """Write what waits as one frame, `large` (the last one waiting) included. Returns the hash of the last one."""
        if not self._waiting:
            return 0
        frame = self._frames.position
        begin = frame + HEADER_BYTES
        rows_bytes = len(self._waiting) * PAYLOAD_ROW.itemsize
        offset = begin + align(rows_bytes)
        parts: list[Buffer] = []
        late = bool(large) and not _is_steady(large)
        if late:
            self._frames.append([bytes(offset - frame), self._waiting_data])
            self._waiting[-1] = (self._append_copy(large), *self._waiting[-1][1:])
        else:
            parts = [self._waiting_data, large, bytes(-len(large) % ALIGNMENT)]
        rows = np.zeros(len(self._waiting), PAYLOAD_ROW)
        body_bytes = 0
        first_id = len(self._rows) // PAYLOAD_ROW.itemsize + 1
        for index, (digest, raw, stored, codec) in enumerate(self._waiting):
            rows[index] = (*halves(digest), offset, stored, raw, first_id + index, codec, 0)
            body_bytes = offset + stored - begin
            offset += align(stored)
        packed = rows.tobytes()
        parts = [packed, bytes(-rows_bytes % ALIGNMENT), *parts]
        at = frame if late else None
        self._frames.write_payloads(body_bytes, len(self._waiting), parts, body_hash(packed), at)
        self._rows += packed
        self._waiting = []
        self._waiting_data = bytearray()
        return digest

    def _append_copy(self, live: memoryview) -> int:
        """Append content that may change meanwhile, and its padding. Returns the hash of what was written."""
        written = xxh3_128()
        for start in range(0, len(live), _COPIED_BYTES):
            piece = bytes(live[start : start + _COPIED_BYTES])
            written.update(piece)
            self._frames.append([piece])
        self._frames.append([bytes(-len(live) % ALIGNMENT)])
        return written.intdigest()
