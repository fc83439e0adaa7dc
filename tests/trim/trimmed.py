"""Trims a capture in process, and compares every kept op with what it was in the original."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from replayfmt.dump.selection import OpSelection
from replayfmt.format.codes import ITEM_BYTES, RecordKind, StorageOrigin
from replayfmt.format.maintenance import check_capture
from replayfmt.format.model import CompositeValue, Record, TensorDigest, TensorValue, Value
from replayfmt.format.reader import CaptureReader, open_capture
from replayfmt.pytorch.tensors.digests import digest_tensor
from replayfmt.pytorch.tensors.memory import storage_bytes
from replayfmt.replay.plan import Plan
from replayfmt.trim.trimming import Prediction, TrimResult, checked_here, trim_capture


def trim(path: Path, out: Path, *, verify: str = "auto", force: bool = False, **wanted: str) -> TrimResult:
    """What the tool does; what it predicts holds."""
    predictions: list[Prediction] = []
    with Plan(path, keep_going=True) as plan:
        result = trim_capture(
            plan,
            str(out),
            OpSelection(**wanted),
            checked_here(Plan),
            verify=verify,  # type: ignore[arg-type]
            force=force,
            on_prediction=predictions.append,
        )
    assert result.embedded_bytes <= predictions[-1].embedded_bytes
    assert result.ops == predictions[-1].ops
    return result


class Taken(NamedTuple):
    """What one storage held when an op took it."""

    storage: int
    origin: StorageOrigin
    content: bytes


class Inputs:
    """A watcher that keeps the bytes of every storage that any op takes, with the storage's origin."""

    def __init__(self, reader: CaptureReader) -> None:
        self._reader = reader
        self.seen: dict[int, list[Taken]] = {}

    def watches(self, ordinal: int) -> bool:
        return True

    def before(self, ordinal: int, storages: dict[int, torch.UntypedStorage]) -> None:
        self.seen[ordinal] = [
            Taken(number, self._reader.storage(number).origin, bytes(storage_bytes(storage)))
            for number, storage in storages.items()
        ]

    def after(self, ordinal: int, results: dict[int, torch.Tensor], args: dict[int, torch.Tensor]) -> None:
        pass


def inputs(path: Path) -> dict[int, list[Taken]]:
    """The bytes of every op's input storages in a replay."""
    with Plan(path, keep_going=True) as plan:
        watcher = Inputs(plan.reader)
        plan.watch(watcher, plan.reader.record_count, "none")
    return watcher.seen


def ops(reader: CaptureReader) -> list[Record]:
    """The op records of a capture."""
    return [record for record in reader.records() if record.kind is RecordKind.op]


def shape_of(value: Value) -> Any:
    """A value without the ids that trimming gives anew."""
    if isinstance(value, TensorValue):
        return value.offset, value.meta
    if isinstance(value, list | tuple):
        return [shape_of(each) for each in value]
    if isinstance(value, CompositeValue):
        return value.form, [shape_of(each) for each in value.parts]
    return repr(value) if isinstance(value, bool | int | float | complex | str | None) else type(value).__name__


def replaced(record: Record, kernel: str, given: list[Taken]) -> set[int]:
    """The storages whose content an op replaces, all of it and unread. It does not matter what they held."""
    if kernel not in ("aten::copy_", "aten::fill_", "aten::normal_"):
        return set()
    target = record.argument("self")
    (length,) = (len(each.content) for each in given if each.storage == target.storage)
    others = [value for value in record.args if isinstance(value, TensorValue) and value is not target]
    whole = math.prod(target.meta.sizes) * ITEM_BYTES[target.meta.dtype] == length  # none here overlaps itself
    return {target.storage} if whole and all(each.storage != target.storage for each in others) else set()


def compare(original: Path, trimmed: Path, *, content: bool = True) -> int:
    """Assert that the trimmed capture verifies bit for bit, and that each of its ops has the arguments and the input
    bytes that it had in the original. Returns how many ops there are."""
    check_capture(str(trimmed))
    with Plan(trimmed) as plan:
        for verify in ("auto" if plan.verification("auto").mode == "none" else "bitwise", "none"):
            result = plan.execute(verify=verify)  # type: ignore[arg-type]
            assert result.outcome == "ok", str(result.divergence)
    before, after = (inputs(original), inputs(trimmed)) if content else ({}, {})
    with open_capture(original) as one, open_capture(trimmed) as other:
        kept = ops(other)
        for record in kept:
            assert record.annotation is not None
            source = one.record(record.annotation["captured_ordinal"])
            assert one.kernels[source.signature.kernel] == other.kernels[record.signature.kernel]
            assert [node.name for node in source.signature.args] == [node.name for node in record.signature.args]
            assert shape_of((*source.args, *source.results)) == shape_of((*record.args, *record.results))
            assert one.scope_path(source.scope) == other.scope_path(record.scope)
            assert (source.thread, source.duration_ns) == (record.thread, record.duration_ns)
            # Within a frame no record begins before the one ahead of it, and frames are cut elsewhere.
            assert source.start_ns <= record.start_ns
            if content:
                had, has = before[source.ordinal], after[record.ordinal]
                unread = replaced(source, one.kernels[source.signature.kernel].name, had)
                for first, second in zip(had, has, strict=True):
                    if first.origin is StorageOrigin.uninitialized:
                        continue
                    may_be = {first.content, bytes(len(first.content))} if first.storage in unread else {first.content}
                    assert second.content in may_be, (source.ordinal, record.ordinal)
    return len(kept)


def digest_hexes(path: Path) -> dict[int, list[str]]:
    """The digests that a capture holds of ops' results, by the op's ordinal."""
    found: dict[int, list[str]] = {}
    with open_capture(path) as reader:
        for record in reader.records():
            if record.kind is RecordKind.digest:
                digest = TensorDigest.from_record(record)
                assert digest is not None
                found.setdefault(int(record.argument("of")), []).append(digest.hex)  # type: ignore[arg-type]
    return found


def hex_of(tensor: torch.Tensor) -> str:
    """The digest of a tensor's elements."""
    return digest_tensor(tensor).hex
