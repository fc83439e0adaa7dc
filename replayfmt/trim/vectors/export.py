"""Takes test vectors from a verified replay."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayfmt.errors import CaptureFailed, ReplayRefused
from replayfmt.format.codes import OpStatus, RecordKind
from replayfmt.format.model import Record, TensorValue
from replayfmt.format.reader import CaptureReader
from replayfmt.format.signatures.text import signature_text
from replayfmt.format.slots import SlotLayout
from replayfmt.pytorch.tensors.memory import row_major_bytes
from replayfmt.replay.op_values import GiveTensor, tensors_of
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.effects import addresses_of, leaves_unwritten
from replayfmt.replay.planning.kernels import ResolvedKernel
from replayfmt.replay.taking import show_ops
from replayfmt.replay.verify.run_twice import RunTwice

from ..safetensors import write_safetensors
from ..selection import Wanted, resolve
from ..trimming import Verify, refuse_incomplete
from .encoding import VectorEncoder, file_name, problem_of
from .folder import FORMAT, INDEX, new_folder

_VERSION = 1


@dataclass(frozen=True)
class VectorsResult:
    """The numbers of ops and bytes, how the replay was verified, and a sentence for each op that was left out."""

    path: str
    ops: int
    bytes: int
    verified: str
    left_out: tuple[str, ...]


def write_vectors(
    plan: Plan,
    out: str,
    wanted: Wanted,
    *,
    verify: Verify = "auto",
    force: bool = False,
    partial: bool = False,
    allow_incomplete: bool = False,
) -> VectorsResult:
    """Write a safetensors file and a JSON file for each selected op into a new directory, and an index of them.

    `plan` is for the whole capture, made with keep_going. Raises ReplayRefused, listing all of them, for ops that a
    vector cannot express, unless `partial` leaves them out; ReplayMismatch, ReplayFailed, OutputExists, UsageError.
    """
    reader = plan.reader
    refuse_incomplete(reader, allow_incomplete)
    kept = resolve(reader, wanted)
    records = [record for ordinal in kept.ordinals.tolist() if (record := reader.record(ordinal)).kind is RecordKind.op]
    with new_folder(out, force) as folder:
        writers: list[_VectorWriter] = []

        def make() -> _VectorWriter:
            for file in folder.iterdir():  # files of an earlier attempt
                file.unlink()
            problems = {record.ordinal: why for record in records if (why := _problem(plan, record)) is not None}
            _refuse(reader, records, problems, partial)
            writers[:] = [_VectorWriter(plan, folder, problems)]
            return writers[0]

        ordinals = frozenset(record.ordinal for record in records)
        searches: list[RunTwice] = []

        def search() -> RunTwice:
            searches[:] = [RunTwice(plan.generators, ordinals)]
            return searches[0]

        make()  # refuse as much as possible before anything runs
        verification = show_ops(plan, ordinals, make, verify, twice=search)
        writer = writers[0]
        writer.finish({ordinal: each.how for ordinal, each in searches[0].unsteady.items()})
        left_out = tuple(writer.sentence(record) for record in records if record.ordinal in writer.problems)
        made_up = plan.synthesis.reason or None
        _write_json(
            folder / INDEX,
            {
                "format": FORMAT,
                "version": _VERSION,
                "capture_session": reader.session.session_id,
                "torch_version": reader.session.torch_version,
                "selection": wanted.text,
                "verified": verification.text,
                "settings": dict(reader.session.settings),
                "made_up": made_up,
                "vectors": writer.entries,
                "left_out": left_out,
            },
        )
        size = sum(file.stat().st_size for file in folder.iterdir())
    return VectorsResult(out, len(writer.entries), size, verification.text, left_out)


def _refuse(reader: CaptureReader, records: list[Record], problems: dict[int, str], partial: bool) -> None:
    if not problems or (partial and len(problems) < len(records)):
        return
    what = "none of the selected ops can" if len(problems) == len(records) else f"{len(problems)} of them cannot"
    advice = "" if len(problems) == len(records) else "; --partial leaves them out, and lists them"
    raise ReplayRefused(
        f"{reader.path}: {len(records)} ops are selected; {what} be written as test vectors{advice}",
        tuple(_sentence(reader, record, problems[record.ordinal]) for record in records if record.ordinal in problems),
    )


def _sentence(reader: CaptureReader, record: Record, why: str) -> str:
    return f"ordinal {record.ordinal} ({reader.kernels[record.signature.kernel].qualified_name}): {why}"


def _problem(plan: Plan, record: Record) -> str | None:
    """Why an op cannot be written as a vector, as far as known."""
    if record.signature.status is not OpStatus.ok:
        return "it raised an error under capture, so it has no results"
    problem = problem_of(plan.reader, (*record.args, *record.results))
    if problem is not None:
        return problem
    resolved = plan.kernels[record.signature.kernel]
    if not isinstance(resolved, ResolvedKernel):
        return str(resolved)
    if resolved.draws:
        return "it draws random numbers, so its results depend on more than its arguments"
    if not resolved.own and addresses_of(SlotLayout(record.signature), resolved.schema) is not None:
        return "it takes or returns addresses of objects in its process"
    if _unknown_results(plan, record) or _is_unwritten(plan.reader, record):
        return "a result holds bytes that no run reproduces: memory left unwritten, or addresses"
    return None


def _unknown_results(plan: Plan, record: Record) -> tuple[int, ...]:
    return plan.opaque_slots().get(record.signature_id, ())


def _is_unwritten(reader: CaptureReader, record: Record) -> bool:
    """Whether the op returns memory that nothing has written: the empty family."""
    arguments = [value.storage for value in tensors_of(record.args)]
    return leaves_unwritten(reader, arguments, (value.storage for value in tensors_of(record.results)))


class _VectorWriter:
    """Writes the files of each op passed to it, except those with a problem."""

    def __init__(self, plan: Plan, folder: Path, problems: dict[int, str]) -> None:
        self._plan, self._reader, self._folder = plan, plan.reader, folder
        self.problems = problems
        self.entries: list[dict[str, Any]] = []
        self._encoder = VectorEncoder(plan.reader)
        self._arguments: dict[str, Any] = {}
        self._before: dict[str, list[bytes]] = {}

    def sentence(self, record: Record) -> str:
        return _sentence(self._reader, record, self.problems[record.ordinal])

    def takes(self, record: Record, give: GiveTensor) -> None:
        if record.ordinal in self.problems:
            return
        self._encoder = VectorEncoder(self._reader)
        self._arguments, self._before = {}, {}
        written = self._written(record)
        for node, value in zip(record.signature.args, record.args, strict=True):
            self._arguments[node.name] = self._encoder.value(value, _asked(give), f"input.{node.name}")
            if written.get(node.name) is False:
                self._before[node.name] = [row_major_bytes(give(each, "")) for each in tensors_of([value])]

    def gives(self, record: Record, give: GiveTensor) -> None:
        if record.ordinal in self.problems:
            return
        encoder, after, written = self._encoder, {}, self._written(record)
        same: dict[int, dict[str, Any]] = {}
        undeclared = []
        for node, value in zip(record.signature.args, record.args, strict=True):
            declared = written.get(node.name)
            if declared is None:
                continue
            if declared is False:
                now = [row_major_bytes(give(each, "")) for each in tensors_of([value])]
                if now == self._before[node.name]:
                    continue
                undeclared.append(node.name)
            after[node.name] = encoder.value(value, _asked(give), f"written.{node.name}")
            if isinstance(value, TensorValue):
                same[value.id] = after[node.name]
        results = [
            same[value.id]
            if isinstance(value, TensorValue) and value.id in same
            else encoder.value(value, _asked(give), f"result.{place}")
            for place, value in enumerate(record.results)
        ]
        self._write(
            record,
            {
                "arguments": self._arguments,
                "results": results,
                "written": after,
                "written_without_saying_so": undeclared,
                "shared_memory": _shared(record),
            },
        )

    def _written(self, record: Record) -> dict[str, bool]:
        """The tensor arguments that an op may write, and whether its schema says so."""
        layout = SlotLayout(record.signature)
        effects = self._plan.effects(record.signature_id, layout)
        return {
            place.node.name: bool(set(place.tensors) & set(effects.writes))
            for place in layout.args
            if set(place.tensors) & {*effects.writes, *effects.unsure}
        }

    def _write(self, record: Record, values: dict[str, Any]) -> None:
        kernel = self._reader.kernels[record.signature.kernel]
        name = file_name(record.ordinal, self._reader.record_count, kernel)
        try:
            write_safetensors(self._folder / f"{name}.safetensors", self._encoder.arrays)
        except OSError as error:  # the replay around it would attribute it to the op
            raise CaptureFailed(f"{self._folder / name}.safetensors: cannot be written: {error.strerror}") from error
        _write_json(
            self._folder / f"{name}.json",
            {
                "op": kernel.name,
                "overload": kernel.overload,
                "schema": kernel.schema,
                "signature": signature_text(record, self._reader),
                "ordinal": record.ordinal,
                "scope": self._reader.scope_path(record.scope),
                "nondeterministic": None,
                **values,
            },
        )
        self.entries.append({"name": name, "op": kernel.qualified_name, "ordinal": record.ordinal})

    def finish(self, unsteady: dict[int, str]) -> None:
        """Add the distances of nondeterministic ops."""
        for entry in self.entries:
            if entry["ordinal"] in unsteady:
                path = self._folder / f"{entry['name']}.json"
                _write_json(
                    path,
                    {**json.loads(path.read_text(encoding="utf-8")), "nondeterministic": unsteady[entry["ordinal"]]},
                )


def _asked(give: GiveTensor) -> Callable[[TensorValue], Any]:
    return lambda value: give(value, "")


def _shared(record: Record) -> list[list[str]]:
    """Names of arguments whose tensors share memory, in groups."""
    by_storage: dict[int, list[str]] = {}
    for node, value in zip(record.signature.args, record.args, strict=True):
        for tensor in tensors_of([value]):
            names = by_storage.setdefault(tensor.storage, [])
            if tensor.storage:
                names.append(node.name)
    return [names for names in by_storage.values() if len(names) > 1]


def _write_json(path: Path, said: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(said, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise CaptureFailed(f"{path}: cannot be written: {error.strerror}") from error
