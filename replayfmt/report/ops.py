"""The ops of a capture as columns of numbers, read once, frame by frame; and added up by call site and by kernel.

A call site is a signature in a scope.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from replayfmt.dump.row_templates import device_metas
from replayfmt.format.codes import RecordKind
from replayfmt.format.model import calls_in
from replayfmt.format.reader import CaptureReader, RecordFrame
from replayfmt.format.signature_text import SignatureIndex

UNKNOWN = -1
_LONGEST_NS = 1 << 53  # 104 days: what a browser still counts in single nanoseconds


@dataclass(frozen=True)
class ScopePass:
    """One pass through a scope: in nanoseconds since the session's start, and the ordinals of its first and last
    record. `depth` is 0 for the outermost."""

    scope: int
    depth: int
    thread: int
    start_ns: int
    end_ns: int
    first: int
    last: int


@dataclass(frozen=True)
class CapturedOps:
    """A row for each op. `signature` and `stream` index `signatures` and `streams`; `kernel`, `scope` and `device` are
    ids of the capture (0: none). Times are nanoseconds, UNKNOWN where nothing was measured. `calls` is how many calls
    of the program the op stands for. `kernels` has a row for each device kernel whose time an import has kept: the
    op's ordinal, the stream, and when it began and how long it took."""

    signatures: list[str]
    streams: list[str]
    ordinal: np.ndarray
    signature: np.ndarray
    kernel: np.ndarray
    scope: np.ndarray
    thread: np.ndarray
    device: np.ndarray
    stream: np.ndarray
    calls: np.ndarray
    start_ns: np.ndarray
    duration_ns: np.ndarray
    device_ns: np.ndarray
    scope_passes: list[ScopePass]
    kernels: np.ndarray

    def __len__(self) -> int:
        return len(self.ordinal)

    def only(self, ordinals: np.ndarray) -> CapturedOps:
        kept = np.isin(self.ordinal, ordinals)
        kernels = self.kernels[np.isin(self.kernels[:, 0], ordinals)]
        return replace(self, kernels=kernels, **{name: getattr(self, name)[kept] for name in _COLUMNS})


def captured_ops(reader: CaptureReader) -> CapturedOps:
    """Every op of a capture. Raises InvalidCapture for a damaged frame."""
    return _Reading(reader).everything()


class _Reading:
    def __init__(self, reader: CaptureReader) -> None:
        self._reader = reader
        self._index = SignatureIndex(reader)
        self._kind = reader.signature_kinds
        self._kernel = np.array([0, *(each.kernel for each in reader.signatures[1:])], np.int64)
        self._meta_device = np.array([0, *(meta.device for meta in reader.metas[1:])], np.int64)
        self._texts: dict[str, int] = {}
        self._streams: dict[str, int] = {"": 0}
        self._open: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self._passes: list[ScopePass] = []
        self._kernels: list[tuple[int, int, int, int]] = []
        self._depths = [0] * len(reader.scopes)
        for number, scope in enumerate(reader.scopes[1:], start=1):  # a parent has a smaller id
            self._depths[number] = self._depths[scope.parent] + 1 if scope.parent else 0

    def everything(self) -> CapturedOps:
        columns: defaultdict[str, list[np.ndarray]] = defaultdict(list)
        end_ns = 0
        for number in range(len(self._reader.record_frames)):
            frame = self._reader.frame(number)
            kinds = self._kind[frame.signature]
            self._scopes(frame, kinds)
            rows = np.flatnonzero(kinds == RecordKind.op)
            for name, column in self._columns(frame, rows).items():
                columns[name].append(column)
            if frame.count:
                end_ns = max(end_ns, min(int(frame.start_ns.max()), _LONGEST_NS))
        last = self._reader.record_count - 1
        for (thread, scope), begun in self._open.items():  # entered, and the capture ends before they do
            self._passes += [
                ScopePass(scope, self._depths[scope], thread, start, end_ns, first, last) for start, first in begun
            ]
        names = _COLUMNS if columns else ()
        joined = {name: np.concatenate(columns[name]) for name in names} or {
            name: np.zeros(0, np.int64) for name in _COLUMNS
        }
        passes = sorted(self._passes, key=lambda each: (each.start_ns, each.depth))
        kernels = np.array(self._kernels, np.int64).reshape(-1, 4)
        return CapturedOps(list(self._texts), list(self._streams), scope_passes=passes, kernels=kernels, **joined)

    def _columns(self, frame: RecordFrame, rows: np.ndarray) -> dict[str, np.ndarray]:
        start = frame.first_ordinal
        signature = np.zeros(frame.count, np.int64)
        for ops in self._index.ops_by_key(None, start, start + frame.count):
            text = self._index.text(ops.key, int(ops.ordinals[0]))
            signature[ops.ordinals - start] = self._texts.setdefault(text, len(self._texts))
        devices = self._meta_device[device_metas(self._reader, frame, rows)]
        calls, traced = self._annotated(frame, rows)
        return {
            "ordinal": rows + start,
            "signature": signature[rows],
            "kernel": self._kernel[frame.signature[rows]],
            "scope": frame.scope[rows].astype(np.int64),
            "thread": frame.thread[rows].astype(np.int64),
            "device": devices,
            "stream": np.where(traced > 0, traced, self._placed(frame, rows, devices)),
            "calls": calls,
            "start_ns": np.clip(frame.start_ns[rows].astype(np.float64), 0, _LONGEST_NS).astype(np.int64),
            "duration_ns": _duration(frame.duration_ns, rows),
            "device_ns": _duration(frame.device_duration_ns, rows),
        }

    def _placed(self, frame: RecordFrame, rows: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """The stream that each op was issued to, as a number in `streams`; 0 for the default one."""
        found = np.zeros(len(rows), np.int64)
        if frame.placement is None:
            return found
        placements = frame.placement[rows].astype(np.int64)
        for placement, device in {*zip(placements.tolist(), devices.tolist(), strict=True)}:
            stream = self._reader.placements[placement].stream(device) if placement else 0
            if stream:
                found[(placements == placement) & (devices == device)] = self._stream(str(stream))
        return found

    def _annotated(self, frame: RecordFrame, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How many calls each op stands for, and the stream that an importer found in the trace (0: none)."""
        calls, streams = np.ones(len(rows), np.int64), np.zeros(len(rows), np.int64)
        if frame.annotation is None:
            return calls, streams
        notes = frame.annotation[rows]
        for row in np.flatnonzero(notes).tolist():
            note, ordinal = self._reader.annotation(int(notes[row])) or {}, int(rows[row]) + frame.first_ordinal
            calls[row] = calls_in(note, ordinal)
            stream = note.get("stream")
            if isinstance(stream, int):
                streams[row] = self._stream(str(stream))
            if calls[row] == 1:
                self._note_kernels(note.get("device_kernels"), ordinal)
        return calls, streams

    def _note_kernels(self, listed: object, ordinal: int) -> None:
        for each in listed if isinstance(listed, list) else ():
            about = each if isinstance(each, dict) else {}
            start, taken, stream = (about.get(name) for name in ("start_ns", "duration_ns", "stream"))
            if _is_time(start) and _is_time(taken):
                where = self._stream(str(stream)) if isinstance(stream, int) else 0
                self._kernels.append((ordinal, where, int(start or 0), int(taken or 0)))

    def _stream(self, text: str) -> int:
        return self._streams.setdefault(text, len(self._streams))

    def _scopes(self, frame: RecordFrame, kinds: np.ndarray) -> None:
        for row in np.flatnonzero((kinds == RecordKind.scope_begin) | (kinds == RecordKind.scope_end)).tolist():
            scope, thread, moment = (
                int(frame.scope[row]),
                int(frame.thread[row]),
                min(int(frame.start_ns[row]), _LONGEST_NS),
            )
            begun, ordinal = self._open[thread, scope], row + frame.first_ordinal
            if kinds[row] == RecordKind.scope_begin:
                begun.append((moment, ordinal))
            elif begun:
                start, first = begun.pop()
                self._passes.append(ScopePass(scope, self._depths[scope], thread, start, moment, first, ordinal))


def _is_time(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LONGEST_NS


_COLUMNS = (
    "ordinal", "signature", "kernel", "scope", "thread", "device", "stream", "calls", "start_ns", "duration_ns",
    "device_ns",
)  # fmt: skip


def _duration(column: np.ndarray | None, rows: np.ndarray) -> np.ndarray:
    """Nanoseconds; UNKNOWN where nothing was measured, or where no clock ran so long."""
    if column is None:
        return np.full(len(rows), UNKNOWN, np.int64)
    values = column[rows].astype(np.int64)
    return np.where(values < 0, UNKNOWN, np.minimum(values, _LONGEST_NS))


Clock = Literal["device", "host"]


@dataclass(frozen=True)
class CapturedTime:
    """Time that calls took during capture: the sum over those with a known time, which `calls` counts. None: of no call
    is it known."""

    total_ns: float | None
    calls: int

    @property
    def mean_ns(self) -> float | None:
        return None if self.total_ns is None else self.total_ns / self.calls


@dataclass(frozen=True)
class CapturedCallSite:
    """Calls of one signature in one scope. `number` counts sites from 1, in order of first call; `kernel` and `scope`
    are ids of the capture. `first` is the ordinal of the first of the calls."""

    number: int
    signature: str
    kernel: int
    scope: int
    calls: int
    first: int
    host: CapturedTime
    device: CapturedTime


@dataclass(frozen=True)
class KernelTotals:
    kernel: int
    calls: int
    signatures: int
    host: CapturedTime
    device: CapturedTime


def clock_of(ops: CapturedOps) -> Clock | None:
    """Which captured times are compared with each other: the devices', where any is known, else the host's. None: the
    capture has no times."""
    if (ops.device_ns >= 0).any():
        return "device"
    return "host" if (ops.duration_ns >= 0).any() else None


def call_sites(ops: CapturedOps) -> tuple[list[CapturedCallSite], np.ndarray]:
    """In order of first call; and for each op the number of its site."""
    scopes = int(ops.scope.max(initial=0)) + 1
    keys, first, group = np.unique(ops.signature * scopes + ops.scope, return_index=True, return_inverse=True)
    sums = _Sums(ops, group.reshape(-1), len(keys))
    order = np.argsort(first, kind="stable")
    numbers = np.empty(len(keys), np.int64)
    numbers[order] = np.arange(1, len(keys) + 1)
    sites = [
        CapturedCallSite(
            number,
            ops.signatures[int(ops.signature[row])],
            int(ops.kernel[row]),
            int(ops.scope[row]),
            sums.calls[place],
            int(ops.ordinal[row]),
            sums.host[place],
            sums.device[place],
        )
        for number, (place, row) in enumerate(((place, int(first[place])) for place in order.tolist()), start=1)
    ]
    return sites, numbers[group.reshape(-1)]


def kernel_totals(ops: CapturedOps) -> list[KernelTotals]:
    """In order of the kernels' ids; only those that are called."""
    kernels, group = np.unique(ops.kernel, return_inverse=True)
    group = group.reshape(-1)
    sums = _Sums(ops, group, len(kernels))
    texts = len(ops.signatures) + 1
    pairs = np.unique(group * texts + ops.signature) // texts
    signatures = np.bincount(pairs, minlength=len(kernels)).tolist()
    return [
        KernelTotals(kernel, sums.calls[place], signatures[place], sums.host[place], sums.device[place])
        for place, kernel in enumerate(kernels.tolist())
    ]


class _Sums:
    """Calls and times by group. A record that stands for many calls has their mean time."""

    def __init__(self, ops: CapturedOps, group: np.ndarray, groups: int) -> None:
        self.calls = _total(group, ops.calls, groups).astype(np.int64).tolist()
        self.host = _times(group, ops.duration_ns, ops.calls, groups)
        self.device = _times(group, ops.device_ns, ops.calls, groups)


def _total(group: np.ndarray, values: np.ndarray, groups: int) -> np.ndarray:
    return np.bincount(group, weights=values, minlength=groups)


def _times(group: np.ndarray, times: np.ndarray, calls: np.ndarray, groups: int) -> list[CapturedTime]:
    known = times >= 0
    counts = _total(group[known], calls[known], groups).astype(np.int64).tolist()
    totals = _total(group[known], times[known].astype(np.float64) * calls[known], groups).tolist()
    return [CapturedTime(total if count else None, count) for total, count in zip(totals, counts, strict=True)]
