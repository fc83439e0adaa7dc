"""Which records of a capture `--ops`, `--scope`, `--kernel` and `--signature` choose. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from replayfmt.errors import UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import CaptureReader
from replayfmt.format.signature_text import SignatureIndex, parse_signature

from .listings import Filter, Names, Selection, listed, parse_range

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
        """Whether the record at an ordinal is kept."""
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
    is_op = np.array([False, *(each is not None and each.kind is RecordKind.op for each in reader.signatures[1:])])
    is_edge = np.array([False, *(each is not None and each.kind in EDGES for each in reader.signatures[1:])])
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
    index, found = SignatureIndex(reader), []
    for text in texts:
        alike = [ops.ordinals for ops in index.matching(parse_signature(text), start, stop)]
        if not alike:
            raise UsageError(
                f"--signature={text}: selects no op of {reader.path}; opreplay-dump --signatures lists what there is"
            )
        found += alike
    return np.unique(np.concatenate(found))
