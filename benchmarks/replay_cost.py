"""Replay cost on a launch-bound model: against the eager program, and against a bare loop over the same calls.

The bare loop holds every operator with the arguments the program gave it, calls them one after the other below
autograd, and drops their results: nothing can be issued from Python with less.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import tiny_gpt2
import torch
from measuring import arguments, in_turns, median_of, row, scratch, seconds
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


def bare_loop(run: Callable[[], None]) -> Callable[[], None]:
    with Collecting() as collecting:
        run()
    with_keywords = [(f, a, k) for f, a, k in collecting.calls]

    def loop() -> None:
        with torch._C._AutoDispatchBelowAutograd():
            for function, positional, keywords in with_keywords:
                function(*positional, **keywords)

    return loop


def measure(name: str, run: Callable[[], None], times: int, rounds: int, directory: Path, targets: bool) -> None:
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
        result = plan.execute(verify="none")
        return result.elapsed_ns * 1e-9  # without giving fresh state, which happens before

    taken = in_turns({"eager": lambda: seconds(repeated), "bare": lambda: seconds(bare), "replay": replay}, rounds)
    details = {"operators": operators, **{f"{key}_us_an_op": median(value) / operators * 1e6
                                          for key, value in taken.items()}}
    row(f"replay, {name}: time / eager", median_of(lambda e, r: r / e, taken["eager"], taken["replay"]),
        at_most=0.65 if targets else None, **details)
    row(f"replay, {name}: time / bare loop over the same calls",
        median_of(lambda b, r: r / b, taken["bare"], taken["replay"]), at_most=1.05 if targets else None, **details)


def main() -> None:
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    with scratch() as directory:
        measure("one forward", tiny_gpt2.forward(), 1, 2 if quick else 101, directory, targets=True)
        measure("100 forwards", tiny_gpt2.forward(), 2 if quick else 100, 1 if quick else 9, directory, targets=True)
        measure("training step", tiny_gpt2.training_step(), 1, 1 if quick else 31, directory, targets=False)


if __name__ == "__main__":
    main()
