"""The values of one record as PyTorch has them: tensors, dtypes, devices and composites instead of their representation
in the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from replayfmt.errors import ContentNotCaptured, InvalidCapture
from replayfmt.format.codes import DType, Layout, MemoryFormat
from replayfmt.format.model import CompositeValue, DeviceValue, Node, TensorValue, Value
from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch.tensors.composites import put_together
from replayfmt.pytorch.tensors.dtypes import TORCH_DTYPE, TORCH_LAYOUT, TORCH_MEMORY_FORMAT

# Returns the tensor for a tensor value; the text is what errors call it.
GiveTensor = Callable[[TensorValue, str], torch.Tensor]


def tensors_of(values: Iterable[Value]) -> Iterator[TensorValue]:
    """The tensors among and inside of these values, in the order of their slots."""
    for value in values:
        if isinstance(value, TensorValue):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_of(value)
        elif isinstance(value, CompositeValue):
            yield from tensors_of(value.parts)


def python_values(
    reader: CaptureReader, nodes: Sequence[Node], values: Sequence[Value], give: GiveTensor, where: str
) -> list[Any]:
    """Arguments or results of a record as PyTorch has them. `where` begins the names that errors use.

    Raises ContentNotCaptured for what a capture only describes (opaque objects, generators, process groups), and what
    `give` raises.
    """
    return [
        _value(reader, value, give, f"{where}{node.name or place}")
        for place, (node, value) in enumerate(zip(nodes, values, strict=True))
    ]


def _value(reader: CaptureReader, value: Value, give: GiveTensor, name: str) -> Any:
    if isinstance(value, TensorValue):
        return give(value, name)
    if isinstance(value, list):
        return [_value(reader, each, give, f"{name}[{place}]") for place, each in enumerate(value)]
    if isinstance(value, tuple):
        return tuple(_value(reader, each, give, f"{name}[{place}]") for place, each in enumerate(value))
    if isinstance(value, CompositeValue):
        parts = [_value(reader, each, give, f"{name}.{place}") for place, each in enumerate(value.parts)]
        try:
            return put_together(value.form, parts)
        except (ValueError, RuntimeError) as error:
            raise InvalidCapture(f"{reader.path}: {name}: {error}") from None
    if isinstance(value, DeviceValue):
        return torch.device(str(reader.devices[value.id]))
    for kind, known in ((DType, TORCH_DTYPE), (Layout, TORCH_LAYOUT), (MemoryFormat, TORCH_MEMORY_FORMAT)):
        if isinstance(value, kind):
            if value not in known:
                raise ContentNotCaptured(f"{reader.path}: {name}: this torch has no {kind.__name__} {value.name}")
            return known[value]  # type: ignore[index]
    if value is None or isinstance(value, bool | int | float | complex | str):
        return value
    raise ContentNotCaptured(f"{reader.path}: {name}: the capture only describes it ({value!r:.80})")
