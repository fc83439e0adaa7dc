"""Integers that satisfy what their uses ask, and demands followed back through what the program computed."""

from __future__ import annotations

import pytest
import torch

from replayfmt.initializers.demands import (
    Conflict,
    Demand,
    DemandStep,
    Role,
    Unsatisfiable,
    combine,
    fill_integers,
    pull_back,
)


def fill(demand: Demand, elements: int = 100, dtype: torch.dtype = torch.int64, seed: int = 3) -> torch.Tensor:
    return fill_integers(dtype, elements, demand, seed)


def test_an_index_is_anywhere_in_range_and_the_same_for_the_same_seed() -> None:
    made = fill(Demand(Role.index, 0, 9), 1000)
    assert set(made.tolist()) == set(range(10))
    assert torch.equal(made, fill(Demand(Role.index, 0, 9), 1000))
    assert not torch.equal(made, fill(Demand(Role.index, 0, 9), 1000, seed=4))


def test_numbers_are_ones_or_the_nearest_in_range() -> None:
    assert set(fill(Demand(Role.number)).tolist()) == {1}
    assert set(fill(Demand(Role.bounded, 5, 9)).tolist()) == {5}
    assert set(fill(Demand(Role.bounded, -9, -5)).tolist()) == {-5}


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_a_mask_has_exactly_the_true_elements_it_must_have(dtype: torch.dtype) -> None:
    made = fill(Demand(Role.mask, 0, 1, total=37), dtype=dtype)
    assert made.dtype is dtype and int(made.sum()) == 37
    assert int(fill(Demand(Role.mask, 0, 1, prefer=False), dtype=dtype).sum()) == 0
    assert int(fill(Demand(Role.mask, 0, 1, prefer=True), dtype=dtype).sum()) == 100


def test_offsets_begin_with_zero_and_never_fall() -> None:
    made = fill(Demand(Role.offsets, 0, 50), 7).tolist()
    assert made[0] == 0 and made == sorted(made) and made[-1] <= 50
    closed = fill(Demand(Role.offsets, 0, 50, total=50, step=10), 7).tolist()
    assert closed[0] == 0 and closed[-1] == 50 and max(b - a for a, b in zip(closed, closed[1:], strict=False)) <= 10


def test_lengths_add_up_and_fall_from_the_longest() -> None:
    made = fill(Demand(Role.lengths, 1, 6, total=13), 4).tolist()
    assert sum(made) == 13 and made[0] == 6 and made == sorted(made, reverse=True) and min(made) >= 1


def test_the_largest_occurs_where_it_must_and_so_do_different_values() -> None:
    assert int(fill(Demand(Role.highest, 0, 4), 20).max()) == 4
    assert len(set(fill(Demand(Role.distinct, 0, 9, total=4), 20).tolist())) == 4


@pytest.mark.parametrize(
    "demand",
    [
        Demand(Role.mask, 0, 1, total=101),
        Demand(Role.lengths, 1, 6, total=10_000),
        Demand(Role.distinct, 0, 1, total=5),
        Demand(Role.index, 300, 400),
        Demand(Role.offsets, 0, 500, total=500, step=2),
    ],
    ids=str,
)
def test_what_cannot_be_satisfied_says_so(demand: Demand) -> None:
    with pytest.raises(Unsatisfiable):
        fill(demand, dtype=torch.uint8 if demand.low == 300 else torch.int64)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((DemandStep("add", 2),), (-2, 7)),
        ((DemandStep("multiply", 2),), (0, 4)),
        ((DemandStep("multiply", -1),), (-9, 0)),
        ((DemandStep("floor_divide", 4),), (0, 39)),
        ((DemandStep("add", 3), DemandStep("multiply", 2)), (-3, 1)),
        ((DemandStep("remainder", 10),), (None, None)),
        ((DemandStep("remainder", 100),), (0, 9)),
        ((DemandStep("running_sum", 3),), (0, 3)),
        ((DemandStep("running_sum", 3), DemandStep("add", -1)), (1, 3)),
    ],
)
def test_demands_are_followed_back_through_computations(
    steps: tuple[DemandStep, ...], expected: tuple[int | None, int | None]
) -> None:
    back = pull_back(Demand(Role.index, 0, 9), steps)
    assert back is not None and (back.low, back.high) == expected


def test_every_value_in_a_range_followed_back_is_good_forward() -> None:
    forward = {
        "add": lambda x, by: x + by,
        "multiply": lambda x, by: x * by,
        "floor_divide": lambda x, by: x // by,
        "remainder": lambda x, by: x % by,
    }
    for what, function in forward.items():
        for by in (-3, -1, 1, 2, 5):
            back = pull_back(Demand(Role.index, 2, 11), (DemandStep(what, by),))
            if back is None:
                continue
            for x in range(-60, 60):
                inside = (back.low is None or back.low <= x) and (back.high is None or x <= back.high)
                assert not inside or 2 <= function(x, by) <= 11, (what, by, x)


def test_a_computation_that_cannot_be_followed_back_is_none() -> None:
    assert pull_back(Demand(Role.index, 0, 9), (DemandStep("floor_divide", -2),)) is None
    assert pull_back(Demand(Role.offsets, 0, 9), (DemandStep("add", 1),)) is None
    assert pull_back(Demand(Role.number), (DemandStep("floor_divide", -2),)) is not None


def test_demands_of_several_uses_hold_together() -> None:
    both = combine([Demand(Role.number), Demand(Role.index, 0, 9), Demand(Role.index, 0, 4)])
    assert isinstance(both, Demand) and (both.role, both.low, both.high) == (Role.index, 0, 4)
    apart = combine([Demand(Role.index, 0, 4, why="small"), Demand(Role.bounded, 7, 9, why="large")])
    assert isinstance(apart, Conflict) and "small" in apart.why and "large" in apart.why
    odd = combine([Demand(Role.offsets, why="offsets"), Demand(Role.mask, total=3, why="a mask")])
    assert isinstance(odd, Conflict)
    masks = combine([Demand(Role.mask, 0, 1, prefer=False), Demand(Role.mask, 0, 1, total=3)])
    assert isinstance(masks, Demand) and masks.total == 3
