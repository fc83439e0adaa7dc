"""The streams of a graph that is being captured: which of them it has, and what orders them.

A capture has the stream that it begins on, and each stream that waits for an event of one that it has. Number 0 is the
stream that it begins on. What other streams are given meanwhile is none of the graph's work, and runs at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from replayfmt.format.codes import RecordKind
from replayfmt.format.model import StreamPlacement
from replayfmt.pytorch.streams import handle_of

_Stream = tuple[int, int]  # device index, native handle


class BodyOfStreams(Protocol):
    """What the streams write to: a GraphBody."""

    def stream_record(self, kind: RecordKind, device_index: int, ints: Sequence[int]) -> None:
        """Add a record about a stream of a device."""
        ...

    def device_id(self, device_index: int) -> int:
        """The id of an accelerator."""
        ...

    def unkept(self, problem: str) -> None: ...


class GraphStreams:
    """The streams of one capture of a graph, which begins on the current stream of `device`."""

    def __init__(
        self, body: BodyOfStreams, device: torch.device, recorded_outside: Callable[[int], bool] | None
    ) -> None:
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
