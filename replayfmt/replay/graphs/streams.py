"""Streams and events of a graph's body in a replay.

Stream 0 of a device is the one that is current when the body is issued; others have a stream of their own here. Memory
that is used on another stream than the one it was allocated on is not reused before that one is done with it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from replayfmt.format.codes import RecordKind
from replayfmt.format.model import DeviceValue, Record, StreamPlacement, TensorValue
from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch.accelerators import is_accelerator
from replayfmt.pytorch.streams import keeps_memory_for_streams

from ..codegen.streams import StreamsMode
from ..op_values import tensors_of
from ..planning.devices import DeviceMap

_Captured = tuple[int, int]  # a stream: device id, number
_Here = tuple[torch.device, int]
_DEFAULTS = StreamPlacement(())


class BodyStreams:
    """The streams and events of one body. `several`: it has more than one here; `problem` says why not, if that was not
    the capture's doing."""

    def __init__(self, reader: CaptureReader, devices: DeviceMap, mode: StreamsMode) -> None:
        """Raises ValueError for a body with work that is not ordered before its end, or after its begin."""
        check_edges(reader)
        self._reader, self._devices = reader, devices
        captured = {stream for placement in reader.placements[1:] for stream in (placement or _DEFAULTS).streams}
        events = (record for record in reader.records() if record.kind is not RecordKind.op)
        captured |= {(_device_of(record), number) for record in events if (number := _number_of(record))}
        found = {(devices.target(device), number) for device, number in captured}
        besides = {(device, number) for device, number in found if is_accelerator(device)}
        self.problem = ""
        if besides and mode == "serial":
            self.problem = "--streams=serial"
        elif besides and not all(keeps_memory_for_streams(device.type) for device, _number in besides):
            self.problem = "memory there cannot be kept for another stream"
        self._besides = {} if self.problem else {key: torch.Stream(key[0]) for key in sorted(besides, key=str)}
        self.several = bool(self._besides)
        self._on = {device for device, _number in besides}
        self._current: dict[torch.device, int] = {}
        self._events: dict[int, torch.Event] = {}
        self._users: dict[int, set[_Here]] = {}  # streams that use a storage; the first one has its memory
        self._begun: dict[torch.device, torch.Stream] = {}

    # ------------------------------------------------------------------------------------- what is done at each record

    def switch(self, record: Record) -> Callable[[], None] | None:
        """What makes the streams of an op current; None if they are. To be asked for each op, in order."""
        if not self.several:
            return None
        wanted = self._here(record)
        changed = [(device, number) for device, number in wanted.items() if self._current.get(device, 0) != number]
        self._current.update(wanted)
        return (lambda: self._set(changed)) if changed else None

    def kept_for(self, record: Record) -> list[tuple[TensorValue, _Here]]:
        """The arguments of an op whose memory is another stream's and has not been used on the op's before. To be asked
        for each op, in order."""
        if not self.several:
            return []
        wanted, found = self._here(record), []
        for value in tensors_of(record.args):
            device = self._devices.target(value.meta.device)
            users = self._users.get(value.storage)
            if users is not None and is_accelerator(device) and (key := (device, wanted.get(device, 0))) not in users:
                users.add(key)
                found.append((value, key))
        for value in tensors_of(record.results):
            device = self._devices.target(value.meta.device)
            self._users.setdefault(value.storage, {(device, wanted.get(device, 0))})
        return found

    def order(self, record: Record) -> Callable[[], None] | None:
        """What a record of an event does; None if nothing has to be done here."""
        event, number, device = record.argument("event"), _number_of(record), self._devices.target(_device_of(record))
        assert isinstance(event, int)
        if not self.several or not is_accelerator(device):
            return None
        key = (device, number)
        if record.kind is RecordKind.event_record:
            made = self._events[event] = torch.Event(device)
            return lambda: made.record(self.stream(key))
        recorded = self._events.get(event)
        return None if recorded is None else lambda: self.stream(key).wait_event(recorded)

    def _here(self, record: Record) -> dict[torch.device, int]:
        """The number of the stream of each device."""
        placement = self._reader.placements[record.placement] if record.placement else None
        given = {self._devices.target(device): number for device, number in (placement or _DEFAULTS).streams}
        return {device: given.get(device, 0) for device in self._on}

    # --------------------------------------------------------------------------------------------------------- a pass

    def begin(self) -> None:
        """The body is issued on the current streams."""
        self._begun = {device: torch.accelerator.current_stream(device) for device in self._on}

    def end(self) -> None:
        """The streams that were current at `begin` are so again."""
        if self.several:
            self._set([(device, 0) for device in self._on])

    def stream(self, key: _Here) -> torch.Stream:
        """A stream of the pass."""
        return self._besides[key] if key[1] else self._begun[key[0]]

    def _set(self, streams: list[_Here]) -> None:
        index = torch.accelerator.current_device_index()
        for key in streams:
            torch.accelerator.set_stream(self.stream(key))
        torch.accelerator.set_device_index(index)  # setting a stream makes its device current


def _device_of(record: Record) -> int:
    device = record.argument("device")
    assert isinstance(device, DeviceValue)
    return device.id


def _number_of(record: Record) -> int:
    number = record.argument("stream")
    assert isinstance(number, int)
    return number


def check_edges(reader: CaptureReader) -> None:
    """Raises ValueError unless all streams of a body wait for the one that it begins on, and that one for all others at
    the end: other work would not be part of a graph."""
    known: dict[_Captured, dict[_Captured, int]] = {}  # how many ops of each stream come before a stream's next one
    events: dict[int, dict[_Captured, int]] = {}
    origin: int | None = None
    for record in reader.records():
        if record.kind is RecordKind.op:
            placement = reader.placements[record.placement] if record.placement else None
            streams = (placement or _DEFAULTS).streams
            if missing := [number for device, number in streams if (device, number) not in known]:
                raise ValueError(f"its body gives work to stream {missing[0]}, which waits for no other one of it")
            devices = {value.meta.device for value in tensors_of((*record.args, *record.results))}
            for device in devices:
                key = (device, dict(streams).get(device, 0))
                clock = known.setdefault(key, {})
                clock[key] = clock.get(key, 0) + 1
            continue
        event, number, device = record.argument("event"), _number_of(record), _device_of(record)
        assert isinstance(event, int)
        stream = (device, number)
        if record.kind is RecordKind.event_record:
            if number and stream not in known:
                raise ValueError(f"its body records an event on stream {number}, which waits for no other one of it")
            origin = device if origin is None and not number else origin
            events[event] = dict(known.get(stream, {}))
        else:
            if event not in events:
                raise ValueError(f"its body waits for event {event}, which is not recorded before")
            clock = known.setdefault(stream, {})
            for other, count in events[event].items():
                clock[other] = max(clock.get(other, 0), count)
    if origin is None:
        return
    last = known.get((origin, 0), {})
    for stream, clock in known.items():
        if stream[1] and last.get(stream, 0) < clock.get(stream, 0):
            raise ValueError(f"at its end nothing waits for what its body gave to stream {stream[1]}")
