"""The arithmetic over measured times, against values worked out by hand and by simulation."""

import math

import numpy as np
import pytest

from replayfmt.benchmark.statistics import CONFIDENCE, Outliers, median_interval, other_runs_interval, summarize


def test_an_even_sample_has_the_mean_of_the_middle_two_as_its_median():
    found = summarize([4.0, 1.0, 3.0, 2.0])
    assert (found.count, found.median, found.mean, found.minimum, found.maximum) == (4, 2.5, 2.5, 1.0, 4.0)
    assert found.standard_deviation == pytest.approx(math.sqrt(5 / 3))  # of the sample: n - 1
    assert found.variation == pytest.approx(math.sqrt(5 / 3) / 2.5)


def test_one_time_has_no_spread_and_says_so():
    found = summarize([7.0])
    assert (found.median, found.mean, found.minimum, found.maximum) == (7.0, 7.0, 7.0, 7.0)
    assert found.standard_deviation is None and found.variation is None and found.interval is None
    assert (
        set(found.reasons) == {"standard_deviation", "interval", "quartiles"}
        and "6 are needed" in found.reasons["interval"]
    )


def test_an_empty_sample_is_refused():
    with pytest.raises(ValueError):
        summarize([])


def test_outliers_lie_outside_tukeys_fences_and_are_counted_in_every_figure():
    found = summarize([*range(1, 9), 100.0, -50.0])
    first, third = np.percentile([*range(1, 9), 100.0, -50.0], (25, 75))
    assert found.quartiles == (first, third)
    assert (found.outliers.low, found.outliers.high) == (1, 1)
    assert (found.minimum, found.maximum, found.count) == (-50, 100, 10)
    assert summarize([1.0, 2, 3, 4]).outliers == Outliers(0, 0)
    few = summarize([1.0, 2, 3])
    assert few.quartiles is None and few.outliers is None and "4 are needed" in few.reasons["quartiles"]


def test_the_width_of_the_interval_is_a_share_of_the_median():
    assert summarize([90.0, 95, 100, 100, 105, 110]).half_width == pytest.approx(0.1)
    assert summarize([100.0] * 5).half_width is None and summarize([0.0] * 6).half_width is None


def test_times_of_zero_have_no_coefficient_of_variation():
    assert summarize([0.0, 0.0]).variation is None


def test_five_times_are_too_few_for_an_interval_and_six_are_enough():
    assert median_interval(np.arange(5.0)) is None
    interval = median_interval(np.array([6.0, 1, 5, 2, 4, 3]))
    assert (interval.low, interval.high, interval.confidence) == (1.0, 6.0, 1 - 2 / 64)


@pytest.mark.parametrize("count, rank", [(8, 1), (9, 2), (20, 6), (31, 10), (71, 27), (100, 40)])
def test_the_interval_lies_between_the_ranks_that_the_binomial_distribution_gives(count, rank):
    """Ranks as in published tables of confidence intervals for the median (95%), and their confidence counted out."""
    interval = median_interval(np.random.default_rng(1).permutation(np.arange(1.0, count + 1)))
    assert (interval.low, interval.high) == (rank, count + 1 - rank)
    tail = sum(math.comb(count, below) for below in range(rank)) / 2**count
    assert interval.confidence == pytest.approx(1 - 2 * tail) and interval.confidence >= CONFIDENCE


@pytest.mark.slow
def test_the_approximation_for_large_samples_is_no_narrower_than_the_exact_interval():
    for count in (1001, 2000, 5001):
        interval = median_interval(np.random.default_rng(1).permutation(np.arange(1.0, count + 1)))
        rank = int(interval.low)
        tail = sum(math.comb(count, below) for below in range(rank)) / 2**count
        assert 1 - 2 * tail >= CONFIDENCE
        assert interval.confidence == pytest.approx(1 - 2 * tail, abs=1e-3)


def test_the_interval_encloses_the_true_median_as_often_as_it_says():
    random = np.random.default_rng(7)
    samples = random.exponential(size=(2000, 15))  # as skewed as times are
    held = sum(interval.low <= math.log(2) <= interval.high for interval in map(median_interval, samples))
    assert held / len(samples) > 0.95


def following(random, count, memory):
    """Times of which each remembers the one before: autoregressive, with the median 1."""
    shocks, last, found = random.normal(size=count), random.normal() / math.sqrt(1 - memory**2), []
    for shock in shocks:
        last = memory * last + shock
        found.append(math.exp(0.1 * last))
    return np.array(found)


def in_modes(random, count, changes):
    """Times of two speeds that last, half of the time each, with the median 1.5."""
    speed = (np.cumsum(random.random(count) < changes) + random.integers(2)) % 2
    return 1 + speed + random.normal(size=count) * 0.3


@pytest.mark.parametrize(
    ("draw", "median", "tells_at_most"),
    [
        (lambda random: following(random, 1000, 0.9), 1.0, 300),
        (lambda random: following(random, 250, 0.5), 1.0, 220),
        (lambda random: in_modes(random, 1000, 0.05), 1.5, 400),
    ],
)
def test_times_that_depend_on_each_other_have_an_interval_that_allows_for_it(draw, median, tells_at_most):
    random = np.random.default_rng(5)
    intervals = [median_interval(draw(random)) for _ in range(200)]
    held = sum(interval.low <= median <= interval.high for interval in intervals)
    assert held / len(intervals) > 0.88  # as independent ones, half of these intervals and more miss it
    assert np.median([interval.independent for interval in intervals]) < tells_at_most


def test_drift_leaves_an_interval_of_all_that_was_passed_through():
    random = np.random.default_rng(9)
    interval = median_interval(np.linspace(1, 2, 500) + random.normal(size=500) * 0.02)
    assert interval.independent < 10 and interval.low < 1.25 and interval.high > 1.75


@pytest.mark.parametrize("count", [30, 250, 1000])
def test_independent_times_are_seldom_taken_for_others(count):
    random = np.random.default_rng(2)
    intervals = [median_interval(random.lognormal(0, 0.3, count)) for _ in range(500)]
    assert sum(interval.independent < count for interval in intervals) <= 0.02 * len(intervals)
    assert sum(interval.low <= 1 <= interval.high for interval in intervals) > 0.94 * len(intervals)
    steps = np.round(random.lognormal(0, 0.3, count), 1)  # of a coarse clock
    assert median_interval(steps).independent == count


def test_times_that_alternate_or_do_not_change_are_independent():
    for times in ([1.0, 2.0] * 50, [1.0] * 100, [*range(1, 11)]):
        assert median_interval(np.array(times)).independent == len(times)


@pytest.mark.slow
@pytest.mark.parametrize("count", [6, 7, 10, 25])
def test_the_interval_of_several_processes_holds_the_median_of_another_run_of_them(count):
    random = np.random.default_rng(4)
    runs = random.lognormal(0, 0.1, (4000, count))
    held = sum(
        found.low <= np.median(other) <= found.high
        for found, other in zip(map(other_runs_interval, runs[::2]), runs[1::2], strict=True)
    )
    assert 0.92 < held / 2000 < 0.99
    assert other_runs_interval(runs[0, :5]) is None
