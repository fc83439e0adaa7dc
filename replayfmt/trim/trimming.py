"""Makes a smaller capture of another: cut out and verified, stripped, or rewritten as a whole with less in it.

A result gets its final name only when it is verified. A whole capture that is redacted, or loses its floating-point
content, is copied without a replay.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from replayfmt.dump.selection import KeptRecords, OpSelection, resolve_selection
from replayfmt.errors import CaptureFailed, InvalidCapture, OutputExists, ReplayMismatch, ReplayRefused, UsageError
from replayfmt.format.codes import DType, RecordKind, StorageOrigin
from replayfmt.format.external_files import FileRemaps
from replayfmt.format.model import (
    OPAQUE_RESULTS,
    TRIMMED_ELSEWHERE,
    TRIMMED_FROM,
    TRIMMED_SELECTION,
    TRIMMED_SYNTHESIZED,
    TRIMMED_VERIFIED,
    CaptureInfo,
    GeneratorValue,
    PayloadValue,
    RangeValue,
    Recipe,
    RecipeValue,
    Record,
)
from replayfmt.format.output import check_place, remove_unfinished, same_file
from replayfmt.format.reader import CaptureReader
from replayfmt.format.redaction import WITHOUT_SOURCES, Redaction
from replayfmt.format.writer import CaptureWriter

from .copying import Copier, notes_on_code
from .schedule import EnterContent, Planner, Schedule, givers, with_producers
from .writing import POLICIES, EnteringContent, Writing, is_meta, write_stripped

if TYPE_CHECKING:
    from replayfmt.replay.plan import Plan


Verify = Literal["auto", "bitwise", "close", "none"]


@dataclass(frozen=True)
class Prediction:
    """What a trimmed capture will contain, known before anything runs. Numbers of bytes of content are upper bounds."""

    ops: int
    of_ops: int
    storages: int
    embedded_bytes: int
    referenced_bytes: int
    synthesized_bytes: int

    @property
    def text(self) -> str:
        """One line for people."""
        parts = [f"{self.embedded_bytes:,} bytes to embed at most"]
        if self.referenced_bytes:
            parts.append(f"{self.referenced_bytes:,} bytes in external files")
        if self.synthesized_bytes:
            parts.append(f"{self.synthesized_bytes:,} bytes synthesized")
        return (
            f"keeps {self.ops:,} of {self.of_ops:,} ops, which need {self.storages:,} "
            f"storage{'' if self.storages == 1 else 's'} from before: {', '.join(parts)}"
        )


@dataclass
class TrimResult:
    """What was written. `verified` says how the original's replay was verified, `checked` how the result's own replay
    was."""

    path: str
    bytes: int
    records: int
    ops: int
    embedded_bytes: int
    digests: int = 0
    verified: str = ""
    checked: str = ""
    notes: list[str] = field(default_factory=list)


def predict(reader: CaptureReader, kept: KeptRecords, schedule: Schedule, *, content: bool = True) -> Prediction:
    embedded: dict[Any, int] = {}
    referenced = synthesized = storages = 0
    for place, action in enumerate(schedule.enters()):
        storages += action.first
        if action.absent or not content:
            continue
        if action.first and isinstance(action.source, RangeValue):
            if reader.embedded_range(action.source.id) is not None:
                embedded["range", action.source.id] = action.length
            else:
                referenced += action.length
        elif action.first and isinstance(action.source, RecipeValue):
            synthesized += action.length
        else:
            same = action.source.id if isinstance(action.source, PayloadValue) else None
            embedded[("payload", same) if same is not None else place] = action.length
    return Prediction(
        kept.ops,
        reader.summary.records.get(RecordKind.op, 0),
        storages,
        sum(embedded.values()),
        referenced,
        synthesized,
    )


def strip_capture(
    reader: CaptureReader,
    out: str,
    wanted: OpSelection,
    *,
    force: bool = False,
    allow_incomplete: bool = False,
    words: tuple[str, ...] = (),
    sources: bool = True,
    on_prediction: Callable[[Prediction], None] = lambda prediction: None,
) -> TrimResult:
    """Write only the metadata of a capture, or of a part of it, without `sources` without the sources of kernels that
    are no operators. `words` are names to remove from texts.

    Raises UsageError, OutputExists, ReplayRefused for an incomplete capture that is not allowed, and the errors of
    reading and writing.
    """
    redaction = Redaction(reader.session, words)
    policies = {} if wanted.everything else redaction.values(_origin(reader.session, wanted))

    def write(copier: Copier, schedule: Schedule, kept: KeptRecords) -> None:
        on_prediction(predict(reader, kept, schedule, content=False))
        write_stripped(copier, schedule, kept, annotate=not wanted.everything)

    refuse_incomplete(reader, allow_incomplete)
    return _rewrite(reader, out, wanted, write, redaction, sources, {**policies, **POLICIES}, force)


def _rewrite(
    reader: CaptureReader,
    out: str,
    wanted: OpSelection,
    write: Callable[[Copier, Schedule, KeptRecords], None],
    redaction: Redaction | None,
    sources: bool,
    policies: dict[str, Any],
    force: bool,
) -> TrimResult:
    """A copy without a replay; with `redaction` of texts, without `sources` of kernels, with more `policies`."""
    with outputs(reader, force, out) as (partial,):
        kept = resolve_selection(reader, wanted)
        schedule = Planner(reader, kept, None).plan()
        session = reader.session if redaction is None else redaction.session
        session = replace(
            session,
            session_id=str(uuid.uuid4()),
            settings=schedule.settings if redaction is None else redaction.values(schedule.settings),
            policies={**session.policies, **policies, **({} if sources else WITHOUT_SOURCES)},
        )
        with writer_of(partial, session) as writer:
            copier = Copier(reader, writer, redaction, sources=sources)
            write(copier, schedule, kept)
            writer.close(reader.summary.ended_ns or 0)
        notes = notes_on_code(copier, redacted=redaction is not None)
        return TrimResult(out, os.path.getsize(partial), copier.count, kept.ops, copier.embedded_bytes, notes=notes)


@dataclass(frozen=True)
class ReplayCheck:
    """The outcome of replaying the new capture: how it was verified; where it `differs` (None if it does not), with
    `details`; `opaque` are results in which it found bytes that no replay reproduces: (operator, overload, index,
    why)."""

    verified: str
    differs: str | None = None
    details: tuple[str, ...] = ()
    opaque: tuple[tuple[str, str, int, str], ...] = ()


Check = Callable[[str, Verify], ReplayCheck]


def checked_here(make: Callable[[str], Plan]) -> Check:
    """Replay the new capture in this process. An op that crashes takes the process with it."""

    def check(path: str, verify: Verify) -> ReplayCheck:
        with make(path) as plan:
            result = plan.execute(verify=verify)
            differs = None if result.divergence is None else str(result.divergence)
            opaque = tuple((*each.op.rsplit(".", 1), each.index, each.why) for each in result.opaque_results)
            return ReplayCheck(result.verification.text, differs, result.nondeterministic, opaque)  # type: ignore[arg-type]

    return check


def trim_capture(
    plan: Plan,
    out: str,
    wanted: OpSelection,
    check: Check,
    *,
    verify: Verify = "auto",
    force: bool = False,
    on_prediction: Callable[[Prediction], None] = lambda prediction: None,
    on_progress: Callable[[int, int], None] | None = None,
) -> TrimResult:
    """Write the part of a capture that `wanted` selects as a capture that replays by itself.

    `plan` is for the whole capture, made with keep_going; `check` replays and verifies the result before it is renamed
    to its final name. Progress is reported as `on_progress(records done, of all)`. Bytes that no replay reproduces are
    not embedded: the ops that produce them are also kept. Ops whose results would be embedded are run twice to find
    such bytes.

    Raises UsageError, OutputExists, ReplayRefused if the earlier part cannot be replayed here, ReplayMismatch if a
    replay differs from the capture, ReplayFailed, and the errors of reading and writing.
    """
    from replayfmt.replay.run.run_twice import RunTwice

    from .materializing import Materializer, overwrites

    reader, preparation, made_up = plan.reader, plan.preparation, plan.synthesis.reason
    with outputs(reader, force, out) as (partial,):
        asked = resolve_selection(reader, wanted)
        while True:  # each time more results with bytes that no replay reproduces are known
            kept = with_producers(reader, asked, preparation.opaque_slots(), preparation.writes)
            schedule = Planner(reader, kept, preparation.writes, lambda number: overwrites(plan, number)).plan()
            on_prediction(predict(reader, kept, schedule))
            refuse_unsupported(reader, kept, schedule)
            verification = plan.verification(verify)
            notes = _notes(schedule)
            if kept.ops > asked.ops:
                notes.append(
                    f"kept besides the {asked.ops} selected ops: {kept.ops - asked.ops}, whose results hold addresses, "
                    f"or memory left unwritten, which cannot be embedded"
                )
            session = _trimmed_session(
                reader.session,
                wanted,
                schedule,
                verification.mode,
                plan.why_not_bitwise() if verification.mode != "bitwise" else [],
                made_up,
                preparation.opaque.text,
            )
            with writer_of(partial, session) as writer:
                copier = Copier(reader, writer)
                watcher = Materializer(
                    plan, copier, schedule, kept, digests=verify != "none" and not made_up, values=not made_up
                )
                twice = RunTwice(plan.generators, givers(reader, schedule, kept.stop, preparation.writes))
                progress = _counted(on_progress, kept.stop)
                verification, divergence = plan.watch(watcher, kept.stop, verify, stand_in=twice, on_progress=progress)
                if not plan.may_be_taken(twice, divergence, verify):
                    writer.discard()
                    continue
                watcher.finish()
                writer.close(reader.summary.ended_ns or 0)
            if checked := _check(plan, partial, out, check, schedule, verify):
                break
        if made_up:
            notes.append(
                f"content that is not in the capture was synthesized, so there is nothing to verify: {made_up}"
            )
        return TrimResult(
            out,
            os.path.getsize(partial),
            copier.count,
            kept.ops,
            copier.embedded_bytes,
            watcher.digest_count,
            verification.text,
            checked,
            notes,
        )


def used_remaps(reader: CaptureReader, remaps: Sequence[str]) -> tuple[str, ...]:
    """The values of --replay-file-remap that match a file of a trimmed capture."""
    paths = [file.path for file in reader.files[1:] if file is not None]
    return tuple(each for each in remaps if any(FileRemaps.parse([each]).apply(path) != path for path in paths))


def _check(plan: Plan, partial: str, out: str, check: Check, schedule: Schedule, verify: Verify) -> str:
    """Replay the new capture; returns how that was verified, "" if the plan learned something from it."""
    if verify == "none":
        return "not replayed: --verify=none"
    if schedule.kept_unsupported is not None:
        return "not replayed: it holds unsupported records"
    checked = check(partial, verify)
    if plan.know_opaque(checked.opaque):
        return ""
    if checked.differs is not None:
        details = [f"ops whose results differ between two runs: {text}" for text in checked.details]
        raise ReplayMismatch(
            "; ".join(
                [
                    f"{out}: was not written: its replay differs from the original's: {checked.differs}",
                    *details,
                    "--verify=none writes it anyway",
                ]
            )
        )
    return checked.verified


def refuse_incomplete(reader: CaptureReader, allowed: bool) -> None:
    """Raise ReplayRefused for a capture that was never closed: its copy would look complete."""
    if not reader.complete and not allowed:
        raise ReplayRefused(
            f"{reader.path}: the capture is incomplete ({reader.incomplete_reason}); "
            "--allow-incomplete takes what is there"
        )


def refuse_unsupported(reader: CaptureReader, kept: KeptRecords, schedule: Schedule) -> None:
    """Raise ReplayRefused if omitted unsupported records precede kept work."""
    if not schedule.unsupported:
        return
    findings = []
    for ordinal in schedule.unsupported:
        texts = [str(value) for value in reader.record(ordinal).args if value]
        findings.append(f"unsupported at ordinal {ordinal}: {': '.join(texts)}")
    raise ReplayRefused(
        f"{reader.path}: the inputs of the ops from ordinal {kept.first} on cannot be computed, because records "
        f"that are left out cannot be replayed; keep them too, or keep only metadata with --payload=none",
        tuple(findings),
    )


def _notes(schedule: Schedule) -> list[str]:
    notes = []
    if schedule.left_comparisons:
        notes.append(
            f"left out: {schedule.left_comparisons} digests and host reads of tensors that no kept op uses or returns"
        )
    if schedule.kept_unsupported is not None:
        notes.append("unsupported records are among those kept: a strict replay will refuse the result")
    return notes


def _origin(session: CaptureInfo, wanted: OpSelection) -> dict[str, Any]:
    """Policies that name the capture from which a trimmed one originates, even after repeated trimming."""
    before = session.policies.get(TRIMMED_SELECTION)
    selection = wanted.text if before is None else f"{before}; {wanted.text}"
    return {TRIMMED_FROM: session.policies.get(TRIMMED_FROM, session.session_id), TRIMMED_SELECTION: selection}


def _trimmed_session(
    session: CaptureInfo,
    wanted: OpSelection,
    schedule: Schedule,
    mode: str,
    differences: list[str],
    made_up: str,
    opaque: str,
) -> CaptureInfo:
    policies = {**session.policies, **_origin(session, wanted), TRIMMED_VERIFIED: mode}
    if made_up:
        policies |= {"digests": "none", TRIMMED_SYNTHESIZED: made_up}
    else:
        policies["digests"] = "ops"
    if opaque:
        policies[OPAQUE_RESULTS] = opaque
    if differences:
        policies[TRIMMED_ELSEWHERE] = "; ".join(differences)
    return replace(session, session_id=str(uuid.uuid4()), settings=schedule.settings, policies=policies)


def _counted(on_progress: Callable[[int, int], None] | None, total: int) -> Callable[[int], None] | None:
    return None if on_progress is None else lambda done: on_progress(done, total)


@contextmanager
def outputs(reader: CaptureReader, force: bool, *paths: str) -> Iterator[list[str]]:
    """`.partial` names for new files, which are renamed once everything inside has succeeded, and removed otherwise."""
    for path in paths:
        if same_file(reader.path, path):
            raise UsageError(f"{path}: is the capture itself; name another file")
    if len(set(map(os.path.realpath, paths))) < len(paths):
        raise UsageError(f"{', '.join(paths)}: must be different files")
    partials = [f"{path}.partial" for path in paths]
    for path, partial in zip(paths, partials, strict=True):
        check_place(path, force)
        if os.path.lexists(partial) and not force:
            raise OutputExists(
                f"{partial}: exists already, from a capture that is still being written or was never "
                "closed; remove it, or use --force"
            )
    try:
        yield partials
        for path, partial in zip(paths, partials, strict=True):
            os.replace(partial, path)
    except OSError as error:
        raise CaptureFailed(
            f"{error.filename2 or error.filename or paths[0]}: cannot be written: {error.strerror}"
        ) from error
    finally:
        for partial in partials:
            remove_unfinished(partial)


@contextmanager
def writer_of(partial: str, session: CaptureInfo, doing: str = "trimming") -> Iterator[CaptureWriter]:
    """A writer whose file is removed if something goes wrong."""
    writer = CaptureWriter(partial, session, force=True, doing=doing)
    try:
        yield writer
    except BaseException as error:
        writer.discard()
        if type(error) is ValueError:  # what was read violates a rule of the format
            raise InvalidCapture(f"what the capture says cannot be written again: {error}") from error
        raise


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
    redaction = Redaction(reader.session, words) if redact else None
    policies = {"payload": "integers", "digests": "none"} if integers_only else {}

    def write(copier: Copier, schedule: Schedule, kept: KeptRecords) -> None:
        contents = Contents(copier, _UsedDtypes(reader) if integers_only else None)
        Copying(copier, schedule, kept, contents, annotate=False, values=not integers_only).finish()

    refuse_incomplete(reader, allow_incomplete)
    result = _rewrite(reader, out, OpSelection(), write, redaction, sources, policies, force)
    if redaction is not None:
        result.notes[:0] = _lost_strings(reader, redaction)
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
                    self.first.setdefault(storages[slot], dtype)
                    if not dtype.name.startswith(_FLOATS):
                        self.other.add(storages[slot])

    def synthesized(self, storage: int) -> DType | None:
        """The dtype of a storage whose content is left out; None if its content is kept."""
        return None if storage in self.other else self.first.get(storage)


class Copying(Writing):
    """Writes the states of random generators as the capture has them."""

    def record(self, record: Record) -> None:
        if record.kind is not RecordKind.generator_state:
            super().record(record)
            return
        generator, state = record.args
        assert isinstance(generator, GeneratorValue)
        content = bytes(self.copier.reader.payload(state.id)) if isinstance(state, PayloadValue) else None
        self.generator_state(record, generator.id, content)


class Contents:
    """The capture's content; with `used_dtypes`, recipes replace floating-point content."""

    def __init__(self, copier: Copier, used_dtypes: _UsedDtypes | None) -> None:
        self._copier, self._reader, self._used_dtypes = copier, copier.reader, used_dtypes
        self._recipes = 0

    def enter(self, action: EnterContent) -> EnteringContent:
        source, reader = action.source, self._reader
        dtype = None if self._used_dtypes is None else self._used_dtypes.synthesized(action.storage)
        if isinstance(source, PayloadValue):
            length = reader.payload_info(source.id).raw_bytes
            return self._payload(length, dtype, (source.id, 0))
        if isinstance(source, RangeValue):
            given = reader.file_ranges[source.id]
            embedded = reader.embedded_range(source.id)
            if dtype is not None and embedded is not None:
                return self._payload(given.bytes, dtype, embedded)
            return EnteringContent(StorageOrigin.external_file, self._copier.range(source.id), given.bytes)
        if isinstance(source, RecipeValue):
            return EnteringContent(StorageOrigin.initializer, self._copier.recipe(source.id), action.length)
        origin = StorageOrigin.absent if action.absent and action.length else StorageOrigin.uninitialized
        if action.length and origin is StorageOrigin.uninitialized and not is_meta(reader, action.storage):
            raise InvalidCapture(f"{reader.path}: storage {action.storage} is used, and nothing says what it holds")
        return EnteringContent(origin, 0, action.length)

    def _payload(self, length: int, dtype: DType | None, place: tuple[int, int]) -> EnteringContent:
        number, start = place
        content = memoryview(self._reader.payload(number))[start : start + length]
        if dtype is None or not length:
            return EnteringContent(StorageOrigin.payload, self._copier.content(content), length)
        self._recipes += 1
        recipe = _recipe(content, dtype, self._recipes)
        return EnteringContent(StorageOrigin.initializer, self._copier.writer.recipe(recipe), length)


def _recipe(content: memoryview, dtype: DType, number: int) -> Recipe:
    import torch

    from replayfmt.pytorch.tensors.memory import TORCH_DTYPE, fill_storage, new_storage
    from replayfmt.recording.content.storage_content import recipe

    if dtype not in TORCH_DTYPE:
        raise InvalidCapture(f"this torch has no dtype {dtype.name}, of which a storage's statistics are to be taken")
    storage = new_storage(len(content), torch.device("cpu"))
    fill_storage(storage, content)
    return recipe(storage, TORCH_DTYPE[dtype], number)
