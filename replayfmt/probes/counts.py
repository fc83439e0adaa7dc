"""`gmem_bytes`, `tensorop_count` and `progress`: what each thread counted, or when it passed its branches.

A thread that counted nothing and one that was not recorded look the same in a recording of counts: both are 0. Each SM
has a clock of its own, so cycles are those between two samples of one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import nlargest

import numpy as np

from replayfmt.errors import InvalidRecording

from .recordings import ProbeSection, RecordLayout, Structured, chunks
from .tables import Cell, Distribution, ResultTable

_LISTED = 20


def _counts(name: str, kind: str, *fields: str) -> RecordLayout:
    return RecordLayout(name, np.dtype([(field, kind) for field in fields]), "thread", single=True)


_BYTES = ("sync_bytes", "async_bytes")
# Of each kind the layouts of our probe and of Neutrino's.
LAYOUTS = {
    "gmem_bytes": (_counts("gmem_bytes", "<u8", *_BYTES), _counts("gmem_bytes", "<u4", *_BYTES)),
    "tensorop_count": (_counts("tensorop_count", "<u8", "count"),),
    "progress": (RecordLayout("progress", np.dtype([("clock", "<u8")]), "thread", single=False),),
}
_NOTES = {
    "gmem_bytes": "sync_bytes: loads and stores; async_bytes: cp.async; both of global memory, cached or not",
    "tensorop_count": "each thread counts the matrix instructions that it takes part in: a warp's 32 threads the same",
    "progress": "a sample for each branch that a thread reached; cycles between two samples of the same thread",
}


@dataclass(frozen=True)
class CountsResult:
    """`distributions`: what is drawn, by title."""

    kind: str
    sources: tuple[str, ...]
    tables: tuple[ResultTable, ...]
    notes: tuple[str, ...]
    distributions: dict[str, Distribution]


def evaluate_counts(kind: str, section: ProbeSection, progress: Callable[[int, int], None]) -> CountsResult:
    """Evaluate the records of such a probe. Raises InvalidRecording."""
    records = _records(kind, section)
    blocks, threads = records.shape[:2]
    names = ["samples"] if kind == "progress" else list(records.dtype.names or ())
    found = {name: Distribution() for name in names}
    steps = Distribution()
    worst: list[tuple[int, int]] = []
    done = 0
    for part in chunks(records):
        if kind == "progress":
            clocks = part["clock"]
            seen = clocks != 0
            values = {"samples": seen.sum(axis=2)}
            both = seen[:, :, 1:] & seen[:, :, :-1]
            steps.add((clocks[:, :, 1:] - clocks[:, :, :-1])[both].astype(np.int64))
        else:
            values = {name: part[name][:, :, 0].astype(np.int64) for name in names}
        for name, each in values.items():
            found[name].add(each.ravel())
        totals = sum(values.values()).sum(axis=1)
        worst = nlargest(_LISTED, [*worst, *zip(totals.tolist(), range(done, done + len(part)), strict=True)])
        done += len(part)
        progress(done, blocks)
    whole: dict[str, Cell] = {"blocks": blocks, "threads": blocks * threads}
    for name, each in found.items():
        whole |= {f"{name}_total": each.total, f"threads_with_{name}": each.above(0)}
        whole |= each.figures(name, "of_a_thread", "no thread")
    if kind == "progress":
        whole |= steps.figures("step", "cycles", "no thread has two samples")
        found["cycles between samples"] = steps
    unit = "samples" if kind == "progress" else "_and_".join(names)
    rows = [(block, *section.launch.position(block), total) for total, block in worst]
    tables = (
        ResultTable("whole launch", tuple(whole), [tuple(whole.values())]),
        ResultTable(
            "blocks with most", ("block", "block_x", "block_y", "block_z", unit), rows, max(0, blocks - len(rows))
        ),
    )
    return CountsResult(kind, (section.path,), tables, (_NOTES[kind],), found)


def _records(kind: str, section: ProbeSection) -> Structured:
    first: InvalidRecording | None = None
    for layout in LAYOUTS[kind]:
        try:
            return section.records(layout)
        except InvalidRecording as error:
            first = first or error
    assert first is not None
    raise first
