"""The table of device kernels that an import keeps: an attachment of a role of its own, which belongs to no kernel.

It has one row for each distinct piece of work on a device (kernel, copy or fill) of the whole trace, with what that
says of it and how often it ran, whatever became of it in the capture. FORMAT.md describes the JSON. No PyTorch.
"""

from __future__ import annotations

import json
from typing import Any

from replayfmt.errors import InvalidCapture

from .json_values import nested_deeper
from .reader import CaptureReader

ROLE = "device_kernels"
MAX_BYTES = 64 << 20
_DEEPEST = 4

_COUNTS = ("registers_per_thread", "shared_memory_bytes", "bytes", "stream", "total_ns", "min_ns", "max_ns")
_FIGURES = ("blocks_per_sm", "warps_per_sm", "occupancy_percent")
_LISTS = ("grid", "block")
_TEXTS = ("device", "direction", "collective_by")
_MEMBERS = {"name", "category", "collective", "count", "untimed", *_COUNTS, *_FIGURES, *_LISTS, *_TEXTS}


def device_kernel_rows(reader: CaptureReader) -> list[dict[str, Any]] | None:
    """The rows, each with every member that FORMAT.md names, null where unknown; None if the capture has no table.

    Raises InvalidCapture for a table that is no such JSON, or longer than 64 MiB, and for damage.
    """
    numbers = [n for n, each in enumerate(reader.attachments) if each is not None and each.role == ROLE]
    if not numbers:
        return None
    payload = reader.attachments[numbers[0]].payload
    where = f"{reader.path}: attachment {numbers[0]}"
    length = reader.payload_info(payload).raw_bytes
    if length > MAX_BYTES:
        raise InvalidCapture(f"{where}: the table of device kernels has {length:,} bytes; the limit is {MAX_BYTES:,}")
    try:
        table = json.loads(bytes(reader.payload(payload)))
    except (ValueError, RecursionError) as error:
        raise InvalidCapture(f"{where}: the table of device kernels is not JSON: {error}") from None
    rows = table.get("rows") if isinstance(table, dict) and not nested_deeper(table, _DEEPEST) else None
    if not isinstance(rows, list):
        raise InvalidCapture(f"{where}: the table of device kernels has no list of rows")
    for number, row in enumerate(rows):
        problem = _problem(row)
        if problem:
            raise InvalidCapture(f"{where}: row {number} of the table of device kernels: {problem}")
    return rows


def _problem(row: Any) -> str:
    if not isinstance(row, dict) or not set(row) >= _MEMBERS:
        return "is no object with all members"
    if not isinstance(row["name"], str) or not isinstance(row["category"], str):
        return "its name and category are not text"
    if not all(_is_count(row[name]) for name in ("count", "untimed")) or row["count"] < max(1, row["untimed"]):
        return "its counts are no counts"
    for name in _COUNTS:
        if row[name] is not None and not _is_count(row[name]):
            return f"its {name} is not a whole number"
    for name in _FIGURES:
        value = row[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
            return f"its {name} is not a number"
    for name in _LISTS:
        if row[name] is not None and not (isinstance(row[name], list) and all(map(_is_count, row[name]))):
            return f"its {name} is not a list of whole numbers"
    for name in _TEXTS:
        if row[name] is not None and not isinstance(row[name], str):
            return f"its {name} is not text"
    if row["collective"] is not None and not isinstance(row["collective"], dict):
        return "its collective is not an object"
    return ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
