"""Compiled code: what recording its kernels adds, and what their replay takes.

A tiny GPT-2, compiled by Inductor for the CPU: what a capture adds to each of its kernels, allocations and library
calls, against what the same capture adds to an operator of the eager model, in turns. A replay of a compiled step is
compared with the step itself, and the replay of a generated C++ kernel's calls with a loop over the function that
Inductor's generated code calls.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import FunctionType
from typing import Any

import tiny_gpt2
import torch
from measuring import arguments, in_turns, median_of, row, scratch, seconds
from replay_cost import OpTimer

import replayfmt
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture


def kernels_of(path: Path) -> int:
    with open_capture(path) as reader:
        assert not reader.summary.unsupported, reader.summary.unsupported
        return reader.summary.records[RecordKind.op]


def replaying(path: Path) -> Callable[[], float]:
    """The time of one replay's ops."""
    plan = replayfmt.Plan(replayfmt.open(path), allow_code=True)

    def replay() -> float:
        timer = OpTimer()
        plan.execute(verify="none", timer=timer)
        return timer.seconds

    return replay


def measure_step(times: int, rounds: int, directory: Path) -> None:
    network, tokens = tiny_gpt2.model(), torch.randint(256, (1, 16))
    compiled = torch.compile(network)

    def step(model: Any) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                model(input_ids=tokens, use_cache=False)

        return run

    runs = {"eager": step(network), "compiled": step(compiled)}
    path = directory / "compiled.opreplay"
    counts = {}
    for name, run in runs.items():
        run()
        with replayfmt.capture(path, payload="none", force=True, compiled="kernels", recorder="native"):
            run()
        counts[name] = kernels_of(path)

    def repeated(run: Callable[[], None]) -> Callable[[], None]:
        return lambda: [run() for _ in range(times)] and None

    def captured(run: Callable[[], None]) -> Callable[[], float]:
        def recorded() -> float:
            with replayfmt.capture(path, payload="none", force=True, compiled="kernels", recorder="native"):
                run()  # what is new is recorded once
                run()
                return seconds(repeated(run))

        return recorded

    work: dict[str, Callable[[], float]] = {}
    for name, run in runs.items():
        work[name] = lambda run=run: seconds(repeated(run))
        work[f"{name}, captured"] = captured(run)
    taken = in_turns(work, rounds)
    added = {
        name: [(c - a) / times / counts[name] for a, c in zip(taken[name], taken[f"{name}, captured"], strict=True)]
        for name in runs
    }
    row(
        "capture of a compiled GPT-2 step: added for each kernel / for an operator of the eager one",
        median(added["compiled"]) / median(added["eager"]),
        at_most=2.0,
        kernels=counts["compiled"],
        operators=counts["eager"],
        **{f"{name}_adds_us": median(each) * 1e6 for name, each in added.items()},
    )
    with replayfmt.capture(path, digests="none", force=True, compiled="kernels"):
        runs["compiled"]()
    replay = replaying(path)
    taken = in_turns({"compiled": lambda: seconds(runs["compiled"]), "replay": replay}, rounds, 1 if times < 10 else 50)
    row(
        "replay of a compiled GPT-2 step: time / the compiled step's own",
        median_of(lambda program, replayed: replayed / program, taken["compiled"], taken["replay"]),
        at_most=1.0,
        **{f"{name}_us": median(each) * 1e6 for name, each in taken.items()},
    )


def generated_kernel() -> tuple[Callable[[], Any], Callable[..., Any], torch.Tensor]:
    """A compiled function that calls one C++ kernel and allocates nothing, and the call of that kernel in its generated
    code, with the tensor that it is given. No other region may have been compiled before."""
    compiled, x = torch.compile(lambda x: x.mul_(0.5).add_(1)), torch.randn(64)
    compiled(x)
    functions = [each for each in gc.get_objects() if type(each) is FunctionType]
    modules = [each.__globals__ for each in functions if each.__qualname__ == "Runner.call"]
    found = [value for module in modules for name, value in module.items() if name.startswith("cpp_fused")]
    kernel = found[0]
    return lambda: compiled(x), kernel, x


def measure_kernel(calls: int, rounds: int, directory: Path) -> None:
    run, kernel, x = generated_kernel()
    path = directory / "kernel.opreplay"
    with replayfmt.capture(path, digests="none", force=True, compiled="kernels"):
        for _ in range(calls):
            run()
    assert kernels_of(path) == calls

    def launched() -> None:
        for _ in range(calls):
            kernel(x, x)

    taken = in_turns({"launcher": lambda: seconds(launched), "replay": replaying(path)}, rounds)
    row(
        "replay of a generated C++ kernel's call: time / its own launcher's",
        median_of(lambda launcher, replayed: replayed / launcher, taken["launcher"], taken["replay"]),
        at_most=1.2,
        **{f"{name}_us_a_call": median(each) / calls * 1e6 for name, each in taken.items()},
    )


def main() -> None:
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    with scratch() as directory:
        measure_kernel(3 if quick else 5000, 1 if quick else 9, directory)
        measure_step(2 if quick else 100, 1 if quick else 9, directory)


if __name__ == "__main__":
    main()
