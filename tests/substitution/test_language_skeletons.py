"""--kernel-skeleton of operators in Triton and C++: each file builds and passes unchanged, with the original's bits. It
is no contribution."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from replayfmt.benchmark.candidates.judged import run_judge
from replayfmt.benchmark.candidates.task_cases import Options
from replayfmt.dump.kernel_skeleton import kernel_skeleton
from replayfmt.dump.selection import OpSelection
from replayfmt.errors import UsageError
from replayfmt.export.kernel_task import write_task
from replayfmt.export.task_workloads import TaskOptions
from replayfmt.format.reader import open_capture
from replayfmt.replay.plan import Plan

from .conftest import Captured, Tool

LANGUAGES = ("triton", "cpp")
VIEWS_AND_NUMBERS = {"aten::t", "aten::slice", "aten::split", "aten::expand", "aten::select", "aten::unsqueeze"}
VIEWS_AND_NUMBERS |= {"aten::unbind", "aten::lift_fresh", "aten::_local_scalar_dense", "aten::equal"}


@torch.no_grad()
def every_kind_of_op() -> None:
    x, y = torch.randn(4, 6), torch.randn(6, 4).t()
    # Pointwise, also of arguments that are not contiguous.
    torch.add(x, y, alpha=2).tanh_()
    torch.mul(y, 2)
    # Reductions, products, results of several tensors.
    x.sum(), x.sum(1, keepdim=True), x.argmax(), x.cumsum(0)
    torch.mm(x, y.t())
    torch.max(x, 1), torch.sort(x, stable=True), torch.linalg.qr(x)
    functional.layer_norm(x, (6,), torch.ones(6), None)
    functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 4, 8))
    functional.conv2d(torch.randn(1, 2, 5, 5).contiguous(memory_format=torch.channels_last), torch.randn(3, 2, 3, 3))
    functional.batch_norm(torch.randn(3, 2), torch.zeros(2), torch.ones(2), training=True)
    functional.max_pool2d(torch.randn(1, 1, 4, 4), 2)
    # In place, also a part of a tensor; into a given tensor; by an index.
    x.clone()[:, ::2].add_(1.0)
    x.clone().t().relu_()
    torch.mul(x, 2.0, out=torch.empty(6, 4).t())
    z = x.clone()
    z[:, torch.tensor([0, 1])] = 0.0
    z[None, torch.tensor([1])]
    # Lists, one with an empty tensor and one without dimensions; optional arguments.
    torch._foreach_add_([x.clone(), torch.ones(2)], 1.0)
    torch._foreach_mul([x, torch.ones(0), torch.tensor(2.0)], 2.0)
    torch.cat([x, y], 1)
    torch.clamp(x, min=0.1), torch.clamp(x, max=y)
    zeros = [torch.zeros(4, 6), torch.zeros(4, 6)]
    rates = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    torch._fused_adamw_(
        [x.clone()], [x], zeros[:1], zeros[1:], [], [torch.tensor(1.0)], amsgrad=False, maximize=False, **rates
    )
    # Dtypes, and values that are not finite.
    (torch.arange(7) * 3).bitwise_and(5)
    torch.arange(5, dtype=torch.uint8).bitwise_not()
    torch.logical_not(x > y)
    (x.bfloat16() * 2, x.half().exp(), x.double().neg(), x.to(torch.float8_e4m3fn))
    torch.complex(x, x).mul(1j)
    torch.fft.fft(x.contiguous())
    torch.tensor([float("nan"), -0.0, float("inf")]).abs()
    # No dimensions, no elements, sizes that depend on content, random numbers.
    torch.tensor(3.0).exp(), torch.ones(0, 3).neg(), torch.ones(0, 3).sum()
    x.nonzero(), torch.unique(torch.tensor([1, 2, 1]))
    functional.dropout(x, 0.5), x.clone().random_(2, 5), x.clone().normal_()
    # Nothing is computed.
    x.t(), x.split(2), x.expand(2, 4, 6), x[0, 0].item(), torch.equal(x, y)


def written(path: Path, language: str, folder: Path) -> tuple[list[str], set[str]]:
    """What substitutes each kernel by its skeleton, and the kernels that have none."""
    requests, without = [], set()
    with open_capture(path) as reader:
        for number, kernel in enumerate(reader.kernels[1:], 1):
            try:
                text = kernel_skeleton(reader, number, language)
            except UsageError as error:
                assert "it computes no tensor, so there is nothing for a kernel to write" in str(error)
                assert kernel is not None
                without.add(kernel.name)
                continue
            file = folder / f"kernel{number}.py"
            file.write_text(text)
            function = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)][-1]
            requests.append(f"--replay-kernel-substitution={number}={file}:{function}")
    return requests, without


def run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """opreplay-run in a process of its own: Triton chooses when it is imported that it interprets."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "opreplay_tools.run", *map(str, arguments)]
    return subprocess.run(
        command, env={**environment, "TORCH_EXTENSIONS_DIR": str(folder / "built")}, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_the_skeleton_of_every_kind_of_operator_passes_unchanged_with_the_originals_bits(
    language: str, captured: Captured, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    path = captured(every_kind_of_op)
    requests, without = written(path, language, tmp_path)
    assert without == VIEWS_AND_NUMBERS and len(requests) >= 50
    done = run(tmp_path, "--format=jsonl", "--verify=bitwise", *requests, path)
    assert done.returncode == 0, done.stderr
    replay, *checks = map(json.loads, done.stdout.splitlines())
    assert replay["outcome"] == "ok" and len(checks) >= len(requests)
    assert not [each["signature"] for each in checks if not each["ok"] or each["different"]]


NO_WORK = {
    "triton": ("    tl.store(out + at, tl.load(computed + at, mask=at < count), mask=at < count)", "    pass"),
    "cpp": ("    out[at] = computed[at];", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_its_kernel_does_the_writing(language: str, captured: Captured, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    path = captured(lambda: torch.randn(3, 5).add_(1).sort())
    requests, _without = written(path, language, tmp_path)
    (sort,) = [each for each in requests if each.endswith(":sort")]
    file = Path(sort.partition("=")[2].partition("=")[2].rpartition(":")[0])
    line, nothing = NO_WORK[language]
    file.write_text(file.read_text().replace(line, nothing))
    done = run(tmp_path, sort, path)
    assert done.returncode == 1 and "ABORTED" in done.stderr and "sort" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_the_judge_takes_it_for_no_contribution(
    language: str, captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    path = captured(lambda: torch.addmm(torch.randn(4), torch.randn(3, 5), torch.randn(5, 4)))
    with Plan(path, keep_going=True) as plan:
        write_task(plan, str(tmp_path / "task"), OpSelection(None, None, ("aten::addmm",)), TaskOptions())
    file = tmp_path / "mine.py"
    with open_capture(path) as reader:
        file.write_text(kernel_skeleton(reader, "aten::addmm", language))

    def verdict(**options: Any) -> dict[str, Any]:
        (found,) = run_judge(str(tmp_path / "task"), [str(file)], Options(min_time_s=0, **options))["candidates"]
        return dict(found)

    found = verdict()
    assert (found["verdict"], found["text"]) == ("calls the original", "it calls aten::addmm")
    found = verdict(allow=("calls the original",), variants=True, guard=True)
    assert found["verdict"] == "accepted", found["text"]


def test_the_tool_writes_it_and_says_where_the_users_code_goes(captured: Captured, tool: Tool) -> None:
    path = captured(lambda: torch.ones(2).add_(1).t())
    for language, said in zip(
        LANGUAGES, ("put TRITON_INTERPRET=1 before these lines", "It runs on the CPU"), strict=True
    ):
        ran = tool("dump", "--kernel-skeleton=aten::add_", f"--language={language}", path)
        assert ran.code == 0 and said in ran.out and "Your code goes here" in ran.out
        assert ran.out.endswith("    write(self)\n    return results\n")
    plain = tool("dump", "--kernel-skeleton=aten::add_", path)
    assert tool("dump", "--kernel-skeleton=aten::add_", "--language=python", path).out == plain.out
    ran = tool("dump", "--kernel-skeleton=aten::t", "--language=triton", path)
    assert ran.code == 2 and "it computes no tensor, so there is nothing for a kernel to write" in ran.err
    ran = tool("dump", "--language=triton", path)
    assert ran.code == 2 and "--language is for --kernel-skeleton" in ran.err
    ran = tool("dump", "--allow-code", path)
    assert ran.code == 2 and "--allow-code is for --kernel-skeleton" in ran.err


def test_names_that_the_file_has_are_not_the_functions(captured: Captured, tmp_path: Path) -> None:
    with torch.library._scoped_library("skeleton_names", "FRAGMENT") as library:
        library.define("write(Tensor results, Tensor(a!) kernel) -> (Tensor, Tensor(a!))")
        library.define("taken(Tensor write) -> Tensor")
        library.impl("write", lambda results, kernel: (results + 1, kernel.add_(results)), "CPU")
        library.impl("taken", torch.neg, "CPU")

        def program() -> None:
            torch.ops.skeleton_names.write(torch.ones(2), torch.ones(2))
            torch.ops.skeleton_names.taken(torch.ones(2))

        with open_capture(captured(program)) as reader:
            for language in LANGUAGES:
                text = kernel_skeleton(reader, "skeleton_names::write", language)
                assert "=THIS_FILE:write_ CAPTURE" in text and "\ndef write_(" in text
                assert text.endswith(
                    "    results_ = original(results, kernel)\n    write(kernel)\n    write(results_[0])\n"
                    "    return results_\n"
                )
                with pytest.raises(UsageError, match="names that the file needs"):
                    kernel_skeleton(reader, "skeleton_names::taken", language)
