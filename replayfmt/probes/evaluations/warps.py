"""`warps`: how long the warps of a launch took, how many were active over time, and its tail.

From records of the kind `block_sched`, one for each warp, or for each block where a block has one record. Each SM
counts from its own first start. The tail begins when the number of active warps falls below half of its peak for the
last time. With a second recording, of the same kernel while others shared the device, the two are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from replayfmt.probes.recordings.results import ProbeSection

from .block_times import Numbers, Progress, read_block_times, unwatched
from .distribution import Distribution
from .tables import Cell, ResultTable, Unmeasured

TAIL_BELOW = 0.5
_MOST_TICKS = 1 << 20


@dataclass(frozen=True)
class WarpActivity:
    """One recording. `active[k]` and `finished[k]`: warps active in, and finished by the end of, the k-th tick of
    `tick_cycles`."""

    name: str
    warps: int
    active: Numbers
    finished: Numbers
    tick_cycles: int
    tail_start_cycles: int
    span_cycles: int
    elapsed: Distribution


@dataclass(frozen=True)
class WarpsResult:
    """One recording, or two to compare."""

    sources: tuple[str, ...]
    tables: tuple[ResultTable, ...]
    notes: tuple[str, ...]
    recordings: tuple[WarpActivity, ...]
    kind: str = "warps"


def evaluate_warps(recordings: Sequence[tuple[str, ProbeSection]], progress: Progress = unwatched) -> WarpsResult:
    """Evaluate one recording, or two to compare the second with the first; each with its name. Raises
    InvalidRecording."""
    found = [_activity(name, section, progress) for name, section in recordings]
    rows = [row for _activity_of_it, row in found]
    tables = [ResultTable("recordings", tuple(rows[0]), [tuple(row.values()) for row in rows])]
    if len(found) == 2:
        tables.append(_comparison(*rows))
    notes = [
        "cycles count from the first start on the same SM; clocks of different SMs are not compared",
        f"the tail begins when active warps fall below {TAIL_BELOW:.0%} of their peak for the last time",
    ]
    if any(row["warps_not_recorded"] for row in rows):
        notes.append("warps without a record are in no figure")
    sources = tuple(section.path for _name, section in recordings)
    return WarpsResult(sources, tuple(tables), tuple(notes), tuple(each for each, _row in found))


def _activity(name: str, section: ProbeSection, progress: Progress) -> tuple[WarpActivity, dict[str, Cell]]:
    times = read_block_times(section, by="warp", progress=progress)
    tick = max(1, -(-times.span_cycles // _MOST_TICKS))
    ticks = -(-times.span_cycles // tick) + 1
    change, ended = np.zeros(ticks, np.int64), np.zeros(ticks, np.int64)
    elapsed = Distribution()
    for here in times.on_sms():
        ends = np.bincount(here.end // tick, minlength=ticks)
        change += np.bincount(here.start // tick, minlength=ticks) - ends
        ended += ends
        elapsed.add(here.end - here.start)
    active, finished = np.cumsum(change)[:-1], np.cumsum(ended)[1:]
    peak = int(active.max()) if active.size else 0
    high = np.flatnonzero(active >= TAIL_BELOW * peak) if peak else np.empty(0, np.int64)
    tail = min(times.span_cycles, (int(high[-1]) + 1) * tick) if high.size else 0
    found = WarpActivity(name, times.count, active, finished, tick, tail, times.span_cycles, elapsed)
    return found, _figures(found, times.missing, len(times.sms), section)


def _figures(found: WarpActivity, missing: int, sms: int, section: ProbeSection) -> dict[str, Cell]:
    span = found.span_cycles
    instant = Unmeasured("the launch took no cycles")
    rows_of_a_block = section.length // section.launch.blocks // 16
    in_tail = found.active[found.tail_start_cycles // found.tick_cycles :]

    def reached(share: float) -> Cell:
        if not span:
            return instant
        place = int(np.searchsorted(found.finished, share * found.warps))
        return min(span, (place + 1) * found.tick_cycles)

    return {
        "recording": found.name,
        "warps": found.warps,
        "warps_not_recorded": missing,
        "threads_of_a_record": -(-section.launch.threads // rows_of_a_block),
        "sms": sms,
        "span_cycles": span,
        **found.elapsed.figures("elapsed", "cycles", "no warp"),
        "active_peak_warps": int(found.active.max()) if span else instant,
        "active_mean_warps": found.elapsed.total / span if span else instant,
        "throughput_mean_warps_per_kilocycle": 1000 * found.warps / span if span else instant,
        "half_finished_after_cycles": reached(0.5),
        "nine_tenths_finished_after_cycles": reached(0.9),
        "tail_start_cycles": found.tail_start_cycles if span else instant,
        "tail_share": (span - found.tail_start_cycles) / span if span else instant,
        "tail_active_mean_warps": float(in_tail.mean()) if in_tail.size else Unmeasured("there is no tail"),
        "resolution_cycles": found.tick_cycles,
    }


def _comparison(exclusive: dict[str, Cell], shared: dict[str, Cell]) -> ResultTable:
    """Every figure that both have, and how many times larger the second is."""
    rows: list[tuple[Cell, ...]] = []
    for name in list(exclusive)[5:-1]:
        one, other = exclusive[name], shared[name]
        ratio: Cell = Unmeasured("one of them is not measured")
        if isinstance(one, int | float) and isinstance(other, int | float):
            ratio = other / one if one else Unmeasured("the first is 0")
        rows.append((name, one, other, ratio))
    names = (str(exclusive["recording"]), str(shared["recording"]))
    return ResultTable(f"{names[1]} against {names[0]}", ("figure", *names, "ratio"), rows)
