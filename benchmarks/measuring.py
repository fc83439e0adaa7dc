"""How the benchmarks measure and what they print: rows of a ratio, its target, and the figures it was made of.

Only ratios taken in one run mean anything: everything a row compares is run in turns, in the same process where that is
possible, and a row is the median over the turns of the ratio within one turn. The figures behind it are in `details`.

Times are wall-clock times. On a machine that others use, OPREPLAY_BENCH_CLOCK=cpu counts this process's processor time
instead where the work is a computation of this process; the table says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def arguments(description: str | None) -> argparse.Namespace:
    """What every script takes. `--quick` shrinks the work until only the script itself is tried, not the speed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes: tries the script, measures nothing useful")
    return parser.parse_args()


def row(
    what: str,
    measured: float | None,
    unit: str = "×",
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    **details: Any,
) -> None:
    """Print one row. `measured` is None where it could not be measured; then `details` has a `reason`."""
    met = None
    if measured is not None and (at_most is not None or at_least is not None):
        met = (at_most is None or measured <= at_most) and (at_least is None or measured >= at_least)
    print(
        json.dumps(
            {
                "what": what,
                "measured": measured,
                "unit": unit,
                "at_most": at_most,
                "at_least": at_least,
                "met": met,
                "details": details,
            }
        ),
        flush=True,
    )


def in_turns(work: dict[str, Callable[[], float]], rounds: int, repeats: int = 1) -> dict[str, list[float]]:
    """Run `work`, whose functions return seconds, `rounds` times after one round that does not count.

    In a round each function has `repeats` turns; what counts is their mean. Short work needs many: a single turn after
    something else has been in the caches measures the caches.
    """
    taken: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        gc.collect()
        spent = dict.fromkeys(work, 0.0)
        for _ in range(repeats):
            for name, function in work.items():
                spent[name] += function()
        if number:
            for name, total in spent.items():
                taken[name].append(total / repeats)
    return taken


def median_of(function: Callable[..., float], *series: list[float]) -> float:
    """The median over the rounds of a figure made of one round's times."""
    return statistics.median(function(*values) for values in zip(*series, strict=True))


CLOCK = "cpu" if os.environ.get("OPREPLAY_BENCH_CLOCK") == "cpu" else "wall"
clock = time.process_time if CLOCK == "cpu" else time.perf_counter


def seconds(function: Callable[[], Any]) -> float:
    """How long one call takes, with the garbage collector off, as timeit has it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        begin = clock()
        function()
        return clock() - begin
    finally:
        if collecting:
            gc.enable()


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory for captures, removed afterwards. OPREPLAY_BENCH_DIR says where, otherwise the system's."""
    with tempfile.TemporaryDirectory(prefix="opreplay-bench-", dir=os.environ.get("OPREPLAY_BENCH_DIR")) as name:
        yield Path(name)


def resident_bytes(field: str = "VmRSS") -> int:
    """Memory of this process in bytes, from /proc: VmRSS is what it has now, VmHWM the most it had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def forget_peak() -> None:
    """Make VmHWM start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def progress(text: str) -> None:
    """Say on a terminal what is going on; rows alone go to stdout."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
