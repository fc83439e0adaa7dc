"""Imports a PyTorch profiler trace (Kineto): from its events to a capture and a report.

The trace has no tensor identity, so each call gets separate inputs of the recorded shapes, whose content a replay
synthesizes; no call's results are connected to another's inputs. Steps, scopes or a time may be selected, as windows of
the host's time: a window holds the calls and launches that begin in it, on any thread, and the device work of those.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from replayfmt.errors import CaptureFailed, InvalidCapture, UsageError
from replayfmt.format.frames import MAX_LENGTH
from replayfmt.format.model import TRACED_DEVICE_NS, Device
from replayfmt.format.validation import printable, some_of
from replayfmt.pytorch.operators import operator_named, tells_allocator

from ..common.collectives import TracedCollectives, traced_groups
from ..common.json_stream import JsonStream
from ..common.operators import Operators, collective_layer, only_moves, only_wraps, without_overload
from ..common.options import ImportOptions, Level, TraceRange, parse_time
from ..common.report import ImportReport, most
from ..common.synthesis import ImportedSession, imported_session, of_ranks
from ..common.trace_files import MOST_RANKS, RankTrace, others_note, rank_fields
from ..rewrites.engines import SCHEMAS
from ..rewrites.portable import Portable
from .calls import EventCalls, Placement
from .events import OPERATOR_NAME, OpKind, TraceEvents, integer, read_events
from .graphs import capture_windows, captured, give_operators
from .tree import CallTree, ChosenEvents, EventRole, EventTraits, GraphCaptured, build, compact, select
from .writing import Trace, TraceWriter

_SHOWN_NAMES = 12
_YEAR_NS = 365.25 * 86_400e9


def inside_windows(events: TraceEvents, annotations: np.ndarray, wanted: TraceRange, times: np.ndarray) -> np.ndarray:
    """Which of these times are in a wanted window. Raises UsageError for what the trace does not have."""
    found = np.zeros(len(times), bool)
    for begin, end in _windows(events, annotations, wanted):
        found |= (begin <= times) & (times < end)
    return found


def _windows(events: TraceEvents, annotations: np.ndarray, wanted: TraceRange) -> list[tuple[int, int]]:
    ops = events.ops
    named: dict[str, list[tuple[int, int]]] = {}
    for index in np.flatnonzero(annotations).tolist():
        start = ops.start[index]
        named.setdefault(events.kinds[ops.kind[index]].name, []).append((start, start + max(1, ops.duration[index])))
    windows: list[tuple[int, int]] = []
    asked = [(f"--step={each}", f"ProfilerStep#{each}") for each in wanted.steps]
    asked += [(f"--scope={each}", each) for each in wanted.scopes]
    for flag, name in asked:
        if name not in named:
            shown = some_of(named, _SHOWN_NAMES) or "none"
            raise UsageError(printable(f"{flag}: the trace has no annotation {name}; it has {shown}"))
        windows += named[name]
    if wanted.time:
        begin, end = parse_time(wanted.time)
        first = min(min(column, default=1 << 62) for column in (ops.start, events.launches.start))
        windows.append((first + begin, first + end))
    return windows


def _check_times(path: str | PathLike[str], events: TraceEvents) -> None:
    """Raise InvalidCapture for a trace whose events are further apart than a capture can say."""
    starts = [np.asarray(column) for column in (events.ops.start, events.launches.start) if len(column)]
    first = int(min((column.min() for column in starts), default=0))
    last = int(max((column.max() for column in starts), default=0))
    if last - first > MAX_LENGTH:
        raise InvalidCapture(
            f"{path}: its events begin between ts {first / 1e3:,.0f} and {last / 1e3:,.0f} microseconds, "
            f"{(last - first) / _YEAR_NS:.0f} years apart; expected one run of a program: remove the events with wrong "
            "times"
        )


_MOST_DEVICES = 1 << 16
_COLLECTIVE = ("nccl:", "gloo:", "rccl:", "mpi:", "ucc:")  # besides the operators
# Composites for the dispatcher that also compute outside the operators they call.
_COMPUTING = frozenset({"aten::mkldnn_convolution", "aten::convolution_backward"})
# Operators that only fill or copy memory: besides what they prepare, the work of a convolution is its own.
_MOVES = frozenset(
    {
        "aten::copy_",
        "aten::clone",
        "aten::contiguous",
        "aten::_to_copy",
        "aten::fill_",
        "aten::zero_",
        "aten::zeros",
        "aten::zeros_like",
        "aten::to",
    }
)
_MOST_NAMED = 8


def import_kineto(
    path: str | PathLike[str],
    out: str | PathLike[str],
    options: ImportOptions | None = None,
    *,
    force: bool = False,
    place: RankTrace | None = None,
) -> ImportReport:
    """Make the capture `out` of a profiler trace, and report on it. `place` says which file of an archive it is and
    which rank's, if that was chosen.

    Raises CaptureNotFound and InvalidCapture for a trace that cannot be read at all, CaptureFailed if it has device
    work of which none can be linked, OutputExists and CaptureFailed if `out` cannot be written. A damaged trace is
    imported as far as it can be read; the report says what was not.
    """
    options = options or ImportOptions()
    events, stream = read_events(path, options.progress, place.member if place else "")
    if not events.ops.start and not events.work.start:
        problems = _problems(stream, events)
        if events.runtimes:
            problems.insert(0, f"events that launch work it has: {most(events.runtimes)}")
        raise InvalidCapture(
            f"{path}: not a profiler trace: it has no operators and no device work"
            + (f" ({problems[0]})" if problems else "")
        )
    _check_times(path, events)
    graph_notes = (
        give_operators(events, [(Path(each).name, read_events(each)[0]) for each in options.graph_captures])
        if options.graph_captures
        else []
    )
    operators = Operators(options.libraries, options.names)
    traits = [_traits_of(kind, operators) for kind in events.kinds]
    annotations = np.asarray([traits[kind].role is EventRole.annotation for kind in events.ops.kind], bool)
    detached = np.asarray(
        [traits[kind].role is EventRole.collective and events.kinds[kind].annotation for kind in events.ops.kind], bool
    )
    calling = np.asarray(
        [
            traits[kind].composite or traits[kind].role in (EventRole.wrapper, EventRole.unknown)
            for kind in events.ops.kind
        ],
        bool,
    )
    tree = build(events, annotations, detached, calling)
    level: Level = options.level
    graphs: GraphCaptured | None = None
    if level == "auto":
        level = "launching" if len(events.work.start) else "leaf"
        windows = capture_windows(events)
        graphs = captured(events, tree, windows) if windows else None
    selection = select(tree, events.ops.kind, traits, level, graphs)
    if len(events.work.start) and not len(selection.chosen) and not (tree.work_launch >= 0).any():
        raise CaptureFailed(
            f"{path}: none of its {len(events.work.start)} kernels and copies can be linked to a "
            "launch or an operator (no id of theirs, correlation or External id, is one of those), so "
            f"nothing is taken at level {level}"
            + (
                "; level leaf takes operators by what they are, without their kernels"
                if level == "launching" and events.ops.start
                else ""
            )
            + (f"; events of unknown categories were left out: {most(events.unknown)}" if events.unknown else "")
        )
    if options.wanted:
        starts = np.asarray(events.ops.start, np.int64)[selection.chosen]
        kept = inside_windows(events, annotations, options.wanted, starts)
        selection = replace(selection, chosen=selection.chosen[kept], left_out=selection.chosen[~kept])
    report = ImportReport(Path(path).name, "kineto", problems=_problems(stream, events))
    report.notes += graph_notes
    if stream.member and place is None:
        report.notes.append(others_note(path, stream.member))
    if graphs is not None:
        report.notes.append(
            f"{len(windows)} graphs were captured in it, with {len(graphs.launches)} launches, none of "
            "which did any work then: there, level leaf chooses the operators that represent the work"
        )
    _count(report, events, tree, selection, traits, level)
    schemas = SCHEMAS if options.rewrite == "portable" else None
    trace = Trace(
        events,
        tree,
        selection,
        traits,
        EventCalls(operators, events.kinds, schemas),
        devices(events, report),
        options.unique,
        Portable() if options.rewrite == "portable" else None,
        level,
        graphs,
        lambda times: inside_windows(events, annotations, options.wanted, times) if options.wanted else times == times,
        options.inductor,
    )
    session = imported_session("kineto", Path(path).name, **_session_fields(events, level, options, place))
    with ImportedSession(out, session, force=force) as writing:
        if options.together:
            about = events.metadata.get("distributedInfo")
            groups = traced_groups(about.get("pg_config") if isinstance(about, dict) else None, session.world_size)
            trace.collectives = TracedCollectives(writing, session.rank, session.world_size, groups)
        TraceWriter(trace, writing, report).write(options.on_record)
    return report


def _problems(stream: JsonStream, events: TraceEvents) -> list[str]:
    problems = [str(problem) for problem in stream.problems]
    problems += [f"{kind}: {count} times in all" for kind, count in stream.problem_counts.items() if count > 1]
    return [*problems, *events.problem_lines()]


def _traits_of(kind: OpKind, operators: Operators) -> EventTraits:
    name = kind.name
    if "::" in name or operators.names.renamed(name):
        name = operators.names.meant(without_overload(name))[-1]
    if kind.annotation and not name.startswith("nccl:"):
        return EventTraits(EventRole.annotation)
    if name.startswith("torch::autograd::") or tells_allocator(name) or only_wraps(name):
        return EventTraits(EventRole.wrapper)
    if name == "record_param_comms" or name.startswith(_COLLECTIVE) or operator_named(name).collective:
        return EventTraits(EventRole.collective, layer=collective_layer(name))
    if not OPERATOR_NAME.match(name):
        return EventTraits(EventRole.wrapper)
    candidates = [each for each in operators.candidates(kind.name)[0] if each.dispatched]
    if not candidates:
        return EventTraits(EventRole.unknown if operators.attribute(kind.name) is None else EventRole.operator)
    if not any(each.traceable for each in candidates):
        return EventTraits(EventRole.unknown)  # its callees can be called again, it cannot
    idle = operator_named(name).idle or all(each.only_views for each in candidates)
    composite = name not in _COMPUTING and all(each.composite for each in candidates)
    return EventTraits(
        EventRole.operator,
        composite,
        not idle,
        name in _MOVES,
        "convolution" in name,
        all(only_moves(name, each.schema) for each in candidates),
    )


def _count(
    report: ImportReport,
    events: TraceEvents,
    tree: CallTree,
    selection: ChosenEvents,
    traits: Sequence[EventTraits],
    level: Level,
) -> None:
    """Report which parts of the trace do not become records, and why."""
    roles = np.asarray([traits[kind].role for kind in events.ops.kind], np.int64)
    chosen = np.zeros(len(roles), bool)
    chosen[selection.chosen] = True
    left_out = np.zeros(len(roles), bool)
    left_out[selection.left_out] = True
    chosen |= left_out
    called = chosen | np.isin(roles, [int(EventRole.operator), int(EventRole.unknown), int(EventRole.collective)])
    inside = called & ~chosen & (selection.stands_in >= 0)
    above = bytearray(len(roles))  # something inside was chosen
    parents = compact(tree.parent)
    for index in reversed(compact(tree.order)):
        if parents[index] >= 0 and (above[index] or selection.stands_in[index] == index):
            above[parents[index]] = True
    around = np.frombuffer(above, bool)
    report.counts = {
        "events": len(roles),
        "operators": int(called.sum()),
        "taken": len(selection.chosen),
        "inside taken": int(inside.sum()),
        "around taken": int((called & ~chosen & around).sum()),
        "no work": int((called & ~chosen & ~inside & ~around).sum()),
        "wrappers": int(((roles == EventRole.wrapper) & ~chosen).sum()),
        **({"not selected": len(selection.left_out)} if len(selection.left_out) else {}),
        "annotations": int((roles == EventRole.annotation).sum()),
        "device work": len(events.work.start),
        "other events": events.others.total(),
    }
    if events.others:
        report.notes.append(
            "other events are not calls: "
            + ", ".join(f"{count} {category}" for category, count in events.others.most_common())
        )
    within = np.flatnonzero(inside)
    within = within[roles[selection.stands_in[within]] == EventRole.collective]
    parts = Counter(
        events.kinds[events.ops.kind[index]].name for index in within[roles[within] != EventRole.collective].tolist()
    )
    if parts:
        report.note(f"inside collectives, as parts of them: {most(parts)}")
    report.notes.append(
        f"level {level}: "
        + {
            "launching": "operators that launched device work represent it; those that launched none are left out",
            "leaf": "the deepest operators that do work themselves represent it",
            "root": "the outermost operators represent the work",
            "auto": "",
        }[level]
    )
    if level == "leaf":
        report.notes += _untaken(events, tree, traits, around, inside | chosen)
        away = around & ~chosen & ~inside & (roles == EventRole.unknown)
        names = Counter(events.kinds[events.ops.kind[index]].name for index in np.flatnonzero(away).tolist())
        if names:
            counted = ", ".join(f"{name} ({count} times)" for name, count in names.most_common())
            report.notes.append(
                "these operators were replaced by the operators they called: they are unknown here, or take "
                "objects that traces do not hold; whether they computed anything else is unknown: " + counted
            )
    report.notes.append("traces have no tensor contents: a replay synthesizes them, and says how")


def _untaken(
    events: TraceEvents, tree: CallTree, traits: Sequence[EventTraits], around: np.ndarray, taken: np.ndarray
) -> list[str]:
    """A note naming composites whose callees were taken though most of the time was spent outside of those."""
    durations = np.asarray(events.ops.duration, np.int64)
    nested = tree.parent >= 0
    inner = np.bincount(tree.parent[nested], weights=durations[nested], minlength=len(durations))
    kinds = np.asarray(events.ops.kind, np.int64)
    operators = np.asarray([each.role is EventRole.operator for each in traits], bool)
    times: dict[str, tuple[int, int]] = {}
    for index in np.flatnonzero(around & ~taken & operators[kinds]).tolist():
        name = events.kinds[kinds[index]].name
        total, own = times.get(name, (0, 0))
        times[name] = total + int(durations[index]), own + int(durations[index]) - int(inner[index])
    named = sorted((name for name, (total, own) in times.items() if own * 2 > total), key=lambda name: -times[name][1])
    if not named:
        return []
    shown = ", ".join(
        f"{name} ({times[name][1] / 1000:.1f} of {times[name][0] / 1000:.1f} us)" for name in named[:_MOST_NAMED]
    )
    more = f", and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return [
        "these operators were replaced by the operators they called, but more than half of their host time was "
        f"outside those, in overhead or in their own work; level root keeps them: {shown}{more}"
    ]


def distributed(said: Any) -> tuple[int | None, int]:
    """The rank and the number of ranks in `distributedInfo`, None and 1 if it does not have them."""
    said = said if isinstance(said, dict) else {}
    rank, world = integer(said.get("rank")), integer(said.get("world_size"))
    return rank if 0 <= rank < MOST_RANKS else None, world if 1 <= world <= MOST_RANKS else 1


def _session_fields(
    events: TraceEvents, level: Level, options: ImportOptions, place: RankTrace | None
) -> dict[str, Any]:
    metadata = events.metadata
    libraries = {
        name: value
        for name, value in metadata.items()
        if name.endswith("_version") and isinstance(value, str | int | float)
    }
    rank, world = distributed(metadata.get("distributedInfo"))
    version = metadata.get("torch_version", metadata.get("pytorch_version"))
    return {
        **rank_fields(rank, world, place),
        "libraries": libraries,
        "torch_version": version if isinstance(version, str) else None,
        "policies": {
            "results": "inferred",
            "import_level": level,
            "import_unique": options.unique,
            "import_rewrite": options.rewrite,
            **({TRACED_DEVICE_NS: events.device_ns()} if len(events.work.start) else {}),
            **of_ranks(options.together),
        },
    }


def devices(events: TraceEvents, report: ImportReport) -> Mapping[int, Device]:
    """The accelerators of the trace by the number its events give them; what is said of each, as far as known."""
    raw = sorted({kind.device for kind in events.work_kinds if 0 <= kind.device < _MOST_DEVICES})
    # A graph that is captured does no work: launches show that there is a device.
    raw = raw or [0] * any("BeginCapture" in name for name in events.launches.names)
    listed = events.metadata.get("deviceProperties")
    properties = {
        integer(each.get("id")): each
        for each in (listed if isinstance(listed, list) else ())
        if isinstance(each, dict) and 0 <= integer(each.get("id")) < _MOST_DEVICES
    }
    numbers = {number: number for number in raw}
    allocated = {number for number in events.memory_devices if 0 <= number < _MOST_DEVICES}
    if len(raw) == 1 and len(allocated) == 1 and raw[0] not in allocated:
        numbers[raw[0]] = next(iter(allocated))
        report.notes.append(f"device {raw[0]} of the kernels is device {numbers[raw[0]]} of the allocations")
    elif len(raw) == 1 and len(properties) == 1 and raw[0] not in properties:
        numbers[raw[0]] = next(iter(properties))
        report.notes.append(f"device {raw[0]} of the kernels is assumed to be {numbers[raw[0]]}, the only one listed")
    found = {}
    for number, index in numbers.items():
        about = properties.get(index, properties.get(number, {}))
        fingerprint: dict[str, Any] = {}
        if isinstance(about.get("computeMajor"), int):
            fingerprint["capability"] = f"{about['computeMajor']}.{about.get('computeMinor', 0)}"
        for name, key in (("memory_bytes", "totalGlobalMem"), ("multiprocessors", "numSms")):
            if isinstance(about.get(key), int):
                fingerprint[name] = about[key]
        text = json.dumps(fingerprint) if fingerprint else ""
        found[number] = Device(events.device_type, index, str(about.get("name", "")), text)
    return found


__all__ = ["Placement", "import_kineto"]
