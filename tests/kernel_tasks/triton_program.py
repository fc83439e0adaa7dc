"""A program with a Triton kernel, which the interpreter runs."""

import torch
import triton
import triton.language as tl


@triton.jit
def double_kernel(out, x, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < count) * 2, mask=at < count)


def last_is_best(call, quantiles):
    """Stands for a benchmark, which needs a device."""
    call()
    tried.append(call)
    return [1.0 / len(tried)] * len(quantiles)


tried = []


@triton.autotune([triton.Config({"BLOCK": size}) for size in (8, 16)], key=["count"], do_bench=last_is_best)
@triton.jit
def negate_kernel(out, x, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, -tl.load(x + at, mask=at < count), mask=at < count)


for size in (13, 16, 13):
    x = torch.randn(size)
    out = torch.empty_like(x)
    double_kernel[(2,)](out, x, size, BLOCK=8)
    print(float(out.sum()))
x = torch.randn(24)
out = torch.empty_like(x)
negate_kernel[lambda meta: (triton.cdiv(24, meta["BLOCK"]),)](out, x, 24)
print(float(out.sum()))
