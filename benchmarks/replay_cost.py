"""Replay cost on a launch-bound model: against the eager program, and against a bare loop over the same calls.

The time of a replay's ops is what it reports itself. The time of a whole execution is what a caller of `Plan.execute`
waits: with fresh state, the settings it runs in, and its report. The bare loop holds every operator with the arguments
the program gave it, calls them one after the other below autograd, and drops their results: nothing can be issued from
Python with less.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import tiny_gpt2
import torch
from measuring import arguments, clock, in_turns, median_of, row, scratch, seconds
from torch.utils._python_dispatch import TorchDispatchMode

import replayfmt


class Collecting(TorchDispatchMode):
    """Keeps every call that reaches the dispatcher, with its very arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func._op, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class OpTimer:
    """The time of the ops of one execution, in seconds of the benchmarks' clock."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        self._since = clock()

    def stop(self) -> None:
        now = clock()
        if self._since is not None:
            self.seconds += now - self._since
        self._since = None

    resume, pause = start, stop


def bare_loop(run: Callable[[], None]) -> Callable[[], None]:
    with Collecting() as collecting:
        run()

    def loop() -> None:
        with torch._C._AutoDispatchBelowAutograd():
            for function, positional, keywords in collecting.calls:
                function(*positional, **keywords)

    return loop


def measure(
    name: str, run: Callable[[], None], times: int, repeats: int, rounds: int, directory: Path, targets: bool
) -> None:
    """`run` is captured `times` times in a row."""
    run()

    def repeated() -> None:
        for _ in range(times):
            run()

    path = directory / "replay.opreplay"
    with replayfmt.capture(path, digests="none", force=True):
        repeated()
    plan = replayfmt.Plan(replayfmt.open(path))
    bare = bare_loop(repeated)
    operators = tiny_gpt2.operators(repeated)

    def replay() -> float:
        """The time of the ops alone, without giving fresh state, which happens before."""
        timer = OpTimer()
        plan.execute(verify="none", timer=timer)
        return timer.seconds

    taken = in_turns(
        {
            "eager": lambda: seconds(repeated),
            "bare": lambda: seconds(bare),
            "replay": replay,
            "execute": lambda: seconds(plan.execute),
        },
        rounds,
        repeats,
    )
    details = {
        "operators": operators,
        **{f"{key}_us_an_op": median(value) / operators * 1e6 for key, value in taken.items()},
    }
    row(
        f"replay, {name}: time / eager",
        median_of(lambda e, r: r / e, taken["eager"], taken["replay"]),
        at_most=0.65 if targets else None,
        **details,
    )
    row(
        f"replay, {name}: time / bare loop over the same calls",
        median_of(lambda b, r: r / b, taken["bare"], taken["replay"]),
        at_most=1.05 if targets else None,
        **details,
    )
    row(
        f"replay, {name}, a whole execution from fresh state: time / eager",
        median_of(lambda e, x: x / e, taken["eager"], taken["execute"]),
        at_most=0.75 if targets else None,
        **details,
    )


def main() -> None:
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    with scratch() as directory:
        rounds = 1 if quick else 11
        measure("one forward", tiny_gpt2.forward(), 1, 1 if quick else 50, rounds, directory, targets=True)
        measure("100 forwards", tiny_gpt2.forward(), 2 if quick else 100, 1, rounds, directory, targets=True)
        measure("training step", tiny_gpt2.training_step(), 1, 1 if quick else 10, rounds, directory, targets=False)


if __name__ == "__main__":
    main()
