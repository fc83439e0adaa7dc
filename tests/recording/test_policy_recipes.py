"""Recipes: what is recorded of floating-point content that is left out."""

from __future__ import annotations

import math

import pytest
import torch

from replayfmt.format.codes import DType
from replayfmt.recording.content import storage_content
from replayfmt.recording.content.storage_content import recipe


def of(values: torch.Tensor, number: int = 1) -> storage_content.Recipe:
    return recipe(values.untyped_storage(), values.dtype, number)


def test_statistics_are_of_all_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_content, "_AT_ONCE", 7)  # so that they are put together from parts
    values = torch.randn(100, dtype=torch.float64) * 3 + 5
    values[:10] = 0
    made = of(values)
    assert (made.dtype, made.elements) == (DType.float64, 100)
    known = made.statistics
    assert known is not None
    assert known.mean == pytest.approx(float(values.mean()))
    assert known.std == pytest.approx(float(values.std(correction=0)))
    assert (known.min, known.max, known.zeros) == (float(values.min()), float(values.max()), 10)


def test_nans_and_infinities_are_counted_and_left_out_of_the_rest() -> None:
    known = of(torch.tensor([1.0, math.nan, math.inf, -math.inf, math.inf, 3.0, 0.0])).statistics
    assert known is not None
    assert (known.nans, known.positive_infinities, known.negative_infinities, known.zeros) == (1, 2, 1, 1)
    assert (known.mean, known.min, known.max) == (pytest.approx(4 / 3), 0.0, 3.0)


def test_without_a_finite_element_nothing_else_is_known() -> None:
    known = of(torch.full((3,), math.nan)).statistics
    assert known is not None and known.nans == 3 and math.isnan(known.mean) and math.isnan(known.std)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_every_floating_dtype_has_statistics(dtype: torch.dtype) -> None:
    known = of(torch.tensor([1.0, 2.0, 3.0]).to(dtype)).statistics
    assert known is not None and known.mean == 2.0


def test_complex_elements_count_once() -> None:
    known = of(torch.tensor([1 + 3j, 0j, complex(math.nan, 1), complex(math.inf, 0)])).statistics
    assert known is not None
    assert (known.zeros, known.nans, known.positive_infinities, known.max) == (1, 1, 1, 3.0)


def test_a_storage_with_a_rest_has_as_many_elements_as_fit() -> None:
    storage = torch.zeros(10, dtype=torch.uint8).untyped_storage()
    assert recipe(storage, torch.float32, 1).elements == 2


def test_seeds_differ_and_tell_nothing_of_the_content() -> None:
    one, other = torch.ones(3), torch.zeros(3)
    assert of(one, 1).seed == of(other, 1).seed != of(one, 2).seed
