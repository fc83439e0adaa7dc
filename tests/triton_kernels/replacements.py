"""Kernels of the user's own, to be put in place of captured ones."""

import torch
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(out, x, stride_out, stride_x, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride_x + at, mask=at < columns, other=-float("inf"))
    values = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + row * stride_out + at, values * (1 / tl.sum(values, axis=0)), mask=at < columns)


@triton.jit
def that_is_wrong(out, x, stride_out, stride_x, columns, BLOCK: tl.constexpr):
    tl.store(out, 1.0)


@triton.jit
def that_writes_more(out, x, stride_out, stride_x, columns, BLOCK: tl.constexpr):
    softmax_kernel(out, x, stride_out, stride_x, columns, BLOCK)
    tl.store(x, 0.0)


@triton.jit
def of_fewer_parameters(out, x, BLOCK: tl.constexpr):
    tl.store(out, 1.0)


@triton.jit
def of_other_constexprs(out, x, stride_out, stride_x, columns: tl.constexpr, BLOCK):
    tl.store(out, 1.0)


def in_python(out, x, stride_out, stride_x, columns, *, BLOCK, grid, num_warps):
    out.copy_(torch.softmax(x, 1))
