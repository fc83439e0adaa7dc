"""What sees the ops that are issued while a graph is captured: none of them runs, so none is recorded as an op.

`GraphStreams` follows which streams the graph has and what orders them, `UnrecordedWork` finds what no recorded op
issued: launches of other libraries, callbacks of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replayfmt.format.codes import RecordKind
from replayfmt.format.model import StreamPlacement
from replayfmt.pytorch.accelerators import UnknownFrontier, frontier, handle_of

from ..arguments import OpCall
from ..capture_session import CaptureSession
from ..dispatch.mode import RecordingMode
from ..kernels import CapturedKernel, devices_of
from ..stream.records import Unrepresentable
from .graph_body import GraphBody

_Stream = tuple[int, int]  # device index, native handle


class GraphStreams:
    """The streams of one capture of a graph, which begins on the current stream of `device`."""

    def __init__(self, body: GraphBody, device: torch.device, recorded_outside: Callable[[int], bool] | None) -> None:
        """`recorded_outside` tells whether an event with a handle was recorded, and not in the graph. None: PyTorch
        does not tell what streams wait for."""
        self._body = body
        self._kind = device.type
        self._recorded_outside = recorded_outside
        self._events: dict[int, int] = {}  # numbers of events that were recorded in the graph, by native handle
        self._recorded = 0
        self._numbers: dict[_Stream, int] = {}
        self._counts: dict[int, int] = {}  # how many streams have a number, by device index
        self.origin = device.index
        self._numbers[self._current(device.index)] = 0
        self.with_ops: set[tuple[int, int]] = set()  # device index, number

    @staticmethod
    def _current(index: int) -> _Stream:
        stream = torch._C._accelerator_getStream(index)
        return index, handle_of(stream)

    # ------------------------------------------------------------------------------------------------------------- ops

    def takes(self, devices: Iterable[torch.device]) -> bool:
        """Whether an op that these devices' current streams are given becomes part of the graph."""
        found = [self._current(device.index or 0) in self._numbers for device in devices]
        if all(found):
            return True
        if self._recorded_outside is None:
            self._body.unkept(
                f"its work is on several streams, and PyTorch's module for {self._kind} does not tell what orders them "
                "(it has no _gpu_trace)"
            )
        elif any(found):
            self._body.unkept("an op worked on two devices, and the capture does not have the stream of one of them")
        else:
            return False
        return True

    def placement(self, devices: Iterable[torch.device]) -> StreamPlacement:
        """The streams that an op of the graph is given to, for the record of the op."""
        used = {}
        for device in devices:
            index = device.index or 0
            number = self._numbers.get(self._current(index), 0)
            self.with_ops.add((index, number))
            if number:
                used[self._body.device_id(index)] = number
        return StreamPlacement(tuple(sorted(used.items())))

    def enter_current(self) -> None:
        """The current stream is one of the graph's, whatever it waits for."""
        self._enter(self._current(torch.accelerator.current_device_index()))

    def _enter(self, stream: _Stream) -> None:
        if stream not in self._numbers:
            self._counts[stream[0]] = self._counts.get(stream[0], 0) + 1
            self._numbers[stream] = self._counts[stream[0]]

    # ---------------------------------------------------------------------------------------------------------- events

    def recorded(self, event: int, handle: int) -> bool:
        """An event was recorded on a stream of the current device. Returns whether that is part of the graph."""
        index = torch.accelerator.current_device_index()
        number = self._numbers.get((index, handle))
        if number is None:
            self._events.pop(event, None)
            return False
        self._recorded += 1
        self._events[event] = self._recorded
        self._body.stream_record(RecordKind.event_record, index, (self._recorded, number))
        return True

    def waited(self, event: int, handle: int) -> bool:
        """A stream of the current device waited for an event. Returns whether that is part of the graph."""
        index = torch.accelerator.current_device_index()
        known = self._events.get(event)
        if known is None:
            if (index, handle) not in self._numbers:
                return False
            if self._recorded_outside is not None and self._recorded_outside(event):
                self._body.unkept("it waits for an event that was recorded outside of it")
            return True
        self._enter((index, handle))
        self._body.stream_record(RecordKind.event_wait, index, (known, self._numbers[index, handle]))
        return True

    def deleted(self, event: int) -> None:
        """An event is gone; another one may get its handle."""
        self._events.pop(event, None)


class UnrecordedWork:
    """Looks for such work while one graph is captured: before each op the frontier of the capture must be what ops have
    led it to. Who looks and sees nothing knows nothing: an op that has work must have led the frontier on."""

    def __init__(self, kind: str) -> None:
        """`kind` is that of the device."""
        self._kind = kind
        self._accounted: set[int] = set()
        self._failed = ""
        self._unseen = ""

    @property
    def unknown(self) -> str:
        """Why it cannot be told, if so."""
        return self._failed or self._unseen

    def account(self, op: str = "") -> None:
        """What the graph holds now was issued by ops that are in its body. `op`: the last of them, if it has work."""
        if self._failed:
            return
        try:
            nodes = {node.handle for node in frontier(self._kind)}
        except UnknownFrontier as problem:
            self._failed = str(problem)
            return
        if op and nodes <= self._accounted:
            self._unseen = self._unseen or f"the device told of no work of {op}, which has some"
        self._accounted |= nodes

    def found(self) -> str:
        """What was issued since and is not accounted for, in words; "" if there is nothing."""
        if self._failed:
            return ""
        try:
            kinds = [node.kind for node in frontier(self._kind) if node.handle not in self._accounted]
        except UnknownFrontier as problem:
            self._failed = str(problem)
            return ""
        return ", ".join(sorted(set(kinds)))


REASON = "cuda_graph"
_BESIDE = (
    "while a graph was captured it was given to a stream that the capture does not have, which waits for no event of "
    "the capture's streams: it ran at once, and its memory could not be read meanwhile"
)


class GraphMode(RecordingMode):
    """Writes a body. Ops of the host run at once and belong to no graph: they are recorded as ever."""

    told = False
    captures_graph = True

    def __init__(self, core: CaptureSession, body: GraphBody, device: torch.device) -> None:
        TorchDispatchMode.__init__(self)
        self.core = core
        self.body = body
        self._kind = device.type
        self.streams = GraphStreams(body, device, core.streams.knows if core.streams else None)
        self.unrecorded = UnrecordedWork(device.type)

    def record(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        devices = devices_of(self._kind, args, kwargs)
        if not devices:
            return super().record(kernel, args, kwargs) if self.core.on else kernel.call(*args, **kwargs)
        if self.core.attempt(self.streams.takes, devices) is False:
            return super()._run_unsupported(kernel, args, kwargs, Unrepresentable(REASON, _BESIDE))
        self.core.attempt(self.look)
        call = self.core.attempt(self.body.before, kernel, args, kwargs)
        result = kernel.call(*args, **kwargs)
        if call is not None:
            self.core.attempt(self._issued, call, result, devices)
        return result

    def _issued(self, call: OpCall, result: Any, devices: set[torch.device]) -> None:
        wrote = self.body.after(call, result, self.streams.placement(devices))
        has_work = wrote and call.kernel.own and not call.kernel.in_place_view
        self.unrecorded.account(call.kernel.name if has_work else "")

    def observed(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.record(kernel, args, kwargs)

    def look(self) -> None:
        """Whether anything else than ops was issued to the graph. To be called while it is captured."""
        if self.launched:
            self.body.unkept("a compiled region or a launch that the recorder does not see ran while it was captured")
        elif found := self.unrecorded.found():
            self.body.unkept(
                f"it holds work that no operator issued (nodes of the kind {found}): another library launched it, or "
                "the program did by hand"
            )

    def _begins(self) -> bool:
        return True

    def _ends(self) -> bool:
        return False

    def _beneath(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.body.unkept("another dispatch mode lay beneath the recorder while it was captured")
        return func(*args, **kwargs)

    def _run_unsupported(
        self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any], problem: Unrepresentable
    ) -> Any:
        if devices_of(self._kind, args, kwargs):
            self.body.unkept(f"{kernel.name}: {problem.detail}")
            return kernel.call(*args, **kwargs)
        return super()._run_unsupported(kernel, args, kwargs, problem)
