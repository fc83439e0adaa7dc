"""Issues the ops of a graph's body, one after the other, on given memory and on the body's streams.

Arguments name storages of the body. What outlives the graph's capture has memory outside, and an op that made it there
gives its result into that; everything else is allocated by the ops and dropped after its last use. Memory of the host
that a copy brings back is written by the device, maybe later: the copy is made right where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from replayfmt.errors import InvalidCapture
from replayfmt.format.codes import DType, Layout, MemoryFormat, RecordKind, StorageOrigin
from replayfmt.format.model import CompositeValue, DeviceValue, GeneratorValue, Record, TensorMeta, TensorValue, Value
from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch.accelerators import HOST, default_generator
from replayfmt.pytorch.tensors.bounds import view_inside
from replayfmt.pytorch.tensors.composites import put_together
from replayfmt.pytorch.tensors.dtypes import TORCH_DTYPE, TORCH_LAYOUT, TORCH_MEMORY_FORMAT
from replayfmt.pytorch.tensors.memory import fill_storage, new_storage

from ..op_values import tensors_of
from ..planning.devices import DeviceMap
from ..planning.kernels import ResolvedKernel
from .streams import BodyStreams

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
    """The ops of a body."""

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

    # ---------------------------------------------------------------------------------------------------------- values

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
            generator = self._reader.generators[value.id]
            assert generator is not None
            return default_generator(self._devices.target(generator.device))
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

    # ---------------------------------------------------------------------------------------------------------- a pass

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
