"""The family of tensor metadata: everything of a tensor but its storage and offset."""

from __future__ import annotations

from operator import index

import numpy as np

from ..codes import DType, Layout, TensorFlag
from ..container.frames import MAX_LENGTH
from ..model import TensorMeta
from .checks import TablesBody
from .family import DefinedSoFar, DefinitionColumns, DefinitionRow, Family

_FLAGS = int(sum(TensorFlag))
_LAST_DTYPE, _LAST_LAYOUT = int(max(DType)), int(max(Layout))


class MetaFamily(Family[TensorMeta]):
    name = "meta"
    fields = "meta_dtype:[ubyte] meta_layout:[ubyte] meta_device:[uint] meta_flags:[ushort] meta_rank:[ushort]"
    nested_fields = "meta_sizes:[long] meta_strides:[long]"
    frequent = True

    def row(self, definition: TensorMeta) -> DefinitionRow:
        try:
            sizes, strides = tuple(map(index, definition.sizes)), tuple(map(index, definition.strides))
        except TypeError as error:
            raise ValueError(f"tensor metadata whose sizes or strides are not numbers: {definition}: {error}") from None
        if len(sizes) != len(strides):
            raise ValueError(f"tensor metadata with {len(sizes)} sizes and {len(strides)} strides")
        lengths = (*sizes, *strides, 0)
        if min(lengths) < 0 or max(lengths) > MAX_LENGTH:
            raise ValueError(f"tensor metadata with negative or impossible sizes or strides: {definition}")
        dtype, layout, flags = int(definition.dtype), int(definition.layout), int(definition.flags)
        if not (1 <= dtype <= _LAST_DTYPE and 1 <= layout <= _LAST_LAYOUT) or flags & ~_FLAGS:
            raise ValueError(f"tensor metadata with unknown codes: {definition}")
        return DefinitionRow(
            (dtype, layout, definition.device, flags, len(sizes)), tuple(zip(sizes, strides, strict=True))
        )

    def admit(self, definition: TensorMeta, defined: DefinedSoFar) -> None:
        defined.require("device", definition.device)

    def at(self, rows: DefinitionColumns, row: int) -> TensorMeta:
        dimensions = rows.nested("meta", row)
        return TensorMeta(
            DType(rows.number("meta_dtype", row)),
            Layout(rows.number("meta_layout", row)),
            rows.number("meta_device", row),
            tuple(rows.column("meta_sizes")[dimensions].tolist()),
            tuple(rows.column("meta_strides")[dimensions].tolist()),
            TensorFlag(rows.number("meta_flags", row)),
        )

    def check(self, body: TablesBody) -> None:
        body.code("meta_dtype", _LAST_DTYPE)
        body.code("meta_layout", _LAST_LAYOUT)
        body.ids("meta_device", "device")
        flags = body.columns["meta_flags"]
        if len(flags) and int(np.bitwise_or.reduce(flags)) & ~_FLAGS:
            body.code("meta_flags", _FLAGS, 0)
            raise body.fail("meta_flags has unknown bits")
        ends = np.cumsum(body.columns["meta_rank"], dtype=np.int64)

        def owner(row: int) -> str:
            return f"meta {body.firsts['meta'] + int(np.searchsorted(ends, row, 'right'))}"

        for name in self.nested_columns:
            body.range(name, 0, MAX_LENGTH, owner)


METAS = MetaFamily()
