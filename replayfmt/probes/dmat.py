"""`dmat`: which pages of memory a launch accessed when, how often it came back to them, and its working set.

From a `.dmat` file or records of (clock, address), brought together to pages of 64 KiB. Accesses to one page at one
clock are one access with a count. Where there are more different (clock, page) than fit, clocks are rounded down to a
multiple of `clock_step_cycles`; 1 means that nothing was rounded.

The reuse distance of an access is how many other pages were accessed since the last access to its page; accesses at one
clock count as ordered by address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from replayfmt.errors import InvalidRecording

from .recordings import DMAT, PAGE_BYTES, AccessMap, ProbeSection, TensorAddresses
from .schedule import Numbers, Progress, no_progress
from .tables import Cell, Distribution, Evaluated, ResultTable, Unmeasured

MAP_CLOCKS, MAP_PAGES, WINDOWS = 240, 160, 60
MOST_TENSORS = 5
OTHER, UNKNOWN = "other tensors", "unknown memory"
_AT_ONCE = 1 << 19
_MOST_PAIRS = 1 << 21
_MOST_CYCLES = 1 << 53
_UNWRITTEN = np.uint64(0xFFFFFFFFFFFFFFFF)


@dataclass(frozen=True)
class DmatResult(Evaluated):
    """`density[i, j, k]`: accesses to memory of `owners[i]`, in the j-th part of the touched pages and the k-th of the
    time, which is `span_cycles` long. `working_set`: pages in each of WINDOWS windows of time."""

    density: Numbers
    owners: tuple[str, ...]
    pages: int
    span_cycles: int
    working_set: Numbers
    distances: Distribution


def evaluate_dmat(
    source: AccessMap | ProbeSection, tensors: Sequence[TensorAddresses] | None = None, progress: Progress = no_progress
) -> DmatResult:
    """Evaluate a `.dmat` file or `dmat` records; `tensors`: what lies where. Raises InvalidRecording."""
    pairs = _Pairs()
    if isinstance(source, AccessMap):
        for part in source.accesses(lambda done: progress(done, source.nbytes)):
            part = part[(part["clock"] != 0) | (part["page"] != 0)]  # never written, as below
            pairs.add(part["clock"], part["page"], part["count"])
    else:
        records = source.records(DMAT).reshape(-1)
        for first in range(0, len(records), _AT_ONCE):
            part = records[first : first + _AT_ONCE]
            clock, address = part["clock"].copy(), part["address"].copy()
            written = (clock != _UNWRITTEN) & ((clock != 0) | (address != 0))
            page = address[written] & ~np.uint64(PAGE_BYTES - 1)
            pairs.add(clock[written], page, np.ones(len(page), np.uint64))
            progress(first + len(part), len(records))
    pairs.reduce()
    if not pairs.count.size:
        raise InvalidRecording(f"{source.path}: expected accesses to memory, got none: the probe saved nothing")
    return _evaluated(source.path, pairs, tensors)


class _Pairs:
    """Different (clock, page) with their counts, ordered by clock and page; at most _MOST_PAIRS once reduced."""

    def __init__(self) -> None:
        self.step = 1
        self.clock, self.page, self.count = (np.empty(0, np.uint64) for _ in range(3))
        self._waiting: list[tuple[Numbers, Numbers, Numbers]] = []
        self._pending = 0

    def add(self, clock: Numbers, page: Numbers, count: Numbers) -> None:
        self._waiting.append((clock // np.uint64(self.step), page, count))
        self._pending += len(clock)
        if self._pending > _MOST_PAIRS // 2:
            self.reduce()

    def reduce(self) -> None:
        parts = [(self.clock, self.page, self.count), *self._waiting]
        self.clock, self.page, self.count = (np.concatenate(each) for each in zip(*parts, strict=True))
        self._waiting, self._pending = [], 0
        self._unite()
        while len(self.clock) > _MOST_PAIRS:
            self.step *= 2
            self.clock = self.clock // np.uint64(2)
            self._unite()

    def _unite(self) -> None:
        if not self.clock.size:
            return
        order = np.lexsort((self.page, self.clock))
        clock, page = self.clock[order], self.page[order]
        first = np.flatnonzero(np.concatenate([[True], (clock[1:] != clock[:-1]) | (page[1:] != page[:-1])]))
        self.clock, self.page = clock[first], page[first]
        self.count = np.add.reduceat(self.count[order], first)


def _evaluated(path: str, pairs: _Pairs, tensors: Sequence[TensorAddresses] | None) -> DmatResult:
    pages, number = np.unique(pairs.page, return_inverse=True)
    span = (int(pairs.clock[-1]) - int(pairs.clock[0]) + 1) * pairs.step
    if span > _MOST_CYCLES:
        raise InvalidRecording(
            f"{path}: expected clocks within {_MOST_CYCLES:,} cycles of each other, got {span:,}; these are not clocks"
        )
    since = (pairs.clock - pairs.clock[0]).astype(np.int64) * pairs.step
    counts = pairs.count.astype(np.int64)
    before = _previous(number)
    again = np.flatnonzero(before >= 0)
    distances, gaps = Distribution(), Distribution()
    distances.add(_distances(before)[again])
    gaps.add((since[again] - since[before[again]]).astype(np.int64))
    owner, names = _owners(pages, tensors)
    window = since * WINDOWS // span
    working_set, new = _working_set(window, number, before, len(pages))
    per_page = np.bincount(number, minlength=len(pages))
    none = "no page was accessed at two clocks"
    whole: dict[str, Cell] = {
        "accesses": int(counts.sum()),
        "touched_pages": len(pages),
        "touched_bytes": len(pages) * PAGE_BYTES,
        "revisited_pages": int((per_page > 1).sum()),
        "reuses": len(again),
        "span_cycles": span,
        "clock_step_cycles": pairs.step,
        **distances.figures("reuse_distance", "pages", none),
        **gaps.figures("reuse", "cycles", none),
        "window_cycles": span / WINDOWS,
        "working_set_mean_pages": float(working_set.mean()),
        "working_set_max_pages": int(working_set.max()),
    }
    accesses = np.bincount(window, counts, WINDOWS).astype(np.int64)
    over_time: list[tuple[Cell, ...]] = [
        (place * span / WINDOWS, int(working_set[place]), int(new[place]), int(accesses[place]))
        for place in range(WINDOWS)
    ]
    by_owner = _by_owner(names, owner, number, counts, per_page, tensors)
    shown = _shown(by_owner, names)
    tables = (
        ResultTable("whole launch", tuple(whole), [tuple(whole.values())]),
        ResultTable(
            "by tensor",
            ("tensor", "shape", "size_bytes", "touched_pages", "revisited_pages", "accesses", "access_share"),
            by_owner,
        ),
        ResultTable("working set over time", ("start_cycles", "pages", "new_pages", "accesses"), over_time),
    )
    density = _density(since, span, number, len(pages), counts, owner, names, shown)
    notes = [
        f"a page has {PAGE_BYTES:,} bytes; cycles count from the first access, by each thread's own clock",
        "reuse_distance_pages: other pages accessed since the last access to the same page",
    ]
    if pairs.step > 1:
        notes.append(f"clocks are rounded down to multiples of {pairs.step:,} cycles, to fit into memory")
    if tensors is None:
        notes.append("no list of tensors was given (tensor.trace in the folder of the run, or --tensors=FILE)")
    return DmatResult("dmat",
        (path,), tables, tuple(notes), density, shown, len(pages), span, working_set, distances
    )  # fmt: skip


def _previous(number: Numbers) -> Numbers:
    """For each access the place of the one before it to the same page; -1: there is none."""
    order = np.argsort(number, kind="stable")
    before = np.full(len(number), -1, np.int64)
    same = number[order][1:] == number[order][:-1]
    before[order[1:][same]] = order[:-1][same]
    return before


def _distances(before: Numbers) -> Numbers:
    """For each access, how many other pages were accessed since the one before it to the same page.

    Between the two, each other page counts once: at its first access in between, which is one whose own predecessor is
    not in between. All accesses up to the predecessor have theirs earlier still, so it is enough to count, among all
    earlier accesses, those with an earlier or no predecessor.
    """
    size = len(before)
    by_value = np.argsort(before, kind="stable")
    smaller = np.zeros(size, np.int64)
    for level in range(max(1, (size - 1).bit_length())):
        # Of each pair of neighbouring runs of 2**level accesses: for each of the later run, those of the earlier run.
        order = by_value[np.argsort(by_value >> (level + 1), kind="stable")]
        earlier = (order >> level) & 1 == 0
        counted = np.cumsum(earlier)
        run = order >> (level + 1)
        first = np.searchsorted(run, run)
        counted_before = counted[first] - earlier[first]
        later = ~earlier
        smaller[order[later]] += (counted - counted_before)[later]
    return smaller - (before + 1)


def _owners(pages: Numbers, tensors: Sequence[TensorAddresses] | None) -> tuple[Numbers, list[str]]:
    """The tensor of each page, as a number of a list of names: the one with most bytes on it."""
    names = [tensor.name for tensor in tensors or ()] + [UNKNOWN]
    owner = np.full(len(pages), len(names) - 1, np.int64)
    most = np.zeros(len(pages), np.int64)
    for place, tensor in enumerate(tensors or ()):
        last = min(tensor.begin + tensor.nbytes, 1 << 64) - 1
        if last < tensor.begin:
            continue
        first_page = np.uint64(tensor.begin // PAGE_BYTES * PAGE_BYTES)
        inside = slice(
            int(np.searchsorted(pages, first_page)), int(np.searchsorted(pages, np.uint64(last), side="right"))
        )
        at = pages[inside]
        covered = np.minimum(at | np.uint64(PAGE_BYTES - 1), np.uint64(last)) - np.maximum(at, np.uint64(tensor.begin))
        better = covered.astype(np.int64) + 1 > most[inside]
        most[inside][better] = covered[better] + np.uint64(1)
        owner[inside][better] = place
    return owner, names


def _working_set(window: Numbers, number: Numbers, before: Numbers, pages: int) -> tuple[Numbers, Numbers]:
    """Pages accessed in each window of time, and those accessed there for the first time."""
    different = np.unique(window * pages + number)
    return np.bincount(different // pages, minlength=WINDOWS), np.bincount(window[before < 0], minlength=WINDOWS)


def _by_owner(
    names: list[str],
    owner: Numbers,
    number: Numbers,
    counts: Numbers,
    per_page: Numbers,
    tensors: Sequence[TensorAddresses] | None,
) -> list[tuple[Cell, ...]]:
    """Rows of those that own a touched page, the most accessed first."""
    accesses = np.bincount(owner[number], counts, len(names)).astype(np.int64)
    touched = np.bincount(owner, minlength=len(names))
    revisited = np.bincount(owner[per_page > 1], minlength=len(names))
    rows: list[tuple[Cell, ...]] = []
    for place in np.argsort(-accesses, kind="stable").tolist():
        if touched[place]:
            known = tensors[place] if tensors and place < len(tensors) else None
            missing = Unmeasured("not in the list of tensors")
            rows.append(
                (
                    names[place],
                    known.shape if known else missing,
                    known.nbytes if known else missing,
                    int(touched[place]),
                    int(revisited[place]),
                    int(accesses[place]),
                    float(accesses[place] / max(1, int(counts.sum()))),
                )
            )
    return rows


def _shown(rows: list[tuple[Cell, ...]], names: list[str]) -> tuple[str, ...]:
    """Whose memory has a colour of its own: the most accessed, then all the others and what no tensor owns."""
    known = [str(row[0]) for row in rows if row[0] != UNKNOWN]
    unique = list(dict.fromkeys(known))
    return (
        *unique[:MOST_TENSORS],
        *([OTHER] if len(unique) > MOST_TENSORS else []),
        *([UNKNOWN] if any(row[0] == UNKNOWN for row in rows) else []),
    )


def _density(
    since: Numbers, span: int, number: Numbers, pages: int, counts: Numbers, owner: Numbers, names: list[str],
    shown: tuple[str, ...],
) -> Numbers:  # fmt: skip
    rows, columns = min(MAP_PAGES, pages), min(MAP_CLOCKS, span)
    layer_of = np.array(
        [shown.index(name) if name in shown else shown.index(OTHER) if OTHER in shown else 0 for name in names]
    )
    layer = layer_of[owner[number]]
    cell = (layer * rows + number * rows // pages) * columns + since * columns // span
    return np.bincount(cell, counts, len(shown) * rows * columns).reshape(len(shown), rows, columns)
