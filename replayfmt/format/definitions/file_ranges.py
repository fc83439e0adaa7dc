"""The family of ranges: runs of bytes of external files."""

from __future__ import annotations

import numpy as np

from ..container.frames import MAX_LENGTH
from ..model import FileRange
from .checks import TablesBody
from .family import DefinedSoFar, DefinitionColumns, DefinitionRow, Family


class FileRangeFamily(Family[FileRange]):
    name = "range"
    fields = "range_file:[uint] range_offset:[ulong] range_bytes:[ulong] range_payload:[uint]"

    def row(self, definition: FileRange) -> DefinitionRow:
        return DefinitionRow((definition.file, definition.offset, definition.bytes, definition.payload))

    def admit(self, definition: FileRange, defined: DefinedSoFar) -> None:
        defined.require("file", definition.file)
        payload, length = definition.payload, definition.bytes
        if payload and defined.payload_bytes(payload) != length:
            raise ValueError(f"a range of {length} bytes with a payload of {defined.payload_bytes(payload)}")
        file_bytes = int(defined.column("file_bytes")[definition.file - 1])
        if definition.offset < 0 or length < 0 or definition.offset + length > file_bytes:
            raise ValueError(
                f"a range of {length} bytes at {definition.offset} of file {definition.file}, which has {file_bytes}"
            )

    def at(self, rows: DefinitionColumns, row: int) -> FileRange:
        return FileRange(*(rows.number(name, row) for name in self.columns))

    def check(self, body: TablesBody) -> None:
        body.ids("range_file", "file")
        body.range("range_offset", 0, MAX_LENGTH)
        body.range("range_bytes", 0, MAX_LENGTH)
        columns = body.columns
        ends = columns["range_offset"].astype(np.int64) + columns["range_bytes"].astype(np.int64)
        lengths = body.whole("file_bytes")[columns["range_file"].astype(np.int64) - 1].astype(np.int64)
        if (ends > lengths).any():
            row = int(np.argmax(ends > lengths))
            raise body.fail(f"a range ends at {int(ends[row])} of a file of {int(lengths[row])} bytes")
        body.payloads("range_payload", "range_bytes", "a range")


FILE_RANGES = FileRangeFamily()
