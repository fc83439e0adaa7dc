"""Capture cost: what recording metadata adds to a launch-bound model, against what interception alone adds.

The floor is a TorchDispatchMode that does nothing; the peer is PyTorch's own ExecutionTraceObserver, in C++. Each turn
runs the same forwards bare, under the floor, under a capture (payload=none) from start to close, and under the peer
from start to stop, so that encoding, compression and writing are in the figure. A capture with the recorder that is a
dispatch mode, where every call takes the complete path, shows what the native one saves.

Code that torch.compile made stays compiled; what a call of it pays for being watched is measured against the same call
without a capture.
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


def measure(name: str, run: Callable[[], None], times: int, rounds: int, directory: Path, at_most: float) -> None:
    run()
    operators = tiny_gpt2.operators(run)

    def repeated() -> None:
        for _ in range(times):
            run()

    def floor() -> None:
        with Nothing():
            repeated()

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

    taken = in_turns(
        {
            name: lambda f=function: seconds(f)
            for name, function in (
                ("eager", repeated),
                ("floor", floor),
                ("native", lambda: capture("native")),
                ("python", lambda: capture("python")),
                ("peer", peer),
            )
        },
        rounds,
    )
    eager, floored, native, peered = taken["eager"], taken["floor"], taken["native"], taken["peer"]
    added = {
        key: median_of(lambda e, x: (x - e) / (times * operators) * 1e6, eager, taken[key])
        for key in ("floor", "native", "python", "peer")
    }
    details = {
        "operators": operators,
        "times": times,
        "eager_us_an_op": median(eager) / (times * operators) * 1e6,
        **{f"{key}_adds_us_an_op": value for key, value in added.items()},
    }
    row(
        f"capture, metadata only, {name}: added time / no-op TorchDispatchMode's",
        median_of(lambda e, f, c: (c - e) / (f - e), eager, floored, native),
        at_most=at_most,
        **details,
    )
    row(
        f"capture, metadata only, {name}: added time / ExecutionTraceObserver's",
        median_of(lambda e, c, p: (c - e) / (p - e), eager, native, peered),
        at_most=0.08,
        **details,
    )
    row(
        f"capture, metadata only, {name}, in Python: added time / no-op TorchDispatchMode's",
        median_of(lambda e, f, c: (c - e) / (f - e), eager, floored, taken["python"]),
        **details,
    )


def measure_compiled(calls: int, rounds: int, directory: Path, backend: str) -> None:
    """One compiled call of 80 pointwise operators, which a capture leaves compiled (compiled=keep)."""

    def pointwise(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = torch.tanh(x * y + 1) - y
        return x

    compiled = torch.compile(pointwise, backend=backend)
    x, y = torch.randn(64, 64), torch.randn(64, 64)

    def repeated() -> None:
        with torch.no_grad():
            for _ in range(calls):
                compiled(x, y)

    def watched() -> float:
        options = {"payload": "none", "force": True, "recorder": "native", "compiled": "keep"}
        with replayfmt.capture(directory / "cost.opreplay", **options):
            torch.ones(1)  # a capture must hold an op
            compiled(x, y)
            return seconds(repeated)

    repeated()
    taken = in_turns(
        {"alone": lambda: seconds(repeated), "watched": watched, "again": lambda: seconds(repeated)}, rounds
    )
    row(
        "capture, a compiled call of 80 operators that stays compiled: time / without a capture",
        median_of(lambda alone, watched, again: 2 * watched / (alone + again), *taken.values()),
        at_most=1.02,
        alone_us=median(taken["alone"]) / calls * 1e6,
        watched_us=median(taken["watched"]) / calls * 1e6,
        # How far the call is from itself, in the same turns.
        noise=median_of(lambda alone, watched, again: abs(again / alone - 1), *taken.values()),
    )


def main() -> None:
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    with scratch() as directory:
        measure("forward", tiny_gpt2.forward(), 3 if quick else 400, 1 if quick else 9, directory, 0.35)
        measure("training step", tiny_gpt2.training_step(), 1 if quick else 60, 1 if quick else 5, directory, 0.5)
        measure_compiled(3 if quick else 3000, 1 if quick else 7, directory, "eager" if quick else "inductor")


if __name__ == "__main__":
    main()
