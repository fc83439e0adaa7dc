"""Writing frames one after the other, and the index and trailer that end a capture.

Keeps one FrameRow for each frame. The writer and recovery both write through it, so that a recovered capture ends like
any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import zstandard

from ..codes import MINOR_VERSION, Codec, FrameKind
from ..model import Summary
from ..summary import encode_summary
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
    pack_frame_row,
)
from .output import Output

Buffer = bytes | bytearray | memoryview

_COMPRESSED_KINDS = frozenset({FrameKind.tables, FrameKind.records})


class FrameOutput:
    """Frames on their way into a file. `next_ordinal` and `next_storage` are what the next frame begins with."""

    def __init__(self, output: Output, minor: int = MINOR_VERSION) -> None:
        """`minor` is the version that the file says it has."""
        self._output = output
        self._minor = minor
        self._rows = bytearray()
        self._definitions = {0: [0, 0], FLAG_CONSOLIDATED: [0, 0]}  # stored and raw bytes by flags
        self._compressor = zstandard.ZstdCompressor(level=1, write_content_size=True, write_checksum=False)
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

    def write(self, kind: FrameKind, body: Buffer, *, count: int = 0, flags: int = 0, storages: int = 0) -> None:
        """Append a frame. `count` records and `storages` are what it adds to the capture. Raises CaptureFailed."""
        stored, codec = body, Codec.none
        if kind in _COMPRESSED_KINDS:
            compressed = self._compressor.compress(body)
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
