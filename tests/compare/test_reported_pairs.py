"""Pairs of runs that users report as different, in small form: the op to blame is the first divergence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import replayfmt
import replayfmt.compare

T = torch.Tensor


@torch.library.custom_op("reported::strideless", mutates_args=())
def strideless(x: T) -> T:
    """Reads the memory of its argument in order, whatever the strides are."""
    return x.as_strided((x.numel(),), (1,), x.storage_offset()).reshape(x.shape) * 2


@torch.library.custom_op("reported::by_batch", mutates_args=())
def by_batch(x: T, w: T) -> T:
    """Adds in another order for one row, as libraries do that choose a kernel by the batch size."""
    return (x.flip(1) @ w.flip(0)) if x.shape[0] == 1 else x @ w


def inputs() -> tuple[T, T]:
    torch.manual_seed(0)
    return torch.randn(2, 64), torch.randn(64, 64)


def end(x: T) -> None:
    x.exp().sum().item()


def contiguous(x: T, w: T) -> None:
    end(torch.ops.reported.strideless(w.t().contiguous()).mul(0.1))


def strided(x: T, w: T) -> None:
    end(torch.ops.reported.strideless(w.t()).mul(0.1))


def copied_first(x: T, w: T) -> None:
    y = x.mul(2)
    z = y.clone().add_(1)
    end(y.add(z))


def in_place_without_copy(x: T, w: T) -> None:
    y = x.mul(2)
    z = y.add_(1)
    end(y.add(z))


def dtype_view(x: T, w: T) -> None:
    end(x.abs().view(torch.int32).remainder(7).float())


def dtype_conversion(x: T, w: T) -> None:
    end(x.abs().to(torch.int32).remainder(7).float())


def batch_of_one(x: T, w: T) -> None:
    for row in x.split(1):
        end(torch.ops.reported.by_batch(row, w).tanh())


def batch_of_two(x: T, w: T) -> None:
    end(torch.ops.reported.by_batch(x, w).tanh())


def eager_norm(x: T, w: T) -> None:
    end((x @ w).mul(0.01).div(x.norm().add(1e-2)))


def epsilon_inside(x: T, w: T) -> None:
    end((x @ w).mul(0.01).div(x.square().sum().add(1e-2).sqrt()))


def softmax_of_rows(x: T, w: T) -> None:
    end((x @ w).softmax(-1))


def softmax_of_columns(x: T, w: T) -> None:
    end((x @ w).softmax(0))


def masked_with_infinity(x: T, w: T) -> None:
    end((x @ w).masked_fill(w[:2] > 0, float("-inf")).softmax(-1))


def masked_with_zero(x: T, w: T) -> None:
    end((x @ w).masked_fill(w[:2] > 0, 0.0).softmax(-1))


def truncated(x: T, w: T) -> None:
    end(x.mul(10).int().div(3, rounding_mode="trunc").float().mul(0.1))


def floored(x: T, w: T) -> None:
    end(x.mul(10).int().div(3, rounding_mode="floor").float().mul(0.1))


def exact_gelu(x: T, w: T) -> None:
    end(torch.nn.functional.gelu(x @ w).mul(0.1))


def tanh_gelu(x: T, w: T) -> None:
    end(torch.nn.functional.gelu(x @ w, approximate="tanh").mul(0.1))


def evaluated(x: T, w: T) -> None:
    end(torch.dropout((x @ w).mul(0.1), 0.1, False).relu())


def trained(x: T, w: T) -> None:
    end(torch.dropout((x @ w).mul(0.1), 0.1, True).relu())


def wide_sum(x: T, w: T) -> None:
    end(w.bfloat16().sum(dtype=torch.float32).mul(0.1))


def narrow_sum(x: T, w: T) -> None:
    end(w.bfloat16().sum().float().mul(0.1))


PAIRS: list[tuple[Callable[[T, T], None], Callable[[T, T], None], str]] = [
    (contiguous, strided, "reported::strideless"),
    (copied_first, in_place_without_copy, "aten::add.Tensor"),
    (dtype_view, dtype_conversion, "aten::_to_copy"),
    (batch_of_two, batch_of_one, "reported::by_batch"),
    (eager_norm, epsilon_inside, "aten::linalg_vector_norm"),
    (softmax_of_rows, softmax_of_columns, "aten::_softmax"),
    (masked_with_infinity, masked_with_zero, "aten::masked_fill"),
    (truncated, floored, "aten::div"),
    (exact_gelu, tanh_gelu, "aten::gelu"),
    (evaluated, trained, "aten::bernoulli_"),
    (wide_sum, narrow_sum, "aten::sum"),
]


def captured(path: Path, program: Callable[[T, T], None]) -> Path:
    x, w = inputs()
    with replayfmt.capture(path, digests="ops"):
        program(x, w)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other", "kernel"), PAIRS, ids=[one.__name__ for one, _other, _kernel in PAIRS])
def test_the_op_to_blame_is_named(
    tmp_path: Path, one: Callable[[T, T], None], other: Callable[[T, T], None], kernel: str
) -> None:
    a, b = captured(tmp_path / "a.opreplay", one), captured(tmp_path / "b.opreplay", other)
    found = replayfmt.compare(a, b)
    assert found.outcome == "different"
    assert found.first is not None, found.text
    assert any(kernel in name for names in found.first.kernels for name in names), found.text
    assert replayfmt.compare(a, captured(tmp_path / "again.opreplay", one)).outcome == "equal"


def test_a_copy_that_is_missing_is_shown_beside_the_op_that_reads_what_was_overwritten(tmp_path: Path) -> None:
    paths = [captured(tmp_path / f"{each.__name__}.opreplay", each) for each in (copied_first, in_place_without_copy)]
    found = replayfmt.compare(*paths)
    assert ("aten::clone.default", 1, 0) in [(each.name, each.a, each.b) for each in found.structure]
    assert "in a aten::clone.default" in found.text


@pytest.mark.slow
def test_a_compiled_program_that_computes_something_else_parts_at_its_region(tmp_path: Path) -> None:
    def work(x: T, w: T) -> T:
        return torch.nn.functional.gelu(x @ w).mul(0.1)

    compiled = torch.compile(lambda x, w: torch.nn.functional.gelu(x @ w, approximate="tanh").mul(0.1))
    x, w = inputs()
    compiled(x, w)
    a = captured(tmp_path / "a.opreplay", lambda x, w: end(work(x.add(1), w)))
    b = captured(tmp_path / "b.opreplay", lambda x, w: end(compiled(x.add(1), w)))
    torch._dynamo.reset()
    found = replayfmt.compare(a, b, tolerance="1e-5,1e-5")
    assert found.first is not None and found.first.kind == "block", found.text
    assert any("gelu" in name for name in found.first.kernels[0]) and any("cpp" in n for n in found.first.kernels[1])
