"""How often the intervals and verdicts of `opreplay-benchmark --processes=N` hold, in pairs of runs.

Two runs of the same capture should have the same median, so a run's 95% interval should hold the other run's median,
and no row should be called faster or slower. In a third run one kernel takes 10% longer, which should be found. On each
machine processes are measured one after the other. N that follow each other are a run, and the N after them the run
that it is compared with: so many processes give as many pairs, less 2 N, with what disturbs a machine for minutes in
one run and not in the other. All of it is measured on a quiet machine and, but for the slower kernel, beside a process
that loads all processors; `--as-it-is` measures the machine as it is, and says how loaded that was.
"""

from __future__ import annotations

import argparse
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
from replayfmt.benchmark.processes import put_together

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
    """One process, by kernel."""
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


def run_of(processes: list[Document]) -> Document:
    """As `--processes` makes one run of them."""
    if len(processes) == 1:
        return processes[0]
    context, rows = put_together(processes)
    return {"context": context, "benchmarks": rows}


def pairs_of(measured: list[Document], processes: int) -> Iterator[tuple[Document, Document]]:
    for first in range(len(measured) - 2 * processes + 1):
        middle = first + processes
        yield run_of(measured[first:middle]), run_of(measured[middle : middle + processes])


def report(where: str, measured: list[Document], processes: int) -> None:
    pairs = list(pairs_of(measured, processes))
    held = [hit for one, other in pairs for hit in (*contained(one, other), *contained(other, one))]
    false = [hit for before, after in pairs for _, hit in decided(before, after)]
    of_all = f"{len(pairs)} pairs of runs of {processes} processes, {where}"
    row(f"{of_all}: intervals that hold the other run's median", share(held), at_least=0.9, intervals=len(held))
    row(f"{of_all}: rows with a false verdict", share(false), at_most=0.02, rows=len(false))


def share(hits: list[bool]) -> float:
    return sum(hits) / len(hits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short runs of one process: only tries the script")
    parser.add_argument("--measured", type=int, default=60, help="processes that are measured on each machine")
    parser.add_argument("--processes", type=int, default=10, help="processes of each run")
    parser.add_argument("--as-it-is", action="store_true", help="only the machine as it is, whatever else runs")
    options = parser.parse_args()
    count, processes = (3, 1) if options.quick else (options.measured, options.processes)
    flags = ["--benchmark-min-time=6x"] if options.quick else []
    torch.set_num_threads(1)
    with scratch() as directory:
        (directory / "work_of_bench.py").write_text(LIBRARY)
        sys.path.insert(0, str(directory))
        import work_of_bench  # noqa: F401

        with replayfmt.capture(directory / "work.opreplay"):
            program()

        def take(*, slower: bool = False) -> list[Document]:
            found = []
            for number in range(count):
                progress(f"{number} of {count} processes")
                found.append(measured(directory, flags, slower=slower))
            return found

        if options.as_it_is:
            documents = take()
            loads = sorted(each["context"]["load_avg"][0] for each in documents)
            report(f"load {loads[0]:.1f} to {loads[-1]:.1f} on {os.cpu_count()} processors", documents, processes)
            return
        quiet = take()
        report("quiet", quiet, processes)
        slower = take(slower=True)
        runs = zip(pairs_of(quiet, processes), pairs_of(slower, processes), strict=True)
        found = [hit for (one, _), (_, other) in runs for name, hit in decided(one, other) if name.startswith(KERNEL)]
        row("pairs of runs, quiet: a kernel that takes 10% longer is found", share(found), at_least=0.95)
        with loaded():
            report("all processors loaded", take(), processes)


if __name__ == "__main__":
    main()
