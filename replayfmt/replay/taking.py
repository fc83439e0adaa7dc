"""The arguments and results of chosen ops in a verified replay, shown while they exist.

A replay runs up to the last of them. Nothing is copied here: a looker copies what it wants to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import numpy as np
import torch

from replayfmt.errors import ReplayMismatch, ReplayRefused
from replayfmt.format.codes import RecordKind, StorageOrigin, TensorFlag
from replayfmt.format.model import Record, TensorValue
from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch.tensors.bounds import view_inside
from replayfmt.pytorch.tensors.dtypes import TORCH_DTYPE
from replayfmt.pytorch.tensors.memory import byte_tensor

from .op_values import GiveTensor, python_values, tensors_of
from .plan import Plan
from .planning.overview import unseen_before
from .results import Verification, VerifyMode
from .substitution.clones import Clones
from .verify.run_twice import RunTwice

# Comparisons that directly follow an op, and what may come between.
_PASSED = (
    RecordKind.digest,
    RecordKind.host_read,
    RecordKind.scope_begin,
    RecordKind.scope_end,
    RecordKind.storage_release,
)


class Looker(Protocol):
    """Is shown chosen ops. `give` turns a record's tensor values into the replay's own tensors, in their order."""

    def takes(self, record: Record, give: GiveTensor) -> None:
        """The op runs next; `give` returns its arguments."""
        ...

    def gives(self, record: Record, give: GiveTensor) -> None:
        """The op has run; `give` returns its arguments as it left them, then its results. Not called for an op that
        raised under capture."""
        ...


def show_ops(
    plan: Plan,
    ordinals: Collection[int],
    make: Callable[[], Looker],
    verify: VerifyMode = "auto",
    *,
    twice: Callable[[], RunTwice] | None = None,
) -> Verification:
    """Replay the capture up to the last of these ops, and show them to what `make` makes; how the replay was verified.

    Results that hold bytes which no replay reproduces may be found on the way: then it is done once more, with another
    looker. `twice` makes what looks for them; what it looks at runs twice. The plan must be made with keep_going.
    Raises ReplayMismatch if the replay differs, ReplayRefused if something stands against this part of it, and
    ReplayFailed.
    """
    stop = _with_checks(plan.reader, max(ordinals) + 1)
    _refuse_unseen(plan.reader, stop)
    born = _born_unwritten(plan.reader, stop)
    while True:
        watcher = _Showing(plan.reader, frozenset(ordinals), born, make())
        search = None if twice is None else twice()
        verification, divergence = plan.watch(watcher, stop, verify, twice=search)
        learned = search is not None and plan.learn(search)
        if learned or (divergence is not None and plan.explain(divergence.seen_at + 1, verify)):
            continue
        if divergence is not None:
            raise ReplayMismatch(
                f"{plan.reader.path}: its replay differs from the capture, so nothing can be taken from it: "
                f"{divergence}"
            )
        return verification


def _with_checks(reader: CaptureReader, stop: int) -> int:
    """Where to stop instead, so that the last op's results are compared with the capture, too."""
    for record in reader.records(stop):
        if record.kind not in _PASSED:
            break
        stop = record.ordinal + 1
    return stop


def _refuse_unseen(reader: CaptureReader, stop: int) -> None:
    unseen = list(unseen_before(reader, stop))[::-1]
    if unseen:
        findings = []
        for ordinal in unseen:
            record = reader.record(ordinal)
            texts = ", ".join(str(each) for each in record.args if each)
            findings.append(f"{record.kind.name} at ordinal {ordinal}: {texts}")
        raise ReplayRefused(
            f"{reader.path}: the inputs of ops before ordinal {stop} cannot be computed: the records below "
            f"cannot be replayed, and may have written any of them",
            tuple(findings),
        )


def _born_unwritten(reader: CaptureReader, stop: int) -> dict[int, set[int]]:
    """The ops before an ordinal that return memory which nothing has written, with the storages that are it."""
    found: dict[int, set[int]] = {}
    for index, info in enumerate(reader.record_frames):
        if info.first_ordinal >= stop:
            break
        frame = reader.frame(index)
        born = np.flatnonzero(frame.storage_origin == StorageOrigin.uninitialized) + frame.first_storage
        storages = frame.tensor_storage[frame.tensor_slots]
        places = np.flatnonzero(np.isin(storages, born))
        rows = np.searchsorted(frame.tensor_first, places, "right") - 1
        known: set[int] = set()
        for row, storage in zip(rows.tolist(), storages[places].tolist(), strict=True):
            if storage not in known:
                known.add(storage)
                found.setdefault(info.first_ordinal + row, set()).add(storage)
    return found


class _Showing:
    """A Watcher of the ops at `ordinals`. Memory that is allocated unwritten, by ordinals in `born`, is filled with
    zeros: it may hold anything, but what is taken from it must be the same each time and nothing of this process's."""

    def __init__(
        self, reader: CaptureReader, ordinals: frozenset[int], born: dict[int, set[int]], looker: Looker
    ) -> None:
        self._reader, self._ordinals, self._born, self._looker = reader, ordinals, born, looker

    def watches(self, ordinal: int) -> bool:
        return ordinal in self._ordinals or ordinal in self._born

    def before(self, ordinal: int, storages: dict[int, torch.UntypedStorage]) -> None:
        if ordinal not in self._ordinals:
            return

        def give(value: TensorValue, _name: str) -> torch.Tensor:
            meta = value.meta
            if meta.flags & TensorFlag.zero:
                device = next(iter(storages.values())).device if storages else "cpu"
                return torch.zeros(meta.sizes, dtype=TORCH_DTYPE[meta.dtype], device=device)
            return view_inside(
                storages[value.storage], TORCH_DTYPE[meta.dtype], meta.sizes, meta.strides, value.offset, meta.flags
            )

        self._looker.takes(self._reader.record(ordinal), give)

    def after(self, ordinal: int, results: dict[int, torch.Tensor], args: dict[int, torch.Tensor]) -> None:
        record = self._reader.record(ordinal)
        slots = _TakenSlots(record)
        for value in tensors_of(record.results):
            if value.storage in self._born.get(ordinal, ()) and slots.of(value) in results:
                _zero(results[slots.of(value)])
        if ordinal not in self._ordinals:
            return

        def give(value: TensorValue, _name: str) -> torch.Tensor:
            slot = slots.of(value)
            return results[slot] if slot in results else args[slot]

        self._looker.gives(record, give)


class _TakenSlots:
    """The tensor slots of a record's values. One tensor may be in several: they hold the same."""

    def __init__(self, record: Record) -> None:
        self._slots: dict[int, int] = {}
        for slot, value in enumerate(tensors_of((*record.args, *record.results))):
            self._slots[id(value)] = slot
        self._record = record  # keeps the values, whose ids these are

    def of(self, value: TensorValue) -> int:
        return self._slots[id(value)]


def _zero(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    if tensor.device.type != "meta" and storage.nbytes():
        byte_tensor(storage).zero_()


class _Taken:
    """Copies what one op takes or returns."""

    def __init__(self, reader: CaptureReader, *, results: bool) -> None:
        self._reader, self._results = reader, results
        self.values: list[Any] | None = None

    def takes(self, record: Record, give: GiveTensor) -> None:
        if not self._results:
            self.values = Clones().of(python_values(self._reader, record.signature.args, record.args, give, ""))

    def gives(self, record: Record, give: GiveTensor) -> None:
        if self._results:
            values = python_values(self._reader, record.signature.results, record.results, give, "result ")
            self.values = Clones().of(values)


def taken(plan: Plan, ordinal: int, *, results: bool) -> list[Any]:
    """What the op at an ordinal takes in a verified replay, or with `results` what it returns, in memory of its own.

    Raises what `show_ops` raises, and ContentNotCaptured for values that a capture only describes.
    """
    last: list[_Taken] = []

    def make() -> _Taken:
        last[:] = [_Taken(plan.reader, results=results)]
        return last[0]

    show_ops(plan, (ordinal,), make)
    values = last[0].values
    assert values is not None, "a replay that ran did not reach the op"
    return values
