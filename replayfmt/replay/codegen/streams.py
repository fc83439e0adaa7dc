"""Streams and events in generated code: where a replay switches streams, and what orders their work.

`LateCopies` keeps track of the host's memory that a device still copies to or from: what the host does with it waits
until that is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Literal, Protocol

import torch

from replayfmt.format.codes import KernelKind, RecordKind
from replayfmt.format.model import Signature, StreamPlacement
from replayfmt.format.races import accesses
from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch.accelerators import Current, SetStreams, default_stream, is_accelerator, keeps_memory_for_streams

from ..operations import synchronize
from ..planning.devices import DeviceMap
from ..planning.records import orders_streams
from ..planning.scan import Scan
from .windows import FrameLists, Variables, WindowText

StreamsMode = Literal["captured", "serial"]
STREAMS_MODES = ("captured", "serial")
_DEFAULTS = StreamPlacement(())


@dataclass
class ReplayStreams:
    """The streams and events of a plan. `captured`: as many as the capture had, else the default ones alone, with its
    work in capture order; `problem` says why, if that was not asked for."""

    devices: DeviceMap
    captured: bool
    problem: str = ""
    _streams: dict[tuple[torch.device, int], torch.Stream] = field(default_factory=dict)
    _events: dict[tuple[torch.device, int], torch.Event] = field(default_factory=dict)

    def stream(self, device_id: int, number: int) -> torch.Stream | None:
        """What replays a stream of a captured device; None on the host, and where nothing replays the device."""
        device = self.devices.targets[device_id]
        if device is None or not is_accelerator(device):
            return None
        key = (device, number if self.captured else 0)
        known = self._streams.get(key)
        if known is None:
            known = self._streams[key] = torch.Stream(device) if key[1] else default_stream(device)
        return known

    def event(self, number: int, device_id: int) -> torch.Event:
        """What replays an event that is recorded on a device."""
        key = (self.devices.target(device_id), number)
        if key not in self._events:
            self._events[key] = torch.Event(key[0])
        return self._events[key]

    def begin(self) -> Callable[[], None]:
        """Make the default streams current, where windows begin. Returns what makes the caller's current again."""
        callers = Current()
        SetStreams([default_stream(device) for device in self.accelerators()])()
        return callers.restore

    def accelerators(self) -> list[torch.device]:
        return [device for device in self.devices.in_use() if is_accelerator(device)]

    def besides_default(self, device: torch.device) -> list[torch.Stream]:
        """The streams of a device that work is given to besides its default one."""
        return [stream for stream in self.of(device) if stream.stream_id]

    def of(self, device: torch.device) -> list[torch.Stream]:
        return [stream for (on, _number), stream in self._streams.items() if on == device]


def replay_streams(reader: CaptureReader, devices: DeviceMap, mode: StreamsMode) -> ReplayStreams | None:
    """What replays a capture's streams; None if it has none but the default ones, or no accelerator is used."""
    kinds = {device.type for device in devices.in_use() if is_accelerator(device)}
    if not kinds or not orders_streams(reader):
        return None
    problem = "" if all(map(keeps_memory_for_streams, kinds)) else "memory there cannot be kept for another stream"
    streams = ReplayStreams(devices, mode == "captured" and not problem, problem)
    for placement in reader.placements[1:]:
        for device, number in placement.streams if placement is not None else ():
            streams.stream(device, 0)
            streams.stream(device, number)
    return streams


class LoweringPass(Protocol):
    """What is needed of a pass through the records: lowering.Lowering."""

    reader: CaptureReader
    scan: Scan
    frame: FrameLists
    text: WindowText
    variables: Variables

    def acquire(self, slot: int, ordinal: int) -> str: ...


def ints_and_device(lowering: LoweringPass, row: int) -> tuple[list[int], int]:
    """The ints of the record of a stream or event, and its device if it has one, else 0."""
    frame = lowering.frame
    layout = lowering.scan.layout(frame.signatures[row])
    device = next((each.node.constant for each in layout.args if each.node.name == "device"), 0)
    assert isinstance(device, int)
    return frame.ints[frame.int_first[row] : frame.int_first[row + 1]], device


class StreamCode:
    """Writes the lines about streams of one pass through the records."""

    def __init__(self, lowering: LoweringPass, streams: ReplayStreams) -> None:
        self._lowering = lowering
        self._streams = streams
        self._current = 0  # placement id
        self._used: dict[int, set[int]] = {}  # streams that use a storage, by storage; the first one has its memory
        self._recorded: dict[int, int] = {}  # device id on which each event was last recorded
        self._crosses = len(streams.accelerators()) > 1

    @property
    def captured(self) -> bool:
        """Whether there are as many streams as were captured."""
        return self._streams.captured

    def handlers(self) -> dict[int, Callable[[int, int], None]]:
        """What to do at each kind of record about streams: (row, ordinal)."""
        return {
            RecordKind.event_record: self._record,
            RecordKind.event_wait: self._wait,
            RecordKind.stream_use: self._use,
            RecordKind.stream_synchronize: self._synchronize_stream,
            RecordKind.event_synchronize: self._synchronize_event,
        }

    def before_op(self, row: int, ordinal: int) -> None:
        if not self._streams.captured:
            return
        lowering, frame = self._lowering, self._lowering.frame
        placement = frame.placement(row)
        self._switch(placement, ordinal)
        layout = lowering.scan.layout(frame.signatures[row])
        first, end = frame.tensor_first[row], frame.tensor_first[row + 1]
        for slot in range(first, end):
            storage, device = frame.storages[slot], self._device(slot)
            if not storage:
                continue
            number = self._placement(placement).stream(device)
            used = self._used.get(storage)
            is_argument = slot < first + layout.arg_tensors
            if used is None:  # made by this op, or brought in before its window, when the default streams are current
                used = self._used[storage] = {0 if is_argument else number}
            if number not in used and is_argument:
                used.add(number)
                self._keep_for(slot, device, number, ordinal)

    def before_resize(self, storage: int, row: int, ordinal: int) -> None:
        """A line follows that gives a storage other memory: that of the stream that is current."""
        if self._streams.captured:
            placement = self._lowering.frame.placement(row)
            self._switch(placement, ordinal)
            device = self._lowering.reader.storage(storage).device
            self._used[storage] = {self._placement(placement).stream(device)}

    def before_reading(self, ordinal: int) -> None:
        """A line that reads a tensor on the host follows, which may be of any stream."""
        if self._streams.captured and self._streams.accelerators():
            text = self._lowering.text
            for device in self._streams.accelerators():
                text.line(ordinal, f"{text.shared(('synchronize', str(device)), partial(synchronize, device))}()")

    def end_window(self, ordinal: int) -> None:
        self._switch(0, ordinal)

    def _switch(self, placement: int, ordinal: int) -> None:
        if placement == self._current:
            return
        before, after = dict(self._placement(self._current).streams), dict(self._placement(placement).streams)
        changed = [device for device in {**before, **after} if before.get(device, 0) != after.get(device, 0)]
        streams = [self._streams.stream(device, after.get(device, 0)) for device in changed]
        found = [stream for stream in streams if stream is not None]
        if found:
            text = self._lowering.text
            key = ("streams", tuple((stream.device_index, stream.stream_id) for stream in found))
            text.line(ordinal, f"{text.shared(key, SetStreams(found))}()")
        self._current = placement

    def _placement(self, number: int) -> StreamPlacement:
        return self._lowering.reader.placements[number] or _DEFAULTS if number else _DEFAULTS

    def _device(self, slot: int) -> int:
        return self._lowering.reader.metas[self._lowering.frame.metas[slot]].device

    def _keep_for(self, slot: int, device: int, number: int, ordinal: int) -> None:
        stream = self._streams.stream(device, number)
        if stream is not None:
            name = self._lowering.acquire(slot, ordinal)
            self._lowering.text.line(ordinal, f"{name}.record_stream({self._stream(stream)})")

    def _stream(self, stream: torch.Stream) -> str:
        return self._lowering.text.shared(("stream", stream.device_index, stream.stream_id), stream)

    def _record(self, row: int, ordinal: int) -> None:
        (event, number), device = ints_and_device(self._lowering, row)
        self._recorded[event] = device
        stream = self._streams.stream(device, number)
        if stream is not None and (self._streams.captured or self._crosses):
            name = self._event(event)
            self._lowering.text.line(ordinal, f"{name}.record({self._stream(stream)})")

    def _wait(self, row: int, ordinal: int) -> None:
        (event, number), device = ints_and_device(self._lowering, row)
        stream = self._streams.stream(device, number)
        if stream is None or event not in self._recorded or not (self._streams.captured or self._crosses):
            return
        if self._streams.stream(self._recorded[event], 0) is not None:
            self._lowering.text.line(ordinal, f"{self._stream(stream)}.wait_event({self._event(event)})")

    def _use(self, row: int, ordinal: int) -> None:
        (number,), device = ints_and_device(self._lowering, row)
        frame = self._lowering.frame
        slot = frame.tensor_first[row]
        used = self._used.setdefault(frame.storages[slot], {0})
        if self._streams.captured and number not in used and frame.keys[slot] in self._lowering.variables:
            used.add(number)
            self._keep_for(slot, device, number, ordinal)

    def _synchronize_stream(self, row: int, ordinal: int) -> None:
        (number,), device = ints_and_device(self._lowering, row)
        stream = self._streams.stream(device, number)
        if stream is not None:
            self._lowering.text.line(ordinal, f"{self._stream(stream)}.synchronize()")

    def _synchronize_event(self, row: int, ordinal: int) -> None:
        (event,), _device = ints_and_device(self._lowering, row)
        device = self._recorded.get(event)
        stream = None if device is None else self._streams.stream(device, 0)
        if stream is None:
            return
        waited = self._event(event) if self._streams.captured or self._crosses else self._stream(stream)
        self._lowering.text.line(ordinal, f"{waited}.synchronize()")

    def _event(self, number: int) -> str:
        device = self._recorded[number]
        return self._lowering.text.shared(("event", device, number), self._streams.event(number, device))


_LATE_KINDS = (KernelKind.graph, KernelKind.triton)


@dataclass(eq=False)
class _LateCopy:
    """A copy under way: the memory of the host, its stream, and whether it writes there."""

    storage: int
    device: int
    stream: int
    writes: bool


@dataclass(frozen=True)
class _TensorSlots:
    """Tensor slots of an op. `late`: the op returns before it has used them."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    late: bool


def _is_late(reader: CaptureReader, signature: Signature | None) -> bool:
    if signature is None or signature.kind is not RecordKind.op:
        return False
    kernel = reader.kernels[signature.kernel]
    named = any(node.name == "non_blocking" and node.constant for node in signature.args)
    return named or (kernel is not None and kernel.kind in _LATE_KINDS)


def copies_late(reader: CaptureReader) -> bool:
    """Whether a capture has ops that may return before they have used memory of the host."""
    return any(_is_late(reader, signature) for signature in reader.signatures[1:])


class LateCopies:
    """Writes the waits of one pass through the records."""

    def __init__(self, lowering: LoweringPass, devices: DeviceMap, streams: ReplayStreams | None) -> None:
        """`streams`: as many as were captured; None: the ops run on the current ones."""
        self._lowering = lowering
        self._devices = devices
        self._streams = streams
        self._copies: dict[int, list[_LateCopy]] = {}  # by storage
        self._recorded: dict[int, list[_LateCopy]] = {}  # by event: the copies before it, on its stream
        self._uses = cache(self._uses_of)
        self._waits: dict[int, Callable[[int], None]] = {
            RecordKind.event_record: self._record,
            RecordKind.event_synchronize: self._synchronize_event,
            RecordKind.stream_synchronize: self._synchronize_stream,
            RecordKind.synchronize: self._synchronize,
        }

    def before_op(self, row: int, ordinal: int) -> None:
        frame = self._lowering.frame
        uses = self._uses(frame.signatures[row])
        if uses.late:
            self._begin(row, uses, ordinal)
        elif self._copies:
            first = frame.tensor_first[row]
            for slots, writes in ((uses.reads, False), (uses.writes, True)):
                for slot in slots:
                    self._wait(frame.storages[first + slot], writes, ordinal)

    def before_reading(self, slot: int, ordinal: int) -> None:
        """A line that reads a tensor on the host follows."""
        self._wait(self._lowering.frame.storages[slot], False, ordinal)

    def after_record(self, kind: int, row: int) -> None:
        """The replay has done what another record says."""
        done = self._waits.get(kind)
        if done is not None:
            done(row)

    def _uses_of(self, number: int) -> _TensorSlots:
        layout = self._lowering.scan.layout(number)
        kernel = self._lowering.reader.kernels[layout.signature.kernel]
        reads, writes = accesses(layout, "" if kernel is None else kernel.schema)
        results = tuple(slot for each in layout.results for slot in each.tensors)
        late = _is_late(self._lowering.reader, layout.signature)
        return _TensorSlots(
            reads, (*writes, *results) if late else writes, late
        )  # other results are new memory, or views

    def _begin(self, row: int, uses: _TensorSlots, ordinal: int) -> None:
        lowering, frame = self._lowering, self._lowering.frame
        first, metas = frame.tensor_first[row], lowering.reader.metas
        placement = lowering.reader.placements[frame.placement(row)] if frame.placement(row) else None
        lanes, host = [], []
        for slots, writes in ((uses.reads, False), (uses.writes, True)):
            for slot in slots:
                meta = metas[frame.metas[first + slot]]
                if is_accelerator(self._devices.target(meta.device)):
                    number = placement.stream(meta.device) if placement is not None and self._streams else 0
                    lanes.append((meta.device, number))
                elif lowering.scan.last_use_of(frame.storages[first + slot]) > ordinal:
                    host.append((frame.storages[first + slot], writes))
        for storage, writes in host:
            for device, number in lanes[:1]:
                self._copies.setdefault(storage, []).append(_LateCopy(storage, device, number, writes))

    def _wait(self, storage: int, writes: bool, ordinal: int) -> None:
        for copy in list(self._copies.get(storage, ())):
            if (copy.writes or writes) and copy in self._copies.get(storage, ()):
                device, text = self._devices.target(copy.device), self._lowering.text
                stream = self._streams.stream(copy.device, copy.stream) if self._streams else None
                if stream is not None:
                    name = text.shared(("stream", stream.device_index, stream.stream_id), stream)
                    text.line(ordinal, f"{name}.synchronize()")
                else:
                    text.line(ordinal, f"{text.shared(('synchronize', str(device)), partial(synchronize, device))}()")
                self._on_stream_done(copy.device, copy.stream)

    def _record(self, row: int) -> None:
        (event, number), device = ints_and_device(self._lowering, row)
        self._recorded[event] = self._on_stream(device, number if self._streams else 0)

    def _synchronize_event(self, row: int) -> None:
        (event,), _device = ints_and_device(self._lowering, row)
        self._done(self._recorded.get(event, []))

    def _synchronize_stream(self, row: int) -> None:
        (number,), device = ints_and_device(self._lowering, row)
        self._on_stream_done(device, number if self._streams else 0)

    def _synchronize(self, row: int) -> None:
        _none, device = ints_and_device(self._lowering, row)
        self._done([copy for copies in self._copies.values() for copy in copies if copy.device == device])

    def _on_stream(self, device: int, number: int) -> list[_LateCopy]:
        every = (copy for copies in self._copies.values() for copy in copies)
        return [copy for copy in every if (copy.device, copy.stream) == (device, number)]

    def _on_stream_done(self, device: int, number: int) -> None:
        self._done(self._on_stream(device, number))

    def _done(self, copies: list[_LateCopy]) -> None:
        for copy in copies:
            left = [each for each in self._copies.get(copy.storage, ()) if each is not copy]
            if left:
                self._copies[copy.storage] = left
            else:
                self._copies.pop(copy.storage, None)
