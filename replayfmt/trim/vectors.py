"""Test vectors: inputs and outputs of single ops, as files that need neither OpReplay nor the program
(docs/vectors.md).

Taken from a verified replay: values as JSON, tensors as safetensors, in a directory that is written completely or not
at all.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayfmt.dump.selection import OpSelection, resolve_selection
from replayfmt.errors import CaptureFailed, ReplayRefused
from replayfmt.format.codes import ITEM_BYTES, DType, Layout, MemoryFormat, OpStatus, RecordKind
from replayfmt.format.model import (
    CompositeValue,
    DeviceValue,
    GeneratorValue,
    Kernel,
    OpaqueValue,
    ProcessGroupValue,
    Record,
    StorageValue,
    TensorValue,
    Value,
    tensors_of,
)
from replayfmt.format.output import new_folder
from replayfmt.format.reader import CaptureReader
from replayfmt.format.signature_layout import SlotLayout
from replayfmt.format.signature_text import signature_text
from replayfmt.format.validation import parse_json
from replayfmt.pytorch.tensors.memory import TORCH_DTYPE, TORCH_LAYOUT, TORCH_MEMORY_FORMAT, row_major_bytes
from replayfmt.replay.op_tensors import observe_ops
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.kernels import ResolvedKernel, addresses_of, leaves_unwritten
from replayfmt.replay.planning.records import GiveTensor

from .trimming import Verify, refuse_incomplete

_NAMES: dict[DType, str] = {
    DType.bool: "BOOL",
    DType.uint8: "U8",
    DType.int8: "I8",
    DType.int16: "I16",
    DType.uint16: "U16",
    DType.float16: "F16",
    DType.bfloat16: "BF16",
    DType.int32: "I32",
    DType.uint32: "U32",
    DType.float32: "F32",
    DType.float64: "F64",
    DType.int64: "I64",
    DType.uint64: "U64",
    DType.float8_e4m3fn: "F8_E4M3",
    DType.float8_e5m2: "F8_E5M2",
}
_ALIGNMENT = 8


@dataclass(frozen=True)
class Array:
    """Named bytes. If the format has no name for the dtype, or the sizes do not match the number of bytes, they are
    written as plain bytes."""

    name: str
    data: bytes
    dtype: DType = DType.uint8
    sizes: tuple[int, ...] = ()

    def header(self, offset: int) -> dict[str, object]:
        fits = self.dtype in _NAMES and math.prod(self.sizes) * ITEM_BYTES[self.dtype] == len(self.data)
        return {
            "dtype": _NAMES[self.dtype] if fits else "U8",
            "shape": list(self.sizes) if fits else [len(self.data)],
            "data_offsets": [offset, offset + len(self.data)],
        }


def write_safetensors(path: str | os.PathLike[str], arrays: Sequence[Array]) -> None:
    """Write arrays to a new file at `path`. Raises OSError."""
    header: dict[str, object] = {}
    offset = 0
    for array in arrays:
        header[array.name] = array.header(offset)
        offset += len(array.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for array in arrays:
            file.write(array.data)


INDEX = "index.json"
FORMAT = "opreplay-vectors"
_ENDINGS = {".json", ".safetensors"}


def _is_vectors(folder: Path) -> bool:
    """Whether a folder holds test vectors, and nothing else."""
    if any(each.suffix not in _ENDINGS for each in folder.iterdir()):
        return False
    try:
        said = parse_json((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(said, dict) and said.get("format") == FORMAT


_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_LONGEST_NAME = 100


def problem_of(reader: CaptureReader, values: tuple[Value, ...]) -> str | None:
    """Why a vector cannot hold these values; None if it can."""
    return next(_problems(reader, values), None)


def _problems(reader: CaptureReader, values: tuple[Value, ...] | list[Value]) -> Iterator[str]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _problems(reader, value)
        elif isinstance(value, CompositeValue):
            yield f"a tensor is {value.form}; vectors hold strided tensors"
        elif isinstance(value, OpaqueValue):
            yield f"a value was not captured: {value.text}"
        elif isinstance(value, GeneratorValue):
            yield "it takes a random generator"
        elif isinstance(value, ProcessGroupValue):
            yield "it takes a process group"
        elif isinstance(value, StorageValue):
            yield "it takes a storage instead of a tensor"
        elif isinstance(value, TensorValue):
            if value.meta.layout is not Layout.strided:
                yield f"a tensor has the layout {value.meta.layout.name}; vectors hold strided tensors"
            elif reader.devices[value.meta.device].kind == "meta":
                yield "a tensor is on the meta device, where it has no content"
            elif value.meta.dtype not in TORCH_DTYPE:
                yield f"this torch has no dtype {value.meta.dtype.name}"


class VectorEncoder:
    """Makes the JSON of one op and collects its tensors."""

    def __init__(self, reader: CaptureReader) -> None:
        self._reader = reader
        self.arrays: list[Array] = []

    def value(self, value: Value, give: GiveTensor | None, key: str) -> Any:
        """The JSON of a value; `give` returns the tensors, None where they are not looked at, and `key` is the name of
        a tensor's data, followed by a number for each step into lists."""
        if isinstance(value, TensorValue):
            return self.tensor(value, give and give(value, ""), key)
        if isinstance(value, list | tuple):
            return [self.value(each, give, f"{key}.{place}") for place, each in enumerate(value)]
        if isinstance(value, DeviceValue):
            return {"$device": str(self._reader.devices[value.id])}
        if isinstance(value, DType):
            return {"$torch": word_of(TORCH_DTYPE[value])}
        if isinstance(value, Layout):
            return {"$torch": word_of(TORCH_LAYOUT[value])}
        if isinstance(value, MemoryFormat):
            return {"$torch": word_of(TORCH_MEMORY_FORMAT[value])}
        if isinstance(value, complex):
            return {"$complex": [_plain(value.real), _plain(value.imag)]}
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": str(_plain(value))}
        assert value is None or isinstance(value, bool | int | str), "what cannot be said is refused before"
        return value

    def tensor(self, value: TensorValue, tensor: Any, key: str) -> dict[str, Any]:
        """A tensor's elements, in row-major order, under `key`, and its other properties."""
        meta = value.meta
        self.arrays.append(Array(key, row_major_bytes(tensor), meta.dtype, meta.sizes))
        return {
            "$tensor": key,
            "dtype": word_of(TORCH_DTYPE[meta.dtype]),
            "sizes": list(meta.sizes),
            "strides": list(meta.strides),
            "device": str(self._reader.devices[meta.device]),
        }


def word_of(of_torch: Any) -> str:
    """`float16` for torch.float16."""
    return str(of_torch).removeprefix("torch.")


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else {"inf": "Infinity", "-inf": "-Infinity"}.get(repr(value), "NaN")


def file_name(ordinal: int, records: int, kernel: Kernel) -> str:
    """The base name of an op's files: its ordinal, and as much of the kernel's name as is safe in a file name."""
    name = _UNSAFE.sub("_", f"{kernel.name.replace('::', '.')}.{kernel.overload}")[:_LONGEST_NAME]
    return f"{ordinal:0{len(str(max(records - 1, 0)))}}-{name}"


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
    wanted: OpSelection,
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
    kept = resolve_selection(reader, wanted)
    records = [record for ordinal in kept.ordinals.tolist() if (record := reader.record(ordinal)).kind is RecordKind.op]
    with new_folder(out, force, "a folder of test vectors", _is_vectors) as folder:

        def make() -> _VectorWriter:
            for file in folder.iterdir():  # files of an earlier attempt
                file.unlink()
            problems = {record.ordinal: why for record in records if (why := op_problem(plan, record)) is not None}
            _refuse(reader, records, problems, partial)
            return _VectorWriter(plan, folder, problems)

        make()  # refuse as much as possible before anything runs
        observed = observe_ops(plan, frozenset(record.ordinal for record in records), make, verify, twice=True)
        writer, verification = observed.observer, observed.verification
        assert observed.twice is not None
        writer.finish({ordinal: each.how for ordinal, each in observed.twice.unsteady.items()})
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


def op_problem(plan: Plan, record: Record) -> str | None:
    """Why an op cannot be written as a vector, as far as known."""
    if record.signature.status is not OpStatus.ok:
        return "it raised an error under capture, so it has no results"
    problem = problem_of(plan.reader, (*record.args, *record.results))
    if problem is not None:
        return problem
    resolved = plan.kernels[record.signature.kernel]
    if not isinstance(resolved, ResolvedKernel):
        return str(resolved)
    if resolved.draws and not draws_nothing(record, resolved):
        return "it draws random numbers, so its results depend on more than its arguments"
    if not resolved.own and addresses_of(SlotLayout(record.signature), resolved.schema) is not None:
        return "it takes or returns addresses of objects in its process"
    storages = ([value.storage for value in tensors_of(values)] for values in (record.args, record.results))
    if plan.preparation.opaque_slots().get(record.signature_id, ()) or leaves_unwritten(plan.reader, *storages):
        return "a result holds bytes that no run reproduces: memory left unwritten, or addresses"
    return None


def draws_nothing(record: Record, kernel: ResolvedKernel) -> bool:
    """Whether an op that may draw random numbers does not, because nothing is to be dropped."""
    given = {argument.name: argument.default_value for argument in kernel.schema.arguments}
    given |= {node.name: value for node, value in zip(record.signature.args, record.args, strict=True)}
    return bool(given.get("dropout_p") == 0.0)


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
            self._arguments[node.name] = self._encoder.value(value, give, f"input.{node.name}")
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
            after[node.name] = encoder.value(value, give, f"written.{node.name}")
            if isinstance(value, TensorValue):
                same[value.id] = after[node.name]
        results = [
            same[value.id]
            if isinstance(value, TensorValue) and value.id in same
            else encoder.value(value, give, f"result.{place}")
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
        effects = self._plan.preparation.effects(record.signature_id, layout)
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
                    {**parse_json(path.read_text(encoding="utf-8")), "nondeterministic": unsteady[entry["ordinal"]]},
                )


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
