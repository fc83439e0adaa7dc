"""Content in an execution trace: the ranges of integer tensors, and the files of tensors that were saved completely.

Both exist only if the traced program requested them (ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_RANGE and
_DATA). Other storages that no call produced have no content in the trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from replayfmt.format.codes import ITEM_BYTES, DType, StorageOrigin
from replayfmt.format.model import Recipe, Statistics
from replayfmt.pytorch.tensors.dtypes import TORCH_DTYPE

from ..common.trace_files import archive_texts
from ..common.values import TracedStorage, contiguous
from .memory import Placed

_INTEGERS = frozenset(
    {DType.uint8, DType.int8, DType.int16, DType.int32, DType.int64, DType.uint16, DType.uint32, DType.uint64}
)
_UNSIGNED = frozenset({DType.uint8, DType.uint16, DType.uint32, DType.uint64})
_LARGEST_CONSTANT = 64 << 20
_RESOURCES = "_resources"


# The neutral element of arithmetic with a number: by operator, without a trailing underscore.
_NEUTRAL = {"aten::add": 0, "aten::sub": 0, "aten::mul": 1, "aten::div": 1, "aten::pow": 1}


def _folder_name(name: str) -> str:
    """The name of the folder that the observer puts a trace's resources into."""
    return name.removesuffix(".gz").removesuffix(".json") + _RESOURCES


@dataclass(frozen=True)
class Found:
    """Content for a storage; `told` describes its source, for the note on the call that uses it."""

    origin: StorageOrigin
    content: bytes | Recipe
    told: str


class TracedContent:
    """The resources of one trace: Triton sources by file name, saved tensors by node and number. `problems` are
    sentences about resources that could not be read."""

    def __init__(self, path: str, member: str = "") -> None:
        """`member` is the trace's file in an archive."""
        self._path, self._member = path, member
        self.problems: list[str] = []

    @cached_property
    def _files(self) -> dict[str, bytes]:
        def wanted(name: str) -> bool:
            return _RESOURCES in name and (name.endswith(".py") or name.endswith(".dat"))

        members, damage = archive_texts(self._path, wanted)
        if damage:
            self.problems.append(f"resources of the trace may be missing: {damage}")
        own = str(Path(self._member).parent / _folder_name(Path(self._member).name)) + "/"
        if any(name.startswith(own) for name in members):  # else the archive has one trace, under any name
            members = {name: data for name, data in members.items() if name.startswith(own)}
        found = {Path(name).name: data for name, data in members.items()}
        folder = self._folder()
        if folder is not None:
            for each in sorted(folder.iterdir()):
                if each.suffix in (".py", ".dat") and each.is_file():
                    found.setdefault(each.name, each.read_bytes())
        return found

    def _folder(self) -> Path | None:
        """The folder in which the observer puts resources: `x_resources` beside `x.json`."""
        path = Path(self._path)
        folder = path.with_name(_folder_name(path.name))
        return folder if folder.is_dir() else None

    def source(self, name: str) -> str | None:
        """A Triton kernel's source, by its file's name."""
        data = self._files.get(name)
        return None if data is None else data.decode(errors="replace")

    def number(self, operator: str, dtype: DType, storage: TracedStorage) -> Found | None:
        """A value for a Python number, which no trace records: the operator's neutral element, if it has one."""
        neutral = _NEUTRAL.get(operator.removesuffix("_"))
        torch_dtype = TORCH_DTYPE.get(dtype)
        if neutral is None or torch_dtype is None or storage.bytes < torch_dtype.itemsize:
            return None
        element = bytes(torch.tensor(neutral, dtype=torch_dtype).reshape(1).view(torch.uint8).tolist())
        return Found(
            StorageOrigin.payload,
            element.ljust(storage.bytes, b"\0"),
            f"a Python number whose value is not in the trace; taken as {neutral}, which changes nothing",
        )

    def find(
        self, node: int, number: int, placed: Placed, dtype: DType, storage: TracedStorage, span: tuple[int, int] | None
    ) -> Found | None:
        """The content of a storage that this tensor is the first to use, as far as the trace has it."""
        tensor = placed.tensor
        whole = (
            dtype in _INTEGERS
            and not tensor.offset
            and placed.strides == contiguous(tensor.sizes)
            and tensor.elements * ITEM_BYTES[dtype] == storage.bytes
        )
        if not whole or not storage.bytes:
            return None
        saved = self._files.get(f"nid_{node}_tid_{number}.dat")
        if saved is not None and len(saved) == storage.bytes:
            return Found(StorageOrigin.payload, saved, "its content is saved with the trace")
        if span is None:
            return None
        low, high = span
        if low == high and storage.bytes <= _LARGEST_CONSTANT:
            element = low.to_bytes(ITEM_BYTES[dtype], "little", signed=dtype not in _UNSIGNED)
            return Found(StorageOrigin.payload, element * tensor.elements, f"all of its elements are {low}")
        spread = (high - low) / 12**0.5
        statistics = Statistics((low + high) / 2, spread, float(low), float(high), 0, 0, 0, 0)
        recipe = Recipe(dtype, tensor.elements, node * 1009 + number, statistics)
        return Found(
            StorageOrigin.initializer,
            recipe,
            f"its elements lie between {low} and {high} in the trace; drawn evenly from there",
        )
