"""Checking that an op's results have the shape they had: how many, what dtype, sizes, strides, what memory.

Part of a verifying replay. Also memory identity is compared: a result that shares its storage with an argument in the
capture has to share it in the replay, and one that does not must not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from replayfmt.format.codes import ValueKind

from .facts import Place
from .operations import View
from .verify import Judge, Where


@dataclass(frozen=True)
class Expected:
    """One tensor result. `shares` is the index of an argument tensor on the same storage, None where there is none.

    `apart` are the indices of argument tensors that must not share its storage.
    """

    view: View
    device: torch.device
    shares: int | None
    apart: tuple[int, ...]


class ExpectResults:
    """Called with what an op returned and its tensor arguments; gives the results back."""

    def __init__(self, judge: Judge, where: Where, results: Sequence[Place], expected: dict[int, Expected], *,
                 sizes_only: bool = False) -> None:
        """With `sizes_only` numbers of results, dtypes, sizes and devices are all that is compared: for content that is
        not the captured one, and captures that do not know everything of their results."""
        self._judge = judge
        self._where = where
        self._results = results
        self._expected = expected
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
        for index, (place, value) in enumerate(zip(self._results, values, strict=True)):
            self._check(index, place, value, args)
        return returned

    def _differs(self, index: int | None, expected: str, got: str) -> None:
        self._judge.diverged(replace(self._where, result=index), expected, got)

    def _check(self, index: int, place: Place, value: Any, args: tuple[torch.Tensor, ...]) -> None:
        kind = place.node.kind
        if kind is ValueKind.tensor:
            if not isinstance(value, torch.Tensor):
                self._differs(index, "a tensor", _named(value))
            else:
                self._check_tensor(index, self._expected[place.tensor_slot], value, args)
        elif kind is ValueKind.none:
            # Not every capture has the numbers that ops returned: none stands for them.
            if value is not None and not isinstance(value, bool | int | float | complex):
                self._differs(index, "None", _named(value))
        elif kind in (ValueKind.list, ValueKind.tuple):
            if not isinstance(value, list | tuple) or len(value) != len(place.children):
                self._differs(index, f"{len(place.children)} values", _named(value))
                return
            for child, each in zip(place.children, value, strict=True):
                self._check(index, child, each, args)

    def _check_tensor(self, index: int, expected: Expected, tensor: torch.Tensor,
                      args: tuple[torch.Tensor, ...]) -> None:
        if tensor.layout is not torch.strided:
            self._differs(index, "a strided tensor", _named(tensor))
            return
        view = expected.view
        sizes, strides = tuple(tensor.shape), tensor.stride()
        wanted = (view.dtype, view.sizes, _telling(view.sizes, view.strides), view.offset, expected.device)
        got = (tensor.dtype, sizes, _telling(sizes, strides), int(tensor.storage_offset()), tensor.device)
        if wanted != got and not (self._sizes_only and (wanted[0], wanted[1], wanted[4]) == (got[0], got[1], got[4])):
            self._differs(index, _tensor(view.dtype, view.sizes, view.strides, view.offset, expected.device),
                          _tensor(tensor.dtype, sizes, strides, int(tensor.storage_offset()), tensor.device))
            return
        if self._sizes_only:
            return
        memory = tensor.untyped_storage()._cdata
        if expected.shares is not None and args[expected.shares].untyped_storage()._cdata != memory:
            self._differs(index, f"a view on tensor argument {expected.shares}", "memory of its own")
        for position in expected.apart:
            if args[position].untyped_storage()._cdata == memory:
                self._differs(index, "memory of its own", f"a view on tensor argument {position}")


def _telling(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that mean something: not those of dimensions of one element, and none where there are no elements."""
    if 0 in sizes:
        return ()
    return tuple(stride for size, stride in zip(sizes, strides, strict=True) if size != 1)


def _tensor(dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int,
            device: torch.device) -> str:
    name = str(dtype).removeprefix("torch.")
    return f"{name}{list(sizes)} with strides {list(strides)} at offset {offset} on {device}"


def _named(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.layout).removeprefix('torch.')} tensor {list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"{len(value)} values"
    return "None" if value is None else type(value).__name__
