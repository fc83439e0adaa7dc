"""Isolated times of ops, summed over the capture, against the time of the whole replay, on compute-bound work.

A stack of wide linear layers with their backward pass: nearly all time is in matrix products of some milliseconds, so
that what isolation changes (warm caches, the call around each op) should not matter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from measuring import arguments, in_turns, median_of, row, scratch
from replay_cost import OpTimer

import replayfmt
from replayfmt.benchmark.per_op.measuring import OpOptions, PerOpRun, measure_ops
from replayfmt.benchmark.statistics import MinTime


def training(width: int, rows: int) -> Callable[[], None]:
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    given = torch.randn(rows, width)

    def step() -> None:
        model(given).sum().backward()
        model.zero_grad()

    return step


def main() -> None:
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    step = training(64 if quick else 1024, 32 if quick else 512)
    step()
    with scratch() as directory:
        path = directory / "work.opreplay"
        with replayfmt.capture(path, digests="none"):
            step()
        plan = replayfmt.Plan(path)
        one_by_one = replayfmt.Plan(path, keep_going=True)
        last: list[PerOpRun] = []

        def whole() -> float:
            timer = OpTimer()
            plan.execute(verify="none", timer=timer)
            return timer.seconds

        def isolated() -> float:
            options = OpOptions(MinTime(iterations=1 if quick else 11), verify="none")
            last[:] = [measure_ops(one_by_one, options, progress=lambda *_: None)]
            return last[0].estimated_ns / 1e9

        taken = in_turns({"whole": whole, "isolated": isolated}, 1 if quick else 5)
    ratio = median_of(lambda w, i: i / w, taken["whole"], taken["isolated"])
    largest = sorted(last[0].ops, key=lambda op: -(op.estimated_ns or 0))[:5]
    row(
        "per-op isolated times, summed: / whole replay",
        ratio,
        at_least=0.9,
        at_most=1.1,
        whole_s=taken["whole"],
        isolated_s=taken["isolated"],
        call_overhead_ns=last[0].overhead_ns,
        largest={op.group.signature: (op.estimated_ns or 0) / 1e9 for op in largest},
    )


if __name__ == "__main__":
    main()
