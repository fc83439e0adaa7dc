"""Compares every entry in every mode, in several processes, and says what differs.

    PYTHONPATH=tests python -m exactness.sweep [--recorder=python] [--mode=grad ...] [--entries='linalg*' ...]
        [--samples=N] [--jobs=N] [--out=FILE] [--fresh] [--again] [--document]

What is found is appended to a file, one JSON object a line for each entry and mode; a sweep that was stopped goes on
behind it, and --fresh begins anew. --again compares again what differed, failed or died. Each process works on one
entry at a time: one that dies or takes too long is a finding, and the next one goes on. --document writes what no
dispatch mode keeps into docs/exactness.md. Exit code 1 if anything was found that is not a dispatch mode's.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import queue
import selectors
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from pathlib import Path
from typing import IO, Any

import torch

from .comparing import RECORDERS, Comparison, cpu_capability
from .documented import DOCUMENT, document
from .entries import entries
from .modes import MODES

_TESTS = Path(__file__).resolve().parents[1]
_LONGEST_S = 1800  # for an entry in one mode, on a busy machine


def main() -> int:
    options = _parse()
    if options.worker:
        return _work(options)
    out = Path(options.out or f"build/exactness/{options.recorder}.jsonl")
    out.parent.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        out.unlink(missing_ok=True)
    done = _rows(out)
    if options.again:
        done = {key: row for key, row in done.items() if not (found_in(row) or row["differences"])}
        out.write_text("".join(json.dumps(row) + "\n" for row in done.values()))
    patterns = options.entries or ["*"]
    names = [name for name in entries() if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if not names:
        sys.exit(f"sweep: no entry is called {' or '.join(patterns)}")
    modes = options.mode or list(MODES)
    tasks = [(name, mode) for mode in modes for name in names if (name, mode) not in done]
    print(f"{len(tasks)} of {len(names) * len(modes)} to do; what is found goes to {out}", file=sys.stderr)
    _do(tasks, options, out)
    rows = {key: row for key, row in _rows(out).items() if key[0] in names and key[1] in modes}
    print(summary(rows))
    missing = len(names) * len(modes) - len(rows)
    if missing:
        print(f"{missing} entries and modes were not compared")
    if options.document:
        document(_rows(out), torch.__version__, cpu_capability())
        print(f"wrote {DOCUMENT}")
    return 1 if missing or any(found_in(row) for row in rows.values()) else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="exactness.sweep", description=__doc__.splitlines()[0])
    parser.add_argument("--recorder", choices=RECORDERS, default="python", help="the recorder to try (default: python)")
    parser.add_argument("--mode", choices=MODES, action="append", help="a mode; repeatable (default: all)")
    parser.add_argument(
        "--entries", action="append", metavar="PATTERN", help="names of entries; repeatable (default: all)"
    )
    parser.add_argument(
        "--samples", type=int, default=0, metavar="N", help="at most N cases of an entry, spread over all"
    )
    parser.add_argument("--replays", type=int, default=1, metavar="N", help="captures of an entry to replay; -1: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes")
    parser.add_argument("--out", metavar="FILE", help="default: build/exactness/RECORDER.jsonl")
    parser.add_argument("--fresh", action="store_true", help="forget what was found before")
    parser.add_argument("--again", action="store_true", help="compare again what differed before")
    parser.add_argument("--document", action="store_true", help=f"write {DOCUMENT.name} from what was found")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.document and options.recorder != "python":
        parser.error("--document lists what the recorder in Python cannot keep; leave --recorder out")
    return options


def _rows(out: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """What was found so far. A line that was not written to its end is no finding, and is taken away."""
    text = out.read_text() if out.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        out.write_text(whole)
    rows = [json.loads(line) for line in whole.splitlines()]
    return {(row["entry"], row["mode"]): row for row in rows}


def found_in(row: dict[str, Any]) -> list[str]:
    """What of a row is not a dispatch mode's, in words. (Of version counters the document says that they differ.)"""
    found = [f"{text}" for text in row["failed"]]
    found += [f"the capture holds nothing of {text}" for text in row["unseen"]]
    for each in row["differences"]:
        if each["cause"] == "recorder" and each["kind"] != "version":
            first = each["first"]
            found.append(
                f"{each['place']}: {each['kind']} ({each['count']} times), first in {first['case']}: "
                f"{first['place']} is {first['under']} where it was {first['without']}"
            )
    return found


def summary(rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    """What was found, for a reader."""
    lines = []
    totals: Counter[str] = Counter()
    left_out, replays, unsupported, kinds = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for (name, mode), row in rows.items():
        lines += [f"{name} ({mode}): {text}" for text in found_in(row)]
        totals["cases"] += row["cases"]
        totals["compared"] += row["compared"]
        left_out.update(row["left_out"])
        replays.update(row["replays"])
        unsupported.update(row["unsupported"])
        kinds.update(f"{mode}: {each['kind']}" for each in row["differences"] if each["cause"] == "mode")
    differing = sum(any(each["cause"] == "mode" for each in row["differences"]) for row in rows.values())
    lines.append(f"{len(rows)} entries and modes, {totals['cases']} cases, {totals['compared']} compared")
    for name, counter in (
        ("left out", left_out),
        ("captures replayed", replays),
        ("unsupported records", unsupported),
        (f"differences of any dispatch mode, in {differing}", kinds),
    ):
        lines += [f"{name}:", *(f"  {count:6} {text}" for text, count in counter.most_common())] if counter else []
    versions = {key for key, row in rows.items() for each in row["differences"] if each["cause"] == "recorder"}
    lines.append(f"other version counters: in {len(versions - {key for key, row in rows.items() if found_in(row)})}")
    mine = sum(bool(found_in(row)) for row in rows.values())
    lines.append(f"differences of the recorder: in {mine}" if mine else "no difference of the recorder")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------ processes


def _do(tasks: list[tuple[str, str]], options: argparse.Namespace, out: Path) -> None:
    waiting: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    said = out.with_suffix(".log").open("a")  # PyTorch warns on stderr, too, and says there why a process ended
    for task in tasks:
        waiting.put(task)
    lock = threading.Lock()
    done = 0

    def write(row: dict[str, Any]) -> None:
        nonlocal done
        with lock, out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            done += 1
            if done % 50 == 0:
                print(f"{done} of {len(tasks)}", file=sys.stderr)

    def feed() -> None:
        worker = None
        try:
            while True:
                try:
                    name, mode = waiting.get_nowait()
                except queue.Empty:
                    return
                if worker is None or worker.poll() is not None:
                    worker = _start(options, said)
                write(_ask(worker, name, mode, options.recorder))
        finally:
            if worker is not None:
                worker.communicate()

    feeders = [threading.Thread(target=feed) for _ in range(max(1, min(options.jobs, len(tasks))))]
    for feeder in feeders:
        feeder.start()
    for feeder in feeders:
        feeder.join()
    said.close()


def _start(options: argparse.Namespace, said: IO[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "exactness.sweep", "--worker", f"--recorder={options.recorder}"]
    command += [f"--samples={options.samples}", f"--replays={options.replays}"]
    environment = {**os.environ, "PYTHONPATH": str(_TESTS), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, env=environment
    )


def _ask(worker: subprocess.Popen[str], name: str, mode: str, recorder: str) -> dict[str, Any]:
    """One task's row. A worker that dies or takes too long is ended, and that is what the row says."""
    assert worker.stdin is not None and worker.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it ended, which is seen below
        worker.stdin.write(json.dumps([name, mode]) + "\n")
        worker.stdin.flush()
    with selectors.DefaultSelector() as waiting:
        waiting.register(worker.stdout, selectors.EVENT_READ)
        ready = waiting.select(_LONGEST_S)
    line = worker.stdout.readline() if ready else ""
    if line:
        row: dict[str, Any] = json.loads(line)
        return row
    if not ready:
        worker.kill()
    how = f"the process ended with {worker.wait()}" if ready else f"no result in {_LONGEST_S} s"
    nothing: dict[str, Any] = {"left_out": {}, "unsupported": {}, "replays": {}, "differences": [], "unseen": []}
    return {"entry": name, "mode": mode, "recorder": recorder, "cases": 0, "compared": 0, "failed": [how], **nothing}


def _work(options: argparse.Namespace) -> int:
    # What the samples print is not for the one who reads the rows.
    rows = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            name, mode = json.loads(line)
            comparison = Comparison(
                entries()[name],
                mode,
                Path(folder),
                recorder=options.recorder,
                samples=options.samples,
                replays=options.replays,
            )
            try:
                row = comparison.run().row()
            except Exception:
                row = {**comparison.report.row(), "failed": [traceback.format_exc()]}
            rows.write(json.dumps(row) + "\n")
            rows.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
