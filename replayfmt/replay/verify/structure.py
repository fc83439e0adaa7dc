"""Checks that an op's results have their captured structure: number, dtypes, sizes, strides and memory.

Part of a verifying replay. Aliasing is compared too: a result must share its storage with an argument in the replay if
and only if it did in the capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from replayfmt.format.codes import ValueKind
from replayfmt.format.slots import NodePlace

from ..codegen.operations import View
from .comparison import Judge, Where

# Keyed by memory, then by captured storage; the value is the index of an argument.
Memories = dict[int, dict[int, int]]


@dataclass(frozen=True)
class Expected:
    """One tensor result. `shares` is the index of an argument tensor on the same storage, None if there is none.

    `storage` is the captured storage's id: argument tensors on other storages must not share memory with it.
    """

    view: View
    device: torch.device
    storage: int
    shares: int | None


class ExpectResults:
    """Called with what an op returned and its tensor arguments; returns the results."""

    def __init__(
        self,
        judge: Judge,
        where: Where,
        results: Sequence[NodePlace],
        expected: dict[int, Expected],
        storages: Sequence[int | None],
        *,
        sizes_only: bool = False,
    ) -> None:
        """`storages` are the captured storages of the tensor arguments, None for arguments that the op moves to another
        storage.

        With `sizes_only` only the number of results, dtypes, sizes and devices are compared: for content that is not
        the captured content, and for captures that do not know everything about their results.
        """
        self._judge = judge
        self._where = where
        self._results = results
        self._expected = expected
        self._storages = storages
        self._sizes_only = sizes_only

    def __call__(self, returned: Any, *args: torch.Tensor) -> Any:
        self._judge.verification.structures += 1
        if len(self._results) == 0:
            values: Sequence[Any] = ()
            if returned is not None and not self._sizes_only:
                self._differs(None, "no result", _named(returned))
        elif len(self._results) == 1:
            values = (returned,)
        elif isinstance(returned, tuple | list) and len(returned) == len(self._results):
            values = returned
        else:
            self._differs(None, f"{len(self._results)} results", _named(returned))
            return returned
        memories = self._memories(args)
        for index, (place, value) in enumerate(zip(self._results, values, strict=True)):
            self._check(index, place, value, args, memories)
        return returned

    def _memories(self, args: tuple[torch.Tensor, ...]) -> Memories:
        """The captured storage and index of each argument that has memory, by its memory."""
        memories: Memories = {}
        if not self._sizes_only:
            for position, (storage, tensor) in enumerate(zip(self._storages, args, strict=True)):
                if storage is not None:
                    memories.setdefault(_memory(tensor), {}).setdefault(storage, position)
        return memories

    def _differs(self, index: int | None, expected: str, got: str) -> None:
        self._judge.diverged(replace(self._where, result=index), expected, got)

    def _check(
        self, index: int, place: NodePlace, value: Any, args: tuple[torch.Tensor, ...], memories: Memories
    ) -> None:
        kind = place.node.kind
        if kind is ValueKind.tensor:
            if not isinstance(value, torch.Tensor):
                self._differs(index, "a tensor", _named(value))
            else:
                self._check_tensor(index, self._expected[place.tensor_slot], value, args, memories)
        elif kind is ValueKind.none:
            # Not every capture has the numbers that ops returned; unknown ones are None.
            if value is not None and not isinstance(value, bool | int | float | complex):
                self._differs(index, "None", _named(value))
        elif kind in (ValueKind.list, ValueKind.tuple):
            if not isinstance(value, list | tuple) or len(value) != len(place.children):
                self._differs(index, f"{len(place.children)} values", _named(value))
                return
            for child, each in zip(place.children, value, strict=True):
                self._check(index, child, each, args, memories)

    def _check_tensor(
        self, index: int, expected: Expected, tensor: torch.Tensor, args: tuple[torch.Tensor, ...], memories: Memories
    ) -> None:
        if tensor.layout is not torch.strided:
            self._differs(index, "a strided tensor", _named(tensor))
            return
        view = expected.view
        sizes, strides = tuple(tensor.shape), tensor.stride()
        wanted = (view.dtype, view.sizes, _telling(view.sizes, view.strides), view.offset, expected.device)
        got = (tensor.dtype, sizes, _telling(sizes, strides), int(tensor.storage_offset()), tensor.device)
        if wanted != got and not (self._sizes_only and (wanted[0], wanted[1], wanted[4]) == (got[0], got[1], got[4])):
            self._differs(
                index,
                _tensor(view.dtype, view.sizes, view.strides, view.offset, expected.device),
                _tensor(tensor.dtype, sizes, strides, int(tensor.storage_offset()), tensor.device),
            )
            return
        if self._sizes_only:
            return
        memory = _memory(tensor)
        if expected.shares is not None and _memory(args[expected.shares]) != memory:
            self._differs(index, f"a view on tensor argument {expected.shares}", "memory of its own")
        for storage, position in memories.get(memory, {}).items():
            if storage != expected.storage:
                self._differs(index, "memory of its own", f"a view on tensor argument {position}")


def _memory(tensor: torch.Tensor) -> int:
    """A key that is equal for tensors on the same memory."""
    return tensor.untyped_storage()._cdata


def _telling(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that matter: none for dimensions of one element, and none at all for an empty tensor."""
    if 0 in sizes:
        return ()
    return tuple(stride for size, stride in zip(sizes, strides, strict=True) if size != 1)


def _tensor(
    dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int, device: torch.device
) -> str:
    name = str(dtype).removeprefix("torch.")
    return f"{name}{list(sizes)} with strides {list(strides)} at offset {offset} on {device}"


def _named(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.layout).removeprefix('torch.')} tensor {list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"{len(value)} values"
    return "None" if value is None else type(value).__name__
