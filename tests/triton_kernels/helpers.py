"""A module of another package, whose functions kernels call."""

import triton
import triton.language as tl

SCALE = tl.constexpr(3)
BLOCK = 4
HALVES = 2


@triton.jit
def scaled(x):
    return x * SCALE


@triton.jit
def into(out, at, value, mask):
    tl.store(out + at, value, mask=mask)
