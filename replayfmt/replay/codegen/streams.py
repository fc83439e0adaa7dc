"""Streams and events in generated code: where a replay switches streams, and what orders their work.

Captured streams have streams of their own in a replay, made once for a plan; between windows the default ones are
current. Memory that is used on another stream than the one it was allocated on is not reused before that one is done
with it. What a program orders on the default streams alone has no code here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from replayfmt.format.codes import RecordKind
from replayfmt.format.model import StreamPlacement
from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch.accelerators import Current, is_accelerator
from replayfmt.pytorch.streams import SetStreams, default_stream, keeps_memory_for_streams

from ..planning.devices import DeviceMap
from ..planning.overview import orders_streams
from ..planning.scan import Scan
from .frame_lists import FrameLists
from .liveness import Variables
from .operations import Synchronize
from .windows import WindowText

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
        """The streams of a device."""
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


class Pass(Protocol):
    """What is needed of a pass through the records: lowering.Lowering."""

    reader: CaptureReader
    scan: Scan
    frame: FrameLists
    text: WindowText
    variables: Variables

    def acquire(self, slot: int, ordinal: int) -> str: ...


def ints_and_device(lowering: Pass, row: int) -> tuple[list[int], int]:
    """The ints of the record of a stream or event, and its device if it has one, else 0."""
    frame = lowering.frame
    layout = lowering.scan.layout(frame.signatures[row])
    device = next((each.node.constant for each in layout.args if each.node.name == "device"), 0)
    assert isinstance(device, int)
    return frame.ints[frame.int_first[row] : frame.int_first[row + 1]], device


class StreamCode:
    """Writes the lines about streams of one pass through the records."""

    def __init__(self, lowering: Pass, streams: ReplayStreams) -> None:
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

    # ------------------------------------------------------------------------------------------------------- around ops

    def before_op(self, row: int, ordinal: int) -> None:
        """An op's line follows."""
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
                text.line(ordinal, f"{text.shared(('synchronize', str(device)), Synchronize(device))}()")

    def end_window(self, ordinal: int) -> None:
        """The window ends at this record."""
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
        meta = self._lowering.reader.metas[self._lowering.frame.metas[slot]]
        assert meta is not None
        return meta.device

    def _keep_for(self, slot: int, device: int, number: int, ordinal: int) -> None:
        stream = self._streams.stream(device, number)
        if stream is not None:
            name = self._lowering.acquire(slot, ordinal)
            self._lowering.text.line(ordinal, f"{name}.record_stream({self._stream(stream)})")

    def _stream(self, stream: torch.Stream) -> str:
        return self._lowering.text.shared(("stream", stream.device_index, stream.stream_id), stream)

    # ---------------------------------------------------------------------------------------------------- other records

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
