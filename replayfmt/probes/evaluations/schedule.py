"""`schedule`: how the blocks of a launch were placed on the SMs, and what it cost to start them.

On each SM, blocks are taken in the order of their starts. A block takes the slot whose latest block ended last of those
that had ended by its start, else a new slot. Its cost is the time from that end to its start: the cycles in which the
slot waited for a block.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from dataclasses import dataclass
from typing import Any

import numpy as np

from replayfmt.probes.recordings.results import ProbeSection

from .block_times import BlockTimes, Numbers, OnSm, Progress, read_block_times, unwatched
from .distribution import Distribution
from .tables import Cell, ResultTable, Unmeasured

_LISTED = 20
TIME_BINS = 600
_ONE_WAVE = "no slot ran a second block"


@dataclass(frozen=True)
class SmSchedule:
    """One SM. `slot` and `cost` of its blocks in the order of `blocks`; the cost of a slot's first block is -1."""

    blocks: OnSm
    slot: Numbers
    cost: Numbers

    @property
    def slots(self) -> int:
        return int(self.slot.max()) + 1

    @property
    def running_cycles(self) -> int:
        return int((self.blocks.end - self.blocks.start).sum())

    @property
    def scheduling_cycles(self) -> int:
        return int(self.cost[self.cost >= 0].sum())


@dataclass(frozen=True)
class ScheduleResult:
    """`occupied[i, j]`: blocks on SM `sms[i]` on average in the j-th of TIME_BINS equal parts of `span_cycles`.
    `costliest`: the SM with the largest sum of costs. `costs` in cycles."""

    sources: tuple[str, ...]
    tables: tuple[ResultTable, ...]
    notes: tuple[str, ...]
    sms: tuple[int, ...]
    span_cycles: int
    occupied: Numbers
    costliest: SmSchedule
    costs: Distribution
    kind: str = "schedule"


def evaluate_schedule(section: ProbeSection, progress: Progress = unwatched) -> ScheduleResult:
    """Evaluate the `block_sched` records of a launch. Raises InvalidRecording."""
    times = read_block_times(section, progress=lambda done, blocks: progress(done, 2 * blocks))
    costs, elapsed = Distribution(), Distribution()
    rows: list[tuple[Cell, ...]] = []
    worst: list[tuple[int, int, tuple[Cell, ...]]] = []
    occupied = np.empty((len(times.sms), TIME_BINS))
    edges = np.linspace(0, max(times.span_cycles, 1), TIME_BINS + 1)
    costliest: SmSchedule | None = None
    running = scheduling = done = 0
    for place, blocks in enumerate(times.on_sms()):
        here = SmSchedule(blocks, *place_in_slots(blocks))
        costs.add(here.cost[here.cost >= 0])
        elapsed.add(blocks.end - blocks.start)
        rows.append(_sm_row(here))
        worst = heapq.nlargest(_LISTED, [*worst, *_worst(here, section)])
        occupied[place] = _occupied(blocks, edges)
        running, scheduling = running + here.running_cycles, scheduling + here.scheduling_cycles
        if costliest is None or here.scheduling_cycles > costliest.scheduling_cycles:
            costliest = here
        done += len(blocks.number)
        progress(times.count + done, 2 * times.count)
    assert costliest is not None  # there is an SM: read_block_times saw to it
    limit = _outlier_limit(costs)
    outliers = costs.above(limit) if costs.count else 0
    whole: dict[str, Cell] = {
        "blocks": section.launch.blocks,
        "blocks_not_recorded": times.missing,
        "warps_not_recorded": times.rows_missing,
        "sms": len(times.sms),
        "slots_most_on_an_sm": max(int(row[2]) for row in rows),  # type: ignore[arg-type]
        "span_cycles": times.span_cycles,
        "running_cycles": running,
        "scheduling_cycles": scheduling if costs.count else Unmeasured(_ONE_WAVE),
        "scheduling_share": _share(scheduling, running, costs.count),
        "running_mean_of_an_sm_cycles": running / len(times.sms),
        "scheduling_mean_of_an_sm_cycles": scheduling / len(times.sms) if costs.count else Unmeasured(_ONE_WAVE),
        "costs": costs.count,
        **costs.figures("cost", "cycles", _ONE_WAVE),
        "cost_outliers": outliers if costs.count else Unmeasured(_ONE_WAVE),
        "cost_outlier_above_cycles": limit if costs.count else Unmeasured(_ONE_WAVE),
        **elapsed.figures("elapsed", "cycles", "no block"),
    }
    listed = [row for cost, _number, row in worst if cost > limit and costs.count]
    tables = (
        ResultTable("whole launch", tuple(whole), [tuple(whole.values())]),
        ResultTable("by SM", _SM_COLUMNS, rows),
        ResultTable("largest costs (outliers)", _OUTLIER_COLUMNS, listed, outliers - len(listed)),
    )
    return ScheduleResult(
        (section.path,), tables, _notes(times), times.sms, times.span_cycles, occupied, costliest, costs
    )


def place_in_slots(blocks: OnSm) -> tuple[Numbers, Numbers]:
    """The slot of each block and its cost in cycles, -1 for the first of a slot."""
    slots, costs = np.empty(len(blocks.start), np.int32), np.empty(len(blocks.start), np.int64)
    free: list[tuple[int, int]] = []  # end of the latest block of each slot, and the slot; ascending
    for place, (start, end) in enumerate(zip(blocks.start.tolist(), blocks.end.tolist(), strict=True)):
        latest = bisect_right(free, (start, len(free))) - 1
        if latest >= 0:
            before, slot = free.pop(latest)
            costs[place] = start - before
        else:
            slot, costs[place] = len(free), -1
        slots[place] = slot
        insort(free, (end, slot))
    return slots, costs


_SM_COLUMNS = (
    "sm", "blocks", "slots", "span_cycles", "running_cycles", "scheduling_cycles", "scheduling_share",
    "cost_mean_cycles", "cost_max_cycles",
)  # fmt: skip
_OUTLIER_COLUMNS = (
    "block", "block_x", "block_y", "block_z", "sm", "slot", "start_cycles", "elapsed_cycles", "cost_cycles"
)  # fmt: skip


def _sm_row(here: SmSchedule) -> tuple[Cell, ...]:
    costs = here.cost[here.cost >= 0]
    measured = bool(costs.size)
    return (
        here.blocks.sm,
        len(here.blocks.number),
        here.slots,
        int(here.blocks.end.max()),
        here.running_cycles,
        here.scheduling_cycles if measured else Unmeasured(_ONE_WAVE),
        _share(here.scheduling_cycles, here.running_cycles, len(costs)),
        float(costs.mean()) if measured else Unmeasured(_ONE_WAVE),
        int(costs.max()) if measured else Unmeasured(_ONE_WAVE),
    )


def _share(scheduling: int, running: int, costs: int) -> Cell:
    if not costs:
        return Unmeasured(_ONE_WAVE)
    return scheduling / (running + scheduling) if running + scheduling else Unmeasured("blocks of no cycles")


def _outlier_limit(costs: Distribution) -> int:
    """Tukey's far fence: three interquartile ranges above the upper quartile."""
    if not costs.count:
        return 0
    upper = costs.quantile(0.75)
    return upper + 3 * (upper - costs.quantile(0.25))


def _worst(here: SmSchedule, section: ProbeSection) -> list[tuple[int, int, tuple[Cell, ...]]]:
    """The largest costs on an SM, with the row of each."""
    found: list[tuple[int, int, tuple[Cell, ...]]] = []
    for place in np.argsort(here.cost)[-_LISTED:].tolist():
        number, start, end = (int(each[place]) for each in (here.blocks.number, here.blocks.start, here.blocks.end))
        cost, slot = int(here.cost[place]), int(here.slot[place])
        x, y, z = section.launch.position(number)
        found.append((cost, -number, (number, x, y, z, here.blocks.sm, slot, start, end - start, cost)))
    return found


def _occupied(blocks: OnSm, edges: Numbers) -> Numbers:
    """How many blocks ran, on average, between successive edges."""

    def run_by(moments: Numbers) -> Any:
        """Block-cycles by each edge that moments count: the sum of edge - moment over the moments before it."""
        ordered = np.sort(moments)
        before = np.searchsorted(ordered, edges)
        return edges * before - np.concatenate([[0], np.cumsum(ordered)])[before]

    return np.diff(run_by(blocks.start) - run_by(blocks.end)) / np.diff(edges)


def _notes(times: BlockTimes) -> tuple[str, ...]:
    notes = [
        "scheduling_share is scheduling_cycles / (running_cycles + scheduling_cycles); the first block of a slot costs "
        "nothing",
        "each SM has a clock of its own: start_cycles and span_cycles count from the first start on the same SM",
    ]
    if times.missing:
        notes.append(f"{times.missing:,} blocks have no record and are in no sum")
    if times.rows_missing:
        notes.append(
            f"{times.rows_missing:,} warps of recorded blocks have no record; their blocks may have lasted longer"
        )
    if times.wrapped_sms:
        notes.append(f"the clock of {times.wrapped_sms:,} SMs began again at 0 during the launch, and is continued")
    return tuple(notes)
