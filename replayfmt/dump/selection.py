"""Which records of a capture `--ops`, `--scope`, `--kernel` and `--signature` choose, checked, and resolved against one
capture. Imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from replayfmt.errors import UsageError
from replayfmt.format.attachments import only_inside
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import CaptureReader, RecordFrame
from replayfmt.format.validation import some_of

from .row_templates import ObjectCache

_RANGE = re.compile(r"([0-9]*):([0-9]*)", re.ASCII)


# One name or pattern, or several, any of which matches.
Names = str | tuple[str, ...]


def listed(names: Names | None) -> tuple[str, ...]:
    """Names as a tuple, empty for None."""
    return () if names is None else (names,) if isinstance(names, str) else names


@dataclass(frozen=True)
class Selection:
    """The request: ordinals from `start` up to, not including, `stop`; scopes; patterns of operator names."""

    start: int = 0
    stop: int | None = None
    scope: Names | None = None
    kernel: Names | None = None

    @property
    def everything(self) -> bool:
        return self == Selection()

    @property
    def text(self) -> str:
        """The equivalent flags."""
        given = [f"--scope={name}" for name in listed(self.scope)]
        given += [f"--kernel={pattern}" for pattern in listed(self.kernel)]
        if (self.start, self.stop) != (0, None):
            given.insert(0, f"--ops={self.start or ''}:{'' if self.stop is None else self.stop}")
        return " ".join(given)


def parse_range(text: str) -> tuple[int, int | None]:
    """`A:B`, `A:`, `:B` or `:` as ordinals. Raises UsageError for anything else, and if A is behind B."""
    match = _RANGE.fullmatch(text)
    if match is None or max(map(len, match.groups())) > 18:
        raise UsageError(f"--ops={text}: expected A:B, two ordinals, either of which may be omitted: 10:20, or 500:")
    start, stop = (int(part) if part else None for part in match.groups())
    if stop is not None and (start or 0) > stop:
        raise UsageError(f"--ops={text}: the range ends before it begins")
    return start or 0, stop


class Filter:
    """A selection resolved against a capture: which records of a frame it takes."""

    def __init__(self, reader: CaptureReader, selection: Selection) -> None:
        """Raises UsageError if the capture has no scope of a name, no kernel for a pattern, or no record in the
        range."""
        if selection.start and selection.start >= reader.record_count:
            raise UsageError(
                f"{Selection(selection.start, selection.stop).text}: {reader.path} has "
                f"{reader.record_count} records, with ordinals from 0 to {reader.record_count - 1}"
            )
        self.start = selection.start
        self.stop = min(reader.record_count, reader.record_count if selection.stop is None else selection.stop)
        scopes = [_scopes(reader, name) for name in listed(selection.scope)]
        self._scopes = np.logical_or.reduce(scopes) if scopes else None
        self._kernels = selected_kernels(reader, selection)
        self._signatures: ObjectCache[bool] = ObjectCache(
            lambda number: self._kernels is not None and reader.signatures[number].kernel in self._kernels
        )

    def indices(self, frame: RecordFrame) -> slice | np.ndarray:
        """The records to take, as something that indexes the frame's columns."""
        first = max(0, self.start - frame.first_ordinal)
        last = max(first, min(frame.count, self.stop - frame.first_ordinal))
        if self._scopes is None and self._kernels is None:
            return slice(first, last)
        chosen = np.ones(last - first, bool)
        if self._scopes is not None:
            chosen &= self._scopes[frame.scope[first:last]]
        if self._kernels is not None:
            chosen &= np.fromiter(self._signatures.of(frame.signature[first:last].tolist()), bool, last - first)
        return np.flatnonzero(chosen) + first


def _scopes(reader: CaptureReader, name: str) -> np.ndarray:
    """Which scopes are called `name`, by their own name or by full path, or lie inside one that is."""
    inside = np.zeros(len(reader.scopes), bool)
    for scope, definition in enumerate(reader.scopes[1:], start=1):
        inside[scope] = inside[definition.parent] or definition.name == name or _has_path(reader, scope, name)
    if not inside.any():
        known = sorted({definition.name for definition in reader.scopes[1:]})
        shown = some_of(known, 10, repr)
        raise UsageError(
            f"--scope={name}: {reader.path} has no scope of that name or path; it has {shown or 'no scopes at all'}"
        )
    return inside


def _has_path(reader: CaptureReader, scope: int, path: str) -> bool:
    """Whether this is the scope's path. Walks up no further than `path` reaches."""
    while scope:
        name, scope = reader.scopes[scope].name, reader.scopes[scope].parent
        if not scope:
            return path == name
        if not path.endswith(f"/{name}"):
            return False
        path = path[: -len(name) - 1]
    return False


def selected_kernels(reader: CaptureReader, selection: Selection) -> set[int] | None:
    """The ids of the kernels whose name, with or without their overload, matches a pattern; None for all of them.

    Raises UsageError for a pattern that matches none.
    """
    if selection.kernel is None:
        return None
    found: set[int] = set()
    for pattern in listed(selection.kernel):
        fitting = {
            number for number, kernel in enumerate(reader.kernels) if kernel is not None and kernel.fits(pattern)
        }
        if not fitting:
            raise _matches_nothing(reader, pattern)
        found |= fitting
    return found


def _matches_nothing(reader: CaptureReader, pattern: str) -> UsageError:
    inside = only_inside(reader, lambda name: fnmatchcase(name, pattern))
    hint = inside or "opreplay-dump --signatures lists what it has"
    return UsageError(f"--kernel={pattern}: {reader.path} has no op of that name; {hint}")


def selects_nothing(reader: CaptureReader, selection: Selection) -> UsageError:
    """The error for a selection whose parts all exist, but that no record satisfies together."""
    return UsageError(f"{selection.text}: selects no record of {reader.path}")


# Records that order what streams and the host do, and keep memory for streams.
EDGES = frozenset(
    {
        RecordKind.synchronize,
        RecordKind.event_record,
        RecordKind.event_wait,
        RecordKind.stream_use,
        RecordKind.stream_synchronize,
        RecordKind.event_synchronize,
    }
)


@dataclass(frozen=True)
class OpSelection:
    """Ops, as given on the command line. Options of different kinds intersect; options of one kind unite."""

    ops: str | None = None
    scope: Names | None = None
    kernel: Names | None = None
    signature: Names | None = None

    @property
    def everything(self) -> bool:
        return self == OpSelection()

    @property
    def text(self) -> str:
        """The flags as they were given, for people and for the trimmed capture's session; "all" without any."""
        given = (("ops", self.ops), ("scope", self.scope), ("kernel", self.kernel), ("signature", self.signature))
        return " ".join(f"--{name}={value}" for name, values in given for value in listed(values)) or "all"


@dataclass(frozen=True)
class KeptRecords:
    """The ordinals of the kept records, ascending, int64; `ops` of them are ops."""

    ordinals: np.ndarray
    ops: int

    @property
    def first(self) -> int:
        return int(self.ordinals[0])

    @property
    def stop(self) -> int:
        """One more than the last kept ordinal."""
        return int(self.ordinals[-1]) + 1

    def holds(self, ordinal: int) -> bool:
        place = int(np.searchsorted(self.ordinals, ordinal))
        return place < len(self.ordinals) and int(self.ordinals[place]) == ordinal


def resolve_selection(reader: CaptureReader, wanted: OpSelection) -> KeptRecords:
    """The ordinals that a selection keeps. Raises UsageError for a range or scope that is not in the capture, for a
    pattern or signature that matches no op, and if no op is selected."""
    start, stop = (0, None) if wanted.ops is None else parse_range(wanted.ops)
    count = reader.record_count
    if wanted.ops is not None and max(start, stop or 0) > count:
        raise UsageError(f"--ops={wanted.ops}: {reader.path} has {count} records, with ordinals from 0 to {count - 1}")
    chosen = Filter(reader, Selection(start, stop, wanted.scope, wanted.kernel))
    alike = None if wanted.signature is None else _with_signatures(reader, listed(wanted.signature), start, stop)
    is_op = reader.signature_kinds == RecordKind.op
    is_edge = np.isin(reader.signature_kinds, list(EDGES))
    parts, edges, ops = [], [np.zeros(0, np.int64)], 0
    for index, info in enumerate(reader.record_frames):
        if info.first_ordinal + info.count <= start or (stop is not None and info.first_ordinal >= stop):
            continue
        frame = reader.frame(index)
        rows = np.arange(frame.count)[chosen.indices(frame)]
        if alike is not None:
            rows = rows[np.isin(rows + frame.first_ordinal, alike, assume_unique=True)]
        ops += int(np.count_nonzero(is_op[frame.signature[rows]]))
        parts.append(rows + frame.first_ordinal)
        edges.append(np.flatnonzero(is_edge[frame.signature]) + frame.first_ordinal)
    if not ops:
        raise UsageError(
            f"{wanted.text}: selects no op of {reader.path}; opreplay-dump with the same flags shows what there is"
        )
    ordinals = np.concatenate(parts).astype(np.int64)
    # What orders the streams' work stays, also among records that do not: without it the kept ones might race.
    ordering = np.concatenate(edges)
    ordering = ordering[(ordering > ordinals[0]) & (ordering < ordinals[-1])]
    return KeptRecords(np.union1d(ordinals, ordering), ops)


def _with_signatures(reader: CaptureReader, texts: tuple[str, ...], start: int, stop: int | None) -> np.ndarray:
    """The ordinals of the ops with any of these signatures, ascending. Raises UsageError for one that no op has."""
    from replayfmt.format.signature_text import SignatureIndex, parse_signature  # its grammar is slow to import

    index, found = SignatureIndex(reader), []
    for text in texts:
        alike = [ops.ordinals for ops in index.matching(parse_signature(text), start, stop)]
        if not alike:
            raise UsageError(
                f"--signature={text}: selects no op of {reader.path}; opreplay-dump --signatures lists what there is"
            )
        found += alike
    return np.unique(np.concatenate(found))
