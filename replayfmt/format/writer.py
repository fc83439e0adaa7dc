"""Writing a capture: frames in order while the program runs, index and trailer at the end.

The writer keeps definitions, one row per frame and per payload, and counts; records leave it with every call. It is not
safe for use from several threads at once: the recorder's lock is its lock.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import zstandard

from .codes import MINOR_VERSION, Codec, FrameKind
from .columns import Bounds, RecordColumns, encode_records
from .frames import (
    FLAG_CONSOLIDATED,
    FLAG_REQUIRED,
    FRAME_ROW,
    HEADER_BYTES,
    MAX_BODY_BYTES,
    REQUIRED_KINDS,
    TRAILER_BYTES,
    FrameHeader,
    Trailer,
    align,
    body_hash,
    pack_frame_row,
    pack_preamble,
)
from .interning import Definitions
from .model import Device, Generator, Kernel, Scope, Session, Signature, Summary, TensorMeta
from .output import Output
from .payload_output import PayloadOutput
from .session import encode_session
from .summary import Tally, encode_summary

_TEXT_FLUSH_BYTES = 32 << 20  # that many bytes of new strings are written before more come

Buffer = bytes | bytearray | memoryview


class CaptureWriter:
    """One capture being written, to `path` plus `.partial` until `close` completes it."""

    def __init__(self, path: str | os.PathLike[str], session: Session, *, force: bool = False) -> None:
        """Create the file and write its head. Raises OutputExists, or CaptureFailed where it cannot be written."""
        head = encode_session(session)
        preamble = pack_preamble(session.session_id)
        self._output = Output(path, force)
        self._closed = False
        self._recovered = False
        self._definitions = Definitions()
        self._frames = bytearray()
        self._compressor = zstandard.ZstdCompressor(level=1, write_content_size=True, write_checksum=False)
        self._next_ordinal = 0
        self._next_storage = 1
        self._tally = Tally()
        self._payloads = PayloadOutput(lambda: self._output.position, self._write_payload_frame)
        self._output.write([preamble])
        self._write_frame(FrameKind.head, head)

    @property
    def path(self) -> str:
        return self._output.path

    # ----------------------------------------------------------------------------------------------- definitions

    def string(self, text: str) -> int:
        self._output.check()
        number = self._definitions.string(text)
        if self._definitions.new_text_bytes > _TEXT_FLUSH_BYTES:
            self._write_definitions()
        return number

    def device(self, device: Device) -> int:
        self._output.check()
        return self._definitions.device(device)

    def kernel(self, kernel: Kernel) -> int:
        self._output.check()
        return self._definitions.kernel(kernel)

    def scope(self, parent: int, name: str) -> int:
        """The id of the scope `name` inside scope `parent` (0: top level)."""
        self._output.check()
        return self._definitions.scope(Scope(parent, name))

    def meta(self, meta: TensorMeta) -> int:
        self._output.check()
        return self._definitions.meta(meta)

    def signature(self, signature: Signature) -> int:
        """The id of a signature. Raises ValueError where it breaks a rule of the format."""
        self._output.check()
        number = self._definitions.signature(signature)
        if self._definitions.new_text_bytes > _TEXT_FLUSH_BYTES:
            self._write_definitions()
        return number

    def generator(self, generator: Generator) -> int:
        """A new generator id; generators have no content that could be the same."""
        self._output.check()
        return self._definitions.generator(generator)

    # -------------------------------------------------------------------------------------------------- content

    def payload(self, data: Buffer) -> int:
        """The id of this content, which is written at once (a small one with the next ones, at the latest before the
        next records). The buffer is only read during the call."""
        self._output.check()
        return self._payloads.add(data)

    def records(self, columns: RecordColumns) -> None:
        """Write one frame of records, and before it the definitions and payloads it may use. No records: no frame.

        Raises ValueError where the columns contradict each other, CaptureFailed where the file cannot be written.
        """
        self._output.check()
        definitions = self._definitions
        bounds = Bounds(definitions.count("signature"), definitions.count("scope"), definitions.count("meta"),
                        definitions.count("device"), self._payloads.count, self._next_storage)
        encoded = encode_records(columns, bounds, definitions.slot_counts)
        if not encoded.count:
            if encoded.storages:
                raise ValueError("storages without a record that bears them")
            return
        if len(encoded.body) > MAX_BODY_BYTES:
            raise ValueError(f"{encoded.count} records take {len(encoded.body)} bytes in one frame; "
                             f"the limit is {MAX_BODY_BYTES}: write fewer at a time")
        self._payloads.flush()
        self._write_definitions()
        self._write_frame(FrameKind.records, encoded.body, count=encoded.count)
        self._next_ordinal += encoded.count
        self._next_storage += encoded.storages
        self._tally.add(encoded.signature, encoded.storages, encoded.absent_storages)

    def flush(self) -> None:
        """Write waiting payloads and definitions."""
        self._output.check()
        self._payloads.flush()
        self._write_definitions()

    def close(self, ended_ns: int) -> None:
        """Complete the capture and give it its final name. `ended_ns` counts from the session's start, 0 means not
        known. Closing twice does nothing. Raises CaptureFailed where the file could not be completed."""
        if self._closed:
            return
        self.flush()
        if (any(self._definitions.count(family) for family in ("string", "generator"))
                and self._definitions.encoded_bytes <= MAX_BODY_BYTES):
            self._write_frame(FrameKind.tables, self._definitions.encode(True), flags=FLAG_CONSOLIDATED)
        self._write_frame(FrameKind.summary, encode_summary(self._summary(ended_ns)))
        self._write_index()
        self._output.finish()
        self._closed = True

    def abandon(self) -> None:
        """Close the descriptor and leave the `.partial` as it is."""
        self._output.release()

    def _summary(self, ended_ns: int) -> Summary:
        definitions = self._definitions
        return self._tally.summary(
            definitions.column("signature_kind"), definitions.column("signature_kernel"), definitions.count("kernel"),
            definitions.unsupported, self._payloads.raw_bytes, ended_ns, self._recovered)

    # --------------------------------------------------------------------------------------------------- frames

    def _write_definitions(self) -> None:
        if self._definitions.pending():
            self._write_frame(FrameKind.tables, self._definitions.encode(False))

    def _write_frame(self, kind: FrameKind, body: Buffer, *, count: int = 0, flags: int = 0) -> None:
        stored: Buffer = body
        codec = Codec.none
        if kind in (FrameKind.tables, FrameKind.records):
            compressed = self._compressor.compress(body)
            if len(compressed) < len(body):
                stored, codec = compressed, Codec.zstd
        self._append(kind, flags, len(stored), len(body), count, codec, body_hash(stored),
                     [stored, bytes(-len(stored) % 64)])

    def _write_payload_frame(self, kind: FrameKind, stored_bytes: int, count: int, parts: list[Buffer],
                             digest: int) -> None:
        self._append(kind, 0, stored_bytes, stored_bytes, count, Codec.none, digest, parts)

    def _append(self, kind: FrameKind, flags: int, stored_bytes: int, raw_bytes: int, count: int, codec: Codec,
                digest: int, parts: Sequence[Buffer]) -> None:
        if kind in REQUIRED_KINDS:
            flags |= FLAG_REQUIRED
        sequence = len(self._frames) // FRAME_ROW.itemsize
        offset = self._output.position
        header = FrameHeader(kind, flags, sequence, stored_bytes, raw_bytes, self._next_ordinal, count, MINOR_VERSION,
                             codec, digest)
        self._output.write([header.pack(), *parts])
        if kind != FrameKind.index:
            self._frames += pack_frame_row(offset, header, self._next_storage)

    def _write_index(self) -> None:
        body = bytes(self._frames) + self._payloads.rows()
        offset = self._output.position
        self._write_frame(FrameKind.index, body)
        length = HEADER_BYTES + align(len(body))
        trailer = Trailer(offset, length, offset + length + TRAILER_BYTES, self._next_ordinal,
                          len(self._frames) // FRAME_ROW.itemsize, self._payloads.count)
        self._output.write([trailer.pack()])
