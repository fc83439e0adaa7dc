"""What probes cost: `overhead` (time and registers), `memory`, and `latency`; and `gmem_bytes`, `tensorop_count` and
`progress`: what each thread counted, or when it passed its branches.

`overhead` reads the event log of runs that measured (`[benchmark]` lines) and what ptxas printed. Before is the kernel
without the probe, assembled in the same way (`pruned`, else `original`). `memory` reads `stdout.log` (`max memory: …`,
the program's peak) and `event.log` (`[exec] probe-mem N (bytes)` of each launch) of runs; without any log, it is
predicted from a launch's shape and the size of a record. `latency` reads a CSV file with the columns probe, original,
ncu, neutrino, prologue, kernel and epilogue: times in one unit. All figures are ratios to the original.

A thread that counted nothing and one that was not recorded look the same in a recording of counts: both are 0. Each SM
has a clock of its own, so cycles are those between two samples of one thread.
"""

from __future__ import annotations

import csv
import math
import os
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest
from pathlib import Path

import numpy as np

from replayfmt.errors import CaptureNotFound, InvalidRecording, UsageError

from .recordings import (
    MOST_THREADS,
    WARP_SIZE,
    LaunchShape,
    Level,
    LoggedLaunch,
    ProbeSection,
    PtxasFigures,
    RecordLayout,
    Structured,
    TraceFolder,
    chunks,
    lines,
    read_event_log,
    read_peak_memory,
    read_ptxas_log,
)
from .tables import Cell, Distribution, Evaluated, ResultTable, Unmeasured

_UNNAMED = "(not named in the log)"
_OVERHEAD_COLUMNS = (
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
class OverheadResult(Evaluated):
    """The kernels in the order of the logs."""

    kernels: tuple[KernelOverhead, ...]


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
            if used.count(None) == len(used):
                raise InvalidRecording(f"{path}: expected [benchmark] lines or figures of ptxas in its logs, got none")
        else:
            used = [_read(found, label or Path(path).resolve().parent.name, Path(path))]
            if used[0] is None:
                raise InvalidRecording(f"{path}: expected [benchmark] lines or figures of ptxas, got none")
        unmeasured += sum(each for each in used if each is not None)
    kernels = tuple(found.values())
    tables = (
        ResultTable("by probe and kernel", _OVERHEAD_COLUMNS, [_overhead_row(each) for each in kernels]),
        ResultTable("by probe", _PROBE_COLUMNS, _probes(kernels)),
    )
    notes = [
        "slowdown: time of the kernel with its probe over without, of each launch; stdev over the launches",
        "a probe's slowdown_of_all is the sum of the probed times over the sum of the original ones",
    ]
    if unmeasured:
        notes.append(f"{unmeasured:,} launches have no [benchmark] line and are in no figure")
    return OverheadResult("overhead", tuple(path for _label, path in files), tables, tuple(notes), kernels)


def _read(found: dict[tuple[str, str], KernelOverhead], probe: str, path: Path) -> int | None:
    """Take what a log has to tell; how many launches it has no times of, None if it tells nothing."""

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
    return len(launches) - len(measured) if figures or measured else None


def _add(kernel: KernelOverhead, launch: LoggedLaunch) -> None:
    assert launch.times
    original, probed = launch.times.original_ms, launch.times.kernel_ms
    if launch.failed or not (math.isfinite(original) and math.isfinite(probed) and original > 0 and probed >= 0):
        kernel.failed += 1
    else:
        kernel.original_ms.append(original)
        kernel.probed_ms.append(probed)


def _overhead_row(each: KernelOverhead) -> tuple[Cell, ...]:
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


_PREDICTION = re.compile(r"(.+):(\d+),(\d+),(\d+):(\d+),(\d+),(\d+):(\d+)(?::(thread|warp))?$")
_MEMORY_COLUMNS = (
    "model",
    "test",
    "program_peak_bytes",
    "probe_most_bytes",
    "probe_share_of_peak",
    "launches",
    "kernel_of_most",
)


def predicted_bytes(launch: LaunchShape, record_bytes: int, level: Level = "thread", records: int = 1) -> int:
    """What a probe saves in one launch: a row of `records` records of `record_bytes` bytes for each thread or warp."""
    return launch.blocks * launch.rows(WARP_SIZE if level == "warp" else 1) * record_bytes * records


@dataclass(frozen=True)
class PredictedLaunch:
    """A launch whose probe's memory is to be predicted."""

    name: str
    launch: LaunchShape
    record_bytes: int
    level: Level = "thread"

    @classmethod
    def parse(cls, text: str) -> PredictedLaunch:
        """`NAME:GX,GY,GZ:BX,BY,BZ:BYTES[:warp]`. Raises UsageError."""
        found = _PREDICTION.match(text)
        numbers = [int(each) for each in found.groups()[1:8]] if found else []
        if not found or 0 in numbers or numbers[3] * numbers[4] * numbers[5] > MOST_THREADS:
            raise UsageError(
                f"--predict={text}: expected NAME:GX,GY,GZ:BX,BY,BZ:BYTES or …:BYTES:warp, each number at least 1 and "
                f"a block of at most {MOST_THREADS} threads"
            )
        x, y, z, i, j, k, size = numbers
        return cls(found[1], LaunchShape((x, y, z), (i, j, k)), size, "warp" if found[9] == "warp" else "thread")

    @property
    def nbytes(self) -> int:
        return predicted_bytes(self.launch, self.record_bytes, self.level)


@dataclass(frozen=True)
class ProbeMemory:
    """One run: the program's peak, and the most that probes needed in one launch. None where its logs do not tell."""

    model: str
    test: str
    peak_bytes: int | None
    probe_bytes: int | None
    launches: int
    kernel: str | None


@dataclass(frozen=True)
class MemoryResult(Evaluated):
    """Runs, then predictions."""

    runs: tuple[ProbeMemory, ...]
    predictions: tuple[PredictedLaunch, ...]


def evaluate_memory(
    runs: Sequence[tuple[str | None, str]], predictions: Sequence[PredictedLaunch] = ()
) -> MemoryResult:
    """Evaluate folders of runs, each with the name MODEL/TEST; without one, those of its last two folders. Raises
    CaptureNotFound, InvalidRecording."""
    found = _most_of_each(_run(label, Path(path)) for label, path in runs)
    tables = []
    if found:
        tables.append(ResultTable("by model and test", _MEMORY_COLUMNS, [_memory_row(each) for each in found]))
    if predictions:
        rows: list[tuple[Cell, ...]] = [
            (each.name, each.launch.blocks, each.launch.threads, each.record_bytes, each.level, each.nbytes)
            for each in predictions
        ]
        columns = ("launch", "blocks", "threads_of_a_block", "record_bytes", "by", "predicted_bytes")
        tables.append(ResultTable("predicted", columns, rows))
    notes = ["probe_most_bytes: of the launch that needed most; program_peak_bytes as the program printed it"]
    if len(found) < len(runs):
        notes.append("of several runs of a model and test the most of each; launches are those of all of them")
    if predictions:
        notes.append("predicted_bytes: blocks × threads (or warps) of a block × record_bytes")
    sources = tuple(path for _label, path in runs) or tuple(each.name for each in predictions)
    return MemoryResult("memory", sources, tuple(tables), tuple(notes), found, tuple(predictions))


def _run(label: str | None, folder: Path) -> ProbeMemory:
    if not folder.is_dir():
        raise CaptureNotFound(
            f"{folder}: is not a directory; expected the folder of a run with stdout.log or event.log"
        )
    stdout = folder / "stdout.log"
    events = sorted([*folder.glob("event.log"), *folder.glob("*/event.log")])
    if not stdout.is_file() and not events:
        raise CaptureNotFound(f"{folder}: has no stdout.log and no event.log; expected those of a run")
    model, _, test = (label or "/".join(folder.resolve().parts[-2:])).partition("/")
    launches = [launch for each in events for launch in read_event_log(each).launches]
    most = max((each for each in launches if each.probe_bytes is not None), key=_needed, default=None)
    return ProbeMemory(
        model,
        test,
        read_peak_memory(stdout) if stdout.is_file() else None,
        most.probe_bytes if most else None,
        len(launches),
        most.kernel if most else None,
    )


def _most_of_each(runs: Iterable[ProbeMemory]) -> tuple[ProbeMemory, ...]:
    """One for each model and test: the most of its runs, and all of their launches."""
    found: dict[tuple[str, str], ProbeMemory] = {}
    for run in runs:
        known = found.get((run.model, run.test))
        if known is not None:
            peaks = [each.peak_bytes for each in (known, run) if each.peak_bytes is not None]
            most = max((known, run), key=_needed)
            launches = known.launches + run.launches
            run = replace(most, peak_bytes=max(peaks, default=None), launches=launches)
        found[run.model, run.test] = run
    return tuple(found.values())


def _needed(launch: object) -> int:
    return int(getattr(launch, "probe_bytes", 0) or 0)


def _memory_row(each: ProbeMemory) -> tuple[Cell, ...]:
    peak: Cell = Unmeasured("no `max memory:` in stdout.log") if each.peak_bytes is None else each.peak_bytes
    probe: Cell = Unmeasured("no `[exec] probe-mem` in event.log") if each.probe_bytes is None else each.probe_bytes
    share: Cell = Unmeasured("one of them is not measured")
    if isinstance(peak, int) and isinstance(probe, int):
        share = probe / peak if peak else Unmeasured("the program's peak is 0")
    kernel: Cell = each.kernel or Unmeasured("the log does not name it")
    return each.model, each.test or Unmeasured("no name was given"), peak, probe, share, each.launches, kernel


COLUMNS = ("probe", "original", "ncu", "neutrino", "prologue", "kernel", "epilogue")
PARTS = ("prologue", "kernel", "epilogue")


@dataclass(frozen=True)
class ExposedLatency:
    """One probe: ratios to the original by column; None where the file has none."""

    probe: str
    ratios: dict[str, float | None]

    @property
    def parts_sum(self) -> float | None:
        found = [self.ratios[part] for part in PARTS]
        return None if None in found else math.fsum(each for each in found if each is not None)


@dataclass(frozen=True)
class LatencyResult(Evaluated):
    """Probes in the order of the file."""

    probes: tuple[ExposedLatency, ...]


def evaluate_latency(path: str | os.PathLike[str]) -> LatencyResult:
    """Evaluate a CSV file. Raises CaptureNotFound, InvalidRecording with the line and column."""
    reader = csv.reader(lines(path), strict=True)
    try:
        head = [name.strip().lower() for name in next(reader, [])]
        missing = [name for name in COLUMNS if head.count(name) != 1]
        if missing:
            raise _wrong(path, 1, f"the columns {', '.join(COLUMNS)}", f"not {', '.join(missing)} (once)")
        probes = tuple(_probe(path, reader.line_num, head, row) for row in reader if any(each.strip() for each in row))
    except csv.Error as error:
        raise _wrong(path, reader.line_num, "comma-separated values", str(error)) from None
    if not probes:
        raise _wrong(path, 2, "a row for each probe", "none")
    columns = (
        "probe", "prologue_ratio", "kernel_ratio", "epilogue_ratio", "parts_sum_ratio", "neutrino_ratio", "ncu_ratio",
        "ncu_over_neutrino_ratio",
    )  # fmt: skip
    table = ResultTable("by probe", columns, [_latency_row(each) for each in probes])
    notes = (
        "ratios to the original's time; kernel_ratio is the slowdown of the kernel itself",
        "parts_sum_ratio is prologue + kernel + epilogue; neutrino_ratio what the file says of all of it",
    )
    return LatencyResult("latency", (os.fspath(path),), (table,), notes, probes)


def _wrong(path: str | os.PathLike[str], line: int, expected: str, got: str) -> InvalidRecording:
    return InvalidRecording(f"{os.fspath(path)}: line {line}: expected {expected}, got {got}")


def _probe(path: str | os.PathLike[str], line: int, head: list[str], row: list[str]) -> ExposedLatency:
    if len(row) != len(head):
        raise _wrong(path, line, f"{len(head)} fields", f"{len(row)}")
    fields = dict(zip(head, (each.strip() for each in row), strict=True))

    def time(name: str) -> float | None:
        if not fields[name]:
            return None
        try:
            value = float(fields[name])
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= 0):
            raise _wrong(path, line, f"a time as {name}", repr(fields[name])[:80])
        return value

    original = time("original")
    if not original:
        raise _wrong(path, line, "a time above 0 as original", repr(fields["original"])[:80])
    times = {name: time(name) for name in COLUMNS[2:]}
    ratios = {name: None if value is None else value / original for name, value in times.items()}
    return ExposedLatency(fields["probe"], ratios)


def _latency_row(each: ExposedLatency) -> tuple[Cell, ...]:
    none = Unmeasured("the file has no value")

    def cell(value: float | None) -> Cell:
        return none if value is None else value

    neutrino, ncu = each.ratios["neutrino"], each.ratios["ncu"]
    ahead: Cell = Unmeasured("one of them is not measured")
    if neutrino is not None and ncu is not None:
        ahead = ncu / neutrino if neutrino else Unmeasured("neutrino is 0")
    parts = [cell(each.ratios[part]) for part in PARTS]
    return each.probe, *parts, cell(each.parts_sum), cell(neutrino), cell(ncu), ahead


_LISTED = 20


def _counts(name: str, kind: str, *fields: str) -> RecordLayout:
    return RecordLayout(name, np.dtype([(field, kind) for field in fields]), "thread", single=True)


_BYTES = ("sync_bytes", "async_bytes")
# Of each kind the layouts of our probe and of Neutrino's.
LAYOUTS = {
    "gmem_bytes": (_counts("gmem_bytes", "<u8", *_BYTES), _counts("gmem_bytes", "<u4", *_BYTES)),
    "tensorop_count": (_counts("tensorop_count", "<u8", "count"),),
    "progress": (RecordLayout("progress", np.dtype([("clock", "<u8")]), "thread", single=False),),
}
_NOTES = {
    "gmem_bytes": "sync_bytes: loads and stores; async_bytes: cp.async; both of global memory, cached or not",
    "tensorop_count": "each thread counts the matrix instructions that it takes part in: a warp's 32 threads the same",
    "progress": "a sample for each branch that a thread reached; cycles between two samples of the same thread",
}


@dataclass(frozen=True)
class CountsResult(Evaluated):
    """`distributions`: what is drawn, by title."""

    distributions: dict[str, Distribution]


def evaluate_counts(kind: str, section: ProbeSection, progress: Callable[[int, int], None]) -> CountsResult:
    """Evaluate the records of such a probe. Raises InvalidRecording."""
    records = _records(kind, section)
    blocks, threads = records.shape[:2]
    names = ["samples"] if kind == "progress" else list(records.dtype.names or ())
    found = {name: Distribution() for name in names}
    steps = Distribution()
    worst: list[tuple[int, int]] = []
    done = 0
    for part in chunks(records):
        if kind == "progress":
            clocks = part["clock"]
            seen = clocks != 0
            values = {"samples": seen.sum(axis=2)}
            both = seen[:, :, 1:] & seen[:, :, :-1]
            steps.add((clocks[:, :, 1:] - clocks[:, :, :-1])[both].astype(np.int64))
        else:
            values = {name: part[name][:, :, 0].astype(np.int64) for name in names}
        for name, each in values.items():
            found[name].add(each.ravel())
        totals = sum(values.values()).sum(axis=1)
        worst = nlargest(_LISTED, [*worst, *zip(totals.tolist(), range(done, done + len(part)), strict=True)])
        done += len(part)
        progress(done, blocks)
    whole: dict[str, Cell] = {"blocks": blocks, "threads": blocks * threads}
    for name, each in found.items():
        whole |= {f"{name}_total": each.total, f"threads_with_{name}": each.above(0)}
        whole |= each.figures(name, "of_a_thread", "no thread")
    if kind == "progress":
        whole |= steps.figures("step", "cycles", "no thread has two samples")
        found["cycles between samples"] = steps
    unit = "samples" if kind == "progress" else "_and_".join(names)
    rows = [(block, *section.launch.position(block), total) for total, block in worst]
    tables = (
        ResultTable("whole launch", tuple(whole), [tuple(whole.values())]),
        ResultTable(
            "blocks with most", ("block", "block_x", "block_y", "block_z", unit), rows, max(0, blocks - len(rows))
        ),
    )
    return CountsResult(kind, (section.path,), tables, (_NOTES[kind],), found)


def _records(kind: str, section: ProbeSection) -> Structured:
    first: InvalidRecording | None = None
    for layout in LAYOUTS[kind]:
        try:
            return section.records(layout)
        except InvalidRecording as error:
            first = first or error
    assert first is not None
    raise first
