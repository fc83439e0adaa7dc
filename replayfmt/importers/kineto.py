"""Importing a PyTorch profiler trace (Kineto): from its events to a capture, and the report of what that took.

The trace has no tensor identity, so each call gets inputs of its own, of the recorded shapes, whose content a replay
synthesizes; nothing connects one call's results with another's inputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from replayfmt.errors import InvalidCapture, UsageError
from replayfmt.format.model import Device
from replayfmt.pytorch.op_libraries import ALIASES, OpLibraries

from .json_stream import JsonStream
from .kineto_calls import Calls, Placement
from .kineto_events import Events, OpKind, integer
from .kineto_tree import LEVELS, Facts, Level, Role, Selection, Tree, build, compact, select
from .kineto_writing import Trace, write
from .operators import Operators
from .portable import Portable
from .report import ImportReport
from .synthesis import ImportedSession, imported_session
from .trace_files import Progress, TraceFile

_MOST_RANKS = 1 << 24
_MOST_DEVICES = 1 << 16
_OPERATOR_NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*(\.\w+)?\Z")
_COLLECTIVE = ("c10d::", "_c10d_functional::", "c10d_functional::", "nccl:", "gloo:", "rccl:", "mpi:", "ucc:")
# Operators that only allocate, look at metadata, or name what is there.
_IDLE = frozenset({
    "aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided",
    "aten::empty_quantized", "aten::resize_", "aten::resize_as_", "aten::set_", "aten::result_type",
    "aten::is_nonzero", "aten::lift_fresh", "aten::lift", "aten::resolve_conj", "aten::resolve_neg",
    "aten::record_stream", "aten::is_same_size", "aten::_has_compatible_shallow_copy_type", "aten::is_pinned",
    "aten::sym_size", "aten::size", "aten::stride", "aten::output_nr", "aten::_version", "aten::requires_grad_",
    "aten::can_cast", "aten::numel", "aten::dim",
})


@dataclass(frozen=True)
class KinetoOptions:
    """How to import. `level`: which operators stand for the work; `unique`: one record for each different call;
    `rewrite`: `portable` puts operators that every device has in the place of those that only the traced one has."""

    level: Level = "auto"
    unique: bool = False
    rewrite: Literal["none", "portable"] = "none"


def import_kineto(path: str | PathLike[str], out: str | PathLike[str], *, libraries: OpLibraries | None = None,
                  options: KinetoOptions = KinetoOptions(), force: bool = False,
                  progress: Progress | None = None,
                  on_record: Callable[[int, int], None] | None = None) -> ImportReport:
    """Make the capture `out` of a profiler trace, and report on it.

    Raises CaptureNotFound and InvalidCapture for a trace that cannot be read at all, OutputExists and CaptureFailed
    where `out` cannot be written. A trace that is damaged gives what can be read of it; the report says what was not.
    """
    if options.level not in LEVELS:
        raise UsageError(f"level={options.level!r}: expected one of {', '.join(LEVELS)}")
    with JsonStream(TraceFile(path, progress=progress)) as stream:
        events = Events().read(stream)
        problems = _problems(stream, events)
    if not events.ops.start and not events.work.start:
        raise InvalidCapture(f"{path}: no profiler trace: it has no operators and no device work"
                             + (f" ({problems[0]})" if problems else ""))
    operators = Operators(libraries)
    facts = [_facts(kind, operators) for kind in events.kinds]
    annotations = np.asarray([facts[kind].role is Role.annotation for kind in events.ops.kind], bool)
    tree = build(events, annotations)
    level: Level = options.level
    if level == "auto":
        level = "launching" if len(events.work.start) else "leaf"
    selection = select(tree, events.ops.kind, facts, level)
    report = ImportReport(Path(path).name, "kineto", problems=problems)
    _count(report, events, tree, selection, facts, level)
    trace = Trace(events, tree, selection, facts, Calls(operators, events.kinds), devices(events, report),
                  options.unique, Portable() if options.rewrite == "portable" else None)
    session = imported_session("kineto", Path(path).name, **_session_fields(events, level, options))
    with ImportedSession(out, session, force=force) as writing:
        write(trace, writing, report, on_record)
    return report


def _problems(stream: JsonStream, events: Events) -> list[str]:
    problems = [str(problem) for problem in stream.problems]
    problems += [f"{kind}: {count} times in all" for kind, count in stream.problem_counts.items() if count > 1]
    if events.unreadable:
        problems.append(f"{events.unreadable} events without the fields that events have were left out")
    return problems


def _facts(kind: OpKind, operators: Operators) -> Facts:
    name = ALIASES.get(kind.name, kind.name) if "::" in kind.name else kind.name
    if kind.annotation and not name.startswith("nccl:"):
        return Facts(Role.annotation)
    if name == "record_param_comms" or name.startswith(_COLLECTIVE):
        return Facts(Role.collective)
    if not _OPERATOR_NAME.match(name) or name.startswith("torch::autograd::"):
        return Facts(Role.wrapper)
    candidates = [each for each in operators.candidates(name)[0] if each.dispatched]
    if not candidates:
        return Facts(Role.unknown if operators.attribute(name) is None else Role.operator)
    idle = name in _IDLE or all(each.only_views for each in candidates)
    return Facts(Role.operator, all(each.composite for each in candidates), not idle)


def _count(report: ImportReport, events: Events, tree: Tree, selection: Selection, facts: list[Facts],
           level: Level) -> None:
    """Say what of the trace does not become records, and why."""
    roles = np.asarray([facts[kind].role for kind in events.ops.kind], np.int64)
    chosen = np.zeros(len(roles), bool)
    chosen[selection.chosen] = True
    called = np.isin(roles, [int(Role.operator), int(Role.unknown), int(Role.collective)])
    inside = called & ~chosen & (selection.stands_in >= 0)
    above = bytearray(len(roles))          # something inside was chosen
    parents = compact(tree.parent)
    for index in reversed(compact(tree.order)):
        if parents[index] >= 0 and (above[index] or selection.stands_in[index] == index):
            above[parents[index]] = True
    around = np.frombuffer(above, bool)
    report.counts = {
        "events": len(roles), "operators": int(called.sum()), "taken": len(selection.chosen),
        "inside taken": int(inside.sum()), "around taken": int((called & ~chosen & around).sum()),
        "no work": int((called & ~chosen & ~inside & ~around).sum()), "wrappers": int((roles == Role.wrapper).sum()),
        "annotations": int((roles == Role.annotation).sum()), "device work": len(events.work.start),
    }
    report.notes.append(f"level {level}: " + {
        "launching": "operators that launched device work stand for it; those that launched none are left out",
        "leaf": "the deepest operators that do work themselves stand for it",
        "root": "the outermost operators stand for the work",
        "auto": "",
    }[level])
    report.notes.append("tensor contents are in no trace: a replay makes them up, and says how")


def _session_fields(events: Events, level: Level, options: KinetoOptions) -> dict[str, Any]:
    metadata = events.metadata
    distributed = metadata.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    libraries = {name: value for name, value in metadata.items()
                 if name.endswith("_version") and isinstance(value, str | int | float)}
    rank, world = integer(distributed.get("rank")), integer(distributed.get("world_size"))
    version = metadata.get("torch_version", metadata.get("pytorch_version"))
    return {
        "rank": rank if 0 <= rank < _MOST_RANKS else 0,
        "world_size": world if 1 <= world <= _MOST_RANKS else 1,
        "libraries": libraries,
        "torch_version": version if isinstance(version, str) else None,
        "policies": {"results": "inferred", "import_level": level, "import_unique": options.unique,
                     "import_rewrite": options.rewrite},
    }


def devices(events: Events, report: ImportReport) -> Mapping[int, Device]:
    """The accelerators of the trace by the number its events give them; what is said of each, as far as known."""
    raw = sorted({kind.device for kind in events.work_kinds if 0 <= kind.device < _MOST_DEVICES})
    listed = events.metadata.get("deviceProperties")
    properties = {integer(each.get("id")): each for each in (listed if isinstance(listed, list) else ())
                  if isinstance(each, dict) and 0 <= integer(each.get("id")) < _MOST_DEVICES}
    numbers = {number: number for number in raw}
    allocated = {number for number in events.memory_devices if 0 <= number < _MOST_DEVICES}
    if len(raw) == 1 and len(allocated) == 1 and raw[0] not in allocated:
        numbers[raw[0]] = next(iter(allocated))
        report.notes.append(f"device {raw[0]} of the kernels is device {numbers[raw[0]]} of the allocations")
    elif len(raw) == 1 and len(properties) == 1 and raw[0] not in properties:
        numbers[raw[0]] = next(iter(properties))
        report.notes.append(f"device {raw[0]} of the kernels is taken for {numbers[raw[0]]}, the only one listed")
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
        found[number] = Device("cuda", index, str(about.get("name", "")), text)
    return found


__all__ = ["KinetoOptions", "Placement", "import_kineto"]
