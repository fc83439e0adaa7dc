"""Kernels in Triton; imported only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def triton_add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, inside) + tl.load(y + at, inside), inside)


@triton.jit
def triton_fill(out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.full((BLOCK,), 7.0, tl.float32), at < n)


@triton.jit
def triton_relu(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n, other=0.0)
    tl.store(out + at, tl.where(value > 0, value, 0.0), at < n)


@triton.jit
def triton_gather(x, index, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + tl.load(index + at, at < n, other=0)), at < n)


@triton.jit
def triton_row_sum(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    tl.store(out + row, tl.sum(tl.load(x + row * n + at, at < n, other=0.0)))


@triton.jit
def triton_softmax(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < n
    value = tl.load(x + at, inside, other=float("-inf"))
    power = tl.exp(value - tl.max(value))
    tl.store(out + at, power / tl.sum(power), inside)


@triton.jit
def triton_transpose(x, out, rows, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    tl.store(out + column * rows + row, tl.load(x + row * columns + column, inside), inside)


@triton.jit
def triton_matmul(a, b, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for first in range(0, n, BLOCK):
        inner = first + tl.arange(0, BLOCK)
        left = tl.load(a + row[:, None] * 64 + inner[None, :])
        right = tl.load(b + inner[:, None] * 64 + column[None, :])
        total += tl.dot(left, right)
    tl.store(out + row[:, None] * 64 + column[None, :], total)


_F, _H, _I = "*fp32", "*fp16", "*i32"
SIGNATURES = {
    "triton_add": ({"x": _F, "y": _F, "out": _F, "n": "i32"}, {"BLOCK": 128}),
    "triton_fill": ({"out": _F, "n": "i32"}, {"BLOCK": 128}),
    "triton_relu": ({"x": _F, "out": _F, "n": "i32"}, {"BLOCK": 128}),
    "triton_gather": ({"x": _F, "index": _I, "out": _F, "n": "i32"}, {"BLOCK": 128}),
    "triton_row_sum": ({"x": _F, "out": _F, "n": "i32"}, {"BLOCK": 128}),
    "triton_softmax": ({"x": _F, "out": _F, "n": "i32"}, {"BLOCK": 128}),
    "triton_transpose": ({"x": _I, "out": _I, "rows": "i32", "columns": "i32"}, {"BLOCK": 16}),
    "triton_matmul": ({"a": _H, "b": _H, "out": _F, "n": "i32"}, {"BLOCK": 32}),
}
