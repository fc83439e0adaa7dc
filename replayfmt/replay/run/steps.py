"""A replay one record at a time: for verdicts on every op, for running an op twice, for one op alone.

Every record becomes a window of its own, which keeps the effects of ops apart. This is slow compared with windows of
thousands of ops, and used only to examine a replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from replayfmt.format.codes import RecordKind
from replayfmt.format.model import CompositeValue, StorageValue, TensorValue, Value

from ..codegen.lowering import Context, Lowering
from ..codegen.op_lowering import lower_op, lower_result
from ..codegen.windows import Window
from ..planning.effects import leaves_unwritten
from ..planning.scan import Scan
from ..planning.window_cuts import WindowSize

ONE_RECORD = WindowSize(least=1, most=1)


@dataclass(frozen=True)
class Touched:
    """What an op touches, as storage ids: of its arguments, those it may write, of its results.

    `written_keys` are the tensors among its arguments that it may write; `fills` is False if it leaves the memory it
    returns unwritten (the empty family).
    """

    signature: int
    reads: frozenset[int]
    writes: frozenset[int]
    results: frozenset[int]
    written_keys: frozenset[int]
    fills: bool


@dataclass(frozen=True)
class Step:
    """One record. `op` is None for records that are not ops; `storages` are those a record that is not an op deals
    with."""

    ordinal: int
    kind: RecordKind
    window: Window
    op: Touched | None
    storages: frozenset[int]


def _storages(values: Iterable[Value]) -> Iterator[int]:
    for value in values:
        if isinstance(value, TensorValue):
            yield value.storage
        elif isinstance(value, StorageValue):
            yield value.id
        elif isinstance(value, list | tuple):
            yield from _storages(value)
        elif isinstance(value, CompositeValue):
            yield from _storages(value.parts)


class Steps:
    """Goes through the records of a scan made with ONE_RECORD windows.

    Records that the scan does not need are skipped. The op at `result_of` returns its results as they are, instead
    of variables.
    """

    def __init__(self, context: Context, scan: Scan, *, compare: bool, result_of: int | None = None) -> None:
        self._context, self._scan, self._compare, self._result_of = context, scan, compare, result_of
        self._touched: Touched | None = None

    def __iter__(self) -> Iterator[Step]:
        lowering = Lowering(replace(self._context, streams=None), self._scan, compare=self._compare)
        needed = self._scan.needed
        for window in lowering.windows(self._lower):
            if needed is not None and not needed[window.first_ordinal]:
                continue
            touched, self._touched = self._touched, None
            record = self._context.reader.record(window.first_ordinal)
            storages = frozenset(_storages((*record.args, *record.results)))
            yield Step(record.ordinal, record.kind, window, touched, storages)

    def _lower(self, lowering: Lowering, row: int, ordinal: int) -> None:
        frame, signature = lowering.frame, lowering.frame.signatures[row]
        first, end = frame.tensor_first[row], frame.tensor_first[row + 1]
        layout = lowering.scan.layout(signature)
        middle = first + layout.arg_tensors
        effects = lowering.scan.effects(signature)
        written = [first + slot for slot in effects.writes]
        results = frozenset(frame.storages[middle:end])
        taken = frozenset(frame.storages[first:middle])
        self._touched = Touched(
            signature,
            taken,
            frozenset(frame.storages[slot] for slot in written),
            results,
            frozenset(frame.keys[slot] for slot in written),
            not leaves_unwritten(lowering.reader, taken, results),
        )
        if ordinal == self._result_of:
            lower_result(lowering, row, ordinal)
        else:
            lower_op(lowering, row, ordinal)
