"""The demands of a storage's uses on its content, and content that satisfies all of them at once.

A demand is about the elements an op sees. Where the program computed those from the storage's content by simple steps
(added 2, multiplied, summed up), the demand is pulled back through the steps to the content itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum


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
            low, high = _up(low), _down(high)
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


def _up(value: float) -> float:
    return value if math.isinf(value) else math.ceil(value)


def _down(value: float) -> float:
    return value if math.isinf(value) else math.floor(value)


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
