"""Changing captures behind valid checks: what a hostile file is, as against a damaged one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import flatbuffers
import numpy as np
import zstandard

from replayfmt.format import flatbuffer_tables
from replayfmt.format.codes import Codec, FrameKind
from replayfmt.format.definition_tables import COLUMNS, NUMBERED, TABLES, encode_tables
from replayfmt.format.flatbuffer_tables import RECORDS
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

from .bindings import bindings


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
        header = parse_header(data[offset : offset + HEADER_BYTES], "test")
        if header.kind == FrameKind.index:
            return data[:PREAMBLE_BYTES], frames
        body = data[offset + HEADER_BYTES : offset + HEADER_BYTES + header.stored_bytes]
        rest = b""
        if header.kind == FrameKind.payload:
            rows = header.count * PAYLOAD_ROW.itemsize
            body, rest = body[:rows], body[rows:]
        elif header.codec == Codec.zstd:
            body = zstandard.ZstdDecompressor().decompress(body, max_output_size=header.raw_bytes)
        frames.append(Frame(header, body, rest))
        offset += HEADER_BYTES + align(header.stored_bytes)


def join(
    preamble: bytes,
    frames: list[Frame],
    *,
    index: bool = True,
    renumber: bool = True,
    compressed: frozenset[FrameKind] = frozenset(),
) -> bytes:
    """A file of these frames with every check valid. Payload offsets are moved along where frames moved; index and
    trailer are made to fit. Bodies are stored uncompressed, but those of the `compressed` kinds."""
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
        raw, codec = len(body), Codec.none
        if frame.header.kind in compressed:
            hashed = body = zstandard.ZstdCompressor().compress(body)
            codec = Codec.zstd
        header = replace(frame.header, hash=body_hash(hashed))
        if renumber:
            header = replace(header, sequence=sequence, stored_bytes=len(body), raw_bytes=raw, codec=codec)
        out += header.pack() + body + bytes(-len(body) % 64)
        rows += pack_frame_row(offset, header, next_storage)
        if header.kind == FrameKind.records:
            records += header.count
            born = flatbuffer_tables.root(frame.body, RECORDS, "test").column("storage_bytes")
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


def change(
    path: Path, kind: FrameKind, edit: Callable[[Frame], Frame | None], which: int = 0, *, index: bool = True
) -> None:
    """Rewrite the capture at `path` with its `which`-th frame of a kind edited (None: left out), checks valid."""
    preamble, frames = split(path.read_bytes())
    position = [i for i, frame in enumerate(frames) if frame.header.kind == kind][which]
    edited = edit(frames[position])
    frames[position : position + 1] = [] if edited is None else [edited]
    path.write_bytes(join(preamble, frames, index=index))


# ------------------------------------------------------------------------------------------------- columns, rebuilt


def records_columns(body: bytes) -> dict[str, np.ndarray | int]:
    table = flatbuffer_tables.root(body, RECORDS, "test")
    columns: dict[str, np.ndarray | int] = {}
    for name, field in RECORDS.fields.items():
        value = table.column(name) if field.type.startswith("[") else table.scalar(name)
        if value is not None:
            columns[name] = value.copy() if isinstance(value, np.ndarray) else value
    return columns


def records_body(columns: dict[str, np.ndarray | int]) -> bytes:
    """Written by the bindings of flatc, which take whatever they are given."""
    builder = flatbuffers.Builder(1024)
    places = {name: builder.CreateNumpyVector(v) for name, v in columns.items() if isinstance(v, np.ndarray)}
    generated = bindings("Records")
    generated.Start(builder)
    for name, value in columns.items():
        add = "Add" + "".join(part.capitalize() for part in name.split("_"))
        getattr(generated, add)(builder, places.get(name, value))
    builder.Finish(generated.End(builder))
    return bytes(builder.Output())


def change_records(path: Path, edit: Callable[[dict], None], which: int = 0) -> None:
    def change_frame(frame: Frame) -> Frame:
        columns = records_columns(frame.body)
        edit(columns)
        return replace(frame, body=records_body(columns))

    change(path, FrameKind.records, change_frame, which)


def tables_of(body: bytes) -> tuple[list[bytes], dict[str, np.ndarray], dict[str, int]]:
    table = flatbuffer_tables.root(body, TABLES, "test")
    strings = [text.encode() for text in table.strings("strings")]
    empty = {name: np.zeros(0, np.int64) for name in COLUMNS}
    columns = {**empty, **{n: c.copy() for n in COLUMNS if (c := table.column(n)) is not None}}
    firsts = {family: table.scalar(f"first_{family}") or 1 for family in NUMBERED}
    return strings, columns, firsts


Tables = tuple[list[bytes], dict[str, np.ndarray], dict[str, int]]


def change_tables(path: Path, edit: Callable[[Tables], None]) -> None:
    """Put all definitions into one frame before the records, edited."""
    preamble, frames = split(path.read_bytes())
    positions = [i for i, frame in enumerate(frames) if frame.header.kind == FrameKind.tables]
    tables = tables_of(frames[positions[-1]].body)
    edit(tables)
    frames[positions[0]] = replace(frames[positions[0]], body=bytes(encode_tables(*tables)))
    for position in reversed(positions[1:]):
        del frames[position]
    path.write_bytes(join(preamble, frames))


def change_header(
    path: Path, edit: Callable[[FrameHeader], FrameHeader], kind: FrameKind, which: int = 0, index: bool = True
) -> None:
    """Change a frame's header as it stands, its check valid; lengths are taken as given."""
    preamble, frames = split(path.read_bytes())
    position = [i for i, frame in enumerate(frames) if frame.header.kind == kind][which]
    data = bytearray(join(preamble, frames, index=index))
    offset = PREAMBLE_BYTES
    for frame in frames[:position]:
        offset += HEADER_BYTES + align(len(frame.body) + len(frame.payload_data))
    header = parse_header(data[offset : offset + HEADER_BYTES], "test")
    data[offset : offset + HEADER_BYTES] = edit(header).pack()
    path.write_bytes(data)


def rename_kernel(path: Path, old: str, **texts: str) -> None:
    """Give the kernel called `old` another `name`, `overload` or `schema`, whatever it is."""

    def edit(tables: Tables) -> None:
        strings, columns, _firsts = tables
        row = columns["kernel_name"].tolist().index(strings.index(old.encode()) + 1)
        for part, text in texts.items():
            if text.encode(errors="surrogatepass") not in strings:
                strings.append(text.encode(errors="surrogatepass"))
            columns[f"kernel_{part}"][row] = strings.index(text.encode(errors="surrogatepass")) + 1

    change_tables(path, edit)
