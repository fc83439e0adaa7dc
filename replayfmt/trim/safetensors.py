"""Writes safetensors files: a JSON header, then the tensors' bytes without gaps."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from replayfmt.format.codes import ITEM_BYTES, DType

_NAMES: dict[DType, str] = {
    DType.bool: "BOOL",
    DType.uint8: "U8",
    DType.int8: "I8",
    DType.int16: "I16",
    DType.uint16: "U16",
    DType.float16: "F16",
    DType.bfloat16: "BF16",
    DType.int32: "I32",
    DType.uint32: "U32",
    DType.float32: "F32",
    DType.float64: "F64",
    DType.int64: "I64",
    DType.uint64: "U64",
    DType.float8_e4m3fn: "F8_E4M3",
    DType.float8_e5m2: "F8_E5M2",
}
_ALIGNMENT = 8


@dataclass(frozen=True)
class Array:
    """Named bytes. If the format has no name for the dtype, or the sizes do not match the number of bytes, they are
    written as plain bytes."""

    name: str
    data: bytes
    dtype: DType = DType.uint8
    sizes: tuple[int, ...] = ()

    def header(self, offset: int) -> dict[str, object]:
        """The array's entry in the file's header."""
        count = 1
        for size in self.sizes:
            count *= size
        fits = self.dtype in _NAMES and count * ITEM_BYTES[self.dtype] == len(self.data)
        return {
            "dtype": _NAMES[self.dtype] if fits else "U8",
            "shape": list(self.sizes) if fits else [len(self.data)],
            "data_offsets": [offset, offset + len(self.data)],
        }


def write_safetensors(path: str | os.PathLike[str], arrays: Sequence[Array]) -> None:
    """Write arrays to a new file at `path`. Raises OSError."""
    header: dict[str, object] = {}
    offset = 0
    for array in arrays:
        header[array.name] = array.header(offset)
        offset += len(array.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for array in arrays:
            file.write(array.data)
