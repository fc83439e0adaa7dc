"""One process of capture_cost.py: prints, as JSON, what each way of watching a program adds to it.

`capture_turns.py PROGRAM TIMES ROUNDS [LIBRARY]`: PROGRAM is `forward` or `training_step`, run TIMES times a turn. With
LIBRARY (redispatch.cpp, compiled), a hook that only redispatches takes the recorder's place: it has its dispatch key.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import tiny_gpt2
import torch
from measuring import in_turns, median_of, scratch, seconds
from torch.profiler import ExecutionTraceObserver
from torch.utils._python_dispatch import TorchDispatchMode

import replayfmt


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def watched(repeated: Callable[[], None], directory: Path) -> dict[str, Callable[[], None]]:
    """The program under captures, from start to close, and under PyTorch's observer."""

    def capture(recorder: str) -> None:
        with replayfmt.capture(directory / "cost.opreplay", payload="none", force=True, recorder=recorder):
            repeated()

    def peer() -> None:
        observer = ExecutionTraceObserver()
        observer.register_callback(str(directory / "cost.json"))
        observer.start()
        repeated()
        observer.stop()
        observer.unregister_callback()

    return {"native": lambda: capture("native"), "python": lambda: capture("python"), "peer": peer}


def redispatched(repeated: Callable[[], None], library: str) -> dict[str, Callable[[], None]]:
    loaded = ctypes.CDLL(library)

    def run() -> None:
        loaded.redispatch_include(1)
        repeated()
        loaded.redispatch_include(0)

    return {"redispatch": run}


def main() -> None:
    program, times, rounds, *library = sys.argv[1:]
    torch.set_num_threads(1)
    run = getattr(tiny_gpt2, program)()
    run()
    operators = tiny_gpt2.operators(run)

    def repeated() -> None:
        for _ in range(int(times)):
            run()

    def floor() -> None:
        with Nothing():
            repeated()

    with scratch() as directory:
        ways = redispatched(repeated, *library) if library else watched(repeated, directory)
        work = {"eager": repeated, "floor": floor, **ways}
        taken = in_turns({name: lambda f=function: seconds(f) for name, function in work.items()}, int(rounds))
    eager = taken.pop("eager")
    per_op_us = 1e6 / (int(times) * operators)

    def added(way: str, base: str) -> float:
        return median_of(lambda e, w, b: (w - e) / (b - e), eager, taken[way], taken[base])

    print(
        json.dumps(
            {
                "operators": operators,
                "eager_us_an_op": median(eager) * per_op_us,
                "adds_us_an_op": {way: median_of(lambda e, w: w - e, eager, taken[way]) * per_op_us for way in taken},
                "ratios": {
                    f"{way}/{base}": added(way, base) for base in ("floor", "peer") if base in taken for way in taken
                },
            }
        )
    )


if __name__ == "__main__":
    main()
