"""Execution traces written by hand: which node stands for what, whose memory a tensor is on, what cannot be an op."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from replayfmt.format.codes import RecordKind, StorageOrigin
from replayfmt.format.model import Record, TensorValue
from replayfmt.format.reader import open_capture
from replayfmt.importers.common.options import ImportOptions
from replayfmt.importers.common.report import ImportReport
from replayfmt.importers.execution_trace.importer import import_execution_trace
from replayfmt.importers.execution_trace.nodes import rounded

from .observed import ADD_, MM, RELU, Traced, Written

LINEAR = "aten::linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor"
T = "aten::t(Tensor(a) self) -> Tensor(a)"
EMPTY = (
    "aten::empty.memory_format(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, "
    "Device? device=None, bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor"
)
CONVOLUTION = (
    "aten::convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor"
)
CUDNN = (
    "aten::cudnn_convolution(Tensor self, Tensor weight, SymInt[] padding, SymInt[] stride, SymInt[] dilation, "
    "SymInt groups, bool benchmark, bool deterministic, bool allow_tf32) -> Tensor"
)
ALLREDUCE = (
    "c10d::allreduce_(Tensor[] tensors, __torch__.torch.classes.c10d.ProcessGroup process_group, "
    "__torch__.torch.classes.c10d.ReduceOp reduce_op, Tensor? sparse_indices, bool asyncOp, int timeout) -> "
    "(Tensor[], __torch__.torch.classes.c10d.Work)"
)


class Graph(NamedTuple):
    report: ImportReport
    names: list[str]  # of every op, and `reason: op` of every unsupported record
    records: list[Record]  # the same
    storages: list[Any]  # all, in order

    def tensors(self, place: int, *, results: bool = False) -> list[TensorValue]:
        record = self.records[place]
        return [value for value in (record.results if results else record.args) if isinstance(value, TensorValue)]


def graph(tmp_path: Path, written: Written | Path, **options: Any) -> Graph:
    path = written if isinstance(written, Path) else written.save(tmp_path / "trace.json")
    report = import_execution_trace(path, tmp_path / "out.opreplay", ImportOptions(**options), force=True)
    with open_capture(tmp_path / "out.opreplay") as reader:
        records = [each for each in reader.records() if each.kind in (RecordKind.op, RecordKind.unsupported)]
        names = [
            reader.kernels[each.signature.kernel].name
            if each.kind is RecordKind.op
            else f"{each.argument('reason')}: {each.argument('op')}"
            for each in records
        ]
        return Graph(report, names, records, [reader.storage(n) for n in range(1, reader.storage_count + 1)])


# ----------------------------------------------------------------------------------------------------- what is chosen


def test_a_composite_gives_way_to_what_it_called(tmp_path: Path) -> None:
    trace = Written()
    x, w, wt, y = (
        Traced(10, 20, [2, 3]),
        Traced(11, 21, [4, 3]),
        Traced(12, 21, [3, 4], strides=[1, 3]),
        Traced(13, 22, [2, 4]),
    )
    trace.node("aten::t", T, [w], [wt], parent=900)
    trace.node("aten::empty", EMPTY, [[8], 6, None, None, None, None], [Traced(14, 23, [8])], parent=901)
    trace.node("aten::mm", MM, [x, wt], [y], parent=900, number=901)
    trace.node("aten::linear", LINEAR, [x, w, None], [y], number=900)
    assert graph(tmp_path, trace).names == ["aten::t", "aten::mm"]


def test_calls_that_are_alike_keep_their_own_memory(tmp_path: Path) -> None:
    trace = Written()
    x, y = Traced(10, 20, [4, 4]), Traced(11, 21, [4, 4])
    for number, pair in enumerate(([x, x], [x, y], [y, x], [x, x])):
        trace.node("aten::mm", MM, pair, [Traced(30 + number, 40 + number, [4, 4])])
    trace.node("aten::add_", ADD_, [x, y, 1], [x])
    trace.node("aten::add_", ADD_, [y, x, 1], [y])
    found = graph(tmp_path, trace)
    taken = [[each.storage for each in found.tensors(place)] for place in range(6)]
    first, second = taken[1]
    assert taken == [[first] * 2, [first, second], [second, first], [first] * 2, [first, second], [second, first]]
    made = [found.tensors(place, results=True)[0].storage for place in range(6)]
    assert len({first, second, *made[:4]}) == 6 and made[4:] == [first, second]


def test_a_composite_whose_result_nothing_below_it_made_stands_for_itself(tmp_path: Path) -> None:
    trace = Written()
    trace.node("aten::t", T, [Traced(11, 21, [4, 3])], [Traced(12, 21, [3, 4], strides=[1, 3])], parent=900)
    trace.node(
        "aten::linear",
        LINEAR,
        [Traced(10, 20, [2, 3]), Traced(11, 21, [4, 3]), None],
        [Traced(13, 22, [2, 4])],
        number=900,
    )
    assert graph(tmp_path, trace).names == ["aten::linear"]


def test_the_switch_between_backends_gives_way_to_the_backend(tmp_path: Path) -> None:
    trace = Written()
    x, w, y = (
        Traced(10, 20, [1, 2, 5, 5], device="cuda:0"),
        Traced(11, 21, [3, 2, 3, 3], device="cuda:0"),
        Traced(12, 22, [1, 3, 3, 3], device="cuda:0"),
    )
    trace.node("aten::cudnn_convolution", CUDNN, [x, w, [0, 0], [1, 1], [1, 1], 1, False, False, True], [y], parent=900)
    trace.node(
        "aten::convolution", CONVOLUTION, [x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1], [y], number=900
    )
    assert graph(tmp_path, trace).names == ["aten::cudnn_convolution"]
    rewritten = graph(tmp_path, trace, rewrite="portable")
    assert rewritten.names == ["aten::convolution"]
    note = rewritten.records[0].annotation
    assert note is not None and note["rewritten"] == "portable"
    assert "rewritten: aten::cudnn_convolution by aten::convolution" in rewritten.report.notes


def test_wrappers_without_operators_are_left_out_and_counted(tmp_path: Path) -> None:
    trace = Written()
    x, y = Traced(10, 20, [4]), Traced(11, 21, [4])
    trace.node("aten::relu", RELU, [x], [y], parent=900)
    trace.node("ReluBackward0", "", [x], [], number=900, scope=1)
    trace.node("AddBackward0", "", [x], [], scope=1)
    assert graph(tmp_path, trace).names == ["aten::relu"]


def test_work_without_an_operator_is_an_unsupported_record(tmp_path: Path) -> None:
    trace = Written()
    trace.node("FlashAttnFunc", "", [Traced(10, 20, [4])], [])
    found = graph(tmp_path, trace)
    assert found.names == ["unknown_work: FlashAttnFunc"]
    assert found.report.calls()["incomplete"] == 1


def test_nodes_that_are_their_own_ancestors_are_refused(tmp_path: Path) -> None:
    from replayfmt.errors import InvalidCapture

    trace = Written()
    trace.node("a", parent=901, number=900)
    trace.node("b", parent=900, number=901)
    with pytest.raises(InvalidCapture, match="own ancestors"):
        graph(tmp_path, trace)


# -------------------------------------------------------------------------------------------------------------- memory


def test_what_an_op_returns_is_new_memory_even_at_an_address_that_was_used_before(tmp_path: Path) -> None:
    trace = Written()
    x = Traced(10, 20, [4])
    trace.node("aten::relu", RELU, [x], [Traced(11, 21, [4])])
    trace.node("aten::relu", RELU, [x], [Traced(12, 21, [4])])  # the first result was freed
    trace.node("aten::relu", RELU, [Traced(12, 21, [4])], [Traced(13, 22, [4])])
    found = graph(tmp_path, trace)
    first, second = (found.tensors(place, results=True)[0].storage for place in (0, 1))
    assert first != second
    assert found.tensors(2)[0].storage == second
    assert [each.origin for each in found.storages].count(StorageOrigin.absent) == 1


def test_an_in_place_op_keeps_the_memory_of_its_argument(tmp_path: Path) -> None:
    trace = Written()
    x, y = Traced(10, 20, [4]), Traced(11, 21, [4])
    trace.node("aten::add_", ADD_, [x, y, 1], [x])
    found = graph(tmp_path, trace)
    assert found.tensors(0)[0].storage == found.tensors(0, results=True)[0].storage


def test_a_tensor_that_does_not_fit_the_memory_at_its_address_is_another_allocation(tmp_path: Path) -> None:
    trace = Written()
    trace.node("aten::relu", RELU, [Traced(10, 20, [4])], [Traced(11, 21, [4])])
    trace.node("aten::relu", RELU, [Traced(12, 21, [64])], [Traced(13, 22, [64])])
    found = graph(tmp_path, trace)
    assert found.tensors(1)[0].storage != found.tensors(0, results=True)[0].storage
    assert "does not show" in json.dumps(found.records[1].annotation)


def test_memory_from_outside_is_as_long_as_its_longest_use(tmp_path: Path) -> None:
    trace = Written()
    trace.node("aten::relu", RELU, [Traced(10, 20, [4])], [Traced(11, 21, [4])])
    trace.node("aten::relu", RELU, [Traced(12, 20, [4], offset=12)], [Traced(13, 22, [4])])
    found = graph(tmp_path, trace)
    assert found.tensors(0)[0].storage == found.tensors(1)[0].storage
    assert found.storages[found.tensors(0)[0].storage - 1].bytes == 16 * 4


def test_empty_tensors_do_not_take_the_place_of_what_is_at_their_address(tmp_path: Path) -> None:
    trace = Written()
    x = Traced(10, 20, [4])
    trace.node("aten::relu", RELU, [Traced(11, 20, [0])], [Traced(12, 20, [0])])
    trace.node("aten::add_", ADD_, [x, x, 1], [x])
    trace.node("aten::relu", RELU, [Traced(13, 20, [0])], [Traced(14, 0, [0])])
    trace.node("aten::add_", ADD_, [x, x, 1], [x])
    found = graph(tmp_path, trace)
    assert found.tensors(1)[0].storage == found.tensors(3)[0].storage


def test_a_python_number_takes_the_dtype_with_which_the_result_is_right(tmp_path: Path) -> None:
    trace = Written()
    number = Traced(30, 40, [], kind="double", item=8)
    trace.node(
        "aten::mul",
        "aten::mul.Tensor(Tensor self, Tensor other) -> Tensor",
        [Traced(10, 20, []), number],
        [Traced(11, 21, [])],
    )
    found = graph(tmp_path, trace)
    assert [value.meta.dtype.name for value in found.tensors(0)] == ["float32", "float32"]
    assert "a Python number" in json.dumps(found.records[0].annotation)


def test_recorded_ranges_of_integers_become_content(tmp_path: Path) -> None:
    embedding = (
        "aten::embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool scale_grad_by_freq=False, "
        "bool sparse=False) -> Tensor"
    )
    trace = Written()
    for number, ranges in enumerate(('{"1":[3,3]}', '{"1":[0,8]}')):
        trace.node(
            "aten::embedding",
            embedding,
            [Traced(10, 20, [9, 4]), Traced(50 + number, 60 + number, [5], kind="long int", item=8), -1, False, False],
            [Traced(12 + number, 22 + number, [5, 4])],
            tensor_range=ranges,
        )
    found = graph(tmp_path, trace)
    constant, spread = (found.storages[found.tensors(place)[1].storage - 1] for place in (0, 1))
    assert constant.origin is StorageOrigin.payload
    assert spread.origin is StorageOrigin.initializer
    assert "between 0 and 8" in json.dumps(found.records[1].annotation)


def test_saved_integer_tensors_are_embedded(tmp_path: Path) -> None:
    embedding = (
        "aten::embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool scale_grad_by_freq=False, "
        "bool sparse=False) -> Tensor"
    )
    trace = Written()
    number = trace.node(
        "aten::embedding",
        embedding,
        [Traced(10, 20, [9, 4]), Traced(50, 60, [2], kind="long int", item=8), -1, False, False],
        [Traced(12, 22, [2, 4])],
    )
    (tmp_path / "trace_resources").mkdir()
    (tmp_path / "trace_resources" / f"nid_{number}_tid_1.dat").write_bytes(
        (5).to_bytes(8, "little") + (7).to_bytes(8, "little")
    )
    found = graph(tmp_path, trace)
    storage = found.storages[found.tensors(0)[1].storage - 1]
    assert storage.origin is StorageOrigin.payload
    with open_capture(tmp_path / "out.opreplay") as reader:
        assert bytes(reader.payload(storage.payload)) == (5).to_bytes(8, "little") + (7).to_bytes(8, "little")


# ---------------------------------------------------------------------------------------------- collectives and Triton


def collective(ranks: int) -> Written:
    trace = Written()
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "ranks": list(range(ranks)), "group_size": ranks}]
    trace.node("## process_group:init ##", "", [json.dumps(groups)], [], scope=7)
    x = Traced(10, 20, [64], device="cuda:0")
    trace.node("nccl:all_reduce", "", [x], [], parent=901, scope=7)
    trace.node(
        "record_param_comms",
        "",
        [[x]],
        [],
        parent=900,
        number=901,
        collective_name="allreduce",
        dtype="Float",
        in_msg_nelems=64,
        out_msg_nelems=64,
        pg_name="0",
        pg_desc="default_pg",
        pg_size=ranks,
    )
    trace.node("c10d::allreduce_", ALLREDUCE, [[x], "<Object>", "<Object>", None, True, -1], [[x]], number=900)
    trace.node("record_param_comms", "", [], [], collective_name="wait", pg_size=ranks)
    trace.node("aten::relu", RELU, [x], [Traced(11, 21, [64], device="cuda:0")])
    return trace


def test_a_collective_is_an_unsupported_record_with_sizes_and_group(tmp_path: Path) -> None:
    for rewrite in ("none", "portable"):
        found = graph(tmp_path, collective(2), rewrite=rewrite)
        assert found.names == ["collective: c10d::allreduce_", "aten::relu"]
        note = found.records[0].annotation
        assert note is not None
        assert note["collective"] == {
            "name": "allreduce",
            "dtype": "Float",
            "elements_in": 64,
            "elements_out": 64,
            "group": "0",
            "group_description": "default_pg",
            "ranks": [0, 1],
            "group_size": 2,
        }
        assert "64 Float elements over 2 ranks, group '0' (default_pg)" in str(found.records[0].argument("detail"))


def test_a_collective_over_one_rank_is_the_identity_where_that_is_asked_for(tmp_path: Path) -> None:
    assert graph(tmp_path, collective(1)).names == ["collective: c10d::allreduce_", "aten::relu"]
    found = graph(tmp_path, collective(1), rewrite="portable")
    assert found.names == ["aten::alias", "aten::relu"]
    assert found.tensors(0)[0].storage == found.tensors(1)[0].storage
    assert any("c10d::allreduce_ by aten::alias" in note for note in found.report.notes)


@pytest.mark.parametrize("packed", [True, False])
def test_a_triton_kernel_is_named_with_its_source(packed: bool, tmp_path: Path) -> None:
    trace = Written()
    trace.node(
        "triton_poi_fused_0",
        "",
        [Traced(10, 20, [16], device="cuda:0"), 16, "grid(16,)"],
        [],
        kernel_backend="triton",
        kernel_file="kernel.py",
    )
    path = trace.save(tmp_path / "et.json")
    if packed:
        archive = tmp_path / "et.json.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(path, "et.json")
            info = tarfile.TarInfo("et_resources/kernel.py")
            info.size = 12
            tar.addfile(info, io.BytesIO(b"# the kernel"))
        path = archive
    found = graph(tmp_path, path)
    assert found.names == ["triton_launch: triton_poi_fused_0"]
    note = found.records[0].annotation
    assert note is not None and note["triton"]["kernel"] == "triton_poi_fused_0"
    assert note["triton"]["source"] == ("# the kernel" if packed else None)
    assert note["triton"]["grid"] == "grid(16,)"


# -------------------------------------------------------------------------------------------------------------- values


def test_numbers_that_lost_digits_are_said_to_have(tmp_path: Path) -> None:
    trace = Written()
    schema = "aten::leaky_relu(Tensor self, Scalar negative_slope=0.01) -> Tensor"
    for slope in (0.01, 0.123457):
        trace.node("aten::leaky_relu", schema, [Traced(10, 20, [4]), slope], [Traced(11, 21, [4])])
    found = graph(tmp_path, trace)
    assert [(each.annotation or {})["import"] for each in found.records] == ["exact", "inferred"]
    assert [rounded(value) for value in (0.0, 1e-5, 0.176777, 0.1, float("inf"))] == [True, False, True, False, False]


@pytest.mark.slow
def test_a_list_that_was_cut_and_an_object_make_a_call_incomplete(tmp_path: Path) -> None:
    trace = Written()
    x = Traced(10, 20, [4])
    cat = "aten::cat(Tensor[] tensors, int dim=0) -> Tensor"
    trace.node("aten::cat", cat, [[x] * 4097, 0], [Traced(11, 21, [20000])])
    trace.node("aten::cat", cat, ["<Object>", 0], [Traced(11, 21, [20000])])
    trace.node("aten::relu", RELU, [Traced(11, 21, [20000])], [Traced(12, 22, [20000])])
    found = graph(tmp_path, trace)
    assert found.names == ["import_incomplete: aten::cat", "import_incomplete: aten::cat", "aten::relu"]
    assert "4097 items" in str(found.records[0].argument("detail"))
    # What the call would have returned has no content then.
    assert found.storages[found.tensors(2)[0].storage - 1].origin is StorageOrigin.absent


def test_arguments_are_matched_by_name_where_the_schema_has_changed(tmp_path: Path) -> None:
    trace = Written()
    trace.node(
        "aten::relu",
        "aten::relu(Tensor self, *, bool gone=False) -> Tensor",
        [Traced(10, 20, [4]), False],
        [Traced(11, 21, [4])],
    )
    trace.node("aten::nowhere", "aten::nowhere(Tensor self) -> Tensor", [Traced(10, 20, [4])], [Traced(11, 21, [4])])
    found = graph(tmp_path, trace)
    assert found.names == ["import_incomplete: aten::relu", "no_schema: aten::nowhere"]
    assert "gone: the operator here has no such argument" in str(found.records[0].argument("detail"))


def test_nodes_in_another_order_run_in_the_order_of_their_ids(tmp_path: Path) -> None:
    trace = Written()
    trace.node("aten::relu", RELU, [Traced(11, 21, [4])], [Traced(12, 22, [4])], number=950)
    trace.node("aten::relu", RELU, [Traced(10, 20, [4])], [Traced(11, 21, [4])], number=940)
    found = graph(tmp_path, trace)
    assert found.tensors(0, results=True)[0].storage == found.tensors(1)[0].storage


def test_a_python_number_of_unknown_value_changes_nothing_where_it_can(tmp_path: Path) -> None:
    trace = Written()
    x, number = Traced(10, 20, [3], kind="long int", item=8), Traced(30, 40, [], kind="long int", item=8)
    for operator in ("aten::add_", "aten::mul_"):
        schema = f"{operator}.Tensor(Tensor(a!) self, Tensor other{', *, Scalar alpha=1' * (operator == 'aten::add_')}"
        trace.node(operator, f"{schema}) -> Tensor(a!)", [x, number, *([1] if operator == "aten::add_" else [])], [x])
    found = graph(tmp_path, trace)
    contents = []
    with open_capture(tmp_path / "out.opreplay") as reader:
        for place in (0, 1):
            storage = found.storages[found.tensors(place)[1].storage - 1]
            assert storage.origin is StorageOrigin.payload
            contents.append(int.from_bytes(bytes(reader.payload(storage.payload)), "little"))
    assert contents == [0, 1], "each number is an allocation of its own, though both had the same address"
    assert "a Python number whose value is not in the trace" in json.dumps(found.records[1].annotation)


def test_a_tensor_without_a_storage_is_not_taken_for_none(tmp_path: Path) -> None:
    trace = Written()
    sparse = Traced(10, 0, [2, 2], device="")
    trace.node("aten::mm", MM, [sparse, Traced(11, 21, [2, 2])], [Traced(12, 22, [2, 2])])
    undefined = Traced(13, 0, [], device="", kind="nullptr (uninitialized)")
    trace.node(
        "aten::linear", LINEAR, [Traced(11, 21, [2, 2]), Traced(11, 21, [2, 2]), undefined], [Traced(14, 23, [2, 2])]
    )
    found = graph(tmp_path, trace)
    assert found.names == ["import_incomplete: aten::mm", "aten::linear"]
    assert "without a storage" in str(found.records[0].argument("detail"))
    assert found.records[1].argument("bias") is None


def test_an_address_of_a_tensor_that_was_seen_before_proves_nothing(tmp_path: Path) -> None:
    trace = Written()
    trace.node("aten::relu", RELU, [Traced(10, 20, [1])], [Traced(11, 21, [1])])
    trace.node(
        "aten::relu", RELU, [Traced(11, 21, [2], kind="double", item=8)], [Traced(12, 22, [2], kind="double", item=8)]
    )
    found = graph(tmp_path, trace)
    assert found.tensors(1)[0].storage != found.tensors(0, results=True)[0].storage
    assert found.storages[found.tensors(1)[0].storage - 1].bytes == 16
