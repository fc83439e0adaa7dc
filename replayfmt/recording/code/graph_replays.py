"""Notices the captures and replays of graphs, and records the replays.

While a stream is being captured into a graph its operators do not run, and reading memory would break that capture: the
recorder steps aside on this thread, and a mode writes the graph's body. A graph that cannot be kept, and one that was
captured before, is an `unsupported` record at each replay, which says why.

The table at the end is the list of what is hooked. Nothing is imported just to be hooked (see hooks/patches.py).
"""

from __future__ import annotations

import bisect
import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch._C import _push_on_torch_dispatch_stack

from ..dispatch.mode import RecordingMode, remove_mode
from ..patches import HookHost, Patch, Patched, PatchSet, around, report_missing
from ..stream.records import Unrepresentable
from .graph_body import Allocated, GraphBody, GraphKernel, UsedMemory
from .graph_capture import REASON, GraphMode

_Function = Callable[..., Any]
_BEFORE = "it was captured before the recording began, or by a thread that is not recorded"
_RAW = "the program took its raw graph, which it may change by hand"


class _GraphBegun(NamedTuple):
    """A capture in progress. `away`: the recorder has stepped aside. `watched_before`: what `ThreadWatch.also` gave."""

    mode: GraphMode
    away: AbstractContextManager[None]
    device: torch.device
    watched_before: Any


class _KnownGraph:
    """A graph that was captured. `kernel`: None if it cannot be kept, and `problem` says why. `recorded`: all that was
    done since its capture is recorded. `scratch`: where memory was that it freed. `written_over`: memory of other
    graphs that lies there."""

    __slots__ = ("born", "kernel", "memory", "problem", "recorded", "scratch", "written_over")

    def __init__(self, kernel: GraphKernel | None, body: GraphBody, recorded: bool) -> None:
        self.kernel = kernel
        self.problem = body.problem
        self.memory = list(body.kept())
        self.scratch = body.scratch()
        self.written_over: list[UsedMemory] = []
        self.recorded = recorded
        self.born = False  # the memory that it allocated is in the capture


class Graphs(Patched):
    """The hooks of one capture."""

    def __init__(self, recorder: HookHost) -> None:
        self._recorder = recorder
        self._known: weakref.WeakKeyDictionary[Any, _KnownGraph] = weakref.WeakKeyDictionary()
        self._begun: dict[int, _GraphBegun] = {}  # by the identity of the graph
        self._numbers = iter(range(1, 1 << 62))
        self._now = threading.local()  # `replay`: what the kernel's call does; `begins`: whether a capture begins
        self._patches = PatchSet(table(self), lambda patch: report_missing(recorder, patch) if patch.vital else None)

    def remove(self) -> None:
        super().remove()
        for begun in self._begun.values():
            self._leave(begun)
            begun.mode.body.drop()
        self._begun.clear()
        self._known.clear()

    # ------------------------------------------------------------------------------------------------------- a capture

    def begin(self, original: _Function, graph: Any, /, *args: Any, **kwargs: Any) -> Any:
        if getattr(self._now, "begins", False):  # a class calls that of its base
            return original(graph, *args, **kwargs)
        mode = self._recorder.attempt(self._recorder.mode_here)
        if mode is not None:
            self._recorder.attempt(self._follow_streams, mode)
        self._now.begins = True
        try:
            # The seeds of generators, which PyTorch writes here and at each replay: a replay's graph has its own.
            with self._recorder.hidden():
                result = original(graph, *args, **kwargs)
        finally:
            self._now.begins = False
        if mode is not None:
            self._recorder.attempt(self._begin, graph, mode)
        return result

    @staticmethod
    def _follow_streams(mode: RecordingMode) -> None:
        """The host may have to wait for devices for it, which it cannot while a graph is captured."""
        core = mode.core
        if core.streams is not None:
            with core.lock:
                core.streams.follow()

    def _begin(self, graph: Any, mode: RecordingMode) -> None:
        core = mode.core
        device = torch.accelerator.current_accelerator()
        if device is None:
            return
        device = torch.device(device.type, torch.accelerator.current_device_index())
        body = GraphBody(device.type, redact=core.options.redact, keeps=core.writer.keeps)
        if isinstance(mode, GraphMode):
            mode.body.unkept("another graph was captured meanwhile")
            body.unkept("it was captured while another graph was")
        graph_mode = GraphMode(core, body, device)
        if core.streams is not None:
            core.streams.graphs.append(graph_mode.streams)
        graph_mode.unrecorded.account()
        # Backward passes run in threads of PyTorch's, which have this mode and not the recorder's.
        before = core.thread_watch.also(graph_mode)
        begun = _GraphBegun(graph_mode, self._recorder.hidden(), device, before)
        begun.away.__enter__()
        core.graph_captures += 1
        _push_on_torch_dispatch_stack(begun.mode)
        self._known.pop(graph, None)
        self._begun[id(graph)] = begun

    def end(self, original: _Function, graph: Any, /, *args: Any, **kwargs: Any) -> Any:
        begun = self._begun.pop(id(graph), None)
        if begun is not None:
            self._recorder.attempt(begun.mode.look)
        try:
            result = original(graph, *args, **kwargs)
        except BaseException:
            if begun is not None:
                self._recorder.attempt(self._leave, begun)
                self._recorder.attempt(begun.mode.body.drop)
            raise
        if begun is not None:
            self._recorder.attempt(self._end, graph, begun)
            self._recorder.attempt(self._leave, begun)
        return result

    @staticmethod
    def _leave(begun: _GraphBegun) -> None:
        remove_mode(begun.mode)
        core = begun.mode.core
        core.graph_captures -= 1
        if core.streams is not None and begun.mode.streams in core.streams.graphs:
            core.streams.graphs.remove(begun.mode.streams)
        core.thread_watch.also(begun.watched_before)
        begun.away.__exit__(None, None, None)

    def _end(self, graph: Any, begun: _GraphBegun) -> None:
        remove_mode(begun.mode)  # what follows is the recorder's own
        body = begun.mode.body
        kernel = None
        if not body.problem:
            try:
                unknown, streams = begun.mode.unrecorded.unknown, len(begun.mode.streams.with_ops)
                kernel = GraphKernel(next(self._numbers), body, begun.device, self._call, streams, unknown)
            except Unrepresentable as problem:
                body.unkept(problem.detail)
        if kernel is None:
            body.drop()
        known = _KnownGraph(kernel, body, begun.mode.core.on)
        for other in self._known.values():
            known.written_over += _lying_in(known.scratch, other.memory)
            other.written_over += _lying_in(other.scratch, known.memory)
        self._known[graph] = known

    def warm_up(self, original: _Function, /, *args: Any, **kwargs: Any) -> Any:
        """Of `make_graphed_callables`: it warms up with gradients that nobody wrote, and drops what comes of it."""
        mode = self._recorder.attempt(self._recorder.mode_here)
        if mode is None:
            return original(*args, **kwargs)
        mode.core.unwritten_reads += 1
        try:
            return original(*args, **kwargs)
        finally:
            mode.core.unwritten_reads -= 1

    # -------------------------------------------------------------------------------------------------------- a replay

    def replay(self, original: _Function, graph: Any, /, *args: Any, **kwargs: Any) -> Any:
        mode = self._recorder.attempt(self._recorder.mode_here)
        run = functools.partial(original, graph, *args, **kwargs)
        if mode is None:
            return run()
        return self._replay(mode, graph, run)

    def _replay(self, mode: RecordingMode, graph: Any, run: _Function) -> Any:
        if isinstance(mode, GraphMode):
            self._recorder.attempt(mode.body.unkept, "another graph was replayed into it")
            return run()
        known = self._recorder.attempt(self._known.get, graph)
        with self._recorder.hidden():
            values = self._recorder.attempt(self._values, known)
            if known is not None and known.kernel is not None and isinstance(values, dict):
                self._recorder.attempt(self._before, mode, known)
                self._now.replay = run
                try:
                    return mode.issue(known.kernel, (), values)
                finally:
                    self._recorder.attempt(self._written, known.written_over)
        if self._recorder.launching():
            detail = f"a graph of a device was replayed that a replay could not: {values}"
            self._recorder.unsupported(REASON, f"{type(graph).__name__}.replay", detail)
        try:
            with self._recorder.hidden():
                return run()
        finally:
            if known is not None:
                self._recorder.attempt(self._written, [*known.memory, *known.written_over])

    def _written(self, memory: list[UsedMemory]) -> None:
        """A replay wrote to memory, and no record says what: it is imported again at its next use."""
        for storage in filter(None, (each.storage() for each in memory)):
            self._recorder.tell(lambda core, each: core.outside.storage_written(each), storage)

    @staticmethod
    def _values(known: _KnownGraph | None) -> dict[str, torch.Tensor] | str:
        """The arguments of a replay, or why there are none."""
        if known is None:
            return _BEFORE
        return known.problem if known.kernel is None or known.problem else known.kernel.values()

    def _before(self, mode: RecordingMode, known: _KnownGraph) -> None:
        self._bear(mode, known)
        assert known.kernel is not None
        for storage in known.kernel.rewritten():
            self._recorder.tell(lambda core, each: core.outside.about_to_be_written(each), storage)

    def _bear(self, mode: RecordingMode, known: _KnownGraph) -> None:
        """Before the first replay: memory that the capture allocated is allocated, and nothing has written it. What
        happened while nothing was recorded may have, and then it is imported at its first use."""
        if known.born or not mode.core.on:
            return
        known.born = True
        assert known.kernel is not None
        for tensor in known.kernel.allocated() if known.recorded else ():
            if mode.core.attempt(mode.core.storages.tracker_of, tensor.untyped_storage()) is None:
                args, kwargs = Allocated.allocation(tensor)
                mode.issue(Allocated(tensor), args, kwargs)

    def _call(self, **_arguments: Any) -> Any:
        """What a kernel's call does: the replay that is about to happen on this thread."""
        run, self._now.replay = self._now.replay, None
        run()

    # ---------------------------------------------------------------------------------------------------------- others

    def reset(self, original: _Function, graph: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._recorder.attempt(self._known.pop, graph, None)
        return original(graph, *args, **kwargs)

    def register(self, original: _Function, graph: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Of `register_generator_state`, which allocates seeds, too."""
        with self._recorder.hidden():
            return original(graph, *args, **kwargs)

    def branch(self, original: _Function, /, *args: Any, **kwargs: Any) -> Any:
        """Of what begins a part of a graph that is run on a condition (`torch.cond` while a graph is captured)."""
        result = original(*args, **kwargs)
        mode = self._recorder.attempt(self._recorder.mode_here)
        if isinstance(mode, GraphMode):
            self._recorder.attempt(mode.body.unkept, "parts of it are run on a condition (conditional nodes)")
            self._recorder.attempt(mode.streams.enter_current)  # the part is captured on a stream of its own
        return result

    def raw(self, original: _Function, graph: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Of what gives the program the graph itself."""
        known = self._recorder.attempt(self._known.get, graph)
        if known is not None:
            known.problem = known.problem or _RAW
        return original(graph, *args, **kwargs)


def _lying_in(ranges: list[tuple[int, int]], memory: list[UsedMemory]) -> list[UsedMemory]:
    """The memory of a graph's own that lies in ranges of addresses, which are in order and may overlap."""
    if not ranges:
        return []
    reach = list(itertools.accumulate((end for _begin, end in ranges), max))
    found = []
    for each in memory:
        before = bisect.bisect_left(ranges, (each.address + each.bytes, 0))  # those that begin before its end
        if each.made and before and reach[before - 1] > each.address:
            found.append(each)
    return found


# The classes of graphs, and the base of each in C++. The base is hooked where this build has more than a name of it: a
# program may use it alone, and its class may run functions of the program's before and after it calls the base.
_CLASSES = (
    ("torch.cuda.graphs", "CUDAGraph", "_CUDAGraph"),
    ("torch.xpu.graphs", "XPUGraph", "_XPUGraph"),
    ("torch.mtia.mtia_graph", "MTIAGraph", "_MTIAGraph"),
    ("torch.accelerator.graphs", "Graph", "_acceleratorGraph"),
)


def _in_cpp(base: str, method: str) -> bool:
    return hasattr(getattr(torch._C, base, None), method)


def table(graphs: Graphs) -> list[Patch]:
    """Every hook, for one capture."""
    found = [
        Patch(module, f"{name}.{method}", around(make), REASON, vital=method == "replay")
        for module, name in (each[:2] if not _in_cpp(each[2], "replay") else ("torch._C", each[2]) for each in _CLASSES)
        for method, make in (
            ("capture_begin", graphs.begin),
            ("capture_end", graphs.end),
            ("replay", graphs.replay),
            ("reset", graphs.reset),
        )
    ]
    # The first half of `capture_end`, which not every version has apart, and what not every device has.
    more = (("capture_end_pre", graphs.end), ("register_generator_state", graphs.register))
    found += [
        Patch("torch._C", f"{base}.{method}", around(make), REASON)
        for _module, _name, base in _CLASSES
        for method, make in more
        if _in_cpp(base, method)
    ]
    raw = ("raw_cuda_graph", "raw_cuda_graph_exec")
    found += [Patch("torch.cuda.graphs", f"CUDAGraph.{method}", around(graphs.raw), REASON) for method in raw]
    branches = ("begin_capture_to_if_node", "begin_capture_to_while_node")  # not every version has them
    found += [
        Patch("torch.cuda.graphs", f"CUDAGraph.{method}", around(graphs.branch), REASON)
        for method in branches
        if hasattr(torch.cuda.graphs.CUDAGraph, method)
    ]
    return found + [
        Patch(module, "make_graphed_callables", around(graphs.warm_up))
        for module in ("torch.cuda", "torch.cuda.graphs")
    ]
