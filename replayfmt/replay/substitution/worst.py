"""The element of a replacement's result that is farthest off, with the original's value.

Searched for only if some elements are known to be too far off, so it costs nothing for a correct kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from replayfmt.pytorch.tensors.dtypes import INTEGERS

from .distance import PACKED, Tolerance, allowed, chunks, double, length, scale_of


@dataclass(frozen=True)
class Worst:
    """One element: `index` in the tensor, None for a plain number; `expected` is the original's value.

    `times` is its distance as a multiple of the tolerance: infinite if none is allowed, or only one side is finite.
    """

    index: tuple[int, ...] | None
    expected: Any
    got: Any
    times: float

    def __str__(self) -> str:
        place = "" if self.index is None else f"element {list(self.index)} "
        return f"{place}expected {_shown(self.expected)}, got {_shown(self.got)}"


def worst_element(expected: torch.Tensor, got: torch.Tensor, tolerance: Tolerance) -> Worst:
    """The element farthest off relative to the tolerance; the first of several.

    Both tensors are strided, not empty, of the same dtype and sizes, and have an element that is too far off.
    """
    scale = scale_of(expected, tolerance) if _is_float(expected.dtype) else 0.0
    worst: Worst | None = None
    start = 0
    largest = -1.0
    for wanted, given in chunks(expected, got):
        times = _times(wanted, given, tolerance, scale)
        place = int(times.argmax())
        if float(times[place]) > largest:
            largest = float(times[place])
            worst = Worst(
                _unravelled(start + place, expected.shape),
                _value(wanted, place),
                _value(given, place),
                largest if _is_float(expected.dtype) else math.inf,
            )
        start += wanted.numel()
    assert worst is not None
    return worst


def _is_float(dtype: torch.dtype) -> bool:
    """Whether a dtype's numbers are compared with a tolerance."""
    return (dtype.is_floating_point or dtype.is_complex) and dtype not in PACKED


def _times(expected: torch.Tensor, got: torch.Tensor, tolerance: Tolerance, scale: float) -> torch.Tensor:
    """For two flat tensors, the distance of each element as a multiple of the tolerance. If none is allowed, it is the
    distance itself, or 1 if that has no meaning."""
    dtype = expected.dtype
    if not _is_float(dtype):
        if dtype not in INTEGERS:
            return _differ(expected, got).to(torch.float64)
        apart = (expected.to(torch.float64) - got.to(torch.float64)).abs()
        # Large numbers that differ may be equal as 64-bit floats.
        return torch.where(_differ(expected, got), apart.clamp(min=1), torch.zeros_like(apart))
    parts = 1
    if dtype.is_complex:
        expected, got, parts = torch.view_as_real(expected).reshape(-1), torch.view_as_real(got).reshape(-1), 2
    wanted, given = double(expected), double(got)
    finite = wanted.isfinite() & given.isfinite()
    agree = ((wanted == given) | (wanted.isnan() & given.isnan())).view(-1, parts).all(dim=1)
    zero = torch.zeros((), dtype=torch.float64, device=wanted.device)
    apart = length(torch.where(finite, wanted - given, zero), parts)
    size = length(torch.where(finite, wanted, zero), parts)
    times = apart / allowed(size, dtype, tolerance, scale)
    times = torch.where(finite.view(-1, parts).all(dim=1), times, torch.full_like(times, math.inf))
    return torch.where(agree, torch.zeros_like(times), times)


def _differ(expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    width = expected.element_size()
    pair = (each.view(torch.uint8).view(-1, width) for each in (expected, got))
    return torch.ne(*pair).any(dim=1)


def _unravelled(place: int, sizes: Sequence[int]) -> tuple[int, ...]:
    index = []
    for size in reversed(sizes):
        place, rest = divmod(place, int(size))
        index.append(rest)
    return tuple(reversed(index))


def _value(flat: torch.Tensor, place: int) -> Any:
    """An element as a Python number; its bytes in hexadecimal if the dtype has no numbers."""
    if flat.dtype in INTEGERS or _is_float(flat.dtype):
        return flat[place].item()
    width = flat.element_size()
    return "0x" + bytes(flat.view(torch.uint8)[place * width : (place + 1) * width].tolist()).hex()


def _shown(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float | complex) else str(value)
