"""`memory`: how much memory probes needed beside the program's own, by model and test.

From `stdout.log` (`max memory: …`, the program's peak) and `event.log` (`[exec] probe-mem N (bytes)` of each launch) of
runs; without any log, predicted from a launch's shape and the size of a record.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from replayfmt.errors import CaptureNotFound, UsageError
from replayfmt.probes.recordings.logs import read_event_log, read_peak_memory
from replayfmt.probes.recordings.results import MOST_THREADS, WARP_SIZE, LaunchShape, Level

from .tables import Cell, ResultTable, Unmeasured

_PREDICTION = re.compile(r"(.+):(\d+),(\d+),(\d+):(\d+),(\d+),(\d+):(\d+)(?::(thread|warp))?$")
_COLUMNS = (
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
class MemoryResult:
    """Runs, then predictions."""

    sources: tuple[str, ...]
    tables: tuple[ResultTable, ...]
    notes: tuple[str, ...]
    runs: tuple[ProbeMemory, ...]
    predictions: tuple[PredictedLaunch, ...]
    kind: str = "memory"


def evaluate_memory(
    runs: Sequence[tuple[str | None, str]], predictions: Sequence[PredictedLaunch] = ()
) -> MemoryResult:
    """Evaluate folders of runs, each with the name MODEL/TEST; without one, those of its last two folders. Raises
    CaptureNotFound, InvalidRecording."""
    found = _most_of_each(_run(label, Path(path)) for label, path in runs)
    tables = []
    if found:
        tables.append(ResultTable("by model and test", _COLUMNS, [_row(each) for each in found]))
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
    return MemoryResult(sources, tuple(tables), tuple(notes), found, tuple(predictions))


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


def _row(each: ProbeMemory) -> tuple[Cell, ...]:
    peak: Cell = Unmeasured("no `max memory:` in stdout.log") if each.peak_bytes is None else each.peak_bytes
    probe: Cell = Unmeasured("no `[exec] probe-mem` in event.log") if each.probe_bytes is None else each.probe_bytes
    share: Cell = Unmeasured("one of them is not measured")
    if isinstance(peak, int) and isinstance(probe, int):
        share = probe / peak if peak else Unmeasured("the program's peak is 0")
    kernel: Cell = each.kernel or Unmeasured("the log does not name it")
    return each.model, each.test or Unmeasured("no name was given"), peak, probe, share, each.launches, kernel
