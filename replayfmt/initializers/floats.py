"""Floating point content that resembles what was not captured: by its recorded statistics, or by a stated default.

How many elements are zero, NaN and infinite is exact, all finite ones lie within [min, max] and both ends occur; mean
and standard deviation are close. Made on the host from a seed, in chunks that do not depend on each other, so that the
bytes are the same on every device and however many threads make them.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from replayfmt.format.model import Recipe, Statistics

# What floats are where nothing is known of them: normal, small enough that deep stacks of layers stay finite.
DEFAULT_MEAN = 0.0
DEFAULT_STD = 0.02

FLOATS = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
})

_CHUNK = 1 << 20
_THREADS = 8
# Above this ratio of deviation to mean, values of one sign are log-normal: a normal law would have the other sign too.
_SKEWED = 0.4
_TAIL = 3.0           # and they reach further than this many deviations
_COMPLEX_PART = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def contradiction(recipe: Recipe) -> str | None:
    """Why no content can follow a recipe, None where some can."""
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
    return None


@dataclass(frozen=True)
class _Law:
    """How finite elements that are not zero are drawn. `low` and `high` bound them, neither is zero."""

    mean: float
    std: float
    low: float
    high: float
    least: float          # the smallest magnitude
    skewed: bool

    def draw(self, random: np.random.Generator, out: np.ndarray) -> None:
        random.standard_normal(out=out, dtype=out.dtype.type)
        if self.skewed:
            spread = math.log1p((self.std / self.mean) ** 2)
            out *= math.sqrt(spread)
            out += math.log(abs(self.mean)) - spread / 2
            np.exp(out, out=out)
            if self.mean < 0:
                np.negative(out, out=out)
        else:
            out *= self.std
            out += self.mean
        for end, beyond in ((self.low, out < self.low), (self.high, out > self.high)):
            if beyond.any():
                out[beyond] = 2 * end - out[beyond]        # reflected, so that the ends do not gather all of the tail
        np.clip(out, self.low, self.high, out=out)
        tiny = np.abs(out) < self.least
        if tiny.any():
            out[tiny] = self._nearest_to_zero()

    def _nearest_to_zero(self) -> float:
        if self.low > 0:
            return self.low
        if self.high < 0:
            return self.high
        return self.least if self.high >= self.least else -self.least


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
    part = _COMPLEX_PART[target.dtype]
    made = torch.empty((0,), dtype=part, device=target.device)
    return made.set_(target.untyped_storage(), 2 * int(target.storage_offset()), (2 * target.numel(),), (1,))


class _Maker:
    """Makes the chunks of one content, of elements that have `width` numbers each."""

    def __init__(self, elements: int, width: int, seed: int, statistics: Statistics | None, dtype: torch.dtype,
                 carrier: type[np.floating]) -> None:
        self._width = width
        self._elements, self._seed, self._statistics, self._carrier = elements, seed, statistics, carrier
        self._law = self._choose_law(dtype)
        self._chunks = list(self._divide())

    def chunks(self) -> Iterator[np.ndarray]:
        """All chunks in order, a few of them being made at the same time."""
        if len(self._chunks) <= 1:
            yield from map(self._make, self._chunks)
            return
        workers = min(_THREADS, os.cpu_count() or 1)
        following = iter(self._chunks)
        with ThreadPoolExecutor(workers) as pool:
            ahead = deque(pool.submit(self._make, chunk) for chunk in islice(following, workers))
            while ahead:
                made = ahead.popleft().result()
                ahead.extend(pool.submit(self._make, chunk) for chunk in islice(following, 1))
                yield made

    def _choose_law(self, dtype: torch.dtype) -> _Law:
        info = torch.finfo(dtype)
        # Float32's own subnormals are slow on many machines; those of the short formats are ordinary numbers in it.
        least = info.smallest_normal * (info.eps if info.bits < 16 or dtype is torch.float16 else 1.0)
        known = self._statistics
        special = () if known is None else (known.nans, known.positive_infinities, known.negative_infinities)
        finite = self._elements - sum(special)
        if known is None or finite <= known.zeros:
            low = least if dtype is torch.float8_e8m0fnu else info.min
            return _Law(DEFAULT_MEAN, DEFAULT_STD, low, info.max, least, False)
        share = 1 - known.zeros / finite
        mean = known.mean / share
        std = math.sqrt(max(0.0, (known.std**2 + known.mean**2) / share - mean**2))
        low = max(known.min, info.min) or least
        high = min(known.max, info.max) or -least
        one_sign = (low > 0 and mean > 0) or (high < 0 and mean < 0)
        far = max(abs(low), abs(high)) > abs(mean) + _TAIL * std
        return _Law(mean, std, low, high, least, one_sign and far and std > _SKEWED * abs(mean))

    def _divide(self) -> Iterator[_Chunk]:
        """The chunks, with special elements spread evenly over them; the ends go where there is room first."""
        known = self._statistics
        left = [0, 0, 0, 0] if known is None else [known.zeros, known.nans, known.positive_infinities,
                                                   known.negative_infinities]
        ends = [] if known is None else [value for value in (known.min, known.max) if value and math.isfinite(value)]
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
        random = np.random.Generator(np.random.SFC64(np.random.SeedSequence([self._seed, chunk.index])))
        values = np.empty(chunk.length * self._width, dtype=self._carrier)
        self._law.draw(random, values)
        elements = values.reshape(chunk.length, self._width)
        special = sum(chunk.special)
        if special or chunk.ends:
            places = _places(random, chunk.length, special + len(chunk.ends))
            at = 0
            for count, value in zip((*chunk.special, *(1 for _ in chunk.ends)),
                                    (0.0, math.nan, math.inf, -math.inf, *chunk.ends), strict=True):
                elements[places[at : at + count]] = value
                at += count
        return values


def _places(random: np.random.Generator, length: int, count: int) -> np.ndarray:
    """`count` different places below `length`, in random order."""
    if 2 * count > length:
        return random.permutation(length)[:count]
    return random.choice(length, size=count, replace=False, shuffle=True)
