"""Who called whom in a profiler trace, who launched what, and which calls stand for the work.

Events of one thread nest by time. A kernel belongs to the innermost operator that was running when it was launched,
found by the launch's correlation id, or by the external id where the trace has no launches. `select` then chooses
operators so that every piece of work is among them once: no operator is chosen inside another one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np

from .kineto_events import Events

Level = Literal["auto", "leaf", "launching", "root"]
LEVELS: tuple[Level, ...] = ("auto", "leaf", "launching", "root")


class Role(IntEnum):
    """What an event is to the selection."""

    annotation = 0     # the user's: a scope
    wrapper = 1        # no operator: the autograd engine's functions, compiled regions, the profiler's own ranges
    operator = 2       # can be called
    unknown = 3        # named like an operator, but none of that name is here
    collective = 4


@dataclass(frozen=True)
class Facts:
    """What the selection has to know of an event's kind. `composite`: its kernel only calls other operators; `works`:
    it does more than to allocate or to make views. `moves`: it only fills or copies memory. `computes`: it may compute
    outside of the operators that it calls; where those only move memory, it does."""

    role: Role
    composite: bool = False
    works: bool = True
    moves: bool = False
    computes: bool = False


@dataclass
class Tree:
    """Indices are those of Events.ops, launches and work; -1 stands for none.

    `order`: events, callers before what they call. `parent`: the event around it that is no annotation. `scope`: the
    innermost annotation around it on its thread. `work_op`: the event that launched a piece of work. `graph_launch`:
    pieces of work launched by a graph, by launch; those belong to no operator.
    """

    order: np.ndarray
    parent: np.ndarray
    scope: np.ndarray
    work_op: np.ndarray
    work_launch: np.ndarray
    launch_op: np.ndarray
    launch_scope: np.ndarray
    by_graph: np.ndarray


def build(events: Events, annotations: np.ndarray) -> Tree:
    """The tree of a trace. `annotations` is a mask over the operator events."""
    ops, launches = events.ops, events.launches
    count, launched = len(ops.start), len(launches.start)
    start = np.concatenate((_array(ops.start), _array(launches.start)))
    duration = np.concatenate((_array(ops.duration), np.zeros(launched, np.int64)))
    thread = np.concatenate((_array(ops.thread), _array(launches.thread)))
    # Two events that begin and end together: the profiler counts external ids up as operators begin.
    tie = np.concatenate((_array(ops.external), np.full(launched, 1 << 62)))
    order = np.lexsort((tie, -duration, start, thread))
    parent, scope = np.full(count + launched, -1, np.int64), np.full(count + launched, -1, np.int64)
    _nest(compact(order), compact(start), compact(start + duration), compact(thread), annotations.tobytes(), count,
          parent, scope)
    tree = Tree(order[order < count], parent[:count], scope[:count], np.full(len(events.work.start), -1, np.int64),
                np.full(len(events.work.start), -1, np.int64), parent[count:], scope[count:],
                np.zeros(len(events.work.start), bool))
    _attribute(events, tree, annotations)
    return tree


def _array(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, np.int64)


def compact(values: np.ndarray) -> array:
    """The numbers of an array, quick to take one by one and eight bytes each."""
    numbers = array("q")
    numbers.frombytes(np.ascontiguousarray(values, np.int64).tobytes())
    return numbers


def _nest(order: array, start: array, end: array, thread: array, annotations: bytes, count: int,
          parent: np.ndarray, scope: np.ndarray) -> None:
    """Fill in the parents and scopes of events in order of their beginning, thread by thread."""
    current = -1
    stack: list[tuple[int, int, int]] = []        # (end, innermost operator, innermost annotation)
    for index in order:
        if thread[index] != current:
            current = thread[index]
            stack = []
        begin = start[index]
        while stack and stack[-1][0] <= begin:
            stack.pop()
        operator, annotation = (stack[-1][1], stack[-1][2]) if stack else (-1, -1)
        parent[index], scope[index] = operator, annotation
        if index >= count:
            continue
        if annotations[index]:
            annotation = index
        else:
            operator = index
        stack.append((end[index], operator, annotation))


def _attribute(events: Events, tree: Tree, annotations: np.ndarray) -> None:
    """Find the event that launched each piece of device work."""
    work, launches = events.work, events.launches
    correlation, external = _array(work.correlation), _array(work.external)
    if len(launches.correlation):
        keys = _array(launches.correlation)
        by_key = np.argsort(keys, kind="stable")
        sorted_keys = keys[by_key]
        place = np.searchsorted(sorted_keys, correlation)
        inside = place < len(sorted_keys)
        found = np.zeros(len(correlation), bool)
        found[inside] = (sorted_keys[place[inside]] == correlation[inside]) & (correlation[inside] >= 0)
        tree.work_launch[found] = by_key[place[found]]
        tree.by_graph[found] = np.asarray(launches.graph, bool)[tree.work_launch[found]]
        tree.work_op[found] = tree.launch_op[tree.work_launch[found]]
    missing = (tree.work_op < 0) & (external >= 0) & ~tree.by_graph
    if missing.any() and len(events.ops.external):
        ids = _array(events.ops.external)
        ids = np.where(annotations, -1, ids)
        by_id = np.argsort(ids, kind="stable")
        place = np.minimum(np.searchsorted(ids[by_id], external), len(ids) - 1)
        found = missing & (ids[by_id][place] == external)
        tree.work_op[found] = by_id[place[found]]
    tree.work_op[tree.by_graph] = -1


@dataclass
class Selection:
    """`chosen`: the events that stand for the work, callers first. `stands_in`: for each event, the chosen one that it
    is or is inside of."""

    chosen: np.ndarray
    stands_in: np.ndarray


def select(tree: Tree, kinds: Sequence[int], facts: Sequence[Facts], level: Level) -> Selection:
    """Choose events by `level`, which must not be `auto`. `kinds` gives each event's kind, `facts` what kinds are."""
    order, parents = compact(tree.order), compact(tree.parent)
    roles = bytes(facts[kind].role for kind in kinds)
    direct = np.zeros(len(parents), bool)
    direct[tree.work_op[tree.work_op >= 0]] = True
    if level == "root":
        wanted = bytearray(role in (Role.operator, Role.unknown, Role.collective) for role in roles)
        _add_stranded(wanted, direct.tobytes(), order, parents)
    elif level == "launching":
        wanted = _launching(order, parents, roles, direct)
    else:
        wanted = _leaves(order, parents, direct.tobytes(), kinds, facts)
    for index in _outermost_collectives(order, parents, roles):
        wanted[index] = True
    chosen = array("q")
    stands_in = array("q", (-1,)) * len(parents)
    for index in order:
        parent = parents[index]
        around = stands_in[parent] if parent >= 0 else -1
        if around >= 0:
            stands_in[index] = around
        elif wanted[index] and roles[index] != Role.annotation:
            stands_in[index] = index
            chosen.append(index)
    return Selection(np.asarray(chosen, np.int64), np.asarray(stands_in, np.int64))


def _outermost_collectives(order: array, parents: array, roles: bytes) -> list[int]:
    inside = bytearray(len(parents))
    found = []
    for index in order:
        parent = parents[index]
        within = parent >= 0 and inside[parent]
        if roles[index] == Role.collective and not within:
            found.append(index)
        inside[index] = within or roles[index] == Role.collective
    return found


def _launching(order: array, parents: array, roles: bytes, direct: np.ndarray) -> bytearray:
    """The events that launched work themselves; what cannot be called hands over to the operator around it."""
    around = array("q", (-1,)) * len(parents)     # the nearest operator around, the event itself included
    for index in order:
        parent = parents[index]
        callable_ = roles[index] in (Role.operator, Role.collective)
        around[index] = index if callable_ else around[parent] if parent >= 0 else -1
    wanted = bytearray(len(parents))
    for index in np.flatnonzero(direct).tolist():
        wanted[around[index] if around[index] >= 0 else index] = True
    return wanted


def _add_stranded(wanted: bytearray, direct: bytes, order: array, parents: array) -> None:
    """Work that no operator stands for is told by the event that launched it."""
    inside = bytearray(len(parents))
    for index in order:
        parent = parents[index]
        inside[index] = wanted[index] or (parent >= 0 and inside[parent])
        if direct[index] and not inside[index]:
            wanted[index] = inside[index] = True


def _leaves(order: array, parents: array, direct: bytes, kinds: Sequence[int], facts: Sequence[Facts]) -> bytearray:
    """The operators that do work themselves: those with a kernel of their own, and composite ones that call nothing
    which does any, or where they may compute themselves, nothing that does more than to move memory."""
    below = bytearray(len(parents))        # something below stands for work
    computed = bytearray(len(parents))     # something below stands for work that is more than moving memory
    any_below = bytearray(len(parents))    # something below can be called at all
    wanted = bytearray(len(parents))
    for index in reversed(order):
        fact, parent = facts[kinds[index]], parents[index]
        if fact.role is Role.operator:
            wanted[index] = direct[index] or not fact.composite or not (computed if fact.computes else below)[index]
        elif fact.role is Role.unknown:
            wanted[index] = direct[index] or not any_below[index]
        elif fact.role is Role.wrapper:
            wanted[index] = direct[index]
        if parent >= 0:
            below[parent] |= below[index] or (wanted[index] and fact.works)
            computed[parent] |= computed[index] or (wanted[index] and fact.works and not fact.moves)
            any_below[parent] |= any_below[index] or wanted[index]
    return wanted
