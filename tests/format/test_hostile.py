"""Files made to do harm, with every check valid: only bounds checks stand between them and the reader."""

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
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from replayfmt.errors import InvalidCapture, OpReplayError, UnsupportedVersion
from replayfmt.format import flat
from replayfmt.format.check import check_capture
from replayfmt.format.codes import Codec, FrameKind, RecordKind, ValueKind
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
from replayfmt.format.layouts import HEAD, RECORDS, SUMMARY, TABLES, Layout
from replayfmt.format.reader import open_capture
from replayfmt.format.recover import recover_capture
from replayfmt.format.summary import encode_summary
from replayfmt.format.tables_output import FAMILIES, META_COLUMNS, NODE_COLUMNS, encode_tables

from .reading import read_all
from .reseal import (
    Frame,
    Tables,
    change,
    change_header,
    change_records,
    change_tables,
    join,
    split,
    tables_of,
)
from .samples import SESSION, TENSOR_DIGEST, write_everything, write_small

V = ValueKind


@pytest.fixture()
def capture(tmp_path: Path) -> Path:
    path = tmp_path / "hostile.opreplay"
    write_everything(path)
    return path


def write_everything_again(path: Path) -> None:
    path.unlink()
    write_everything(path)


def _refused(path: Path, match: str) -> None:
    """Reading and checking end in one clear error that names the file."""
    with pytest.raises(InvalidCapture, match=match) as caught:
        read_all(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    with pytest.raises(InvalidCapture):
        check_capture(path)


# ------------------------------------------------------------------------------------------------- columns, rebuilt


def _put(name: str, row: int, value: int) -> Callable[[dict], None]:
    def edit(columns: dict) -> None:
        columns[name][row] = value

    return edit


def _shorter(name: str) -> Callable[[dict], None]:
    def edit(columns: dict) -> None:
        columns[name] = columns[name][:-1]

    return edit


@pytest.mark.parametrize(("edit", "match"), [
    (_put("signature", 0, 0), "signature holds 0"),
    (_put("signature", 3, 99999), "signature holds 1..99999"),
    (_put("scope", 0, 3), "scope holds 1..3, allowed 0..2"),
    (_put("tensors", 0, 4), "tensors holds 0..4, allowed 0..3"),
    (_put("tensor_id", 0, 0), "tensor_id holds 0"),
    (_put("tensor_id", 0, 2), "tensor_id is not ascending"),
    (_put("tensor_id", 3, 1 << 63), "tensor_id holds"),
    (_put("tensor_storage", 0, 5), "tensor_storage holds 0..5, allowed 0..4"),
    (_put("tensor_storage", 0, (1 << 64) - 1), "tensor_storage holds"),
    (_put("tensor_offset", 0, -1), "tensor_offset holds -1"),
    (_put("tensor_meta", 0, 0), "tensor_meta holds 0"),
    (_put("tensor_meta", 0, 4), "tensor_meta holds 1..4, allowed 1..3"),
    (_put("storage_bytes", 0, 1 << 63), "storage_bytes holds"),
    (_put("storage_device", 0, 3), "storage_device holds 1..3, allowed 1..2"),
    (_put("storage_origin", 0, 0), "storage_origin holds 0"),
    (_put("storage_origin", 0, 7), "storage_origin holds 1..7, allowed 1..6"),
    (_put("storage_origin", 0, 1), "have a payload exactly if"),
    (_put("storage_payload", 0, 6), "storage_payload holds 0..6, allowed 0..5"),
    (_put("ints", 1, 0), "refers to storage 0"),
    (_put("ints", 1, 77), "refers to storage 77; there are 4"),
    (_put("ints", 2, -1), "refers to payload -1"),
    (_put("gap_position", 0, 8), "gap_position holds 8"),
    (_put("gap_ns", 0, (1 << 64) - 1), "gap_ns holds"),
    *((_shorter(name), f"column {name} has") for name in (
        "signature", "scope", "thread", "start_delta_ns", "gap_ns", "duration_ns", "tensors", "ints", "floats",
        "tensor_storage", "tensor_offset", "tensor_meta", "storage_device", "storage_origin", "storage_payload")),
    (lambda c: c.update(device_duration_ns=np.zeros(3, np.uint64)), "column device_duration_ns has 3 rows, expected 8"),
    (lambda c: c.update(start_base_ns=(1 << 64) - 1), "start_base_ns is"),
    (lambda c: c.update(first_storage=0), "first_storage is 0"),
    (lambda c: c.update(first_storage=(1 << 64) - 1), "first_storage is"),
    (lambda c: c.update(first_storage=2), "first_storage is 2"),
    (lambda c: c.update(gap_position=np.array([3, 3], np.uint32), gap_ns=np.array([1, 1], np.uint64)),
     "gap_position is not ascending"),
    (lambda c: c.update(gap_position=np.arange(8, dtype=np.uint32), gap_ns=np.full(8, 1 << 60, np.uint64)),
     "gap_ns add up"),
    (lambda c: c.pop("signature"), "column signature has 0 rows"),
])
def test_record_columns_that_contradict_each_other_are_refused(
        capture: Path, edit: Callable[[dict], None], match: str) -> None:
    change_records(capture, edit)
    _refused(capture, match)


def test_tensors_without_a_table_of_tensors_are_refused(capture: Path) -> None:
    def edit(columns: dict) -> None:
        for name in ("tensor_id", "tensor_storage", "tensor_offset", "tensor_meta"):
            columns[name] = columns[name][:0]

    change_records(capture, edit)
    _refused(capture, "tensors holds")


def _twice(columns: dict) -> None:
    for name in ("tensor_storage", "tensor_offset", "tensor_meta"):
        columns[name][1] = columns[name][0]


def _digest_of(of: int, result: int) -> Callable[[dict], None]:
    def edit(columns: dict) -> None:
        hashes = np.flatnonzero(columns["ints"] == TENSOR_DIGEST.hash_low)  # of a host read, then of two digests
        columns["ints"][hashes[1] - 2:hashes[1]] = of, result

    return edit


@pytest.mark.parametrize(("which", "edit", "match"), [
    (0, _twice, "two tensor ids"),
    (1, _put("scope", -1, 2), "a scope marker names another scope"),
    (1, _put("scope", -1, 0), "a scope marker names another scope"),
    (1, _digest_of(999, 0), "a digest is of a record that does not come before it"),
    (1, _digest_of(-2, -2), "a digest is of a record that does not come before it"),
    (1, _digest_of(-1, 0), "a digest is of a record that does not come before it"),
    (1, _digest_of(0, 0), "a digest is of result 0 of record 0, which has no such result"),
    (1, _digest_of(8, 0), "a digest is of result 0 of record 8, which has no such result"),
    (1, _digest_of(5, 1), "a digest is of result 1 of record 5, which has no such result"),
])
def test_references_that_reading_does_not_follow_are_findings_of_the_check(
        capture: Path, which: int, edit: Callable[[dict], None], match: str) -> None:
    change_records(capture, edit, which)
    with pytest.raises(InvalidCapture, match=match):
        check_capture(capture)


# --------------------------------------------------------------------------------------------------- definitions


def _column(name: str, row: int, value: int) -> Callable[[Tables], None]:
    def edit(tables: Tables) -> None:
        tables[1][name][row] = value

    return edit


def _cut(name: str) -> Callable[[Tables], None]:
    def edit(tables: Tables) -> None:
        tables[1][name] = tables[1][name][:-1]

    return edit


def _node(kind: ValueKind, constant: int) -> Callable[[Tables], None]:
    """Give the first node of a kind another constant."""

    def edit(tables: Tables) -> None:
        tables[1]["node_constant"][int(np.flatnonzero(tables[1]["node_kind"] == kind)[0])] = constant

    return edit


def _first(family: str, first: int) -> Callable[[Tables], None]:
    def edit(tables: Tables) -> None:
        tables[2][family] = first

    return edit


@pytest.mark.parametrize(("edit", "match"), [
    (_column("device_kind", 0, 0), "device_kind holds 0"),
    (_column("device_name", 0, 9999), "device_name holds"),
    (_column("device_fingerprint", 0, 9999), "device_fingerprint holds"),
    (_column("device_index", 0, -2), "device_index holds -2"),
    (_column("kernel_kind", 0, 0), "kernel_kind holds 0"),
    (_column("kernel_kind", 0, 4), "kernel_kind holds 1..4"),
    (_column("kernel_name", 0, 0), "kernel_name holds 0"),
    (_column("kernel_schema", 0, 0xFFFFFFFF), "kernel_schema holds"),
    (_column("generator_device", 0, 3), "generator_device holds"),
    (_column("generator_default", 0, 2), "generator_default holds"),
    (_column("scope_parent", 0, 1), "parent is not defined before it"),
    (_column("scope_parent", 1, 2), "parent is not defined before it"),
    (_column("scope_name", 0, 0), "scope_name holds 0"),
    (_column("meta_dtype", 0, 0), "meta_dtype holds 0"),
    (_column("meta_dtype", 0, 47), "meta_dtype holds"),
    (_column("meta_layout", 0, 9), "meta_layout holds"),
    (_column("meta_device", 0, 0), "meta_device holds 0"),
    (_column("meta_flags", 0, 16), "meta_flags holds"),
    (_column("meta_rank", 0, 0xFFFF), "meta_sizes has"),
    (_column("meta_sizes", 0, -1), "meta_sizes holds -1"),
    (_column("meta_strides", 0, -1), "meta_strides holds -1"),
    (_column("signature_kind", 0, 0), "signature_kind holds 0"),
    (_column("signature_kind", 0, 14), "signature_kind holds"),
    (_column("signature_kind", 0, int(RecordKind.op)), "has a kernel or a status"),
    (_column("signature_status", 0, 3), "signature_status holds"),
    (_column("signature_kernel", 0, 1), "has a kernel or a status"),
    (_column("signature_kernel", 0, 4), "signature_kernel holds"),
    (_column("signature_args", 0, 0), "do not form its arguments"),
    (_column("signature_args", 0, 0xFFFFFFFF), "do not form its arguments"),
    (_column("signature_results", 0, 1), "has results"),
    (_column("signature_nodes", 0, 0), "signature_nodes add up"),
    (_column("signature_nodes", 0, 0xFFFFFFFF), "signature_nodes add up"),
    (_column("node_kind", 0, 19), "node_kind holds"),
    (_column("node_name", 0, 9999), "node_name holds"),
    (_column("node_name", 0, 0), "argument 0 is not `name`"),
    (_column("node_kind", 0, int(V.int)), "is a int with the constant"),
    (_column("node_children", 0, 1), "no list, tuple or composite has children"),
    (_node(V.bool, 2), "is a bool with the constant 2, allowed 0..1"),
    (_node(V.dtype, 0), "is a dtype with the constant 0, allowed 1..46"),
    (_node(V.layout, 9), "is a layout with the constant 9"),
    (_node(V.memory_format, -1), "is a memory_format with the constant -1"),
    (_node(V.device, 3), "is a device with the constant 3"),
    (_node(V.string, 0), "is a string with the constant 0"),
    (_node(V.string, 1 << 40), "is a string with the constant"),
    (_node(V.opaque, -5), "is a opaque with the constant -5"),
    (_node(V.composite, 1 << 62), "is a composite with the constant"),
    (_node(V.tensor, 1), "is a tensor with the constant 1"),
    *((_first(family, 2), f"defines {family} 2 and on; expected 1") for family in ("string", *FAMILIES)),
    *((_cut(name), "different lengths|adds? up to") for names in FAMILIES.values() for name in names),
    *((_cut(name), "adds? up to") for name in (*META_COLUMNS, *NODE_COLUMNS)),
    (lambda t: t[0].append(t[0][0]), "defines a string twice"),
])
def test_definitions_that_break_a_rule_are_refused(
        capture: Path, edit: Callable[[Tables], None], match: str) -> None:
    change_tables(capture, edit)
    _refused(capture, match)


def _one_signature(kind: RecordKind, nodes: list[tuple[int, int, int, int]], args: int) -> Callable[[Tables], None]:
    """Replace all signatures by one with these node rows."""

    def edit(tables: Tables) -> None:
        columns = tables[1]
        for name, value in zip(FAMILIES["signature"], (kind, 0, 0, args, 0, len(nodes)), strict=True):
            columns[name] = np.array([value], columns[name].dtype)
        for place, name in enumerate(NODE_COLUMNS):
            columns[name] = np.array([node[place] for node in nodes], columns[name].dtype)

    return edit


LIST = (int(V.list), 0, 0, 1)
LEAF = (int(V.none), 0, 0, 0)


def test_nesting_is_bounded_and_exactly_that_deep_is_fine(capture: Path) -> None:
    change_tables(capture, _one_signature(RecordKind.collective, [LIST] * 64 + [LEAF], 1))
    _refused(capture, "nested deeper than 64")
    write_everything_again(capture)
    change_tables(capture, _one_signature(RecordKind.collective, [LIST] * 5000 + [LEAF], 1))
    _refused(capture, "nested deeper than 64")
    write_everything_again(capture)
    change_tables(capture, _one_signature(RecordKind.collective, [LIST] * 63 + [LEAF], 1))
    assert len(open_capture(capture).signatures[1].nodes) == 64
    write_everything_again(capture)
    wide = [(int(V.list), 0, 0, 300), *[(int(V.list), 0, 0, 0)] * 300]
    change_tables(capture, _one_signature(RecordKind.collective, wide, 1))
    assert len(open_capture(capture).signatures[1].nodes) == 301


@pytest.mark.parametrize("nodes", [
    [(int(V.list), 0, 0, 2), LEAF], [(int(V.list), 0, 0, 0), LEAF], [(int(V.list), 0, 0, 0xFFFFFFFF), LEAF],
    [LEAF, LEAF], [LIST],
])
def test_trees_that_do_not_add_up_are_refused(capture: Path, nodes: list[tuple[int, int, int, int]]) -> None:
    change_tables(capture, _one_signature(RecordKind.collective, nodes, 1))
    _refused(capture, "do not form its arguments and results")


@pytest.mark.parametrize("kind", [kind for kind in RecordKind if kind not in (
    RecordKind.none, RecordKind.op, RecordKind.collective, RecordKind.global_state)])
def test_records_without_the_arguments_of_their_kind_are_refused(capture: Path, kind: RecordKind) -> None:
    for nodes in ([], [LEAF], [LEAF] * 14):
        change_tables(capture, _one_signature(kind, nodes, len(nodes)))
        _refused(capture, f"a {kind.name} signature")
        write_everything_again(capture)


def test_a_setting_that_is_no_scalar_is_refused(capture: Path) -> None:
    change_tables(capture, _one_signature(RecordKind.global_state, [(int(V.tensor), 1, 0, 0)], 1))
    _refused(capture, "settings that are no named scalars")


def test_consolidated_definitions_that_differ_are_a_finding(capture: Path) -> None:
    def edit(frame: Frame) -> Frame:
        tables = tables_of(frame.body)
        tables[1]["meta_sizes"][0] = 77
        return replace(frame, body=bytes(encode_tables(*tables)))

    change(capture, FrameKind.tables, edit, which=-1)
    with pytest.raises(InvalidCapture, match="consolidated definitions differ"):
        check_capture(capture)


def test_a_scope_defined_twice_is_a_finding(capture: Path) -> None:
    def edit(tables: Tables) -> None:
        tables[1]["scope_parent"], tables[1]["scope_name"] = (
            np.array([0, 1, 1], np.uint32), np.append(tables[1]["scope_name"], tables[1]["scope_name"][1]))

    change_tables(capture, edit)
    read_all(capture)
    with pytest.raises(InvalidCapture, match="two scopes have the same name and parent"):
        check_capture(capture)


def test_definitions_must_come_before_their_use(tmp_path: Path) -> None:
    path = tmp_path / "late.opreplay"
    write_small(path, frames=2)
    preamble, frames = split(path.read_bytes())
    kinds = [frame.header.kind for frame in frames]
    second = [i for i, kind in enumerate(kinds) if kind == FrameKind.tables][1]
    records = [i for i, kind in enumerate(kinds) if kind == FrameKind.records][1]
    frames[second], frames[records] = (
        replace(frames[records], header=frames[records].header),
        replace(frames[second], header=replace(frames[second].header, first_ordinal=4)))
    path.write_bytes(join(preamble, frames))
    with pytest.raises(InvalidCapture, match="scope holds|signature holds"):
        check_capture(path)


# ------------------------------------------------------------------------------------------------ head and summary


def _strings_head(**pairs: str) -> bytes:
    from replayfmt.format.generated import Head, KeyValue

    builder = flatbuffers.Builder(64)
    made = []
    for key, value in pairs.items():
        places = builder.CreateString(key.rstrip("_")), builder.CreateString(value)
        KeyValue.Start(builder)
        KeyValue.AddKey(builder, places[0])
        KeyValue.AddValue(builder, places[1])
        made.append(KeyValue.End(builder))
    builder.StartVector(4, len(made), 4)
    for place in reversed(made):
        builder.PrependUOffsetTRelative(place)
    vector = builder.EndVector()
    texts = [builder.CreateString(text) for text in (SESSION.session_id, "p", "1")]
    Head.Start(builder)
    Head.AddSessionId(builder, texts[0])
    Head.AddProducer(builder, texts[1])
    Head.AddProducerVersion(builder, texts[2])
    Head.AddSettings(builder, vector)
    builder.Finish(Head.End(builder))
    return bytes(builder.Output())


@pytest.mark.parametrize("value", [
    "", "{", "[1]", "{}", "nope", "9" * 5000, "[" * 3000, "1e999", "'x'", '"a" "b"',
])
def test_session_values_that_are_no_json_scalars_are_refused(capture: Path, value: str) -> None:
    change(capture, FrameKind.head, lambda frame: replace(frame, body=_strings_head(x=value)))
    _refused(capture, "settings: 'x' is")


def test_a_session_value_given_twice_is_refused(capture: Path) -> None:
    change(capture, FrameKind.head, lambda frame: replace(frame, body=_strings_head(x="1", x_="2")))
    _refused(capture, "'x' is not one scalar")


def test_a_session_other_than_the_preambles_is_refused(capture: Path) -> None:
    data = bytearray(capture.read_bytes())
    data[:PREAMBLE_BYTES] = pack_preamble("11111111-1111-1111-1111-111111111111")
    capture.write_bytes(data)
    _refused(capture, "the preamble says 11111111")


def test_a_session_id_that_is_no_uuid_is_refused(capture: Path) -> None:
    body = _strings_head().replace(SESSION.session_id.encode(), b"X" * 36)
    change(capture, FrameKind.head, lambda frame: replace(frame, body=body))
    _refused(capture, "not a lower-case UUID")


def test_a_summary_that_does_not_add_up_is_refused(capture: Path) -> None:
    good = open_capture(capture).summary

    def put(wrong: dict) -> None:
        body = bytes(encode_summary(replace(good, **wrong)))
        change(capture, FrameKind.summary, lambda frame: replace(frame, body=body))

    for wrong, match in (
            ({"records": {RecordKind.op: 1}}, "counts 1 records"), ({"kernel_calls": {1: 99}}, "99 kernel calls"),
            ({"kernel_calls": {77: 3}}, "does not have")):
        put(wrong)
        _refused(capture, match)
    for wrong in ({"storages": 99}, {"absent_storages": 0}, {"storage_payload_bytes": 1}, {"unsupported": {"x": 3}}):
        put(wrong)
        with pytest.raises(InvalidCapture, match=f"the summary is wrong: {next(iter(wrong))}"):
            check_capture(capture)


# ------------------------------------------------------------------------------------------------------ FlatBuffers


@pytest.mark.parametrize("layout", [HEAD, TABLES, RECORDS, SUMMARY], ids=lambda layout: layout.name)
def test_any_bytes_as_a_flatbuffer_are_refused_or_stay_inside_the_buffer(layout: Layout) -> None:
    chosen = random.Random(1)
    for _case in range(3000):
        size = chosen.randrange(0, 200)
        words = [chosen.choice([0, 1, 2, 4, 8, 12, 16, size, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, chosen.randrange(256)])
                 for _ in range(size // 4 + 1)]
        data = struct.pack(f"<{len(words)}I", *words)[:size]
        try:
            _read_every_field(data, layout)
        except InvalidCapture:
            continue


def _read_every_field(data: bytes, layout: Layout) -> int:
    """How many bytes all fields together handed out."""
    table = flat.root(data, layout, "test")
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


def test_strings_that_all_point_to_the_same_bytes_cannot_expand(capture: Path) -> None:
    builder = flatbuffers.Builder(64)
    shared = builder.CreateString("x" * 100_000)
    builder.StartVector(4, 100_000, 4)
    for _ in range(100_000):
        builder.PrependUOffsetTRelative(shared)
    vector = builder.EndVector()
    from replayfmt.format.generated import Tables

    Tables.Start(builder)
    Tables.AddFirstString(builder, 1)
    Tables.AddStrings(builder, vector)
    builder.Finish(Tables.End(builder))
    body = bytes(builder.Output())
    change(capture, FrameKind.tables, lambda frame: replace(frame, body=body))
    change(capture, FrameKind.tables, lambda frame: None, which=-1)
    _refused(capture, "overlap other fields")


# -------------------------------------------------------------------------------------------------- frames and index


@pytest.mark.parametrize("index", [True, False], ids=["index", "walk"])
@pytest.mark.parametrize("changes", [
    {"stored_bytes": 1 << 63, "raw_bytes": 1 << 63}, {"stored_bytes": (1 << 64) - 1, "raw_bytes": (1 << 64) - 1},
    {"raw_bytes": 5}, {"count": 0}, {"count": 7}, {"count": 0xFFFFFFFF}, {"first_ordinal": 1},
    {"first_ordinal": 1 << 62}, {"count": (1 << 20) + 1},
    {"flags": 0}, {"flags": 3}, {"codec": 9}, {"codec": 1}, {"sequence": 77}, {"kind": 0}, {"kind": 4}, {"kind": 1},
    {"raw_bytes": MAX_BODY_BYTES + 1, "codec": 1}, {"raw_bytes": MAX_BODY_BYTES, "codec": 1},
])
def test_headers_that_promise_what_is_not_there_are_refused(
        capture: Path, changes: dict[str, int], index: bool) -> None:
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
    header = parse_header(data[trailer.index_offset:trailer.index_offset + HEADER_BYTES], "test")
    begin = trailer.index_offset + HEADER_BYTES
    frames = np.frombuffer(bytes(data[begin:]), FRAME_ROW, trailer.frames).copy()
    payloads = np.frombuffer(bytes(data[begin + frames.nbytes:]), PAYLOAD_ROW, trailer.payloads).copy()
    edit(frames, payloads)
    body = frames.tobytes() + payloads.tobytes()
    data[begin:begin + len(body)] = body
    data[trailer.index_offset:begin] = replace(header, hash=body_hash(body)).pack()
    data[-64:] = replace(trailer, **changes).pack()
    path.write_bytes(data)


def _row(which: str, name: str, row: int, value: int) -> Callable[[np.ndarray, np.ndarray], None]:
    def edit(frames: np.ndarray, payloads: np.ndarray) -> None:
        (frames if which == "frames" else payloads)[name][row] = value

    return edit


@pytest.mark.parametrize(("edit", "changes"), [
    *((_row("frames", name, 3, value), {}) for name in ("offset", "stored_bytes", "raw_bytes", "first_ordinal",
                                                        "first_storage") for value in (0, 65, 1 << 40, (1 << 64) - 1)),
    *((_row("frames", name, 3, value), {}) for name in ("count", "kind", "flags") for value in (0, 1, 6, 9, 0xFFFF)),
    *((_row("payloads", name, row, value), {}) for name in ("offset", "stored_bytes", "raw_bytes") for row in (0, 4)
      for value in (0, 64, 1 << 40, (1 << 64) - 1)),
    *((_row("payloads", name, 1, value), {}) for name in ("id", "codec", "reserved") for value in (1, 7, 0xFFFF)),
    (lambda frames, payloads: None, {"records": 1}), (lambda frames, payloads: None, {"records": 1 << 50}),
    (lambda frames, payloads: None, {"frames": 1}), (lambda frames, payloads: None, {"payloads": 0}),
    (lambda frames, payloads: None, {"frames": 0xFFFFFFFF, "payloads": 0xFFFFFFFF}),
    (lambda frames, payloads: None, {"index_offset": 64}), (lambda frames, payloads: None, {"index_bytes": 0}),
    (lambda frames, payloads: frames.__setitem__(slice(None), frames[::-1]), {}),
    (lambda frames, payloads: payloads.__setitem__(slice(None), payloads[::-1]), {}),
])
def test_an_index_that_lies_behind_valid_checks_changes_nothing_that_is_read(
        capture: Path, edit: Callable[[np.ndarray, np.ndarray], None], changes: dict[str, int]) -> None:
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


@pytest.mark.parametrize(("name", "value"), [
    ("id", 0), ("id", 5), ("offset", 64), ("offset", 0), ("stored_bytes", 0), ("stored_bytes", 1 << 61),
    ("raw_bytes", 1 << 61), ("codec", 2), ("reserved", 1), ("hash_low", 1),
])
@pytest.mark.parametrize("index", [True, False], ids=["index", "walk"])
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
    header = replace(tail, sequence=position, stored_bytes=len(stored), raw_bytes=raw_bytes, codec=Codec.zstd,
                     hash=body_hash(stored))
    path.write_bytes(head + header.pack() + stored + bytes(-len(stored) % 64))


def _zeros(count: int) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=count)
    block = bytes(1 << 20)
    parts = [compressor.compress(block) for _ in range(count >> 20)]
    return b"".join(parts) + compressor.flush()


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


@pytest.mark.parametrize(("stored", "match"), [
    (zstandard.ZstdCompressor().compress(bytes(99)) + b"x", "cannot be decompressed"),
    (zstandard.ZstdCompressor().compress(bytes(99)) * 2, "cannot be decompressed"),
    (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(99)), "the zstd frame declares"),
    (zstandard.ZstdCompressor().compress(bytes(99))[:-3], "cannot be decompressed"),
    (b"not zstd at all" * 3, "cannot be decompressed"),
    (b"", "cannot be decompressed"),
])
def test_only_one_whole_zstd_frame_with_its_size_is_accepted(capture: Path, stored: bytes, match: str) -> None:
    _bombed(capture, FrameKind.records, stored, 99)
    with pytest.raises(InvalidCapture, match=match):
        read_all(capture)


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
            capture.write_bytes(join(preamble, frames[:position + 1], index=index))

            def refused(match: str = match) -> None:
                with pytest.raises(InvalidCapture, match=match):
                    read_all(capture)
                with pytest.raises(InvalidCapture, match=match):
                    open_capture(capture).read_payload_into(1, bytearray(1 << 20))
                with pytest.raises(InvalidCapture):
                    check_capture(capture)

            _limited(refused)


# ----------------------------------------------------------------------------------------------------------- fuzzing

_INTERESTING = [
    0, 1, 2, 4, 8, 63, 64, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 1 << 31, (1 << 31) - 1, (1 << 32) - 1,
    (1 << 32) - 16, 1 << 40, 1 << 60, (1 << 60) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1,
]
_mutation = st.tuples(
    st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.sampled_from([1, 2, 4, 8]),
    st.one_of(st.sampled_from(_INTERESTING), st.integers(0, (1 << 64) - 1), st.integers(0, 300)))


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[bytes, list[Frame]]]:
    folder = tmp_path_factory.mktemp("seeds")
    write_everything(folder / "everything")
    write_small(folder / "small")
    return [split((folder / name).read_bytes()) for name in ("everything", "small")]


@settings(max_examples=500, deadline=None, derandomize=True, database=None,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(which=st.integers(0, 1), mutations=st.lists(_mutation, min_size=1, max_size=4), index=st.booleans())
@example(which=0, mutations=[(0, 0, 4, (1 << 32) - 1)], index=True)
def test_no_mutation_behind_valid_checks_escapes_as_anything_but_one_error(
        seeds: list[tuple[bytes, list[Frame]]], tmp_path_factory: pytest.TempPathFactory, which: int,
        mutations: list[tuple[int, int, int, int]], index: bool) -> None:
    preamble, frames = seeds[which]
    frames = list(frames)
    for where, place, width, value in mutations:
        number = where % len(frames)
        body = bytearray(frames[number].body)
        place = place % max(1, len(body) - width + 1)
        body[place:place + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
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
