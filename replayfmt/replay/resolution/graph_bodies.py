"""Issues the ops of a graph's body, one after the other, on given memory and on the body's streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from replayfmt.errors import InvalidCapture
from replayfmt.format.codes import DType, Layout, MemoryFormat, RecordKind, StorageOrigin
from replayfmt.format.model import (
    CompositeValue,
    DeviceValue,
    GeneratorValue,
    Record,
    StreamPlacement,
    TensorMeta,
    TensorValue,
    Value,
    tensors_of,
)
from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch.accelerators import HOST, SetStreams, default_generator, is_accelerator, keeps_memory_for_streams
from replayfmt.pytorch.tensors.composites import put_together
from replayfmt.pytorch.tensors.memory import (
    TORCH_DTYPE,
    TORCH_LAYOUT,
    TORCH_MEMORY_FORMAT,
    fill_storage,
    new_storage,
    view_inside,
)

from ..codegen.streams import StreamsMode
from ..planning.devices import DeviceMap
from ..planning.kernels import ResolvedKernel

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
        SetStreams([self.stream(key) for key in streams])()


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


Storages = dict[int, torch.UntypedStorage]
_CODES = ((DType, TORCH_DTYPE), (Layout, TORCH_LAYOUT), (MemoryFormat, TORCH_MEMORY_FORMAT))


@dataclass
class _PassMemory:
    """What a pass through the body has: storages by id, and the tensors on them that ops returned."""

    storages: Storages
    tensors: dict[int, torch.Tensor]


@dataclass(frozen=True)
class _BodyStep:
    """One op. `into`: its result, for one that copies to memory of the host. `done_with`: the storages that no later op
    uses, and the tensors on them. `switch` makes its streams current; `kept_for`: arguments whose memory another stream
    has, and the op's."""

    name: str
    kernel: ResolvedKernel
    args: tuple[Callable[[_PassMemory], Any], ...]
    kwargs: Mapping[str, Callable[[_PassMemory], Any]]
    results: tuple[Value, ...]
    allocates: bool
    into: TensorValue | None
    done_with: tuple[tuple[int, ...], tuple[int, ...]]
    switch: Callable[[], None] | None
    kept_for: Sequence[tuple[TensorValue, tuple[torch.device, int]]]


class BodySteps:
    def __init__(
        self,
        reader: CaptureReader,
        kernels: Sequence[ResolvedKernel | str | None],
        devices: DeviceMap,
        kept: set[int],
        streams: BodyStreams,
    ) -> None:
        """`kernels` and `devices` are by the body's ids; `kept` are the storages that `issue` is given."""
        self._streams = streams
        self._devices = devices
        self._reader = reader
        self._kept = kept
        self._by_value: Storages = {}
        self._seen = False
        records = list(reader.records())
        last_storage: dict[int, int] = {}
        tensors: dict[int, set[int]] = {}
        for place, record in enumerate(records):
            for value in tensors_of((*record.args, *record.results)):
                last_storage[value.storage] = place
                tensors.setdefault(value.storage, set()).add(value.id)
                self._take_by_value(value.storage)
        ends: dict[int, list[int]] = {}
        for storage, place in last_storage.items():
            if storage not in self._by_value:
                ends.setdefault(place, []).append(storage)
        self._steps: list[_BodyStep | Callable[[], None]] = []
        for place, record in enumerate(records):
            if record.kind is not RecordKind.op:
                order = streams.order(record)
                self._steps += [] if order is None else [order]
                continue
            kernel = kernels[record.signature.kernel]
            assert isinstance(kernel, ResolvedKernel), "a graph without one of its kernels is refused"
            gone = tuple(ends.get(place, ()))
            done_with = (gone, tuple(number for storage in gone for number in tensors[storage]))
            self._steps.append(self._step(record, kernel, done_with))

    def load(self) -> str:
        """Have the kernels loaded: see ResolvedKernel. Returns why they cannot be, or ""."""
        kernels = {id(step.kernel): step.kernel for step in self._steps if isinstance(step, _BodyStep)}
        loaded = {number: kernel.loaded() for number, kernel in kernels.items()}
        ready = {number: each for number, each in loaded.items() if isinstance(each, ResolvedKernel)}
        if len(ready) == len(loaded):
            self._steps = [
                replace(step, kernel=ready[id(step.kernel)]) if isinstance(step, _BodyStep) else step
                for step in self._steps
            ]
        return "; ".join(each for each in loaded.values() if isinstance(each, str))

    def _take_by_value(self, number: int) -> None:
        if number and number not in self._by_value:
            stored = self._reader.storage(number)
            if stored.origin is StorageOrigin.payload:
                content = self._reader.payload(stored.payload)
                if len(content) != stored.bytes:
                    raise ValueError(f"its storage {number} of {stored.bytes} bytes has content of {len(content)}")
                self._by_value[number] = new_storage(stored.bytes, self._devices.target(stored.device))
                fill_storage(self._by_value[number], content)

    def _step(
        self, record: Record, kernel: ResolvedKernel, done_with: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> _BodyStep:
        problem = kernel.problem_with([TORCH_DTYPE.get(value.meta.dtype) for value in tensors_of(record.args)])
        if problem:
            raise ValueError(f"{kernel.schema.name} in its body: {problem}")
        names = kernel.argument_names
        keyword_only = {argument.name for argument in kernel.schema.arguments if argument.kwarg_only}
        args: list[Callable[[_PassMemory], Any]] = []
        kwargs: dict[str, Callable[[_PassMemory], Any]] = {}
        for node, value in zip(record.signature.args, record.args, strict=True):
            build = self._builder(value)
            positional = not kwargs and len(args) < len(names) and names[len(args)] == node.name
            if positional and node.name not in keyword_only:
                args.append(build)
            else:
                kwargs[node.name] = build
        made = {value.storage for value in tensors_of(record.results)} - {0}
        made -= {value.storage for value in tensors_of(record.args)}
        allocates = bool(made) and kernel.schema.name.partition("::")[2].split("_")[0] in ("empty", "new")
        results, into = tuple(record.results), self._brought_back(record, made)
        switch, kept_for = self._streams.switch(record), self._streams.kept_for(record)
        return _BodyStep(
            kernel.schema.name, kernel, tuple(args), kwargs, results, allocates, into, done_with, switch, kept_for
        )

    def _brought_back(self, record: Record, made: set[int]) -> TensorValue | None:
        """The result of an op that gives memory of the host that it made to whoever replays the graph. Raises
        ValueError for one that is no copy."""
        for value in tensors_of(record.results):
            on_host = self._devices.target(value.meta.device).type == HOST
            if not on_host or value.storage not in made & self._kept:
                continue
            given = list(tensors_of(record.args))
            if all(self._devices.target(each.meta.device).type == HOST for each in given):
                continue
            kernel = self._reader.kernels[record.signature.kernel]
            if kernel is None or kernel.name != "aten::_to_copy":
                raise ValueError(f"{kernel and kernel.name} of its body gives memory of the host, and copies nothing")
            return value
        return None

    def _builder(self, value: Value) -> Callable[[_PassMemory], Any]:
        if isinstance(value, TensorValue):
            return lambda memory: self._tensor(memory, value)
        if isinstance(value, list):
            parts = [self._builder(each) for each in value]
            return lambda memory: [build(memory) for build in parts]
        if isinstance(value, tuple):
            parts = [self._builder(each) for each in value]
            return lambda memory: tuple(build(memory) for build in parts)
        if isinstance(value, CompositeValue):
            form, parts = value.form, [self._builder(each) for each in value.parts]
            return lambda memory: put_together(form, [build(memory) for build in parts])
        known = self._constant(value)
        return lambda _memory: known

    def _constant(self, value: Value) -> Any:
        if isinstance(value, DeviceValue):
            return self._devices.target(value.id)
        if isinstance(value, GeneratorValue):
            return default_generator(self._devices.target(self._reader.generators[value.id].device))
        for kind, known in _CODES:
            if isinstance(value, kind):
                return known[value]  # type: ignore[index]
        if value is None or isinstance(value, bool | int | float | complex | str):
            return value
        raise ValueError(f"an op of its body takes {value!r:.80}")

    def _tensor(self, memory: _PassMemory, value: TensorValue) -> torch.Tensor:
        known = memory.tensors.get(value.id)
        if known is not None:
            return known
        meta = value.meta
        dtype = TORCH_DTYPE[meta.dtype]
        if not value.storage:
            device = self._devices.target(meta.device)
            return torch.empty_strided(meta.sizes, meta.strides, dtype=dtype, device=device)
        storage = memory.storages.get(value.storage)
        if storage is None:
            raise InvalidCapture(f"an op uses storage {value.storage} of the graph before anything made it")
        return view_inside(storage, dtype, meta.sizes, meta.strides, value.offset, meta.flags)

    def issue(self, given: Storages) -> list[torch.UntypedStorage]:
        """Issue every op once. `given` has the memory of the storages that are kept. Returns memory of the host that a
        device may still use. Raises what an op raises, and RuntimeError if one returns something else than was
        captured."""
        self._streams.begin()
        try:
            return self._issue(_PassMemory({**self._by_value, **given}, {}))
        finally:
            self._streams.end()

    def _issue(self, memory: _PassMemory) -> list[torch.UntypedStorage]:
        used: list[torch.UntypedStorage] = []
        for step in self._steps:
            if not isinstance(step, _BodyStep):
                step()
                continue
            if step.switch is not None:
                step.switch()
            for kept, stream in step.kept_for:
                self._tensor(memory, kept).record_stream(self._streams.stream(stream))
            args = [build(memory) for build in step.args]
            kwargs = {name: build(memory) for name, build in step.kwargs.items()}
            if step.into is None:
                result = step.kernel.call(*args, **kwargs)
            else:
                non_blocking = bool(kwargs.get("non_blocking", False))
                result = self._tensor(memory, step.into).copy_(args[0], non_blocking=non_blocking)
            expected = step.results
            values = (result,) if len(expected) == 1 else tuple(result) if expected else ()
            if len(values) != len(expected):
                raise RuntimeError(f"{step.name} returned {len(values)} values, {len(expected)} were captured")
            for value, captured in zip(values, expected, strict=True):
                self._bind(step, memory, value, captured)
            storages, tensors = step.done_with
            for number in tensors:
                memory.tensors.pop(number, None)
            for number in storages:
                gone = memory.storages.pop(number, None)
                if gone is not None and gone.device.type == HOST:
                    used.append(gone)
        self._seen = True
        return used

    def _bind(self, step: _BodyStep, memory: _PassMemory, value: Any, captured: Value) -> None:
        """A result is what later ops know under its id."""
        if isinstance(captured, list | tuple):
            if not isinstance(value, list | tuple) or len(value) != len(captured):
                raise RuntimeError(f"{step.name} returned something else than the {len(captured)} values captured")
            for one, other in zip(value, captured, strict=True):
                self._bind(step, memory, one, other)
            return
        if isinstance(captured, CompositeValue):
            raise RuntimeError(f"{step.name} returned a tensor made of parts, which a graph's body cannot hold")
        if not isinstance(captured, TensorValue):
            return
        if not isinstance(value, torch.Tensor):
            raise RuntimeError(f"{step.name} returned no tensor, and one was captured")
        if not self._seen:
            _check(step.name, value, captured.meta)
        storage = captured.storage
        if not storage:
            memory.tensors[captured.id] = value
            return
        known = memory.storages.get(storage)
        if known is None:
            memory.storages[storage] = value.untyped_storage()
            memory.tensors[captured.id] = value
        elif known._cdata == value.untyped_storage()._cdata:
            memory.tensors[captured.id] = value
        elif storage in self._kept:
            place = self._tensor(memory, captured)
            if not step.allocates:
                place.copy_(value)
            memory.tensors[captured.id] = place
        else:
            raise RuntimeError(f"{step.name} returned new memory, where a view was captured")


def _check(name: str, tensor: torch.Tensor, meta: TensorMeta) -> None:
    got = (tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()) if tensor.numel() else ())
    expected = (TORCH_DTYPE[meta.dtype], tuple(meta.sizes), tuple(meta.strides) if tensor.numel() else ())
    if got != expected:
        raise RuntimeError(f"{name} returned dtype, sizes and strides {got}, captured were {expected}")
