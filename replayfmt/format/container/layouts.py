"""Which fields the schema's tables have, in order: what flatbuffer_tables.py needs to verify a FlatBuffer.

A copy of the tables in schema/opreplay.fbs, in the same words; a test compares the two. That of definitions is in
definitions/tables.py, where the families are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SCALARS: dict[str, np.dtype] = {
    "bool": np.dtype("u1"),
    "ubyte": np.dtype("u1"),
    "ushort": np.dtype("<u2"),
    "int": np.dtype("<i4"),
    "uint": np.dtype("<u4"),
    "long": np.dtype("<i8"),
    "ulong": np.dtype("<u8"),
    "double": np.dtype("<f8"),
}


@dataclass(frozen=True)
class Field:
    """One field of a table: its slot in the vtable, its type as the schema spells it, whether it must be there."""

    slot: int
    type: str
    required: bool
    default: int


@dataclass(frozen=True)
class TableLayout:
    name: str
    fields: dict[str, Field]

    def dtype(self, name: str) -> np.dtype:
        """What a vector of scalars holds."""
        return SCALARS[self.fields[name].type[1:-1]]


def table_layout(name: str, text: str) -> TableLayout:
    """The layout of a table whose fields are listed in order, in the schema's words (`!` stands for `(required)`)."""
    fields = {}
    for slot, line in enumerate(text.split()):
        field, _, kind = line.partition(":")
        kind, _, default = kind.partition("=")
        fields[field] = Field(slot, kind.rstrip("!"), kind.endswith("!"), int(default or 0))
    return TableLayout(name, fields)


KEY_VALUE = table_layout("KeyValue", "key:string! value:string!")

HEAD = table_layout(
    "Head",
    """
    session_id:string! producer:string! producer_version:string! created_unix_ns:ulong
    torch_version:string python_version:string platform:string host:string cpu:string cpu_capability:string
    argv:[string] working_directory:string rank:int world_size:int=1
    libraries:[KeyValue] settings:[KeyValue] policies:[KeyValue]
""",
)

RECORDS = table_layout(
    "Records",
    """
    signature:[uint] scope:[uint] thread:[ushort]
    start_base_ns:ulong start_delta_ns:[uint] gap_position:[uint] gap_ns:[ulong]
    duration_ns:[uint] device_duration_ns:[ulong]
    tensors:[uint] ints:[long] floats:[double]
    tensor_id:[ulong] tensor_storage:[ulong] tensor_offset:[long] tensor_meta:[uint]
    first_storage:ulong storage_bytes:[ulong] storage_device:[uint] storage_origin:[ubyte] storage_payload:[uint]
    annotation:[uint] untimed:[uint] placement:[uint]
""",
)

SUMMARY = table_layout(
    "Summary",
    """
    ended_ns:ulong recovered:bool record_counts:[ulong] kernel_calls:[ulong]
    storages:ulong storage_payload_bytes:ulong absent_storages:ulong
    unsupported_reason:[string] unsupported_count:[ulong]
    storage_origins:[ulong] storage_origin_bytes:[ulong] annotated_records:ulong
""",
)
