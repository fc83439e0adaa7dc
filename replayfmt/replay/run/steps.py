"""A replay one record at a time: for verdicts on every op, for running an op twice, for one op alone.

Every record becomes a window of its own, which keeps the effects of ops apart. This is slow compared with windows of
thousands of ops, and used only to examine a replay. `IsolatedOp` runs one op any number of times, each time from the
same memory: what it may write is a copy. `KeepGoing` says what became of every op, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch

from replayfmt.errors import ReplayFailed, first_line
from replayfmt.format.codes import RecordKind
from replayfmt.format.model import StorageValue, TensorValue, Value, nested_values
from replayfmt.pytorch.tensors.memory import require_inside

from ..codegen.lowering import Context, Lowering
from ..codegen.op_lowering import lower_op, lower_result
from ..codegen.windows import Window
from ..operations import MustRaise
from ..planning.kernels import leaves_unwritten
from ..planning.records import describe
from ..planning.scan import ContentSource, Scan, WindowSize, source_of
from ..results import OpVerdict, Verdict
from ..verification import StopReplay
from .content import copied, copy_bytes, moved, storages_of
from .execute import Machine, OnScope

ONE_RECORD = WindowSize(least=1, most=1)


@dataclass(frozen=True)
class OpAccesses:
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
    op: OpAccesses | None
    storages: frozenset[int]


def _storages(values: Iterable[Value]) -> Iterator[int]:
    for value in nested_values(values):
        if isinstance(value, TensorValue | StorageValue):
            yield value.storage if isinstance(value, TensorValue) else value.id


class Steps:
    """Goes through the records of a scan made with ONE_RECORD windows.

    Records that the scan does not need are skipped. The op at `result_of` returns its results as they are, instead
    of variables.
    """

    def __init__(self, context: Context, scan: Scan, *, compare: bool, result_of: int | None = None) -> None:
        self._context, self._scan, self._compare, self._result_of = context, scan, compare, result_of
        self._touched: OpAccesses | None = None

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
        middle = first + lowering.scan.layout(signature).arg_tensors
        effects = lowering.scan.effects(signature)
        written = [first + slot for slot in effects.writes]
        results = frozenset(frame.storages[middle:end])
        taken = frozenset(frame.storages[first:middle])
        self._touched = OpAccesses(
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


@dataclass(frozen=True)
class IsolatedCall:
    """One call of a kernel: its arguments, by position and by name, and what it returned; `raised`: an exception, as it
    did under capture."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]
    result: Any
    raised: bool = False


class IsolatedOp:
    """An op with its inputs, inside a replay that has reached it. Valid until the replay continues.

    `ordinal` and `signature` (an id of the capture) say which; `writes` whether it may change its inputs, so that calls
    must be kept apart by `restore`.
    """

    def __init__(self, step: Step, touched: OpAccesses, inputs: Sequence[Any]) -> None:
        self.ordinal = step.ordinal
        self.signature = touched.signature
        self._function: Callable[..., list[Any]] = step.window.function
        self._kernel = step.window.kernel
        self._inputs = tuple(inputs)
        written = [place for place, key in enumerate(step.window.inputs) if key in touched.written_keys]
        self._originals = storages_of(inputs, written)
        self.writes = bool(written)
        self._work: dict[int, torch.UntypedStorage] = {}
        self._arguments: list[Any] = list(inputs)
        self.restore()

    def restore(self) -> None:
        """Put back what calls have written: bytes, lengths and the views themselves."""
        if not self.writes:
            return
        for key, original in self._originals.items():
            work = self._work.get(key)
            if work is None or work.nbytes() != original.nbytes():
                self._work[key] = copied(original)
            else:
                copy_bytes(work, original)
        self._arguments = moved(self._inputs, self._work)

    def addresses(self) -> tuple[int, ...]:
        """Where the memory is that calls write, as of the last `restore`."""
        return tuple(storage.data_ptr() for storage in self._work.values())

    def call(self) -> list[Any]:
        """Run the op once; what it returns is in the result until that is dropped. Raises whatever the op raises."""
        return self._function(list(self._arguments), None)

    def called(self) -> IsolatedCall:
        """Run the op once: what its kernel was given, and what it returned, also what the replay does not need. Raises
        whatever it raises."""
        function, place = self._function, self._kernel
        assert isinstance(function, FunctionType) and function.__defaults__ is not None and place is not None
        constants: list[Any] = list(function.__defaults__)
        kept: list[IsolatedCall] = []
        kernel = constants[place]

        def keep(*arguments: Any, **named: Any) -> Any:
            kept.append(IsolatedCall(arguments, named, kernel(*arguments, **named), isinstance(kernel, MustRaise)))
            return kept[-1].result

        constants[place] = keep
        FunctionType(function.__code__, function.__globals__, "window", tuple(constants))(list(self._arguments), None)
        return kept[0]

    def calls(self, count: int) -> None:
        """Run the op that often, letting go of each call's results at once."""
        call_repeatedly(self._function, self._arguments, count)


def call_repeatedly(function: Callable[..., list[Any]], arguments: Sequence[Any], count: int) -> None:
    """Call a window's function `count` times. A window empties the list it is given, so each call gets its own."""
    for _ in range(count):
        function(list(arguments), None)


class KeepGoing:
    """Runs steps and judges each op. `refused` has the reason for op signatures that cannot be run here; `on_op` is
    given each op before it runs, with its inputs, to run it apart as often as it likes."""

    def __init__(
        self, machine: Machine, refused: Mapping[int, str], on_op: Callable[[IsolatedOp], None] | None = None
    ) -> None:
        self._machine, self._refused, self._on_op = machine, refused, on_op
        self._reader, self._clock, self._judge = machine.reader, machine.clock, machine.judge
        self._spoiled: dict[int, int] = {}  # storage → ordinal of the op that should have written it
        self._absent: dict[int, str] = {}  # storages whose content is missing, with the reason
        self._unallocated: dict[int, str] = {}  # storages that this machine has no memory for, with the reason
        self._writer: dict[int, int] = {}  # storage → ordinal of the op that wrote it last
        self._verdicts: dict[int, OpVerdict] = {}
        self._accesses: dict[int, tuple[Set[int], Set[int]]] = {}  # what each record reads and writes, by ordinal
        self.left_out: list[str] = []  # records other than ops that were not replayed
        self.result: Any = None  # what the last op returned, where its step returns results

    def run(self, steps: Iterable[Step], on_scope: OnScope | None) -> None:
        """Go through all steps, whether they succeed or not."""
        for step in steps:
            found = len(self._judge.found)
            self._prepare(step)
            if step.op is not None:
                self._op(step, step.op, on_scope)
            else:
                self._other(step, on_scope)
            self._blame(step, found)
        self._fold()

    @property
    def verdicts(self) -> tuple[OpVerdict, ...]:
        return tuple(self._verdicts[ordinal] for ordinal in sorted(self._verdicts))

    def verdict(self, ordinal: int) -> OpVerdict:
        return self._verdicts[ordinal]

    def _prepare(self, step: Step) -> None:
        self._machine.prepare(step.window, unavailable=self._unallocated)
        for staged in step.window.staged:
            if staged.length_bytes:
                self._note_content(staged.storage, staged.source, 0)

    def _note_content(self, storage: int, source: ContentSource, version: int) -> None:
        """Whether the content that enters a storage is available."""
        reason = self._machine.content.missing(storage, source, version)
        if reason is None:
            self._absent.pop(storage, None)
        else:
            self._absent[storage] = reason

    def _op(self, step: Step, touched: OpAccesses, on_scope: OnScope | None) -> None:
        verdict, reason = self._obstacle(step, touched)
        if verdict == "ok":
            try:
                self._call(step, on_scope)
            except ReplayFailed as error:
                verdict, reason = "failed", _cause(error)
                self._drop_outside()
            except StopReplay:
                verdict, reason = "mismatched", str(self._judge.found[-1])
                self._drop_outside()
        else:
            self._abandon(step)
        name, _scope = describe(self._reader, step.ordinal)
        self._verdicts[step.ordinal] = OpVerdict(step.ordinal, name, verdict, reason)
        spoiled = touched.writes | (touched.results - touched.reads)
        self._accesses[step.ordinal] = touched.reads, spoiled
        for storage in spoiled:
            if verdict == "ok":
                self._writer[storage] = step.ordinal
            else:
                self._spoiled.setdefault(storage, step.ordinal)

    def _obstacle(self, step: Step, touched: OpAccesses) -> tuple[Verdict, str]:
        """Why an op cannot be run, if it cannot."""
        reason = self._refused.get(touched.signature)
        if reason is not None:
            return "refused", reason
        for storage in sorted(touched.reads):
            if storage in self._spoiled:
                return "skipped", f"it needs a result that ordinal {self._spoiled[storage]} did not produce"
            if reason := self._unallocated.get(storage, self._absent.get(storage)):
                return "refused", reason
        if any(key not in self._machine.values for key in step.window.inputs):
            return "skipped", "it needs a tensor that an earlier op did not produce"
        return "ok", ""

    def _call(self, step: Step, on_scope: OnScope | None) -> None:
        inputs = self._machine.take(step.window)
        usable = all(isinstance(value, torch.Tensor | torch.UntypedStorage) for value in inputs)
        if self._on_op is not None and step.op is not None and usable:  # else the call itself says what is wrong
            try:
                isolated = IsolatedOp(step, step.op, inputs)
            except (RuntimeError, MemoryError) as error:
                raise ReplayFailed("the copies of what it writes cannot be made") from error
            self._on_op(isolated)
        self._clock.resume()
        try:
            outputs = self._machine.call(step.window, inputs, on_scope)
        finally:
            self._clock.halt()
        if step.window.returns_result:
            self.result = outputs
        else:
            self._machine.values.update(zip(step.window.outputs, outputs, strict=True))

    def _drop_outside(self) -> None:
        """An op that failed halfway may have made tensors longer than their memory: nothing may use those."""
        values = self._machine.values
        for key, value in list(values.items()):
            try:
                require_inside(value)
            except RuntimeError:
                del values[key]

    def _abandon(self, step: Step) -> None:
        for key, consumed in zip(step.window.inputs, step.window.consumed, strict=True):
            if consumed:
                self._machine.values.pop(key, None)

    def _other(self, step: Step, on_scope: OnScope | None) -> None:
        """A record that is not an op. Content that is imported again can be trusted again."""
        usable = all(key in self._machine.values for key in step.window.inputs)
        if step.kind is RecordKind.storage_import:
            record = self._reader.record(step.ordinal)
            version = record.argument("version")
            assert isinstance(version, int)
            self._accesses[step.ordinal] = frozenset(), step.storages
            for storage in step.storages:
                self._spoiled.pop(storage, None)
                if self._reader.storage(storage).bytes:
                    self._note_content(storage, source_of(record.argument("payload")), version)
            usable = usable and not step.storages & self._absent.keys()
        elif step.storages & (self._spoiled.keys() | self._absent.keys()):
            usable = False
        if not usable:
            self._abandon(step)
            self._leave_out(step, "it needs content that is not available")
            return
        try:
            with suppress(StopReplay):
                self._call(step, on_scope)
        except ReplayFailed as error:
            if not step.storages:
                raise  # everything after it may depend on it
            self._leave_out(step, _cause(error))
            for storage in step.storages:
                self._spoiled.setdefault(storage, step.ordinal)

    def _leave_out(self, step: Step, reason: str) -> None:
        name, _scope = describe(self._reader, step.ordinal)
        self.left_out.append(f"ordinal {step.ordinal} ({name}): {reason}")

    def _blame(self, step: Step, found: int) -> None:
        """Attribute divergences to the op that the record names, or else to the last that wrote the memory."""
        for divergence in self._judge.found[found:]:
            culprit = divergence.ordinal
            if culprit not in self._verdicts:
                writers = [self._writer[storage] for storage in step.storages if storage in self._writer]
                if not writers:
                    continue
                culprit = max(writers)
            known = self._verdicts[culprit]
            if known.verdict == "ok":
                self._verdicts[culprit] = OpVerdict(culprit, known.op, "mismatched", str(divergence))

    def _fold(self) -> None:
        """Name the cause of each op that differs and works on what an op computed that differs. What an op computes is
        taken to follow from what it reads, unless its own digest was compared and is right."""
        compared = self._reader.session.policies.get("digests") == "ops"
        causes: dict[int, int] = {}  # storage → the op from which its content follows
        for ordinal, (reads, written) in sorted(self._accesses.items()):
            known = self._verdicts.get(ordinal)
            cause = min((causes[storage] for storage in reads if storage in causes), default=None)
            if known is not None and known.verdict == "mismatched":
                self._verdicts[ordinal] = replace(known, cause=cause)
                causes |= dict.fromkeys(written, ordinal if cause is None else cause)
            elif cause is not None and not compared:
                causes |= dict.fromkeys(written, cause)
            else:
                for storage in written - reads:
                    causes.pop(storage, None)


def _cause(error: ReplayFailed) -> str:
    cause = error.__cause__
    return f"{type(cause).__name__}: {first_line(cause)}" if cause is not None else str(error)
