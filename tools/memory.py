"""`opreplay-benchmark --memory`: bytes alive by device, the peaks, and what the allocators report in a replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from replayfmt.errors import UsageError

# Flags of other measurements.
_NOT_WITH_MEMORY = (
    "per_op",
    "compare",
    "reconcile",
    "energy",
    "energy_windows",
    "device_profiling_mode",
    "device_profiling_output",
)


def memory_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --memory."""
    return click.option(
        "--memory",
        is_flag=True,
        help="Also report the capture's memory: bytes alive on each device over the records, the peak with the ops "
        "that made its storages, and what the devices' allocators report in one more replay. Storages from outside "
        "count from their first use.",
    )(function)


def check_memory(context: click.Context) -> None:
    """Raises UsageError for flags that do not go with --memory."""
    if not context.params["memory"]:
        return
    for name in _NOT_WITH_MEMORY:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise UsageError(f"--{name.replace('_', '-')} does not go with --memory")
    if context.params["benchmark_format"] == "csv":
        raise UsageError("--memory has no rows for --benchmark-format=csv; use console or json")
