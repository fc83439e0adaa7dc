"""A kernel whose time is that of its rounds, and one that does the same in three times as many."""

import triton
import triton.language as tl


@triton.jit
def busy(x, rounds, counted, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at)
    for i in range(rounds):
        values = tl.where(i < counted, values * 0.999 + 0.001, values)
    tl.store(x + at, values)


@triton.jit
def busy_for_longer(x, rounds, counted, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at)
    for i in range(rounds * 3):
        values = tl.where(i < counted, values * 0.999 + 0.001, values)
    tl.store(x + at, values)
