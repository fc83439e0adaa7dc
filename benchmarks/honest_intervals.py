"""How often the intervals and verdicts of `opreplay-benchmark` hold: pairs of runs, each run a process of its own.

Two runs of the same capture should have the same median, so a run's 95% interval should hold the other run's median,
and no row should be called faster or slower. In a third run one kernel takes 10% longer, which should be found. The
runs take turns, so that the two of a pair follow each other. All of it is measured on a quiet machine and, but for the
slower kernel, beside a process that loads all processors.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from measuring import progress, row, scratch

import replayfmt
from replayfmt.benchmark.baseline import Document, compare_with_baseline, figure_of, read_baseline

SLOWER = "HONEST_INTERVALS_SLOWER"  # in the environment: the kernel `bench::work` does a tenth more
KERNEL = "BM_op/kernel:bench::work"
LIBRARY = f"""
import os
import torch

@torch.library.custom_op("bench::work", mutates_args=())
def work(x: torch.Tensor) -> torch.Tensor:
    for _ in range(11 if {SLOWER!r} in os.environ else 10):
        found = torch.mm(x, x)
    return found
"""
LOAD = "import torch\nx = torch.rand(256, 256)\nwhile True: torch.mm(x, x)"


def program() -> None:
    x = torch.rand(96, 96)
    for _ in range(20):
        x = torch.softmax(torch.ops.bench.work(x), -1) + torch.nn.functional.gelu(x)
        x = torch.nn.functional.layer_norm(x, (96,))


def measured(directory: Path, flags: list[str], *, slower: bool = False) -> Document:
    """One run, by kernel."""
    out = directory / "times.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "opreplay_tools.benchmark", "--per-op", "--group-by=kernel", "--threads=1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), *sys.path])}
    done = subprocess.run(
        [*command, "--allow-import=work_of_bench", *flags, f"--benchmark-out={out}", str(directory / "work.opreplay")],
        env=environment | ({SLOWER: "1"} if slower else {}),
        text=True,
        capture_output=True,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}")
    return read_baseline(out)


@contextmanager
def loaded() -> Iterator[None]:
    """A second process computes on all processors."""
    other = subprocess.Popen([sys.executable, "-c", LOAD])
    try:
        yield
    finally:
        other.kill()
        other.wait()


def contained(one: Document, other: Document) -> Iterator[bool]:
    """For each row of both: whether the interval of `one` holds the median of `other`."""
    medians = {each["name"]: figure_of([each]) for each in other["benchmarks"]}
    for each in one["benchmarks"]:
        mine, theirs = figure_of([each]), medians.get(each["name"])
        if theirs is not None and mine.low and mine.high and theirs.value:
            yield mine.low <= theirs.value <= mine.high


def decided(before: Document, after: Document) -> Iterator[tuple[str, bool]]:
    """For each row of both: its name, and whether it is called faster or slower."""
    for each in compare_with_baseline("before", before, after).rows:
        yield each.name, each.verdict in ("faster", "slower")


def report(where: str, runs: list[Document]) -> None:
    pairs = list(itertools.pairwise(runs))
    held = [hit for one, other in pairs for hit in (*contained(one, other), *contained(other, one))]
    false = [hit for before, after in pairs for _, hit in decided(before, after)]
    of_all = f"pairs of runs, {where}"
    row(f"{of_all}: intervals that hold the other run's median", share(held), at_least=0.9, intervals=len(held))
    row(f"{of_all}: rows with a false verdict", share(false), at_most=0.02, rows=len(false))


def share(hits: list[bool]) -> float:
    return sum(hits) / len(hits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two pairs of short runs: only tries the script")
    parser.add_argument("--pairs", type=int, default=6, help="pairs of runs on either machine; 200 take hours")
    parser.add_argument("--processes", type=int, default=10, help="processes of each run")
    options = parser.parse_args()
    pairs, processes = (2, 1) if options.quick else (options.pairs, options.processes)
    flags = [f"--processes={processes}", *(["--benchmark-min-time=6x"] if options.quick else [])]
    torch.set_num_threads(1)
    with scratch() as directory:
        (directory / "work_of_bench.py").write_text(LIBRARY)
        sys.path.insert(0, str(directory))
        import work_of_bench  # noqa: F401

        with replayfmt.capture(directory / "work.opreplay"):
            program()
        quiet, found = [measured(directory, flags)], []
        for number in range(pairs):
            progress(f"quiet: {number} of {pairs}")
            slower = measured(directory, flags, slower=True)
            found += [hit for name, hit in decided(quiet[-1], slower) if name.startswith(KERNEL)]
            quiet.append(measured(directory, flags))
        report("quiet", quiet)
        row("pairs of runs, quiet: a kernel that takes 10% longer is found", share(found), at_least=0.95)
        with loaded():
            report("all processors loaded", [measured(directory, flags) for _ in range(pairs + 1)])


if __name__ == "__main__":
    main()
