"""Execution traces of programs that make all of their inputs themselves: a replay computes what they did."""

from __future__ import annotations

import copy
import gzip
import io
import json
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import replayfmt
from replayfmt.errors import InvalidCapture
from replayfmt.format.codes import RecordKind, StorageOrigin
from replayfmt.format.reader import open_capture
from replayfmt.importers.execution_trace.importer import import_execution_trace
from replayfmt.importers.importing import sniff
from replayfmt.replay.plan import Plan

from .observed import ADD_, MM, RELU, Traced, Written, as_schema, observe


def made(*sizes: int, start: int = 1) -> torch.Tensor:
    """Content that comes from operators alone, none of which takes a Python number as a tensor."""
    elements = torch.Size(sizes).numel()
    return torch.arange(start, start + elements, dtype=torch.float32).sin().view(sizes)


def complex_made(*sizes: int) -> torch.Tensor:
    return torch.complex(made(*sizes), made(*sizes, start=50))


def imported(tmp_path: Path, run: Callable[[], Any]) -> tuple[Path, Any]:
    returned: list[Any] = []
    path = observe(tmp_path / "trace.json", lambda: returned.append(run()))
    import_execution_trace(path, tmp_path / "out.opreplay", force=True)
    return tmp_path / "out.opreplay", returned[0]


def last_result(path: Path) -> torch.Tensor:
    """What the last op of a capture returns in a replay."""
    with replayfmt.open(path) as capture:
        return capture.ops.by_ordinal[max(capture.ops.by_ordinal)].replay()


def activations_in_place() -> torch.Tensor:
    """Autograd keeps copies of what these change, and the backward pass reads them."""
    x, weight = made(4, 4), made(4, 4, start=30).requires_grad_()
    hidden = nn.functional.silu(x @ weight, inplace=True)
    nn.functional.hardswish(hidden @ weight, inplace=True).mul_(weight).sum().backward()
    assert weight.grad is not None
    return weight.grad.clone()


def conjugates() -> torch.Tensor:
    x = complex_made(3, 3)
    product = x.conj() * x.conj()
    return torch.view_as_real(torch.mm(x.mH, x) + product.conj().resolve_conj() + x.conj().imag).clone()


def conjugates_in_the_backward_pass() -> torch.Tensor:
    x, y = complex_made(3).requires_grad_(), complex_made(3)
    torch.view_as_real(x * y * x.conj()).sum().backward()
    assert x.grad is not None
    return torch.view_as_real(x.grad).clone()


def memory_that_grows_under_its_views() -> torch.Tensor:
    x = torch.ones(4)
    view = x[:2]
    x.resize_(64).fill_(3)
    return view.exp()


@pytest.mark.parametrize(
    "run", [activations_in_place, conjugates, conjugates_in_the_backward_pass, memory_that_grows_under_its_views]
)
def test_a_replay_computes_what_the_program_computed(tmp_path: Path, run: Callable[[], torch.Tensor]) -> None:
    path, expected = imported(tmp_path, run)
    with open_capture(path) as reader:
        origins = [reader.storage(number).origin for number in range(1, reader.storage_count + 1)]
    assert StorageOrigin.absent not in origins, "everything comes from an operator of the trace"
    assert torch.equal(last_result(path), expected)


def test_a_copy_that_only_the_operator_itself_uses_is_not_taken_from_it(tmp_path: Path) -> None:
    clone = "aten::clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor"
    silu = "aten::silu_(Tensor(a!) self) -> Tensor(a!)"
    names = {}
    for used in (True, False):
        trace = Written()
        x, copied = Traced(10, 20, [4]), Traced(11, 21, [4])
        trace.node("aten::clone", clone, [x, None], [copied], number=901, parent=900)
        trace.node("aten::silu_", silu, [x], [x], number=900)
        trace.node("aten::relu", RELU, [Traced(12, 21, [4]) if used else x], [Traced(13, 22, [4])], number=902)
        import_execution_trace(trace.save(tmp_path / "t.json"), tmp_path / "o.opreplay", force=True)
        with open_capture(tmp_path / "o.opreplay") as reader:
            names[used] = [
                reader.kernels[each.signature.kernel].name for each in reader.records() if each.kind is RecordKind.op
            ]
    assert names == {True: ["aten::clone", "aten::silu_", "aten::relu"], False: ["aten::silu_", "aten::relu"]}


def test_which_view_of_conjugated_memory_a_tensor_is_is_an_assumption(tmp_path: Path) -> None:
    path, _result = imported(tmp_path, conjugates)
    with open_capture(path) as reader:
        told = [
            str((each.annotation or {}).get("assumed", "")) for each in reader.records() if each.kind is RecordKind.op
        ]
    assert told[0] == ""
    assert any("taken as conjugated" in text for text in told)
    assert any("taken as neither conjugated nor negated" in text for text in told)


def test_memory_from_resizing_is_blank_until_something_writes_to_it(tmp_path: Path) -> None:
    def run() -> None:
        index = torch.empty(0, dtype=torch.int64).resize_(3)
        index.numpy()[:] = [0, 2, 1]
        nn.functional.embedding(index, made(3, 2))

    path, _result = imported(tmp_path, run)
    with Plan(path) as plan:
        assert plan.execute(verify="none").outcome == "ok"
        assert [each.op.partition(".")[0] for each in plan.synthesis.initialized] == ["aten::embedding"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda nodes: nodes[1].update(ctrl_deps=nodes[1]["id"]), "operators that are their own parents: 1"),
        (lambda nodes: nodes[1].update(id=nodes[2]["id"]), "nodes with the id of another node: 1"),
        (lambda nodes: nodes[1].update(ctrl_deps=999_999), "operators whose parents are not in the trace: 1"),
    ],
    ids=["its own parent", "an id again", "a lost parent"],
)
def test_nodes_that_cannot_be_what_they_say_are_named_among_the_problems(
    tmp_path: Path, change: Callable[[list[dict[str, Any]]], None], problem: str
) -> None:
    trace = Written()
    for number in range(3):
        trace.node("aten::relu", RELU, [Traced(10 + number, 20 + number, [4])], [Traced(11 + number, 21 + number, [4])])
    path = trace.save(tmp_path / "whole.json")
    assert import_execution_trace(path, tmp_path / "whole.opreplay").problems == []
    damaged = copy.deepcopy(json.loads(path.read_text()))
    change(damaged["nodes"])
    path.write_text(json.dumps(damaged))
    assert any(problem in each for each in import_execution_trace(path, tmp_path / "damaged.opreplay").problems)


def packed(path: Path, members: dict[str, bytes]) -> Path:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    data = buffer.getvalue()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def chain(tmp_path: Path, length: int) -> bytes:
    """A trace of so many calls, each of what the one before returned."""
    trace = Written()
    for number in range(length):
        trace.node("aten::relu", RELU, [Traced(10 + number, 20 + number, [4])], [Traced(11 + number, 21 + number, [4])])
    return trace.save(tmp_path / "chain.json").read_bytes()


@pytest.mark.parametrize("name", ["t.tar", "t.tar.gz"])
def test_an_archive_that_was_cut_off_within_the_trace_gives_what_is_there(tmp_path: Path, name: str) -> None:
    path = packed(tmp_path / name, {"source.py": b"#", "t.json": chain(tmp_path, 200)})
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    report = import_execution_trace(path, tmp_path / "out.opreplay")
    assert 0 < report.calls()["exact"] < 200
    assert any("cut off" in problem for problem in report.problems)


def test_an_archive_that_was_cut_off_after_the_trace_lacks_resources_and_says_so(tmp_path: Path) -> None:
    trace = Written()
    trace.node(
        "triton_poi_fused_0",
        "",
        [Traced(10, 20, [16], device="cuda:0"), 16, "grid(16,)"],
        [],
        kernel_backend="triton",
        kernel_file="kernel.py",
    )
    trace.save(tmp_path / "t.json")
    path = packed(
        tmp_path / "t.tar", {"t.json": (tmp_path / "t.json").read_bytes(), "t_resources/kernel.py": b"#" * 9000}
    )
    path.write_bytes(path.read_bytes()[:-11_000])
    report = import_execution_trace(path, tmp_path / "out.opreplay")
    assert any("resources of the trace may be missing" in problem for problem in report.problems)
    assert report.calls()["incomplete"] == 1


def test_which_file_of_an_archive_was_read_is_said(tmp_path: Path) -> None:
    data = chain(tmp_path, 3)
    path = packed(tmp_path / "two.tar.gz", {"a.json": data, "b.json": data})
    assert any("a.json was read" in note for note in import_execution_trace(path, tmp_path / "out.opreplay").notes)
    with pytest.raises(InvalidCapture, match=r"other\.json, the archive's first JSON file"):
        sniff(packed(tmp_path / "other.tar", {"other.json": b'{"x": 1}', "t.json": data}))


def test_a_tensor_of_unknown_strides_lies_as_the_last_of_its_sizes_did(tmp_path: Path) -> None:
    """Autograd keeps other tensors than those that operators were given; before schema 1.1.1 only sizes tell."""
    trace = Written()
    x, y = Traced(10, 20, [2, 3]), Traced(14, 23, [2, 4])
    w, wt, kept = Traced(11, 21, [4, 3]), Traced(12, 21, [3, 4], strides=[1, 3]), Traced(13, 21, [3, 4], strides=[1, 3])
    trace.node("aten::relu", RELU, [Traced(15, 24, [4, 3])], [w])
    trace.node("aten::t", "aten::t(Tensor(a) self) -> Tensor(a)", [w], [wt])
    trace.node("aten::mm", MM, [x, kept], [y])
    path = trace.save(tmp_path / "now.json")
    path.write_text(json.dumps(as_schema(json.loads(path.read_text()), "1.0.3-chakra.0.0.4")))
    import_execution_trace(path, tmp_path / "out.opreplay")
    with open_capture(tmp_path / "out.opreplay") as reader:
        last = [each for each in reader.records() if each.kind is RecordKind.op][-1]
    assert last.argument("mat2").meta.strides == (1, 3)
    told = (last.annotation or {})["assumed"]
    assert [text.partition(":")[0] for text in told] == ["strides of self", "strides of mat2"]
    assert "another tensor of these sizes" in told[1]


def names(path: Path) -> list[str]:
    """Every op, and the reason of every unsupported record."""
    with open_capture(path) as reader:
        records = [each for each in reader.records() if each.kind in (RecordKind.op, RecordKind.unsupported)]
        return [
            reader.kernels[each.signature.kernel].name if each.kind is RecordKind.op else str(each.argument("reason"))
            for each in records
        ]


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("", ["aten::relu", "compiled_region", "aten::relu"]), ("triton", ["aten::relu", "triton_launch", "aten::relu"])],
)
def test_compiled_code_is_work_that_the_trace_does_not_show(tmp_path: Path, backend: str, expected: list[str]) -> None:
    trace = Written()
    x = Traced(10, 20, [4])
    trace.node("aten::relu", RELU, [x], [Traced(11, 21, [4])], number=902, parent=901)
    if backend:
        trace.node("triton_poi_fused_0", "", [x], [], number=903, parent=901, kernel_backend=backend)
    trace.node("CompiledFunction", "", [x], [], number=901, parent=900)
    trace.node("Torch-Compiled Region: 0/0", "", [], [], number=900)
    trace.node("aten::relu", RELU, [Traced(12, 22, [4])], [Traced(13, 23, [4])], number=910)
    import_execution_trace(trace.save(tmp_path / "t.json"), tmp_path / "out.opreplay")
    assert names(tmp_path / "out.opreplay") == expected
    with open_capture(tmp_path / "out.opreplay") as reader:
        inside = next(each for each in reader.records() if each.kind is RecordKind.op)
    assert (inside.annotation or {})["within"] == ["Torch-Compiled Region: 0/0", "CompiledFunction"]


def test_what_a_compiler_only_looked_at_is_no_work(tmp_path: Path) -> None:
    """Fake tensors call themselves CPU tensors; what handles them in Python calls operators on meta tensors."""
    trace = Written()
    fake, meta = Traced(10, 7, [4]), Traced(11, 7, [4], device="meta")
    trace.node("aten::relu", RELU, [meta], [meta], number=902, parent=901)
    trace.node("PythonDispatchMode", "", [fake], [], number=901, parent=900)
    trace.node("aten::relu", RELU, [fake], [Traced(12, 7, [4])], number=900)
    real, result = Traced(20, 30, [4]), Traced(21, 31, [4])
    trace.node("aten::relu", RELU, [real], [result], number=912, parent=911)
    trace.node("PythonDispatchMode", "", [real], [], number=911, parent=910)
    trace.node("aten::relu", RELU, [real], [result], number=910)
    report = import_execution_trace(trace.save(tmp_path / "t.json"), tmp_path / "out.opreplay")
    assert names(tmp_path / "out.opreplay") == ["aten::relu"]
    assert any("no work, left out" in note for note in report.notes)


def test_an_operator_that_python_handled_without_calling_any_stands_for_itself(tmp_path: Path) -> None:
    trace = Written()
    x = Traced(10, 20, [4])
    trace.node("PythonDispatchMode", "", [x], [], number=901, parent=900)
    trace.node("aten::add_", ADD_, [x, x, 1], [x], number=900)
    import_execution_trace(trace.save(tmp_path / "t.json"), tmp_path / "out.opreplay")
    assert names(tmp_path / "out.opreplay") == ["aten::add_"]


@pytest.mark.slow
def test_the_work_of_placing_tensors_grows_with_their_number_also_where_all_tensors_are_on_one_memory(
    tmp_path: Path,
) -> None:
    def steps(nodes: int) -> int:
        trace, count = Written(), 0
        for index in range(nodes):
            given, returned = (Traced(place, 5, [index + 3]) for place in (index + 1, index + 9000))
            trace.node("aten::relu_", "aten::relu_(Tensor(a!) self) -> Tensor(a!)", [given], [returned])
        path = trace.save(tmp_path / "t.json")
        path.write_text(json.dumps(as_schema(json.loads(path.read_text()), "1.1.0-chakra.0.0.4")))  # without strides

        def count_instructions(frame: Any, _event: str, _about: Any) -> Any:
            nonlocal count
            count += 1
            frame.f_trace_opcodes = True
            return count_instructions

        def in_allocations(frame: Any, event: str, about: Any) -> Any:
            here = frame.f_code.co_filename.endswith("execution_trace/allocations.py")
            return count_instructions(frame, event, about) if here else None

        before = sys.gettrace()
        sys.settrace(in_allocations)
        try:
            import_execution_trace(path, tmp_path / "out.opreplay", force=True)
        finally:
            sys.settrace(before)
        return count

    assert 0 < steps(240) < 2.2 * steps(120)
