"""--benchmark-min-time takes Google Benchmark's forms and nothing else."""

import pytest

from replayfmt.benchmark.statistics import MinTime, parse_min_time
from replayfmt.errors import UsageError


@pytest.mark.parametrize(
    "text, expected",
    [
        ("20x", MinTime(iterations=20)),
        ("1x", MinTime(iterations=1)),
        ("+3x", MinTime(iterations=3)),
        ("1000000000x", MinTime(iterations=1_000_000_000)),
        ("0" * 5000 + "7x", MinTime(iterations=7)),
        ("0.5s", MinTime(seconds=0.5)),
        ("30s", MinTime(seconds=30)),
        (".25s", MinTime(seconds=0.25)),
        ("1e-3s", MinTime(seconds=0.001)),
        ("2", MinTime(seconds=2)),
    ],
)
def test_iterations_and_seconds_are_read(text, expected):
    assert parse_min_time(text) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "s",
        "abc",
        "1z",
        "123ms",
        "1hs",
        "1.5x",
        "2xx",
        "2ss",
        "0x",
        "-1x",
        "0s",
        "-0.5s",
        "nan",
        "nans",
        "infs",
        "1e999s",
        "86401s",
        "1e9",
        "1000000001x",
        "20 x",
        "0x10",
        "\u0663x",
        "\u0663s",
        "9" * 5000 + "x",
    ],
)
def test_everything_else_is_a_usage_error_that_shows_both_forms(text):
    with pytest.raises(UsageError, match="20x or 0.5s") as raised:
        parse_min_time(text)
    assert raised.value.exit_code == 2 and f"={text}:" in str(raised.value)


def test_it_prints_as_it_is_written():
    assert [str(parse_min_time(text)) for text in ("20x", "0.5s", "2")] == ["20x", "0.5s", "2s"]
