"""Which fields the schema's tables have, in order: what flat.py needs to verify a FlatBuffer.

A copy of the tables in schema/opreplay.fbs, in the same words (`!` stands for `(required)`); a test compares the two.
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


def _layout(name: str, text: str) -> TableLayout:
    fields = {}
    for slot, line in enumerate(text.split()):
        field, _, kind = line.partition(":")
        kind, _, default = kind.partition("=")
        fields[field] = Field(slot, kind.rstrip("!"), kind.endswith("!"), int(default or 0))
    return TableLayout(name, fields)


KEY_VALUE = _layout("KeyValue", "key:string! value:string!")

HEAD = _layout(
    "Head",
    """
    session_id:string! producer:string! producer_version:string! created_unix_ns:ulong
    torch_version:string python_version:string platform:string host:string cpu:string cpu_capability:string
    argv:[string] working_directory:string rank:int world_size:int=1
    libraries:[KeyValue] settings:[KeyValue] policies:[KeyValue]
""",
)

TABLES = _layout(
    "Tables",
    """
    first_string:uint strings:[string]
    first_device:uint device_kind:[uint] device_index:[int] device_name:[uint] device_fingerprint:[uint]
    first_kernel:uint kernel_kind:[ubyte] kernel_name:[uint] kernel_overload:[uint] kernel_schema:[uint]
    first_generator:uint generator_device:[uint] generator_default:[ubyte]
    first_scope:uint scope_parent:[uint] scope_name:[uint]
    first_meta:uint meta_dtype:[ubyte] meta_layout:[ubyte] meta_device:[uint] meta_flags:[ushort] meta_rank:[ushort]
    meta_sizes:[long] meta_strides:[long]
    first_signature:uint signature_kind:[ubyte] signature_status:[ubyte] signature_kernel:[uint]
    signature_args:[uint] signature_results:[uint] signature_nodes:[uint]
    node_kind:[ubyte] node_name:[uint] node_constant:[long] node_children:[uint]
    first_file:uint file_path:[uint] file_bytes:[ulong] file_validation:[ubyte] file_device:[ulong] file_inode:[ulong]
    file_mtime_ns:[long] file_digest_low:[ulong] file_digest_high:[ulong] file_payload:[uint] file_format:[uint]
    first_range:uint range_file:[uint] range_offset:[ulong] range_bytes:[ulong] range_payload:[uint]
    first_recipe:uint recipe_dtype:[ubyte] recipe_elements:[ulong] recipe_seed:[ulong] recipe_statistics:[ubyte]
    recipe_mean:[double] recipe_std:[double] recipe_min:[double] recipe_max:[double] recipe_zeros:[ulong]
    recipe_nans:[ulong] recipe_positive_infinities:[ulong] recipe_negative_infinities:[ulong]
""",
)

RECORDS = _layout(
    "Records",
    """
    signature:[uint] scope:[uint] thread:[ushort]
    start_base_ns:ulong start_delta_ns:[uint] gap_position:[uint] gap_ns:[ulong]
    duration_ns:[uint] device_duration_ns:[ulong]
    tensors:[uint] ints:[long] floats:[double]
    tensor_id:[ulong] tensor_storage:[ulong] tensor_offset:[long] tensor_meta:[uint]
    first_storage:ulong storage_bytes:[ulong] storage_device:[uint] storage_origin:[ubyte] storage_payload:[uint]
    annotation:[uint] untimed:[uint]
""",
)

SUMMARY = _layout(
    "Summary",
    """
    ended_ns:ulong recovered:bool record_counts:[ulong] kernel_calls:[ulong]
    storages:ulong storage_payload_bytes:ulong absent_storages:ulong
    unsupported_reason:[string] unsupported_count:[ulong]
    storage_origins:[ulong] storage_origin_bytes:[ulong] annotated_records:ulong
""",
)
