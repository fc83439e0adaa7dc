"""--benchmark-precision, --benchmark-max-time and --inputs: how precisely to measure, and with what in the caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def precision_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags, as parameters benchmark_precision, benchmark_max_time and inputs."""
    for option in (
        click.option(
            "--inputs",
            type=click.Choice(["hot", "cold"]),
            help="hot: the same buffers each time. cold: the caches are flushed before each replay, or with --per-op "
            "each call, by rewriting a buffer larger than the last-level cache. Default: hot; with --per-op on "
            "accelerators, cold.",
        ),
        click.option(
            "--benchmark-max-time",
            metavar="SECONDSs",
            help="Stop after that many seconds even if the median is not known to --benchmark-precision; a warning "
            "says so. Default: 10 times --benchmark-min-time, with --per-op twice that (5s and 0.1s if that is a "
            "number of replays).",
        ),
        click.option(
            "--benchmark-precision",
            metavar="PERCENT|off",
            help="Measure until the 95% confidence interval of the median is at most that far from it on either "
            "side, for each row. Default: 2%; off if --benchmark-min-time is a number of replays.",
        ),
    ):
        function = option(function)
    return function
