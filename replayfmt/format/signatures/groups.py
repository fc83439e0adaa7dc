"""A capture's ops by signature: how often each occurs and where first, found without decoding every record.

A key is what a frame's columns say of an op: the id of its constant part and its argument tensors' metadata. Ops of one
key have one signature; several keys may have the same one (autograd's flag is part of the metadata). Texts are made
once for each key, from the record that has it first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from ..codes import RecordKind
from ..reader import CaptureReader
from ..records.record_frames import RecordFrame
from .text import SignatureText, matches, signature_text

Key = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class SignatureGroup:
    """One signature of a capture: its text, its kernel's id, how often it is called, and the ordinal of the first."""

    text: str
    kernel: int
    calls: int
    first: int


@dataclass(frozen=True)
class KeyedOps:
    """The ops of one key in one frame, as ordinals in order."""

    key: Key
    kernel: int
    ordinals: np.ndarray


class SignatureIndex:
    """The signatures of one open capture."""

    def __init__(self, reader: CaptureReader) -> None:
        self._reader = reader
        self._texts: dict[Key, str] = {}

    def argument_tensors(self, signature_id: int) -> int:
        """How many of a record's tensor slots are its arguments'; they come first."""
        return self._reader.layouts[signature_id].arg_tensors

    def text(self, key: Key, ordinal: int) -> str:
        """The signature of the ops of a key, of which there is one at `ordinal`."""
        known = self._texts.get(key)
        if known is None:
            known = self._texts[key] = signature_text(self._reader.record(ordinal), self._reader)
        return known

    def ops_by_key(
        self, kernels: Collection[int] | None = None, start: int = 0, stop: int | None = None
    ) -> Iterator[KeyedOps]:
        """The ops with ordinals from `start` up to `stop`, of these kernels or of all, frame by frame."""
        reader = self._reader
        last = reader.record_count if stop is None else min(stop, reader.record_count)
        wanted = {
            number
            for number, signature in enumerate(reader.signatures)
            if signature is not None
            and signature.kind is RecordKind.op
            and (kernels is None or signature.kernel in kernels)
        }
        for index, info in enumerate(reader.record_frames):
            if info.first_ordinal >= last or info.first_ordinal + info.count <= start:
                continue
            frame = reader.frame(index)
            rows = slice(max(0, start - frame.first_ordinal), min(frame.count, last - frame.first_ordinal))
            signatures = frame.signature[rows]
            for number in np.unique(signatures).tolist():
                if number in wanted:
                    yield from self._keys(frame, number, np.flatnonzero(signatures == number) + rows.start)

    def _keys(self, frame: RecordFrame, number: int, rows: np.ndarray) -> Iterator[KeyedOps]:
        """The ops of one constant part, by the metadata of their arguments."""
        kernel = self._reader.signatures[number].kernel
        slots = frame.tensor_first[rows].astype(np.int64)[:, None] + np.arange(self.argument_tensors(number))
        metas = frame.tensor_meta[frame.tensor_slots[slots]]
        if not metas.shape[1]:
            yield KeyedOps((number, ()), kernel, rows + frame.first_ordinal)
            return
        distinct, group = np.unique(metas, axis=0, return_inverse=True)
        group = group.reshape(-1)
        for place, key in enumerate(distinct.tolist()):
            yield KeyedOps((number, tuple(key)), kernel, rows[group == place] + frame.first_ordinal)

    def groups(
        self, kernels: Collection[int] | None = None, start: int = 0, stop: int | None = None
    ) -> list[SignatureGroup]:
        """Every signature that occurs among these ops, in order of first use."""
        found: dict[tuple[int, str], list[int]] = {}
        for ops in self.ops_by_key(kernels, start, stop):
            first = int(ops.ordinals[0])
            entry = found.setdefault((ops.kernel, self.text(ops.key, first)), [0, first])
            entry[0] += len(ops.ordinals)
            entry[1] = min(entry[1], first)
        made = [SignatureGroup(text, kernel, calls, first) for (kernel, text), (calls, first) in found.items()]
        return sorted(made, key=lambda group: group.first)

    def matching(self, pattern: SignatureText, start: int = 0, stop: int | None = None) -> Iterator[KeyedOps]:
        """The ops that a signature selects, as `ops_by_key` gives them, none of them empty."""
        reader = self._reader
        kernels = {
            number
            for number, kernel in enumerate(reader.kernels)
            if kernel is not None and kernel.qualified_name == pattern.kernel
        }
        answers: dict[Key, bool] = {}
        for ops in self.ops_by_key(kernels, start, stop):
            if pattern.asks_for_values:
                chosen = np.array([matches(pattern, reader.record(int(ordinal)), reader) for ordinal in ops.ordinals])
                if chosen.any():
                    yield KeyedOps(ops.key, ops.kernel, ops.ordinals[chosen])
                continue
            answer = answers.get(ops.key)
            if answer is None:
                answer = answers[ops.key] = matches(pattern, reader.record(int(ops.ordinals[0])), reader)
            if answer:
                yield ops
