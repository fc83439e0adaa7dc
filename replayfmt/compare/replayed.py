"""Results of captures that hold none, made by replays here. The files stay as they are.

A first replay of each capture hashes every result while it exists. Only of those that differ a second one takes the
digests, with the elements they sample, so memory does not grow with the content. A replay is verified by what the
capture does hold (digests of live tensors, host reads); one that differs from its capture is an error, since its
results are not the captured ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from replayfmt.errors import ReplayMismatch
from replayfmt.format.codes import StorageOrigin
from replayfmt.format.model import TensorDigest
from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch.tensors.digests import digest_tensor, hash_tensor
from replayfmt.pytorch.tensors.memory import byte_tensor, undispatched
from replayfmt.replay.plan import Plan

from .trace import Hashed, Side, read_trace, written_slots

Progress = Callable[[str, int, int], None]
_MOST_DIGESTS = 100_000  # about 100 MB


def replayed_sides(sides: list[Side], options: Mapping[str, Any], on_progress: Progress) -> list[Side]:
    """Both captures with hashes of results from replays. Raises what a replay raises, and ReplayMismatch."""
    made = []
    for side in sides:
        hashing = _Hashing(side.reader)
        _run(side.reader, hashing, options, on_progress)
        made.append(Side(side.reader, read_trace(side.reader, results=hashing.hashed()), {}))
    return made


def with_digests(
    sides: list[Side], observed: list[tuple[int, int]], options: Mapping[str, Any], on_progress: Progress
) -> list[Side]:
    """Both captures with the digests of these observations, by another replay."""
    made = []
    for which, side in enumerate(sides):
        trace = side.trace
        places = sorted({pair[which] for pair in observed[:_MOST_DIGESTS]})
        places = [place for place in places if trace.observed_as[place] < 1 << 30]
        wanted = {(int(trace.observed_at[place]), int(trace.observed_as[place])): place for place in places}
        digesting = _Digesting(side.reader, wanted)
        if wanted:
            _run(side.reader, digesting, options, on_progress)
        made.append(Side(side.reader, trace, digesting.found))
    return made


def _run(reader: CaptureReader, watcher: Any, options: Mapping[str, Any], on_progress: Progress) -> None:
    """Replay a whole capture, verified, with a watcher. Raises ReplayMismatch if it differs."""
    with Plan(reader, **options) as plan:
        while True:
            watcher.begin()
            _verification, divergence = plan.watch(
                watcher,
                reader.record_count,
                "auto",
                on_progress=lambda done: on_progress(f"replaying {reader.path}", done, reader.record_count),
            )
            if divergence is None:
                return
            if not plan.explain(divergence.seen_at + 1, "auto"):
                raise ReplayMismatch(
                    f"{reader.path}: its replay here differs from the capture, so results of a replay are not the "
                    f"captured ones: {divergence}; capture with --digests=ops and compare without --replay instead"
                )


class _Watching:
    """A Watcher of everything; `see` gets each result and everything an op wrote, with its place among these."""

    def __init__(self, reader: CaptureReader) -> None:
        self._reader, self._written = reader, written_slots(reader)
        self._unwritten: set[int] = set()  # storages that were allocated and not written yet

    def begin(self) -> None:
        """A replay begins, perhaps once more."""
        self._unwritten.clear()

    def watches(self, _ordinal: int) -> bool:
        return True

    def before(self, ordinal: int, storages: dict[int, torch.UntypedStorage]) -> None:
        pass

    def after(self, ordinal: int, results: dict[int, torch.Tensor], args: dict[int, torch.Tensor]) -> None:
        with undispatched():
            for place, (row, tensor) in enumerate(self._shown(ordinal, results, args)):
                self.see(ordinal, place, row, tensor)

    def see(self, ordinal: int, place: int, row: int, tensor: torch.Tensor) -> None:
        raise NotImplementedError

    def _shown(
        self, ordinal: int, results: dict[int, torch.Tensor], args: dict[int, torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """The tensors, by their row in the frame; not memory that nothing has written. That is filled with zeros: it
        may hold anything, but what comes of it must be the same each time."""
        reader = self._reader
        frame = reader.frame(reader.frame_of(ordinal))
        at = ordinal - frame.first_ordinal
        rows = frame.tensor_slots[int(frame.tensor_first[at]) : int(frame.tensor_first[at + 1])]
        storages = frame.tensor_storage[rows].tolist()
        first = reader.layouts[int(frame.signature[at])].arg_tensors
        taken, returned = set(storages[:first]), {storages[slot] for slot in results}
        written = [int(slot) for slot in self._written(int(frame.signature[at])) if slot in args]
        self._unwritten.difference_update(storages[slot] for slot in written)
        for slot, tensor in [*sorted(results.items()), *((slot, args[slot]) for slot in written)]:
            number = storages[slot]
            if (
                tensor.layout is not torch.strided
                or tensor.device.type == "meta"
                or (slot < first and number in returned)
            ):
                continue
            new = slot >= first and number and number not in taken and number not in self._unwritten
            if new and reader.storage(number).origin is StorageOrigin.uninitialized:
                self._unwritten.add(number)
                if tensor.untyped_storage().nbytes():
                    byte_tensor(tensor.untyped_storage()).zero_()
            if number in self._unwritten:
                continue
            yield int(rows[slot]), tensor


class _Hashing(_Watching):
    """Hashes all results."""

    def begin(self) -> None:
        super().begin()
        self._rows: list[tuple[int, ...]] = []

    def see(self, ordinal: int, place: int, row: int, tensor: torch.Tensor) -> None:
        frame = self._reader.frame(self._reader.frame_of(ordinal))
        columns = frame.tensor_id, frame.tensor_storage, frame.tensor_meta, frame.tensor_offset
        try:
            low, high = hash_tensor(tensor)
        except TypeError:  # packed dtypes have no digest
            low = high = 0
        self._rows.append((ordinal, *(int(column[row]) for column in columns), low, high))

    def hashed(self) -> Hashed:
        columns = np.array([row[:5] for row in self._rows], np.int64).reshape(-1, 5).T
        hashes = np.array([row[5:] for row in self._rows], np.uint64).reshape(-1, 2).T
        return Hashed(*columns, *hashes)


class _Digesting(_Watching):
    """Takes the digests of some results."""

    def __init__(self, reader: CaptureReader, wanted: Mapping[tuple[int, int], int]) -> None:
        super().__init__(reader)
        self._wanted = wanted
        self.found: dict[int, TensorDigest] = {}

    def begin(self) -> None:
        super().begin()
        self.found.clear()

    def see(self, ordinal: int, place: int, row: int, tensor: torch.Tensor) -> None:
        key = self._wanted.get((ordinal, place))
        if key is not None:
            self.found[key] = digest_tensor(tensor)
