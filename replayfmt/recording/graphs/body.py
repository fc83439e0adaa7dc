"""The body of a graph: the ops that were issued while it was captured, and the events that order its streams, written
as a capture of its own.

Nothing of them ran, so nothing of their content is read. Memory is named by storage: what was there before, what the
capture allocated and what is left of that at its end. Tensors of the host that an op is given by value, as the graph
has them, are kept with their content.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from replayfmt.format.codes import Layout, OpStatus, RecordKind, StorageOrigin, TensorFlag
from replayfmt.format.graphs import BODY_SESSION
from replayfmt.format.kept_attachments import KeptAttachments
from replayfmt.format.model import Device, Generator, Session, Signature, StreamPlacement, TensorMeta
from replayfmt.format.records.builder import Moment, RecordBuilder, RecordSlots
from replayfmt.format.redaction import Redaction
from replayfmt.format.writer import CaptureWriter
from replayfmt.pytorch.accelerators import HOST, default_generator
from replayfmt.pytorch.settings import read_settings
from replayfmt.pytorch.tensors.dtypes import DTYPE_CODE
from replayfmt.pytorch.tensors.looks import (
    device_of,
    dtype_of,
    is_complex,
    is_conj,
    is_neg,
    is_zerotensor,
    offset_of,
    shape_of,
    storage_of,
    stride_of,
)
from replayfmt.pytorch.tensors.memory import host_view

from ..dispatch.arguments import Encoder, build_nodes
from ..dispatch.call import CallValues, OpCall, TensorUse
from ..dispatch.handles import is_address
from ..dispatch.kernels import CapturedKernel
from ..dispatch.unpacked import Unpacked
from ..dispatch.wrappers import is_wrapper
from ..state.randomness import address
from ..stream.records import Unrepresentable, nodes_on_device
from ..stream.redacted_writer import RedactedWriter, user_names

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
        session = Session(BODY_SESSION, "opreplay", "", torch_version=torch.__version__, settings=read_settings())
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
        values = call.values
        try:
            if kernel.unnameable:
                raise Unrepresentable("opaque_argument", kernel.unnameable)
            for index, value in enumerate(args):
                values.argument = index
                self._arguments.add(value, values, call)
            for name, value in kwargs.items():
                values.argument = kernel.indices[name]
                self._arguments.add(value, values, call)
        except Unrepresentable as problem:
            self.unkept(f"{kernel.name} was issued with {problem.args[0]}")
            return None
        for use in values.uses:
            memory = self._memory.get(use.storage._cdata)
            if memory is not None and kernel.reads(use.argument, args, kwargs) and not memory.written:
                memory.reads_before = memory.reads_before or shape_of(use.tensor).numel() > 0
        self.draws = self.draws or (kernel.random and kernel.draws(args, kwargs))
        return call

    def after(self, call: OpCall, result: Any, placement: StreamPlacement) -> bool:
        """It returned. `placement`: the streams that it was given to. Returns whether it wrote memory."""
        kernel = call.kernel
        results = (result,) if kernel.results == 1 else tuple(result) if kernel.results else ()
        values = CallValues()
        try:
            for index, value in enumerate(results):
                values.argument = index
                self._results.add(value, values, call)
        except Unrepresentable as problem:
            self.unkept(f"{kernel.name} returned {problem.args[0]}")
            return False
        self._commit(call, values, len(results), placement)
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

    def _commit(self, call: OpCall, values: CallValues, results: int, placement: StreamPlacement) -> None:
        given, kernel = call.values, call.kernel
        number = self._kernels.get(kernel)
        if number is None:
            number = self._kernels[kernel] = self._writer.kernel(kernel.definition(self._writer))
        key = (number, len(call.args), tuple(call.kwargs), tuple(given.key), tuple(values.key))
        signature = self._signatures.get(key)
        if signature is None:
            names = [kernel.arguments[i].name for i in range(len(call.args))] + list(call.kwargs)
            signature = self._signatures[key] = self._writer.signature(
                Signature(
                    RecordKind.op,
                    build_nodes(given.key, names),
                    build_nodes(values.key, [""] * results),
                    number,
                    OpStatus.ok,
                )
            )
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
        """The id of an accelerator."""
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
        memory = UsedMemory(number, weakref.ref(storage), storage.data_ptr(), length, made, by_value)
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
