"""Records what a replay computes as a capture of its own: the same records, with the replay's digests and scalars.

It says which PyTorch, devices and settings computed them, so a comparison with the original, or with what another
machine recorded of it, needs no alignment: the n-th op of one is the n-th op of the other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from typing import Any, Literal, Unpack

import torch

from replayfmt.dump.selection import OpSelection, resolve_selection
from replayfmt.format.codes import RecordKind, StorageOrigin, ValueKind
from replayfmt.format.model import (
    OPAQUE_RESULTS,
    RECORDED_FROM,
    CaptureInfo,
    Device,
    Node,
    Record,
    TensorDigest,
    TensorValue,
    Value,
)
from replayfmt.format.validation import choice_of, flag_of
from replayfmt.pytorch.environment import describe_device, replayed_settings, session_fields
from replayfmt.pytorch.tensors.digests import digest_tensor
from replayfmt.replay.plan import Plan
from replayfmt.replay.preparation import PlanOptions

from .copying import Copier
from .materializing import Materializer, add_digest
from .schedule import EnterContent, Planner
from .trimming import Contents, Copying, TrimResult, outputs, refuse_incomplete, writer_of
from .writing import EnteringContent

RecordedDigests = Literal["captured", "ops"]
RECORDED_DIGESTS: tuple[RecordedDigests, ...] = ("captured", "ops")
_OF_THE_PROGRAM = ("argv", "working_directory", "rank", "world_size")
_BEFORE_DIGEST = {RecordKind.digest: 3, RecordKind.host_read: 2}  # arguments
_SCALARS = (ValueKind.bool, ValueKind.int, ValueKind.float, ValueKind.complex, ValueKind.string, ValueKind.none)


def record_replay(
    path: str | PathLike[str],
    out: str | PathLike[str],
    *,
    digests: RecordedDigests = "captured",
    force: bool = False,
    **options: Unpack[PlanOptions],
) -> TrimResult:
    """Replay a capture, and write what it computes as the capture `out`, as `opreplay-run --record` does. With
    `digests="ops"` it has digests of the results of every op, otherwise of what the capture has. `options` are those
    of Plan. Nothing is verified: `replayfmt.compare(path, out)` says what differs.

    Raises ReplayMismatch if a result has another shape than the captured one, OutputExists, and what a replay raises.
    """
    with Plan(path, **options) as plan:
        return record_plan(plan, os.fspath(out), digests=digests, force=force)


def record_plan(
    plan: Plan,
    out: str,
    *,
    digests: RecordedDigests = "captured",
    force: bool = False,
    content: bool = True,
    on_progress: Callable[[int], None] | None = None,
) -> TrimResult:
    """The same for a plan that is ready; without `content` for a comparison alone."""
    choice_of("digests", digests, RECORDED_DIGESTS)
    force = flag_of("force", force)
    reader = plan.reader
    refuse_incomplete(reader, plan.options.allow_incomplete)
    with outputs(reader, force, out) as (partial,):
        kept = resolve_selection(reader, OpSelection())
        schedule = Planner(reader, kept, None).plan()
        with writer_of(partial, _session(plan, digests), doing="recording") as writer:
            copier = _Elsewhere(plan, writer)
            recording = _Recording(plan, copier, schedule, kept, digests=digests == "ops", content=content)
            plan.watch(recording, reader.record_count, judge=plan.noting(recording), on_progress=on_progress)
            recording.finish()
            writer.close(time.time_ns() - recording.began_ns)
        return TrimResult(
            out, os.path.getsize(partial), copier.count, kept.ops, copier.embedded_bytes, recording.digest_count
        )


def _session(plan: Plan, digests: RecordedDigests) -> CaptureInfo:
    captured = plan.reader.session
    policies = {**captured.policies, RECORDED_FROM: captured.policies.get(RECORDED_FROM, captured.session_id)}
    if digests == "ops":
        policies["digests"] = "ops"
    if plan.preparation.opaque.text:
        policies[OPAQUE_RESULTS] = plan.preparation.opaque.text
    made = CaptureInfo(**session_fields(), settings=replayed_settings(captured.settings), policies=policies)
    return replace(made, **{name: getattr(captured, name) for name in _OF_THE_PROGRAM})


class _Elsewhere(Copier):
    """Copies what ran on the captured devices as what ran on those of the replay."""

    def __init__(self, plan: Plan, writer: Any) -> None:
        self._map = plan.device_map
        super().__init__(plan.reader, writer)

    def device(self, number: int) -> int:
        if number not in self._devices:
            captured, target = self.reader.devices[number], self._map.targets[number]
            here: Device = captured if target is None or target.type == "meta" else describe_device(target)
            self._devices[number] = self.writer.device(here)
        return self._devices[number]

    def placement(self, number: int) -> int:
        placement = self.reader.placements[number]
        if placement is not None and any(self._map.crosses(device) for device, _stream in placement.streams):
            return 0  # that device has no such streams
        return super().placement(number)


class _Records(Copying):
    """Writes the capture's records with what the replay computed."""

    computed: dict[int, TensorDigest]  # by the ordinal of the digest or host_read record

    def record(self, record: Record) -> None:
        before = _BEFORE_DIGEST.get(record.kind)
        if before is None or TensorDigest.from_record(record) is None:
            super().record(record)
            return
        digest = self.computed.pop(record.ordinal, None)
        if digest is None:
            return  # no replay reproduces it
        args: list[Value] = list(record.args[:before])
        if record.kind is RecordKind.digest and isinstance(args[1], int) and args[1] >= 0:
            args[1] = self.ops[args[1]]
        add_digest(self.copier, record, record.kind, args, digest)


class _Recording(Materializer):
    """Writes each op once its results are known, which is when the next one begins."""

    def __init__(self, plan: Plan, copier: Copier, schedule: Any, kept: Any, *, digests: bool, content: bool) -> None:
        super().__init__(plan, copier, schedule, kept, digests=digests)
        self._keeps_content = content
        self._contents = Contents(copier, None)
        self._writing: _Records = _Records(copier, schedule, kept, self, annotate=False)
        self.computed: dict[int, TensorDigest] = {}
        self._writing.computed = self.computed
        self._scalars: list[Any] = []  # that the op at hand returned, in order
        self._digested: list[tuple[TensorValue, int, TensorDigest]] = []
        self.began_ns = time.time_ns()
        self._op_began_ns = 0
        self._op_took_ns: int | None = None

    def before(self, ordinal: int, storages: dict[int, torch.UntypedStorage]) -> None:
        self._settle()
        self._writing.up_to(ordinal)
        for number, storage in storages.items():
            self._defined.measure(number, storage.nbytes())
        self._record = record = self._writing.begin()
        self._bear(record, self._writing.bears(record))
        self._op_began_ns, self._op_took_ns = time.time_ns(), None

    def after(self, ordinal: int, results: dict[int, torch.Tensor], args: dict[int, torch.Tensor]) -> None:
        self._op_took_ns = time.time_ns() - self._op_began_ns
        super().after(ordinal, results, args)

    def scalar(self, ordinal: int, value: Any) -> None:
        self._scalars.append(value)

    def digest(self, found_at: int, tensor: torch.Tensor, host_read: bool) -> None:
        self.computed[found_at] = digest_tensor(tensor)

    def finish(self) -> None:
        self._settle()
        super().finish()

    def enter(self, action: EnterContent) -> EnteringContent:
        if self._keeps_content:
            content = self._contents.enter(action)
        else:
            content = EnteringContent(
                StorageOrigin.absent if action.length else StorageOrigin.uninitialized, 0, action.length
            )
        self._defined.entered(action.storage, content.length)
        return content

    def _settle(self) -> None:
        """Write the op that ran last."""
        record = self._record
        if record is None:
            return
        if self._scalars:
            record = _with_scalars(record, self._scalars)
            self._scalars.clear()
        start = self._op_began_ns - self.began_ns
        record = replace(record, start_ns=start, duration_ns=self._op_took_ns, device_duration_ns=None)
        self._writing.record(record)
        for value, result, digest in self._digested:
            super()._write_digest(record, value, result, digest)
        self._digested.clear()
        self._record = None

    def _write_digest(self, record: Record, value: TensorValue, result: int, digest: TensorDigest) -> None:
        self._digested.append((value, result, digest))


def _with_scalars(record: Record, scalars: list[Any]) -> Record:
    """An op's record with other scalars among its results, in order."""
    waiting = iter(scalars)

    def of(node: Node, value: Value) -> tuple[Node, Value]:
        if node.kind in (ValueKind.list, ValueKind.tuple):
            assert isinstance(value, list | tuple)
            pairs = [of(child, each) for child, each in zip(node.children, value, strict=True)]
            return replace(node, children=tuple(child for child, _each in pairs)), type(value)(e for _child, e in pairs)
        if node.kind not in _SCALARS or node.kind is ValueKind.none:
            return node, value
        got = next(waiting, value)
        if isinstance(got, complex):
            return Node(ValueKind.complex, node.name), got
        return (Node.scalar(node.name, got), got) if isinstance(got, bool | int | float | str) else (node, value)

    pairs = [of(node, value) for node, value in zip(record.signature.results, record.results, strict=True)]
    results = tuple(node for node, _value in pairs)
    if results == record.signature.results:
        return replace(record, results=tuple(value for _node, value in pairs))
    signature = replace(record.signature, results=results)
    return replace(record, signature=signature, signature_id=0, results=tuple(value for _node, value in pairs))
