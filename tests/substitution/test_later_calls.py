"""What a replacement does wrong at a later call, or on memory that `empty` made, is found as at the first."""

from __future__ import annotations

import pytest
import torch

from .conftest import Captured, Kernels, Tool

N = "N = [0]\n"
MM = f"""{N}
def mm(self, mat2, *, out):
    torch.mm(self, mat2, out=out)
    out[1, 2] += 0.5
    return out
"""


def run(tool: Tool, *args: object) -> tuple[int, str]:
    code, _out, err = tool(*map(str, args))
    return code, err


def test_values_written_to_memory_from_empty_are_compared(captured: Captured, kernels: Kernels, tool: Tool) -> None:
    kept = []

    def program() -> None:
        x = torch.randn(8, 8)
        kept.append(torch.empty(8, 8))
        torch.mm(x, x, out=kept[0])
        torch.empty(8, 8).bernoulli_(0.9)

    path = captured(program, digests="none")
    assert run(tool, "run", f"--replay-kernel-substitution=aten::mm={kernels(MM)}", path)[0] == 1
    zeros = kernels(
        "def bernoulli_(self, p=0.5, *, generator=None):\n"
        "    return torch.ops.aten.bernoulli_(self, p, generator=generator).zero_()",
        "zeros.py",
    )
    code, err = run(tool, "run", f"--replay-kernel-substitution=aten::bernoulli_={zeros}", path)
    assert code == 1 and "too far off" in err


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("N[0] > 2 and torch.set_num_threads(2); return torch.ops.aten.tanh(self)", "changes the settings num_threads"),
        (
            "C = N[1:] if len(N) > 2 else (N.extend([torch.empty_like(self), torch.empty_like(self)]) or N[1:])\n"
            "    return C[N[0] % 2].copy_(torch.ops.aten.tanh(self))",
            "returns the same memory from two calls",
        ),
        # Twenty buffers in turn, and one that every result is a tensor of its own on.
        (
            "C = N[1:] if len(N) > 2 else (N.extend(torch.empty_like(self) for _ in range(20)) or N[1:])\n"
            "    return C[N[0] % 20].copy_(torch.ops.aten.tanh(self))",
            "returns the same memory from two calls",
        ),
        (
            "C = N[1:] if len(N) > 1 else (N.append(torch.empty_like(self).numpy()) or N[1:])\n"
            "    return torch.from_numpy(C[0]).copy_(torch.ops.aten.tanh(self))",
            "returns the same memory from two calls",
        ),
        ("torch.overrides.BaseTorchFunctionMode().__enter__(); return torch.ops.aten.tanh(self)", "leaves a mode"),
        (
            "torch.utils._python_dispatch.BaseTorchDispatchMode().__enter__(); return torch.ops.aten.tanh(self)",
            "leaves a mode",
        ),
        ("return torch.ops.aten.tanh(self).requires_grad_()", "requires grad"),
        ("if N[0] > 3: raise GeneratorExit\n    return torch.ops.aten.tanh(self)", "GeneratorExit"),
    ],
)
def test_faults_of_later_calls_are_found(
    captured: Captured, kernels: Kernels, tool: Tool, body: str, said: str
) -> None:
    path = captured(lambda: [torch.randn(4, 4).tanh() for _ in range(21)], digests="none")
    file = kernels(f"{N}\ndef tanh(self):\n    N[0] += 1\n    {body}")
    code, err = run(tool, "run", f"--replay-kernel-substitution=aten::tanh={file}", path)
    assert code == 1 and said in err


@pytest.mark.parametrize("what", ["raise SystemExit(0)", "return None"])
def test_a_replacement_that_turns_bad_while_ops_are_measured_fails_there(
    captured: Captured, kernels: Kernels, tool: Tool, what: str
) -> None:
    def program() -> None:
        x = torch.randn(4, 4)
        for _ in range(3):
            x = x.tanh()
            x.mul_(0.9)

    path = captured(program)
    file = kernels(
        f"{N}\ndef tanh(self):\n    N[0] += 1\n    if N[0] > 8: {what}\n    return torch.ops.aten.tanh(self)"
    )
    code, _err = run(
        tool,
        "benchmark",
        "--per-op",
        "--benchmark-min-time=3x",
        "--verify=none",
        f"--replay-kernel-substitution=aten::tanh={file}",
        path,
    )
    assert code == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "right"),
    [
        (["run"], 4),  # checked: 3 calls, one of them for the memory
        (["benchmark", "--benchmark-min-time=3x", "--benchmark-warmup=0"], 12),
        (["benchmark", "--compare", "--benchmark-min-time=3x", "--benchmark-warmup=0"], 12),
    ],
)
def test_one_element_that_turns_wrong_after_the_check_is_found_though_no_digest_shows_it(
    captured: Captured, kernels: Kernels, tool: Tool, args: list[str], right: int
) -> None:
    def program() -> torch.Tensor:
        x = torch.randn(40, 40)
        return x.tanh() + x.mul(2).tanh()

    path = captured(program)
    file = kernels(
        f"{N}\ndef tanh(self):\n    N[0] += 1\n    result = torch.ops.aten.tanh(self)\n"
        f"    if N[0] > {right}: result[3, 5] *= 0.9\n    return result"
    )
    code, err = run(tool, *args, f"--replay-kernel-substitution=aten::tanh={file}", path)
    assert code == 1 and "though they did at first" in err
    assert "1 of 1600 elements are too far off" in err or "2 of 3200 elements are too far off" in err
