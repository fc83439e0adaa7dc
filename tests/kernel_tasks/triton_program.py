"""A program with a Triton kernel, which the interpreter runs."""

import torch
import triton
import triton.language as tl


@triton.jit
def double_kernel(out, x, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < count) * 2, mask=at < count)


for size in (13, 16, 13):
    x = torch.randn(size)
    out = torch.empty_like(x)
    double_kernel[(2,)](out, x, size, BLOCK=8)
    print(float(out.sum()))
