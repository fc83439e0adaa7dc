"""`latency`: how much longer a program waits for a kernel because of a probe, beside what Nsight Compute takes.

From a CSV file with the columns probe, original, ncu, neutrino, prologue, kernel and epilogue: times in one unit. All
figures are ratios to the original.
"""

from __future__ import annotations

import csv
import math
import os
from dataclasses import dataclass

from replayfmt.errors import InvalidRecording
from replayfmt.probes.recordings.files import lines

from .tables import Cell, ResultTable, Unmeasured

COLUMNS = ("probe", "original", "ncu", "neutrino", "prologue", "kernel", "epilogue")
PARTS = ("prologue", "kernel", "epilogue")


@dataclass(frozen=True)
class ExposedLatency:
    """One probe: ratios to the original by column; None where the file has none."""

    probe: str
    ratios: dict[str, float | None]

    @property
    def parts_sum(self) -> float | None:
        """Prologue, kernel and epilogue together."""
        found = [self.ratios[part] for part in PARTS]
        return None if None in found else math.fsum(each for each in found if each is not None)


@dataclass(frozen=True)
class LatencyResult:
    """Probes in the order of the file."""

    sources: tuple[str, ...]
    tables: tuple[ResultTable, ...]
    notes: tuple[str, ...]
    probes: tuple[ExposedLatency, ...]
    kind: str = "latency"


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
    table = ResultTable("by probe", columns, [_row(each) for each in probes])
    notes = (
        "ratios to the original's time; kernel_ratio is the slowdown of the kernel itself",
        "parts_sum_ratio is prologue + kernel + epilogue; neutrino_ratio what the file says of all of it",
    )
    return LatencyResult((os.fspath(path),), (table,), notes, probes)


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


def _row(each: ExposedLatency) -> tuple[Cell, ...]:
    none = Unmeasured("the file has no value")

    def cell(value: float | None) -> Cell:
        return none if value is None else value

    neutrino, ncu = each.ratios["neutrino"], each.ratios["ncu"]
    ahead: Cell = Unmeasured("one of them is not measured")
    if neutrino is not None and ncu is not None:
        ahead = ncu / neutrino if neutrino else Unmeasured("neutrino is 0")
    parts = [cell(each.ratios[part]) for part in PARTS]
    return each.probe, *parts, cell(each.parts_sum), cell(neutrino), cell(ncu), ahead
