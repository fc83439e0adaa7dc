"""A replay that keeps going: what became of every op, one by one.

An op is refused if it cannot be run here, or reads content that is not in the capture; failed if it raised; mismatched
if its results are not the captured ones; skipped if it needs what such an op would have returned. What an op that did
not succeed would have written is not trusted from there on, until content is imported again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch

from replayfmt.errors import ReplayFailed
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch.tensors.bounds import require_inside

from ..planning.sources import ContentSource, source_of
from ..results import OpVerdict, Verdict
from ..verify.comparison import Judge, StopReplay
from .execute import Machine, OnScope, RunClock
from .isolated import IsolatedOp
from .steps import Step, Touched

_CHECKS = (RecordKind.digest, RecordKind.host_read)


class KeepGoing:
    """Runs steps and judges each op. `refused` has the reason for op signatures that cannot be run here; `on_op` is
    given each op before it runs, with its inputs, to run it apart as often as it likes."""

    def __init__(
        self,
        reader: CaptureReader,
        machine: Machine,
        clock: RunClock,
        judge: Judge,
        refused: Mapping[int, str],
        on_op: Callable[[IsolatedOp], None] | None = None,
    ) -> None:
        self._reader = reader
        self._machine = machine
        self._clock = clock
        self._judge = judge
        self._refused = refused
        self._on_op = on_op
        self._spoiled: dict[int, int] = {}  # storage → ordinal of the op that should have written it
        self._absent: dict[int, str] = {}  # storages whose content is missing, with the reason
        self._writer: dict[int, int] = {}  # storage → ordinal of the op that wrote it last
        self._verdicts: dict[int, OpVerdict] = {}
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

    @property
    def verdicts(self) -> tuple[OpVerdict, ...]:
        """Every op's verdict, in order."""
        return tuple(self._verdicts[ordinal] for ordinal in sorted(self._verdicts))

    def verdict(self, ordinal: int) -> OpVerdict:
        """The verdict on one op that was run."""
        return self._verdicts[ordinal]

    # ---------------------------------------------------------------------------------------------------------- steps

    def _prepare(self, step: Step) -> None:
        self._machine.prepare(step.window)
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

    def _op(self, step: Step, touched: Touched, on_scope: OnScope | None) -> None:
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
        name, _scope = self._machine.describe(step.ordinal)
        self._verdicts[step.ordinal] = OpVerdict(step.ordinal, name, verdict, reason)
        spoiled = touched.writes | (touched.results - touched.reads)
        for storage in spoiled:
            if verdict == "ok":
                self._writer[storage] = step.ordinal
            else:
                self._spoiled.setdefault(storage, step.ordinal)

    def _obstacle(self, step: Step, touched: Touched) -> tuple[Verdict, str]:
        """Why an op cannot be run, if it cannot."""
        reason = self._refused.get(touched.signature)
        if reason is not None:
            return "refused", reason
        for storage in sorted(touched.reads):
            if storage in self._spoiled:
                return "skipped", f"it needs a result that ordinal {self._spoiled[storage]} did not produce"
            if storage in self._absent:
                return "refused", self._absent[storage]
        if any(key not in self._machine.values for key in step.window.inputs):
            return "skipped", "it needs a tensor that an earlier op did not produce"
        return "ok", ""

    def _call(self, step: Step, on_scope: OnScope | None) -> None:
        inputs = self._machine.take(step.window)
        usable = all(isinstance(value, torch.Tensor | torch.UntypedStorage) for value in inputs)
        if self._on_op is not None and step.op is not None and usable:  # else the call itself says what is wrong
            self._on_op(IsolatedOp(step, step.op, inputs))
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
        name, _scope = self._machine.describe(step.ordinal)
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


def _cause(error: ReplayFailed) -> str:
    cause = error.__cause__
    return f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}" if cause is not None else str(error)
