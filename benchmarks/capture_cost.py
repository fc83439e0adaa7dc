"""Capture cost: what recording metadata adds to a launch-bound model, against what interception alone adds.

The floor is a TorchDispatchMode that does nothing; the peer is PyTorch's own ExecutionTraceObserver, in C++. Each turn
runs the same forwards bare, under the floor, under a capture (payload=none) from start to close, and under the peer
from start to stop, so that encoding, compression and writing are in the figure. A capture that watches no threads
(native=off) shows what the watch adds, and one with the recorder that is a dispatch mode what the native one saves.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import tiny_gpt2
import torch
from measuring import arguments, in_turns, median_of, row, scratch, seconds
from torch.profiler import ExecutionTraceObserver
from torch.utils._python_dispatch import TorchDispatchMode

import replayfmt


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def measure(
    name: str, run: Callable[[], None], times: int, rounds: int, directory: Path, native_target: float, targets: bool
) -> None:
    run()
    operators = tiny_gpt2.operators(run)

    def repeated() -> None:
        for _ in range(times):
            run()

    def floor() -> None:
        with Nothing():
            repeated()

    def capture(recorder: str, native: str = "auto") -> None:
        path = directory / "cost.opreplay"
        with replayfmt.capture(path, payload="none", force=True, native=native, recorder=recorder):
            repeated()

    def peer() -> None:
        observer = ExecutionTraceObserver()
        observer.register_callback(str(directory / "cost.json"))
        observer.start()
        repeated()
        observer.stop()
        observer.unregister_callback()

    taken = in_turns(
        {
            name: lambda f=function: seconds(f)
            for name, function in (
                ("eager", repeated),
                ("floor", floor),
                ("native", lambda: capture("native")),
                ("capture", lambda: capture("python")),
                ("unwatched", lambda: capture("python", "off")),
                ("peer", peer),
            )
        },
        rounds,
    )
    eager, floored, captured, peered = taken["eager"], taken["floor"], taken["capture"], taken["peer"]
    added = {
        key: median_of(lambda e, x: (x - e) / (times * operators) * 1e6, eager, taken[key])
        for key in ("floor", "native", "capture", "unwatched", "peer")
    }
    details = {
        "operators": operators,
        "times": times,
        "eager_us_an_op": median(eager) / (times * operators) * 1e6,
        **{f"{key}_adds_us_an_op": value for key, value in added.items()},
    }
    row(
        f"capture, metadata only, {name}, native recorder: added time / no-op TorchDispatchMode's",
        median_of(lambda e, f, c: (c - e) / (f - e), eager, floored, taken["native"]),
        at_most=native_target,
        **details,
    )
    row(
        f"capture, metadata only, {name}, native recorder: added time / ExecutionTraceObserver's",
        median_of(lambda e, c, p: (c - e) / (p - e), eager, taken["native"], peered),
        at_most=0.08,
        **details,
    )
    row(
        f"capture, metadata only, {name}: added time / no-op TorchDispatchMode's",
        median_of(lambda e, f, c: (c - e) / (f - e), eager, floored, captured),
        at_most=1.5 if targets else None,
        **details,
    )
    row(
        f"capture, metadata only, {name}: added time / ExecutionTraceObserver's",
        median_of(lambda e, c, p: (c - e) / (p - e), eager, captured, peered),
        at_most=0.3 if targets else None,
        **details,
    )
    row(
        f"capture, metadata only, {name}: added time / without the watch on threads",
        median_of(lambda e, c, u: (c - e) / (u - e), eager, captured, taken["unwatched"]),
        **details,
    )


def main() -> None:
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    with scratch() as directory:
        measure("forward", tiny_gpt2.forward(), 3 if quick else 400, 1 if quick else 9, directory, 0.35, True)
        measure(
            "training step", tiny_gpt2.training_step(), 1 if quick else 60, 1 if quick else 5, directory, 0.5, False
        )


if __name__ == "__main__":
    main()
