"""One process of capture_cost.py: prints, as JSON, what each way of watching a program adds to it.

`capture_turns.py PROGRAM TIMES ROUNDS WAY...`: PROGRAM is `forward` or `training_step`, run TIMES times a turn. WAY is
`native` or `python` (captures with that recorder), `peer`, or a library (redispatch.cpp, compiled): a hook that only
redispatches. The library has the dispatch key of the native recorder and takes its place.
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


def way(name: str, repeated: Callable[[], None], directory: Path) -> Callable[[], None]:
    """The program watched in that way, from start to close."""

    def capture() -> None:
        with replayfmt.capture(directory / "cost.opreplay", payload="none", force=True, recorder=name):
            repeated()

    def peer() -> None:
        observer = ExecutionTraceObserver()
        observer.register_callback(str(directory / "cost.json"))
        observer.start()
        repeated()
        observer.stop()
        observer.unregister_callback()

    def redispatched() -> None:
        library = ctypes.CDLL(name)
        library.redispatch_include(1)
        repeated()
        library.redispatch_include(0)

    return {"native": capture, "python": capture, "peer": peer}.get(name, redispatched)


def main() -> None:
    program, times, rounds, *ways = sys.argv[1:]
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
        work = {"eager": repeated, "floor": floor, **{Path(name).stem: way(name, repeated, directory) for name in ways}}
        taken = in_turns({name: lambda f=function: seconds(f) for name, function in work.items()}, int(rounds))
    eager = taken.pop("eager")
    per_op_us = 1e6 / (int(times) * operators)

    def added(name: str, base: str) -> float:
        return median_of(lambda e, w, b: (w - e) / (b - e), eager, taken[name], taken[base])

    print(
        json.dumps(
            {
                "operators": operators,
                "eager_us_an_op": median(eager) * per_op_us,
                "adds_us_an_op": {
                    name: median_of(lambda e, w: w - e, eager, taken[name]) * per_op_us for name in taken
                },
                "ratios": {
                    f"{name}/{base}": added(name, base) for base in ("floor", "peer") if base in taken for name in taken
                },
            }
        )
    )


if __name__ == "__main__":
    main()
