"""What a profiler trace says of one piece of device work besides its name and grid."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Details = tuple[tuple[str, Any], ...]  # pairs of a member and its value, which two kernels can be compared by

NUMBERS = {
    "registers per thread": "registers_per_thread",
    "shared memory": "shared_memory_bytes",
    "bytes": "bytes",
    "blocks per SM": "blocks_per_sm",
    "warps per SM": "warps_per_sm",
    "est. achieved occupancy %": "occupancy_percent",
}
_WHOLE = frozenset({"registers_per_thread", "shared_memory_bytes", "bytes"})
_COLLECTIVE = {
    "Collective name": "name",
    "dtype": "dtype",
    "In msg nelems": "in_elements",
    "Out msg nelems": "out_elements",
    "Group size": "group_size",
    "Process Group Name": "group",
    "Process Group Description": "group_description",
    "Process Group Ranks": "group_ranks",
}
_LONGEST = 4096  # characters of one text


def details_of(arguments: Mapping[str, Any]) -> Details:
    """What an event's arguments say of its work, in a fixed order; what is no number or text is not there."""
    found: list[tuple[str, Any]] = []
    for theirs, ours in NUMBERS.items():
        value = arguments.get(theirs)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if math.isfinite(value) and 0 <= value < 1 << 62:
            found.append((ours, int(value) if ours in _WHOLE else float(value)))
    if "Collective name" in arguments:
        about = tuple(
            (ours, value if isinstance(value, int) else value[:_LONGEST])
            for theirs, ours in _COLLECTIVE.items()
            if isinstance(value := arguments.get(theirs), int | str) and not isinstance(value, bool)
        )
        found.append(("collective", about))
    return tuple(found)
