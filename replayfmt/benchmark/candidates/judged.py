"""Many candidates for one kernel task: judged in processes of their own, ranked by the whole workload.

The judge is the script that stands in the task's folder, in this package's version. Here it gets its candidates, and
what it finds gets intervals, rooflines, ranks, and the time of a whole replay with each candidate in place.
"""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from replayfmt.errors import ReplayFailed, UsageError
from replayfmt.pytorch import device_work, guards, rounding

from ..machine import GpuWatch, gpu_caveats, gpu_lines
from ..measure import flush_bytes
from ..per_op.groups import CallWork
from ..per_op.roofline import Peaks, above_the_roof, peak_caveats, place
from ..statistics import PairedComparison, compare_pairs, duration
from . import check_script, task_calls, task_cases, task_judging

# The ratio of a whole replay with a candidate in place, as a row of a comparison; None and why where there is none.
EndToEnd = Callable[[str, dict[str, Any]], "dict[str, Any]"]


_PARTS = (device_work, guards, rounding, task_cases, task_calls, task_judging, check_script)
# Threads of PyTorch's that have nothing to do would otherwise keep processors from other candidates for milliseconds.
_NEEDS_TORCH = """os.environ.setdefault("GOMP_SPINCOUNT", "20000")
try:
    import torch
except ImportError as lacking:
    sys.exit(f"this needs PyTorch, which cannot be imported here: {lacking}")"""


def check_text() -> str:
    """check.py: the judge, with what it needs of this package, as one file that imports nothing else of it."""
    modules: set[str] = set()
    names: dict[str, set[str]] = {}
    bodies = []
    for part in _PARTS:
        source = inspect.getsource(part)
        imports = [each for each in ast.parse(source).body if isinstance(each, ast.Import | ast.ImportFrom)]
        bodies.append("\n".join(source.splitlines()[imports[-1].end_lineno or 0 :]).strip())
        for each in imports:
            if isinstance(each, ast.Import):
                modules |= {alias.name for alias in each.names} - {"torch"}
            elif not each.level and not str(each.module).startswith(("replayfmt", "__future__")):
                names.setdefault(str(each.module), set()).update(alias.name for alias in each.names)
    head = f'"""{check_script.__doc__}"""\n\nfrom __future__ import annotations\n'
    lines = [*(f"import {module}" for module in sorted(modules))]
    lines += [f"from {module} import {', '.join(sorted(found))}" for module, found in sorted(names.items())]
    return "\n\n\n".join(["\n".join([head, *lines, "", _NEEDS_TORCH]), *bodies]) + "\n"


def find_candidates(given: Sequence[str]) -> list[str]:
    """The files that flags name, those of folders in order. Raises UsageError."""
    found = []
    for each in given:
        path = Path(each)
        if path.is_dir():
            inside = sorted(str(file) for file in path.iterdir() if file.suffix in task_judging.SOURCES)
            if not inside:
                raise UsageError(f"--candidates={each}: there is no {', '.join(task_judging.SOURCES)} file in it")
            found += inside
        elif Path(task_judging.split_candidate(each)[0]).is_file():
            found.append(each)
        else:
            raise UsageError(f"--candidates={each}: there is no such file or folder")
    return found


@dataclass
class Judged:
    """One candidate. `found` is what the judge says; the comparisons are with the reference, None where it was not
    timed. `end_to_end` compares whole replays."""

    found: dict[str, Any]
    whole: PairedComparison | None = None
    workloads: dict[str, PairedComparison] = field(default_factory=dict)
    end_to_end: dict[str, Any] | None = None

    @property
    def accepted(self) -> bool:
        return bool(self.found["verdict"] == "accepted")

    def rank_key(self) -> tuple[Any, ...]:
        """Accepted ones first, the fastest replay or, where none was made, the fastest workload before the others."""
        ratio = None if self.end_to_end is None else self.end_to_end.get("ratio")
        if ratio is None:
            ratio = None if self.whole is None else self.whole.ratio
        return not self.accepted, ratio is None, ratio or 0.0


def _flags(options: task_cases.Options) -> list[str]:
    flags = [f"--min-time={options.min_time_s}", f"--cold-bytes={options.cold_bytes}"]
    flags += [f"--timeout={options.timeout_s}", f"--memory-limit={options.memory_bytes}"]
    flags += [f"--allow={each}" for each in options.allow]
    return flags + ["--variants"] * options.variants + ["--guard"] * options.guard


def run_judge(folder: str, candidates: Sequence[str], options: task_cases.Options) -> dict[str, Any]:
    """What the judge finds. Raises UsageError for a task that cannot be read, and ReplayFailed."""
    with tempfile.TemporaryDirectory(prefix="opreplay-judge-") as scratch:
        script, out = Path(scratch) / "check.py", Path(scratch) / "result.json"
        script.write_text(check_text(), encoding="utf-8")
        flags = [f"--task={folder}", f"--json={out}", *_flags(options), "--", *candidates]
        done = subprocess.run(
            [sys.executable, str(script), *flags],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="backslashreplace",
        )
        if not out.exists():
            said = done.stderr.strip().splitlines()[-1:] or [f"the judge ended with {done.returncode}"]
            message = said[0].partition("error: ")[2] or said[0]
            raise UsageError(message) if done.returncode == 2 else ReplayFailed(f"{folder}: {message}")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


@dataclass
class JudgeReport:
    """All candidates, the best first."""

    task: dict[str, Any]
    reference: dict[str, Any]
    candidates: list[Judged]
    peaks: dict[str, Peaks]
    reference_ns: dict[str, float]
    gpus: list[dict[str, Any]]  # GpuWatch.rows

    @property
    def all_accepted(self) -> bool:
        return bool(self.reference["ok"]) and all(each.accepted for each in self.candidates)

    def document(self) -> dict[str, Any]:
        return {
            "task": {key: self.task[key] for key in ("name", "kind", "function", "capture_session", "inputs")},
            "reference": self.reference,
            "workloads": [
                {
                    **{
                        key: each[key] for key in ("name", "signature", "calls", "flops", "bytes_read", "bytes_written")
                    },
                    "reference_ns": self.reference_ns.get(each["name"]),
                    "bound": self._bound(each, self.reference_ns.get(each["name"])),
                }
                for each in self.task["workloads"]
            ],
            "gpus": self.gpus,
            "warnings": self.warnings(),
            "peaks": [row for peaks in self.peaks.values() for row in peaks.rows()],
            "candidates": [
                {
                    "rank": number if each.accepted else None,
                    **{key: value for key, value in each.found.items() if key != "timed"},
                    "whole_workload": _comparison(each.whole),
                    "end_to_end": each.end_to_end,
                    "workloads": {name: self._row(name, found) for name, found in each.workloads.items()},
                }
                for number, each in enumerate(self.candidates, 1)
            ],
        }

    def _row(self, name: str, found: PairedComparison) -> dict[str, Any]:
        workload = next(each for each in self.task["workloads"] if each["name"] == name)
        row = _comparison(found) or {}
        return {**row, "bound": self._bound(workload, float(np.median(found.substituted)))}

    def _bound(self, workload: dict[str, Any], call_ns: float | None) -> dict[str, Any]:
        """How far a call is from what the device can do at most; what is not known is said."""
        device = workload["storages"][0]["device"] if workload["storages"] else "cpu"
        dtype = getattr(torch, workload["compute_dtype"]) if workload["compute_dtype"] else None
        work = CallWork(
            workload["flops"],
            workload["flops_reason"] or "",
            workload["bytes_read"],
            workload["bytes_written"],
            workload["bytes_reason"] or "",
            "other operator",
            "",
            dtype,
            torch.device(device),
        )
        peaks = self.peaks.get(device)
        placed = None if peaks is None or call_ns is None else place(work, call_ns, peaks)
        unknown = [text for text in (workload["flops_reason"], workload["bytes_reason"]) if text]
        if placed is None:
            return {"share_of_roof": None, "unknown": unknown or ["it was not timed"]}
        return {**placed.fields(), "unknown": unknown}

    def warnings(self) -> list[str]:
        """Reasons to doubt the figures."""
        rows = [
            {"name": f"the reference in {each['name']}", **self._bound(each, self.reference_ns.get(each["name"]))}
            for each in self.task["workloads"]
        ]
        for each in self.candidates:
            for name, found in each.workloads.items():
                rows.append({"name": f"{each.found['candidate']} in {name}", **self._row(name, found)["bound"]})
        peaks = [row for each in self.peaks.values() for row in each.rows()]
        placed = [row for row in rows if row["share_of_roof"] is not None]
        return [*gpu_caveats(self.gpus), *peak_caveats(peaks), *above_the_roof(placed)]

    def lines(self) -> Iterator[str]:
        task = self.task
        calls = sum(each["calls"] for each in task["workloads"])
        yield f"task      {task['name']}: {len(task['workloads'])} workloads of {calls} calls, inputs {task['inputs']}"
        wrong = {case: text for case, text in self.reference["cases"].items() if text}
        yield f"reference {'as expected' if not wrong else 'NOT as expected'} in {len(self.reference['cases'])} cases"
        yield from (f"          {case}: {text}" for case, text in wrong.items())
        for each in task["workloads"]:
            taken = self.reference_ns.get(each["name"])
            bound = self._bound(each, taken)
            share = bound["share_of_roof"]
            text = "its limit is not known" if share is None else f"{share:.1%} of the {bound['bound']} roof"
            yield f"  {each['name']} x {each['calls']}: {duration(taken)}, {text}: {each['signature']}"
        yield ""
        for number, each in enumerate(self.candidates, 1):
            name = each.found["candidate"]
            if not each.accepted:
                where = f" ({each.found['case']})" if each.found["case"] else ""
                yield f"  -  {name}: REJECTED: {each.found['verdict']}{where}: {each.found['text']}"
                continue
            whole = _ratio_text(_comparison(each.whole), "not timed")
            yield f"{number:>3}  {name}: accepted, whole workload {whole}{self._heaviest(each)}"
            if each.end_to_end is not None:
                unknown = f"not known: {each.end_to_end.get('reason')}"
                yield f"     end to end: {_ratio_text(each.end_to_end, unknown)}"
        yield ""
        yield from (f"gpu       {text}" for text in gpu_lines(self.gpus))
        yield "ratios of the reference's time; below 1 is faster"
        yield from (f"WARNING: {text}" for text in self.warnings())

    def _heaviest(self, each: Judged) -> str:
        """The ratio of the workload in which the reference spends most, where there are several."""
        if len(each.workloads) < 2:
            return ""
        calls = {workload["name"]: workload["calls"] for workload in self.task["workloads"]}
        name = max(each.workloads, key=lambda name: calls[name] * float(np.median(each.workloads[name].original)))
        return f"; {name}, the heaviest: {each.workloads[name].ratio or 0.0:.3f}"


def _comparison(found: PairedComparison | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "reference_ns": float(np.median(found.original)),
        "candidate_ns": float(np.median(found.substituted)),
        **found.fields(),
    }


def _ratio_text(row: dict[str, Any] | None, unknown: str) -> str:
    """A comparison's ratio and verdict."""
    if row is None or row.get("ratio") is None:
        return unknown
    between = "" if row["ratio_low"] is None else f" ({row['ratio_low']:.3f} to {row['ratio_high']:.3f})"
    return f"{row['ratio']:.3f}{between}, {row['verdict']}"


def judge(
    folder: str,
    candidates: Sequence[str],
    options: task_cases.Options,
    make_peaks: Callable[[torch.device], Peaks],
    end_to_end: EndToEnd | None = None,
    cold: bool = False,
) -> JudgeReport:
    """Judge candidates for the task in a folder; without any, the reference alone is checked and timed. With `cold`
    what the caches of the task's devices hold is replaced before each timed call."""
    try:
        task = task_cases.load_task(Path(folder))
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None
    if end_to_end is not None and task["kind"] == "fusion":
        raise UsageError("--end-to-end is for tasks of one kernel: several ops cannot be substituted in a replay")
    devices = {storage["device"] for each in task["workloads"] for storage in each["storages"]} or {"cpu"}
    used = [torch.device(device) for device in sorted(devices)]
    if cold:
        options = replace(options, cold_bytes=flush_bytes(used))
    gpus = GpuWatch(used)
    gpus.begin()
    found = run_judge(folder, [*candidates, check_script.REFERENCE], options)
    gpus.end()
    alone = found["candidates"].pop()
    judged = [_judged(task, each) for each in found["candidates"]]
    if end_to_end is not None:
        for each in judged:
            if each.accepted:
                each.end_to_end = end_to_end(each.found["candidate"], task)
    times = {row["workload"]: float(np.median(row["times_ns"]["reference"])) for row in alone["timed"]}
    peaks = {str(device): make_peaks(device) for device in used} if times else {}
    return JudgeReport(task, found["reference"], sorted(judged, key=Judged.rank_key), peaks, times, gpus.rows())


def _judged(task: dict[str, Any], found: dict[str, Any]) -> Judged:
    judged = Judged(found)
    calls = {each["name"]: each["calls"] for each in task["workloads"]}
    rounds = min((row["rounds"] for row in found["timed"]), default=0)
    whole = {side: np.zeros(rounds) for side in ("reference", "candidate")}
    for row in found["timed"]:
        times = {side: np.array(row["times_ns"][side], np.float64) for side in whole}
        judged.workloads[row["workload"]] = compare_pairs(times["reference"], times["candidate"])
        for side, total in whole.items():
            total += calls[row["workload"]] * times[side][:rounds]
    if rounds:
        judged.whole = compare_pairs(whole["reference"], whole["candidate"])
    return judged
