"""Checks OpReplay on a GPU within minutes: what `make gpu` does (docs/devices.md).

Runs the steps of goals.py in priority order, each as a process with a limit. Every figure goes to `results.jsonl` as
soon as it is known, then a row for each step; a summary of one screen is printed at the end. It works in a bare
checkout: nothing is installed, wheels in `.whl/` are unpacked to be importable, and libraries of the recorder in C++
are used from a folder, or built.

    python3 benchmarks/gpu/check.py [--steps=capture,replay] [--device=cpu] [--seconds=470] [--out=build/gpu]
                                    [--native=FOLDER] [--patience=1]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from goals import FIGURES, STEPS, YES  # noqa: E402 - from this folder

_LEAST_S = 8.0  # a step that has less time is not begun
_GRACE_S = 6.0  # between asking a step to end and ending it


def make_importable(site: Path, native: Path | None, python: str) -> dict[str, str]:
    """What a step's environment has besides this one's: everything that an installation would have made importable."""
    site.mkdir(parents=True, exist_ok=True)
    wheels = sorted(map(str, ROOT.glob(".whl/*.whl")))
    if wheels:
        command = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
        subprocess.run([*command, f"--target={site}", *wheels], check=True)
    tools = site / "opreplay_tools"
    if not tools.is_symlink():
        tools.symlink_to(ROOT / "tools")
    cache = _cache_of_this_user(site.parent)
    if native is not None:
        built = cache / "opreplay/native"
        built.mkdir(mode=0o700, parents=True, exist_ok=True)
        for library in native.glob("*.so"):  # their names say what they were built from, and for which PyTorch
            shutil.copyfile(library, built / library.name)
    folders = [ROOT, site, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # stacks of a crash, in steps.log
        "XDG_CACHE_HOME": str(cache),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # ExecutionTraceObserver announces each start as a warning
    }


def _cache_of_this_user(otherwise: Path) -> Path:
    """Where libraries that were built stay for the next run; below `otherwise` where the user's own cannot be
    written."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    found = given if given.is_absolute() else Path(os.path.expanduser("~"), ".cache")
    with contextlib.suppress(OSError):
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(found, os.W_OK):
            return found
    found = otherwise / "cache"
    found.mkdir(mode=0o700, exist_ok=True)
    return found


class Check:
    """One run of steps, and the rows that it writes."""

    def __init__(self, out: Path, device: str, python: str, environment: dict[str, str], ends: float) -> None:
        self.out, self.device, self._python, self._environment, self._ends = out, device, python, environment, ends
        self.rows: list[dict[str, Any]] = []
        self._results = (out / "results.jsonl").open("w", encoding="utf-8")
        self._log = (out / "steps.log").open("w", encoding="utf-8")

    def step(self, name: str, limit: float) -> None:
        """Run a step, for as long as its limit and the whole time allow."""
        told: list[dict[str, Any]] = []
        began = time.time()
        left = self._ends - began
        outcome = "no time was left" if left < _LEAST_S else self._run(name, min(limit, left), told)
        missing = [figure for figure in FIGURES.values() if figure.step == name]
        missing = [figure for figure in missing if figure.what not in {row["what"] for row in told}]
        for figure in missing:
            row = figure.row(None, {"reason": f"the step did not come so far: {outcome}"})
            told.append(row)
            self._write({"step": name, **row})
        counts = {
            verdict: [row["what"] for row in told if row["verdict"] == verdict]
            for verdict in ("missed", "not measured")
        }
        seconds = round(time.time() - began, 1)
        self._write({"step": name, "outcome": outcome, "seconds": seconds, "figures": len(told)} | counts)
        self.rows += [{"step": name, **row} for row in told]

    def _run(self, name: str, limit: float, told: list[dict[str, Any]]) -> str:
        print(f"{name}, at most {limit:.0f} s …", file=sys.stderr, flush=True)
        print(f"\n======== {name}", file=self._log, flush=True)
        inside = {"GPU_CHECK_DEVICE": self.device, "GPU_CHECK_WORK": str(self.out / "work")}
        inside["GPU_CHECK_ENDS"] = str(time.time() + limit - _LEAST_S)
        if self.device == "cpu":
            inside["TRITON_INTERPRET"] = "1"
        process = subprocess.Popen(
            [self._python, str(HERE / "steps.py"), name],
            stdout=subprocess.PIPE,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            cwd=ROOT,
            env={**os.environ, **self._environment, **inside},
            start_new_session=True,
        )
        late = threading.Event()
        with _ended_after(process, limit, late):
            assert process.stdout is not None
            for line in process.stdout:
                self._log.write(line)
                self._log.flush()
                if line.startswith('{"what"'):
                    with contextlib.suppress(ValueError):  # a process that is ended may leave half a line
                        row = json.loads(line)
                        told.append(row)
                        self._write({"step": name, **row})
            code = process.wait()
        if late.is_set():
            return f"it was over its limit of {limit:.0f} s"
        ended = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "done" if code == 0 else f"{ended} (steps.log has more)"

    def _write(self, row: dict[str, Any]) -> None:
        _line(self._results, row)

    def close(self) -> None:
        self._results.close()
        self._log.close()


def _line(file: TextIO, row: dict[str, Any]) -> None:
    file.write(json.dumps(row, default=str) + "\n")
    file.flush()
    os.fsync(file.fileno())


@contextlib.contextmanager
def _ended_after(process: subprocess.Popen[str], limit: float, late: threading.Event) -> Iterator[None]:
    """Ends a process and what it started when its time is up, and if this one is ended."""

    def end() -> None:
        late.set()
        _signal(process, signal.SIGINT)
        stop.wait(_GRACE_S)
        if not stop.is_set():
            _signal(process, signal.SIGKILL)

    stop = threading.Event()
    timer = threading.Timer(limit, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        stop.set()
        _signal(process, signal.SIGKILL)  # what it left behind


def _signal(process: subprocess.Popen[str], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


# ------------------------------------------------------------------------------------------------------------- summary


def summary(rows: Sequence[dict[str, Any]], seconds: float) -> str:
    """One screen: what was measured on which device, each step's verdicts, every missed goal, and why others were not
    measured."""
    where = _where(rows)
    lines = [f"OpReplay on {where}"]
    if "device cpu" in where:
        lines.append("Without a GPU this tries the check itself: the programs are tiny, and the figures mean nothing.")
    verdicts = ("met", "missed", "not measured", "no goal")
    lines += ["", f"{'':14}" + "".join(f"{verdict:>14}" for verdict in verdicts)]
    for step in dict.fromkeys(row["step"] for row in rows):
        counts = [sum(row["step"] == step and row["verdict"] == verdict for row in rows) for verdict in verdicts]
        lines.append(f"{step:14}" + "".join(f"{count:>14}" for count in counts))
    missed = [row for row in rows if row["verdict"] == "missed"]
    lines += ["", f"missed: {len(missed)}"]
    lines += [f"  {row['what']}: {_figure(row)}, goal {_goal(row)}"[:118] for row in missed]
    reasons: dict[str, int] = {}
    for row in rows:
        if row["verdict"] == "not measured":
            reason = str(row["details"].get("reason", "no reason"))
            reasons[reason] = reasons.get(reason, 0) + 1
    lines += ["", f"not measured: {sum(reasons.values())}"]
    most = sorted(reasons.items(), key=lambda pair: -pair[1])
    lines += [f"  {count} × {reason}"[:118] for reason, count in most[:8]]
    if len(most) > 8:
        lines.append(f"  and {len(most) - 8} more reasons, in results.jsonl")
    lines += ["", f"{len(rows)} figures in {seconds:.0f} s; results.jsonl has all of them, table.md those with a goal"]
    return "\n".join(lines)


def _where(rows: Sequence[dict[str, Any]]) -> str:
    machine = next((row["details"]["machine"] for row in rows if "machine" in row["details"]), {})
    names = ("gpu", "device", "torch", "triton", "python", "cuda")
    known = [f"{name} {machine[name]}" for name in names if machine.get(name)]
    return " · ".join(known) or "a machine that the step `machine` would name"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows with a figure as benchmarks/README.md has them, below what they hold for."""
    lines = [f"`make gpu`, {time.strftime('%Y-%m-%d')}: {_where(rows)}", ""]
    lines += ["| what | measured | target | met |", "| --- | --- | --- | --- |"]
    for row in rows:
        if row["measured"] is not None:
            met = {True: "yes", False: "**no**", None: ""}[row["met"]]
            lines.append(f"| {row['what']} | {_figure(row)} | {_goal(row)} | {met} |")
    return "\n".join(lines)


def _figure(row: dict[str, Any]) -> str:
    if row["unit"] == YES:
        return "yes" if row["measured"] == 1 else "no"
    return f"{row['measured']:.3g} {row['unit']}"


def _goal(row: dict[str, Any]) -> str:
    low, high = row["at_least"], row["at_most"]
    if row["unit"] == YES:
        return "yes"
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    return f"≤ {high:g}" if high is not None else f"≥ {low:g}" if low is not None else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", default="", help=f"of {', '.join(STEPS)}, separated by commas or spaces; default: all"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu tries the check itself")
    parser.add_argument("--seconds", type=float, default=470, help="for everything together (default: 470)")
    parser.add_argument(
        "--patience",
        type=float,
        default=float(os.environ.get("GPU_CHECK_PATIENCE", "1")),
        help="limits of steps are this many times as long; also GPU_CHECK_PATIENCE",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu", help="default: build/gpu")
    parser.add_argument("--native", type=Path, help="folder of libraries that python -m replayfmt.native built")
    asked = parser.parse_args()
    began = time.time()
    steps = asked.steps.replace(",", " ").split() or list(STEPS)
    if unknown := set(steps) - set(STEPS):
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    out = asked.out.resolve()
    (out / "work").mkdir(parents=True, exist_ok=True)
    environment = make_importable(out / "site", asked.native, sys.executable)
    check = Check(out, asked.device, sys.executable, environment, began + asked.seconds)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that steps end with it
    try:
        for step in steps:
            check.step(step, STEPS[step] * asked.patience)
    finally:
        check.close()
        said = summary(check.rows, time.time() - began)
        (out / "summary.txt").write_text(said + "\n", encoding="utf-8")
        (out / "table.md").write_text(table(check.rows) + "\n", encoding="utf-8")
        print(said)
    return int(any(row["verdict"] == "missed" for row in check.rows) and asked.device != "cpu")


if __name__ == "__main__":
    sys.exit(main())
