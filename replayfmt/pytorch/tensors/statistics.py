"""Statistics of elements for digests: one pass over the memory, in blocks that stay in the cache, in double precision.

Blocks are cut by the elements alone, so that no figure depends on threads, libraries or what ran before. One thread
does it all, without operators that PyTorch runs with several: if the first of them in a thread of the program were one
of these, children that the program forks would wait for ever for the threads that it started.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from replayfmt.format.codes import DType

from .dtypes import TORCH_DTYPE
from .elements import pieces

# NaN count, inf count, min, max, mean, L2 norm.
Statistics = tuple[int, int, float | None, float | None, float | None, float | None]

_BLOCK_ELEMENTS = 1 << 16  # with their doubles they fit a second-level cache; in smaller ones NumPy's calls cost more
_PLAIN = {
    DType.bool: "u1",
    DType.uint8: "u1",
    DType.int8: "i1",
    DType.uint16: "u2",
    DType.int16: "i2",
    DType.uint32: "u4",
    DType.int32: "i4",
    DType.uint64: "u8",
    DType.int64: "i8",
    DType.float32: "f4",
    DType.float64: "f8",
    DType.complex64: "c8",
    DType.complex128: "c16",
    DType.qint8: "i1",
    DType.quint8: "u1",
    DType.qint32: "i4",
}
# What the methods of arrays call; for small ones the way there is most of their time.
_least, _greatest, _sum = np.minimum.reduce, np.maximum.reduce, np.add.reduce
_COMPLEX = {DType.complex32, DType.complex64, DType.complex128}


@cache
def reader(code: DType) -> Callable[[np.ndarray], np.ndarray]:
    """What makes numbers of the contiguous bits of a dtype, in a dtype that NumPy computes with."""
    if code in _PLAIN:
        dtype = np.dtype(_PLAIN[code])
        return lambda bits: bits.view(dtype)
    if code is DType.bfloat16:
        return lambda bits: (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if code is DType.complex32:
        return lambda bits: bits.view(np.float16).astype(np.float32).view(np.complex64)
    if code is DType.float16:  # NumPy converts it sooner than it computes with it
        return lambda bits: bits.view(np.float16).astype(np.float32)
    values = torch.arange(256, dtype=torch.uint8).view(TORCH_DTYPE[code]).to(torch.float64)
    table = np.array(values.tolist())
    return lambda bits: table[bits]


def statistics(array: np.ndarray, code: DType) -> Statistics:
    """Statistics of the elements whose bits `array` holds, in its order; of complex elements those of their absolute
    values, without minimum and maximum."""
    numbers = reader(code)
    complex_ = code in _COMPLEX
    scratch = np.empty(min(array.size, _BLOCK_ELEMENTS))
    nan = inf = finite = 0
    lowest, highest = math.inf, -math.inf
    total = squares = 0.0
    with np.errstate(all="ignore"):
        for bits in pieces(array, _BLOCK_ELEMENTS):
            block = numbers(bits)
            if complex_:
                block = np.abs(block.astype(np.complex128))
            low, high = float(_least(block)), float(_greatest(block))
            if not (math.isfinite(low) and math.isfinite(high)):
                kept = block[np.isfinite(block)]
                nans = int(np.count_nonzero(np.isnan(block)))
                nan, inf, block = nan + nans, inf + block.size - nans - kept.size, kept
                if not block.size:
                    continue
                low, high = float(_least(block)), float(_greatest(block))
            finite += block.size
            lowest, highest = min(lowest, low), max(highest, high)
            exact = scratch[: block.size]
            np.copyto(exact, block)
            total += float(_sum(exact))
            squares += float(_sum(np.multiply(exact, exact, out=exact)))
    if not finite:
        return nan, inf, None, None, None, None
    mean, norm = total / finite, math.sqrt(squares)
    return (nan, inf, None, None, mean, norm) if complex_ else (nan, inf, lowest, highest, mean, norm)
