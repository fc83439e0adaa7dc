"""Exports a few ops of a capture as one Python file that needs only torch: to read, to run, to change.

The inputs are synthesized from a seed, or taken from a verified replay and written to a safetensors file beside the
script. In the latter case the script also has hashes of the ops' results, and reports whether they are reproduced.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from replayfmt.errors import CaptureFailed, ReplayMismatch, ReplayRefused, UsageError
from replayfmt.format.codes import KernelKind
from replayfmt.format.container.output import check_place, remove_unfinished
from replayfmt.format.model import Record, TensorValue
from replayfmt.format.reader import CaptureReader
from replayfmt.format.slots import SlotLayout
from replayfmt.pytorch.schemas import parse_schema
from replayfmt.pytorch.settings import read_settings
from replayfmt.pytorch.tensors.memory import row_major_bytes
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.effects import effects_of_schema
from replayfmt.replay.planning.resolve import resolve as resolve_kernel
from replayfmt.replay.verify.run_twice import RunTwice

from ..copying import Copier, nested_values
from ..materializing import Materializer
from ..producers import givers, with_producers
from ..safetensors import Array, write_safetensors
from ..schedule import Planner, Schedule
from ..selection import Kept, Wanted, resolve
from ..stripping import Absent
from ..trimming import Prediction, Verify, predict, refuse_incomplete, refuse_unsupported, rename
from ..writing import Writing
from .content import Made, made_inputs
from .events import ScriptEvents
from .file import FRAME, ScriptFile
from .text import BodyWriter, Changes, ScriptBody
from .triton_sections import TritonSections
from .values import ALWAYS_STATED

MOST_OPS = 2000  # per script; a longer one is unreadable


@dataclass(frozen=True)
class ScriptResult:
    """What was written. `verified` is empty if nothing was replayed."""

    path: str
    ops: int
    inputs: int
    data_path: str | None
    data_bytes: int
    verified: str = ""


def synthesized_script(
    reader: CaptureReader,
    out: str,
    wanted: Wanted,
    *,
    force: bool = False,
    allow_incomplete: bool = False,
    allow_code: bool = False,
    on_prediction: Callable[[Prediction], None] = lambda prediction: None,
) -> ScriptResult:
    """Write a script that synthesizes its inputs. `allow_code` lets it have the source of Triton kernels, which
    runs with it. Raises UsageError, OutputExists, ReplayRefused for ops that a script cannot express."""
    refuse_incomplete(reader, allow_incomplete)
    with _outputs(reader, force, out) as (partial,):
        kept = _resolved(reader, wanted)
        schedule = Planner(reader, kept, None).plan()
        on_prediction(predict(reader, kept, schedule, content=False))
        events = ScriptEvents(reader)
        Writing(cast(Copier, events), schedule, kept, Absent(reader), annotate=False).finish()
        made = made_inputs(reader, kept, schedule)
        _write(partial, out, events, schedule, kept, wanted, None, {}, numbers=False, code=allow_code, made=made)
        return ScriptResult(out, kept.ops, len(events.inputs), None, 0)


def script_with_data(
    plan: Plan,
    out: str,
    data: str,
    wanted: Wanted,
    *,
    verify: Verify = "auto",
    force: bool = False,
    on_prediction: Callable[[Prediction], None] = lambda prediction: None,
) -> ScriptResult:
    """Write a script and its inputs from a verified replay. Raises what `trim_capture` raises, and ReplayRefused for
    ops that a script cannot express."""
    reader = plan.reader
    with _outputs(reader, force, out, data) as (partial, partial_data):
        while True:  # each time more results with bytes that no replay reproduces are known
            kept = with_producers(reader, _resolved(reader, wanted), plan.opaque_slots(), plan.writes)
            schedule = Planner(reader, kept, plan.writes).plan()
            on_prediction(predict(reader, kept, schedule))
            refuse_unsupported(reader, kept, schedule)
            events = ScriptEvents(reader)
            watcher = _Hashing(plan, cast(Copier, events), schedule, kept, digests=False, references=False)
            twice = RunTwice(plan.generators, givers(reader, schedule, kept.stop, plan.writes))
            verification, divergence = plan.watch(watcher, kept.stop, verify, twice=twice)
            if not plan.learn(twice) and (divergence is None or not plan.explain(divergence.seen_at + 1, verify)):
                break
        if divergence is not None:
            raise ReplayMismatch(f"{reader.path}: its replay differs from the capture: {divergence}")
        watcher.finish()
        arrays = _write(
            partial,
            out,
            events,
            schedule,
            kept,
            wanted,
            data,
            watcher.hashes,
            numbers=not plan.synthesis.reason,
            code=True,  # else the plan has refused the kernels that need it
        )
        write_safetensors(partial_data, arrays)
        return ScriptResult(
            out, kept.ops, len(events.inputs), data, sum(len(each.data) for each in arrays), verification.text
        )


class _Hashing(Materializer):
    """Also keeps a hash of every reproducible result, by ordinal and slot."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.hashes: dict[tuple[int, int], str] = {}

    def after(self, ordinal: int, results: dict[int, torch.Tensor], args: dict[int, torch.Tensor]) -> None:
        super().after(ordinal, results, args)
        assert self._record is not None
        written = self._written(self._record, self._kernel_of(self._record))
        outputs = {slot: tensor for slot, tensor in args.items() if slot in written}
        for slot, tensor in {**outputs, **results}.items():
            if self.is_reproducible(slot, tensor):
                self.hashes[ordinal, slot] = _hash(tensor)


def _hash(tensor: torch.Tensor) -> str:
    """The hash that the script also computes: SHA-256 of a tensor's elements in row-major order."""
    return hashlib.sha256(row_major_bytes(tensor)).hexdigest()


def _resolved(reader: CaptureReader, wanted: Wanted) -> Kept:
    kept = resolve(reader, wanted)
    if kept.ops > MOST_OPS:
        raise UsageError(
            f"{wanted.text}: {kept.ops} ops are too many for a script, {MOST_OPS} are the most; select "
            "fewer, or write a capture"
        )
    return kept


def _changes(reader: CaptureReader) -> Changes:
    """The arguments whose metadata an op changes in place, and those that it writes."""

    def changes(record: Record) -> tuple[set[int], set[int]]:
        kernel = reader.kernels[record.signature.kernel]
        assert kernel is not None
        if kernel.kind is not KernelKind.operator:
            try:
                schema = parse_schema(kernel.schema)
            except (RuntimeError, ValueError) as error:
                reason = str(error).strip().partition("\n")[0]
                raise ReplayRefused(f"{reader.path}: {kernel.qualified_name}: its schema: {reason}") from None
            written = effects_of_schema(SlotLayout(record.signature), schema, False, complete=True)
            return set(), set(written.writes)
        resolved = resolve_kernel(kernel, reader.session.torch_version)
        if isinstance(resolved, str):
            raise ReplayRefused(f"{reader.path}: ordinal {record.ordinal}: {resolved}")
        effects = resolved.effects(SlotLayout(record.signature))
        ids = [each.id for each in nested_values((*record.args, *record.results)) if isinstance(each, TensorValue)]
        changed = {slot for slot, result in effects.rebinds if ids[slot] != ids[result]} | set(effects.reshapes)
        return changed, set(effects.writes)

    return changes


def _settings(schedule: Schedule) -> dict[str, Any]:
    """The settings that differ from a new process's, as far as known, and some that are always listed."""
    here = read_settings()
    return {
        name: value
        for name, value in schedule.settings.items()
        if not name.startswith("autocast.") and (name in ALWAYS_STATED or here.get(name) != value)
    }


def _write(
    partial: str,
    out: str,
    events: ScriptEvents,
    schedule: Schedule,
    kept: Kept,
    wanted: Wanted,
    data: str | None,
    hashes: dict[tuple[int, int], str],
    *,
    numbers: bool,
    code: bool,
    made: dict[int, Made] | None = None,
) -> list[Array]:
    """Write the script; returns the contents of its data file. `made`: see ScriptFile."""
    triton = TritonSections(events.reader, code, FRAME)
    body: ScriptBody = BodyWriter(events, _changes(events.reader), triton).write()
    if data is None:  # the generator's state is unknown, so it is seeded
        body.generators.update(
            number for number, each in enumerate(events.reader.generators) if each is not None and each.default
        )
    beside = None if data is None else os.path.relpath(data, os.path.dirname(os.path.abspath(out)))
    file = ScriptFile(events, body, _settings(schedule), hashes, numbers=numbers, triton=triton, made=made or {})
    arrays = file.arrays() if data is not None else []
    Path(partial).write_text(file.text(wanted, kept, beside), encoding="utf-8")
    return arrays


@contextmanager
def _outputs(reader: CaptureReader, force: bool, *paths: str) -> Iterator[list[str]]:
    """`.partial` names for new files, which are renamed once everything inside has succeeded."""
    if len({os.path.realpath(path) for path in (*paths, reader.path)}) <= len(paths):
        raise UsageError(f"{', '.join(paths)}: the capture, the script and its data must be different files")
    for path in paths:
        check_place(path, force)
    partials = [f"{path}.partial" for path in paths]
    with ExitStack() as stack:
        for partial in partials:
            stack.callback(remove_unfinished, partial)
        try:
            yield partials
        except OSError as error:
            raise CaptureFailed(f"{error.filename or paths[0]}: cannot be written: {error.strerror}") from error
        for partial, path in zip(partials, paths, strict=True):
            rename(partial, path)
