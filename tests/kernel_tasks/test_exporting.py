"""A task holds the calls that a program really made, with their inputs and outputs, and runs with PyTorch alone."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Tools

import replayfmt
from replayfmt.benchmark.candidates.judged import run_judge
from replayfmt.benchmark.candidates.task_cases import Case, Options, load_task, read_safetensors
from replayfmt.errors import ReplayRefused, UsageError

from .conftest import Exported

ALONE = (
    "import sys, runpy; sys.modules['replayfmt'] = None; sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


def described(task: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((task / "task.json").read_text())
    return found


def check(task: Path, *arguments: object) -> str:
    """What check.py prints where OpReplay cannot be imported."""
    command = [sys.executable, "-I", "-c", ALONE, str(task / "check.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=task)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("inputs", ["captured", "synthesized", "none"])
def test_the_reference_passes_with_pytorch_alone(inputs: str, exported: Exported) -> None:
    task = exported(kernel="aten::addmm", inputs=inputs)
    assert check(task).startswith("reference: as expected in ")
    files = len(list(task.glob("*.safetensors")))
    assert (files > 0) == (inputs != "none")


@pytest.mark.slow
def test_each_distinct_call_is_a_workload_with_its_weight(exported: Exported) -> None:
    found = described(exported(kernel="aten::addmm"))
    workloads = found["workloads"]
    assert sorted(each["calls"] for each in workloads) == [1, 1, 3, 3]
    assert {tuple(each["arguments"]["mat1"]["sizes"]) for each in workloads} == {(4, 64), (7, 64), (4, 128), (7, 128)}
    assert all(each["arguments"]["mat2"]["strides"][0] == 1 for each in workloads), "a transposed view stays one"
    assert sum(each["share_of_captured_time"] for each in workloads) < 1
    assert all(each["flops"] and each["bytes_read"] and not each["written"] for each in workloads)
    assert found["function"] == "addmm" and found["verified"].startswith("bitwise")


@pytest.mark.slow
def test_calls_with_other_content_are_kept_and_equal_ones_once(tmp_path: Path, exported: Exported) -> None:
    path = tmp_path / "same.opreplay"
    with replayfmt.capture(path):
        x = torch.arange(8.0)
        for _ in range(3):
            torch.tanh(x)
        for step in range(3):
            torch.sinh(x + step)
    assert len(described(exported(path, kernel="aten::tanh"))["workloads"][0]["cases"]) == 1
    assert len(described(exported(path, kernel="aten::sinh"))["workloads"][0]["cases"]) == 2


@pytest.mark.slow
def test_a_benchmark_of_single_ops_gives_the_share_of_measured_time(
    capture: Path, tmp_path: Path, tools: Tools
) -> None:
    times, task = tmp_path / "times.json", tmp_path / "task"
    measure = ("--per-op", "--benchmark-min-time=1x", "--benchmark-precision=off", f"--benchmark-out={times}")
    assert tools("benchmark", *measure, capture).code == 0
    assert tools("export", "--format=kernel-task", "--kernel=aten::mm", f"--benchmark={times}", capture, task).code == 0
    shares = [each["share_of_measured_time"] for each in described(task)["workloads"]]
    assert len(shares) == 2 and 0 < sum(shares) < 1


@pytest.mark.slow
def test_a_size_limit_keeps_the_calls_that_take_the_most_time(exported: Exported) -> None:
    found = described(exported(kernel="aten::addmm", limit_bytes=40_000))
    weights = [each["captured_ns"] for each in found["workloads"]]
    assert weights == sorted(weights, reverse=True)
    assert [len(each["cases"]) for each in found["workloads"]] == [1, 0, 0, 0]
    assert len(found["left_out"]) == 3 and "over the size limit" in found["left_out"][0]
    assert "as expected in 4 cases" in check(exported(kernel="aten::addmm", limit_bytes=40_000))


@pytest.mark.slow
def test_aliases_offsets_and_written_arguments_are_those_of_the_program(tmp_path: Path, exported: Exported) -> None:
    path = tmp_path / "views.opreplay"
    with replayfmt.capture(path):
        x = torch.arange(40.0)
        x[3:8].add_(x[12:17])
        x.view(5, 8)[:, ::2].mul_(torch.tensor(2.0))
    (add,) = described(exported(path, kernel="aten::add_"))["workloads"]
    assert add["shared_memory"] == [["self", "other"]] and add["written"] == ["self", "other"]
    assert [add["arguments"][name]["captured_offset"] for name in ("self", "other")] == [3, 12]
    for kernel in ("aten::add_", "aten::mul_"):
        assert "as expected" in check(exported(path, kernel=kernel))
    right = "def add_(self, other, *, alpha=1):\n    self.copy_(self - -alpha * other)\n    return self\n"
    wrong = "def add_(self, other, *, alpha=1):\n    self.copy_(self - -alpha * other - 1)\n    return self\n"
    away = "def add_(self, other, *, alpha=1):\n    return self - -alpha * other\n"
    beside = right.replace(
        "    return", "    self.as_strided((1,), (1,), self.storage_offset() + 6).zero_()\n    return"
    )
    texts = {"right": right, "wrong": wrong, "away": away, "beside": beside}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    files = [str(tmp_path / f"{name}.py") for name in texts]
    found = run_judge(str(exported(path, kernel="aten::add_")), files, Options(min_time_s=0))
    verdicts = dict(zip(texts, (each["verdict"] for each in found["candidates"]), strict=True))
    assert verdicts["right"] == "accepted" and verdicts["away"] == "aliasing"
    assert verdicts["wrong"] == verdicts["beside"] == "wrong"


def test_the_files_have_names_and_shapes_that_other_readers_understand(exported: Exported) -> None:
    task = exported(kernel="aten::addmm")
    (workload, *_rest) = described(task)["workloads"]
    file = task / workload["cases"][0]["file"]
    header = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
    assert set(header) == {"input.self", "input.mat1", "input.mat2", "result.0"}
    assert header["input.mat1"]["shape"] == workload["arguments"]["mat1"]["sizes"]
    assert header["result.0"]["dtype"] == "F32" and set(read_safetensors(file)) == set(header)


@pytest.mark.slow
def test_a_scope_becomes_one_function_with_a_workload_for_each_distinct_pass(exported: Exported) -> None:
    task = exported(scope="block")
    found = described(task)
    assert found["kind"] == "fusion" and sorted(each["calls"] for each in found["workloads"]) == [1, 3]
    assert all(len(each["results"]) == 1 for each in found["workloads"]), "the statistics of the norm die in it"
    assert "as expected" in check(task)


@pytest.mark.slow
def test_a_range_becomes_one_function_and_a_fused_kernel_is_judged(
    exported: Exported, tmp_path: Path, tools: Tools
) -> None:
    path = tmp_path / "tail.opreplay"
    with replayfmt.capture(path):
        x = torch.randn(6, 10)
        with replayfmt.scope("tail"):
            y = torch.tanh(x * 2.0) + x
        y.sum()
    task = exported(path, scope="tail")
    texts = {
        "fused": "import torch\ndef fused(x0):\n    return torch.tanh(2.0 * x0).add_(x0)\n",
        "broken": "import torch\ndef fused(x0):\n    return torch.tanh(2.0 * x0)\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    good = tools("benchmark", "--compare", f"--candidates={tmp_path / 'fused.py'}", task)
    assert good.code == 0, good.out + good.err
    bad = tools("benchmark", "--compare", f"--candidates={tmp_path / 'broken.py'}", task)
    assert bad.code == 1 and "REJECTED: wrong" in bad.out


def test_what_a_task_cannot_express_is_refused_and_listed(exported: Exported, tmp_path: Path) -> None:
    path = tmp_path / "random.opreplay"
    with replayfmt.capture(path):
        torch.nn.functional.dropout(torch.ones(4), 0.5).exp()
        torch.ones(3).add(1).add(torch.ones(3))
    with pytest.raises(ReplayRefused, match="none of the calls") as refused:
        exported(path, kernel="aten::bernoulli_")
    assert "draws random numbers" in str(refused.value.findings)
    with pytest.raises(UsageError, match="a task is of one"):
        exported(path, kernel="aten::*")


@pytest.mark.slow
def test_the_tool_exports_checks_its_flags_and_never_replaces_what_is_no_task(
    capture: Path, tmp_path: Path, tools: Tools
) -> None:
    out = tmp_path / "task"
    done = tools("export", "--format=kernel-task", "--kernel=aten::mm", capture, out)
    assert done.code == 0 and "2 workloads of 4 calls" in done.out
    assert "exists already" in tools("export", "--format=kernel-task", "--kernel=aten::mm", capture, out).err
    assert tools("export", "--format=kernel-task", "--kernel=aten::mm", "--force", capture, out).code == 0
    assert "--kernel, --scope or --ops" in tools("export", "--format=kernel-task", capture, tmp_path / "b").err
    assert "--size-limit" in tools("export", "--format=kernel-task", "--size-limit=x", "--kernel=a", capture, out).err
    assert "is for --format=kernel-task" in tools("export", "--inputs=none", capture, tmp_path / "c").err
    other = tmp_path / "mine"
    other.mkdir()
    (other / "note.txt").write_text("keep")
    refused = tools("export", "--format=kernel-task", "--kernel=aten::mm", "--force", capture, other)
    assert refused.code == 2 and (other / "note.txt").exists()


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    return [path, *(each for key, item in inner for each in _places(item, (*path, key)))]


@pytest.mark.slow
def test_a_task_with_anything_in_the_place_of_anything_is_read_or_refused_in_one_line(
    tmp_path: Path, exported: Exported, tools: Tools
) -> None:
    task = described(exported(kernel="aten::addmm", inputs="none"))
    wrong = tmp_path / "task.json"
    for path in _places(task)[1:]:
        for value in (-1, "x", 1e308, 2**70, True, None, [], {}, [[7]]):
            changed = json.loads(json.dumps(task))
            inside = changed
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = value
            wrong.write_text(json.dumps(changed))
            with contextlib.suppress(ValueError):
                load_task(tmp_path)
    for text in ("[" * 100_000, '{"format": ', "9" * 5000, '{"format": "opreplay-kernel-task", "version": 1}'):
        wrong.write_text(text)
        ran = tools("benchmark", "--compare", f"--candidates={tmp_path}", tmp_path)
        assert ran.code == 2 and str(tmp_path) in ran.err and len(ran.err.splitlines()) == 1, ran.err
    for header in (
        b"[]",
        b'{"a": 1}',
        b'{"a": {"data_offsets": [0]}}',
        b'{"a": {"data_offsets": ["x", 1]}}',
        b"[" * 100_000,
    ):
        (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(ValueError, match="safetensors"):
            read_safetensors(tmp_path / "a.safetensors")


def test_a_case_whose_content_is_not_what_was_exported_is_refused(tmp_path: Path, exported: Exported) -> None:
    folder = exported(kernel="aten::addmm")
    task = described(folder)
    workload = task["workloads"][0]
    file = workload["cases"][0]["file"]
    right = (folder / file).read_bytes()
    first = 8 + int.from_bytes(right[:8], "little")
    output = torch.zeros(workload["results"][0]["sizes"])

    def read(content: bytes) -> None:
        (tmp_path / file).write_bytes(content)
        case = Case(tmp_path, task, workload, 0, None)
        assert not [name for name in vars(case) if name in ("expected", "outputs")], "a kernel could find them"
        assert all(torch.is_tensor(each) for each in case.inputs) and len(case.inputs) == len(workload["storages"])
        case.like(case.outputs(), "result.0", output)

    read(right)
    for content, words in (
        (right[: first + 1] + bytes([right[first + 1] ^ 1]) + right[first + 2 :], "is damaged: its inputs are not"),
        (right.replace(b'"input.mat1"', b'"input.mat9"'), "expected the inputs .*'input.mat1'"),
        (b"\2\0\0\0\0\0\0\0{}", "has \\[\\]; expected"),
    ):
        with pytest.raises(ValueError, match=words):
            read(content)
    output = torch.zeros(3)
    with pytest.raises(ValueError, match=r"result.0 has .* expected 12: torch.float32 of \[3\]"):
        read(right)
