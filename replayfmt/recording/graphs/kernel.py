"""The kernel of a graph: one replay of it is one call, with the memory that it uses as arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from replayfmt.format.attachments import BODY, METADATA
from replayfmt.format.codes import KernelKind
from replayfmt.format.graphs import argument_name, body_metadata, open_body
from replayfmt.pytorch.tensors.looks import shape_of, storage_of, stride_of
from replayfmt.pytorch.tensors.memory import make_view

from ..code.kernels import Attached, CodeKernel
from ..dispatch.kernels import CapturedKernel
from .body import GraphBody, UsedMemory, UsedView


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
            storage = each.memory.storage()
            if storage is None:
                return "it uses memory that the program has freed since it was captured"
            if (storage.data_ptr(), storage.nbytes()) != (each.memory.address, each.memory.bytes):
                return "it uses memory that was moved since it was captured"
            found[each.name] = make_view(storage, *_as_made(each.view))
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


def is_dense(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether no two elements lie in one place, and no place between them is left out."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _as_made(view: UsedView) -> tuple[Any, ...]:
    return view.dtype, view.sizes, view.strides, view.offset, view.flags


class Allocated(CapturedKernel):
    """`aten::empty_strided`, for memory that a capture allocated: its call returns that."""

    __slots__ = ()

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(torch.ops.aten.empty_strided.default)
        self.call = lambda *_args, **_kwargs: tensor

    @staticmethod
    def allocation(tensor: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What allocates such a tensor."""
        return (list(shape_of(tensor)), list(stride_of(tensor))), {
            "dtype": tensor.dtype,
            "device": storage_of(tensor).device,
        }
