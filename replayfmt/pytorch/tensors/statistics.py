"""Statistics of elements for digests: one pass over the memory, in blocks that stay in the cache, in double precision.

Blocks are cut by the elements alone, so that no figure depends on threads, libraries or what ran before. No operator
that PyTorch runs with several threads takes part: if the first of them in a thread of the program were one of these,
children that the program forks would wait for ever for the threads that it started. Once `use_native` was called, the
same figures come from C++ (block_statistics.cpp) for the dtypes that it knows; where it cannot tell what NumPy finds,
NumPy is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from replayfmt.format.codes import DType
from replayfmt.native.block_statistics import BLOCK_ELEMENTS, BlockStatistics, Totals
from replayfmt.native.building import NotAvailable, say

from .dtypes import TORCH_DTYPE
from .elements import pieces

# NaN count, inf count, min, max, mean, L2 norm.
Statistics = tuple[int, int, float | None, float | None, float | None, float | None]

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
# What block_statistics.py calls them.
_KINDS = {
    DType.float64: "d",
    DType.float32: "f",
    DType.float16: "e",
    DType.bfloat16: "g",
    DType.int8: "b",
    DType.int16: "h",
    DType.int32: "i",
    DType.int64: "q",
    DType.uint8: "B",
    DType.uint16: "H",
    DType.uint32: "I",
    DType.uint64: "Q",
    DType.qint8: "b",
    DType.quint8: "B",
    DType.qint32: "i",
}
_native: BlockStatistics | None = None


@cache
def use_native() -> None:
    """Compute in C++ from here on, if the library can be had and adds up as this NumPy does. Said once if not."""
    global _native
    try:
        native = BlockStatistics()
    except NotAvailable as problem:
        say(f"digests take longer in this process ({problem})")
        return
    numbers = np.arange(1.5 * BLOCK_ELEMENTS) * 0.618 % 1 - 0.4
    for code, dtype, carrier in ((DType.float64, "f8", "u8"), (DType.float32, "f4", "u4"), (DType.float16, "f2", "u2")):
        bits = numbers.astype(dtype).view(carrier)
        found, expected = Totals(), Totals()
        _add(expected, bits, code)
        if native.add(found, bits.ctypes.data, len(bits), _KINDS[code]) != len(bits) or bytes(found) != bytes(expected):
            say("digests take longer in this process (this NumPy does not add up as the library in C++ does)")
            return
    _native = native


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
    totals = Totals()
    add(totals, array, code)
    return figures(totals, code)


def add(totals: Totals, array: np.ndarray, code: DType) -> None:
    """Add elements to what was added before. In pieces of a multiple of BLOCK_ELEMENTS the sum is that of the whole."""
    native, kind = _native, _KINDS.get(code)
    whole = native is not None and array.ndim == 1 and array.strides[0] == array.itemsize
    for piece in (array,) if whole else pieces(array, BLOCK_ELEMENTS):
        done = native.add(totals, piece.ctypes.data, len(piece), kind) if native and kind else 0
        if done < len(piece):
            _add(totals, piece[done:], code)


def figures(totals: Totals, code: DType) -> Statistics:
    """The statistics of what was added."""
    if not totals.finite:
        return totals.nan, totals.inf, None, None, None, None
    bounds = (None, None) if code in _COMPLEX else (totals.lowest, totals.highest)
    return totals.nan, totals.inf, *bounds, totals.total / totals.finite, math.sqrt(totals.squares)


def _add(totals: Totals, contiguous: np.ndarray, code: DType) -> None:
    """Add the elements to `totals` with NumPy."""
    numbers = reader(code)
    scratch = np.empty(min(contiguous.size, BLOCK_ELEMENTS))
    with np.errstate(all="ignore"):
        for bits in pieces(contiguous, BLOCK_ELEMENTS):
            block = numbers(bits)
            if code in _COMPLEX:
                block = np.abs(block.astype(np.complex128))
            low, high = float(_least(block)), float(_greatest(block))
            if not (math.isfinite(low) and math.isfinite(high)):
                kept = block[np.isfinite(block)]
                nans = int(np.count_nonzero(np.isnan(block)))
                totals.nan += nans
                totals.inf += block.size - nans - kept.size
                block = kept
                if not block.size:
                    continue
                low, high = float(_least(block)), float(_greatest(block))
            totals.finite += block.size
            totals.lowest, totals.highest = min(totals.lowest, low), max(totals.highest, high)
            exact = scratch[: block.size]
            np.copyto(exact, block)
            totals.total += float(_sum(exact))
            totals.squares += float(_sum(np.multiply(exact, exact, out=exact)))
