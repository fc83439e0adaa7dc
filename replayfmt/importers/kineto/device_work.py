"""The table of what ran on the devices of a profiler trace, which a capture keeps."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import numpy as np

from replayfmt.format.model import Device

from .events import TraceEvents
from .work_details import NUMBERS

_DIRECTION = re.compile(r"(?<![A-Za-z])([HDAPM])(?:to|2)([HDAPM])(?![a-z])|(Host|Device|Peer)To(Host|Device|Peer)")
# Kernels of collectives that the trace does not call so, by the names that libraries give them.
_BY_NAME = re.compile(
    r"nccl|rccl|(?<![a-z])(cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)", re.IGNORECASE
)


def device_kernel_table(events: TraceEvents, devices: Mapping[int, Device]) -> bytes | None:
    """The table of all work in a trace as JSON (FORMAT.md); None if it has none."""
    work = events.work
    if not len(work.start):
        return None
    kinds = np.asarray(work.kind, np.int64)
    durations = np.asarray(work.duration, np.int64)
    size = len(events.work_kinds)
    timed = durations >= 0
    counts, untimed = np.bincount(kinds, minlength=size), np.bincount(kinds[~timed], minlength=size)
    total, most = np.zeros(size, np.int64), np.zeros(size, np.int64)
    least = np.full(size, np.iinfo(np.int64).max)
    np.add.at(total, kinds[timed], durations[timed])
    np.maximum.at(most, kinds[timed], durations[timed])
    np.minimum.at(least, kinds[timed], durations[timed])
    rows = []
    for number, kind in enumerate(events.work_kinds):
        details = dict(kind.details)
        collective = details.pop("collective", None)
        known = counts[number] > untimed[number]
        rows.append(
            {
                "name": kind.name,
                "category": kind.category,
                "device": str(devices[kind.device]) if kind.device in devices else None,
                "stream": kind.stream if kind.stream >= 0 else None,
                "grid": list(kind.grid) if kind.grid else None,
                "block": list(kind.block) if kind.block else None,
                **{name: details.get(name) for name in NUMBERS.values()},
                "direction": _direction(kind.name) if "memcpy" in kind.category else None,
                "collective": None if collective is None else dict(collective),
                "collective_by": "trace" if collective is not None else "name" if _BY_NAME.search(kind.name) else None,
                "count": int(counts[number]),
                "untimed": int(untimed[number]),
                "total_ns": int(total[number]) if known else None,
                "min_ns": int(least[number]) if known else None,
                "max_ns": int(most[number]) if known else None,
            }
        )
    return json.dumps({"rows": rows}).encode()


def _direction(name: str) -> str | None:
    """From where to where a copy goes, as the name says: HtoD, DtoH, DtoD, PtoP; None if it does not."""
    found = _DIRECTION.search(name)
    if found is None:
        return None
    source, target = (found[1], found[2]) if found[1] else (found[3][0], found[4][0])
    return f"{source}to{target}"
