"""Small kernels in Triton, whose work is known; imported where Triton is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def relu(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n, other=0.0)
    tl.store(out + at, tl.where(value > 0, value, 0.0), at < n)


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, inside) + tl.load(y + at, inside), inside)


@triton.jit
def difference(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, inside) - tl.load(y + at, inside), inside)


def called(call: Callable[[], Any], quantiles: Any) -> list[float]:
    """In place of Triton's benchmark, which needs a device."""
    call()
    return [1.0] * len(quantiles)


@triton.autotune(
    [triton.Config({"BLOCK": size}, num_warps=warps) for size, warps in ((256, 1), (1024, 4), (2048, 8))],
    key=["n"],
    do_bench=None if torch.cuda.is_available() else called,
)
@triton.jit
def tuned(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * 2, at < n)


@triton.jit
def matmul(a, b, out, n, BLOCK: tl.constexpr):
    """One block computes the whole product."""
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    product = tl.dot(tl.load(a + row * n + column), tl.load(b + row * n + column))
    tl.store(out + row * n + column, product)
