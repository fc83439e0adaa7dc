"""The demands of a storage's uses on its content, and content that satisfies all of them at once.

Integers and booleans are made from a seed within a demand's bounds. Floating point content resembles what was not
captured: by its recorded statistics, or by a stated default.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from functools import lru_cache
from itertools import islice

import numpy as np
import torch

from replayfmt.format.external_files import processors
from replayfmt.format.model import Recipe, Statistics
from replayfmt.pytorch.tensors.memory import DTYPE_CODE, TORCH_DTYPE


class Role(IntEnum):
    """What content is for. The roles from `mask` on ask for more than elements within bounds."""

    number = 0  # any value will do
    bounded = 1  # computed with, within bounds
    index = 2  # names an element along a dimension
    mask = 3  # `total` elements are true
    offsets = 4  # begins with 0, never falls, ends with `total` where that is known, no step above `step`
    lengths = 5  # adds up to `total`, the largest is `high`, never rises
    highest = 6  # an index, and `high` occurs
    distinct = 7  # `total` different values
    positive_definite = 8  # floating point: symmetric matrices in the last two dimensions


@dataclass(frozen=True)
class Demand:
    """One use's demand: elements from `low` to `high`, both included, None if there is no bound.

    `prefer` is the value that a mask is best filled with. `why` is a phrase that says what asks for it.
    """

    role: Role
    low: float | None = None
    high: float | None = None
    total: int | None = None
    step: int | None = None
    prefer: bool = True
    why: str = ""


@dataclass(frozen=True)
class DemandStep:
    """One step of a computation: `what` with the number `by`.

    add, multiply, floor_divide, remainder; running_sum of up to `by` elements.
    """

    what: str
    by: float


def pull_back(demand: Demand, steps: tuple[DemandStep, ...], *, integral: bool = True) -> Demand | None:
    """The demand on content x that makes steps(x) satisfy `demand`; None if these steps do not determine it.
    `integral`: x are integers."""
    if not steps or demand.role is Role.number:
        return demand
    if demand.role not in (Role.index, Role.bounded):
        return None
    low = -math.inf if demand.low is None else demand.low
    high = math.inf if demand.high is None else demand.high
    for step in reversed(steps):
        before = _before(step, low, high)
        if before is None:
            return None
        low, high = before
        if integral:
            low = low if math.isinf(low) else math.ceil(low)
            high = high if math.isinf(high) else math.floor(high)
    role = Role.bounded if not integral or any(step.what == "running_sum" for step in steps) else demand.role
    return replace(demand, role=role, low=None if low == -math.inf else low, high=None if high == math.inf else high)


def _before(step: DemandStep, low: float, high: float) -> tuple[float, float] | None:
    by = step.by
    match step.what:
        case "add":
            return low - by, high - by
        case "multiply" if by > 0:
            return low / by, high / by
        case "multiply" if by < 0:
            return high / by, low / by
        case "floor_divide" if by > 0:
            return low * by, high * by + by - 1
        case "remainder" if by > 0:
            if low <= 0 and high >= by - 1:
                return -math.inf, math.inf
            return max(0.0, low), min(by - 1, high)
        case "running_sum" if by > 0 and high >= 0:
            # A sum of up to `by` elements, none of them negative, is at least the first of them.
            return max(0.0, low), high / by
    return None


@dataclass(frozen=True)
class Conflict:
    """Demands that no content satisfies, or none that can be made here. `why` is a phrase."""

    why: str


def combine(demands: list[Demand]) -> Demand | Conflict:
    """One demand that contains all the others."""
    low = max((each.low for each in demands if each.low is not None), default=None)
    high = min((each.high for each in demands if each.high is not None), default=None)
    first = max(demands, key=lambda each: each.role)  # the first of several: its preference counts
    asking = [each for each in demands if each.role >= Role.mask]
    others = {(each.role, each.total, each.step) for each in asking}
    if len(others) > 1:
        # A mask with a given number of true elements also satisfies the demand for a mask with any number of them.
        known = {each for each in others if not (each[0] is Role.mask and each[1] is None)}
        if len(known) != 1 or any(role is not Role.mask for role, _total, _step in others):
            return Conflict(f"it is {asking[0].why} and {asking[-1].why} at once")
        first = next(each for each in asking if each.total is not None)
    if low is not None and high is not None and low > high:
        lowest = next(each for each in demands if each.low == low)
        highest = next(each for each in demands if each.high == high)
        reasons = dict.fromkeys((lowest.why, highest.why))
        return Conflict(f"no value is valid for all its uses: {' and '.join(reasons)}")
    return replace(first, low=low, high=high)


def random_of(*seed: int) -> np.random.Generator:
    """Random numbers that are the same wherever they are drawn."""
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed)))


class Unsatisfiable(Exception):
    """No content of this length satisfies the demand; the message is a phrase that says why."""


def fill_integers(dtype: torch.dtype, elements: int, demand: Demand, seed: int) -> torch.Tensor:
    """A contiguous one-dimensional tensor of `elements` integers or booleans on the CPU.

    Raises Unsatisfiable.
    """
    random = random_of(seed)
    if dtype is torch.bool:
        return torch.from_numpy(_mask(random, elements, demand))
    low, high = _integer_bounds(dtype, demand)
    values = _integer_values(random, elements, demand, low, high)
    if elements and not (low <= values.min() and values.max() <= high):
        raise Unsatisfiable(f"{elements} elements from {low} to {high} do not add up to {demand.total}")
    return torch.from_numpy(values).to(dtype)


def _integer_bounds(dtype: torch.dtype, demand: Demand) -> tuple[int, int]:
    info = torch.iinfo(dtype)
    low = info.min if demand.low is None else max(int(demand.low), info.min)
    high = info.max if demand.high is None else min(int(demand.high), info.max)
    high = min(high, torch.iinfo(torch.int64).max)
    if low > high:
        raise Unsatisfiable(f"{dtype} has no value from {demand.low} to {demand.high}")
    return low, high


def _integer_values(random: np.random.Generator, elements: int, demand: Demand, low: int, high: int) -> np.ndarray:
    match demand.role:
        case Role.index | Role.highest:
            values = (
                random.integers(max(low, 0), high, size=elements, endpoint=True)
                if high >= 0
                else np.full(elements, high, dtype=np.int64)
            )
            if demand.role is Role.highest and elements:
                values[random.integers(elements)] = high
            return values
        case Role.mask:
            return _mask(random, elements, demand).astype(np.int64)
        case Role.offsets:
            return _offsets(elements, demand)
        case Role.lengths:
            return _lengths(elements, demand, low, high)
        case Role.distinct:
            return _distinct(random, elements, demand, low, high)
    # As good as any number: dividing by 1 is safe, and as a mask it is true.
    return np.full(elements, min(max(1, low), high), dtype=np.int64)


def _mask(random: np.random.Generator, elements: int, demand: Demand) -> np.ndarray:
    if demand.total is None:
        low, high = demand.low or 0, 1 if demand.high is None else demand.high
        return np.full(elements, bool(min(max(int(demand.prefer), low), high)))
    if demand.total > elements:
        raise Unsatisfiable(f"{demand.total} of {elements} elements cannot be true")
    mask = np.zeros(elements, dtype=bool)
    mask[random.choice(elements, size=demand.total, replace=False)] = True
    return mask


def _offsets(elements: int, demand: Demand) -> np.ndarray:
    """Even steps from 0. The last element is `total` if that is given; otherwise the last step would end at `high`."""
    if demand.total is not None:
        steps, end = elements - 1, demand.total
    else:
        steps, end = elements, int(demand.high or 0)
    if steps < 1:
        return np.zeros(elements, dtype=np.int64)
    if demand.step is not None and -(-end // steps) > demand.step:
        raise Unsatisfiable(f"{steps} steps of at most {demand.step} do not reach {end}")
    return np.arange(elements, dtype=np.int64) * end // steps


def _lengths(elements: int, demand: Demand, low: int, high: int) -> np.ndarray:
    """Lengths that never rise: the first is `high` if that is known; the others share the rest of the total."""
    if not elements:
        return np.zeros(0, dtype=np.int64)
    if demand.total is None:
        return np.full(elements, high if demand.high is not None else max(1, low), dtype=np.int64)
    values = np.zeros(elements, dtype=np.int64)
    left, rest = demand.total, values
    if demand.high is not None:
        values[0] = high
        left, rest = left - high, values[1:]
    if len(rest):
        rest[:] = left // len(rest)
        rest[: left % len(rest)] += 1
    if int(values.sum()) != demand.total:
        raise Unsatisfiable(f"{elements} lengths of which the largest is {high} do not add up to {demand.total}")
    return values


def _distinct(random: np.random.Generator, elements: int, demand: Demand, low: int, high: int) -> np.ndarray:
    count = demand.total or 0
    start = max(low, 0) if high >= 0 else low
    if count > elements or (elements and not count) or start + count - 1 > high:
        raise Unsatisfiable(f"{elements} elements from {low} to {high} cannot have {count} different values")
    return random.permutation(start + np.arange(elements, dtype=np.int64) % max(count, 1))


# The default where nothing is known: normal, and small enough that deep stacks of layers stay finite.
DEFAULT_MEAN = 0.0
DEFAULT_STD = 0.02

FLOATS = frozenset(
    dtype for dtype in DTYPE_CODE if (dtype.is_floating_point or dtype.is_complex) and dtype != torch.float4_e2m1fn_x2
)

_CHUNK = 1 << 20
_THREADS = 8
_TAIL = 3.0  # a normal law with this many deviations to both ends loses nothing of note by ending there
# Above this ratio of deviation to mean, values of one sign are log-normal: a normal law would have the other sign too.
_SKEWED = 0.4
_MOST = 1e100  # and below this one
_LOST = 0.02  # the share of a law that may lie beyond the ends
_ROUNDING = 1e-6  # what sums of very many elements may be off by
_FEW = 4096  # this many elements miss the mean and deviation of their distribution by chance alone
_COMPLEX_PART = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def float_bounds(demand: Demand) -> tuple[float, float]:
    """Between which numbers elements that must satisfy a demand are drawn."""
    low, high = demand.low, demand.high
    if low is None:
        return (0.0, 1.0) if high is None else (high - 1, high)
    return (low, low + 1) if high is None else (low, high)


def contradiction(recipe: Recipe) -> str | None:
    """Why no content can follow a recipe; None if some can."""
    known = recipe.statistics
    if known is None:
        return None
    special = known.zeros + known.nans + known.positive_infinities + known.negative_infinities
    if special > recipe.elements:
        return f"its statistics count {special} special elements of {recipe.elements}"
    if special < recipe.elements:
        figures = (known.mean, known.std, known.min, known.max)
        if not all(map(math.isfinite, figures)) or known.std < 0 or known.min > known.max:
            return "its statistics do not describe finite elements, and there are some"
        if known.min == known.max == 0:
            return "its statistics say that all finite elements are zero, and count fewer zeros"
        largest = max(abs(known.min), abs(known.max))
        slack = _ROUNDING * largest
        if not known.min - slack <= known.mean <= known.max + slack:
            return "the mean in its statistics does not lie between the smallest and the largest element"
        if known.std > known.max / 2 - known.min / 2 + slack:
            return "no elements between the smallest and the largest in its statistics have their deviation"
        dtype = TORCH_DTYPE.get(recipe.dtype)
        if dtype in FLOATS and largest > torch.finfo(dtype).max:
            return f"its statistics have elements that {dtype} cannot have"
    return None


class _Shape(Enum):
    """The family of distributions from which finite non-zero elements are drawn."""

    normal = 0
    log_normal = 1
    uniform = 2  # between both ends
    beta = 3  # between both ends
    two_values = 4  # the ends


@dataclass(frozen=True)
class _Law:
    """How finite non-zero elements are drawn: between `low` and `high`, neither of which is zero."""

    shape: _Shape
    mean: float
    std: float
    low: float
    high: float
    least: float  # the smallest magnitude

    def draw(self, random: np.random.Generator, out: np.ndarray) -> None:
        if self.shape in (_Shape.normal, _Shape.log_normal):
            self._draw_unbounded(random, out)
        else:
            share, certainty = _place(self.mean, self.std, self.low, self.high)
            if self.shape is _Shape.uniform:
                random.random(out=out, dtype=out.dtype.type)
            elif self.shape is _Shape.beta:
                out[:] = random.beta(share * certainty, (1 - share) * certainty, size=out.size)
            else:
                out[:] = random.permutation(out.size) < round(share * out.size)
            out[:] = self.low * (1 - out) + self.high * out  # their difference may be out of range
        if self.shape is not _Shape.two_values and 1 < len(out) < _FEW:
            self._correct(out)
        for end, beyond in ((self.low, out < self.low), (self.high, out > self.high)):
            if beyond.any():
                out[beyond] = 2 * end - out[beyond]  # reflected, so that the ends do not gather all of the tail
        np.clip(out, self.low, self.high, out=out)
        tiny = np.abs(out) < self.least
        if tiny.any():
            out[tiny] = self._nearest_to_zero()

    def _draw_unbounded(self, random: np.random.Generator, out: np.ndarray) -> None:
        random.standard_normal(out=out, dtype=out.dtype.type)
        if self.shape is _Shape.log_normal:
            spread = math.log1p((self.std / self.mean) ** 2)
            out *= math.sqrt(spread)
            out += math.log(abs(self.mean)) - spread / 2
            np.exp(out, out=out)
            if self.mean < 0:
                np.negative(out, out=out)
        else:
            out *= self.std
            out += self.mean

    def _correct(self, out: np.ndarray) -> None:
        """Shift and scale the drawn elements to this mean and deviation, which a few elements miss by chance."""
        with np.errstate(over="ignore", invalid="ignore"):
            centered = out - out.mean()
            spread = float(np.sqrt(np.square(centered).mean()))
        if 0 < spread < math.inf:
            np.multiply(centered, self.std / spread, out=out)
            out += self.mean

    def _nearest_to_zero(self) -> float:
        if self.low > 0:
            return self.low
        if self.high < 0:
            return self.high
        return self.least if self.high >= self.least else -self.least


def _shape(mean: float, std: float, low: float, high: float) -> _Shape:
    """The family that has this mean and deviation and keeps them between its ends."""
    if not std or not 0 < high - low < math.inf or min(mean - low, high - mean) > _TAIL * std:
        return _Shape.normal
    near, far = sorted((abs(low), abs(high)))
    if near and (low > 0) == (high > 0) and _SKEWED * abs(mean) < std < _MOST * abs(mean):
        spread = math.log1p((std / mean) ** 2)
        center, width = math.log(abs(mean)) - spread / 2, math.sqrt(2 * spread)
        # How much of the law is beyond the near end, and how much of its second moment is beyond the far one.
        before = math.erfc((center - math.log(near)) / width) / 2
        after = math.erfc((math.log(far) - center - 2 * spread) / width) / 2
        if before < _LOST and after < _LOST:
            return _Shape.log_normal
    share, certainty = _place(mean, std, low, high)
    if certainty < _LOST:
        return _Shape.two_values
    return _Shape.uniform if abs(share - 0.5) < _LOST and abs(certainty - 2) < 5 * _LOST else _Shape.beta


def _place(mean: float, std: float, low: float, high: float) -> tuple[float, float]:
    """Where the mean is on the way from one end to the other, and the sum of a beta law's parameters: the greater, the
    nearer all is to the mean. Nothing between its ends can have less than 0, where only the ends occur."""
    span = high - low
    share = (mean - low) / span
    return share, share * (1 - share) * (span / std) ** 2 - 1


@dataclass(frozen=True)
class _Chunk:
    """One chunk: `special` is how many zeros, NaNs and infinities of either sign it has, `ends` are values in it."""

    index: int
    length: int
    special: tuple[int, ...]
    ends: tuple[float, ...]


def synthesize(target: torch.Tensor, seed: int, statistics: Statistics | None = None) -> None:
    """Fill a contiguous one-dimensional tensor of a floating or complex dtype, on any device. `seed`: unsigned 64 bits.

    Without statistics the default law is used; those of complex elements are of both parts, and count elements.
    `statistics` must be free of contradiction.
    """
    elements, width = target.numel(), 1
    if target.dtype in _COMPLEX_PART:
        target, width = _parts(target), 2
    carrier = np.float64 if target.dtype is torch.float64 else np.float32
    maker = _Maker(elements, width, seed, statistics, target.dtype, carrier)
    start = 0
    for chunk in maker.chunks():
        end = start + len(chunk)
        target[start:end].copy_(torch.from_numpy(chunk))
        start = end


def _parts(target: torch.Tensor) -> torch.Tensor:
    """Real and imaginary parts, as they alternate in memory."""
    made = torch.empty((0,), dtype=_COMPLEX_PART[target.dtype], device=target.device)
    return made.set_(target.untyped_storage(), 2 * int(target.storage_offset()), (2 * target.numel(),), (1,))


def _least(dtype: torch.dtype, greatest: float | None) -> float:
    """The smallest magnitude that is drawn where none is greater than `greatest`, if that is known."""
    info = torch.finfo(dtype)
    # Float32's own subnormals are slow on many machines; those of the short formats are ordinary numbers in it.
    short = info.bits < 16 or dtype is torch.float16 or (greatest is not None and greatest < info.smallest_normal)
    return info.smallest_normal * (info.eps if short else 1)


@lru_cache(maxsize=64)
def _default_law(dtype: torch.dtype, greatest: float | None) -> _Law:
    info, least = torch.finfo(dtype), _least(dtype, greatest)
    low = least if dtype is torch.float8_e8m0fnu else info.min
    return _Law(_Shape.normal, DEFAULT_MEAN, DEFAULT_STD, low, info.max, least)


class _Maker:
    """Makes the chunks of one content, of elements that have `width` numbers each."""

    def __init__(
        self,
        elements: int,
        width: int,
        seed: int,
        statistics: Statistics | None,
        dtype: torch.dtype,
        carrier: type[np.floating],
    ) -> None:
        self._width = width
        self._elements, self._seed, self._statistics, self._carrier = elements, seed, statistics, carrier
        self._special = (
            (0, 0, 0, 0)
            if statistics is None
            else (statistics.zeros, statistics.nans, statistics.positive_infinities, statistics.negative_infinities)
        )
        self._ends = (
            []
            if statistics is None
            else [value for value in (statistics.min, statistics.max) if value and math.isfinite(value)]
        )
        self._law = self._choose_law(dtype)
        self._chunks = list(self._divide())

    def chunks(self) -> Iterator[np.ndarray]:
        """All chunks in order; a few are made at the same time."""
        if len(self._chunks) <= 1:
            yield from map(self._make, self._chunks)
            return
        workers = min(_THREADS, processors())
        following = iter(self._chunks)
        with ThreadPoolExecutor(workers) as pool:
            ahead = deque(pool.submit(self._make, chunk) for chunk in islice(following, workers))
            while ahead:
                made = ahead.popleft().result()
                ahead.extend(pool.submit(self._make, chunk) for chunk in islice(following, 1))
                yield made

    def _choose_law(self, dtype: torch.dtype) -> _Law:
        known = self._statistics
        count = 0 if known is None else self._elements - sum(self._special)
        if known is None or not count:
            return _default_law(dtype, None if known is None else max(-known.min, known.max))
        info, least = torch.finfo(dtype), _least(dtype, max(-known.min, known.max))
        low = max(known.min, info.min) or least
        high = min(known.max, info.max) or -least
        # What remains of the sums of elements and of squares, once the zeros and the ends are in their places.
        ends = self._ends[:count]
        left = count - len(ends)
        if not left:
            return _Law(_Shape.normal, known.mean, 0.0, low, high, least)
        finite = count + known.zeros
        mean = known.mean + (known.zeros * known.mean + sum(known.mean - end for end in ends)) / left
        mean = min(max(mean, low), high)
        unit = max(abs(low), abs(high))  # squares may be out of range
        others = known.zeros * (known.mean / unit) ** 2 + sum(((end - known.mean) / unit) ** 2 for end in ends)
        squares = finite * (known.std / unit) ** 2 - others
        std = unit * math.sqrt(max(0.0, squares / left - ((mean - known.mean) / unit) ** 2))
        return _Law(_shape(mean, std, low, high), mean, std, low, high, least)

    def _divide(self) -> Iterator[_Chunk]:
        """The chunks, with special elements spread evenly over them; the ends go where there is room first."""
        left, ends = list(self._special), self._ends
        total = sum(left)
        for index, first in enumerate(range(0, self._elements, _CHUNK)):
            length = min(_CHUNK, self._elements - first)
            here = total * (first + length) // self._elements - total * first // self._elements
            remaining = sum(left)
            counts = [count * here // remaining if remaining else 0 for count in left]
            for kind in sorted(range(4), key=lambda kind: counts[kind] - left[kind]):
                counts[kind] += min(here - sum(counts), left[kind] - counts[kind])
            left = [count - taken for count, taken in zip(left, counts, strict=True)]
            free = min(length - here, len(ends))
            yield _Chunk(index, length, tuple(counts), tuple(ends[:free]))
            ends = ends[free:]

    def _make(self, chunk: _Chunk) -> np.ndarray:
        random = random_of(self._seed, chunk.index)
        values = np.empty(chunk.length * self._width, dtype=self._carrier)
        self._law.draw(random, values)
        elements = values.reshape(chunk.length, self._width)
        special = sum(chunk.special)
        if special or chunk.ends:
            places = _places(random, chunk.length, special + len(chunk.ends))
            at = 0
            for count, value in zip(
                (*chunk.special, *(1 for _ in chunk.ends)),
                (0.0, math.nan, math.inf, -math.inf, *chunk.ends),
                strict=True,
            ):
                elements[places[at : at + count]] = value
                at += count
        return values


def _places(random: np.random.Generator, length: int, count: int) -> np.ndarray:
    """`count` different places below `length`, in random order."""
    if 2 * count > length:
        return random.permutation(length)[:count]
    return random.choice(length, size=count, replace=False, shuffle=True)
