"""Writes a profiler trace's selected calls, annotations and stray device work as records, in order of time.

User annotations become scopes. Work on a thread without annotations of its own, such as the backward pass, is in those
that the main thread was in at the time.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

import numpy as np

from replayfmt.format.attachments import DEVICE_KERNELS_ROLE
from replayfmt.format.model import Device
from replayfmt.format.writer import Moment
from replayfmt.pytorch.collectives import Unknown
from replayfmt.pytorch.overloads import parse_schema
from replayfmt.pytorch.traced_names import Iteration, parse_iteration

from ..common.arguments import DefaultGenerator, TensorSpec, dtype_of
from ..common.collectives import NO_WAIT, InFlight, TracedCollectives
from ..common.inductor_cache import InductorCache, NoKernel, fill_integers
from ..common.operators import REPLACED, FoundOperator, is_generated_kernel
from ..common.options import Level
from ..common.report import DeviceTime, ImportReport, ReportEntry
from ..common.results import Results, realize
from ..common.synthesis import ImportedSession, OpForm, Tensor, TracedStorage, plain_tensor
from ..rewrites.portable import Portable
from ..rewrites.rewriting import CannotRewrite, Rewritten, tensors_in
from .calls import DtypeHints, EventCalls, Placement, ResolvedCall, has_lists, read_arguments, signature_text
from .device_work import UnclaimedWork, captured_outside, compiled_regions, device_kernel_table, unclaimed_work
from .events import NO_TIME, OpKind, TraceEvents
from .tree import CallTree, ChosenEvents, EventRole, EventTraits, GraphCaptured, compact


class AnnotationScopes:
    """Scope ids in a capture that is being written, by annotation."""

    def __init__(
        self, events: TraceEvents, tree: CallTree, traits: Sequence[EventTraits], session: ImportedSession
    ) -> None:
        self._events, self._session, self._tree = events, session, tree
        paths: dict[tuple[int, str], int] = {}
        ops = events.ops
        scopes = np.asarray([each.role is EventRole.annotation for each in traits], bool)
        annotations = tree.order[scopes[np.asarray(ops.kind, np.int64)[tree.order]]].tolist()
        self._timeline = _Timeline(events, annotations)
        self._ids: dict[int, int] = {}
        self._described: set[int] = set()  # annotations that describe a batch, and those inside of such
        self._iterations: dict[int, Iteration] = {}
        for index in sorted(annotations, key=lambda each: (ops.start[each], -ops.duration[each])):
            around = self._around(index)
            parent, name = self._ids.get(around, 0), events.kinds[ops.kind[index]].name
            if (parent, name) not in paths:
                paths[parent, name] = session.scope(parent, name)
            self._ids[index] = paths[parent, name]
            iteration = parse_iteration(name)
            if around in self._described or iteration is not None:
                self._described.add(index)
            if around not in self._described and iteration is not None:
                self._iterations[index] = iteration

    @property
    def annotations(self) -> list[int]:
        """All annotations, in order of their beginning."""
        return list(self._ids)

    def __getitem__(self, annotation: int) -> int:
        return self._ids[annotation]

    def iteration(self, annotation: int) -> Iteration | None:
        """The step that an annotation describes; None inside another annotation that describes it: a step counts
        once."""
        return self._iterations.get(annotation)

    def _around(self, annotation: int) -> int:
        """The annotation around an annotation, -1: none."""
        around, ops = int(self._tree.scope[annotation]), self._events.ops
        return around if around >= 0 else self._timeline.at(ops.start[annotation], ops.thread[annotation])

    def step(self, around: int, start: int) -> Iteration | None:
        """The serving engine's step that this is in: as `at`."""
        around = around if around >= 0 else self._timeline.at(start, -1)
        while around >= 0 and around not in self._iterations:
            around = self._around(around)
        return self._iterations.get(around)

    def at(self, around: int, start: int) -> int:
        """The scope id of what has the annotation `around` around it on its thread (-1: none) and begins at `start`."""
        if around < 0:
            around = self._timeline.at(start, -1)
        return self._ids.get(around, 0)


class _Timeline:
    """The main thread's annotations by time: the scopes of work on other threads, such as the backward pass.

    The main thread is the one with the longest total of annotations.
    """

    def __init__(self, events: TraceEvents, annotations: Sequence[int]) -> None:
        ops = events.ops
        total: dict[int, int] = defaultdict(int)
        for index in annotations:
            total[ops.thread[index]] += ops.duration[index]
        self._thread = max(total, key=lambda thread: total[thread]) if total else -1
        edges: list[tuple[int, int, int, int]] = []
        for index in annotations:
            if ops.thread[index] == self._thread:
                start, duration = ops.start[index], max(1, ops.duration[index])  # it begins before it ends
                edges += [(start, 1, -duration, index), (start + duration, 0, -start, index)]
        edges.sort()
        self._times: list[int] = []
        self._innermost: list[int] = []
        stack: list[int] = []
        for time, begins, _tie, index in edges:
            if begins:
                stack.append(index)
            else:
                stack.remove(index)
            self._times.append(time)
            self._innermost.append(stack[-1] if stack else -1)
        self._array = np.asarray(self._times, np.int64)

    def at(self, time: int, thread: int) -> int:
        """The innermost annotation of the main thread around a time, -1: none. The main thread itself needs none."""
        if thread == self._thread or not self._times:
            return -1
        place = int(np.searchsorted(self._array, time, side="right")) - 1
        return self._innermost[place] if place >= 0 else -1


_END, _BEGIN, _CALL, _STRAY = range(4)  # what happens at a moment, in this order
# As CUDA's and newer ROCm builds, older ROCm builds, and XPU builds name copies.
_UPLOAD, _DOWNLOAD = re.compile("HtoD|HostToDevice|[HM]2D"), re.compile("DtoH|DeviceToHost|D2[HM]")
_WAITS = "::wait_tensor"
_LATE = f"{NO_WAIT} before the same call comes again, or at the end"
_MOST_AROUND = 64
_SHOWN_KERNELS = 256  # per record; the others are only counted


@dataclass
class Trace:
    """What is written: events, their tree and the choice among them. `devices` by the number that events give them,
    `portable` where operators of one device alone are to be replaced; `selects` says which times are imported;
    `inductor` has the sources of Triton kernels, if any are given."""

    events: TraceEvents
    tree: CallTree
    selection: ChosenEvents
    traits: Sequence[EventTraits]
    calls: EventCalls
    devices: Mapping[int, Device]
    unique: bool
    portable: Portable | None
    level: Level
    captured: GraphCaptured | None = None
    selects: Callable[[np.ndarray], np.ndarray] = lambda times: times == times
    inductor: InductorCache | None = None
    collectives: TracedCollectives | None = None


@dataclass
class _Group:
    """Calls that become one record: a single call or, with `unique`, all that are alike."""

    index: int
    call: ResolvedCall
    placement: Placement
    work: list[int]
    host_times: list[int]  # of each call, in nanoseconds
    device_times: list[int | None]  # None: no device work, or its time is unknown
    known_ns: int  # of all its device work whose time is known

    @property
    def count(self) -> int:
        return len(self.host_times)

    @property
    def host_ns(self) -> int:
        return sum(self.host_times)

    @property
    def device_ns(self) -> int | None:
        return _total(self.device_times)


class TraceWriter:
    """Writes a trace to a capture, and reports on it."""

    def __init__(self, trace: Trace, session: ImportedSession, report: ImportReport) -> None:
        self.trace, self.session, self.report = trace, session, report
        self.events, self.tree = trace.events, trace.tree
        self._resolved: dict[Any, ResolvedCall] = {}
        self._forms: dict[int, tuple[OpForm, list[TracedStorage]]] = {}  # of resolved calls, by their id()
        self._around: dict[int, tuple[str, ...]] = {}  # the wrappers that an event is or is in
        starts = [
            np.asarray(column, np.int64)
            for column in (self.events.ops.start, self.events.launches.start)
            if len(column)
        ]
        self._base = int(min((column.min() for column in starts), default=0))
        stands = trace.selection.stands_in
        self._work_of = (
            np.where(self.tree.work_op >= 0, stands[np.maximum(self.tree.work_op, 0)], -1)
            if len(stands)
            else np.full(len(self.events.work.start), -1, np.int64)
        )
        by_op = np.argsort(self._work_of, kind="stable")
        self._by_op, self._sorted = compact(by_op), compact(self._work_of[by_op])
        self._inside = np.argsort(stands, kind="stable")  # events by the chosen one that they are, or are inside of
        self._scopes = AnnotationScopes(self.events, self.tree, trace.traits, session)
        for device in trace.devices.values():
            session.device(str(device), device)
        self._on_graph = self._stand_for_nodes()
        self._default_device = str(next(iter(trace.devices.values()))) if trace.devices else "cpu"

    def _stand_for_nodes(self) -> set[int]:
        """The chosen events that stand for nodes of a graph that was captured."""
        if self.trace.captured is None:
            return set()
        launching = self.tree.launch_op[self.trace.captured.launches]
        return set(self.trace.selection.stands_in[launching[launching >= 0]].tolist())

    def write(self, on_record: Callable[[int, int], None] | None) -> None:
        """Write everything. `on_record(done, all)` reports progress."""
        self.report.device_time = self._device_time()
        self._resolve_all()
        groups = self._alike() if self.trace.unique else None
        strays = self._selected(self._strays())
        starts = np.asarray(self.events.ops.start, np.int64)
        durations = np.maximum(np.asarray(self.events.ops.duration, np.int64), 1)  # a scope begins before it ends
        taken = self.trace.selection.chosen if groups is None else np.asarray(list(groups), np.int64)
        marks = np.asarray(self._scopes.annotations if groups is None else [], np.int64)
        marks = marks[self.trace.selects(starts[marks])]
        beginnings = np.asarray([alike[0].start for alike in strays], np.int64)
        # At one moment inner scopes end before outer ones, all before others begin, and those before calls.
        parts = (
            (_END, starts[marks] + durations[marks], -starts[marks], marks),
            (_BEGIN, starts[marks], -durations[marks], marks),
            (_CALL, starts[taken], taken * 0, taken),
            (_STRAY, beginnings, beginnings * 0, np.arange(len(strays))),
        )
        what = np.concatenate([np.full(len(index), code) for code, _time, _tie, index in parts])
        time, tie, which = (np.concatenate([part[column] for part in parts]) for column in (1, 2, 3))
        order = np.lexsort((tie, what, time))
        for done, (code, index) in enumerate(zip(compact(what[order]), compact(which[order]), strict=True)):
            if code == _CALL:
                self._op(groups[index] if groups is not None else self._group(index))
            elif code == _STRAY:
                self._stray(strays[index])
            else:
                self._scope(index, begins=code == _BEGIN)
            if on_record is not None and not done % 1024:
                on_record(done, len(order))
        if trace_collectives := self.trace.collectives:
            for flight in trace_collectives.in_flight():
                self._wait(flight, Moment())
        self.report.counts["without one"] = sum(map(len, strays))
        table = device_kernel_table(self.events, self.trace.devices)
        if table is not None:
            self.session.attachment(DEVICE_KERNELS_ROLE, "device kernels", table)

    def _device_time(self) -> DeviceTime | None:
        work = self.events.work
        if not len(work.start):
            return None
        durations = np.asarray(work.duration, np.int64)
        lost = (
            (self._work_of < 0)
            & (self.tree.work_launch < 0)
            & ((np.asarray(work.correlation, np.int64) > 0) | (np.asarray(work.external, np.int64) > 0))
        )
        timed = durations >= 0
        left_out = np.isin(self._work_of, self.trace.selection.left_out)
        time = DeviceTime(int(durations[timed].sum()), int(durations[timed & lost].sum()), int((~timed).sum()))
        time.left_out_ns = int(durations[timed & left_out].sum())
        return time

    def _selected(self, strays: list[list[UnclaimedWork]]) -> list[list[UnclaimedWork]]:
        """The work without an operator that is in the part of the trace that is imported."""
        kept: list[list[UnclaimedWork]] = []
        for alike in strays:
            inside = self.trace.selects(np.asarray([each.start for each in alike], np.int64)).tolist()
            chosen = [each for each, wanted in zip(alike, inside, strict=True) if wanted]
            kept += [chosen] if chosen else []
            left_out = [each for each, wanted in zip(alike, inside, strict=True) if not wanted]
            if self.report.device_time is not None:
                self.report.device_time.left_out_ns += sum(self._known_ns(each.work) for each in left_out)
        return kept

    def _resolve_all(self) -> None:
        """Resolve every kind of call once. Lists of tensors last: what their dtypes are is learned from the results of
        other calls."""
        chosen = self.trace.selection.chosen
        lists = np.asarray([has_lists(kind) for kind in self.events.kinds], bool)
        late = lists[np.asarray(self.events.ops.kind, np.int64)[chosen]]
        for index in compact(np.concatenate((chosen[~late], chosen[late]))):
            work = self._work(index)
            self._resolve(index, self._placement(index, work), work)

    def _group(self, index: int) -> _Group:
        """One chosen call with the work that it represents."""
        work = self._work(index)
        placement = self._placement(index, work)
        device_ns = self._device_ns(work)
        ops = self.events.ops
        host_ns = self.events.durations.get(index, ops.duration[index])
        call = self._resolve(index, placement, work)
        return _Group(index, call, placement, work, [host_ns], [device_ns], self._known_ns(work))

    def _alike(self) -> dict[int, _Group]:
        """One for all calls that are alike, by the first one's index."""
        alike: dict[tuple[int, Placement], _Group] = {}
        for index in compact(self.trace.selection.chosen):
            group = self._group(index)
            known = alike.setdefault((self.events.ops.kind[index], group.placement), group)
            if known is not group:
                known.host_times += group.host_times
                known.device_times += group.device_times
                known.known_ns += group.known_ns
        return {group.index: group for group in alike.values()}

    def _device_ns(self, work: Sequence[int]) -> int | None:
        """The total duration of pieces of device work; None if there are none, or a duration is unknown."""
        times = [self.events.work.duration[each] for each in work]
        return sum(times) if times and min(times) >= 0 else None

    def _known_ns(self, work: Sequence[int]) -> int:
        """The total duration of those pieces of device work that have one."""
        return sum(max(self.events.work.duration[each], 0) for each in work)

    def _work(self, index: int) -> list[int]:
        """The device work that an event represents, in the order of the trace."""
        first = bisect_left(self._sorted, index)
        return sorted(self._by_op[first : bisect_right(self._sorted, index, first)])

    def _placement(self, index: int, work: list[int]) -> Placement:
        if not self.trace.devices:
            return Placement("cpu")
        kinds = [self.events.work_kinds[self.events.work.kind[each]] for each in work]
        numbers = [kind.device for kind in kinds if kind.device in self.trace.devices]
        if not numbers:
            on_host = self.trace.traits[self.events.ops.kind[index]].works and index not in self._on_graph
            return Placement("cpu" if on_host else self._default_device)
        names = [kind.name for kind in kinds if "memcpy" in kind.category]
        return Placement(
            str(self.trace.devices[numbers[0]]),
            any(_UPLOAD.search(name) for name in names),
            any(_DOWNLOAD.search(name) for name in names),
        )

    def _resolve(self, index: int, placement: Placement, work: list[int]) -> ResolvedCall:
        number = self.events.ops.kind[index]
        known = self._resolved.get((number, placement))
        if known is not None:
            return known
        kind = self.events.kinds[number]
        if self.trace.traits[number].role is EventRole.collective:
            call = self._collective(index, kind)
        elif self.trace.traits[number].role is EventRole.wrapper:
            call = self._outside(kind, placement, work)
        else:
            launched = [self.events.work_kinds[self.events.work.kind[each]] for each in work]
            called = self._called(index) if has_lists(kind) else []
            call = self.trace.calls.resolve(kind, placement, DtypeHints(called, launched))
            if len(self.trace.devices) and placement.device == "cpu" and call.operator is not None:
                call = replace(call, assumed=(*call.assumed, "it ran on the host: it launched no device work"))
        self._resolved[number, placement] = call
        return call

    def _outside(self, kind: OpKind, placement: Placement, work: list[int]) -> ResolvedCall:
        """Device work that no operator launched: a Triton kernel's, if its source is at hand, can be launched again."""
        generated = is_generated_kernel(kind.name)
        if not generated and kind.triton is None:
            detail = "device work without an operator was launched in it"
            return ResolvedCall(kind.name, None, reason="outside_operator", detail=detail)
        read = read_arguments(kind)
        signature = signature_text(read.arguments)
        detail = (
            "a kernel that torch.compile generated"
            if generated
            else "a Triton kernel that torch.compile did not generate: one of the program's or of a library"
        )
        if self.trace.inductor is not None:
            kinds = [self.events.work_kinds[self.events.work.kind[each]] for each in work]
            try:
                if read.missing:
                    raise NoKernel(read.missing)
                grid = kinds[0].grid if len(kinds) == 1 else None
                made = self.trace.inductor.launch(kind.name, kind.triton or {}, read.arguments, grid, placement.device)
            except NoKernel as problem:
                detail += f"; not replayable: {problem}"
            else:
                return ResolvedCall(
                    kind.name,
                    FoundOperator(parse_schema(made.code.schema), "the Inductor cache"),
                    made.arguments,
                    Results(()),
                    (*read.assumed, *made.assumed),
                    signature=signature,
                    code=made.code,
                )
        return ResolvedCall(kind.name, None, reason="triton_launch", detail=detail, signature=signature)

    def _called(self, index: int) -> list[OpKind]:
        """The kinds of a chosen event's callees."""
        stands, inside = self.trace.selection.stands_in, self._inside
        first, end = (np.searchsorted(stands, index, side, sorter=inside) for side in ("left", "right"))
        inside = inside[first:end].tolist()
        return [self.events.kinds[self.events.ops.kind[each]] for each in inside if each != index]

    def _collective(self, index: int, kind: OpKind) -> ResolvedCall:
        """What is known about a collective, from the event itself and those inside it."""
        about: dict[str, Any] = dict(kind.collective or {})
        for each in self._called(index):
            about = {**(each.collective or {}), **about}
        texts = [f"{name}: {value}" for name, value in about.items() if value not in ("", None)]
        taken = signature_text(read_arguments(kind).arguments)
        texts += [f"arguments: {taken}"] if taken else []
        detail = "; ".join(texts) or "nothing is recorded about it"
        if self.trace.collectives is not None:
            try:
                return self._together(kind, self._called(index), about, taken)
            except Unknown as problem:
                detail += f"; not replayable: {problem}"
        return ResolvedCall(kind.name, None, reason="collective", detail=detail, signature=taken)

    def _together(
        self, kind: OpKind, called: Sequence[OpKind], about: Mapping[str, Any], signature: str
    ) -> ResolvedCall:
        """A collective that all ranks replay together. Raises Unknown if the trace does not have all of it."""
        assert self.trace.collectives is not None
        # What a functional one returns is in the trace as an argument of the one that it calls.
        made = next((each for each in called if each.name.startswith("c10d::")), kind)
        given_to = [each.recorded["Input type"] for each in called if each.annotation and each.recorded]
        types = [str(about.get("dtype", "")), *(str(each) for one in given_to for each in one or ())]
        dtype = next(filter(None, map(dtype_of, types)), None)
        operator, given = self.trace.calls.by_name(made, dtype, DtypeHints(called))
        group = str(about.get("Process Group Name", ""))
        assumed = [] if made.name.endswith(_WAITS) else self.trace.collectives.parts(made.name, given, group)[1]
        return ResolvedCall(
            kind.name,
            operator,
            assumed=tuple(assumed),
            results=Results(()),
            signature=signature,
            given=given,
            group=group,
        )

    def _launch(self, call: ResolvedCall, moment: Moment, annotation: dict[str, Any]) -> int:
        """Write a collective as a launch, and wait for it where the program did."""
        collectives = self.trace.collectives
        assert collectives is not None and call.operator is not None and call.given is not None
        after = Moment(moment.start_ns + (moment.duration_ns or 0), None, moment.thread, moment.scope)
        if call.operator.name.endswith(_WAITS):
            sizes = [spec.sizes for spec in call.given["tensor"]]
            landed = [each for each in collectives.in_flight() if [one.meta.sizes for one in each.outputs] == sizes]
            return self._wait(landed[0], after, "") if landed else self.session.records - 1
        for flight in (*collectives.crowded(), *(each for each in collectives.in_flight() if each.kept is call)):
            self._wait(flight, moment)
        given = {
            name: self._value(value, []) if isinstance(value, list) else value for name, value in call.given.items()
        }
        said, _assumed = collectives.parts(call.operator.name, given, call.group)
        ordinal = collectives.launch(call.operator.name, said, moment, annotation, call)
        if given.get("async_op") is False or call.operator.name == "c10d::barrier":
            self._wait(collectives.in_flight()[-1], after, "")
        return ordinal

    def _wait(self, flight: InFlight, moment: Moment, assumed: str = _LATE) -> int:
        """Write a wait, after which nothing has the collective's memory."""
        assert self.trace.collectives is not None
        ordinal = self.trace.collectives.wait(flight, moment, assumed)
        storages = [each.memory for each in (*flight.reads, *flight.writes)]
        self.session.release(list(dict.fromkeys(storages)), moment)
        return ordinal

    def _op(self, group: _Group) -> None:
        index, call = group.index, group.call
        ops = self.events.ops
        moment = Moment(
            ops.start[index] - self._base,
            group.host_ns // group.count,
            self._thread(ops.thread[index]),
            self._scopes.at(int(self.tree.scope[index]), ops.start[index]),
            None if group.device_ns is None else group.device_ns // group.count,
        )
        annotation: dict[str, Any] = {"import": call.status}
        assumed = list(call.assumed)
        annotation |= self._work_annotation(group.work)
        around = self._wrappers(index)
        if around:
            annotation["within"] = around
        if self.trace.unique:
            annotation |= {"count": group.count, **_spread(group.host_times, group.device_times)}
        if call.operator is not None and call.results.values is None:
            annotation["results"] = f"not known: {call.results.unknown}"
        if assumed:
            annotation["assumed"] = assumed
        if call.operator is None and call.signature:
            annotation["arguments"] = call.signature
        annotation |= self._triton(self.events.kinds[ops.kind[index]])
        ordinal = None
        reason, detail = call.reason, call.detail
        if call.operator is not None:
            try:
                step = self._scopes.step(int(self.tree.scope[index]), ops.start[index])
                ordinal = self._write_call(call, moment, annotation, step)
            except CannotRewrite as error:
                reason, detail = (
                    "no_schema",
                    f"no operator {call.name} is registered here, and it has no replacement: {error}",
                )
                annotation["import"] = "incomplete"
            except ValueError as error:
                reason, detail = "import_incomplete", f"a capture cannot hold it: {error}"
                annotation["import"] = "incomplete"
        if ordinal is None:
            ordinal = self.session.unsupported(reason, call.name, detail, moment, annotation)
        self._report(group, ordinal, reason, detail, "rewritten" in annotation)

    @staticmethod
    def _triton(kind: OpKind) -> dict[str, Any]:
        """What a trace says about a generated kernel: its file, hash, grid and warps, and its launch arguments."""
        if kind.triton is None:
            return {}
        inputs = {name: values for name, values in (kind.recorded or {}).items() if values is not None}
        return {"triton": {"kernel": kind.name, **kind.triton, **({"inputs": inputs} if inputs else {})}}

    def _write_call(
        self, call: ResolvedCall, moment: Moment, annotation: dict[str, Any], step: Iteration | None
    ) -> int:
        assert call.operator is not None
        if call.given is not None:
            return self._launch(call, moment, annotation)
        known = self._forms.get(id(call))
        if known is not None:
            form, alike = known
            storages = [TracedStorage(each.bytes, each.device, each.origin) for each in alike]
            return self._ended(self.session.repeat(form, storages, moment, annotation), storages, moment)
        tensors: list[Tensor] = []
        arguments = [(name, self._value(value, tensors)) for name, value in call.arguments]
        where = next((tensor.meta.device for tensor in tensors if tensor.meta.sizes), None)
        if where is None and tensors:
            where = tensors[0].meta.device
        elif where is None:
            named = (value.name for name, value in call.arguments if name == "device" and value is not None)
            where = self.session.device(next(named, None) or "cpu")
        results = realize(call.results, tensors, where)
        if call.code is None:
            kernel = call.operator.kernel
        else:
            kernel = self.session.code_kernel(call.operator.schema, call.code.attached)
            fill_integers(tensors, self.session.records)
        portable = self.trace.portable
        rewritten = None if portable is None else portable.rewrite(kernel, arguments, results, step)
        if isinstance(rewritten, str) and call.operator.found == REPLACED:
            raise CannotRewrite(rewritten)
        if isinstance(rewritten, str):
            annotation["not_rewritten"] = rewritten
            self.report.note(f"{kernel.qualified_name} stays as it is: {rewritten}")
        if isinstance(rewritten, Rewritten):
            used = [each.storage for each in (*tensors, *tensors_in(results)) if each.storage is not None]
            storages = list(dict.fromkeys(used))
            return self._ended(self._rewritten(rewritten, moment, annotation, storages), storages, moment)
        form, storages = self.session.form(kernel, arguments, results)
        if rewritten is None and call.code is None:
            self._forms[id(call)] = form, storages
        return self._ended(self.session.repeat(form, storages, moment, annotation), storages, moment)

    def _ended(self, ordinal: int, storages: Sequence[TracedStorage], moment: Moment) -> int:
        """Release what a call had to itself. Returns its ordinal."""
        self.session.release(storages, Moment(moment.start_ns, thread=moment.thread, scope=moment.scope))
        return ordinal

    def _rewritten(
        self, rewritten: Rewritten, moment: Moment, annotation: dict[str, Any], kept: Sequence[TracedStorage]
    ) -> int:
        """Write what takes a call's place; the first has the call's times and device work, all of it the count of the
        calls. What is in between is released after its last use, unless it is of those kept. Returns its ordinal."""
        annotation["import"] = "inferred"
        annotation["rewritten"] = rewritten.what
        annotation["assumed"] = [*annotation.get("assumed", ()), rewritten.note]
        if rewritten.sentence not in self.report.notes:
            self.report.notes.append(rewritten.sentence)
        used = [
            [each.storage for each in tensors_in([[value for _name, value in arguments], results or []])]
            for _kernel, arguments, results in rewritten.calls
        ]
        last = {storage: place for place, each in enumerate(used) for storage in each if storage is not None}
        first: int | None = None
        for place, (kernel, arguments, results) in enumerate(rewritten.calls):
            ordinal = self.session.op(kernel, arguments, results, moment, annotation)
            if first is None:
                first = ordinal
                moment = moment._replace(duration_ns=None, device_duration_ns=None)
                shown = ("import", "rewritten", "assumed", "count")
                annotation = {key: annotation[key] for key in shown if key in annotation}
            ended = [each for each in dict.fromkeys(used[place]) if each is not None and last[each] == place]
            self.session.release([each for each in ended if each not in kept], moment)
        assert first is not None
        return first

    def _value(self, value: Any, tensors: list[Tensor]) -> Any:
        if isinstance(value, TensorSpec):
            assert value.dtype is not None and value.sizes is not None
            tensor = plain_tensor(
                value.dtype,
                value.sizes,
                value.strides,
                self.session.device(value.device or self._default_device),
                value.offset,
            )
            tensors.append(tensor)
            return tensor
        if isinstance(value, list):
            return [self._value(each, tensors) for each in value]
        return DefaultGenerator(self._default_device) if isinstance(value, DefaultGenerator) else value

    def _work_annotation(self, work: list[int]) -> dict[str, Any]:
        if not work:
            return {}
        kinds = [self.events.work_kinds[self.events.work.kind[each]] for each in work]
        starts = self.events.work.start
        times = [time if time >= 0 else None for time in (self.events.work.duration[each] for each in work)]
        annotation: dict[str, Any] = {
            "device_kernels": [
                {
                    **kind.row(),
                    "device": str(self.trace.devices[kind.device]) if kind.device in self.trace.devices else None,
                    "start_ns": None if starts[each] == NO_TIME else starts[each] - self._base,
                    "duration_ns": time,
                }
                for each, kind, time in zip(work[:_SHOWN_KERNELS], kinds, times, strict=False)
            ]
        }
        if len(kinds) > _SHOWN_KERNELS:
            annotation["device_kernels_left_out"] = len(kinds) - _SHOWN_KERNELS
        streams = sorted({kind.stream for kind in kinds if kind.stream >= 0})
        if streams:
            annotation["stream"] = streams[0] if len(streams) == 1 else streams
        return annotation

    def _thread(self, thread: int) -> int:
        return self.events.borrowed.get(thread, thread)

    def _wrappers(self, index: int) -> list[str]:
        """The names of the non-operators around an event, outermost first; the innermost ones, where they are many."""
        new, parent = [], int(self.tree.parent[index])
        while parent >= 0 and parent not in self._around:
            new.append(parent)
            parent = int(self.tree.parent[parent])
        names = self._around[parent] if parent >= 0 else ()
        for parent in reversed(new):
            number = self.events.ops.kind[parent]
            if self.trace.traits[number].role is EventRole.wrapper:
                names = (*names, self.events.kinds[number].name)
                if len(names) > _MOST_AROUND:
                    names = names[1:]
                    self.report.note(f"ranges nested more than {_MOST_AROUND} deep: ops note the innermost ones")
            self._around[parent] = names
        return ["graph launch"] * (self.events.ops.thread[index] in self.events.borrowed) + list(names)

    def _report(self, group: _Group, ordinal: int, reason: str, detail: str, rewritten: bool) -> None:
        call = group.call
        status = call.status if not reason else "incomplete"

        def entry() -> ReportEntry:
            operator = call.operator
            return ReportEntry(
                call.name,
                operator.overload if operator else "",
                status,
                call.signature,
                operator.found if operator else "",
                call.assumed,
                reason,
                detail,
                rewritten,
            )

        self.report.add(
            (self.events.ops.kind[group.index], group.placement, reason),
            entry,
            ordinal,
            group.count,
            group.host_ns,
            self._timed(group.device_ns, group.known_ns),
        )

    def _timed(self, device_ns: int | None, known_ns: int) -> int | None:
        """The device time of calls, None if it is not known as a whole: then what is known of it is the report's."""
        if device_ns is None and self.report.device_time is not None:
            self.report.device_time.untimed_ns += known_ns
        return device_ns

    def _strays(self) -> list[list[UnclaimedWork]]:
        """Work without an operator; with `unique`, grouped if alike."""
        strays = [*unclaimed_work(self.events, self.tree, self._work_of, self.report)]
        if self.trace.captured is not None:
            strays += captured_outside(self.events, self.tree, self.trace.captured)
        if self.trace.level != "launching":
            strays += compiled_regions(self.events, self.tree)
        if not self.trace.unique:
            return [[each] for each in strays]
        alike: dict[tuple[str, str, str], list[UnclaimedWork]] = {}
        for each in sorted(strays, key=lambda each: each.start):
            alike.setdefault((each.reason, each.name, each.detail), []).append(each)
        return list(alike.values())

    def _stray(self, alike: list[UnclaimedWork]) -> None:
        first, count = alike[0], len(alike)
        host_times, device_times = [each.duration for each in alike], [self._device_ns(each.work) for each in alike]
        host_ns, device_ns = _total(host_times), _total(device_times)
        moment = Moment(
            max(first.start - self._base, 0),
            None if host_ns is None else host_ns // count,
            self._thread(first.thread),
            self._scopes.at(first.scope, first.start),
            None if device_ns is None else device_ns // count,
        )
        annotation = {"import": "incomplete", **self._work_annotation(first.work)}
        if self.trace.unique:
            annotation |= {"count": count, **_spread(host_times, device_times)}
        ordinal = self.session.unsupported(first.reason, first.name, first.detail, moment, annotation)
        self.report.add(
            (first.reason, first.name, first.detail),
            lambda: ReportEntry(first.name, "", "incomplete", first.shown, reason=first.reason, detail=first.detail),
            ordinal,
            count,
            host_ns,
            self._timed(device_ns, sum(self._known_ns(each.work) for each in alike)),
        )

    def _scope(self, index: int, *, begins: bool) -> None:
        ops = self.events.ops
        name = self.events.kinds[ops.kind[index]].name
        start = ops.start[index] + (0 if begins else max(1, ops.duration[index]))
        moment = Moment(start - self._base, None, ops.thread[index], self._scopes[index])
        if begins:
            iteration = self._scopes.iteration(index)
            self.session.scope_begin(name, moment, {"iteration": iteration.row()} if iteration else None)
        else:
            self.session.scope_end(name, moment)


def _spread(host: Sequence[int | None], device: Sequence[int | None]) -> dict[str, Any]:
    """Between what times those of several calls lie, where they are known; their means are the record's."""
    spread = {
        name: {"min": min(known), "median": median_low(known), "max": max(known)}
        for name, times in (("host_ns", host), ("device_ns", device))
        if len(known := [each for each in times if each is not None]) == len(times)
    }
    return {"durations": spread} if len(host) > 1 and spread else {}


def _total(times: Sequence[int | None]) -> int | None:
    known = [each for each in times if each is not None]
    return sum(known) if len(known) == len(times) else None
