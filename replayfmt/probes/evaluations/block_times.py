"""When each block or warp of a launch ran on its SM, from records of the kind `block_sched`.

Each SM has a clock of its own, so times are cycles since the first start on the same SM. A clock that began again at 0
during the launch (at 2**64, or at 2**32 where a probe saved 32 bits of it) goes on instead. A record of zeros was never
written: its block or warp is counted as not recorded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from replayfmt.errors import InvalidRecording
from replayfmt.probes.recordings.files import damaged
from replayfmt.probes.recordings.results import BLOCK_SCHED, ProbeSection, Structured, chunks

Numbers = np.ndarray[Any, np.dtype[Any]]
Progress = Callable[[int, int], None]  # done, of how much
MOST_SMS = 1 << 14
_MOST_CYCLES = 1 << 62  # a launch of decades
_IN_MEMORY_BYTES = 1 << 26


def unwatched(_done: int, _total: int) -> None:
    """Nobody asked for progress."""


@dataclass(frozen=True)
class OnSm:
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

    def on_sms(self) -> Iterator[OnSm]:
        """What ran on each SM, in the order of their numbers; in memory for one SM at a time."""
        for sm in self.sms:
            yield self._on(sm)

    def _on(self, sm: int) -> OnSm:
        numbers = np.flatnonzero(self._sm == sm)
        start, _wrapped = _since_first(self._start[numbers])
        order = np.argsort(start, kind="stable")
        start = start[order]
        return OnSm(sm, numbers[order], start, start + self._cycles[numbers][order])


def read_block_times(section: ProbeSection, *, by: str = "block", progress: Progress = unwatched) -> BlockTimes:
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
    sm = np.where(_written(records), np.minimum(records["sm"][:, :, 0], 0x7FFFFFFF), -1).astype(np.int32)
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
    since = start - first
    return (since & np.uint64(around - 1)).astype(np.int64), wrapped


def _scratch(count: int, kind: str) -> Numbers:
    """An array to fill: in memory, or in a file without a name where it is large."""
    if count * np.dtype(kind).itemsize <= _IN_MEMORY_BYTES:
        return np.empty(count, kind)
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, kind, "w+", shape=(count,))
