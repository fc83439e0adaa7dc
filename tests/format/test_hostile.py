"""Records and definitions made to do harm, with every check valid: only bounds checks stand in their way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from replayfmt.errors import InvalidCapture
from replayfmt.format.codes import FrameKind, RecordKind, ValueKind
from replayfmt.format.definition_tables import FAMILIES, NUMBERED, encode_tables
from replayfmt.format.maintenance import check_capture
from replayfmt.format.reader import open_capture
from replayfmt.format.signature_layout import SIGNATURES

from .reading import read_all, refused
from .reseal import Frame, Tables, change, change_records, change_tables, join, split, tables_of
from .samples import TENSOR_DIGEST, write_everything_again, write_small

V = ValueKind


# ------------------------------------------------------------------------------------------------- columns, rebuilt


def _put(name: str, row: int, value: int) -> Callable[[dict], None]:
    def edit(columns: dict) -> None:
        columns[name][row] = value

    return edit


def _shorter(name: str) -> Callable[[dict], None]:
    def edit(columns: dict) -> None:
        columns[name] = columns[name][:-1]

    return edit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "match"),
    [
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
        (_put("storage_payload", 0, 8), "storage_payload holds 8, allowed 0..7"),
        (_put("ints", 1, 0), "refers to storage 0"),
        (_put("ints", 1, 77), "refers to storage 77; there are 4"),
        (_put("ints", 2, -1), "refers to payload -1"),
        (_put("gap_position", 0, 8), "gap_position holds 8"),
        (_put("gap_ns", 0, (1 << 64) - 1), "gap_ns holds"),
        *(
            (_shorter(name), f"column {name} has")
            for name in (
                "signature",
                "scope",
                "thread",
                "start_delta_ns",
                "gap_ns",
                "duration_ns",
                "tensors",
                "ints",
                "floats",
                "tensor_storage",
                "tensor_offset",
                "tensor_meta",
                "storage_device",
                "storage_origin",
                "storage_payload",
            )
        ),
        (lambda c: c.update(untimed=np.array([8], np.uint32)), "untimed holds 8..8, allowed 0..7"),
        (lambda c: c.update(untimed=np.array([7, 7], np.uint32)), "untimed is not ascending"),
        (lambda c: c.update(untimed=np.array([5, 7], np.uint32)), "untimed names records that have a duration"),
        (lambda c: c.pop("duration_ns"), "a frame without durations"),
        (
            lambda c: c.update(device_duration_ns=np.zeros(3, np.uint64)),
            "column device_duration_ns has 3 rows, expected 8",
        ),
        (lambda c: c.update(start_base_ns=(1 << 64) - 1), "start_base_ns is"),
        (lambda c: c.update(first_storage=0), "first_storage is 0"),
        (lambda c: c.update(first_storage=(1 << 64) - 1), "first_storage is"),
        (lambda c: c.update(first_storage=2), "first_storage is 2"),
        (
            lambda c: c.update(gap_position=np.array([3, 3], np.uint32), gap_ns=np.array([1, 1], np.uint64)),
            "gap_position is not ascending",
        ),
        (
            lambda c: c.update(gap_position=np.arange(8, dtype=np.uint32), gap_ns=np.full(8, 1 << 60, np.uint64)),
            "gap_ns add up",
        ),
        (lambda c: c.pop("signature"), "column signature has 0 rows"),
    ],
)
def test_record_columns_that_contradict_each_other_are_refused(
    capture: Path, edit: Callable[[dict], None], match: str
) -> None:
    change_records(capture, edit)
    refused(capture, match)


@pytest.mark.parametrize(
    ("which", "column", "row", "expected"),
    [
        (
            0,
            "tensor_offset",
            1,
            r"tensor_offset holds -7\.\..*, allowed 0\.\..*first wrong one is -7, of tensor \d+ in record \d",
        ),
        (0, "ints", 3, r"version of storage_import holds -7\.\..*, allowed 0\.\..*-7, of record \d"),
        (1, "ints", 1, r"bytes of storage_resize holds -7\.\..*, allowed 0\.\..*-7, of record \d+"),
    ],
)
def test_a_negative_amount_is_named_with_its_record(
    capture: Path, which: int, column: str, row: int, expected: str
) -> None:
    change_records(capture, _put(column, row, -7), which)
    refused(capture, expected)
    with pytest.raises(InvalidCapture, match=expected):
        check_capture(capture)


@pytest.mark.parametrize("name", ["elements", "nan", "inf"])
@pytest.mark.parametrize("kind", [RecordKind.digest, RecordKind.host_read])
def test_a_digest_has_no_negative_counts(capture: Path, kind: RecordKind, name: str) -> None:
    with open_capture(capture) as reader:
        record = next(each for each in reader.records() if each.kind is kind and len(each.args) > 3)
        place = [each.name for each in record.signature.args if each.kind is V.int].index(name)
        info = next(
            each
            for each in reader.record_frames
            if each.first_ordinal <= record.ordinal < each.first_ordinal + each.count
        )
        which = reader.record_frames.index(info)
        frame = reader.frame(which)
        slot = int(frame.int_first[record.ordinal - frame.first_ordinal]) + place
    change_records(capture, _put("ints", slot, -1), which)
    refused(capture, rf"{name} of {kind.name} holds -1.*first wrong one is -1, of record {record.ordinal}$")


def test_tensors_without_a_table_of_tensors_are_refused(capture: Path) -> None:
    def edit(columns: dict) -> None:
        for name in ("tensor_id", "tensor_storage", "tensor_offset", "tensor_meta"):
            columns[name] = columns[name][:0]

    change_records(capture, edit)
    refused(capture, "tensors holds")


def _twice(columns: dict) -> None:
    for name in ("tensor_storage", "tensor_offset", "tensor_meta"):
        columns[name][1] = columns[name][0]


def _digest_of(of: int, result: int) -> Callable[[dict], None]:
    def edit(columns: dict) -> None:
        hashes = np.flatnonzero(columns["ints"] == TENSOR_DIGEST.hash_low)  # of a host read, then of two digests
        columns["ints"][hashes[1] - 2 : hashes[1]] = of, result

    return edit


@pytest.mark.parametrize(
    ("which", "edit", "match"),
    [
        (0, _twice, "two tensor ids"),
        (1, _put("scope", -1, 2), "a scope marker names another scope"),
        (1, _put("scope", -1, 0), "a scope marker names another scope"),
        (1, _digest_of(999, 0), "a digest is of a record that does not come before it"),
        (1, _digest_of(-2, -2), "a digest is of a record that does not come before it"),
        (1, _digest_of(-1, 0), "a digest is of a record that does not come before it"),
        (1, _digest_of(0, 0), "a digest is of result 0 of record 0, which has no such result"),
        (1, _digest_of(8, 0), "a digest is of result 0 of record 8, which has no such result"),
        (1, _digest_of(5, 1), "a digest is of result 1 of record 5, which has no such result"),
    ],
)
def test_references_that_reading_does_not_follow_are_findings_of_the_check(
    capture: Path, which: int, edit: Callable[[dict], None], match: str
) -> None:
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


def _role(text: bytes) -> Callable[[Tables], None]:
    """Give the first attachment another role."""

    def edit(tables: Tables) -> None:
        if text not in tables[0]:
            tables[0].append(text)
        tables[1]["attachment_role"][0] = tables[0].index(text) + 1

    return edit


def _first(family: str, first: int) -> Callable[[Tables], None]:
    def edit(tables: Tables) -> None:
        tables[2][family] = first

    return edit


@pytest.mark.guarantee("bounds")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (_column("device_kind", 0, 0), "device_kind holds 0"),
        (_column("device_name", 0, 9999), "device_name holds"),
        (_column("device_fingerprint", 0, 9999), "device_fingerprint holds"),
        (_column("device_index", 0, -2), "device_index holds -2"),
        (_column("kernel_kind", 0, 0), "kernel_kind holds 0"),
        (_column("kernel_kind", 0, 7), "kernel_kind holds 1..7"),
        (_column("kernel_name", 0, 0), "kernel_name holds 0"),
        (_column("kernel_schema", 0, 0xFFFFFFFF), "kernel_schema holds"),
        (_column("kernel_attachments", 0, 1), "kernel_attachment has 4 elements, kernel_attachments adds up to 5"),
        (_column("kernel_attachments", 3, 0xFFFFFFFF), "kernel_attachments adds up"),
        (_column("kernel_attachment", 0, 0), "kernel_attachment holds 0"),
        (_column("kernel_attachment", 0, 4), "kernel_attachment holds 1..4, allowed 1..3"),
        (_column("kernel_attachment", 0, 2), "a kernel lists an attachment twice"),
        (_column("attachment_role", 0, 0), "attachment_role holds 0"),
        (_column("attachment_role", 0, 9999), "attachment_role holds"),
        (_role(b""), "'' is not an attachment's role"),
        (_role(b"../source"), "'../source' is not an attachment's role"),
        (_column("attachment_name", 0, 0), "attachment_name holds 0"),
        (_column("attachment_payload", 0, 0), "attachment_payload holds 0"),
        (_column("attachment_payload", 0, 8), "attachment_payload holds 2..8, allowed 1..7"),
        (_column("generator_device", 0, 3), "generator_device holds"),
        (_column("generator_default", 0, 2), "generator_default holds"),
        (_column("scope_parent", 0, 1), "parent is not defined before it"),
        (_column("scope_parent", 1, 2), "parent is not defined before it"),
        (_column("scope_name", 0, 0), "scope_name holds 0"),
        (_column("placement_devices", 0, 0), "placement_devices adds up"),
        (_column("placement_device", 0, 3), "placement_device holds"),
        (_column("placement_device", 2, 1), "placement's devices are not in ascending order"),
        (_column("placement_stream", 0, 0), "placement_stream holds 0"),
        (_column("meta_dtype", 0, 0), "meta_dtype holds 0"),
        (_column("meta_dtype", 0, 47), "meta_dtype holds"),
        (_column("meta_layout", 0, 9), "meta_layout holds"),
        (_column("meta_device", 0, 0), "meta_device holds 0"),
        (_column("meta_flags", 0, 16), "meta_flags holds"),
        (_column("meta_rank", 0, 0xFFFF), "meta_sizes has"),
        (_column("meta_sizes", 0, -1), "meta_sizes holds -1.*allowed 0.*the first wrong one is -1, of meta 1"),
        (_column("meta_strides", 0, -1), "meta_strides holds -1.*the first wrong one is -1, of meta 1"),
        (_column("signature_kind", 0, 0), "signature_kind holds 0"),
        (_column("signature_kind", 0, 19), "signature_kind holds"),
        (_column("signature_kind", 0, int(RecordKind.op)), "has a kernel or a status"),
        (_column("signature_status", 0, 3), "signature_status holds"),
        (_column("signature_kernel", 0, 1), "has a kernel or a status"),
        (_column("signature_kernel", 0, 6), "signature_kernel holds"),
        (_column("signature_args", 0, 0), "do not form its arguments"),
        (_column("signature_args", 0, 0xFFFFFFFF), "do not form its arguments"),
        (_column("signature_results", 0, 1), "has results"),
        (_column("signature_nodes", 0, 0), "signature_nodes adds up"),
        (_column("signature_nodes", 0, 0xFFFFFFFF), "signature_nodes adds up"),
        (_column("node_kind", 0, 21), "node_kind holds"),
        (_column("node_name", 0, 9999), "node_name holds"),
        (_column("node_name", 0, 0), "argument 0 is not `name`"),
        (_column("node_kind", 0, int(V.int)), "is a int with the constant"),
        (_column("node_children", 0, 1), "not a list, tuple or composite has children"),
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
        *((_first(family, 2), f"defines {family} 2 and on; expected 1") for family in NUMBERED),
        *((_cut(name), "different lengths|adds? up to") for family in FAMILIES for name in family.columns),
        *((_cut(name), "adds? up to") for family in FAMILIES for name in family.nested_columns),
        (lambda t: t[0].append(t[0][0]), "defines a string twice"),
    ],
)
def test_definitions_that_break_a_rule_are_refused(capture: Path, edit: Callable[[Tables], None], match: str) -> None:
    change_tables(capture, edit)
    refused(capture, match)


def _one_signature(kind: RecordKind, nodes: list[tuple[int, int, int, int]], args: int) -> Callable[[Tables], None]:
    """Replace all signatures by one with these node rows."""

    def edit(tables: Tables) -> None:
        columns = tables[1]
        for name, value in zip(SIGNATURES.columns, (kind, 0, 0, args, 0, len(nodes)), strict=True):
            columns[name] = np.array([value], columns[name].dtype)
        for place, name in enumerate(SIGNATURES.nested_columns):
            columns[name] = np.array([node[place] for node in nodes], columns[name].dtype)

    return edit


LIST = (int(V.list), 0, 0, 1)
LEAF = (int(V.none), 0, 0, 0)


def test_nesting_is_bounded_and_exactly_that_deep_is_fine(capture: Path) -> None:
    change_tables(capture, _one_signature(RecordKind.collective, [LIST] * 64 + [LEAF], 1))
    refused(capture, "nested deeper than 64")
    write_everything_again(capture)
    change_tables(capture, _one_signature(RecordKind.collective, [LIST] * 5000 + [LEAF], 1))
    refused(capture, "nested deeper than 64")
    write_everything_again(capture)
    change_tables(capture, _one_signature(RecordKind.collective, [LIST] * 63 + [LEAF], 1))
    assert len(open_capture(capture).signatures[1].nodes) == 64
    write_everything_again(capture)
    wide = [(int(V.list), 0, 0, 300), *[(int(V.list), 0, 0, 0)] * 300]
    change_tables(capture, _one_signature(RecordKind.collective, wide, 1))
    assert len(open_capture(capture).signatures[1].nodes) == 301


@pytest.mark.parametrize(
    "nodes",
    [
        [(int(V.list), 0, 0, 2), LEAF],
        [(int(V.list), 0, 0, 0), LEAF],
        [(int(V.list), 0, 0, 0xFFFFFFFF), LEAF],
        [LEAF, LEAF],
        [LIST],
    ],
)
def test_trees_that_do_not_add_up_are_refused(capture: Path, nodes: list[tuple[int, int, int, int]]) -> None:
    change_tables(capture, _one_signature(RecordKind.collective, nodes, 1))
    refused(capture, "do not form its arguments and results")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in RecordKind
        if kind not in (RecordKind.none, RecordKind.op, RecordKind.collective, RecordKind.global_state)
    ],
)
def test_records_without_the_arguments_of_their_kind_are_refused(capture: Path, kind: RecordKind) -> None:
    for nodes in ([], [LEAF], [LEAF] * 14):
        change_tables(capture, _one_signature(kind, nodes, len(nodes)))
        refused(capture, f"a {kind.name} signature")
        write_everything_again(capture)


def test_a_setting_that_is_no_scalar_is_refused(capture: Path) -> None:
    change_tables(capture, _one_signature(RecordKind.global_state, [(int(V.tensor), 1, 0, 0)], 1))
    refused(capture, "settings that are not named scalars")


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
            np.array([0, 1, 1], np.uint32),
            np.append(tables[1]["scope_name"], tables[1]["scope_name"][1]),
        )

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
        replace(frames[second], header=replace(frames[second].header, first_ordinal=4)),
    )
    path.write_bytes(join(preamble, frames))
    with pytest.raises(InvalidCapture, match="scope holds|signature holds"):
        check_capture(path)
