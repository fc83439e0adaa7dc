"""Device work of a profiler trace: the table of it that a capture keeps, and the work without an operator.

Work that was launched by a graph or by nothing in the trace, and code that torch.compile generated for the host, which
leaves no events at all, becomes unsupported records, so it is not overlooked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from replayfmt.format.model import Device

from ..common.operators import COMPILED_CODE, is_generated_kernel
from ..common.report import ImportReport
from .events import NUMBERS, TraceEvents
from .tree import CallTree, GraphCaptured

_DIRECTION = re.compile(r"(?<![A-Za-z])([HDAPM])(?:to|2)([HDAPM])(?![a-z])|(Host|Device|Peer)To(Host|Device|Peer)")
# Kernels of collectives that the trace does not call so, by the names that libraries give them.
_BY_NAME = re.compile(
    r"nccl|rccl|(?<![a-z])(cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)", re.IGNORECASE
)


def device_kernel_table(events: TraceEvents, devices: Mapping[int, Device]) -> bytes | None:
    """The table of all work in a trace as JSON (FORMAT.md); None if it has none."""
    work = events.work
    if not len(work.start):
        return None
    kinds = np.asarray(work.kind, np.int64)
    durations = np.asarray(work.duration, np.int64)
    size = len(events.work_kinds)
    timed = durations >= 0
    counts, untimed = np.bincount(kinds, minlength=size), np.bincount(kinds[~timed], minlength=size)
    total, most = np.zeros(size, np.int64), np.zeros(size, np.int64)
    least = np.full(size, np.iinfo(np.int64).max)
    np.add.at(total, kinds[timed], durations[timed])
    np.maximum.at(most, kinds[timed], durations[timed])
    np.minimum.at(least, kinds[timed], durations[timed])
    rows = []
    for number, kind in enumerate(events.work_kinds):
        details = dict(kind.details)
        collective = details.pop("collective", None)
        known = counts[number] > untimed[number]
        rows.append(
            {
                "name": kind.name,
                "category": kind.category,
                "device": str(devices[kind.device]) if kind.device in devices else None,
                "stream": kind.stream if kind.stream >= 0 else None,
                "grid": list(kind.grid) if kind.grid else None,
                "block": list(kind.block) if kind.block else None,
                **{name: details.get(name) for name in NUMBERS.values()},
                "direction": _direction(kind.name) if "memcpy" in kind.category else None,
                "collective": None if collective is None else dict(collective),
                "collective_by": "trace" if collective is not None else "name" if _BY_NAME.search(kind.name) else None,
                "count": int(counts[number]),
                "untimed": int(untimed[number]),
                "total_ns": int(total[number]) if known else None,
                "min_ns": int(least[number]) if known else None,
                "max_ns": int(most[number]) if known else None,
            }
        )
    return json.dumps({"rows": rows}).encode()


def _direction(name: str) -> str | None:
    """From where to where a copy goes, as the name says: HtoD, DtoH, DtoD, PtoP; None if it does not."""
    found = _DIRECTION.search(name)
    if found is None:
        return None
    source, target = (found[1], found[2]) if found[1] else (found[3][0], found[4][0])
    return f"{source}to{target}"


@dataclass
class UnclaimedWork:
    """One piece of such work. `scope` is the annotation around it, -1: none; `work` indexes Events.work; `duration` is
    the host's, in nanoseconds."""

    name: str
    reason: str
    detail: str
    start: int
    thread: int
    scope: int
    shown: str = ""
    duration: int | None = None
    work: list[int] = field(default_factory=list)


def unclaimed_work(
    events: TraceEvents, tree: CallTree, work_of: np.ndarray, report: ImportReport
) -> Iterator[UnclaimedWork]:
    """Launches whose work belongs to no operator (`work_of` is -1), and work without any id. Work with the id of a
    launch that is not in the trace is counted in the report."""
    by_launch: dict[int, list[int]] = {}
    lost: list[int] = []
    for each in np.flatnonzero(work_of < 0).tolist():
        launch = int(tree.work_launch[each])
        if launch < 0:
            lost.append(each)
        else:
            by_launch.setdefault(launch, []).append(each)
    unlinked = [each for each in lost if events.work.correlation[each] <= 0 and events.work.external[each] <= 0]
    if len(lost) > len(unlinked):
        report.notes.append(
            f"{len(lost) - len(unlinked)} pieces of device work were launched before the trace began, "
            "or by what it does not show; they are not in the capture"
        )
    if unlinked:
        start = min(events.work.start[each] for each in unlinked)
        yield UnclaimedWork(
            "unlinked device work",
            "outside_operator",
            f"{len(unlinked)} kernels and copies have neither a "
            "correlation id nor an external id: what launched them is unknown",
            start,
            0,
            -1,
            f"{len(unlinked)} kernels",
            work=unlinked,
        )
    launches = events.launches
    for launch, work in by_launch.items():
        names = [events.work_kinds[events.work.kind[each]].name for each in work]
        place = launches.start[launch], launches.thread[launch], int(tree.launch_scope[launch])
        if launches.graph[launch]:
            yield UnclaimedWork(
                "graph launch",
                "cuda_graph",
                f"{len(work)} kernels and copies of one graph",
                *place,
                f"{len(work)} kernels",
                work=work,
            )
        else:
            reason = "triton_launch" if is_generated_kernel(names[0]) else "outside_operator"
            yield UnclaimedWork(names[0], reason, "launched by no operator that the trace shows", *place, work=work)


def captured_outside(events: TraceEvents, tree: CallTree, captured: GraphCaptured) -> Iterator[UnclaimedWork]:
    """Launches captured into a graph while no operator ran."""
    launches, names = events.launches, list(events.launches.names)
    for launch in captured.launches.tolist():
        if tree.launch_op[launch] < 0:
            work = launches.work[launch]
            name = names[launches.name[launch]] if work < 0 else events.launch_kinds[work].name
            reason = "triton_launch" if is_generated_kernel(name) else "outside_operator"
            yield UnclaimedWork(
                name,
                reason,
                "launched by no operator that the trace shows, into a graph",
                launches.start[launch],
                launches.thread[launch],
                int(tree.launch_scope[launch]),
            )


def compiled_regions(events: TraceEvents, tree: CallTree) -> Iterator[UnclaimedWork]:
    """Regions of torch.compile that launched no device work: what they computed on the host besides the operators that
    they called is in no trace."""
    kinds = [bool(COMPILED_CODE.match(kind.name)) for kind in events.kinds]
    if not any(kinds):
        return
    ops = events.ops
    regions = np.flatnonzero(np.asarray(kinds, bool)[np.asarray(ops.kind, np.int64)]).tolist()
    regions.sort(key=lambda each: (ops.thread[each], ops.start[each], -ops.duration[each]))
    launches = _launching_times(events, tree)
    for place, each in enumerate(regions):
        start, thread = ops.start[each], ops.thread[each]
        end = start + ops.duration[each]
        inner = regions[place + 1] if place + 1 < len(regions) else -1
        if inner >= 0 and ops.thread[inner] == thread and ops.start[inner] < end:
            continue
        times = launches.get(thread, np.zeros(0, np.int64))
        if np.searchsorted(times, start, "left") == np.searchsorted(times, end, "left"):
            yield UnclaimedWork(
                events.kinds[ops.kind[each]].name,
                "compiled_region",
                "what code that torch.compile generated for the host computes leaves no events; the operators "
                "that it called are records of their own",
                start,
                thread,
                int(tree.scope[each]),
                duration=ops.duration[each],
            )


def _launching_times(events: TraceEvents, tree: CallTree) -> dict[int, np.ndarray]:
    times: dict[int, list[int]] = {}
    for launch in np.unique(tree.work_launch[tree.work_launch >= 0]).tolist():
        times.setdefault(events.launches.thread[launch], []).append(events.launches.start[launch])
    return {thread: np.sort(np.asarray(each, np.int64)) for thread, each in times.items()}
