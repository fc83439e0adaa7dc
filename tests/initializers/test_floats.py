"""Floating point content by statistics: exact counts, bounds that are kept and reached, the same bytes every time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from replayfmt.format.codes import DType
from replayfmt.format.model import Recipe, Statistics
from replayfmt.initializers.demands import DEFAULT_STD, contradiction, synthesize


def statistics_of(content: torch.Tensor) -> Statistics:
    wide = content.double()
    finite = wide[wide.isfinite()]
    return Statistics(
        finite.mean().item(),
        finite.std(unbiased=False).item(),
        finite.min().item(),
        finite.max().item(),
        int((wide == 0).sum()),
        int(wide.isnan().sum()),
        int((wide == math.inf).sum()),
        int((wide == -math.inf).sum()),
    )


def filled(like: torch.Tensor, statistics: Statistics | None, seed: int = 7) -> torch.Tensor:
    content = torch.empty_like(like)
    synthesize(content, seed, statistics)
    return content


def _with_specials() -> torch.Tensor:
    content = torch.randn(2_500_000, generator=torch.Generator().manual_seed(1))
    content[:100], content[100:130], content[130] = math.nan, math.inf, -math.inf
    content[1000:900_000] = 0
    return content


def _random(count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(2))


CONTENTS = {
    "several chunks with special values": _with_specials(),
    "after a rectifier": _random(100_000).relu(),
    "squares of gradients": _random(100_000).pow(4) * 1e-6,
    "small halves": (_random(50_000) * 1e-6).half(),
    "bfloat16": _random(50_000).bfloat16() * 100,
    "float8": _random(20_000).to(torch.float8_e4m3fn),
    "float8 with infinities": torch.cat([_random(5_000), torch.tensor([math.inf])]).to(torch.float8_e5m2),
    "double": _random(20_000).double(),
    "a constant": torch.full((1000,), 3.5),
    "negative": -_random(50_000).abs(),
    "a mask": (_random(20_000) > 0.5).float(),
    "signs": _random(20_000).sign(),
    "uniform": torch.rand(50_000, generator=torch.Generator().manual_seed(3)),
    "cut off at two deviations": torch.nn.init.trunc_normal_(
        torch.empty(50_000), generator=torch.Generator().manual_seed(3)
    ),
    "cosines": torch.outer(torch.arange(500.0), torch.logspace(0, -4, 64)).cos().reshape(-1),
    "probabilities": _random(200_000).mul(3).view(-1, 100).softmax(-1).reshape(-1),
    "two heaps": torch.where(_random(50_000) > 1, 1000.0, 0.01) + _random(50_000) * 0.01,
    "one far away": torch.cat([_random(50_000) * 0.02, torch.tensor([100.0])]),
    "heavy tails in halves": _random(50_000).mul(3).exp().clamp(max=60_000).half(),
    "a few": torch.tensor([2.0, 2.0, 9.0, 2.0, 2.0]),
    "subnormal": _random(5_000) * 1e-39,
    "as large as floats are": torch.tensor([-3.4e38, 3.4e38] * 100),
    "one element": torch.tensor([2.5]),
    "two elements": torch.tensor([0.0, -1.0]),
    "zeros": torch.zeros(10),
    "nothing finite": torch.tensor([math.nan, math.inf, math.nan]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CONTENTS))
def test_counts_and_ends_are_exact_and_the_rest_is_close(name: str) -> None:
    content = CONTENTS[name]
    known = statistics_of(content) if name != "nothing finite" else Statistics(*[math.nan] * 4, 0, 2, 1, 0)
    recipe = Recipe(DType.float32, content.numel(), 1, known)
    assert contradiction(recipe) is None
    made = filled(content, known)
    if name == "nothing finite":
        assert int(made.isnan().sum()) == 2 and int(made.isinf().sum()) == 1
        return
    got = statistics_of(made)
    exact = ("min", "max", "zeros", "nans", "positive_infinities", "negative_infinities")
    assert [getattr(got, field) for field in exact] == [getattr(known, field) for field in exact]
    assert got.std == pytest.approx(known.std, rel=0.05)
    assert got.mean == pytest.approx(known.mean, abs=0.05 * known.std)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    content = CONTENTS["several chunks with special values"]
    known = statistics_of(content)
    first, again, other = filled(content, known), filled(content, known), filled(content, known, seed=8)
    assert torch.equal(first.view(torch.uint8), again.view(torch.uint8))
    assert not torch.equal(first.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.slow
def test_special_elements_are_spread_over_the_whole() -> None:
    made = filled(CONTENTS["several chunks with special values"], statistics_of(_with_specials()))
    zeros = (made == 0).float()
    shares = [float(part.mean()) for part in zeros.chunk(5)]
    assert max(shares) - min(shares) < 0.02


def test_without_statistics_the_default_law_is_used() -> None:
    made = filled(torch.empty(200_000), None)
    assert made.isfinite().all() and float(made.std()) == pytest.approx(DEFAULT_STD, rel=0.02)
    assert abs(float(made.mean())) < 0.001


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
def test_complex_elements_have_two_parts_of_the_default_law(dtype: torch.dtype) -> None:
    made = filled(torch.empty(10_000, dtype=dtype), None)
    parts = torch.view_as_real(made.to(torch.complex128))
    assert float(parts.std()) == pytest.approx(DEFAULT_STD, rel=0.05)


@pytest.mark.slow
def test_complex_elements_follow_the_statistics_of_both_parts() -> None:
    known = Statistics(0.5, 2.0, -6.0, 7.0, zeros=100, nans=3, positive_infinities=2, negative_infinities=1)
    made = filled(torch.empty(50_000, dtype=torch.complex64), known)
    parts = torch.view_as_real(made)
    assert int((parts == 0).all(-1).sum()) == 100 and int(parts.isnan().any(-1).sum()) == 3
    assert int((parts == math.inf).any(-1).sum()) == 2 and int((parts == -math.inf).any(-1).sum()) == 1
    finite = parts[parts.isfinite()]
    assert float(finite.min()) == -6 and float(finite.max()) == 7
    assert float(finite.mean()) == pytest.approx(0.5, abs=0.05) and float(finite.std()) == pytest.approx(2, rel=0.05)


def test_exponents_alone_are_never_zero_or_nan() -> None:
    made = filled(torch.empty(1000, dtype=torch.float8_e8m0fnu), None).float()
    assert made.isfinite().all() and (made > 0).all()


def test_an_empty_content_is_left_alone() -> None:
    synthesize(torch.empty(0), 1)


GOOD = Statistics(0.0, 1.0, -2.0, 2.0, 1, 0, 0, 0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"zeros": 9}, "count 9 special elements of 8"),
        ({"mean": math.nan}, "do not describe"),
        ({"min": 3.0}, "do not describe"),
        ({"std": -1.0}, "do not describe"),
        ({"mean": 2.1}, "the mean"),
        ({"std": 2.1}, "no elements"),
        ({"max": 1e39}, "torch.float32 cannot have"),
        ({"min": 0.0, "max": 0.0}, "count fewer zeros"),
    ],
)
def test_statistics_that_contradict_themselves_are_found(wrong: dict[str, float], said: str) -> None:
    assert contradiction(Recipe(DType.float32, 8, 1, GOOD)) is None
    assert said in str(contradiction(Recipe(DType.float32, 8, 1, replace(GOOD, **wrong))))  # type: ignore[arg-type]
