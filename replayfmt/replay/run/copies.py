"""Copies of the memory an op works on, so that it can be run again without changing what the replay continues with.

Whole storages are copied, so arguments that share memory also share the copy.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from replayfmt.format.codes import TensorFlag
from replayfmt.pytorch.tensors.composites import is_composite, put_together, take_apart
from replayfmt.pytorch.tensors.memory import byte_tensor, host_view, make_view, new_storage


def storages_of(values: Sequence[Any], places: Iterable[int]) -> dict[int, torch.UntypedStorage]:
    """The storages behind the tensors at some places, each once, by identity."""
    storages = (values[place].untyped_storage() for place in places)
    return {storage._cdata: storage for storage in storages}


def copied(storage: torch.UntypedStorage, device: torch.device | None = None) -> torch.UntypedStorage:
    """A storage of its own with the same bytes, on the same device or another."""
    copy = new_storage(storage.nbytes(), device or storage.device)
    copy_bytes(copy, storage)
    return copy


def copy_bytes(to: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
    """Overwrite a storage with the bytes of one of the same length."""
    byte_tensor(to).copy_(byte_tensor(source))


def moved(values: Sequence[Any], to: dict[int, torch.UntypedStorage]) -> list[Any]:
    """The values, those on storages that are keys of `to` (by identity) as the same views on their counterparts."""
    result: list[Any] = []
    for value in values:
        storage = value if isinstance(value, torch.UntypedStorage) else value.untyped_storage()
        other = to.get(storage._cdata)
        if other is None:
            result.append(value)
        elif isinstance(value, torch.UntypedStorage):
            result.append(other)
        else:
            offset = int(value.storage_offset())
            result.append(make_view(other, value.dtype, value.shape, value.stride(), offset, _lazy_flags(value)))
    return result


def _lazy_flags(tensor: torch.Tensor) -> TensorFlag:
    flags = TensorFlag(0)
    if tensor.is_conj():
        flags |= TensorFlag.conj
    if tensor.is_neg():
        flags |= TensorFlag.neg
    return flags


class Clones:
    """Makes copies, on `device` if that is given; `originals` and `copies` are their storages, by the address of the
    original. With `only`, of these storages alone, and everything else stays as it is."""

    def __init__(self, device: torch.device | None = None, only: Container[int] | None = None) -> None:
        self._device, self._only = device, only
        self.originals: dict[int, torch.UntypedStorage] = {}
        self.copies: dict[int, torch.UntypedStorage] = {}

    def of(self, value: Any) -> Any:
        """The same value on copied memory; generators, numbers and tensors without memory are returned as they are."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.UntypedStorage):
            return self._storage(value)
        if isinstance(value, list | tuple):
            return type(value)(self.of(each) for each in value)
        if isinstance(value, dict):
            return {name: self.of(each) for name, each in value.items()}
        if isinstance(value, torch.device) and self._device is not None:
            return self._device
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_composite(tensor):
            form, parts = take_apart(tensor)
            return put_together(form, [self.of(part) for part in parts])
        if not has_memory(tensor):
            return tensor
        storage = tensor.untyped_storage()
        if self._only is not None and storage._cdata not in self._only:
            return tensor
        (clone,) = moved([tensor], {storage._cdata: self._storage(storage)})
        return clone

    def _storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        copy = self.copies.get(storage._cdata)
        if self._only is not None and storage._cdata not in self._only:
            return storage
        if copy is None:
            copy = copy_of(storage) if self._device is None else copied(storage, self._device)
            self.originals[storage._cdata], self.copies[storage._cdata] = storage, copy
        return copy


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor has memory: not if it is on the meta device, or reads as zeros without any memory."""
    return tensor.device.type != "meta" and not tensor._is_zerotensor()


def copy_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A new storage with the same bytes."""
    if storage.device.type != "cpu" or not storage.nbytes():
        return copied(storage)
    copy = new_storage(storage.nbytes(), storage.device)
    host_view(copy)[:] = host_view(storage)  # not with torch, whose thread count is set for the captured work
    return copy


def same_bytes(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    """Whether two storages of the same device and length hold the same bytes."""
    if one.device.type == "cpu":
        return np.array_equal(np.frombuffer(host_view(one), np.uint8), np.frombuffer(host_view(other), np.uint8))
    return bool(torch.equal(byte_tensor(one), byte_tensor(other)))


def strided_parts(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """The tensors and numbers in a value, each with its place; composites as their parts, tensors that implement their
    own dispatch (they need not have memory) as their class."""
    if isinstance(value, torch.Tensor) and type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        yield place, type(value)
    elif isinstance(value, torch.Tensor) and is_composite(value):
        form, parts = take_apart(value)
        yield place, form
        for index, part in enumerate(parts):
            yield from strided_parts(part, f"{place}, part {index} of {form}")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from strided_parts(each, f"{place}[{index}]")
    else:
        yield place, value
