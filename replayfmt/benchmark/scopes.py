"""Which part of a capture --replay-scope=NAME means, found in the records before anything runs.

A scope matches by its own name or by its full path ("execute/step 3"). Passes through matching scopes add up; a
matching scope inside a matching scope belongs to the outermost one, so that no time is counted twice. Scopes of
several threads are taken in capture order, which is the order they are replayed in. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from replayfmt.errors import ReplayRefused, UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import CaptureReader

_CLOSEST = 12  # at most this many of the capture's scopes are listed in an error


@dataclass(frozen=True)
class MeasuredRegion:
    """A part of a capture that is measured. `name` is None for the whole capture.

    `captured_ns` is its duration during capture, including the recorder's own work; None if unknown, and
    `captured_reason` says why.
    """

    name: str | None
    paths: frozenset[str]
    passes: int
    ops: int
    captured_ns: int | None
    captured_reason: str = ""

    @property
    def row(self) -> str:
        """The name of its row in a report."""
        return "BM_replay" if self.name is None else f"BM_replay/scope:{self.name}"


def whole_capture(reader: CaptureReader) -> MeasuredRegion:
    """The region that covers the whole capture. Reads the first and the last frame of records."""
    ops = reader.summary.records.get(RecordKind.op, 0)
    if not reader.record_count:
        return MeasuredRegion(None, frozenset(), 1, ops, None, "the capture has no records")
    first = int(reader.frame(0).start_ns[0])
    last = reader.frame(len(reader.record_frames) - 1)
    end = int(last.start_ns[-1])
    if last.duration_ns is not None:
        end += max(0, int(last.duration_ns[-1]))  # one of unknown duration ends no earlier than it began
    captured, reason = _measured(first, end)
    return MeasuredRegion(None, frozenset(), 1, ops, captured, reason)


def find_regions(reader: CaptureReader, names: tuple[str, ...]) -> list[MeasuredRegion]:
    """One region for each of `names`, in one pass over the records.

    Raises UsageError if no scope of the capture matches a name, and ReplayRefused, with path and ordinal, if a
    matching scope ends before it begins or never ends (a capture may be cut anywhere and still be valid).
    """
    walks = [_ScopeWalk(reader, name) for name in names]
    kinds = np.array([0] + [signature.kind for signature in reader.signatures[1:]], dtype=np.uint8)
    for index in range(len(reader.record_frames)):
        frame = reader.frame(index)
        kind = kinds[frame.signature]
        ops_before = np.cumsum(kind == RecordKind.op)
        for position in np.flatnonzero((kind == RecordKind.scope_begin) | (kind == RecordKind.scope_end)):
            scope, begins = int(frame.scope[position]), bool(kind[position] == RecordKind.scope_begin)
            for walk in walks:
                if scope in walk.open:
                    walk.step(
                        scope,
                        begins,
                        frame.first_ordinal + int(position),
                        int(frame.start_ns[position]),
                        int(ops_before[position]),
                    )
        for walk in walks:
            walk.ops_before_frame += int(ops_before[-1]) if len(ops_before) else 0
    return [walk.region() for walk in walks]


def matching_scopes(reader: CaptureReader, name: str) -> dict[int, str]:
    """The scopes that --replay-scope=NAME selects, by id, with their full paths. Raises UsageError if there are
    none."""
    paths = {scope: reader.scope_path(scope) for scope in range(1, len(reader.scopes))}
    matching = {scope: path for scope, path in paths.items() if name in (path, reader.scopes[scope].name)}
    if not matching:
        known = list(dict.fromkeys(paths.values()))
        shown = ", ".join(map(repr, known[:_CLOSEST])) + (
            f" and {len(known) - _CLOSEST} more" if len(known) > _CLOSEST else ""
        )
        raise UsageError(
            f"--replay-scope={name}: {reader.path} has no scope of that name or path; "
            + (f"it has {shown}" if known else "it has no scopes at all")
        )
    return matching


def entered_scopes(reader: CaptureReader) -> tuple[str, ...]:
    """The full paths of the scopes that hold records, in the order of their definitions."""
    entered: set[int] = set()
    for index in range(len(reader.record_frames)):
        entered.update(np.unique(reader.frame(index).scope).tolist())
    return tuple(dict.fromkeys(reader.scope_path(scope) for scope in sorted(entered - {0})))


def scopes_inside(reader: CaptureReader, names: tuple[str, ...]) -> set[int]:
    """The ids of the scopes that any of `names` selects, and of all scopes inside them. Raises UsageError for a name
    that selects none."""
    inside = {scope for name in names for scope in matching_scopes(reader, name)}
    for scope in range(1, len(reader.scopes)):  # a scope's parent is defined before it
        if reader.scopes[scope].parent in inside:
            inside.add(scope)
    return inside


def _measured(begin_ns: int, end_ns: int) -> tuple[int | None, str]:
    """The time between two moments of a capture; None and the reason if the capture's clock stood still."""
    if end_ns > begin_ns:
        return end_ns - begin_ns, ""
    return None, "the capture holds no times for it"


class _ScopeWalk:
    """Follows the scopes that match one name through the records, in order."""

    def __init__(self, reader: CaptureReader, name: str) -> None:
        self._reader = reader
        self._name = name
        matching = matching_scopes(reader, name)
        self.open = dict.fromkeys(matching, 0)  # scope id → how many of it are open
        self._paths = frozenset(matching.values())
        self._depth = 0
        self._outermost = 0  # ordinal at which the outermost open one began
        self._begin_ns = self._captured_ns = 0
        self._begin_op = self._ops = self._passes = 0
        self.ops_before_frame = 0

    def step(self, scope: int, begins: bool, ordinal: int, start_ns: int, ops_in_frame: int) -> None:
        op = self.ops_before_frame + ops_in_frame
        if begins:
            if not self._depth:
                self._outermost, self._begin_ns, self._begin_op = ordinal, start_ns, op
            self.open[scope] += 1
            self._depth += 1
            return
        if not self.open[scope]:
            raise ReplayRefused(
                f"{self._reader.path}: ordinal {ordinal}: scope {self._reader.scope_path(scope)!r} "
                "ends before it begins; it cannot be measured, choose another with --replay-scope"
            )
        self.open[scope] -= 1
        self._depth -= 1
        if not self._depth:
            self._passes += 1
            self._captured_ns += max(0, start_ns - self._begin_ns)
            self._ops += op - self._begin_op

    def region(self) -> MeasuredRegion:
        for scope, count in self.open.items():
            if count:
                raise ReplayRefused(
                    f"{self._reader.path}: scope {self._reader.scope_path(scope)!r} begins at ordinal "
                    f"{self._outermost} or later and does not end; it cannot be measured, choose "
                    "another with --replay-scope"
                )
        if not self._passes:
            raise UsageError(f"--replay-scope={self._name}: {self._reader.path} defines that scope and never enters it")
        captured, reason = _measured(0, self._captured_ns)
        return MeasuredRegion(self._name, self._paths, self._passes, self._ops, captured, reason)
