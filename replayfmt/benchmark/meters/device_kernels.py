"""Whether the ops of a replay launch the device kernels that the capture says they launched.

Imported captures know the kernels of each op, with their grids. `compare_kernels` runs each such op once more under the
profiler, after a call that lets libraries choose their kernels, and compares. A different kernel of the same operator
is not an error: other library versions and devices use other kernels, which explains differing times.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch.profiler import profile, record_function, supported_activities

from replayfmt.errors import UsageError
from replayfmt.importers.common.json_stream import JsonStream
from replayfmt.importers.kineto.events import TraceEvents
from replayfmt.importers.kineto.tree import build
from replayfmt.pytorch.accelerators import synchronize
from replayfmt.replay.plan import Plan
from replayfmt.replay.run.isolated import IsolatedOp

from .profiling import device_activities

FLAG = "--compare-kernels"
_MARK = "opreplay op "
KernelVerdictName = Literal["MATCH", "DIFFERENT", "UNKNOWN"]
# Runs its body under a profiler and writes a trace to a path.
Tracing = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Launched:
    """A device kernel, copy or fill. `grid` and `block` are None if they are unknown, and for copies."""

    name: str
    grid: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None

    def __str__(self) -> str:
        shape = f" grid {list(self.grid)}" if self.grid else ""
        return self.name + shape + (f" block {list(self.block)}" if self.block else "")


@dataclass(frozen=True)
class KernelVerdict:
    """One op: MATCH, DIFFERENT, or UNKNOWN with the reason."""

    ordinal: int
    op: str
    verdict: KernelVerdictName
    captured: tuple[Launched, ...] = ()
    replayed: tuple[Launched, ...] = ()
    reason: str = ""

    def row(self) -> dict[str, Any]:
        """As a JSON object."""
        row: dict[str, Any] = {
            "kind": "device_kernels",
            "ordinal": self.ordinal,
            "op": self.op,
            "verdict": self.verdict,
            "captured": [vars(each) for each in self.captured],
        }
        return row | (
            {"reason": self.reason}
            if self.verdict == "UNKNOWN"
            else {"replayed": [vars(each) for each in self.replayed]}
        )

    def __str__(self) -> str:
        text = f"{self.verdict:<9} ordinal {self.ordinal} ({self.op})"
        if self.verdict == "DIFFERENT":
            captured, replayed = Counter(self.captured), Counter(self.replayed)
            text += f": captured {_listed(captured - replayed)}; replayed {_listed(replayed - captured)}"
        return f"{text}: {self.reason}" if self.reason else text


def captured_kernels(annotation: Mapping[str, Any] | None) -> tuple[Launched, ...] | None:
    """The device kernels that a record's annotation says its op launched, None if it does not mention any."""
    rows = (annotation or {}).get("device_kernels")
    if not isinstance(rows, list) or (annotation or {}).get("device_kernels_left_out"):
        return None
    return tuple(
        Launched(str(row.get("name")), _triple(row.get("grid")), _triple(row.get("block")))
        for row in rows
        if isinstance(row, dict)
    )


def judge(captured: Iterable[Launched], replayed: Iterable[Launched]) -> KernelVerdictName:
    """MATCH if the same kernels ran, each as often and with the same grid, in any order."""
    return "MATCH" if Counter(captured) == Counter(replayed) else "DIFFERENT"


def check_device(plan: Plan) -> None:
    """Raises UsageError if a plan uses no device whose kernels can be compared."""
    if not device_activities(plan.devices):
        raise UsageError(
            f"{FLAG}: the replay uses {', '.join(map(str, plan.devices)) or 'no device'}, and no accelerator "
            "whose kernels torch's profiler shows; expected one, such as --device=cuda:0"
        )


def kernels_of(plan: Plan) -> dict[int, tuple[Launched, ...]]:
    """The device kernels that the capture names, by the ordinal of their op. Raises UsageError if it names none."""
    captured = dict(_captured(plan))
    if not captured:
        raise UsageError(
            f"{FLAG}: {plan.reader.path} has no device kernels for its ops; imported profiler "
            "traces with device work do"
        )
    return captured


def compare_kernels(
    plan: Plan, captured: Mapping[int, tuple[Launched, ...]], tracing: Tracing | None = None
) -> list[KernelVerdict]:
    """A verdict for each op that `kernels_of` returns, in capture order. The plan must be made with keep_going."""
    tracing = tracing or traced
    failed: dict[int, str] = {}

    def run(op: IsolatedOp) -> None:
        if op.ordinal not in captured:
            return
        try:
            op.call()  # libraries choose, compile and allocate at the first call
            op.restore()
            synchronize()  # so that the profiler sees launched work end
            with record_function(f"{_MARK}{op.ordinal}"):
                op.call()
            synchronize()
        except Exception as error:  # any operator may fail in any way
            failed[op.ordinal] = f"it failed: {type(error).__name__}: {error}".partition("\n")[0]

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernels.json")
        with tracing(path):
            verdicts = plan.examine(run)
        launched = replayed_kernels(path)
    reasons = {each.ordinal: each.reason or each.verdict for each in verdicts if each.verdict in ("refused", "skipped")}
    return [
        _verdict(plan, ordinal, kernels, launched, failed.get(ordinal) or reasons.get(ordinal, ""))
        for ordinal, kernels in sorted(captured.items())
    ]


def _captured(plan: Plan) -> Iterator[tuple[int, tuple[Launched, ...]]]:
    reader = plan.reader
    if not reader.summary.annotated:
        return
    for ordinal in range(reader.record_count):
        record = reader.record(ordinal)
        if record.kind.name == "op":
            kernels = captured_kernels(record.annotation)
            if kernels is not None:
                yield ordinal, kernels


def _verdict(
    plan: Plan, ordinal: int, captured: tuple[Launched, ...], launched: Mapping[int, list[Launched]], reason: str
) -> KernelVerdict:
    name = plan.describe(ordinal)[0]
    if reason:
        return KernelVerdict(ordinal, name, "UNKNOWN", captured, reason=reason)
    replayed = tuple(launched.get(ordinal, ()))
    return KernelVerdict(ordinal, name, judge(captured, replayed), captured, replayed)


def replayed_kernels(path: str | os.PathLike[str]) -> dict[int, list[Launched]]:
    """The device work in a trace by the ordinal that its op was marked with."""
    with JsonStream.open(path) as stream:
        events = TraceEvents().read(stream)
    marks = np.asarray([events.kinds[kind].name.startswith(_MARK) for kind in events.ops.kind], bool)
    tree = build(events, marks)
    found: dict[int, list[Launched]] = defaultdict(list)
    order = sorted(range(len(events.work.start)), key=events.work.start.__getitem__)
    for index in order:
        launch = int(tree.work_launch[index])
        mark = int(tree.launch_scope[launch]) if launch >= 0 else -1
        if mark >= 0:
            kind = events.work_kinds[events.work.kind[index]]
            ordinal = int(events.kinds[events.ops.kind[mark]].name.removeprefix(_MARK))
            found[ordinal].append(Launched(kind.name, kind.grid, kind.block))
    return found


@contextmanager
def traced(path: str) -> Iterator[None]:
    """Run under torch's profiler, with device work, and write its trace."""
    with profile(activities=supported_activities()) as profiler:
        yield
    Path(path).unlink(missing_ok=True)
    profiler.export_chrome_trace(path)


def _triple(value: Any) -> tuple[int, ...] | None:
    return tuple(value) if isinstance(value, list) and all(isinstance(each, int) for each in value) else None


def _listed(kernels: Counter[Launched]) -> str:
    return ", ".join(f"{kernel}{f' x {count}' if count > 1 else ''}" for kernel, count in kernels.items()) or "nothing"
