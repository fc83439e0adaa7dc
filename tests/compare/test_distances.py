"""Distances of all elements of two results, by dtype: absolute, relative, in ULP, with the worst element."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from replayfmt.compare.distances import Allowed, distance
from replayfmt.format.codes import DType

FLOATS = [DType.float64, DType.float32, DType.float16, DType.bfloat16]


def next_values(dtype: DType, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of a dtype, normal and below, and those that many steps further from zero."""
    torch_dtype = getattr(torch, dtype.name)
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[torch_dtype.itemsize]
    bits = torch.cat([torch.arange(1, 100), torch.tensor([1.0, 3.5, 1000.0], dtype=torch_dtype).view(integer)])
    both = [each.to(integer).view(torch_dtype).double().numpy() for each in (bits, bits + count)]
    return both[0], both[1]


@pytest.mark.parametrize("dtype", FLOATS, ids=[each.name for each in FLOATS])
@pytest.mark.parametrize("count", [1, 7])
def test_a_step_between_neighbouring_numbers_is_one_ulp_in_every_dtype(dtype: DType, count: int) -> None:
    a, b = next_values(dtype, count)
    for sign in (1.0, -1.0):
        found = distance(sign * a, sign * b, dtype)
        assert (found.ulp, found.different, found.compared) == (count, len(a), len(a))
    assert distance(a, b, dtype, Allowed(ulp=count)).beyond == 0
    assert distance(a, b, dtype, Allowed(ulp=count - 1) if count > 1 else Allowed()).beyond == len(a)


def test_steps_go_through_zero() -> None:
    tiny = float(torch.finfo(torch.float32).smallest_normal) * float(torch.finfo(torch.float32).eps)
    assert distance(np.array([tiny]), np.array([-tiny]), DType.float32).ulp == 2


def test_the_worst_element_is_named_with_its_values_and_the_share_of_all_that_differ() -> None:
    a = np.arange(1.0, 1001.0)
    b = a.copy()
    b[[3, 500, 998]] += (0.5, 2.0, 1.0)
    found = distance(a, b, DType.float32)
    assert (found.worst, found.a, found.b, found.absolute) == (500, 501.0, 503.0, 2.0)
    assert found.relative == 0.125 and found.share == 0.003 and found.beyond == 3
    assert distance(a, b, DType.float32, Allowed(absolute=1.0)).beyond == 1
    assert distance(a, b, DType.float32, Allowed(relative=0.01)).beyond == 1


def test_nan_and_infinities_are_counted_apart_and_are_beyond_every_tolerance() -> None:
    nan, inf = float("nan"), float("inf")
    a, b = np.array([nan, 1.0, inf, -inf, 5.0]), np.array([nan, nan, inf, inf, 5.0])
    found = distance(a, b, DType.float64, Allowed(absolute=1e9))
    assert (found.nan, found.inf, found.different, found.beyond) == ((1, 2), (2, 2), 2, 2)
    assert found.worst in (1, 3) and found.absolute == 0


def test_zeros_of_another_sign_are_equal_and_counted() -> None:
    found = distance(np.array([0.0, -0.0, 1.0]), np.array([-0.0, -0.0, 1.0]), DType.float32)
    assert (found.different, found.beyond, found.zero_signs) == (0, 0, 1)


def test_complex_numbers_are_as_far_apart_as_the_worse_of_their_parts_in_ulp() -> None:
    one = np.array([1 + 1j])
    other = np.array([complex(1 + 2 * torch.finfo(torch.float32).eps, 1 + torch.finfo(torch.float32).eps)])
    found = distance(one, other, DType.complex64)
    assert found.ulp == 2 and found.different == 1


def test_integers_have_no_ulp() -> None:
    found = distance(np.array([1, 2, 3]), np.array([1, 2, 7]), DType.int64)
    assert (found.ulp, found.absolute, found.worst, found.a, found.b) == (None, 4.0, 2, 3, 7)
