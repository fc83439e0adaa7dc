"""Copies of the memory an op works on, so that it can be run without changing what the replay continues with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from replayfmt.format.codes import TensorFlag
from replayfmt.pytorch.tensors.memory import byte_tensor, make_view, new_storage


def storages_of(values: Sequence[Any], places: Iterable[int]) -> dict[int, torch.UntypedStorage]:
    """The storages behind the tensors at some places, each once, by identity."""
    storages = (values[place].untyped_storage() for place in places)
    return {storage._cdata: storage for storage in storages}


def copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A storage of its own with the same bytes, on the same device."""
    copy = new_storage(storage.nbytes(), storage.device)
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
