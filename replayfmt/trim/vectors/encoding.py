"""An op's values as JSON, with its tensors beside it as safetensors, and which values cannot be expressed that way.

Plain values are written as they are. Values that JSON lacks are objects with one key that begins with `$`, which no
argument's name does: `$tensor`, `$torch` (a dtype, layout or memory format), `$device`, `$float`, `$complex`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch

from replayfmt.format.codes import DType, Layout, MemoryFormat
from replayfmt.format.model import (
    CompositeValue,
    DeviceValue,
    GeneratorValue,
    Kernel,
    OpaqueValue,
    ProcessGroupValue,
    StorageValue,
    TensorValue,
    Value,
)
from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch.tensors.dtypes import TORCH_DTYPE, TORCH_LAYOUT, TORCH_MEMORY_FORMAT
from replayfmt.pytorch.tensors.memory import row_major_bytes

from ..safetensors import Array

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_LONGEST_NAME = 100


def problem_of(reader: CaptureReader, values: tuple[Value, ...]) -> str | None:
    """Why a vector cannot hold these values; None if it can."""
    return next(_problems(reader, values), None)


def _problems(reader: CaptureReader, values: tuple[Value, ...] | list[Value]) -> Iterator[str]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _problems(reader, value)
        elif isinstance(value, CompositeValue):
            yield f"a tensor is {value.form}; vectors hold strided tensors"
        elif isinstance(value, OpaqueValue):
            yield f"a value was not captured: {value.text}"
        elif isinstance(value, GeneratorValue):
            yield "it takes a random generator"
        elif isinstance(value, ProcessGroupValue):
            yield "it takes a process group"
        elif isinstance(value, StorageValue):
            yield "it takes a storage instead of a tensor"
        elif isinstance(value, TensorValue):
            if value.meta.layout is not Layout.strided:
                yield f"a tensor has the layout {value.meta.layout.name}; vectors hold strided tensors"
            elif reader.devices[value.meta.device].kind == "meta":
                yield "a tensor is on the meta device, where it has no content"
            elif value.meta.dtype not in TORCH_DTYPE:
                yield f"this torch has no dtype {value.meta.dtype.name}"


class VectorEncoder:
    """Makes the JSON of one op and collects its tensors. `give` returns the replay's tensor for a tensor value."""

    def __init__(self, reader: CaptureReader) -> None:
        self._reader = reader
        self.arrays: list[Array] = []

    def value(self, value: Value, tensor: Any, key: str) -> Any:
        """The JSON of a value; `tensor(value)` returns the tensor for a tensor value, and `key` is the name of its
        data, followed by a number for each step into lists."""
        if isinstance(value, TensorValue):
            return self.tensor(value, tensor(value), key)
        if isinstance(value, list | tuple):
            return [self.value(each, tensor, f"{key}.{place}") for place, each in enumerate(value)]
        if isinstance(value, DeviceValue):
            return {"$device": str(self._reader.devices[value.id])}
        if isinstance(value, DType):
            return {"$torch": _word(TORCH_DTYPE[value])}
        if isinstance(value, Layout):
            return {"$torch": _word(TORCH_LAYOUT[value])}
        if isinstance(value, MemoryFormat):
            return {"$torch": _word(TORCH_MEMORY_FORMAT[value])}
        if isinstance(value, complex):
            return {"$complex": [_plain(value.real), _plain(value.imag)]}
        if isinstance(value, float):
            return _float(value)
        assert value is None or isinstance(value, bool | int | str), "what cannot be said is refused before"
        return value

    def tensor(self, value: TensorValue, tensor: torch.Tensor, key: str) -> dict[str, Any]:
        """A tensor's elements, in row-major order, under `key`, and its other properties."""
        meta = value.meta
        self.arrays.append(Array(key, row_major_bytes(tensor), meta.dtype, meta.sizes))
        return {
            "$tensor": key,
            "dtype": _word(TORCH_DTYPE[meta.dtype]),
            "sizes": list(meta.sizes),
            "strides": list(meta.strides),
            "device": str(self._reader.devices[meta.device]),
        }


def _word(of_torch: Any) -> str:
    """`float16` for torch.float16."""
    return str(of_torch).removeprefix("torch.")


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else {"inf": "Infinity", "-inf": "-Infinity"}.get(repr(value), "NaN")


def _float(value: float) -> float | dict[str, str]:
    return value if math.isfinite(value) else {"$float": str(_plain(value))}


def file_name(ordinal: int, records: int, kernel: Kernel) -> str:
    """The base name of an op's files: its ordinal, and as much of the kernel's name as is safe in a file name."""
    name = _UNSAFE.sub("_", f"{kernel.name.replace('::', '.')}.{kernel.overload}")[:_LONGEST_NAME]
    return f"{ordinal:0{len(str(max(records - 1, 0)))}}-{name}"
