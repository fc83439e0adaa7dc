"""What is written is what is read."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_intdigest

from replayfmt.format.codes import (
    Codec,
    DType,
    Layout,
    MemoryFormat,
    OpStatus,
    RecordKind,
    StorageOrigin,
    TensorFlag,
    ValueKind,
)
from replayfmt.format.maintenance import check_capture
from replayfmt.format.model import (
    CaptureInfo,
    CompositeValue,
    Device,
    DeviceValue,
    Generator,
    GeneratorValue,
    Kernel,
    Node,
    OpaqueValue,
    PayloadValue,
    ProcessGroupValue,
    RangeValue,
    RecipeValue,
    Scope,
    Storage,
    StorageValue,
    TensorDigest,
    TensorMeta,
    TensorValue,
)
from replayfmt.format.reader import CaptureReader, open_capture
from replayfmt.format.writer import CaptureWriter

from .bindings import bindings
from .samples import SESSION, TENSOR_DIGEST, Records, op, write_everything, write_small

V = ValueKind


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> CaptureReader:
    path = tmp_path_factory.mktemp("capture") / "everything.opreplay"
    write_everything(path)
    check_capture(path)
    return open_capture(path)


def test_a_closed_capture_is_complete_and_has_no_warnings(everything: CaptureReader) -> None:
    assert everything.complete
    assert everything.incomplete_reason == ""
    assert everything.warnings == []
    assert everything.version == (1, 0)
    assert everything.length == Path(everything.path).stat().st_size


def test_the_session_comes_back(everything: CaptureReader) -> None:
    assert everything.session == SESSION


def test_absent_strings_of_a_session_stay_none(tmp_path: Path) -> None:
    write_small(tmp_path / "a.opreplay")
    session = open_capture(tmp_path / "a.opreplay").session
    assert session.torch_version is None and session.host is None and session.argv == () and session.settings == {}


def test_definitions_come_back_by_id_with_none_for_zero(everything: CaptureReader) -> None:
    for sequence in (
        everything.strings,
        everything.devices,
        everything.kernels,
        everything.generators,
        everything.scopes,
        everything.metas,
        everything.signatures,
        everything.files,
        everything.file_ranges,
        everything.recipes,
    ):
        assert sequence[0] is None
    assert everything.devices[1] == Device("cpu", -1, "a processor")
    assert everything.devices[2] == Device("cuda", 0, "a GPU", '{"capability": [9, 0]}')
    assert everything.kernels[1].qualified_name == "aten::add.Tensor"
    assert everything.generators[1:] == [Generator(1, True), Generator(1, False)]
    assert everything.scopes[2] == Scope(1, "step 1 – größer")
    assert everything.scope_path(2) == "execute/step 1 – größer" and everything.scope_path(0) == ""
    assert everything.metas[2] == TensorMeta(
        DType.complex64, Layout.strided, 2, (3,), (2,), TensorFlag.conj | TensorFlag.requires_grad
    )


def test_every_record_kind_is_there(everything: CaptureReader) -> None:
    kinds = {record.kind for record in everything.records()}
    assert kinds == set(RecordKind) - {RecordKind.none}


def test_every_value_kind_comes_back_as_its_value(everything: CaptureReader) -> None:
    record = next(r for r in everything.records() if r.signature.kernel == 2)
    assert {node.kind for node in record.signature.nodes} == set(ValueKind)
    meta = everything.metas
    a, c = TensorValue(1, 1, 0, meta[1]), TensorValue(3, 4, 2, meta[2])
    b, nowhere = TensorValue(2, 2, 0, meta[1]), TensorValue(4, 0, 0, meta[3])
    values = dict(zip((node.name for node in record.signature.args), record.args, strict=True))
    assert math.isinf(values.pop("real"))
    assert str(values.pop("both")) == str(complex(-0.0, math.nan))
    assert values == {
        "nothing": None,
        "no": False,
        "whole": -(1 << 63),
        "text": "",
        "dtype": DType.bfloat16,
        "layout": Layout.sparse_coo,
        "memory_format": MemoryFormat.channels_last,
        "device": DeviceValue(2),
        "tensor": c,
        "storage": StorageValue(3),
        "list": [a, [(1 << 63) - 1, None], 1e-310],
        "generator": GeneratorValue(2),
        "group": ProcessGroupValue("world"),
        "opaque": OpaqueValue("a ScriptObject"),
        "payload": PayloadValue(4),
        "composite": CompositeValue("sparse_coo", (b, nowhere, True)),
        "tuple": ("x", ()),
        "range": RangeValue(1),
        "recipe": RecipeValue(3),
    }
    assert values["no"] is False
    assert record.results == ([b, c], True)
    assert record.argument("text") == ""
    with pytest.raises(KeyError):
        record.argument("missing")


def test_times_threads_and_scopes_come_back_with_capture_order_winning(everything: CaptureReader) -> None:
    records = list(everything.records())
    # The seventh record began before the sixth, on another thread; the next one six seconds later.
    assert [r.start_ns for r in records[:8]] == [10, 20, 20, 21, 22, 30, 30, 6_000_000_000]
    assert records[6].thread == 3
    assert records[5].duration_ns == 700
    assert records[6].duration_ns == 0xFFFFFFFF
    assert records[5].device_duration_ns is None
    assert records[7].duration_ns is None, "of this op alone it is not known"
    assert {record.duration_ns for record in records if record.kind is not RecordKind.op} == {None}
    assert [r.ordinal for r in records] == list(range(everything.record_count))
    assert records[7].signature.status == OpStatus.raised


def test_a_digest_comes_back_from_its_record(everything: CaptureReader) -> None:
    record = next(r for r in everything.records() if r.kind == RecordKind.digest)
    assert repr(TensorDigest.from_record(record)) == repr(TENSOR_DIGEST)
    plain = next(r for r in everything.records() if r.kind == RecordKind.host_read and r.args[0] == "tolist")
    assert TensorDigest.from_record(plain) is None


def test_storages_come_back_by_id(everything: CaptureReader) -> None:
    assert everything.storage_count == 10
    assert everything.storage(1) == Storage(1, 24, 1, StorageOrigin.payload, 1)
    assert everything.storage(4) == Storage(4, 4096, 2, StorageOrigin.absent, 0)
    assert everything.storage(5) == Storage(5, 8, 1, StorageOrigin.payload, 2)
    assert [(everything.storage(i).origin, everything.storage(i).payload) for i in range(6, 11)] == [
        *((StorageOrigin.external_file, number) for number in (1, 2, 3)),
        *((StorageOrigin.initializer, number) for number in (1, 2)),
    ]
    with pytest.raises(IndexError):
        everything.storage(11)


def test_payloads_come_back_and_lie_aligned_in_the_file(everything: CaptureReader) -> None:
    contents = {
        1: np.arange(6, dtype=np.float32).tobytes(),
        2: b"",
        3: (np.arange(5000, dtype=np.int64) % 11).tobytes(),
        4: np.random.default_rng(7).random(9000).tobytes(),
        5: b"def twice(x):\n    ...\n",
        6: b"\x7fELF\x00" * 5000,
        7: bytes(range(256)) * 20,
    }
    data = Path(everything.path).read_bytes()
    for info in everything.payloads:
        assert bytes(everything.payload(info.id)) == contents[info.id]
        buffer = bytearray(info.raw_bytes)
        everything.read_payload_into(info.id, buffer)
        assert buffer == contents[info.id]
        assert info.offset % 64 == 0
        if info.codec == Codec.none:
            assert data[info.offset : info.offset + info.stored_bytes] == contents[info.id]
    plain, packed = Codec.none, Codec.zstd
    assert [info.codec for info in everything.payloads] == [plain, plain, packed, plain, plain, packed, packed]
    assert len(everything.payloads) == len(contents)
    assert everything.payload_info(4).digest == f"{xxh3_128_intdigest(contents[4]):032x}"


def test_a_wrong_buffer_for_a_payload_is_the_callers_error(everything: CaptureReader) -> None:
    with pytest.raises(ValueError, match="a buffer of 3 bytes for payload 1 of 24"):
        everything.read_payload_into(1, bytearray(3))
    with pytest.raises(IndexError):
        everything.payload(99)


def test_the_summary_counts_everything(everything: CaptureReader) -> None:
    summary = everything.summary
    records = list(everything.records())
    kinds = set(RecordKind) - {RecordKind.none}
    assert summary.records == {kind: sum(record.kind == kind for record in records) for kind in kinds}
    assert summary.kernel_calls == {1: 1, 2: 1, 3: 1}
    assert summary.unsupported == {"compiled_region": 2, "triton_launch": 1}
    assert (summary.storages, summary.absent_storages) == (10, 1)
    assert summary.origins == {
        StorageOrigin.op: 1,
        StorageOrigin.uninitialized: 1,
        StorageOrigin.payload: 2,
        StorageOrigin.absent: 1,
        StorageOrigin.external_file: 3,
        StorageOrigin.initializer: 2,
    }
    assert summary.origin_bytes == {
        StorageOrigin.op: 24,
        StorageOrigin.payload: 32,
        StorageOrigin.absent: 4096,
        StorageOrigin.external_file: 536,
        StorageOrigin.initializer: 208,
    }
    assert summary.annotated == 1
    assert summary.storage_payload_bytes == sum(info.raw_bytes for info in everything.payloads)
    assert summary.ended_ns == 21_000_000_000 and not summary.recovered
    recounted = everything.recount()
    assert recounted.records == summary.records and recounted.ended_ns is None


def test_records_can_be_asked_for_in_ranges_and_one_by_one(everything: CaptureReader) -> None:
    records = list(everything.records())
    assert [r.ordinal for r in everything.records(3, 11)] == list(range(3, 11))
    assert list(everything.records(5, 5)) == [] and list(everything.records(1000)) == []
    for ordinal in (0, 7, 8, len(records) - 1):
        assert repr(everything.record(ordinal)) == repr(records[ordinal])
    for ordinal in (-1, len(records)):
        with pytest.raises(IndexError):
            everything.record(ordinal)


def test_frames_give_columns_with_slot_starts(everything: CaptureReader) -> None:
    assert [info.count for info in everything.record_frames] == [8, everything.record_count - 8]
    frame = everything.frame(1)
    assert frame.first_ordinal == 8 and frame.offset == everything.record_frames[1].offset
    assert len(frame.tensor_first) == frame.count + 1 and frame.int_first[-1] == len(frame.ints)
    assert everything.frame_of(7) == 0 and everything.frame_of(8) == 1
    with pytest.raises(IndexError):
        everything.frame(2)


def test_the_same_content_gets_the_same_id(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path / "a.opreplay", SESSION)
    assert writer.string("x") == writer.string("x") != writer.string("y")
    assert writer.device(Device("cpu")) == writer.device(Device("cpu"))
    assert writer.kernel(Kernel("a::b", "default", "s")) == writer.kernel(Kernel("a::b", "default", "s"))
    assert writer.scope(0, "x") == writer.scope(0, "x") != writer.scope(1, "x")
    meta = TensorMeta(DType.int8, Layout.strided, 1, (1, 2), (2, 1))
    other = TensorMeta(DType.int8, Layout.strided, 1, (1, 2), (2, 2))
    assert writer.meta(meta) == writer.meta(meta) != writer.meta(other)
    signature = op(1, (Node(V.int, "a"),))
    assert writer.signature(signature) == writer.signature(op(1, (Node(V.int, "a"),))) != writer.signature(op(1, ()))
    assert writer.generator(Generator(1, True)) != writer.generator(Generator(1, True))
    assert writer.payload(b"abc") == writer.payload(bytearray(b"abc")) != writer.payload(b"abd")
    writer.abandon()


def test_an_empty_capture_is_a_capture(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    CaptureWriter(path, SESSION).close(0)
    check_capture(path)
    reader = open_capture(path)
    assert reader.complete and reader.record_count == 0 and list(reader.records()) == []
    assert reader.storage_count == 0 and len(reader.payloads) == 0
    assert reader.summary.ended_ns is None


def test_strings_without_a_utf8_form_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    writer = CaptureWriter(path, CaptureInfo(SESSION.session_id, "opreplay", "1", argv=("caf\udce9",)))
    number = writer.string("caf\udce9")
    writer.close(0)
    reader = open_capture(path)
    assert reader.strings[number] == "caf\\udce9" and reader.session.argv == ("caf\\udce9",)


def test_the_bindings_that_flatc_generates_read_what_was_written(everything: CaptureReader) -> None:
    head = bindings("Head").Head.GetRootAs(everything.read_frame(0)[1])
    assert head.SessionId().decode() == SESSION.session_id and head.WorldSize() == 4 and head.ArgvLength() == 3
    tables = next(i for i, row in enumerate(everything.contents.frames) if row["kind"] == 2)
    first = bindings("Tables").Tables.GetRootAs(everything.read_frame(tables)[1])
    assert first.FirstString() == 1 and first.Strings(0).decode() == everything.strings[1]
    position = next(i for i, row in enumerate(everything.contents.frames) if row["kind"] == 3)
    records = bindings("Records").Records.GetRootAs(everything.read_frame(position)[1])
    frame = everything.frame(0)
    assert records.SignatureAsNumpy().tolist() == frame.signature.tolist()
    assert records.FloatsAsNumpy().tobytes() == frame.floats.tobytes()
    assert records.FirstStorage() == 1


# -------------------------------------------------------------------------------------------------------- properties

names = st.text(max_size=8)
leaves = st.one_of(
    st.sampled_from((V.none, V.int, V.float, V.complex, V.tensor, V.storage, V.payload)).map(Node),
    st.booleans().map(lambda b: Node(V.bool, "", int(b))),
    st.text(max_size=5).map(lambda t: Node(V.string, "", t)),
    st.sampled_from(list(DType)[1:]).map(lambda d: Node(V.dtype, "", int(d))),
)
nodes = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3).map(lambda children: Node(V.list, "", None, tuple(children))),
    max_leaves=8,
)
signatures = st.tuples(st.lists(nodes, max_size=4), st.lists(nodes, max_size=2))
ints64 = st.integers(-(1 << 63), (1 << 63) - 1)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_any_records_come_back(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.opreplay"
        writer = CaptureWriter(path, SESSION)
        cpu = writer.device(Device("cpu"))
        kernel = writer.kernel(Kernel("a::b", "default", "s"))
        payload = writer.payload(data.draw(st.binary(max_size=700)))
        records = Records(writer)
        expected = []
        for _frame in range(data.draw(st.integers(0, 3))):
            storage = records.storage(data.draw(st.integers(0, 1 << 60)), cpu, StorageOrigin.op)
            for _record in range(data.draw(st.integers(1, 4))):
                args, results = data.draw(signatures)
                named = tuple(Node(n.kind, data.draw(names), n.constant, n.children) for n in args)
                signature = op(kernel, named, tuple(results))
                slots: tuple[list, list, list] = ([], [], [])
                for node in signature.nodes:
                    if node.kind == V.tensor:
                        sizes = tuple(data.draw(st.lists(st.integers(0, 1 << 60), max_size=3)))
                        meta = writer.meta(TensorMeta(DType.float32, Layout.strided, cpu, sizes, sizes))
                        slots[0].append(records.tensor(storage, data.draw(st.integers(0, 1 << 60)), meta))
                    elif node.kind == V.int:
                        slots[1].append(data.draw(ints64))
                    elif node.kind in (V.storage, V.payload):
                        slots[1].append(storage if node.kind == V.storage else payload)
                    elif node.kind in (V.float, V.complex):
                        slots[2].extend(data.draw(st.floats()) for _ in range(1 + (node.kind == V.complex)))
                records.add(
                    signature,
                    *map(tuple, slots),
                    start=data.draw(st.integers(0, 1 << 59)),
                    duration=data.draw(st.integers(0, 1 << 33)),
                )
                expected.append((signature, [records.tensors[t] for t in slots[0]], slots[1], slots[2]))
            records.write()
        writer.close(1)
        check_capture(path)
        reader = open_capture(path)
        for record, (signature, tensors, ints, floats) in zip(reader.records(), expected, strict=True):
            assert record.signature == signature
            flat = list(_leaves((*record.args, *record.results)))
            assert [(t.storage, t.offset) for t in flat if isinstance(t, TensorValue)] == [t[:2] for t in tensors]
            whole = [
                getattr(v, "id", v)
                for v in flat
                if isinstance(v, int | StorageValue | PayloadValue) and not isinstance(v, bool | DType)
            ]
            assert whole == ints
            real = [
                part
                for v in flat
                if isinstance(v, float | complex)
                for part in ((v,) if isinstance(v, float) else (v.real, v.imag))
            ]
            assert np.array(real).tobytes() == np.array(floats, np.float64).tobytes()
        starts = [record.start_ns for record in reader.records()]
        assert starts == sorted(starts) or len(reader.record_frames) > 1


def _leaves(values):
    for value in values:
        if isinstance(value, list | tuple):
            yield from _leaves(value)
        else:
            yield value
