"""Work in a profiler trace without an operator: it becomes unsupported records, so it is not overlooked.

This is device work launched by a graph or by nothing in the trace, and code that torch.compile generated for the host,
which leaves no events at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ..common.operators import COMPILED_CODE, is_generated_kernel
from ..common.report import ImportReport
from .events import TraceEvents
from .tree import Captured, Tree


@dataclass
class Stray:
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


def unclaimed_work(events: TraceEvents, tree: Tree, work_of: np.ndarray, report: ImportReport) -> Iterator[Stray]:
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
        yield Stray(
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
            yield Stray(
                "graph launch",
                "cuda_graph",
                f"{len(work)} kernels and copies of one graph",
                *place,
                f"{len(work)} kernels",
                work=work,
            )
        else:
            reason = "triton_launch" if is_generated_kernel(names[0]) else "outside_operator"
            yield Stray(names[0], reason, "launched by no operator that the trace shows", *place, work=work)


def captured_outside(events: TraceEvents, tree: Tree, captured: Captured) -> Iterator[Stray]:
    """Launches captured into a graph while no operator ran."""
    launches, names = events.launches, list(events.launches.names)
    for launch in captured.launches.tolist():
        if tree.launch_op[launch] < 0:
            work = launches.work[launch]
            name = names[launches.name[launch]] if work < 0 else events.launch_kinds[work].name
            reason = "triton_launch" if is_generated_kernel(name) else "outside_operator"
            yield Stray(
                name,
                reason,
                "launched by no operator that the trace shows, into a graph",
                launches.start[launch],
                launches.thread[launch],
                int(tree.launch_scope[launch]),
            )


def compiled_regions(events: TraceEvents, tree: Tree) -> Iterator[Stray]:
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
            yield Stray(
                events.kinds[ops.kind[each]].name,
                "compiled_region",
                "what code that torch.compile generated for the host computes leaves no events; the operators "
                "that it called are records of their own",
                start,
                thread,
                int(tree.scope[each]),
                duration=ops.duration[each],
            )


def _launching_times(events: TraceEvents, tree: Tree) -> dict[int, np.ndarray]:
    """When each thread launched device work, in order."""
    times: dict[int, list[int]] = {}
    for launch in np.unique(tree.work_launch[tree.work_launch >= 0]).tolist():
        times.setdefault(events.launches.thread[launch], []).append(events.launches.start[launch])
    return {thread: np.sort(np.asarray(each, np.int64)) for thread, each in times.items()}
