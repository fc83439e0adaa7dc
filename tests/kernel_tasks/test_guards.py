"""A kernel that uses memory beside its arguments is named, with the call, the argument and the side."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from in_process import Tools

import replayfmt
from replayfmt.pytorch.guards import Memory

LIBRARY = torch.library.Library("guard_test", "DEF")
LIBRARY.define("peek(Tensor x, Tensor y) -> Tensor")
LIBRARY.define("poke(Tensor(a!) x) -> ()")


@torch.library.impl(LIBRARY, "peek", "CompositeExplicitAutograd")
def _peek(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    beside = ctypes.c_float.from_address(y.data_ptr() + y.nbytes + 32).value
    return x + y + (0 if beside != beside else 0)


@torch.library.impl(LIBRARY, "poke", "CompositeExplicitAutograd")
def _poke(x: torch.Tensor) -> None:
    beside = ctypes.c_float.from_address(x.data_ptr() - 4)
    beside.value = beside.value * 1.0 if beside.value == beside.value else 3.0
    x.add_(1)


def captured(path: Path, program: object) -> Path:
    with replayfmt.capture(path):
        program()  # type: ignore[operator]
    return path


@pytest.mark.slow
def test_a_captured_kernel_that_reads_past_an_argument_is_named(tmp_path: Path, tools: Tools) -> None:
    def program() -> None:
        with replayfmt.scope("inside"):
            x, y = torch.ones(4), torch.ones(4)
            torch.ops.guard_test.peek(x.mul(2), y.mul(3))

    path = captured(tmp_path / "peek.opreplay", program)
    done = tools("run", "--guard", path)
    assert done.code == 1 and "OUT_OF_RANGE" in done.err
    (finding,) = done.findings
    assert "scope inside" in finding and "guard_test::peek" in finding
    assert "memory after argument y (died of SIGSEGV)" in finding


@pytest.mark.slow
def test_a_captured_kernel_that_writes_before_an_argument_is_named(tmp_path: Path, tools: Tools) -> None:
    path = captured(tmp_path / "poke.opreplay", lambda: torch.ops.guard_test.poke(torch.zeros(3).mul(2)))
    done = tools("run", "--guard", path)
    assert done.code == 1
    assert any("guard_test::poke" in each and "memory before argument x" in each for each in done.findings)


@pytest.mark.slow
def test_a_replacement_is_called_between_guards_too(tmp_path: Path, tools: Tools) -> None:
    path = captured(tmp_path / "tanh.opreplay", lambda: torch.tanh(torch.ones(5).mul(2)))
    file = tmp_path / "mine.py"
    look = "ctypes.c_float.from_address(self.data_ptr() + self.nbytes + 16)"
    file.write_text(
        f"import ctypes, torch\ndef tanh(self):\n    {look}.value\n    return torch.sigmoid(2 * self) * 2 - 1\n"
    )
    given = f"--replay-kernel-substitution=aten::tanh={file}"
    assert tools("run", given, path).code == 0, "nothing else shows it"
    for tool, more in (("run", ()), ("benchmark", ("--benchmark-min-time=1x",))):
        done = tools(tool, "--guard", *more, given, path)
        assert done.code == 1
        (finding,) = done.findings
        assert "by mine.py:tanh" in finding and "memory after argument self" in finding


@pytest.mark.slow
def test_memory_that_a_replacement_leaves_unwritten_is_nan_with_a_guard(tmp_path: Path, tools: Tools) -> None:
    path = captured(tmp_path / "zeros.opreplay", lambda: torch.mul(torch.zeros(3, 4), 2.0))
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\ndef mul(self, other):\n    out = torch.empty(3, 4)\n    out[:2] = 0\n    return out\n"
    )
    done = tools("run", "--guard", f"--replay-kernel-substitution=aten::mul={file}", path)
    assert done.code == 1 and "element [2, 0] expected 0, got nan" in done.err


@pytest.mark.slow
def test_kernels_that_use_their_arguments_alone_pass_and_the_replay_goes_on(tmp_path: Path, tools: Tools) -> None:
    def program() -> None:
        x = torch.nn.functional.gelu(torch.addmm(torch.ones(3), torch.ones(4, 2), torch.ones(2, 3)))
        x[1:].mul_(2.0)
        torch.softmax(torch.mm(x.t().bfloat16(), torch.ones(4, 2).bfloat16()), -1).sum().item()

    done = tools("run", "--guard", captured(tmp_path / "right.opreplay", program))
    assert done.code == 0, done.err
    assert "guarded: " in done.out and "verified: bitwise" in done.out


def test_a_guard_keeps_alignment_and_shows_what_was_written(tmp_path: Path) -> None:
    content = torch.arange(7, dtype=torch.float32)
    for pages in ("", "after", "before"):
        memory = Memory(content, "cpu", pages=pages)
        assert memory.tensor.data_ptr() % 16 == 0 and torch.equal(memory.read().view(torch.float32), content)
        assert memory.overwritten() == ""
        if pages != "before":
            ctypes.memset(memory.tensor.data_ptr() - 1, 0, 1)
            assert memory.overwritten() == "before"
