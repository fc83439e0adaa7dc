"""The Tables body: strings, and the columns of every family. Made of columns, and read and checked as a whole.

The table's fields are those of the families, in the schema's order; a test compares them with the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..container.building import Value, build
from ..container.layouts import table_layout
from .attachments import ATTACHMENTS
from .checks import TablesBody
from .devices import DEVICES
from .family import Family
from .file_ranges import FILE_RANGES
from .files import FILES
from .generators import GENERATORS
from .kernels import KERNELS
from .metas import METAS
from .placements import PLACEMENTS
from .recipes import RECIPES
from .scopes import SCOPES
from .signatures import SIGNATURES

FAMILIES: tuple[Family[Any], ...] = (
    DEVICES,
    KERNELS,
    GENERATORS,
    SCOPES,
    METAS,
    SIGNATURES,
    FILES,
    FILE_RANGES,
    RECIPES,
    ATTACHMENTS,
    PLACEMENTS,
)
# What has ids, by the names of the schema's first_x fields.
NUMBERED = ("string", *(family.name for family in FAMILIES))
COLUMNS = tuple(name for family in FAMILIES for name in (*family.columns, *family.nested_columns))

_OWN = (
    f"first_{family.name}:uint {family.fields} {'' if family.added_fields else family.nested_fields}"
    for family in FAMILIES
)
_ADDED = (f"{family.added_fields} {family.nested_fields}" for family in FAMILIES if family.added_fields)

TABLES = table_layout("Tables", " ".join(("first_string:uint strings:[string]", *_OWN, *_ADDED)))


def encode_tables(strings: Sequence[bytes], columns: Mapping[str, np.ndarray], firsts: Mapping[str, int]) -> memoryview:
    """A body that defines `strings` and the rows in `columns` of each family, with ids from `firsts[family.name]`."""
    values: dict[str, Value] = {}
    if strings:
        values.update(first_string=firsts["string"], strings=strings)
    for family in FAMILIES:
        if len(columns[family.columns[0]]):
            values[f"first_{family.name}"] = firsts[family.name]
            given = {name: np.asarray(columns[name]) for name in (*family.columns, *family.nested_columns)}
            added = (*family.added_columns, *family.nested_columns) if family.added_columns else ()
            if not any(given[name].any() for name in added):
                given = {name: column for name, column in given.items() if name not in added}
            values.update(given)
    return build(TABLES, values)


def decode_tables(
    data: bytes,
    minor: int,
    where: str,
    counts: Mapping[str, int],
    string_ids: Mapping[str, int],
    earlier: Callable[[str], np.ndarray],
    payload_bytes: np.ndarray,
) -> TablesBody:
    """A body, all of it checked, given what comes before it (see TablesBody). Raises InvalidCapture, or
    UnsupportedVersion for codes that only a newer minor version has."""
    body = TablesBody(data, TABLES, minor, where, counts, string_ids, earlier, payload_bytes)
    body.take_strings()
    for family in FAMILIES:
        body.take(family.name, family.columns, family.nested_columns, family.added_columns)
    for family in FAMILIES:  # when all are there: a family may refer to any other
        family.check(body)
    return body
