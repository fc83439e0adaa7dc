"""`overhead`: what each probe cost each kernel: time, registers, spilled registers.

From the event log of runs that measured (`[benchmark]` lines) and from what ptxas printed. Before is the kernel without
the probe, assembled in the same way (`pruned`, else `original`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from replayfmt.errors import InvalidRecording
from replayfmt.probes.recordings.folders import TraceFolder
from replayfmt.probes.recordings.logs import LoggedLaunch, PtxasFigures, read_event_log, read_ptxas_log

from .tables import Cell, ResultTable, Unmeasured

_UNNAMED = "(not named in the log)"
_COLUMNS = (
    "probe", "kernel", "launches", "launches_failed", "original_mean_ms", "probed_mean_ms", "slowdown_mean",
    "slowdown_stdev", "slowdown_min", "slowdown_max", "registers_before", "registers_after", "registers_added",
    "spill_stores_before_bytes", "spill_stores_after_bytes", "spill_loads_before_bytes", "spill_loads_after_bytes",
)  # fmt: skip


@dataclass
class KernelOverhead:
    """What is known of one kernel with one probe. `slowdowns`: probed over original, of each launch."""

    probe: str
    kernel: str
    original_ms: list[float] = field(default_factory=list)
    probed_ms: list[float] = field(default_factory=list)
    failed: int = 0
    before: PtxasFigures | None = None
    after: PtxasFigures | None = None

    @property
    def slowdowns(self) -> list[float]:
        return [probed / original for probed, original in zip(self.probed_ms, self.original_ms, strict=True)]


@dataclass(frozen=True)
class OverheadResult:
    """The kernels in the order of the logs."""

    sources: tuple[str, ...]
    tables: tuple[ResultTable, ...]
    notes: tuple[str, ...]
    kernels: tuple[KernelOverhead, ...]
    kind: str = "overhead"


def evaluate_overhead(files: Sequence[tuple[str | None, str]]) -> OverheadResult:
    """Evaluate folders of runs, event logs and logs of ptxas, each with the name of its probe; without one, that of the
    folder. Raises CaptureNotFound, InvalidRecording."""
    found: dict[tuple[str, str], KernelOverhead] = {}
    unmeasured = 0
    for label, path in files:
        if Path(path).is_dir():
            folder = TraceFolder.open(path)
            probe = label or folder.path.resolve().name
            logs = [folder.event_log] if folder.event_log else []
            logs += [each / "process.log" for each in folder.kernels if (each / "process.log").is_file()]
            used = [_read(found, probe, each) for each in logs]
            if not any(used):
                raise InvalidRecording(f"{path}: expected [benchmark] lines or figures of ptxas in its logs, got none")
        else:
            used = [_read(found, label or Path(path).resolve().parent.name, Path(path))]
            if not used[0]:
                raise InvalidRecording(f"{path}: expected [benchmark] lines or figures of ptxas, got none")
        unmeasured += sum(each.without_times for each in used if each)
    kernels = tuple(found.values())
    tables = (
        ResultTable("by probe and kernel", _COLUMNS, [_row(each) for each in kernels]),
        ResultTable("by probe", _PROBE_COLUMNS, _probes(kernels)),
    )
    notes = [
        "slowdown: time of the kernel with its probe over without, of each launch; stdev over the launches",
        "a probe's slowdown_of_all is the sum of the probed times over the sum of the original ones",
    ]
    if unmeasured:
        notes.append(f"{unmeasured:,} launches have no [benchmark] line and are in no figure")
    return OverheadResult(tuple(path for _label, path in files), tables, tuple(notes), kernels)


@dataclass(frozen=True)
class _LogUse:
    """A log that had something to tell."""

    without_times: int = 0


def _read(found: dict[tuple[str, str], KernelOverhead], probe: str, path: Path) -> _LogUse | None:
    def of(kernel: str) -> KernelOverhead:
        return found.setdefault((probe, kernel), KernelOverhead(probe, kernel))

    figures = read_ptxas_log(path)
    for kernel in dict.fromkeys(name for each in figures.values() for name in each):
        of(kernel).after = figures.get("probed", {}).get(kernel) or of(kernel).after
        before = figures.get("pruned", {}).get(kernel) or figures.get("original", {}).get(kernel)
        of(kernel).before = before or of(kernel).before
    launches = read_event_log(path).launches
    measured = [launch for launch in launches if launch.times]
    for launch in measured:
        _add(of(launch.kernel or _UNNAMED), launch)
    return _LogUse(len(launches) - len(measured)) if figures or measured else None


def _add(kernel: KernelOverhead, launch: LoggedLaunch) -> None:
    assert launch.times
    original, probed = launch.times.original_ms, launch.times.kernel_ms
    if launch.failed or not (math.isfinite(original) and math.isfinite(probed) and original > 0 and probed >= 0):
        kernel.failed += 1
    else:
        kernel.original_ms.append(original)
        kernel.probed_ms.append(probed)


def _row(each: KernelOverhead) -> tuple[Cell, ...]:
    slowdowns = each.slowdowns
    none = Unmeasured("no launch of it was measured")
    stdev: Cell = none
    if slowdowns:
        stdev = statistics.stdev(slowdowns) if len(slowdowns) > 1 else Unmeasured("only one launch")
    return (
        each.probe,
        each.kernel,
        len(slowdowns),
        each.failed,
        statistics.fmean(each.original_ms) if slowdowns else none,
        statistics.fmean(each.probed_ms) if slowdowns else none,
        statistics.fmean(slowdowns) if slowdowns else none,
        stdev,
        min(slowdowns) if slowdowns else none,
        max(slowdowns) if slowdowns else none,
        *_ptxas_cells(each.before, each.after),
    )


def _ptxas_cells(before: PtxasFigures | None, after: PtxasFigures | None) -> list[Cell]:
    def cell(figures: PtxasFigures | None, name: str) -> Cell:
        value = getattr(figures, name) if figures else None
        return Unmeasured("ptxas does not say it") if value is None else int(value)

    registers = [cell(before, "registers"), cell(after, "registers")]
    one, other = registers
    added = other - one if isinstance(one, int) and isinstance(other, int) else Unmeasured("ptxas does not say both")
    return [
        *registers,
        added,
        *(cell(each, f"spill_{way}_bytes") for way in ("stores", "loads") for each in (before, after)),
    ]


_PROBE_COLUMNS = ("probe", "kernels", "launches", "slowdown_of_all", "slowdown_geometric_mean", "registers_added_mean")


def _probes(kernels: Sequence[KernelOverhead]) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = []
    for probe in dict.fromkeys(each.probe for each in kernels):
        its = [each for each in kernels if each.probe == probe]
        timed = [each for each in its if each.slowdowns]
        none = Unmeasured("no launch was measured")
        means = [statistics.fmean(each.slowdowns) for each in timed]
        added = [cell for each in its if isinstance(cell := _ptxas_cells(each.before, each.after)[2], int)]
        geometric: Cell = none
        if means:
            geometric = statistics.geometric_mean(means) if min(means) > 0 else Unmeasured("one took no time")
        rows.append(
            (
                probe,
                len(its),
                sum(len(each.slowdowns) for each in timed),
                sum(sum(each.probed_ms) for each in timed) / sum(sum(each.original_ms) for each in timed)
                if timed
                else none,
                geometric,
                statistics.fmean(added) if added else Unmeasured("ptxas does not say both"),
            )
        )
    return rows
