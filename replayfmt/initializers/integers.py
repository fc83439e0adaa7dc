"""Integers and booleans that satisfy a demand, from a seed."""

from __future__ import annotations

import numpy as np
import torch

from .demands import Demand, Role


class Unsatisfiable(Exception):
    """No content of this length satisfies the demand; the message is a phrase that says why."""


def fill_integers(dtype: torch.dtype, elements: int, demand: Demand, seed: int) -> torch.Tensor:
    """A contiguous one-dimensional tensor of `elements` integers or booleans on the CPU.

    Raises Unsatisfiable.
    """
    random = np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed])))
    if dtype is torch.bool:
        return torch.from_numpy(_mask(random, elements, demand))
    low, high = _bounds(dtype, demand)
    values = _values(random, elements, demand, low, high)
    if elements and not (low <= values.min() and values.max() <= high):
        raise Unsatisfiable(f"{elements} elements from {low} to {high} do not add up to {demand.total}")
    return torch.from_numpy(values).to(dtype)


def _bounds(dtype: torch.dtype, demand: Demand) -> tuple[int, int]:
    info = torch.iinfo(dtype)
    low = info.min if demand.low is None else max(int(demand.low), info.min)
    high = info.max if demand.high is None else min(int(demand.high), info.max)
    high = min(high, torch.iinfo(torch.int64).max)
    if low > high:
        raise Unsatisfiable(f"{dtype} has no value from {demand.low} to {demand.high}")
    return low, high


def _values(random: np.random.Generator, elements: int, demand: Demand, low: int, high: int) -> np.ndarray:
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
    values = start + np.arange(elements, dtype=np.int64) % max(count, 1)
    return random.permutation(values)
