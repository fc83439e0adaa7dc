"""Which records a replay of some of a capture's ops needs: those ops, and the records that produce their inputs.

One walk backwards over the records: an op belongs to a slice if it is requested, or touches memory that a later one of
the slice uses; content that enters such memory does, too. Random numbers depend on all that were drawn before. Then
one walk forwards, which finds the comparisons that a replay of the slice can make: those of memory that no op outside
of the slice wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np

from replayfmt.format.codes import RecordKind, ValueKind
from replayfmt.format.reader import CaptureReader, RecordFrame

from .effects import Effects
from .overview import SCALARS

_CONTENT = (RecordKind.storage_import, RecordKind.storage_resize)
_CHECKS = (RecordKind.digest, RecordKind.host_read)
_SLICED = (RecordKind.op, *_CONTENT, *_CHECKS)


@dataclass(frozen=True)
class Slice:
    """`needed` has for each record whether it participates; records that are not ops, no content and no comparison
    always do. `comparable`: how many digests, host reads and scalars there are to compare with."""

    needed: np.ndarray
    comparable: int


@dataclass(frozen=True)
class Row:
    """A record as the walks see it: its storages by what it does with them."""

    ordinal: int
    kind: RecordKind
    touched: frozenset[int]
    given: frozenset[int]  # of results, and of what it may write
    written: frozenset[int]  # the same without views on arguments
    draws: bool
    scalars: int


class Slicer:
    """Makes slices of a capture. `effects` describes signatures, `draws` says which kernels take random
    numbers from a generator whose state the capture has."""

    def __init__(self, reader: CaptureReader, effects: Callable[[int], Effects], draws: Callable[[int], bool]) -> None:
        self._reader, self._effects, self._draws = reader, effects, draws
        self._kinds = [
            RecordKind.none,
            *(RecordKind.none if signature is None else signature.kind for signature in reader.signatures[1:]),
        ]
        self._parts_of_signature: dict[int, tuple[int, tuple[int, ...], tuple[int, ...], bool, int]] = {}

    def slice(self, ordinals: Collection[int]) -> Slice:
        """The slice that has the ops at these ordinals."""
        stop = max(ordinals, default=-1) + 1
        sliced = np.asarray([kind in _SLICED for kind in self._kinds], bool)
        needed = np.concatenate(
            [
                np.zeros(0, bool),
                *(~sliced[self._reader.frame(index).signature] for index in range(len(self._reader.record_frames))),
            ]
        )
        wanted: set[int] = set()
        drawing = False
        for row in self.rows(stop, backwards=True):
            if row.kind is RecordKind.op:
                takes_part = row.ordinal in ordinals or not wanted.isdisjoint(row.given) or (drawing and row.draws)
                drawing = drawing or (takes_part and row.draws)
            else:
                takes_part = row.kind in _CONTENT and not wanted.isdisjoint(row.touched)
            if takes_part:
                needed[row.ordinal] = True
                wanted |= row.touched
        return Slice(needed, self._comparisons(needed, wanted))

    def _comparisons(self, needed: np.ndarray, wanted: set[int]) -> int:
        """Add the comparisons that hold to `needed`; how many there are."""
        comparable, stale = 0, set[int]()
        for row in self.rows(len(needed), backwards=False):
            if row.kind is RecordKind.op:
                if needed[row.ordinal]:
                    comparable += row.scalars
                else:
                    stale |= row.written
            elif row.kind is RecordKind.storage_import and needed[row.ordinal]:
                stale -= row.touched
            elif row.kind in _CONTENT:
                if not needed[row.ordinal]:
                    stale |= row.touched
            elif row.touched and row.touched <= wanted and row.touched.isdisjoint(stale):
                needed[row.ordinal] = True
                comparable += 1
        return comparable

    # ------------------------------------------------------------------------------------------------------------- rows

    def rows(self, stop: int, *, backwards: bool) -> Iterator[Row]:
        """The ops, content and comparisons before an ordinal."""
        indices = range(len(self._reader.record_frames))
        for index in reversed(indices) if backwards else indices:
            frame = self._reader.frame(index)
            rows = range(max(0, min(frame.count, stop - frame.first_ordinal)))
            yield from self._of_frame(frame, reversed(rows) if backwards else iter(rows))

    def _of_frame(self, frame: RecordFrame, rows: Iterator[int]) -> Iterator[Row]:
        signatures, first = frame.signature.tolist(), frame.tensor_first.tolist()
        storages = frame.tensor_storage[frame.tensor_slots].tolist()
        int_first, ints = frame.int_first.tolist(), frame.ints.tolist()
        for row in rows:
            signature = signatures[row]
            kind = self._kinds[signature]
            if kind not in _SLICED:
                continue
            taken, written, passed, draws, scalars = self._signature_parts(signature)
            tensors = storages[first[row] : first[row + 1]]
            touched = frozenset((*tensors, *(ints[int_first[row] + slot] for slot in passed)))
            results, changed = frozenset(tensors[taken:]), frozenset(tensors[slot] for slot in written)
            yield Row(
                frame.first_ordinal + row,
                kind,
                touched,
                results | changed,
                changed | (results - frozenset(tensors[:taken])),
                draws,
                scalars,
            )

    def _signature_parts(self, signature: int) -> tuple[int, tuple[int, ...], tuple[int, ...], bool, int]:
        """Of a signature: tensors among its arguments, those that it may write, the places of storages, whether it
        draws, and how many scalars it returns."""
        known = self._parts_of_signature.get(signature)
        if known is None:
            layout = self._reader.layouts[signature]
            kind = layout.signature.kind
            written: tuple[int, ...] = ()
            passed = tuple(each.int_slot for each in layout.nodes(ValueKind.storage))
            draws, scalars = False, 0
            if kind is RecordKind.op:
                effects = self._effects(signature)
                written = effects.writes + effects.unsure
                draws = self._draws(layout.signature.kernel)
                scalars = sum(node.kind in SCALARS for node in layout.signature.results)
            elif kind in _CONTENT:
                place = layout.arg("storage")
                assert place is not None, f"a {kind.name} record without its storage"
                passed = (place.int_slot,)
            known = self._parts_of_signature[signature] = layout.arg_tensors, written, passed, draws, scalars
        return known
