"""Capture cost: what recording metadata adds to a launch-bound model, against what interception alone adds.

The floor is a TorchDispatchMode that does nothing; the peer is PyTorch's own ExecutionTraceObserver, in C++. Each turn
runs the same forwards bare, under the floor, under a capture (payload=none) from start to close, and under the peer
from start to stop, so that encoding, compression and writing are in the figure. A capture with the recorder that is a
dispatch mode, where every call takes the complete path, shows what the native one saves.

The figures differ from process to process by a tenth and more, and with what else the machine does: what is added is a
difference of two times that each change by as much. So many short turns are taken in several processes
(capture_turns.py), the observer's and the complete path's, which take long, in others and fewer; a row is the median of
the processes, and its details have each.

Code that torch.compile made stays compiled; what a call of it pays for being watched is measured against the same call
without a capture.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from measuring import arguments, in_turns, median_of, row, scratch, seconds

import replayfmt
from replayfmt.native.building import NotAvailable, compile_library

HERE = Path(__file__).parent


def processes(count: int, *arguments: object) -> list[dict[str, Any]]:
    """What `capture_turns.py` says in each of several processes, one after the other."""
    command = [sys.executable, str(HERE / "capture_turns.py"), *map(str, arguments)]
    return [
        json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
        for _ in range(count)
    ]


def measure(name: str, program: str, times: int, turns: tuple[int, int], at_most: float) -> None:
    """`turns`: how many processes, and rounds in each; of the ways that take long a third of the rounds."""
    count, rounds = turns
    short = processes(count, program, times, rounds, "native")
    long = processes(count, program, times, max(1, rounds // 3), "native", "python", "peer")
    for what, found, ratio, target in (
        (": added time / no-op TorchDispatchMode's", short, "native/floor", at_most),
        (": added time / ExecutionTraceObserver's", long, "native/peer", 0.08),
        (", in Python: added time / no-op TorchDispatchMode's", long, "python/floor", None),
    ):
        ratios = sorted(each["ratios"][ratio] for each in found)
        row(
            f"capture, metadata only, {name}{what}",
            median(ratios),
            at_most=target,
            of_each_process=ratios,
            operators=found[0]["operators"],
            times=times,
            eager_us_an_op=median(each["eager_us_an_op"] for each in found),
            **{
                f"{way}_adds_us_an_op": median(each["adds_us_an_op"][way] for each in found)
                for way in found[0]["adds_us_an_op"]
            },
        )


def measure_redispatch(times: int, turns: tuple[int, int], directory: Path) -> None:
    """What a hook beneath autograd costs that records nothing: no capture from there can cost less."""
    library = directory / "redispatch.so"
    what = "a hook that only redispatches, forward: added time / no-op TorchDispatchMode's"
    try:
        compile_library(HERE / "redispatch.cpp", library, "-DNDEBUG")
    except NotAvailable as problem:
        row(what, None, reason=problem.reason)
        return
    count, rounds = turns
    found = processes(count, "forward", times, rounds, library)
    ratios = sorted(each["ratios"]["redispatch/floor"] for each in found)
    row(what, median(ratios), of_each_process=ratios)


def measure_compiled(calls: int, rounds: int, directory: Path, backend: str) -> None:
    """One compiled call of 80 pointwise operators, which a capture leaves compiled (compiled=keep)."""

    def pointwise(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = torch.tanh(x * y + 1) - y
        return x

    compiled = torch.compile(pointwise, backend=backend)
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    random = Random(0)

    def repeated() -> None:
        # Where its memory lies changes the time of the call by 4%. So it lies elsewhere every few calls.
        with torch.no_grad():
            for first in range(0, calls, 30):
                held = bytearray(random.randrange(1 << 16))
                elsewhere = x.clone(), y.clone()
                for _ in range(first, min(first + 30, calls)):
                    compiled(*elsewhere)
                del held

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


def measure_threads(adds: int, rounds: int, directory: Path) -> None:
    """The same chain of small operators in one thread, and in two that take turns (as a forward and a backward pass
    do), with the metadata of each recorded."""
    x = torch.ones(4)

    def chain() -> None:
        y = x
        for _ in range(adds):
            y = y + 1

    def recorded(threads: int) -> float:
        options = {"payload": "none", "force": True, "recorder": "native"}
        with ThreadPoolExecutor(1) as pool, replayfmt.capture(directory / "cost.opreplay", **options):
            chains = [chain, lambda: pool.submit(chain).result()][:threads]

            def turns() -> None:
                for each in chains:
                    each()

            turns()  # what is new
            return seconds(turns) / threads

    taken = in_turns({"alone": lambda: seconds(chain), "one": lambda: recorded(1), "two": lambda: recorded(2)}, rounds)
    row(
        "capture, metadata only, an operator with two recording threads: time / with one",
        median_of(lambda alone, one, two: two / one, *taken.values()),
        at_most=1.5,
        eager_us_an_op=median(taken["alone"]) / adds * 1e6,
        one_us_an_op=median(taken["one"]) / adds * 1e6,
        two_us_an_op=median(taken["two"]) / adds * 1e6,
    )


def main() -> None:
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    with scratch() as directory:
        measure("forward", "forward", 3 if quick else 400, (1, 1) if quick else (5, 9), 0.35)
        measure("training step", "training_step", 1 if quick else 60, (1, 1) if quick else (3, 9), 0.5)
        if not quick:  # a compilation, which would be all of it
            measure_redispatch(400, (3, 9), directory)
        measure_threads(50 if quick else 20_000, 1 if quick else 7, directory)
        measure_compiled(3 if quick else 3000, 1 if quick else 7, directory, "eager" if quick else "inductor")


if __name__ == "__main__":
    main()
