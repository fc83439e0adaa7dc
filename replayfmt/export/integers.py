"""The integers and booleans that exported calls take: indices, lengths, offsets, masks, which cannot be replaced with
zeros.

They are the initial values of a replay: captured, or synthesized by initializers. Values that an op of the capture
computed are unknown without a run.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterator
from typing import Any

import torch

from replayfmt.errors import ReplayRefused, UsageError
from replayfmt.format.codes import DType
from replayfmt.format.model import Record, TensorValue
from replayfmt.format.reader import CaptureReader
from replayfmt.initializers import TensorInfo
from replayfmt.pytorch.tensors.dtypes import TORCH_DTYPE
from replayfmt.pytorch.tensors.memory import undispatched
from replayfmt.replay.plan import Plan

_INTEGERS = {
    DType.bool,
    DType.uint8,
    DType.int8,
    DType.uint16,
    DType.int16,
    DType.uint32,
    DType.int32,
    DType.uint64,
    DType.int64,
}
_MOST_ELEMENTS = 1 << 22  # quantized weights are integers, too; they need no content
Texts = dict[str, str]


class Integers:
    """Content of the arguments of ops, as text. `problem` says why there is none at all. Close it after use."""

    def __init__(self, reader: CaptureReader) -> None:
        self._reader = reader
        self.missing = 0  # integer arguments without content
        self.problem = ""
        self._plan: Plan | None = None

    def _prepared(self) -> Plan | None:
        """The plan of a replay, once it is needed."""
        if self._plan is None and not self.problem:
            on_host = all(device is None or device.kind in ("cpu", "meta") for device in self._reader.devices)
            try:
                self._plan = Plan(self._reader, () if on_host else ("cpu",), True, keep_going=True)
            except ReplayRefused as error:
                self.problem = f"{error}: {'; '.join(error.findings)}"
            except UsageError as error:
                self.problem = str(error)
        return self._plan

    def close(self) -> None:
        if self._plan is not None:
            self._plan.close()

    def __enter__(self) -> Integers:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def of(self, record: Record) -> Texts:
        """Zlib-compressed bytes in base64 by argument (`indices[1]` in lists): the elements in row-major order,
        little-endian, those of repeated dimensions once."""
        found: Texts = {}
        for node, value in zip(record.signature.args, record.args, strict=True):
            for label, tensor in _tensors(node.name, value):
                if tensor.meta.dtype not in _INTEGERS or not tensor.storage or not math.prod(tensor.meta.sizes):
                    continue
                content = self._content(tensor)
                if content is None:
                    self.missing += 1
                else:
                    found[label] = base64.b64encode(zlib.compress(content)).decode()
        return found

    def _content(self, value: TensorValue) -> bytes | None:
        meta = value.meta
        sizes = tuple(size if stride else 1 for size, stride in zip(meta.sizes, meta.strides, strict=True))
        dtype = TORCH_DTYPE[meta.dtype]
        end = value.offset + 1 + sum((size - 1) * stride for size, stride in zip(sizes, meta.strides, strict=True))
        inside = end * dtype.itemsize <= self._reader.storage(value.storage).bytes
        if math.prod(sizes) > _MOST_ELEMENTS or not inside or (plan := self._prepared()) is None:
            return None
        info = TensorInfo(
            value.storage, dtype, sizes, meta.strides, value.offset, str(self._reader.devices[meta.device])
        )
        with undispatched():
            content = plan.synthesis.content(info)
            return None if content is None else bytes(content.contiguous().view(-1).view(torch.uint8).numpy())


def _tensors(label: str, value: Any) -> Iterator[tuple[str, TensorValue]]:
    if isinstance(value, TensorValue):
        yield label, value
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield from _tensors(f"{label}[{place}]", each)
