"""What became faster or slower between two captures, op by op and kernel by kernel, by the same alignment.

Times are what the captures say, of devices where both know them, else of the host; or medians that opreplay-benchmark
--per-op measured in replays of each. Of ops in one capture alone the times are what was added and removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from replayfmt.errors import UsageError
from replayfmt.format.codes import UNKNOWN_NS
from replayfmt.format.reader import CaptureReader
from replayfmt.format.validation import counted

from .alignment import Alignment
from .trace import Side, Trace

_MOST_OPS = 1000


@dataclass(frozen=True)
class KernelTimes:
    """Of a capture: `calls` and `ns` are of paired ops, of a and b; `removed` and `added` are calls and nanoseconds of
    ops that a or b alone has."""

    kernel: str
    calls: int
    ns: tuple[int, int]
    removed: tuple[int, int]
    added: tuple[int, int]

    @property
    def difference_ns(self) -> int:
        return self.ns[1] - self.ns[0] + self.added[1] - self.removed[1]

    @property
    def ratio(self) -> float | None:
        return self.ns[1] / self.ns[0] if self.ns[0] else None


@dataclass(frozen=True)
class OpTimes:
    """One pair of ops."""

    ordinals: tuple[int, int]
    kernel: str
    ns: tuple[int, int]


@dataclass(frozen=True)
class Times:
    """`source` says whose times these are. `kernels` and `ops` begin with the largest difference; `ns` are all of a and
    all of b. `unknown` counts pairs of which a time is not known."""

    source: str
    ns: tuple[int, int]
    kernels: tuple[KernelTimes, ...]
    ops: tuple[OpTimes, ...]
    unknown: int

    def lines(self, most: int) -> Iterator[tuple[str, str]]:
        """For people: labels and texts."""
        ratio = f" ({self.ns[1] / self.ns[0]:.3g} ×)" if self.ns[0] else ""
        unknown = f"; {counted(self.unknown, 'pair')} of ops without a time" if self.unknown else ""
        yield "times", f"{self.source}: {_ms(self.ns[0])} in a, {_ms(self.ns[1])} in b{ratio}{unknown}"
        for each in self.kernels[:most]:
            if not each.difference_ns:
                break
            parts = []
            if each.calls:
                by = f" ({each.ratio:.3g} ×)" if each.ratio is not None else ""
                parts.append(f"{_ms(each.ns[0])} to {_ms(each.ns[1])}{by} in {counted(each.calls, 'paired call')}")
            for (calls, ns), what in ((each.removed, "removed"), (each.added, "added")):
                parts += [f"{counted(calls, 'call')} {what}, {_ms(ns)}"] if calls else []
            yield ("  slower" if each.difference_ns > 0 else "  faster"), f"{each.kernel}: {'; '.join(parts)}"

    def rows(self) -> Iterator[dict[str, Any]]:
        yield {"kind": "times", "source": self.source, "ns": list(self.ns), "unknown": self.unknown}
        for each in self.kernels:
            yield {
                "kind": "kernel_times",
                "kernel": each.kernel,
                "calls": each.calls,
                "ns": list(each.ns),
                "removed": {"calls": each.removed[0], "ns": each.removed[1]},
                "added": {"calls": each.added[0], "ns": each.added[1]},
            }
        for op in self.ops[:_MOST_OPS]:
            yield {"kind": "op_times", "ordinals": list(op.ordinals), "kernel": op.kernel, "ns": list(op.ns)}


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.4g} ms"


def compare_times(
    a: Side, b: Side, alignment: Alignment, measured: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
) -> Times | None:
    """The times of two aligned captures, None if they hold none. `measured` are documents of opreplay-benchmark
    --per-op --benchmark-out, of a and of b. Raises UsageError for documents of other captures, or without ops."""
    sides = (a, b)
    if measured is not None:
        columns = [_measured(side, document) for side, document in zip(sides, measured, strict=True)]
        source = "medians measured in replays"
    else:
        device = [_captured(side.reader, side.trace, device=True) for side in sides]
        host = [_captured(side.reader, side.trace, device=False) for side in sides]
        on_device = all((each >= 0).any() for each in device)
        columns, source = (device, "captured device times") if on_device else (host, "captured host times")
    if not all((each >= 0).any() for each in columns):
        return None
    one, other = columns
    names: dict[str, int] = {}
    kernel = [_kernels(side, names) for side in sides]
    paired = np.flatnonzero(alignment.partner_of_a >= 0)
    its = alignment.partner_of_a[paired]
    known = (one[paired] >= 0) & (other[its] >= 0)
    paired, its, pairs = paired[known], its[known], len(paired)

    def totals(side: int, ops: np.ndarray) -> list[tuple[int, int]]:
        """Calls and nanoseconds of these ops by kernel."""
        calls = np.bincount(kernel[side][ops], minlength=len(names))
        ns = np.bincount(kernel[side][ops], columns[side][ops], minlength=len(names))
        return list(zip(calls.tolist(), ns.astype(np.int64).tolist(), strict=True))

    removed, added = (
        totals(side, np.flatnonzero((partner < 0) & (columns[side] >= 0)))
        for side, partner in enumerate((alignment.partner_of_a, alignment.partner_of_b))
    )
    # By the name in a, also where b calls another kernel there.
    before = totals(0, paired)
    after = np.bincount(kernel[0][paired], other[its], minlength=len(names)).astype(np.int64).tolist()
    kernels = [
        KernelTimes(name, before[k][0], (before[k][1], after[k]), removed[k], added[k]) for name, k in names.items()
    ]
    order = np.argsort(-np.abs(other[its] - one[paired]), kind="stable")[:_MOST_OPS]
    shown = list(names)
    ops = [
        OpTimes((a.ordinal(op), b.ordinal(that)), shown[kernel[0][op]], (int(one[op]), int(other[that])))
        for op, that in zip(paired[order].tolist(), its[order].tolist(), strict=True)
    ]
    return Times(
        source,
        (int(one[one >= 0].sum()), int(other[other >= 0].sum())),
        tuple(sorted(kernels, key=lambda each: -abs(each.difference_ns))),
        tuple(ops),
        pairs - len(paired),
    )


def _kernels(side: Side, names: dict[str, int]) -> np.ndarray:
    """The number of each op's kernel, by its name."""
    reader = side.reader
    number = np.zeros(len(reader.signatures), np.int64)
    for place, signature in enumerate(reader.signatures):
        if signature is not None and signature.kernel:
            number[place] = names.setdefault(reader.kernels[signature.kernel].qualified_name, len(names))
    frames = [reader.frame(place) for place in range(len(reader.record_frames))]
    found = [number[frame.signature[_rows(frame, side.trace)]] for frame in frames]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _rows(frame: Any, trace: Trace) -> np.ndarray:
    """Where the ops are in a frame."""
    first, count = frame.first_ordinal, len(frame.signature)
    begin, end = np.searchsorted(trace.ordinal, [first, first + count])
    return np.asarray(trace.ordinal[begin:end] - first)


def _captured(reader: CaptureReader, trace: Trace, *, device: bool) -> np.ndarray:
    """Captured nanoseconds by op, -1 where unknown."""
    columns = []
    for number in range(len(reader.record_frames)):
        frame = reader.frame(number)
        rows = _rows(frame, trace)
        column = frame.device_duration_ns if device else frame.duration_ns
        columns.append(np.full(len(rows), UNKNOWN_NS) if column is None else column[rows])
    return np.concatenate(columns).astype(np.int64) if columns else np.zeros(0, np.int64)


def _measured(side: Side, document: Mapping[str, Any]) -> np.ndarray:
    """Measured nanoseconds by op, -1 where unknown: those of the op that was measured for all that are called alike."""
    session = document["context"].get("capture_session")
    if session != side.reader.session.session_id:
        raise UsageError(f"--benchmark: was measured of another capture than {side.reader.path}: session {session}")
    trace, found = side.trace, np.full(side.trace.ops, -1, np.int64)
    order = np.argsort(trace.key, kind="stable")
    for row in document["benchmarks"]:
        ordinal, time = row.get("ordinal"), row.get("median_real_time")
        if not isinstance(ordinal, int) or not isinstance(time, int | float):
            continue
        op = trace.op_at(ordinal)
        if op >= 0:
            key = trace.key[op]
            begin, end = np.searchsorted(trace.key[order], key, "left"), np.searchsorted(trace.key[order], key, "right")
            found[order[begin:end]] = int(time)
    if not (found >= 0).any():
        raise UsageError("--benchmark: has no ops; expected what opreplay-benchmark --per-op --benchmark-out wrote")
    return found
