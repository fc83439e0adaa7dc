"""Folders of several ranks: checking one of 1,000 ranks, what is compared before a replay begins, how large recorded
results are, and a replay by two ranks, over gloo, against the program.

The 1,000 ranks are captured one after another in this process, over PyTorch's fake backend, which moves no data.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import arguments, progress, row, scratch, seconds

import replayfmt
from replayfmt.format.rank_files import describe, judge

COLLECTIVES = 100
RESULT_BYTES = 1 << 20
TURNS, STEPS = 40, 25
# A step of 24 small ops and 8 collectives on each of two ranks, captured; or measured, in turns with its replay: gloo
# is slow for a while once its ranks are out of step, since its threads then spin.
PROGRAM = """
import json, statistics, sys, time
import torch, torch.distributed as dist
import replayfmt
from replayfmt.benchmark.ranks import TimedRanks
from replayfmt.replay.plan import Plan

torch.set_num_threads(1)
folder, turns, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
x, weight = torch.randn(16, 64), torch.randn(64, 64) / 8

def step():
    y = x
    for _ in range(8):
        y = torch.mm(y, weight).relu() * 0.5
        dist.all_reduce(y)

class Stopwatch:
    def __init__(self):
        self.taken = []
    def start(self):
        ranks.align()
        self.began = time.perf_counter()
    def pause(self): ...
    def resume(self): ...
    def stop(self):
        self.taken.append(time.perf_counter() - self.began)

def program():
    of_program.start()
    step()
    of_program.stop()

if not turns:
    dist.init_process_group("gloo")
    step()
    with replayfmt.capture(f"{folder}/rank{dist.get_rank()}.opreplay"):
        step()
else:
    ranks, of_program, of_replay = TimedRanks(folder, 60.0), Stopwatch(), Stopwatch()
    with ranks.playing(), Plan(ranks.path) as plan:
        plan.execute(verify="none")
        for _ in range(turns):
            for _ in range(steps):
                program()
            for _ in range(steps):
                plan.execute(verify="none", timer=of_replay)
    ranks.finish()
    if ranks.rank == 0:
        print(json.dumps([of_program.taken, of_replay.taken]))
    ranks.end(0)
dist.destroy_process_group()
"""


def in_group(backend: str, rank: int, world: int, folder: Path, work: Callable[[], None]) -> None:
    """Do something as one rank of a process group of this process."""
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    else:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        work()
    finally:
        dist.destroy_process_group()


def capture_ranks(folder: Path, world: int) -> None:
    """What each rank of a job of `world` ranks leaves that calls 100 collectives."""
    tensor = torch.ones(256)

    def captured() -> None:
        with replayfmt.capture(folder / f"rank{rank}.opreplay"):
            for _ in range(COLLECTIVES):
                dist.all_reduce(tensor)

    os.environ["WORLD_SIZE"] = str(world)
    for rank in range(world):
        os.environ["RANK"] = str(rank)
        in_group("fake", rank, world, folder, captured)
    del os.environ["RANK"], os.environ["WORLD_SIZE"]


def session_bytes(session: int) -> int:
    """Memory of all processes of a session, what is shared between them counted once."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) == session:
                total += int((process / "smaps_rollup").read_text().partition("Pss:")[2].split()[0]) * 1024
        except (OSError, IndexError):
            continue  # it has ended
    return total


@contextmanager
def watched(session: int, peak: list[int]):
    """Look at the memory of a session's processes, ten times a second; `peak` gets the most that it had."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            peak.append(session_bytes(session))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()


def measure_checking(folder: Path, world: int) -> None:
    peak = [0]
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "opreplay_tools.check", str(folder)], stdout=subprocess.DEVNULL, start_new_session=True
    )
    with watched(process.pid, peak):
        _pid, status, usage = os.wait4(process.pid, 0)
    took = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"the check ended with {process.returncode}")
    what = f"opreplay-check of {world:,} ranks with {COLLECTIVES} collectives each"
    row(what, took, "s", at_most=10, processor_s=usage.ru_utime + usage.ru_stime)
    row(f"{what}: peak memory, all processes", max(peak) / 2**20, "MiB", at_most=500)


def measure_sequences(folder: Path) -> None:
    def compared() -> None:
        problems = judge([describe(str(folder), rank, 4, checked=False) for rank in range(4)])
        if problems:
            raise RuntimeError(f"the ranks do not fit together: {problems}")

    taken = min(seconds(compared) for _ in range(5))
    row("comparing the files of 4 ranks before a replay's first op", taken * 1e3, "ms", at_most=100)


def measure_results(folder: Path, count: int) -> None:
    path = folder / "results.opreplay"

    def captured() -> None:
        with replayfmt.capture(path):
            for _ in range(count):
                dist.all_reduce(torch.rand(RESULT_BYTES // 4))

    in_group("gloo", 0, 1, folder, captured)
    ratio = path.stat().st_size / (count * RESULT_BYTES)
    row("recorded results: file size by bytes that collectives wrote", ratio, at_most=1.1)


def measure_replay(folder: Path, turns: int, steps: int) -> None:
    program, out = folder / "program.py", folder / "two"
    program.write_text(PROGRAM)
    out.mkdir()

    def launch(turns: int) -> str:
        two = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        return subprocess.run(
            [*two, str(program), str(out), str(turns), str(steps)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
            text=True,
            capture_output=True,
        ).stdout

    launch(0)
    of_program, of_replay = json.loads(launch(turns).splitlines()[-1])
    program_s = statistics.median(of_program)
    row(
        "replay of a launch-bound step by two ranks, in turns with the program",
        statistics.median(of_replay) / program_s,
        at_most=1.1,
        program_us=program_s * 1e6,
        fastest=min(of_replay) / min(of_program),
    )


def main() -> None:
    quick = arguments(__doc__).quick
    world = 4 if quick else 1000
    if not dist.is_available():
        row("folders of ranks", None, "s", reason="this PyTorch has no distributed package")
        return
    torch.set_num_threads(1)
    with scratch() as directory:
        folder = directory / "ranks"
        folder.mkdir()
        progress(f"capturing {world:,} ranks")
        capture_ranks(folder, world)
        progress("checking them")
        measure_checking(folder, world)
        if not quick:
            small = directory / "four"
            small.mkdir()
            capture_ranks(small, 4)
            folder = small
        measure_sequences(folder)
        measure_results(directory, 4 if quick else 64)
        progress("replaying two ranks")
        measure_replay(directory, 1 if quick else TURNS, 5 if quick else STEPS)


if __name__ == "__main__":
    main()
