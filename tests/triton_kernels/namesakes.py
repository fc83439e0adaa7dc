"""A module with functions of names that others have, too."""

import triton
import triton.language as tl

SCALE = tl.constexpr(7)


@triton.jit
def scaled(x):
    return x / SCALE


@triton.jit
def t3(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, scaled(tl.load(x + at, mask=at < n)), mask=at < n)
