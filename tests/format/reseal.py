"""Changing captures behind valid checks: what a hostile file is, as against a damaged one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import zstandard

from replayfmt.format.codes import Codec, FrameKind
from replayfmt.format.frames import (
    FRAME_ROW,
    HEADER_BYTES,
    PAYLOAD_ROW,
    PREAMBLE_BYTES,
    TRAILER_BYTES,
    FrameHeader,
    Trailer,
    align,
    body_hash,
    pack_frame_row,
    parse_header,
)
from replayfmt.format.layouts import RECORDS
from replayfmt.format import flat


@dataclass
class Frame:
    """A frame in pieces: its header, and its body after decompression."""

    header: FrameHeader
    body: bytes
    payload_data: bytes = b""  # of a payload frame: what follows the rows


def split(data: bytes) -> tuple[bytes, list[Frame]]:
    """The preamble and every frame of a closed capture, the index apart."""
    frames = []
    offset = PREAMBLE_BYTES
    while True:
        header = parse_header(data[offset:offset + HEADER_BYTES], "test")
        if header.kind == FrameKind.index:
            return data[:PREAMBLE_BYTES], frames
        body = data[offset + HEADER_BYTES:offset + HEADER_BYTES + header.stored_bytes]
        rest = b""
        if header.kind == FrameKind.payload:
            rows = header.count * PAYLOAD_ROW.itemsize
            body, rest = body[:rows], body[rows:]
        elif header.codec == Codec.zstd:
            body = zstandard.ZstdDecompressor().decompress(body, max_output_size=header.raw_bytes)
        frames.append(Frame(header, body, rest))
        offset += HEADER_BYTES + align(header.stored_bytes)


def join(preamble: bytes, frames: list[Frame], *, index: bool = True, renumber: bool = True) -> bytes:
    """A file of these frames with every check valid. Payload offsets are moved along where frames moved; index and
    trailer are made to fit. Bodies are stored uncompressed."""
    out = bytearray(preamble)
    rows, payload_rows = bytearray(), bytearray()
    next_storage, records = 1, 0
    for sequence, frame in enumerate(frames):
        offset = len(out)
        body = frame.body + frame.payload_data
        hashed = frame.body if frame.header.kind == FrameKind.payload else body
        if frame.header.kind == FrameKind.payload:
            table = np.frombuffer(frame.body, PAYLOAD_ROW).copy()
            begin = offset + HEADER_BYTES + align(len(frame.body))
            if len(table):
                table["offset"] += np.uint64((begin - int(table["offset"][0])) % 2**64)
            hashed = table.tobytes()
            body = hashed + frame.payload_data
            payload_rows += hashed
        header = replace(frame.header, hash=body_hash(hashed))
        if renumber:
            header = replace(header, sequence=sequence, stored_bytes=len(body), raw_bytes=len(body), codec=Codec.none)
        out += header.pack() + body + bytes(-len(body) % 64)
        rows += pack_frame_row(offset, header, next_storage)
        if header.kind == FrameKind.records:
            records += header.count
            born = flat.root(frame.body, RECORDS, "test").column("storage_bytes")
            next_storage += 0 if born is None else len(born)
    if index:
        seal_index(out, bytes(rows), bytes(payload_rows), records)
    return bytes(out)


def seal_index(out: bytearray, rows: bytes, payload_rows: bytes, records: int) -> None:
    """Append an index of these rows and a trailer."""
    body = rows + payload_rows
    offset = len(out)
    frames, payloads = len(rows) // FRAME_ROW.itemsize, len(payload_rows) // PAYLOAD_ROW.itemsize
    header = FrameHeader(FrameKind.index, 0, frames, len(body), len(body), records, 0, 0, Codec.none, body_hash(body))
    out += header.pack() + body + bytes(-len(body) % 64)
    trailer = Trailer(offset, len(out) - offset, len(out) + TRAILER_BYTES, records, frames, payloads)
    out += trailer.pack()


def change(path: Path, kind: FrameKind, edit: Callable[[Frame], Frame | None], which: int = 0, *,
           index: bool = True) -> None:
    """Rewrite the capture at `path` with its `which`-th frame of a kind edited (None: left out), checks valid."""
    preamble, frames = split(path.read_bytes())
    position = [i for i, frame in enumerate(frames) if frame.header.kind == kind][which]
    edited = edit(frames[position])
    frames[position:position + 1] = [] if edited is None else [edited]
    path.write_bytes(join(preamble, frames, index=index))
