"""Tensor metadata as the capture interns it: dtype, sizes, strides, device and flags under one id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from replayfmt.format.codes import Layout, TensorFlag
from replayfmt.format.model import TensorMeta
from replayfmt.pytorch.tensors.dtypes import DTYPE_CODE
from replayfmt.pytorch.tensors.looks import device_of, dtype_of, is_complex, is_conj, is_neg, shape_of, stride_of

from ..storages.coverage import ByteRegion
from .buffer import RecordBuffer
from .records import Records

Key = tuple[torch.dtype, torch.Size, tuple[int, ...], torch.device, int]


@dataclass(frozen=True, slots=True)
class MetaParams:
    """The parameters needed to recreate a tensor of a meta id."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    flags: TensorFlag
    item: int  # bytes per element
    elements: int

    def region(self, offset: int) -> ByteRegion:
        """The bytes of a view with this metadata, `offset` elements into its storage."""
        item = self.item
        return ByteRegion(offset * item, self.sizes, tuple(stride * item for stride in self.strides), item)


class TensorMetas:
    """Meta ids by content. `params` is indexed by meta id."""

    def __init__(self, buffer: RecordBuffer, records: Records, native: Any = None) -> None:
        """`native`: the session of the hot path, which gets every new one."""
        self._native = native
        self._buffer = buffer
        self._records = records
        self.ids: dict[Key, int] = {}
        self.params: list[MetaParams] = []

    def of(self, tensor: torch.Tensor, zero: bool = False) -> int:
        """The meta id of a strided tensor as it is now."""
        conj = is_complex(tensor) and is_conj(tensor)
        neg = is_neg(tensor)
        flags = (TensorFlag.conj if conj else 0) | (TensorFlag.neg if neg else 0) | (TensorFlag.zero if zero else 0)
        key = (dtype_of(tensor), shape_of(tensor), stride_of(tensor), device_of(tensor), int(flags))
        number = self.ids.get(key)
        if number is None:
            number = self._add(key)
            if self._native is not None and not flags:
                self._native.note_meta(tensor, number, self._records.device(key[3]))
        return number

    def once(self, meta: int, device: torch.device) -> int:
        """The meta id of an expanded view's elements, each once: repeated dimensions have size 1."""
        params = self.params[meta]
        sizes = [size if stride else min(size, 1) for size, stride in zip(params.sizes, params.strides, strict=True)]
        key = (params.dtype, torch.Size(sizes), params.strides, device, int(params.flags))
        number = self.ids.get(key)
        return self._add(key) if number is None else number

    def row(self, dtype: torch.dtype, elements: int, device: torch.device) -> int:
        """The meta id of so many elements side by side."""
        key = (dtype, torch.Size((elements,)), (1,), device, 0)
        number = self.ids.get(key)
        return self._add(key) if number is None else number

    def _add(self, key: Key) -> int:
        dtype, sizes, strides, device, bits = key
        flags = TensorFlag(bits)
        with self._buffer.lock:
            number = self._buffer.writer.meta(
                TensorMeta(
                    DTYPE_CODE[dtype], Layout.strided, self._records.device(device), tuple(sizes), strides, flags
                )
            )
            while len(self.params) <= number:
                self.params.append(MetaParams(dtype, tuple(sizes), strides, flags, dtype.itemsize, sizes.numel()))
            self.ids[key] = number
        return number
