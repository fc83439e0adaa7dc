"""A Tables body out of columns: what the writer's definitions and a recovered capture's become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..container.building import Value, build
from ..container.layouts import TABLES

# Families in the schema's order: their columns with one row for each id, then those with a varying number.
# fmt: off
FAMILIES: dict[str, tuple[str, ...]] = {
    "device": ("device_kind", "device_index", "device_name", "device_fingerprint"),
    "kernel": ("kernel_kind", "kernel_name", "kernel_overload", "kernel_schema"),
    "generator": ("generator_device", "generator_default"),
    "scope": ("scope_parent", "scope_name"),
    "meta": ("meta_dtype", "meta_layout", "meta_device", "meta_flags", "meta_rank"),
    "signature": ("signature_kind", "signature_status", "signature_kernel", "signature_args", "signature_results",
                  "signature_nodes"),
    "file": ("file_path", "file_bytes", "file_validation", "file_device", "file_inode", "file_mtime_ns",
             "file_digest_low", "file_digest_high", "file_payload", "file_format"),
    "range": ("range_file", "range_offset", "range_bytes", "range_payload"),
    "recipe": ("recipe_dtype", "recipe_elements", "recipe_seed", "recipe_statistics", "recipe_mean", "recipe_std",
               "recipe_min", "recipe_max", "recipe_zeros", "recipe_nans", "recipe_positive_infinities",
               "recipe_negative_infinities"),
}
# fmt: on
META_COLUMNS = ("meta_sizes", "meta_strides")
NODE_COLUMNS = ("node_kind", "node_name", "node_constant", "node_children")
RAGGED: dict[str, tuple[str, ...]] = {"meta": META_COLUMNS, "signature": NODE_COLUMNS}


def encode_tables(strings: Sequence[bytes], columns: Mapping[str, np.ndarray], firsts: Mapping[str, int]) -> memoryview:
    """A body that defines `strings` and, for each family, the rows in `columns`, with ids from `firsts[family]`."""
    values: dict[str, Value] = {}
    if strings:
        values.update(first_string=firsts["string"], strings=strings)
    for family, names in FAMILIES.items():
        if len(columns[names[0]]):
            values[f"first_{family}"] = firsts[family]
            values.update((name, np.asarray(columns[name])) for name in (*names, *RAGGED.get(family, ())))
    return build(TABLES, values)
