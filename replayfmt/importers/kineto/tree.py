"""Callers, launchers, and the calls that represent the work, in a profiler trace.

Events of one thread nest by time. A kernel belongs to the innermost operator running when it was launched. `link` finds
its launch by ids: CUDA's exports give a launch and its kernel one correlation id of their own; exports of some ROCm
builds have none, and link both by an "External id". `select` then chooses operators that cover every piece of work
once: no operator is chosen inside another one.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from ..common.operators import FUSED_LAYER, is_part
from ..common.options import Level
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
    starts = _id_array(events.work.start)
    links = Links(np.full(count, -1, np.int64), np.full(count, -1, np.int64), np.zeros(count, bool))
    external = _ids(events.work.external)
    keys = []
    none = 0 if launches.correlation.count(0) > 1 else -1  # what stands for no correlation
    for name, ids, wanted in (
        ("correlation id", _ids(launches.correlation, none), _ids(events.work.correlation, none)),
        ("external id", _launching_operators(launches), external),
    ):
        keys.append((name, _latest(ids, _id_array(launches.start), launch_op, wanted, starts)))
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
    op_start, numbers = _id_array(events.ops.start), np.arange(len(ids))
    op_end = op_start + _id_array(events.ops.duration)
    launch_start = _id_array(launches.start)
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
    holders = _latest(ids, op_start, numbers, missing, _id_array(events.work.start))
    if 2 * int(inside.sum()) < int(named.found.sum()):
        events.problems[_OUTSIDE] += int(holders.found.sum())
        return
    events.problems[_SHARED.format("external id", "operators")] += int(holders.shared.sum())
    links.op[holders.found] = holders.index[holders.found]


def _id_array(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, np.int64)


def _ids(values: Sequence[int], none: int = 0) -> np.ndarray:
    """Ids, -1 where there is none: profilers write `none` there."""
    ids = _id_array(values)
    return np.where(ids == none, -1, ids)


def _launching_operators(launches: Launches) -> np.ndarray:
    can = np.asarray([_LAUNCHING.search(name) is not None for name in launches.names], bool)
    return np.where(can[_id_array(launches.name)], _ids(launches.external), -1) if len(can) else np.zeros(0, np.int64)


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


class EventRole(IntEnum):
    """The role of an event in the selection."""

    annotation = 0  # the user's: a scope
    wrapper = 1  # no operator: the autograd engine's functions, compiled regions, the profiler's own ranges
    operator = 2  # can be called
    unknown = 3  # named like an operator, but there is none of that name here
    collective = 4


@dataclass(frozen=True)
class EventTraits:
    """What the selection has to know of an event's kind. `composite`: its kernel only calls other operators; `works`:
    it does more than to allocate or to make views. `moves`: it only fills or copies memory. `computes`: it may compute
    outside of the operators that it calls; where those only move memory, it does. `prepares`: it moves elements, as
    collectives do inside. `layer` is that of a collective."""

    role: EventRole
    composite: bool = False
    works: bool = True
    moves: bool = False
    computes: bool = False
    prepares: bool = False
    layer: int = -1


@dataclass
class CallTree:
    """Indices are those of Events.ops, launches and work; -1 stands for none.

    `order`: events, callers before what they call. `parent`: the event around it that is not an annotation. `scope`:
    the innermost annotation around it on its thread. `work_op`: the event that launched a piece of work.
    `graph_launch`: pieces of work launched by a graph, by launch; those belong to no operator.
    """

    order: np.ndarray
    parent: np.ndarray
    scope: np.ndarray
    work_op: np.ndarray
    work_launch: np.ndarray
    launch_op: np.ndarray
    launch_scope: np.ndarray
    by_graph: np.ndarray


def build(
    events: TraceEvents, annotations: np.ndarray, detached: np.ndarray | None = None, calling: np.ndarray | None = None
) -> CallTree:
    """The tree of a trace. `annotations`, `detached` and `calling` are masks over the operator events: detached ones
    may end later than what they began in, such as asynchronous collectives; calling ones do their work by calls. What
    is odd is added to `events.problems`."""
    ops, launches = events.ops, events.launches
    count, launched = len(ops.start), len(launches.start)
    start = np.concatenate((_array(ops.start), _array(launches.start)))
    duration = np.concatenate((_array(ops.duration), np.zeros(launched, np.int64)))
    thread = np.concatenate((_array(ops.thread), _array(launches.thread)))
    # What begins at one moment: the profiler counts external ids up as operators begin.
    tie = np.concatenate((_array(ops.external), np.full(launched, 1 << 62)))
    order = np.lexsort((-duration, tie, start, thread))
    none = np.zeros(count, bool)
    masks = [(none if mask is None else mask).tobytes() for mask in (annotations, detached, calling)]
    nesting = _Nesting(compact(start), compact(start + duration), compact(thread), count, *masks)
    nesting.fill(compact(order))
    events.problems[_CROSSING] += nesting.crossing
    events.problems[_MOMENTS] += nesting.moments
    parent, scope = np.asarray(nesting.parent, np.int64), np.asarray(nesting.scope, np.int64)
    links = link(events, parent[count:], annotations)
    return CallTree(
        order[order < count],
        parent[:count],
        scope[:count],
        links.op,
        links.launch,
        parent[count:],
        scope[count:],
        links.by_graph,
    )


def _array(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, np.int64)


def compact(values: np.ndarray) -> array:
    """The numbers of an array in eight bytes each, with fast access to single ones."""
    numbers = array("q")
    numbers.frombytes(np.ascontiguousarray(values, np.int64).tobytes())
    return numbers


_CROSSING = "begin inside another one of their thread and end after it; they are treated as separate calls"
_MOMENTS = (
    "of no length are at the moment that an operator ends which does its work by calls; they are treated as its calls"
)
_DEEPEST = 512  # callers looked at for one that ends late enough


class _Nesting:
    """Finds out which events were going on as another one began: its caller and its scope.

    `crossing` counts events that overlap another one partly, `moments` those that are too short for the trace's clock:
    where it counts whole microseconds, operators end with calls that seem to take no time.
    """

    def __init__(
        self, start: array, end: array, thread: array, count: int, annotations: bytes, detached: bytes, calling: bytes
    ) -> None:
        self._start, self._end, self._thread, self._count = start, end, thread, count
        self._annotations, self._detached, self._calling = annotations, detached, calling
        self.parent, self.scope = array("q", (-1,)) * len(start), array("q", (-1,)) * len(start)
        self.crossing = self.moments = 0

    def fill(self, order: array) -> None:
        """Go through events in order of their beginning, thread by thread."""
        current = -1
        stack: list[tuple[int, int, int, int]] = []  # (end, event, innermost operator, innermost annotation)
        for index in order:
            if self._thread[index] != current:
                current, stack = self._thread[index], []
            begin, end = self._start[index], self._end[index]
            moment = begin == end and index < self._count
            while stack and stack[-1][0] <= begin and not (moment and stack[-1][0] == begin):
                stack.pop()
            operator = annotation = -1
            around = self._around(stack, index)
            if around is not None:
                operator, annotation = around[2], around[3]
                end = min(end, around[0])  # what a clock's rounding makes it last longer
            self.parent[index], self.scope[index] = operator, annotation
            if index >= self._count:
                continue
            self.moments += moment and around is not None and around[0] == begin
            if self._annotations[index]:
                annotation = index
            else:
                operator = index
            stack.append((end, index, operator, annotation))

    def _around(self, stack: list[tuple[int, int, int, int]], index: int) -> tuple[int, int, int, int] | None:
        """The innermost of the events that are going on which this one is inside of."""
        begin, end = self._start[index], self._end[index]
        moment = begin == end and index < self._count
        late = index < self._count and self._detached[index]
        crossing, found = False, None
        for each in stack[: -_DEEPEST - 1 : -1]:
            if each[0] <= begin and not (moment and each[0] == begin and self._calling[each[1]]):
                continue
            if late or each[0] + ROUNDING_NS >= end:
                found = each
                break
            crossing = True
        self.crossing += crossing
        return found


@dataclass
class ChosenEvents:
    """`chosen`: the events that represent the work, callers first. `stands_in`: for each event, the chosen one that it
    is or is inside of. `left_out`: events that would be chosen, but are not in the part that is imported."""

    chosen: np.ndarray
    stands_in: np.ndarray
    left_out: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True)
class GraphCaptured:
    """What was captured into a graph: a mask of the operator events, and the launches, none of which did any work."""

    ops: np.ndarray
    launches: np.ndarray


def select(
    tree: CallTree,
    kinds: Sequence[int],
    traits: Sequence[EventTraits],
    level: Level,
    captured: GraphCaptured | None = None,
) -> ChosenEvents:
    """Choose events by `level`, which must not be `auto`. `kinds` gives each event's kind, `traits` what kinds are. Of
    what was captured into a graph the leaves are taken in the place of what launched work."""
    order, parents = compact(tree.order), compact(tree.parent)
    roles = bytes(traits[kind].role for kind in kinds)
    direct = np.zeros(len(parents), bool)
    direct[tree.work_op[tree.work_op >= 0]] = True
    if captured is not None:
        launching = tree.launch_op[captured.launches]
        direct[launching[launching >= 0]] = True
    if level == "root":
        wanted = bytearray(role in (EventRole.operator, EventRole.unknown, EventRole.collective) for role in roles)
        _add_stranded(wanted, direct.tobytes(), order, parents)
    elif level == "launching":
        wanted = _launching(order, parents, roles, direct)
        if captured is not None:
            leaves = _leaves(order, parents, direct.tobytes(), kinds, traits)
            for index in np.flatnonzero(captured.ops).tolist():
                wanted[index] = leaves[index]
    else:
        wanted = _leaves(order, parents, direct.tobytes(), kinds, traits)
    going_on = _collectives(order, parents, kinds, traits, wanted)
    chosen = array("q")
    stands_in = array("q", (-1,)) * len(parents)
    for index in order:
        parent = parents[index]
        around = stands_in[parent] if parent >= 0 else -1
        if around >= 0 and not (going_on[around] and wanted[index]):
            stands_in[index] = around
        elif wanted[index] and roles[index] != EventRole.annotation:
            stands_in[index] = index
            chosen.append(index)
    return ChosenEvents(np.asarray(chosen, np.int64), np.asarray(stands_in, np.int64))


def _collectives(
    order: array, parents: array, kinds: Sequence[int], traits: Sequence[EventTraits], wanted: bytearray
) -> bytearray:
    """Want the collectives that are no part of another one, and only these. Returns which of them were still going on
    as the program went on: operators of the program are inside them."""
    others = bytearray(len(parents))  # below are wanted operators that compute, or a collective of its own
    around = array("b", (-1,)) * len(parents)  # the layer of the collective that an event is, or is inside of
    for index in order:
        each, parent = traits[kinds[index]], parents[index]
        around[index] = outer = around[parent] if parent >= 0 else -1
        if each.role is EventRole.collective:
            wanted[index] = not is_part(each.layer, outer)
            around[index] = max(outer, each.layer)
        others[index] = wanted[index] and not each.prepares and each.role is not EventRole.wrapper
    inner = bytearray(len(parents))
    for index in reversed(order):
        parent = parents[index]
        if parent >= 0:
            inner[parent] |= inner[index] or others[index]
    return bytearray(
        inner[index] and traits[kind].role is EventRole.collective and traits[kind].layer < FUSED_LAYER
        for index, kind in enumerate(kinds)
    )


def _launching(order: array, parents: array, roles: bytes, direct: np.ndarray) -> bytearray:
    """The events that launched work themselves; what cannot be called hands over to the operator around it."""
    around = array("q", (-1,)) * len(parents)  # the nearest operator around, the event itself included
    for index in order:
        parent = parents[index]
        callable_ = roles[index] in (EventRole.operator, EventRole.collective)
        around[index] = index if callable_ else around[parent] if parent >= 0 else -1
    wanted = bytearray(len(parents))
    for index in np.flatnonzero(direct).tolist():
        wanted[around[index] if around[index] >= 0 else index] = True
    return wanted


def _add_stranded(wanted: bytearray, direct: bytes, order: array, parents: array) -> None:
    """Identify work without an operator by the event that launched it."""
    inside = bytearray(len(parents))
    for index in order:
        parent = parents[index]
        inside[index] = wanted[index] or (parent >= 0 and inside[parent])
        if direct[index] and not inside[index]:
            wanted[index] = inside[index] = True


def _leaves(
    order: array, parents: array, direct: bytes, kinds: Sequence[int], traits: Sequence[EventTraits]
) -> bytearray:
    """The operators that do work themselves: those with a kernel of their own, and composite ones that call nothing
    which does any, or where they may compute themselves, nothing that does more than to move memory."""
    below = bytearray(len(parents))  # something below stands for work
    computed = bytearray(len(parents))  # something below stands for work that is more than moving memory
    wanted = bytearray(len(parents))
    for index in reversed(order):
        each, parent = traits[kinds[index]], parents[index]
        if each.role is EventRole.operator:
            wanted[index] = direct[index] or not each.composite or not (computed if each.computes else below)[index]
        elif each.role is EventRole.unknown:
            wanted[index] = direct[index] or not computed[index]  # what only allocates may compute itself
        elif each.role is EventRole.wrapper:
            wanted[index] = direct[index]
        if parent >= 0:
            below[parent] |= below[index] or (wanted[index] and each.works)
            computed[parent] |= computed[index] or (wanted[index] and each.works and not each.moves)
    return wanted
