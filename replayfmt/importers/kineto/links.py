"""Which launch and which operator each piece of device work of a profiler trace belongs to, by ids.

CUDA's exports give a launch and its kernel one correlation id of their own. Exports of some ROCm builds have none, and
link both by an "External id", of which there are two kinds: that of the operator around the launch, which several
launches share, or a number of the launch's own, which an operator elsewhere may have, too. So the id that links more
work to one launch each is taken first, and an operator is only taken by its id where launches lie inside the operators
that their ids name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .events import Launches, TraceEvents

ROUNDING_NS = 1000  # clocks of whole microseconds, and microseconds since 1970 in a double
# An external id names all calls of a device's runtime inside an operator, whether they can launch anything or not.
_LAUNCHING = re.compile("launch|memcpy|memset|enqueue|append", re.IGNORECASE)
_SHARED = "of device work have a {} that several {} have; each is taken for the last of these that began before it"
_OUTSIDE = (
    "of device work have the external id of an operator, but launches with such ids lie outside of the "
    "operators that have them; they are linked to none"
)


@dataclass
class Links:
    """By piece of work; -1: none. `by_graph`: the launch is that of a graph, whose work belongs to no operator."""

    launch: np.ndarray
    op: np.ndarray
    by_graph: np.ndarray


def link(events: TraceEvents, launch_op: np.ndarray, annotations: np.ndarray) -> Links:
    """Link a trace's device work. `launch_op` is the operator around each launch on its thread, -1: none, `annotations`
    a mask of the operator events that are none. What is odd is added to `events.problems`."""
    launches, count = events.launches, len(events.work.start)
    starts = _array(events.work.start)
    links = Links(np.full(count, -1, np.int64), np.full(count, -1, np.int64), np.zeros(count, bool))
    external = _ids(events.work.external)
    keys = []
    none = 0 if launches.correlation.count(0) > 1 else -1  # what stands for no correlation
    for name, ids, wanted in (
        ("correlation id", _ids(launches.correlation, none), _ids(events.work.correlation, none)),
        ("external id", _launching(launches), external),
    ):
        keys.append((name, _latest(ids, _array(launches.start), launch_op, wanted, starts)))
    first, second = sorted(keys, key=lambda key: -int((key[1].found & ~key[1].shared).sum()))
    _take(events, links, *first, first[1].found)
    # The other id is trusted only where it leaves nothing open.
    _take(events, links, *second, second[1].found & ~second[1].shared & (links.launch < 0))
    launched = links.launch >= 0
    links.by_graph[launched] = np.asarray(launches.graph, bool)[links.launch[launched]]
    links.op[launched] = launch_op[links.launch[launched]]
    _by_operators_ids(events, links, np.where(annotations, -1, _ids(events.ops.external)), external)
    links.op[links.by_graph] = -1
    return links


def _take(events: TraceEvents, links: Links, name: str, holders: _Holders, which: np.ndarray) -> None:
    links.launch[which] = holders.index[which]
    events.problems[_SHARED.format(name, "launches")] += int((holders.shared & which).sum())


def _by_operators_ids(events: TraceEvents, links: Links, ids: np.ndarray, external: np.ndarray) -> None:
    """Find operators by their ids for work whose launch has none around it, or is unknown."""
    launches = events.launches
    op_start, numbers = _array(events.ops.start), np.arange(len(ids))
    op_end = op_start + _array(events.ops.duration)
    launch_start = _array(launches.start)
    named = _latest(ids, op_start, numbers, _ids(launches.external), launch_start)
    inside = (
        named.found
        & (op_start[named.index] - ROUNDING_NS <= launch_start)
        & (launch_start <= op_end[named.index] + ROUNDING_NS)
        if len(ids)
        else named.found
    )
    # A launch that no operator of its thread is around: profilers number threads in more than one way.
    orphans = np.flatnonzero((links.launch >= 0) & (links.op < 0))
    orphans = orphans[inside[links.launch[orphans]]]
    links.op[orphans] = named.index[links.launch[orphans]]
    missing = np.where(links.launch < 0, external, -1)
    holders = _latest(ids, op_start, numbers, missing, _array(events.work.start))
    if 2 * int(inside.sum()) < int(named.found.sum()):
        events.problems[_OUTSIDE] += int(holders.found.sum())
        return
    events.problems[_SHARED.format("external id", "operators")] += int(holders.shared.sum())
    links.op[holders.found] = holders.index[holders.found]


def _array(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, np.int64)


def _ids(values: Sequence[int], none: int = 0) -> np.ndarray:
    """Ids, -1 where there is none: profilers write `none` there."""
    ids = _array(values)
    return np.where(ids == none, -1, ids)


def _launching(launches: Launches) -> np.ndarray:
    can = np.asarray([_LAUNCHING.search(name) is not None for name in launches.names], bool)
    return np.where(can[_array(launches.name)], _ids(launches.external), -1) if len(can) else np.zeros(0, np.int64)


@dataclass
class _Holders:
    """Who has each wanted id: `index`, -1 where `found` is false. `shared`: several do, with different meanings."""

    found: np.ndarray
    index: np.ndarray
    shared: np.ndarray


def _latest(
    ids: np.ndarray, starts: np.ndarray, meaning: np.ndarray, wanted: np.ndarray, before: np.ndarray
) -> _Holders:
    """Of the holders of each wanted id (-1: none is wanted) the last one that started before a time, or else the
    first."""
    by_id = np.argsort(ids, kind="stable")
    held = ids[by_id]
    begins = np.flatnonzero(np.concatenate(([True], held[1:] != held[:-1]))) if len(held) else held
    group = np.searchsorted(held[begins], wanted)
    found = (wanted >= 0) & (group < len(begins))
    found[found] = held[begins[group[found]]] == wanted[found]
    chosen, shared = np.full(len(wanted), -1, np.int64), np.zeros(len(wanted), bool)
    if not found.any():
        return _Holders(found, chosen, shared)
    differ = np.minimum.reduceat(meaning[by_id], begins) != np.maximum.reduceat(meaning[by_id], begins)
    # Holders and those who want one in one order, by id and time: the last holder before each is the one.
    keys, times = np.concatenate((ids, wanted[found])), np.concatenate((starts, before[found]))
    order = np.lexsort((np.arange(len(keys)) >= len(ids), times, keys))
    holders = order < len(ids)
    last = np.maximum.accumulate(np.where(holders, np.arange(len(order)), -1))
    following = np.minimum.accumulate(np.where(holders, np.arange(len(order)), len(order))[::-1])[::-1]
    for_want = np.where((last >= 0) & (keys[order[last]] == keys[order]), last, np.minimum(following, len(order) - 1))
    chosen[np.flatnonzero(found)[order[~holders] - len(ids)]] = order[for_want[~holders]]
    shared[found] = differ[group[found]]
    return _Holders(found, chosen, shared)
