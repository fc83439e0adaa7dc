"""The element that is farthest off: which it is, and what is there on both sides."""

import math
from typing import Any

import pytest
import torch

from replayfmt.replay.substitution.distance import Tolerance, WorstElement, chunks, worst_element
from replayfmt.replay.substitution.judging import compare

AUTO = Tolerance()


def test_it_is_the_one_that_is_farthest_off_for_what_is_allowed_there() -> None:
    expected = torch.tensor([[1000.0, 1.0], [1.0, 1000.0]])
    got = expected + torch.tensor([[5.0, 1.0], [0.5, 0.0]])
    by_value = Tolerance(relative=1e-3, absolute=1e-9)
    assert worst_element(expected, got, by_value) == WorstElement((0, 1), 1.0, 2.0, pytest.approx(1000, rel=1e-3))
    assert worst_element(expected, got, AUTO).index == (0, 0)
    assert worst_element(expected, got, AUTO).times < 20, "small values may be off by a share of the root mean square"


@pytest.mark.parametrize(("value", "text"), [(math.nan, "got nan"), (math.inf, "got inf")])
def test_what_is_not_finite_on_one_side_is_worse_than_any_number(value: float, text: str) -> None:
    expected, got = torch.ones(3, 4), torch.ones(3, 4)
    got[0, 0], got[1, 3] = 1e30, value
    worst = worst_element(expected, got, AUTO)
    assert worst.index == (1, 3) and str(worst) == f"element [1, 3] expected 1, {text}"


def test_agreeing_infinities_and_nans_are_none() -> None:
    expected = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    got = expected.clone()
    got[3] = 2.0
    assert worst_element(expected, got, AUTO).index == (3,)


@pytest.mark.parametrize(
    ("dtype", "one", "other", "text"),
    [
        (torch.int64, 1 << 60, (1 << 60) + 1, "expected 1152921504606846976, got 1152921504606846977"),
        (torch.bool, True, False, "expected True, got False"),
        (torch.uint8, 7, 9, "expected 7, got 9"),
        (torch.bfloat16, 1.0, 2.0, "expected 1, got 2"),
        (torch.float64, 1.0, 1.5, "expected 1, got 1.5"),
        (torch.complex64, 1 + 1j, 1 - 1j, "expected 1+1j, got 1-1j"),
        (torch.float8_e4m3fn, 1.0, 4.0, "expected 1, got 4"),
    ],
)
def test_numbers_of_every_kind_are_shown_as_they_are(dtype: torch.dtype, one: Any, other: Any, text: str) -> None:
    expected = torch.full((2, 3), one, dtype=dtype)
    got = expected.clone()
    got.view(-1)[4] = other
    compared = compare("result 0", expected, got, AUTO)
    assert compared.distance.beyond == 1 and str(compared.worst) == f"element [1, 1] {text}"


def test_its_index_is_that_in_the_tensor_whatever_its_strides_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replayfmt.replay.substitution.distance._CHUNK", 7)
    expected = torch.zeros(6, 5, 4).permute(2, 0, 1)
    got = expected.clone()
    got[3, 4, 2] = 1.0
    assert len(list(chunks(expected, got))) > 1
    assert worst_element(expected, got, AUTO).index == (3, 4, 2)
    assert worst_element(torch.tensor(1.0), torch.tensor(2.0), AUTO).index == ()


def test_where_all_is_close_there_is_none() -> None:
    assert compare("result 0", torch.ones(3), torch.ones(3) + 1e-6, AUTO).worst is None
