"""`schedule` and `warps`: when the blocks and warps of a launch ran on their SMs, from records of `block_sched`.

Each SM has a clock of its own, so times are cycles since the first start on the same SM. A clock that began again at 0
during the launch (at 2**64, or at 2**32 where a probe saved 32 bits of it) goes on instead. A record of zeros was never
written.

`schedule`: on each SM, blocks are taken in the order of their starts. A block takes the slot whose latest block ended
last of those that had ended by its start, else a new slot. Its cost is the time from that end to its start.

`warps`: how long the warps took, how many were active over time, and the tail, which begins when the number of active
warps falls below half of its peak for the last time.
"""

from __future__ import annotations

import heapq
import tempfile
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from replayfmt.errors import InvalidRecording

from .recordings import BLOCK_SCHED, ProbeSection, Structured, chunks, damaged
from .tables import Cell, Distribution, Evaluated, ResultTable, Unmeasured

Numbers = np.ndarray[Any, np.dtype[Any]]
Progress = Callable[[int, int], None]  # done, of how much
MOST_SMS = 1 << 14
_MOST_CYCLES = 1 << 62  # a launch of decades
_IN_MEMORY_BYTES = 1 << 26


def no_progress(_done: int, _total: int) -> None:
    """Nobody asked for progress."""


@dataclass(frozen=True)
class SmTimeline:
    """What ran on one SM, ordered by start. `number`: of the block (for warps: block × warps of a block + warp).
    Times in cycles since the first start here."""

    sm: int
    number: Numbers
    start: Numbers
    end: Numbers


@dataclass
class BlockTimes:
    """All blocks, or all warps, of a launch. `span_cycles`: the longest time from the first start to the last end on
    one SM. `rows_missing`: warps of recorded blocks without a record of their own."""

    section: ProbeSection
    missing: int
    rows_missing: int
    sms: tuple[int, ...]
    wrapped_sms: int
    span_cycles: int
    _sm: Numbers
    _start: Numbers
    _cycles: Numbers

    @property
    def count(self) -> int:
        """How many are recorded."""
        return len(self._sm) - self.missing

    def on_sms(self) -> Iterator[SmTimeline]:
        """What ran on each SM, in the order of their numbers; in memory for one SM at a time."""
        for sm in self.sms:
            yield self._on(sm)

    def _on(self, sm: int) -> SmTimeline:
        numbers = np.flatnonzero(self._sm == sm)
        start, _wrapped = _since_first(self._start[numbers])
        order = np.argsort(start, kind="stable")
        start = start[order]
        return SmTimeline(sm, numbers[order], start, start + self._cycles[numbers][order])


def read_block_times(section: ProbeSection, *, by: str = "block", progress: Progress = no_progress) -> BlockTimes:
    """Read the records of a section; `by` "block" or "warp". Raises InvalidRecording."""
    records = section.records(BLOCK_SCHED)
    blocks, rows = records.shape[:2]
    total = blocks if by == "block" else blocks * rows
    narrow = max((int(part["start"].max()) for part in chunks(records)), default=0) < 1 << 32
    sm, start, cycles = (_scratch(total, kind) for kind in ("<i4", "<u8", "<i8"))
    missing = rows_missing = first = 0
    for part in chunks(records):
        found = _blocks_of(section, part, first, narrow) if by == "block" else _rows_of(part)
        size = len(found[0])
        place = slice(first if by == "block" else first * rows, (first if by == "block" else first * rows) + size)
        sm[place], start[place], cycles[place] = found
        missing += int((found[0] < 0).sum())
        if by == "block":
            rows_missing += int((~_written(part)[found[0] >= 0]).sum())
        first += len(part)
        progress(first, blocks)
    sms = np.unique(sm)
    sms = sms[sms >= 0]
    if not sms.size:
        raise InvalidRecording(
            f"{section.path}: section {section.index}: expected records, got zeros alone: the probe saved nothing"
        )
    if int(sms[-1]) >= MOST_SMS:
        block = int(np.flatnonzero(sm >= MOST_SMS)[0])
        raise damaged(
            section.path,
            section.offset + records.dtype.itemsize * block * (rows if by == "block" else 1),
            f"an SM below {MOST_SMS}",
            f"{int(sm[block])}; these are the records of another probe",
        )
    times = BlockTimes(section, missing, rows_missing, tuple(map(int, sms)), 0, 0, sm, start, cycles)
    for number in times.sms:
        since, wrapped = _since_first(start[sm == number])
        if int(since.max()) > _MOST_CYCLES or int(since.min()) < 0:
            raise damaged(
                section.path,
                section.offset,
                f"starts on SM {number} within {_MOST_CYCLES} cycles",
                "others; these are the records of another probe, or damaged",
            )
        times.wrapped_sms += wrapped
        times.span_cycles = max(times.span_cycles, int(times._on(number).end.max()))
    return times


def _written(records: Structured) -> Numbers:
    """Which rows hold a record: an array (blocks, rows)."""
    return ((records["start"] != 0) | (records["elapsed"] != 0))[:, :, 0]


def _rows_of(records: Structured) -> tuple[Numbers, Numbers, Numbers]:
    """SM (-1: not recorded), start and cycles of each row."""
    sm = np.where(_written(records), np.minimum(records["sm"][:, :, 0], 0x7FFFFFFF).astype(np.int32), -1)
    return sm.ravel(), records["start"].ravel(), records["elapsed"].astype(np.int64).ravel()


def _blocks_of(
    section: ProbeSection, records: Structured, first: int, narrow: bool
) -> tuple[Numbers, Numbers, Numbers]:
    """The same of each block: from the smallest start to the largest end of its rows."""
    written = _written(records)
    any_written, leader = written.any(axis=1), written.argmax(axis=1)
    each = np.arange(len(records))
    sms = records["sm"][:, :, 0]
    sm = np.minimum(sms[each, leader], 0x7FFFFFFF).astype(np.int32)
    apart = written & (np.minimum(sms, 0x7FFFFFFF) != sm[:, None])
    if apart.any():
        block, row = map(int, np.argwhere(apart)[0])
        raise damaged(
            section.path,
            section.offset + ((first + block) * records.shape[1] + row) * records.dtype.itemsize,
            f"warps of block {first + block} on one SM, {int(sms[block, leader[block]])}",
            f"one on SM {int(sms[block, row])}",
        )
    reference = records["start"][each, leader, 0]
    later = (records["start"][:, :, 0] - reference[:, None]).view(np.int64)
    if narrow:  # a clock of 32 bits: what seems 2**31 cycles away is close, beyond the wrap
        later = (later + (1 << 31)) % (1 << 32) - (1 << 31)
    begin = np.where(written, later, np.iinfo(np.int64).max).min(axis=1)
    ends = later + records["elapsed"][:, :, 0].astype(np.int64)
    end = np.where(written, ends, np.iinfo(np.int64).min).max(axis=1)
    begin, end = np.where(any_written, begin, 0), np.where(any_written, end, 0)
    start = reference + begin.view(np.uint64)
    return np.where(any_written, sm, -1), start & np.uint64(0xFFFFFFFF) if narrow else start, end - begin


def _since_first(start: Numbers) -> tuple[Numbers, bool]:
    """Clocks of one SM as cycles since the first of them, and whether the clock began again at 0 in between.

    A launch takes less than half of what a clock can count, so the largest gap between starts, around the circle, is
    that between the last and the first.
    """
    ordered = np.sort(start)
    around = 1 << 32 if int(ordered[-1]) < 1 << 32 else 1 << 64
    first = ordered[0]
    wrapped = False
    if len(ordered) > 1:
        gaps = ordered[1:] - ordered[:-1]
        largest = int(gaps.argmax())
        if int(gaps[largest]) > around // 2:
            first, wrapped = ordered[largest + 1], True
    return ((start - first) & np.uint64(around - 1)).astype(np.int64), wrapped


def _scratch(count: int, kind: str) -> Numbers:
    """An array to fill: in memory, or in a file without a name where it is large."""
    if count * np.dtype(kind).itemsize <= _IN_MEMORY_BYTES:
        return np.empty(count, kind)
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, kind, "w+", shape=(count,))


_LISTED = 20
TIME_BINS = 600
_ONE_WAVE = "no slot ran a second block"


@dataclass(frozen=True)
class SmSchedule:
    """One SM. `slot` and `cost` of its blocks in the order of `blocks`; the cost of a slot's first block is -1."""

    blocks: SmTimeline
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
class ScheduleResult(Evaluated):
    """`occupied[i, j]`: blocks on SM `sms[i]` on average in the j-th of TIME_BINS equal parts of `span_cycles`.
    `costliest`: the SM with the largest sum of costs. `costs` in cycles."""

    sms: tuple[int, ...]
    span_cycles: int
    occupied: Numbers
    costliest: SmSchedule
    costs: Distribution


def evaluate_schedule(section: ProbeSection, progress: Progress = no_progress) -> ScheduleResult:
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
        "schedule", (section.path,), tables, _notes(times), times.sms, times.span_cycles, occupied, costliest, costs
    )


def place_in_slots(blocks: SmTimeline) -> tuple[Numbers, Numbers]:
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


def _occupied(blocks: SmTimeline, edges: Numbers) -> Numbers:
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
class WarpsResult(Evaluated):
    """One recording, or two to compare."""

    recordings: tuple[WarpActivity, ...]


def evaluate_warps(recordings: Sequence[tuple[str, ProbeSection]], progress: Progress = no_progress) -> WarpsResult:
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
    return WarpsResult("warps", sources, tuple(tables), tuple(notes), tuple(each for each, _row in found))


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
