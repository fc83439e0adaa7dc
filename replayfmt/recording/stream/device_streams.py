"""Streams of accelerators: which are current where a record is issued, and what orders the work on them.

PyTorch's trace tells of events and waits, but not when a program asks whether the work of an event or a stream is done
(`query`): these methods are patched.
"""

from __future__ import annotations

import ctypes
import gc
import heapq
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from replayfmt.format.codes import RecordKind
from replayfmt.format.model import StreamPlacement
from replayfmt.pytorch.accelerators import (
    Callbacks,
    GpuTrace,
    current_streams,
    device_module,
    followed_kind,
    handle_of,
    has_streams,
    is_being_captured,
    kind_here,
    tells_of_memory,
)

from ..patches import HookHost, Patch, Patched, PatchSet, StandIn
from .buffer import RecordBuffer
from .records import Records
from .session import Session

_TYPES: tuple[type, ...] = (torch.Event, torch.Stream)
_METHOD = "query"
# Attributes of the devices' own classes that hold what the trace calls an event. What these classes inherit from
# torch.Event has no value.
_HANDLES = ("cuda_event", "sycl_event")


def builtin_types_are_seen() -> bool:
    """Whether queries of the types that are written in C can be seen in this Python."""
    return all(_METHOD in _namespace(each) for each in _TYPES)


def _namespace(of: type) -> dict[str, Any]:
    found = gc.get_referents(vars(of))
    return found[0] if len(found) == 1 and isinstance(found[0], dict) else {}


class StreamQueries(Patched):
    """The patches of one capture that see queries."""

    def __init__(self, kind: str, trace: StreamTrace) -> None:
        """`kind`: of accelerator. `trace` is told what the program learned."""
        self._wraps = {
            "Event": partial(_Query, trace, trace.event_is_done),
            "Stream": partial(_Query, trace, trace.stream_is_done),
        }
        module = device_module(kind)
        named = [(name, getattr(module, name, None)) for name in self._wraps]
        self._patches = PatchSet(
            Patch(f"torch.{kind}", f"{name}.{_METHOD}", self._wraps[name])
            for name, found in named
            if isinstance(found, type) and found not in _TYPES
        )
        self._originals: list[tuple[type, Any]] = []

    def install(self) -> None:
        self._patches.install()
        for each in _TYPES if builtin_types_are_seen() else ():
            original = _namespace(each)[_METHOD]
            self._originals.append((each, original))
            _set(each, self._wraps[each.__name__](original))

    def remove(self) -> None:
        """Restore everything. Idempotent."""
        self._patches.remove()
        while self._originals:
            _set(*self._originals.pop())


def _set(of: type, method: Any) -> None:
    _namespace(of)[_METHOD] = method
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(of))


class _Query(StandIn):
    def __init__(self, trace: StreamTrace, tell: Callable[[Any], None], original: Callable[..., Any]) -> None:
        super().__init__(original)
        self._trace = trace
        self._tell = tell

    def __call__(self, of: Any, *args: Any, **kwargs: Any) -> Any:
        done = self._original(of, *args, **kwargs)
        if done:
            self._trace.attempt(self._tell, of)
        return done


IN_UNSEEN_CAPTURE = (
    "it was issued while its device captured a graph, and the recorder did not see that begin: C++ code or another "
    "library began it"
)


class GraphBeingCaptured(Protocol):
    """What streams are given while a graph is captured can be part of the graph, and then it is no record here."""

    def recorded(self, event: int, handle: int) -> bool:
        """Whether an event on a stream of the current device is part of it."""

    def waited(self, event: int, handle: int) -> bool:
        """Whether a wait of a stream of the current device is part of it."""

    def deleted(self, event: int) -> None: ...


class Streams:
    """The streams and events of a capture by number. Callers hold the recorder's lock."""

    def __init__(self, buffer: RecordBuffer, records: Records, kind: str, session: Session) -> None:
        """`kind`: of the accelerators that are followed."""
        self._buffer = buffer
        self._records = records
        self.kind = kind
        self._session = session
        self._indices: list[int] = []  # of the devices that the capture has used
        self._devices: dict[int, int] = {}  # their ids, by index
        self._numbers: dict[int, dict[int, int]] = {}  # of streams, by device index and native handle
        self._homes: dict[int, int] = {}  # device index of each native handle but that of default streams
        self._placements: dict[tuple[tuple[int, int], ...], int] = {}
        self._events: dict[int, int] = {}  # numbers of recorded events, by native handle
        self._free: list[int] = []  # numbers of events that are gone
        records.new_device = self.device_seen
        self.graphs: list[GraphBeingCaptured] = []
        self.first_seen: Callable[[], bool] | None = None  # called before work on another stream is recorded

    def device_seen(self, device: torch.device, number: int) -> bool:
        """The capture uses a device. Returns whether it is there."""
        if device.type == self.kind and device.index is not None:
            if not has_streams(device.index):
                return False
            self._indices.append(device.index)
            self._devices[device.index] = number
            self._session.watch_streams(device)
        return True

    def placement(self) -> int:
        """The id of the calling thread's current streams; 0 if all are default ones."""
        if not self._indices:
            return 0
        streams = current_streams(self._indices)
        if not streams or self.in_unseen_capture():
            return 0
        self.follow()
        key = tuple(
            sorted(
                (self._devices[each.device_index], self._number(each.device_index, handle_of(each))) for each in streams
            )
        )
        known = self._placements.get(key)
        if known is None:
            with self._buffer.lock:
                known = self._placements[key] = self._buffer.writer.placement(StreamPlacement(key))
        return known

    def in_unseen_capture(self) -> bool:
        """Whether the calling thread's current stream is being captured into a graph whose beginning was not seen: by
        C++ code, or with the driver's own calls."""
        return not self.graphs and is_being_captured(self.kind)

    def follow(self) -> None:
        """Work on other streams than the default ones follows. The host may wait for devices here."""
        if self.first_seen is not None and self.first_seen():
            self._begin()

    def _begin(self) -> None:
        """The trace has begun only now: what was issued before comes before all that follows, because the host waits
        for it."""
        self.first_seen = None
        for index in list(self._indices):
            torch.accelerator.synchronize(index)
            self._records.on_device(RecordKind.synchronize, torch.device(self.kind, index))

    def of(self, stream: torch.Stream) -> tuple[torch.device, int]:
        number = self._number(stream.device_index, handle_of(stream)) if stream.stream_id else 0
        return stream.device, number

    def _number(self, index: int, handle: int) -> int:
        numbers = self._numbers.setdefault(index, {})
        self._homes[handle] = index
        return numbers.setdefault(handle, len(numbers) + 1)

    def _stream(self, handle: int) -> tuple[torch.device, int]:
        """The device and number of the stream with a handle; that of a default stream is 0 on every device."""
        index = self._homes.get(handle)
        if index is None:
            index = torch.accelerator.current_device_index()
        default = not handle or handle == self._default_handle(index)
        return torch.device(self.kind, index), 0 if default else self._number(index, handle)

    def _default_handle(self, index: int) -> int:
        current = torch.accelerator.current_stream(index)
        return 0 if current.stream_id else handle_of(current)

    # -------------------------------------------------------------------------------------------------------- the trace

    def recorded(self, event: int, stream: int) -> None:
        self._recorded(event, *self._stream(stream))

    def _recorded(self, event: int, device: torch.device, number: int) -> None:
        known = self._events.get(event)
        if known is None:
            known = heapq.heappop(self._free) if self._free else len(self._events) + 1
            self._events[event] = known
        self._records.on_device(RecordKind.event_record, device, known, number)

    def waited(self, event: int, stream: int) -> None:
        known = self._events.get(event)
        if known is not None:  # or it was recorded before the capture: what it stands for is done
            device, number = self._stream(stream)
            self._records.on_device(RecordKind.event_wait, device, known, number)

    def knows(self, event: int) -> bool:
        """Whether the event with a handle was recorded."""
        return event in self._events

    def deleted(self, event: int) -> None:
        for graph in self.graphs:
            graph.deleted(event)
        known = self._events.pop(event, None)
        if known is not None:
            heapq.heappush(self._free, known)

    def launched(self, work: int, device: torch.device) -> bool:
        """A collective was launched. Its library has its own streams and events, so an event of ours takes their place.
        Returns whether there is one, for `landed`."""
        if device.type != self.kind or self.first_seen is not None:
            return False
        self._recorded(~work, *self.of(torch.accelerator.current_stream(device)))
        return True

    def landed(self, work: int, device: torch.device) -> None:
        """The current stream waits for that collective."""
        home, number = self.of(torch.accelerator.current_stream(device))
        self._records.on_device(RecordKind.event_wait, home, self._events[~work], number)
        self.deleted(~work)

    def synchronized_event(self, event: int) -> None:
        known = self._events.get(event)
        if known is not None:
            self._records.event_synchronize(known)

    def synchronized_stream(self, stream: int) -> None:
        self._records.on_device(RecordKind.stream_synchronize, *self._stream(stream))

    def synchronized(self, stream: torch.Stream) -> None:
        self._records.on_device(RecordKind.stream_synchronize, *self.of(stream))

    def synchronized_device(self) -> None:
        here = torch.device(self.kind, torch.accelerator.current_device_index())
        self._records.on_device(RecordKind.synchronize, here)


class StreamTrace(Patched):
    """Follows the streams of one capture while it is installed."""

    def __init__(self, recorder: HookHost, streams: Streams, lock: Any) -> None:
        self._recorder = recorder
        self._streams = streams
        self._lock = lock
        self._trace = GpuTrace(
            streams.kind,
            Callbacks(
                self._telling(streams.recorded, lambda graph, *handles: graph.recorded(*handles)),
                self._telling(streams.waited, lambda graph, *handles: graph.waited(*handles)),
                self._telling(streams.deleted, always=True),
                self._telling(streams.synchronized_event),
                self._telling(streams.synchronized_stream),
                self._telling(streams.synchronized_device),
            ),
        )

        self._queries = StreamQueries(streams.kind, self)

    def install(self) -> None:
        """Begin, or wait for the first work on another stream than a default one where the trace costs much."""
        if tells_of_memory(self._streams.kind):
            self._streams.first_seen = self._begins_late
        else:
            self._trace.install()
        self._queries.install()

    def _begins_late(self) -> bool:
        begins = not self._trace.active
        self._trace.install()
        return begins

    def remove(self) -> None:
        self._queries.remove()
        self._streams.first_seen = None
        self._trace.remove()

    def attempt(self, step: Callable[..., Any], *args: Any) -> Any:
        return self._recorder.attempt(step, *args)

    def event_is_done(self, event: Any) -> None:
        """The program was told that an event is done; of one that is not known the device is what it waited for."""
        handles = ("event_id",) if type(event) is torch.Event else _HANDLES
        handle = next((int(getattr(event, name)) for name in handles if hasattr(event, name)), None)
        if self._trace.active:
            streams = self._streams
            self._telling(
                streams.synchronized_device if handle is None else partial(streams.synchronized_event, handle)
            )()

    def stream_is_done(self, stream: torch.Stream) -> None:
        """The program was told that a stream's work is done."""
        if self._trace.active:
            self._telling(partial(self._streams.synchronized, stream))()

    def _telling(
        self,
        what: Callable[..., None],
        in_graph: Callable[..., bool] = lambda _graph, *_handles: False,
        *,
        always: bool = False,
    ) -> Callable[..., None]:
        """`what`, for what the program does outside of ops; `always`: whoever does it. `in_graph` takes what is part of
        a graph."""
        recorder, lock, graphs = self._recorder, self._lock, self._streams.graphs

        def step(*handles: int) -> None:
            with lock:
                what(*handles)

        def tell(*handles: int) -> None:
            graph_here = bool(graphs) and recorder.graph_here()
            # In any thread: the end of a backward pass joins its streams in one that has no mode any more.
            offered = graphs if graph_here or not recorder.within() else ()
            if any(recorder.attempt(in_graph, graph, *handles) is not False for graph in offered):
                return
            if always or (graph_here and recorder.is_on()) or not recorder.inside():
                recorder.attempt(step, *handles)

        return tell


def stream_policies() -> dict[str, str]:
    """What the session says of streams: what of an accelerator's cannot be followed."""
    if not kind_here():
        return {}
    if not followed_kind():
        return {"streams": "not followed: PyTorch's module for the accelerator has no _gpu_trace"}
    return {} if builtin_types_are_seen() else {"streams": "queries of events are not seen in this Python"}
