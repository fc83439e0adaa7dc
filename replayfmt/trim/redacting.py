"""Rewrites a whole capture with less in it: redacted, or without its floating-point content. Nothing is replayed.

Content is the capture's own, so it is either copied exactly or replaced by a recipe. Redaction needs no torch;
computing the statistics of a recipe does.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from replayfmt.errors import InvalidCapture
from replayfmt.format.codes import DType, RecordKind, StorageOrigin
from replayfmt.format.kept_attachments import WITHOUT_SOURCES
from replayfmt.format.model import GeneratorValue, PayloadValue, RangeValue, Recipe, RecipeValue, Record
from replayfmt.format.reader import CaptureReader
from replayfmt.format.redaction import Redaction

from .copying import Copier, notes_on_code
from .schedule import Enter, Planner
from .selection import Wanted, resolve
from .trimming import TrimResult, output, refuse_incomplete, writer_of
from .writing import EnteringContent, Writing

_FLOATS = ("float", "bfloat", "complex")


def copy_capture(
    reader: CaptureReader,
    out: str,
    *,
    redact: bool,
    integers_only: bool,
    sources: bool = True,
    force: bool = False,
    allow_incomplete: bool = False,
    words: tuple[str, ...] = (),
) -> TrimResult:
    """Rewrite the capture: with `redact` without host name, user, command line and directories, and with `words`,
    further names, removed from texts; with `integers_only` without floating-point content, of which only statistics
    remain, and without anything to verify a replay with; without `sources` without the sources of kernels that are no
    operators.

    Raises UsageError, OutputExists, ReplayRefused for an incomplete capture that is not allowed, and the errors of
    reading and writing.
    """
    refuse_incomplete(reader, allow_incomplete)
    with output(reader, out, force) as partial:
        kept = resolve(reader, Wanted())
        schedule = Planner(reader, kept, None).plan()
        redaction = Redaction(reader.session, words) if redact else None
        session = replace(
            reader.session if redaction is None else redaction.session,
            session_id=str(uuid.uuid4()),
            settings=schedule.settings if redaction is None else redaction.values(schedule.settings),
        )
        if integers_only:
            session = replace(session, policies={**session.policies, "payload": "integers", "digests": "none"})
        if not sources:
            session = replace(session, policies={**session.policies, **WITHOUT_SOURCES})
        with writer_of(partial, session) as writer:
            copier = Copier(reader, writer, redaction, sources=sources)
            contents = _Contents(copier, _UsedDtypes(reader) if integers_only else None)
            _Copying(copier, schedule, kept, contents, annotate=False, values=not integers_only).finish()
            writer.close(reader.summary.ended_ns or 0)
        result = TrimResult(out, os.path.getsize(partial), copier.count, kept.ops, copier.embedded_bytes)
    if redaction is not None:
        result.notes += _lost_strings(reader, redaction)
    result.notes += notes_on_code(copier, redacted=redaction is not None)
    return result


def _lost_strings(reader: CaptureReader, redaction: Redaction) -> list[str]:
    """Reasons why a replay of the redacted capture will be refused."""
    lost = sum(
        signature is not None and signature.kind is RecordKind.op and redaction.signature(signature) != signature
        for signature in reader.signatures
    )
    said = f"{lost} signatures of ops lose a string that identified the machine: a strict replay refuses them"
    return [said] if lost else []


class _UsedDtypes:
    """How ops use storages: the dtype of the first use, and whether any use is not floating-point."""

    def __init__(self, reader: CaptureReader) -> None:
        self.first: dict[int, DType] = {}
        self.other: set[int] = set()
        dtypes = [None if meta is None else meta.dtype for meta in reader.metas]
        is_op = [signature is not None and signature.kind is RecordKind.op for signature in reader.signatures]
        for index in range(len(reader.record_frames)):
            frame = reader.frame(index)
            storages = frame.tensor_storage[frame.tensor_slots].tolist()
            metas, first = frame.tensor_meta[frame.tensor_slots].tolist(), frame.tensor_first.tolist()
            for row, signature in enumerate(frame.signature.tolist()):
                if not is_op[signature]:
                    continue
                for slot in range(first[row], first[row + 1]):
                    dtype = dtypes[metas[slot]]
                    assert dtype is not None
                    self.first.setdefault(storages[slot], dtype)
                    if not dtype.name.startswith(_FLOATS):
                        self.other.add(storages[slot])

    def synthesized(self, storage: int) -> DType | None:
        """The dtype of a storage whose content is left out; None if its content is kept."""
        return None if storage in self.other else self.first.get(storage)


class _Copying(Writing):
    """Writes the states of random generators as the capture has them."""

    def record(self, record: Record) -> None:
        if record.kind is not RecordKind.generator_state:
            super().record(record)
            return
        generator, state = record.args
        assert isinstance(generator, GeneratorValue)
        content = bytes(self.copier.reader.payload(state.id)) if isinstance(state, PayloadValue) else None
        self.generator_state(record, generator.id, content)


class _Contents:
    """The capture's content; with `used_dtypes`, recipes replace floating-point content."""

    def __init__(self, copier: Copier, used_dtypes: _UsedDtypes | None) -> None:
        self._copier, self._reader, self._used_dtypes = copier, copier.reader, used_dtypes
        self._recipes = 0

    def enter(self, action: Enter) -> EnteringContent:
        source, reader = action.source, self._reader
        dtype = None if self._used_dtypes is None else self._used_dtypes.synthesized(action.storage)
        if isinstance(source, PayloadValue):
            length = reader.payload_info(source.id).raw_bytes
            return self._payload(length, dtype, lambda: reader.payload(source.id))
        if isinstance(source, RangeValue):
            given = reader.file_ranges[source.id]
            embedded = self._embedded(source.id)
            if dtype is not None and embedded is not None:
                return self._payload(given.bytes, dtype, embedded)
            return EnteringContent(StorageOrigin.external_file, self._copier.range(source.id), given.bytes)
        if isinstance(source, RecipeValue):
            return EnteringContent(StorageOrigin.initializer, self._copier.recipe(source.id), action.length)
        origin = StorageOrigin.absent if action.absent and action.length else StorageOrigin.uninitialized
        if action.length and origin is StorageOrigin.uninitialized and not self._is_meta(action.storage):
            raise InvalidCapture(f"{reader.path}: storage {action.storage} is used, and nothing says what it holds")
        return EnteringContent(origin, 0, action.length)

    def _payload(self, length: int, dtype: DType | None, read: Callable[[], Any]) -> EnteringContent:
        if dtype is None or not length:
            return EnteringContent(StorageOrigin.payload, self._copier.content(read()), length)
        self._recipes += 1
        recipe = _recipe(memoryview(read()), dtype, self._recipes)
        return EnteringContent(StorageOrigin.initializer, self._copier.writer.recipe(recipe), length)

    def _embedded(self, number: int) -> Callable[[], memoryview] | None:
        """How to read a range that the capture itself contains; None if only the file has it."""
        given = self._reader.file_ranges[number]
        if given.payload:
            return lambda: memoryview(self._reader.payload(given.payload))
        whole = self._reader.files[given.file].payload
        if not whole:
            return None
        return lambda: memoryview(self._reader.payload(whole))[given.offset : given.offset + given.bytes]

    def _is_meta(self, storage: int) -> bool:
        return self._reader.devices[self._reader.storage(storage).device].kind == "meta"


def _recipe(content: memoryview, dtype: DType, number: int) -> Recipe:
    import torch

    from replayfmt.pytorch.tensors.dtypes import TORCH_DTYPE
    from replayfmt.pytorch.tensors.memory import fill_storage, new_storage
    from replayfmt.recording.storages.recipes import recipe

    if dtype not in TORCH_DTYPE:
        raise InvalidCapture(f"this torch has no dtype {dtype.name}, of which a storage's statistics are to be taken")
    storage = new_storage(len(content), torch.device("cpu"))
    fill_storage(storage, content)
    return recipe(storage, TORCH_DTYPE[dtype], number)
