"""Heads, indexes, frames and compressed bodies made to do harm behind valid checks, and fuzzing there."""

from __future__ import annotations

import random
import resource
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import flatbuffers
import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from replayfmt.errors import InvalidCapture, OpReplayError, UnsupportedVersion
from replayfmt.format import flatbuffer_tables
from replayfmt.format.codes import Codec, FrameKind, RecordKind, ValueKind
from replayfmt.format.contents import encode_summary
from replayfmt.format.definition_tables import TABLES
from replayfmt.format.flatbuffer_tables import HEAD, RECORDS, SUMMARY, TableLayout
from replayfmt.format.frames import (
    FRAME_ROW,
    HEADER_BYTES,
    MAX_BODY_BYTES,
    PAYLOAD_ROW,
    PREAMBLE_BYTES,
    body_hash,
    pack_preamble,
    parse_header,
    parse_trailer,
)
from replayfmt.format.maintenance import check_capture, recover_capture
from replayfmt.format.reader import open_capture

from .bindings import bindings
from .reading import read_all, refused
from .reseal import Frame, change, change_header, join, split
from .samples import SESSION, write_everything, write_everything_again, write_small

V = ValueKind


# ------------------------------------------------------------------------------------------------ head and summary


def _strings_head(**pairs: str) -> bytes:
    head, pair = bindings("Head"), bindings("KeyValue")

    builder = flatbuffers.Builder(64)
    made = []
    for key, value in pairs.items():
        places = builder.CreateString(key.rstrip("_")), builder.CreateString(value)
        pair.Start(builder)
        pair.AddKey(builder, places[0])
        pair.AddValue(builder, places[1])
        made.append(pair.End(builder))
    builder.StartVector(4, len(made), 4)
    for place in reversed(made):
        builder.PrependUOffsetTRelative(place)
    vector = builder.EndVector()
    texts = [builder.CreateString(text) for text in (SESSION.session_id, "p", "1")]
    head.Start(builder)
    head.AddSessionId(builder, texts[0])
    head.AddProducer(builder, texts[1])
    head.AddProducerVersion(builder, texts[2])
    head.AddSettings(builder, vector)
    builder.Finish(head.End(builder))
    return bytes(builder.Output())


@pytest.mark.parametrize("value", ["", "{", "[1]", "{}", "nope", "9" * 5000, "[" * 3000, "1e999", "'x'", '"a" "b"'])
def test_session_values_that_are_no_json_scalars_are_refused(capture: Path, value: str) -> None:
    change(capture, FrameKind.head, lambda frame: replace(frame, body=_strings_head(x=value)))
    refused(capture, "settings: 'x' is")


def test_a_session_value_given_twice_is_refused(capture: Path) -> None:
    change(capture, FrameKind.head, lambda frame: replace(frame, body=_strings_head(x="1", x_="2")))
    refused(capture, "'x' is not one scalar")


def test_a_session_other_than_the_preambles_is_refused(capture: Path) -> None:
    data = bytearray(capture.read_bytes())
    data[:PREAMBLE_BYTES] = pack_preamble("11111111-1111-1111-1111-111111111111")
    capture.write_bytes(data)
    refused(capture, "the preamble says 11111111")


def test_a_session_id_that_is_no_uuid_is_refused(capture: Path) -> None:
    body = _strings_head().replace(SESSION.session_id.encode(), b"X" * 36)
    change(capture, FrameKind.head, lambda frame: replace(frame, body=body))
    refused(capture, "not a lower-case UUID")


def test_a_summary_that_does_not_add_up_is_refused(capture: Path) -> None:
    good = open_capture(capture).summary

    def put(wrong: dict) -> None:
        body = bytes(encode_summary(replace(good, **wrong)))
        change(capture, FrameKind.summary, lambda frame: replace(frame, body=body))

    for wrong, match in (
        ({"records": {RecordKind.op: 1}}, "counts 1 records"),
        ({"kernel_calls": {1: 99}}, "99 kernel calls"),
        ({"kernel_calls": {77: 3}}, "does not have"),
    ):
        put(wrong)
        refused(capture, match)
    for wrong in ({"storages": 99}, {"absent_storages": 0}, {"storage_payload_bytes": 1}, {"unsupported": {"x": 3}}):
        put(wrong)
        with pytest.raises(InvalidCapture, match=f"the summary is wrong: {next(iter(wrong))}"):
            check_capture(capture)


# ------------------------------------------------------------------------------------------------------ FlatBuffers


@pytest.mark.guarantee("bounds")
@pytest.mark.parametrize("layout", [HEAD, TABLES, RECORDS, SUMMARY], ids=lambda layout: layout.name)
def test_any_bytes_as_a_flatbuffer_are_refused_or_stay_inside_the_buffer(layout: TableLayout) -> None:
    chosen = random.Random(1)
    for _case in range(3000):
        size = chosen.randrange(0, 200)
        words = [
            chosen.choice([0, 1, 2, 4, 8, 12, 16, size, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, chosen.randrange(256)])
            for _ in range(size // 4 + 1)
        ]
        data = struct.pack(f"<{len(words)}I", *words)[:size]
        try:
            _read_every_field(data, layout)
        except InvalidCapture:
            continue


def _read_every_field(data: bytes, layout: TableLayout) -> int:
    """How many bytes all fields together handed out."""
    table = flatbuffer_tables.root(data, layout, "test")
    total = 0
    for name, field in layout.fields.items():
        if field.type == "string":
            total += len(table.string(name) or "")
        elif field.type == "[string]":
            total += sum(map(len, table.strings(name)))
        elif field.type == "[KeyValue]":
            total += sum(len(key) + len(value) for key, value in table.pairs(name))
        elif field.type.startswith("["):
            column = table.column(name)
            total += 0 if column is None else column.nbytes
        else:
            table.scalar(name)
    assert total <= len(data)
    return total


@pytest.mark.guarantee("decompression")
def test_strings_that_all_point_to_the_same_bytes_cannot_expand(capture: Path) -> None:
    builder = flatbuffers.Builder(64)
    shared = builder.CreateString("x" * 100_000)
    builder.StartVector(4, 100_000, 4)
    for _ in range(100_000):
        builder.PrependUOffsetTRelative(shared)
    vector = builder.EndVector()
    tables = bindings("Tables")

    tables.Start(builder)
    tables.AddFirstString(builder, 1)
    tables.AddStrings(builder, vector)
    builder.Finish(tables.End(builder))
    body = bytes(builder.Output())
    change(capture, FrameKind.tables, lambda frame: replace(frame, body=body))
    change(capture, FrameKind.tables, lambda frame: None, which=-1)
    refused(capture, "overlap other fields")


# -------------------------------------------------------------------------------------------------- frames and index


@pytest.mark.slow
@pytest.mark.parametrize("index", [True, False], ids=["index", "scan"])
@pytest.mark.parametrize(
    "changes",
    [
        {"stored_bytes": 1 << 63, "raw_bytes": 1 << 63},
        {"stored_bytes": (1 << 64) - 1, "raw_bytes": (1 << 64) - 1},
        {"raw_bytes": 5},
        {"count": 0},
        {"count": 7},
        {"count": 0xFFFFFFFF},
        {"first_ordinal": 1},
        {"first_ordinal": 1 << 62},
        {"count": (1 << 20) + 1},
        {"flags": 0},
        {"flags": 3},
        {"codec": 9},
        {"codec": 1},
        {"sequence": 77},
        {"kind": 0},
        {"kind": 4},
        {"kind": 1},
        {"raw_bytes": MAX_BODY_BYTES + 1, "codec": 1},
        {"raw_bytes": MAX_BODY_BYTES, "codec": 1},
    ],
)
def test_headers_that_promise_what_is_not_there_are_refused(
    capture: Path, changes: dict[str, int], index: bool
) -> None:
    change_header(capture, lambda header: replace(header, **changes), FrameKind.records, index=index)
    try:
        complete, records, _rest = read_all(capture)
    except OpReplayError as error:
        assert str(capture) in str(error)
    else:
        assert not complete and records == []  # a torn tail, as far as anyone can tell
    with pytest.raises(InvalidCapture):
        check_capture(capture)


def _reindexed(path: Path, edit: Callable[[np.ndarray, np.ndarray], None], **changes: int) -> None:
    """Rewrite the index, with its hash and the trailer valid."""
    data = bytearray(path.read_bytes())
    trailer = parse_trailer(data[-64:], len(data), "test")
    header = parse_header(data[trailer.index_offset : trailer.index_offset + HEADER_BYTES], "test")
    begin = trailer.index_offset + HEADER_BYTES
    frames = np.frombuffer(bytes(data[begin:]), FRAME_ROW, trailer.frames).copy()
    payloads = np.frombuffer(bytes(data[begin + frames.nbytes :]), PAYLOAD_ROW, trailer.payloads).copy()
    edit(frames, payloads)
    body = frames.tobytes() + payloads.tobytes()
    data[begin : begin + len(body)] = body
    data[trailer.index_offset : begin] = replace(header, hash=body_hash(body)).pack()
    data[-64:] = replace(trailer, **changes).pack()
    path.write_bytes(data)


def _row(which: str, name: str, row: int, value: int) -> Callable[[np.ndarray, np.ndarray], None]:
    def edit(frames: np.ndarray, payloads: np.ndarray) -> None:
        (frames if which == "frames" else payloads)[name][row] = value

    return edit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "changes"),
    [
        *(
            (_row("frames", name, 3, value), {})
            for name in ("offset", "stored_bytes", "raw_bytes", "first_ordinal", "first_storage")
            for value in (0, 65, 1 << 40, (1 << 64) - 1)
        ),
        *(
            (_row("frames", name, 3, value), {})
            for name in ("count", "kind", "flags")
            for value in (0, 1, 6, 9, 0xFFFF)
        ),
        *(
            (_row("payloads", name, row, value), {})
            for name in ("offset", "stored_bytes", "raw_bytes")
            for row in (0, 4)
            for value in (0, 64, 1 << 40, (1 << 64) - 1)
        ),
        *((_row("payloads", name, 1, value), {}) for name in ("id", "codec", "reserved") for value in (1, 7, 0xFFFF)),
        (lambda frames, payloads: None, {"records": 1}),
        (lambda frames, payloads: None, {"records": 1 << 50}),
        (lambda frames, payloads: None, {"frames": 1}),
        (lambda frames, payloads: None, {"payloads": 0}),
        (lambda frames, payloads: None, {"frames": 0xFFFFFFFF, "payloads": 0xFFFFFFFF}),
        (lambda frames, payloads: None, {"index_offset": 64}),
        (lambda frames, payloads: None, {"index_bytes": 0}),
        (lambda frames, payloads: frames.__setitem__(slice(None), frames[::-1]), {}),
        (lambda frames, payloads: payloads.__setitem__(slice(None), payloads[::-1]), {}),
    ],
)
def test_an_index_that_lies_behind_valid_checks_changes_nothing_that_is_read(
    capture: Path, edit: Callable[[np.ndarray, np.ndarray], None], changes: dict[str, int]
) -> None:
    before, data = read_all(capture), capture.read_bytes()
    _reindexed(capture, edit, **changes)
    if capture.read_bytes() == data:
        return
    try:
        after = read_all(capture)
    except OpReplayError as error:
        assert str(capture) in str(error)
    else:
        assert after[1:] == before[1:]
    with pytest.raises(InvalidCapture):
        check_capture(capture)


def _payload_rows(edit: Callable[[np.ndarray], None]) -> Callable[[Frame], Frame]:
    def change_frame(frame: Frame) -> Frame:
        rows = np.frombuffer(frame.body, PAYLOAD_ROW).copy()
        edit(rows)
        return replace(frame, body=rows.tobytes())

    return change_frame


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("id", 0),
        ("id", 5),
        ("offset", 64),
        ("offset", 0),
        ("stored_bytes", 0),
        ("stored_bytes", 1 << 61),
        ("raw_bytes", 1 << 61),
        ("codec", 2),
        ("reserved", 1),
        ("hash_low", 1),
    ],
)
@pytest.mark.parametrize("index", [True, False], ids=["index", "scan"])
def test_payload_rows_that_lie_are_refused(capture: Path, name: str, value: int, index: bool) -> None:
    def edit(rows: np.ndarray) -> None:
        rows[name][2] = value

    change(capture, FrameKind.payload, _payload_rows(edit), index=index)
    with pytest.raises(InvalidCapture, match="payload"):
        read_all(capture)
    with pytest.raises(InvalidCapture, match="payload"):
        check_capture(capture)


# ------------------------------------------------------------------------------------------------ decompression bombs


def _limited(call: Callable[[], object], grow_bytes: int = 700 << 20) -> None:
    """Run with a bounded address space: an allocation beyond it fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + grow_bytes, hard))
    try:
        call()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _bombed(path: Path, kind: FrameKind, stored: bytes, raw_bytes: int) -> None:
    """Put `stored` into the first frame of a kind, as a compressed body that declares `raw_bytes`."""
    preamble, frames = split(path.read_bytes())
    position = [i for i, frame in enumerate(frames) if frame.header.kind == kind][0]
    head, tail = join(preamble, frames[:position], index=False), frames[position].header
    header = replace(
        tail, sequence=position, stored_bytes=len(stored), raw_bytes=raw_bytes, codec=Codec.zstd, hash=body_hash(stored)
    )
    path.write_bytes(head + header.pack() + stored + bytes(-len(stored) % 64))


def _zeros(count: int) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=count)
    block = bytes(1 << 20)
    parts = [compressor.compress(block) for _ in range(count >> 20)]
    return b"".join(parts) + compressor.flush()


@pytest.mark.guarantee("decompression")
@pytest.mark.slow
@pytest.mark.parametrize("kind", [FrameKind.tables, FrameKind.records])
def test_decompression_bombs_are_refused_before_they_are_decompressed(capture: Path, kind: FrameKind) -> None:
    bomb = _zeros(4 << 30)
    assert len(bomb) < 1 << 20
    for raw_bytes, match in ((4 << 30, "the limit is"), (len(bomb) + 64, "the zstd frame declares 4294967296 bytes")):
        _bombed(capture, kind, bomb, raw_bytes)

        def refused(match: str = match) -> None:
            with pytest.raises(InvalidCapture, match=match):
                read_all(capture)
            with pytest.raises(InvalidCapture, match=match):
                check_capture(capture)

        _limited(refused)
        write_everything_again(capture)


@pytest.mark.parametrize(
    ("stored", "match"),
    [
        (zstandard.ZstdCompressor().compress(bytes(99)) + b"x", "cannot be decompressed"),
        (zstandard.ZstdCompressor().compress(bytes(99)) * 2, "cannot be decompressed"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(99)), "the zstd frame declares"),
        (zstandard.ZstdCompressor().compress(bytes(99))[:-3], "cannot be decompressed"),
        (b"not zstd at all" * 3, "cannot be decompressed"),
        (b"", "cannot be decompressed"),
    ],
)
def test_only_one_whole_zstd_frame_with_its_size_is_accepted(capture: Path, stored: bytes, match: str) -> None:
    _bombed(capture, FrameKind.records, stored, 99)
    with pytest.raises(InvalidCapture, match=match):
        read_all(capture)


@pytest.mark.slow
def test_a_compressed_payload_is_bounded_too(capture: Path) -> None:
    preamble, frames = split(capture.read_bytes())
    position = [i for i, frame in enumerate(frames) if frame.header.kind == FrameKind.payload][0]
    frame = frames[position]
    bomb = _zeros(4 << 30)
    rows = np.frombuffer(frame.body, PAYLOAD_ROW)[:1].copy()
    rows["codec"], rows["stored_bytes"] = Codec.zstd, len(bomb)
    gap = bytes(-rows.nbytes % 64)
    for raw_bytes, match in ((4 << 30, "the limit is"), (1 << 20, "the zstd frame declares")):
        rows["raw_bytes"] = raw_bytes
        header = replace(frame.header, count=1)
        frames[position] = Frame(header, rows.tobytes(), gap + bomb)
        for index in (True, False):
            capture.write_bytes(join(preamble, frames[: position + 1], index=index))

            def refused(match: str = match) -> None:
                with pytest.raises(InvalidCapture, match=match):
                    read_all(capture)
                with pytest.raises(InvalidCapture, match=match):
                    open_capture(capture).read_payload_into(1, bytearray(1 << 20))
                with pytest.raises(InvalidCapture):
                    check_capture(capture)

            _limited(refused)


# ----------------------------------------------------------------------------------------------------------- fuzzing

# fmt: off
_INTERESTING = [
    0, 1, 2, 4, 8, 63, 64, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 1 << 31, (1 << 31) - 1, (1 << 32) - 1,
    (1 << 32) - 16, 1 << 40, 1 << 60, (1 << 60) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1,
]
# fmt: on
_mutation = st.tuples(
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 20),
    st.sampled_from([1, 2, 4, 8]),
    st.one_of(st.sampled_from(_INTERESTING), st.integers(0, (1 << 64) - 1), st.integers(0, 300)),
)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[bytes, list[Frame]]]:
    folder = tmp_path_factory.mktemp("seeds")
    write_everything(folder / "everything")
    write_small(folder / "small")
    return [split((folder / name).read_bytes()) for name in ("everything", "small")]


@pytest.mark.guarantee("bounds")
@pytest.mark.slow
@settings(max_examples=250)
@given(which=st.integers(0, 1), mutations=st.lists(_mutation, min_size=1, max_size=4), index=st.booleans())
@example(which=0, mutations=[(0, 0, 4, (1 << 32) - 1)], index=True)
def test_no_mutation_behind_valid_checks_escapes_as_anything_but_one_error(
    seeds: list[tuple[bytes, list[Frame]]],
    tmp_path_factory: pytest.TempPathFactory,
    which: int,
    mutations: list[tuple[int, int, int, int]],
    index: bool,
) -> None:
    preamble, frames = seeds[which]
    frames = list(frames)
    for where, place, width, value in mutations:
        number = where % len(frames)
        body = bytearray(frames[number].body)
        place = place % max(1, len(body) - width + 1)
        body[place : place + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
        frames[number] = replace(frames[number], body=bytes(body))
    path = tmp_path_factory.getbasetemp() / "mutated.opreplay"
    try:
        path.write_bytes(join(preamble, frames, index=index))
    except InvalidCapture:
        return  # the mutated records cannot even be listed in an index
    for read in (read_all, check_capture):
        try:
            read(path)
        except OpReplayError as error:
            assert str(path) in str(error) and "\n" not in str(error)
    try:
        recover_capture(path, path.with_suffix(".out"), force=True)
    except (InvalidCapture, UnsupportedVersion) as error:
        assert str(path) in str(error)
