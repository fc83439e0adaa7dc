"""Growth: what four times as many tensors cost, against four times the cost of a quarter of them.

1 is what costs that grow with the work give; 4 is what costs give that grow with its square. Each row is one thing that
a program, or a trace of one, has many of: arrays that it wraps, elements of a list that an operator takes, operators.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import arguments, in_turns, median_of, progress, row, scratch, seconds

import replayfmt
from replayfmt.importers.importing import import_trace


def arrays(path: Path, count: int) -> float:
    """Seconds to capture a program that keeps `count` NumPy arrays as tensors and reads each."""
    kept = [torch.from_numpy(np.full(2, i, np.float32)) for i in range(count)]

    def program() -> None:
        with replayfmt.capture(path, force=True):
            for tensor in kept:
                tensor + 1

    return seconds(program)


def views(path: Path, count: int) -> float:
    """Seconds to capture a program that writes to `count` views of one storage."""
    whole = torch.zeros(count + 8)

    def program() -> None:
        with replayfmt.capture(path, force=True):
            for begin in range(count):
                whole[begin : begin + 1 + begin % 7].add_(1)

    return seconds(program)


def results(path: Path, count: int) -> float:
    """Seconds to capture a program that keeps `count` results, and wraps arrays meanwhile."""

    def program() -> None:
        kept, one = [], torch.ones(1)
        with replayfmt.capture(path, force=True, digests="none"):
            for number in range(count):
                kept.append(one + number)
                if number % 8 == 0:
                    torch.from_numpy(np.full(2, number, np.float32)) + 1

    return seconds(program)


def listed(path: Path, count: int, payload: str, work: Callable[[replayfmt.Plan], object]) -> float:
    """Seconds to plan and run a capture of operators that take `count` tensors in a list, and give a list."""
    tensors = [torch.full((2,), float(i)) for i in range(count)]
    with replayfmt.capture(path, force=True, payload=payload):
        kept = torch.stack(torch._foreach_add(tensors, 1.0))
    del kept
    begin = time.perf_counter()
    with replayfmt.open(path) as capture:
        work(replayfmt.Plan(capture))
    return time.perf_counter() - begin


def imported(path: Path, count: int) -> float:
    """Seconds to import a profiler trace of `count` operators, each of other sizes, with a kernel each."""
    events: list[dict[str, Any]] = []
    for i in range(count):
        sizes = [[4, 5 + i % 100, 1 + i // 100]] * 2
        said = {"Input Dims": sizes, "Input type": ["float"] * 2, "Input Strides": [[], []], "correlation": i + 1}
        for category, start in (("cpu_op", 0), ("cuda_runtime", 1), ("kernel", 3)):
            event = {"ph": "X", "cat": category, "name": "aten::mul", "pid": 1, "tid": 1, "ts": 10 * i + start}
            events.append(event | {"dur": 5, "args": said if category == "cpu_op" else {"correlation": i + 1}})
    trace = path.with_suffix(".json")
    trace.write_text(json.dumps({"traceEvents": events}))
    return seconds(lambda: import_trace(trace, path, force=True))


def main() -> None:
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    small = 50 if quick else 2500
    rows: dict[str, Callable[[Path, int], float]] = {
        "capture, NumPy arrays that stay alive": arrays,
        "capture, views of one storage": lambda path, count: views(path, 4 * count),
        "capture, results that stay alive beside NumPy arrays": lambda path, count: results(path, 4 * count),
        "verified replay, tensors in a list": lambda path, count: listed(
            path, count, "full", lambda plan: plan.execute(verify="bitwise")
        ),
        "replay, storages without content in a list": lambda path, count: listed(
            path, count, "none", lambda plan: plan.execute()
        ),
    }
    rows["import, operators of a profiler trace"] = lambda path, count: imported(path, 2 * count)
    with scratch() as directory:
        path = directory / "growth.opreplay"
        for what, work in rows.items():
            progress(what)
            turns = {"few": partial(work, path, small), "many": partial(work, path, 4 * small)}
            taken = in_turns(turns, rounds=1 if quick else 5)
            row(
                f"growth, {what}: time of 4 × as many / 4 × the time",
                median_of(lambda few, many: many / few / 4, taken["few"], taken["many"]),
                at_most=1.5,
                seconds_few=taken["few"],
                seconds_many=taken["many"],
                few=small,
            )


if __name__ == "__main__":
    main()
