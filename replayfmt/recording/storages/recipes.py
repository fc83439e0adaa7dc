"""Recipes for floating-point content that is left out of a capture: how to synthesize similar content.

Statistics cover all elements that fit the storage in the dtype of its first use. For complex elements they cover both
components, but an element counts as zero, NaN or infinite only once. The seed depends only on the order of storages and
reveals nothing about the content.
"""

from __future__ import annotations

import math

import torch
import xxhash

from replayfmt.format.model import Recipe, Statistics
from replayfmt.pytorch.tensors.dtypes import DTYPE_CODE
from replayfmt.pytorch.tensors.memory import call_undispatched, make_view

_AT_ONCE = 1 << 21  # elements


def is_synthesized(dtype: torch.dtype) -> bool:
    """Whether content of this dtype is left out if only integers are embedded."""
    return dtype.is_floating_point or dtype.is_complex


def recipe(storage: torch.UntypedStorage, dtype: torch.dtype, number: int, *, statistics: bool = True) -> Recipe:
    """The recipe for a storage, the capture's `number`th that needs one. `statistics`: include them."""
    elements = storage.nbytes() // dtype.itemsize
    seed = xxhash.xxh3_64_intdigest(f"recipe {number}".encode())
    return Recipe(
        DTYPE_CODE[dtype], elements, seed, _statistics_or_none(storage, dtype, elements) if statistics else None
    )


def _statistics_or_none(storage: torch.UntypedStorage, dtype: torch.dtype, elements: int) -> Statistics | None:
    try:
        return call_undispatched(_statistics, storage, dtype, elements)
    except (NotImplementedError, RuntimeError, TypeError):
        return None  # a dtype that this build cannot convert; the format knows what that means


def _statistics(storage: torch.UntypedStorage, dtype: torch.dtype, elements: int) -> Statistics:
    values = make_view(storage, dtype, (elements,), (1,))
    finite, mean, squares = 0, 0.0, 0.0
    low, high = math.inf, -math.inf
    zeros = nans = above = below = 0
    for begin in range(0, values.numel(), _AT_ONCE):
        part = values[begin : begin + _AT_ONCE]
        parts = torch.view_as_real(part) if part.is_complex() else part.unsqueeze(-1)
        parts = parts.to(torch.float64, copy=True)  # the program may write meanwhile, and the counts must agree
        unknown = parts.isnan().any(-1)
        plus = (parts == math.inf).any(-1) & ~unknown
        minus = (parts == -math.inf).any(-1) & ~unknown & ~plus
        zeros += int((parts == 0).all(-1).sum())
        nans, above, below = nans + int(unknown.sum()), above + int(plus.sum()), below + int(minus.sum())
        finite_parts = parts[parts.isfinite()]
        count = finite_parts.numel()
        if count:
            low, high = min(low, float(finite_parts.min())), max(high, float(finite_parts.max()))
            part_mean = float(finite_parts.mean())
            part_squares = float((finite_parts - part_mean).square().sum())
            difference = part_mean - mean
            mean += difference * count / (finite + count)
            squares += part_squares + difference * difference * finite * count / (finite + count)
            finite += count
    if not finite:
        return Statistics(math.nan, math.nan, math.nan, math.nan, zeros, nans, above, below)
    return Statistics(mean, math.sqrt(squares / finite), low, high, zeros, nans, above, below)
