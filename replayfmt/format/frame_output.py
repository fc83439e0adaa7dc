"""Writing a capture's frames and payloads: frames one after the other, then the index and the trailer.

Payloads are content-addressed: large ones are written at once, small ones are collected into one frame.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager

import numpy as np
import zstandard
from xxhash import xxh3_128, xxh3_128_intdigest

from .codes import MINOR_VERSION, Codec, FrameKind
from .contents import encode_summary
from .frames import (
    ALIGNMENT,
    FLAG_CONSOLIDATED,
    FLAG_REQUIRED,
    FRAME_ROW,
    FREE_DEFINITION_BYTES,
    FREE_FRAME_BYTES,
    HEADER_BYTES,
    MAX_EXPANSION,
    PAYLOAD_ROW,
    REQUIRED_KINDS,
    TRAILER_BYTES,
    FrameHeader,
    Trailer,
    align,
    body_hash,
    halves,
    pack_frame_row,
)
from .model import Summary
from .output import Output

Buffer = bytes | bytearray | memoryview

_COMPRESSED_KINDS = frozenset({FrameKind.tables, FrameKind.records})
_COMPRESSED_BYTES = 128 << 10  # of a frame at once


def _compressor() -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=1, write_content_size=True, write_checksum=False)


class FrameOutput:
    """Frames on their way into a file. `next_ordinal` and `next_storage` are what the next frame begins with."""

    def __init__(self, output: Output, minor: int = MINOR_VERSION) -> None:
        """`minor` is the version that the file says it has."""
        self._output = output
        self._minor = minor
        self._rows = bytearray()
        self._definitions = {0: [0, 0], FLAG_CONSOLIDATED: [0, 0]}  # stored and raw bytes by flags
        self.next_ordinal = 0
        self.next_storage = 1

    @property
    def position(self) -> int:
        """Where the next frame begins."""
        return self._output.position

    def adopt(self, rows: bytes, next_ordinal: int, next_storage: int) -> None:
        """Take over frames that are in the file already, given their FrameRows."""
        self._rows = bytearray(rows)
        for row in np.frombuffer(rows, FRAME_ROW):
            if row["kind"] == FrameKind.tables:
                self._count_definitions(int(row["flags"]), int(row["stored_bytes"]), int(row["raw_bytes"]))
        self.next_ordinal, self.next_storage = next_ordinal, next_storage

    @staticmethod
    def compress(body: memoryview) -> Generator[None, None, bytes]:
        """A frame's body compressed; yields between parts of the work."""
        compressing = _compressor().compressobj(size=len(body))  # of its own: others may be written meanwhile
        parts = []
        for begin in range(0, len(body), _COMPRESSED_BYTES):
            yield
            parts.append(compressing.compress(body[begin : begin + _COMPRESSED_BYTES]))
        return b"".join((*parts, compressing.flush()))

    def write(
        self,
        kind: FrameKind,
        body: Buffer,
        compressed: bytes | None = None,
        *,
        count: int = 0,
        flags: int = 0,
        storages: int = 0,
    ) -> None:
        """Append a frame, of which the writer may have `compressed` the body. `count` records and `storages` are what
        it adds to the capture. Raises CaptureFailed."""
        stored, codec = body, Codec.none
        if kind in _COMPRESSED_KINDS:
            compressed = compressed or _compressor().compress(body)
            if len(compressed) < len(body) and self._may_expand(kind, flags, len(compressed), len(body)):
                stored, codec = compressed, Codec.zstd
        self._append(
            kind,
            flags,
            len(stored),
            len(body),
            count,
            codec,
            body_hash(stored),
            [stored, bytes(-len(stored) % ALIGNMENT)],
        )
        self.next_ordinal += count
        self.next_storage += storages

    def _may_expand(self, kind: FrameKind, flags: int, stored_bytes: int, raw_bytes: int) -> bool:
        """Whether readers accept a frame that is compressed so far; others are stored as they are."""
        if raw_bytes > FREE_FRAME_BYTES + MAX_EXPANSION * stored_bytes:
            return False
        if kind != FrameKind.tables:
            return True
        stored, raw = self._definitions[flags & FLAG_CONSOLIDATED]
        return raw + raw_bytes <= FREE_DEFINITION_BYTES + MAX_EXPANSION * (stored + stored_bytes)

    def write_payloads(
        self, stored_bytes: int, count: int, parts: Sequence[Buffer], digest: int, at: int | None = None
    ) -> None:
        """Append a frame of `count` payloads. `parts` are its body of `stored_bytes` with padding, or the beginning of
        it, and the caller appends the rest to the file; `digest` is the hash of its rows. `at`: the rest was appended
        already, and header and beginning take the place of zeros there."""
        self._append(FrameKind.payload, 0, stored_bytes, stored_bytes, count, Codec.none, digest, parts, at)

    def append(self, parts: Sequence[Buffer]) -> None:
        """Append a part of a frame that `write_payloads` completes."""
        self._output.write(parts)

    def _count_definitions(self, flags: int, stored_bytes: int, raw_bytes: int) -> None:
        counted = self._definitions[flags & FLAG_CONSOLIDATED]
        counted[0] += stored_bytes
        counted[1] += raw_bytes

    def _append(
        self,
        kind: FrameKind,
        flags: int,
        stored_bytes: int,
        raw_bytes: int,
        count: int,
        codec: Codec,
        digest: int,
        parts: Sequence[Buffer],
        at: int | None = None,
    ) -> None:
        flags |= FLAG_REQUIRED if kind in REQUIRED_KINDS else 0
        offset = self._output.position if at is None else at
        header = FrameHeader(
            kind,
            flags,
            len(self._rows) // FRAME_ROW.itemsize,
            stored_bytes,
            raw_bytes,
            self.next_ordinal,
            count,
            self._minor,
            codec,
            digest,
        )
        self._output.write([header.pack(), *parts], at)
        if kind == FrameKind.tables:
            self._count_definitions(flags, stored_bytes, raw_bytes)
        if kind != FrameKind.index:
            self._rows += pack_frame_row(offset, header, self.next_storage)

    def finish(self, tables: Buffer | None, summary: Summary, payload_rows: bytes) -> None:
        """Append consolidated definitions, summary, index and trailer. The file is complete afterwards."""
        if tables is not None:
            self.write(FrameKind.tables, tables, flags=FLAG_CONSOLIDATED)
        self.write(FrameKind.summary, encode_summary(summary))
        self.end(payload_rows)

    def end(self, payload_rows: bytes) -> None:
        """Append index and trailer. The file is complete afterwards."""
        body = bytes(self._rows) + payload_rows
        offset = self._output.position
        self.write(FrameKind.index, body)
        length = HEADER_BYTES + align(len(body))
        self._output.write(
            [
                Trailer(
                    offset,
                    length,
                    offset + length + TRAILER_BYTES,
                    self.next_ordinal,
                    len(self._rows) // FRAME_ROW.itemsize,
                    len(payload_rows) // PAYLOAD_ROW.itemsize,
                ).pack()
            ]
        )


SMALL_BYTES = 64 << 10  # below it a payload is copied and waits for others
BATCH_BYTES = 1 << 20  # that many waiting bytes are written
BATCH_ROWS = 4096
COMPRESS_BELOW = 0.7  # of the sample's length
COMPRESS_FROM_BYTES = 512
COMPRESS_UP_TO_BYTES = 64 << 20  # larger payloads stay mappable, and need no second buffer of their size
_SAMPLE_BYTES = 16 << 10
_SAMPLE_PIECES = 4
_COPIED_BYTES = 1 << 20  # of a large payload at once; what is not longer is copied whole
_NOTHING = memoryview(b"")


class _Scratch(bytearray):
    """Memory that payloads are copied to, one after the other: fresh memory costs more than all else here."""


def _bytes_of(data: Buffer) -> memoryview:
    view = memoryview(data)
    if not view.nbytes:
        return _NOTHING
    return view if view.format == "B" and view.ndim == 1 and view.c_contiguous else view.cast("B")


def _is_steady(view: memoryview) -> bool:
    """Whether nobody can change what is there."""
    return isinstance(view.obj, bytes | _Scratch)


class PayloadOutput:
    def __init__(self, frames: FrameOutput) -> None:
        self._frames = frames
        self._ids: dict[int, int] = {}
        self._rows = bytearray()
        self._waiting: list[tuple[int, int, int, int]] = []  # hash, raw bytes, stored bytes, codec
        self._waiting_data = bytearray()
        self._compressor = _compressor()
        self._scratch: _Scratch | None = None
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
        view = _bytes_of(data)
        if _is_steady(view) or len(view) > _COPIED_BYTES:
            return self._add(view, whole)
        scratch, self._scratch = self._scratch or _Scratch(_COPIED_BYTES), None  # a signal handler may add one, too
        copy = memoryview(scratch)[: len(view)]
        copy[:] = view
        number = self._add(copy, whole)
        self._scratch = scratch
        return number

    def _add(self, view: memoryview, whole: Callable[[], AbstractContextManager[None]]) -> int:
        digest = xxh3_128_intdigest(view)
        known = self._ids.get(digest)
        if known is not None:
            return known
        stored, codec = view, Codec.none
        if len(view) <= _SAMPLE_BYTES and _is_steady(view):  # all of it is the sample
            data = self._compressor.compress(view) if len(view) >= COMPRESS_FROM_BYTES else view
            if len(data) < COMPRESS_BELOW * len(view):
                stored, codec = memoryview(data), Codec.zstd
        elif self._compresses(view):
            if not _is_steady(view):
                view = memoryview(bytes(view))
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
