"""What the writer makes of its caller's columns and definitions, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayfmt.format import record_columns
from replayfmt.format.codes import DType, FrameKind, Layout, OpStatus, RecordKind, StorageOrigin, TensorFlag, ValueKind
from replayfmt.format.frames import FLAG_CONSOLIDATED
from replayfmt.format.maintenance import check_capture, recover_capture
from replayfmt.format.model import CaptureInfo, Device, Kernel, Node, Signature, TensorMeta
from replayfmt.format.reader import open_capture
from replayfmt.format.record_columns import RecordColumns, _distinct
from replayfmt.format.writer import CaptureWriter

from .reading import read_all
from .samples import SESSION, op

V = ValueKind


# ------------------------------------------------------------------------------- what the writer refuses of its caller


def _columns(**changes: object) -> RecordColumns:
    given: dict[str, object] = dict(
        signature=[1],
        scope=[0],
        thread=[0],
        start_ns=[0],
        duration_ns=[0],
        tensors=[1],
        ints=[5],
        floats=[],
        tensor_definitions={1: (1, 0, 1)},
        first_storage=1,
        storage_bytes=[8],
        storage_device=[1],
        storage_origin=[int(StorageOrigin.op)],
        storage_payload=[0],
    )
    given.update(changes)
    return RecordColumns(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"signature": [2]}, "signature holds 2..2, allowed 1..1"),
        ({"signature": [0]}, "signature holds"),
        ({"scope": [1]}, "scope holds"),
        ({"thread": [70000]}, "thread does not fit uint16"),
        ({"start_ns": [-1]}, "start_ns is negative"),
        ({"start_ns": [(1 << 60) + 1]}, "more than 2.60"),
        ({"start_ns": [0, 1]}, "start_ns has 2 rows, expected 1"),
        ({"duration_ns": [1, 2]}, "duration_ns has 2 rows, expected 1"),
        ({"duration_ns": [-2]}, "duration_ns does not fit uint32"),
        ({"ints": []}, "0 ints slots, but"),
        ({"tensors": []}, "0 tensors slots, but"),
        ({"floats": [1.0]}, "1 floats slots, but"),
        ({"tensors": [7]}, "tensor 7 has no definition"),
        ({"tensors": [0]}, "tensor ids count from 1"),
        ({"tensor_definitions": {1: (2, 0, 1)}}, "tensor storage holds"),
        ({"tensor_definitions": {1: (1, -1, 1)}}, "tensor offset holds"),
        ({"tensor_definitions": {1: (1, 0, 2)}}, "tensor meta holds"),
        ({"first_storage": 2}, "first_storage is 2, the next"),
        ({"storage_device": [2]}, "storage_device holds"),
        ({"storage_origin": [0]}, "storage_origin holds"),
        ({"storage_payload": [1]}, "storage_payload holds"),
        ({"storage_bytes": [-1]}, "storage_bytes does not fit uint64"),
        ({"storage_origin": [int(StorageOrigin.payload)]}, "have a payload exactly if"),
        ({"storage_bytes": []}, "storage_origin has 1 rows, expected 0"),
        ({"ints": [[5]]}, "has 2 dimensions"),
        ({"ints": [0.5]}, "ints does not fit int64"),
    ],
)
def test_columns_that_contradict_each_other_are_the_callers_error_and_change_nothing(
    tmp_path: Path, changes: dict[str, object], match: str
) -> None:
    writer = CaptureWriter(tmp_path / "a.opreplay", SESSION)
    cpu = writer.device(Device("cpu"))
    writer.meta(TensorMeta(DType.int8, Layout.strided, cpu, (8,), (1,)))
    kernel = writer.kernel(Kernel("a::b", "default", "s"))
    writer.signature(op(kernel, (Node(V.tensor, "x"), Node(V.int, "n"))))
    with pytest.raises(ValueError, match=match):
        writer.records(_columns(**changes))
    writer.records(_columns())
    writer.close(1)
    check_capture(tmp_path / "a.opreplay")
    assert open_capture(tmp_path / "a.opreplay").record_count == 1


def test_records_beyond_a_frames_limits_become_several_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_columns, "MAX_BODY_BYTES", 1 << 20)
    monkeypatch.setattr(record_columns, "MAX_FRAME_RECORDS", 1000)
    path = tmp_path / "a.opreplay"
    writer = CaptureWriter(path, SESSION)
    writer.meta(TensorMeta(DType.int8, Layout.strided, writer.device(Device("cpu")), (8,), (1,)))
    kernel = writer.kernel(Kernel("a::b", "default", "s"))
    few = writer.signature(op(kernel, (Node(V.int, "n"),)))
    # A list of very many tensors in each of the last records, as a fused optimizer has.
    many = writer.signature(op(kernel, (Node(V.list, "x", None, tuple(Node(V.tensor) for _ in range(5000))),)))
    signature = np.array([few] * 10 + [many] * 20, np.uint32)
    ids = np.arange(1, 5001)
    definitions = np.stack([ids, np.ones_like(ids), ids - 1, np.ones_like(ids)], axis=1)
    writer.records(
        RecordColumns(
            signature,
            [0] * 30,
            [0] * 30,
            list(range(30)),
            [0] * 30,
            np.tile(ids, 20),
            list(range(10)),
            [],
            definitions,
            1,
            [1 << 20],
            [1],
            [int(StorageOrigin.op)],
            [0],
        )
    )
    writer.records(
        RecordColumns([few] * 2500, [0] * 2500, [0] * 2500, list(range(2500)), None, [], list(range(2500)), [], {})
    )
    writer.close(1)
    check_capture(path)
    with open_capture(path) as reader:
        sizes = [info.count for info in reader.record_frames]
        assert sum(sizes) == 2530 and max(sizes) <= 1000 and sizes[0] < 30 and len(sizes) > 5
        assert [reader.record(n).args for n in (0, 9, 30, 2529)] == [(0,), (9,), (0,), (2499,)]
        assert [reader.record(n).start_ns for n in (0, 29, 30, 2529)] == [0, 29, 0, 2499]
        for ordinal in (10, 29):
            assert [value.id for value in reader.record(ordinal).args[0]] == list(range(1, 5001))
        assert reader.storage_count == 1


@pytest.mark.slow
def test_definitions_that_do_not_fit_one_frame_stay_in_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replayfmt.format.writer._TEXT_FLUSH_BYTES", 1000)
    monkeypatch.setattr("replayfmt.format.definition_tables.MAX_BODY_BYTES", 1000)
    path, out = tmp_path / "a.opreplay", tmp_path / "b.opreplay"
    writer = CaptureWriter(path, SESSION)
    strings = [writer.string(f"string {number} " + "x" * 100) for number in range(200)]
    with pytest.raises(ValueError, match="limit is 16777216"):
        writer.string("x" * ((16 << 20) + 1))
    writer.close(1)
    recover_capture(path, out)
    for written in (path, out):
        check_capture(written)
        with open_capture(written) as reader:
            assert np.count_nonzero(reader.contents.frames["kind"] == FrameKind.tables) > 10
            assert not (reader.contents.frames["flags"] & FLAG_CONSOLIDATED).any()
            assert [reader.strings[number][:9] for number in strings[:2]] == ["string 0 ", "string 1 "]


@pytest.mark.slow
@settings(max_examples=300)
@given(
    st.lists(st.one_of(st.integers(1, 40), st.integers(1, 10**6), st.integers((1 << 60) - 50, 1 << 60)), max_size=60)
)
def test_distinct_tensors_are_found_as_numpy_finds_them(values: list[int]) -> None:
    array = np.array(values, np.uint64)
    for ours, numpys in zip(_distinct(array), np.unique(array, return_inverse=True), strict=True):
        assert ours.tolist() == numpys.tolist()


def test_definitions_of_tensors_come_as_a_mapping_or_as_rows(tmp_path: Path) -> None:
    read = []
    for name, definitions in (("a", {7: (1, 3, 1), 9: (1, 4, 1)}), ("b", np.array([[7, 1, 3, 1], [9, 1, 4, 1]]))):
        writer = CaptureWriter(tmp_path / name, SESSION)
        writer.meta(TensorMeta(DType.int8, Layout.strided, writer.device(Device("cpu")), (8,), (1,)))
        writer.signature(op(writer.kernel(Kernel("a::b", "default", "s")), (Node(V.tensor, "x"), Node(V.tensor, "y"))))
        with pytest.raises(ValueError, match="tensor 8 has no definition"):
            writer.records(_columns(tensors=[8, 7], ints=[], tensor_definitions=definitions))
        writer.records(_columns(tensors=[9, 7], ints=[], tensor_definitions=definitions))
        writer.close(1)
        read.append(read_all(tmp_path / name))
    assert read[0] == read[1]


@pytest.mark.parametrize(
    "signature",
    [
        Signature(RecordKind.op, (), (), 0, OpStatus.ok),
        Signature(RecordKind.op, (), (), 1, OpStatus.none),
        Signature(RecordKind.synchronize, (Node(V.device, "device", 1),), (), 1),
        Signature(RecordKind.op, (), (Node(V.none),), 1, OpStatus.raised),
        Signature(RecordKind.op, (), (), 9, OpStatus.ok),
        Signature(RecordKind.scope_begin, ()),
        Signature(RecordKind.scope_begin, (Node(V.string, "title", "x"),)),
        Signature(RecordKind.storage_import, (Node(V.storage, "storage"),)),
        Signature(RecordKind.global_state, (Node(V.tensor, "x"),)),
        Signature(RecordKind.global_state, (Node(V.int),)),
        op(1, (Node(V.bool, "x", 2),)),
        op(1, (Node(V.bool, "x"),)),
        op(1, (Node(V.int, "x", 3),)),
        op(1, (Node(V.dtype, "x", 0),)),
        op(1, (Node(V.dtype, "x", 99),)),
        op(1, (Node(V.string, "x", 3),)),
        op(1, (Node(V.device, "x", 7),)),
        op(1, (Node(V.tensor, "x", None, (Node(V.int),)),)),
        Signature(RecordKind.digest, (Node(V.tensor, "tensor"), Node(V.int, "of"))),
        Signature(
            RecordKind.digest,
            (Node(V.tensor, "tensor"), Node(V.int, "of"), Node(V.int, "result"), Node(V.int, "hash_low")),
        ),
    ],
    ids=lambda s: f"{s.kind.name}-{len(s.args)}",
)
def test_signatures_that_break_a_rule_are_the_callers_error(tmp_path: Path, signature: Signature) -> None:
    writer = CaptureWriter(tmp_path / "a.opreplay", SESSION)
    writer.kernel(Kernel("a::b", "default", "s"))
    with pytest.raises(ValueError):
        writer.signature(signature)
    writer.close(1)
    check_capture(tmp_path / "a.opreplay")


def test_values_nested_too_deep_are_the_callers_error(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path / "a.opreplay", SESSION)
    kernel = writer.kernel(Kernel("a::b", "default", "s"))
    node = Node(V.int)
    for _ in range(63):
        node = Node(V.list, "", None, (node,))
    writer.signature(op(kernel, (node,)))
    for depth in (1, 5000):
        for _ in range(depth):
            node = Node(V.list, "", None, (node,))
        with pytest.raises(ValueError, match="deeper than 64"):
            writer.signature(op(kernel, (node,)))
    writer.close(1)
    check_capture(tmp_path / "a.opreplay")


@pytest.mark.parametrize(
    "meta",
    [
        TensorMeta(DType.int8, Layout.strided, 9, (), ()),
        TensorMeta(DType.int8, Layout.strided, 1, (1,), ()),
        TensorMeta(DType.int8, Layout.strided, 1, (-1,), (1,)),
        TensorMeta(DType.int8, Layout.strided, 1, (1,), (-1,)),
        TensorMeta(DType.int8, Layout.strided, 1, (1 << 70,), (1,)),
        TensorMeta(DType.int8, Layout.strided, 1, (1,), (1 << 61,)),
        TensorMeta(DType.none, Layout.strided, 1, (), ()),
        TensorMeta(DType.int8, Layout.none, 1, (), ()),
        TensorMeta(DType.int8, Layout.strided, 1, (), (), TensorFlag(64)),
    ],
)
def test_metadata_that_the_format_cannot_hold_is_the_callers_error(tmp_path: Path, meta: TensorMeta) -> None:
    writer = CaptureWriter(tmp_path / "a.opreplay", SESSION)
    writer.device(Device("cpu"))
    with pytest.raises(ValueError):
        writer.meta(meta)
    writer.close(1)
    check_capture(tmp_path / "a.opreplay")


def test_a_session_that_cannot_be_stored_is_the_callers_error(tmp_path: Path) -> None:
    for session in (
        CaptureInfo("not a uuid", "p", "1"),
        CaptureInfo(SESSION.session_id, "p", "1", settings={"x": [1]}),
    ):
        with pytest.raises(ValueError):
            CaptureWriter(tmp_path / "a.opreplay", session)
    assert not list(tmp_path.iterdir())
