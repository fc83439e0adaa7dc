"""The body of a graph, written as a capture of its own, and the kernel that stands for its replays.

The body has the ops that were issued while the graph was captured, and the events that order its streams. One replay of
the graph is one call of its kernel, with the memory that the graph uses as arguments.
"""

from __future__ import annotations

import json
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from replayfmt.format.attachments import BODY, BODY_SESSION, METADATA, argument_name, body_metadata, open_body
from replayfmt.format.codes import KernelKind, Layout, OpStatus, RecordKind, StorageOrigin, TensorFlag
from replayfmt.format.model import CaptureInfo, Device, Generator, Signature, StreamPlacement, TensorMeta, is_dense
from replayfmt.format.redaction import KeptAttachments, Redaction
from replayfmt.format.writer import CaptureWriter, Moment, RecordBuilder, RecordSlots
from replayfmt.pytorch.accelerators import HOST, default_generator
from replayfmt.pytorch.environment import read_settings
from replayfmt.pytorch.tensors.memory import (
    DTYPE_CODE,
    address_of,
    device_of,
    dtype_of,
    host_view,
    is_complex,
    is_conj,
    is_neg,
    is_zerotensor,
    make_view,
    offset_of,
    shape_of,
    storage_of,
    stride_of,
)

from ..arguments import CallValues, Encoder, OpCall, TensorUse, op_signature
from ..kernels import Attached, CapturedKernel, CodeKernel
from ..special_values import Unpacked, is_address, is_wrapper
from ..stream.program_state import address
from ..stream.records import RedactedWriter, Unrepresentable, nodes_on_device, user_names

# Operators that a graph has as a copy: the memory of the host that they use is read or written at each replay. Others
# are given a tensor of the host by value.
_COPIES = frozenset({"aten::copy_", "aten::_to_copy", "aten::_copy_from"})


class UsedView(NamedTuple):
    """How a tensor lies on its storage."""

    dtype: torch.dtype
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    flags: TensorFlag

    @classmethod
    def of(cls, tensor: torch.Tensor) -> UsedView:
        conj = TensorFlag.conj if is_complex(tensor) and is_conj(tensor) else TensorFlag(0)
        flags = conj | (TensorFlag.neg if is_neg(tensor) else TensorFlag(0))
        return cls(dtype_of(tensor), int(offset_of(tensor)), tuple(shape_of(tensor)), stride_of(tensor), flags)

    @property
    def elements(self) -> int:
        return torch.Size(self.sizes).numel()


@dataclass
class UsedMemory:
    """A storage that the body uses. `made`: the capture allocated it. `widest`: of its tensors, the one with the most
    elements. `written`: the tensors that ops write, and whether all of their elements are. `reads_before`: an op reads
    it before one has written it. `by_value`: it is kept with its content."""

    id: int
    storage: weakref.ref[torch.UntypedStorage]
    address: int
    bytes: int
    made: bool
    by_value: bool = False
    reads_before: bool = False
    widest: UsedView | None = None
    written: dict[UsedView, bool] = field(default_factory=dict)
    views: dict[tuple[int, int], int] = field(default_factory=dict)


class GraphBody:
    """A body while it is written. `problem`: why the graph cannot be kept, if so."""

    def __init__(self, kind: str, *, redact: bool, keeps: KeptAttachments) -> None:
        """`kind` is that of the device. `redact` and `keeps`: as for the capture that the graph is in."""
        self._kind = kind
        self._folder = tempfile.TemporaryDirectory(prefix="opreplay-")
        path = Path(self._folder.name, "body.opreplay")
        session = CaptureInfo(BODY_SESSION, "opreplay", "", torch_version=torch.__version__, settings=read_settings())
        if redact:
            self._writer: CaptureWriter = RedactedWriter(path, session, Redaction(session, user_names()))
        else:
            self._writer = CaptureWriter(path, session)
        self._writer.keeps = keeps
        self._path = path
        self._builder = RecordBuilder(self._writer)
        self._memory: dict[int, UsedMemory] = {}  # of storages that are alive, by address of their implementation
        self.memory: list[UsedMemory] = []
        self._kernels: dict[CapturedKernel, int] = {}
        self._devices: dict[torch.device, int] = {}
        self._generators: dict[torch.device, int] = {}
        self._signatures: dict[Any, int] = {}
        self._without_memory: dict[tuple[int, int], int] = {}
        self._placements: dict[StreamPlacement, int] = {StreamPlacement(()): 0}
        unpacked = Unpacked()
        use = (self._refuse_storage, self._generator, self._device, self._large_integer, unpacked)
        self._arguments, self._results = Encoder(self._argument, *use), Encoder(self._result, *use)
        self.problem = ""
        self.draws = False
        self.ops = 0

    def unkept(self, problem: str) -> None:
        """The graph cannot be kept. The first reason counts."""
        self.problem = self.problem or problem

    # ---------------------------------------------------------------------------------------------------------- an op

    def before(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpCall | None:
        """An op is about to be issued. None if it cannot be kept."""
        if self.problem:
            return None
        call = OpCall(kernel, args, kwargs)
        try:
            if kernel.unnameable:
                raise Unrepresentable("opaque_argument", kernel.unnameable)
            self._arguments.arguments(call)
        except Unrepresentable as problem:
            self.unkept(f"{kernel.name} was issued with {problem.args[0]}")
            return None
        for use in call.values.uses:
            memory = self._memory.get(use.storage._cdata)
            if memory is not None and kernel.reads(use.argument, args, kwargs) and not memory.written:
                memory.reads_before = memory.reads_before or shape_of(use.tensor).numel() > 0
        self.draws = self.draws or (kernel.random and kernel.draws(args, kwargs))
        return call

    def after(self, call: OpCall, result: Any, placement: StreamPlacement) -> bool:
        """It returned. `placement`: the streams that it was given to. Returns whether it wrote memory."""
        kernel = call.kernel
        try:
            values = self._results.results(call, result)
        except Unrepresentable as problem:
            self.unkept(f"{kernel.name} returned {problem.args[0]}")
            return False
        self._commit(call, values, placement)
        writes, wrote = kernel.writes_in(call.args, call.kwargs), False
        for use in call.values.uses:
            if use.argument in writes and (memory := self._memory.get(use.storage._cdata)) is not None:
                view, everything = UsedView.of(use.tensor), kernel.writes_all(use.argument)
                memory.written[view] = memory.written.get(view, False) or everything
                wrote = wrote or view.elements > 0
        before = {use.storage._cdata for use in call.values.uses}
        for use in values.uses:
            memory = self._memory.get(use.storage._cdata)
            if memory is not None and use.storage._cdata not in before and not kernel.operator.empty:
                view = UsedView.of(use.tensor)
                memory.written[view] = True
                wrote = wrote or view.elements > 0
        self.ops += 1
        return wrote

    def _commit(self, call: OpCall, values: CallValues, placement: StreamPlacement) -> None:
        given, kernel = call.values, call.kernel
        number = self._kernels.get(kernel)
        if number is None:
            number = self._kernels[kernel] = self._writer.kernel(kernel.definition(self._writer))
        key = (number, len(call.args), tuple(call.kwargs), tuple(given.key), tuple(values.key))
        signature = self._signatures.get(key)
        if signature is None:
            made = op_signature(call, values, number, OpStatus.ok)
            signature = self._signatures[key] = self._writer.signature(made)
        slots = RecordSlots(
            [*given.tensors, *values.tensors], [*given.ints, *values.ints], [*given.floats, *values.floats]
        )
        where = self._placements.get(placement)
        if where is None:
            where = self._placements[placement] = self._writer.placement(placement)
        self._builder.add(signature, RecordKind.op, Moment(placement=where), slots)

    # -------------------------------------------------------------------------------------------------------- streams

    def stream_record(self, kind: RecordKind, device_index: int, ints: Sequence[int]) -> None:
        """Add a record about a stream of a device."""
        number = self.device_id(device_index)
        key = (kind, number)
        signature = self._signatures.get(key)
        if signature is None:
            signature = self._signatures[key] = self._writer.signature(Signature(kind, nodes_on_device(kind, number)))
        self._builder.add(signature, kind, Moment(), RecordSlots([], list(ints), []))

    def device_id(self, device_index: int) -> int:
        return self._device(torch.device(self._kind, device_index))

    # --------------------------------------------------------------------------------------------------------- values

    def _argument(self, call: OpCall, tensor: torch.Tensor, index: int) -> TensorUse:
        by_value = device_of(tensor).type == HOST and call.kernel.name not in _COPIES
        return self._use(tensor, index, made=False, by_value=by_value)

    def _result(self, _call: OpCall, tensor: torch.Tensor, index: int) -> TensorUse:
        if is_wrapper(tensor):
            raise Unrepresentable("opaque_argument", f"a {type(tensor).__qualname__}")
        return self._use(tensor, index, made=True, by_value=False)

    def _use(self, tensor: torch.Tensor, index: int, *, made: bool, by_value: bool) -> TensorUse:
        if is_zerotensor(tensor):
            raise Unrepresentable("opaque_argument", "a tensor without memory that reads as zeros")
        storage, view = storage_of(tensor), UsedView.of(tensor)
        device = self._device(device_of(tensor))
        dtype = DTYPE_CODE[view.dtype]
        meta = self._writer.meta(TensorMeta(dtype, Layout.strided, device, view.sizes, view.strides, view.flags))
        if not storage.nbytes():
            number = self._builder.tensor(self._without_memory, 0, view.offset, meta)
            return TensorUse(index, tensor, storage, None, number, meta)  # type: ignore[arg-type]
        memory = self._memory.get(storage._cdata)
        if memory is None or memory.storage() is not storage:
            memory = self._enter(storage, device, made=made, by_value=by_value)
        elif memory.bytes != storage.nbytes():
            raise Unrepresentable("opaque_argument", "memory whose length changed while the graph was captured")
        if memory.widest is None or view.elements > memory.widest.elements:
            memory.widest = view
        number = self._builder.tensor(memory.views, memory.id, view.offset, meta)
        return TensorUse(index, tensor, storage, None, number, meta)  # type: ignore[arg-type]

    def _enter(self, storage: torch.UntypedStorage, device: int, *, made: bool, by_value: bool) -> UsedMemory:
        length = storage.nbytes()
        if by_value:
            payload = self._writer.payload(bytes(host_view(storage)))
            number = self._builder.bear(length, device, StorageOrigin.payload, payload)
        else:
            number = self._builder.bear(length, device, StorageOrigin.op if made else StorageOrigin.absent)
        memory = UsedMemory(number, weakref.ref(storage), address_of(storage), length, made, by_value)
        self._memory[storage._cdata] = memory
        self.memory.append(memory)
        return memory

    def _device(self, device: torch.device) -> int:
        number = self._devices.get(device)
        if number is None:
            index = -1 if device.index is None else device.index
            number = self._devices[device] = self._writer.device(Device(device.type, index))
        return number

    def _generator(self, generator: torch.Generator) -> int:
        default = default_generator(generator.device)
        if default is None or address(default) != address(generator):
            raise Unrepresentable("opaque_argument", "a generator of the program's own")
        number = self._generators.get(generator.device)
        if number is None:
            made = self._writer.generator(Generator(self._device(generator.device), True))
            number = self._generators[generator.device] = made
        return number

    @staticmethod
    def _refuse_storage(_call: OpCall, _storage: torch.UntypedStorage, _index: int) -> int:
        raise Unrepresentable("opaque_argument", "a storage")

    @staticmethod
    def _large_integer(call: OpCall, value: int) -> int:
        if not call.kernel.own and is_address(value):
            raise Unrepresentable("opaque_argument", "the address of something in this process")
        return value

    # ------------------------------------------------------------------------------------------------------- the end

    def kept(self) -> Iterator[UsedMemory]:
        """The memory that is used and is there now, at the end of the capture."""
        for memory in self.memory:
            if not memory.by_value and (not memory.made or memory.storage() is not None):
                yield memory

    def scratch(self) -> list[tuple[int, int]]:
        """Where memory was that the capture allocated and freed, as addresses and ends, in order. Each replay writes
        there, and other graphs of the same pool may have it, too."""
        gone = (memory for memory in self.memory if memory.made and not memory.by_value and memory.storage() is None)
        return sorted((memory.address, memory.address + memory.bytes) for memory in gone)

    def finish(self) -> bytes:
        """Complete the body. Returns the file's bytes."""
        if self._builder.count:
            self._builder.flush()
        self._writer.close(0)
        content = self._path.read_bytes()
        self._folder.cleanup()
        return content

    def drop(self) -> None:
        """Leave nothing of it."""
        self._writer.discard()
        self._folder.cleanup()


@dataclass(frozen=True)
class GraphArgument:
    """One argument: a tensor on memory that the graph uses. `everything`: all of its elements are written."""

    name: str
    memory: UsedMemory
    view: UsedView
    written: bool
    read: bool
    everything: bool


def _arguments(memories: Iterable[UsedMemory]) -> Iterator[GraphArgument]:
    for memory in memories:
        assert memory.widest is not None
        if not memory.written:
            yield GraphArgument(argument_name(memory.id, 0), memory, memory.widest, False, memory.reads_before, False)
        for which, (view, everything) in enumerate(memory.written.items()):
            read = memory.reads_before and not which
            yield GraphArgument(argument_name(memory.id, which), memory, view, True, read, everything)


class GraphKernel(CodeKernel):
    """Such a kernel. It keeps the memory that the capture allocated, as the graph does."""

    __slots__ = ("_graph_arguments", "_made")

    def __init__(
        self, number: int, body: GraphBody, device: torch.device, call: Callable[..., Any], streams: int, unchecked: str
    ) -> None:
        """Completes `body`, the one of the capture's graph `number`, captured on `device`. `call` replays it. Its ops
        were issued to as many `streams`. `unchecked`: why nobody knows whether the graph holds work that is not in its
        body, if so. Raises Unrepresentable if no schema can be written for it."""
        kept = list(body.kept())
        self._made = [storage for memory in kept if memory.made and (storage := memory.storage()) is not None]
        self._graph_arguments = tuple(_arguments(kept))
        content = body.finish()
        with open_body({BODY: content}) as reader:
            metadata = body_metadata(reader, str(device), streams, body.draws, unchecked)
        attached = [
            Attached(BODY, f"graph_{number}.opreplay", content),
            Attached(METADATA, f"graph_{number}.json", json.dumps(metadata, indent=1).encode()),
        ]
        arguments = ", ".join(
            f"{f'Tensor(a{place}!)' if each.written else 'Tensor'} {each.name}"
            for place, each in enumerate(self._graph_arguments)
        )
        variant = f"v{xxhash.xxh3_128_hexdigest(content)[:16]}"
        schema = f"graph::captured_{number}.{variant}({arguments}) -> ()"
        super().__init__(KernelKind.graph, schema, call, attached)
        self.random = body.draws

    def reads(self, index: int, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        return self._graph_arguments[index].read

    def writes_all(self, index: int) -> bool:
        return self._graph_arguments[index].everything

    def values(self) -> dict[str, torch.Tensor] | str:
        """The arguments of a replay now; a sentence if the graph uses memory that is not there any more."""
        found = {}
        for each in self._graph_arguments:
            storage, view = each.memory.storage(), each.view
            if storage is None:
                return "it uses memory that the program has freed since it was captured"
            if (address_of(storage), storage.nbytes()) != (each.memory.address, each.memory.bytes):
                return "it uses memory that was moved since it was captured"
            found[each.name] = make_view(storage, view.dtype, view.sizes, view.strides, view.offset, view.flags)
        return found

    def rewritten(self) -> Iterator[torch.UntypedStorage]:
        """The memory that the capture allocated and of which a replay writes every byte before it reads any."""
        for each in self._graph_arguments:
            length = each.view.elements * each.view.dtype.itemsize
            whole = each.everything and length == each.memory.bytes and is_dense(each.view.sizes, each.view.strides)
            storage = each.memory.storage()
            if whole and each.memory.made and not each.memory.reads_before and storage is not None:
                yield storage

    def allocated(self) -> Iterator[torch.Tensor]:
        """The memory that the capture allocated and that is left of it, each as one tensor."""
        for each in self._graph_arguments:
            storage = each.memory.storage()
            if each.memory.made and storage is not None and each.name == argument_name(each.memory.id, 0):
                whole = storage.nbytes() % each.view.dtype.itemsize == 0
                dtype = each.view.dtype if whole else torch.uint8
                yield make_view(storage, dtype, (storage.nbytes() // dtype.itemsize,), (1,))


class Allocated(CapturedKernel):
    """`aten::empty_strided`, for memory that a capture allocated: its call returns that."""

    __slots__ = ()

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(torch.ops.aten.empty_strided.default)
        self.call = lambda *_args, **_kwargs: tensor

    @staticmethod
    def allocation(tensor: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (list(shape_of(tensor)), list(stride_of(tensor))), {
            "dtype": tensor.dtype,
            "device": storage_of(tensor).device,
        }
