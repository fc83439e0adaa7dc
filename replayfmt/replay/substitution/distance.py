"""How far two tensors are apart: absolutely, relatively and in units in the last place (ULP); is that too far?

The element that is farthest off is searched for only if some elements are known to be too far off, so it costs nothing
for a correct kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import add
from typing import Any

import numpy as np
import torch

from replayfmt.pytorch.rounding import wide
from replayfmt.pytorch.tensors.memory import DTYPE_CODE, INTEGERS, host_view

from ..verification import LARGEST, TOLERANCE

# Elements compared at once: double-precision copies of whole large tensors would take several times their memory.
_CHUNK = 1 << 20
_INTEGER_OF_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Exponents alone, without a sign.
_UNSIGNED_FLOATS = frozenset({torch.float8_e8m0fnu})
# Dtypes that pack several numbers into a byte: PyTorch cannot unpack them.
PACKED = frozenset({torch.float4_e2m1fn_x2})


@dataclass(frozen=True)
class Tolerance:
    """How far apart is close. Without `relative` and `absolute` it is as for digests: relative, by dtype, to the larger
    of the expected value and the root mean square of the tensor's numbers below half of the dtype's largest. `relative`
    replaces the dtype's tolerance; with `absolute` the root mean square is not used: absolute + relative * |expected|.
    Integers are always compared exactly."""

    relative: float | None = None
    absolute: float | None = None

    def of(self, dtype: torch.dtype) -> float:
        """The relative tolerance of a dtype's numbers."""
        return TOLERANCE[DTYPE_CODE[dtype]] if self.relative is None else self.relative

    def describe(self, dtype: torch.dtype) -> str:
        if not _is_float(dtype):
            return "exactly equal"
        if self.absolute is None:
            return f"{self.of(dtype):g} of the value or of the root mean square"
        return f"{self.absolute:g} + {self.of(dtype):g} of the value"


@dataclass(frozen=True)
class Distance:
    """What was compared, and the largest distances.

    `largest_*` are over pairs of finite numbers and None if there are no such pairs; `ulp` also if the dtype has no
    such unit, `relative` also if every expected number is zero. `different` counts the unequal elements, `not_finite`
    those among them of which only one is a number or which are different infinities, `beyond` those that are too far
    apart.
    """

    elements: int = 0
    different: int = 0
    not_finite: int = 0
    beyond: int = 0
    largest_absolute: float | None = None
    largest_relative: float | None = None
    largest_ulp: int | None = None

    def with_(self, other: Distance) -> Distance:
        """Combined with the distance of other elements."""
        return self._combined(other, add)

    def or_(self, other: Distance) -> Distance:
        """Combined with another comparison of the same elements."""
        return self._combined(other, max)

    def _combined(self, other: Distance, count: Callable[[int, int], int]) -> Distance:
        ulp = _larger(self.largest_ulp, other.largest_ulp)
        return Distance(
            count(self.elements, other.elements),
            count(self.different, other.different),
            count(self.not_finite, other.not_finite),
            count(self.beyond, other.beyond),
            _larger(self.largest_absolute, other.largest_absolute),
            _larger(self.largest_relative, other.largest_relative),
            None if ulp is None else int(ulp),
        )


def _larger(one: float | int | None, other: float | int | None) -> float | int | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)


def distance(expected: torch.Tensor, got: torch.Tensor, tolerance: Tolerance) -> Distance:
    """The distance of two strided tensors of the same dtype and sizes."""
    dtype = expected.dtype
    if dtype in INTEGERS:
        return _combined(_integers(*pair) for pair in chunks(expected, got))
    if not _is_float(dtype):
        return _combined(_patterns(*pair) for pair in chunks(expected, got))
    if _same_bits(expected, got):
        return _combined(_equal_floats(part) for part, _same in chunks(expected, expected))
    scale = scale_of(expected, tolerance)
    return _combined(_floats(*pair, tolerance, scale) for pair in chunks(expected, got))


def _combined(parts: Iterator[Distance]) -> Distance:
    total = Distance()
    for part in parts:
        total = total.with_(part)
    return total


def chunks(expected: torch.Tensor, got: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The elements of both in the same order, as flat contiguous tensors, a chunk at a time."""
    left, right = _flattened(expected), _flattened(got)
    for start in range(0, left.numel(), _CHUNK):
        yield left[start : start + _CHUNK], right[start : start + _CHUNK]


def _flattened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1)


def _integers(expected: torch.Tensor, got: torch.Tensor) -> Distance:
    if expected.dtype is torch.bool:
        expected, got = expected.view(torch.uint8), got.view(torch.uint8)
    unequal = _bits(expected) != _bits(got)
    count = int(unequal.sum())
    if not count:
        return Distance(expected.numel(), largest_absolute=0.0, largest_relative=0.0)
    wanted, given = expected[unequal].to(torch.float64), got[unequal].to(torch.float64)
    apart = (wanted - given).abs()
    return Distance(expected.numel(), count, 0, count, float(apart.max()), _relative(apart, wanted.abs()))


def _patterns(expected: torch.Tensor, got: torch.Tensor) -> Distance:
    width = expected.element_size()
    unequal = expected.view(torch.uint8).view(-1, width) != got.view(torch.uint8).view(-1, width)
    count = int(unequal.any(dim=1).sum())
    return Distance(expected.numel(), count, 0, count)


def _same_bits(expected: torch.Tensor, got: torch.Tensor) -> bool:
    if expected.device.type == "cpu" and got.device.type == "cpu":
        # Not with torch, whose thread count is set for the captured work. The names keep the bytes alive.
        left, right = _flattened(expected), _flattened(got)
        return np.array_equal(_host_bytes(left), _host_bytes(right))
    return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in chunks(expected, got))


def _host_bytes(flat: torch.Tensor) -> np.ndarray:
    """The bytes of a flat contiguous tensor on the host, without a copy; valid while the tensor lives."""
    if not flat.numel():
        return np.zeros(0, np.uint8)
    first = int(flat.storage_offset()) * flat.element_size()
    return np.frombuffer(host_view(flat.untyped_storage()), np.uint8, flat.numel() * flat.element_size(), first)


def _equal_floats(values: torch.Tensor) -> Distance:
    """The result of `_floats` for numbers compared with themselves."""
    parts = torch.view_as_real(values) if values.is_complex() else values
    numbers = wide(parts) if parts.element_size() == 1 else parts
    finite = numbers.isfinite()
    if values.is_complex():
        finite = finite.all(dim=1)
        numbers = numbers.abs().amax(dim=1)
    if not bool(finite.any()):
        return Distance(values.numel())
    zero = torch.zeros((), dtype=numbers.dtype, device=numbers.device)
    nonzero = bool(torch.where(finite, numbers, zero).any())
    return Distance(values.numel(), largest_absolute=0.0, largest_relative=0.0 if nonzero else None, largest_ulp=0)


def _floats(expected: torch.Tensor, got: torch.Tensor, tolerance: Tolerance, scale: float) -> Distance:
    elements, dtype = expected.numel(), expected.dtype
    whole, agree, apart, size = _apart(expected, got)
    not_finite = int((~whole & ~agree).sum())
    different = int((~agree).sum())
    if not bool(whole.any()):
        return Distance(elements, different, not_finite, not_finite)
    apart, size, parts = apart[whole], size[whole], 1
    if dtype.is_complex:
        expected, got, parts = torch.view_as_real(expected).reshape(-1), torch.view_as_real(got).reshape(-1), 2
    pairs = whole.repeat_interleave(parts)
    return Distance(
        elements,
        different,
        not_finite,
        not_finite + int((apart > allowed(size, dtype, tolerance, scale)).sum()),
        float(apart.max()),
        _relative(apart, size),
        largest_ulp(*(_bits(each)[pairs].view(each.dtype) for each in (expected, got))),
    )


def _apart(expected: torch.Tensor, got: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each two elements of flat tensors of numbers: whether both are finite, whether they are equal or both no
    numbers, how far they are apart, and the absolute value of the expected one; the last two count parts that are not
    finite as 0."""
    parts = 1
    if expected.is_complex():
        expected, got, parts = torch.view_as_real(expected).reshape(-1), torch.view_as_real(got).reshape(-1), 2
    wanted, given = wide(expected), wide(got)
    finite = wanted.isfinite() & given.isfinite()
    same = (wanted == given) | (wanted.isnan() & given.isnan())
    zero = torch.zeros((), dtype=torch.float64, device=wanted.device)
    apart = length(torch.where(finite, wanted - given, zero), parts)
    size = length(torch.where(finite, wanted, zero), parts)
    return finite.view(-1, parts).all(dim=1), same.view(-1, parts).all(dim=1), apart, size


def length(values: torch.Tensor, parts: int) -> torch.Tensor:
    """Absolute values; for complex numbers, their magnitudes."""
    return values.abs() if parts == 1 else torch.hypot(*values.view(-1, 2).unbind(1))


def _relative(apart: torch.Tensor, size: torch.Tensor) -> float | None:
    """The largest distance relative to the expected value, over elements where that is not zero."""
    nonzero = size > 0
    return float((apart[nonzero] / size[nonzero]).max()) if bool(nonzero.any()) else None


def scale_of(expected: torch.Tensor, tolerance: Tolerance) -> float:
    """The smallest value that a tensor's relative tolerance applies to: its root mean square, 0 with an absolute
    tolerance."""
    return _root_mean_square(expected) if tolerance.absolute is None else 0.0


def allowed(size: torch.Tensor, dtype: torch.dtype, tolerance: Tolerance, scale: float) -> torch.Tensor:
    """How far off numbers of these absolute values may be."""
    relative = tolerance.of(dtype)
    if tolerance.absolute is None:
        return relative * size.clamp(min=scale)
    return tolerance.absolute + relative * size


def _root_mean_square(expected: torch.Tensor) -> float:
    huge = LARGEST[DTYPE_CODE[expected.dtype]]
    squares, count = 0.0, 0
    for part, _same in chunks(expected, expected):
        values = wide(torch.view_as_real(part).reshape(-1) if part.is_complex() else part)
        values = values[values.abs() < huge]  # leaves out NaN, infinities and their stand-ins
        largest = float(values.abs().max()) if values.numel() else 0.0
        if largest > 1e150:
            return largest  # squares would overflow, and the largest value serves as a bound just as well
        squares += float((values * values).sum())
        count += values.numel() // (2 if part.is_complex() else 1)
    return math.sqrt(squares / count) if count else 0.0


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(_INTEGER_OF_WIDTH[values.element_size()])


def largest_ulp(expected: torch.Tensor, got: torch.Tensor) -> int:
    """The largest distance between two flat tensors of finite floats, in units in the last place."""
    if not expected.numel():
        return 0
    left, right = _bits(expected), _bits(got)
    if expected.dtype in _UNSIGNED_FLOATS:
        return int((left.to(torch.int64).bitwise_and(0xFF) - right.to(torch.int64).bitwise_and(0xFF)).abs().max())
    most = torch.iinfo(left.dtype).max
    left_size, right_size = left.bitwise_and(most).to(torch.int64), right.bitwise_and(most).to(torch.int64)
    opposite = (left < 0) != (right < 0)
    apart = torch.where(opposite, left_size + right_size, (left_size - right_size).abs())
    # The sum of two 63-bit numbers may take 64 bits: compare as unsigned numbers, by flipping the sign bit.
    lowest = torch.iinfo(torch.int64).min
    return int(apart.bitwise_xor(lowest).max()) - lowest


@dataclass(frozen=True)
class WorstElement:
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


def worst_element(expected: torch.Tensor, got: torch.Tensor, tolerance: Tolerance) -> WorstElement:
    """The element farthest off relative to the tolerance; the first of several.

    Both tensors are strided, not empty, of the same dtype and sizes, and have an element that is too far off.
    """
    scale = scale_of(expected, tolerance) if _is_float(expected.dtype) else 0.0
    worst: WorstElement | None = None
    start = 0
    largest = -1.0
    for wanted, given in chunks(expected, got):
        times = _times(wanted, given, tolerance, scale)
        place = int(times.argmax())
        if float(times[place]) > largest:
            largest = float(times[place])
            worst = WorstElement(
                tuple(map(int, np.unravel_index(start + place, expected.shape))),
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
    whole, agree, apart, size = _apart(expected, got)
    times = apart / allowed(size, dtype, tolerance, scale)
    times = torch.where(whole, times, torch.full_like(times, math.inf))
    return torch.where(agree, torch.zeros_like(times), times)


def _differ(expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    width = expected.element_size()
    pair = (each.view(torch.uint8).view(-1, width) for each in (expected, got))
    return torch.ne(*pair).any(dim=1)


def _value(flat: torch.Tensor, place: int) -> Any:
    """An element as a Python number; its bytes in hexadecimal if the dtype has no numbers."""
    if flat.dtype in INTEGERS or _is_float(flat.dtype):
        return flat[place].item()
    width = flat.element_size()
    return "0x" + bytes(flat.view(torch.uint8)[place * width : (place + 1) * width].tolist()).hex()


def _shown(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float | complex) else str(value)
