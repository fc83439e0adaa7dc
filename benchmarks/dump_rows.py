"""Dump: JSONL rows a second against iree-dump-replay, which is written in C, whole processes against whole processes.

IREE's capture is a small module called again and again under iree-benchmark-module, which records nine rows a call;
ours are training steps of the tiny GPT-2. Both have at least 320,000 rows, and both dumps go to /dev/null. Our modules
are compiled before the first turn that counts, as they are where a package was installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import tiny_gpt2
import torch
from measuring import arguments, in_turns, median_of, row, scratch

import replayfmt

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
IREE = ("iree-compile", "iree-benchmark-module", "iree-dump-replay")


def rows_and_bytes(command: list[str]) -> tuple[int, int]:
    """How many lines and bytes a command prints."""
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = length = 0
        while block := process.stdout.read(1 << 20):
            lines, length = lines + block.count(b"\n"), length + len(block)
    if process.returncode:
        raise SystemExit(f"{command} gave exit code {process.returncode}")
    return lines, length


def compiling(directory: Path) -> dict[str, str]:
    """An environment in which Python keeps the modules that it has compiled, whatever this one says."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(directory / "compiled")}


def to_null(command: list[str], environment: dict[str, str]) -> float:
    begin = perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env=environment)
    return perf_counter() - begin


def capture(run: Callable[[], None], times: int, path: Path) -> int:
    """Capture `run`, metadata only. Returns the number of records."""
    with replayfmt.capture(path, payload="none", force=True):
        for _ in range(times):
            run()
    with replayfmt.open(path) as made:
        return made.reader.record_count


def iree_capture(directory: Path, calls: int) -> Path:
    module, path = directory / "add.vmfb", directory / "add.ireereplay"
    subprocess.run(
        [
            BIN / "iree-compile",
            HERE / "add.mlir",
            "--iree-hal-target-device=local",
            "--iree-hal-local-target-device-backends=vmvx",
            "-o",
            module,
        ],
        check=True,
    )
    subprocess.run(
        [
            BIN / "iree-benchmark-module",
            f"--module={module}",
            "--function=main",
            "--device=local-sync",
            "--input=4xf32=1",
            "--input=4xf32=2",
            f"--benchmark_min_time={calls}x",
            f"--device_replay_output={path}",
        ],
        check=True,
        capture_output=True,
    )
    return path


def main() -> None:
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    wanted = 3_000 if quick else 320_000
    with scratch() as directory:
        path, environment = directory / "steps.opreplay", compiling(directory)
        run = tiny_gpt2.training_step()
        run()
        records_a_step = capture(run, 1, path)
        capture(run, wanted // records_a_step + 1, path)
        ours = [str(BIN / "opreplay-dump"), "--format=jsonl", str(path)]
        our_rows, our_bytes = rows_and_bytes(ours)
        if any(shutil.which(BIN / tool) is None for tool in IREE):
            taken = in_turns({"ours": lambda: to_null(ours, environment)}, 1 if quick else 5)
            row(
                "dump, JSONL rows a second / iree-dump-replay's",
                None,
                at_least=2.5,
                reason="IREE's tools are not installed",
                rows_a_second=our_rows / median(taken["ours"]),
            )
            return
        theirs = [str(BIN / "iree-dump-replay"), "--format=jsonl", str(iree_capture(directory, wanted // 9 + 1))]
        their_rows, their_bytes = rows_and_bytes(theirs)
        empty = directory / "empty.opreplay"
        capture(lambda: torch.ones(1), 1, empty)
        start = [*ours[:2], str(empty)]
        commands = {"ours": ours, "theirs": theirs, "start": start}
        taken = in_turns(
            {name: lambda c=command: to_null(c, environment) for name, command in commands.items()}, 1 if quick else 7
        )
    row("dump, the start: of a capture of one op", median(taken["start"]), "s", at_most=0.15)
    row(
        "dump, JSONL rows a second / iree-dump-replay's",
        median_of(lambda o, t: (our_rows / o) / (their_rows / t), taken["ours"], taken["theirs"]),
        at_least=2.5,
        rows=our_rows,
        bytes_a_row=our_bytes / our_rows,
        rows_a_second=our_rows / median(taken["ours"]),
        iree_rows=their_rows,
        iree_bytes_a_row=their_bytes / their_rows,
        iree_rows_a_second=their_rows / median(taken["theirs"]),
    )


if __name__ == "__main__":
    main()
