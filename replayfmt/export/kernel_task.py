"""Turns a kernel, a scope or a range of ops of a capture into a task for authors of kernels: one folder that needs only
PyTorch (docs/kernel-tasks.md).

A kernel's task has a workload for each distinct call; that of a scope or a range is one function of all its ops, with a
workload for each distinct pass. Contents come from a verified replay, or are synthesized as a replay without content
does it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from replayfmt.benchmark.candidates.judged import check_text
from replayfmt.benchmark.candidates.task_cases import load_task
from replayfmt.benchmark.per_op.groups import work_of
from replayfmt.dump.kernel_skeleton import BINDINGS, kernel_skeleton
from replayfmt.dump.selection import KeptRecords, OpSelection, resolve_selection
from replayfmt.errors import CaptureFailed, ReplayRefused, UsageError
from replayfmt.format.attachments import contents_of
from replayfmt.format.codes import DType, KernelKind, RecordKind, TensorFlag
from replayfmt.format.model import Kernel, Record, StorageValue, TensorValue, Value, nested_values, spanned, tensors_of
from replayfmt.format.output import new_folder
from replayfmt.format.reader import CaptureReader
from replayfmt.format.signature_layout import SlotLayout
from replayfmt.format.signature_text import signature_of
from replayfmt.pytorch.cpp_kernels import StoredCppKernel
from replayfmt.pytorch.overloads import parse_schema
from replayfmt.pytorch.tensors.memory import TORCH_DTYPE, byte_tensor, row_major_bytes, view_inside
from replayfmt.pytorch.triton.kernels import StoredKernel
from replayfmt.replay.op_tensors import observe_ops
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.kernels import ResolvedKernel
from replayfmt.replay.planning.records import GiveTensor, python_values
from replayfmt.replay.run.steps import IsolatedCall
from replayfmt.trim.schedule import Planner
from replayfmt.trim.script import FRAME, InputFill, made_inputs, operator_changes, script_helpers
from replayfmt.trim.script_text import BodyWriter, Input, ScriptEvents, ScriptOp
from replayfmt.trim.script_triton import TritonSections, identifier
from replayfmt.trim.trimming import Verify, refuse_incomplete
from replayfmt.trim.vectors import (
    Array,
    VectorEncoder,
    draws_nothing,
    op_problem,
    problem_of,
    word_of,
    write_safetensors,
)

from .task_forms import Form, write_form

Inputs = Literal["captured", "synthesized", "none"]
FORMAT, VERSION = "opreplay-kernel-task", 1
_MOST_OPS = 2000  # of one fused function
_MOST_CASES = 2
_ALIGNMENT = 64


@dataclass(frozen=True)
class TaskOptions:
    """What a task holds; `limit_bytes` is the most that its files of inputs and outputs take together."""

    inputs: Inputs = "captured"
    limit_bytes: int = 256 << 20
    verify: Verify = "auto"
    allow_code: bool = False
    force: bool = False
    form: Form | None = None
    measured: dict[str, Any] | None = None  # what opreplay-benchmark --per-op wrote


@dataclass
class TaskResult:
    """What was written; a sentence for each call that is not in it as asked."""

    path: str
    workloads: int
    calls: int
    bytes: int
    verified: str = ""
    left_out: list[str] = field(default_factory=list)


@dataclass
class _Storage:
    """A storage that a workload takes: `tensors` are its views, by argument; `first` to `end` its bytes in the task."""

    number: int
    tensors: list[tuple[str, TensorValue]] = field(default_factory=list)
    first: int = 0
    end: int = 0
    written: bool = False
    made: InputFill | None = None

    @property
    def entry(self) -> str:
        return f"input.{self.tensors[0][0]}"


@dataclass
class _Call:
    """One call of the kernel, or one pass through the ops that become one function."""

    records: list[Record]
    storages: dict[int, _Storage]
    outputs: list[TensorValue | Value]
    last_use: dict[int, int]  # by storage, the last ordinal that uses it

    @property
    def ordinal(self) -> int:
        return self.records[0].ordinal

    @property
    def output_bytes(self) -> int:
        tensors = [each.meta for each in self.outputs if isinstance(each, TensorValue)]
        return sum(int(np.prod(meta.sizes)) * TORCH_DTYPE[meta.dtype].itemsize for meta in tensors)


@dataclass
class _Workload:
    """Calls that are alike. `function` is the source of what they call, and `arguments` the JSON of what that gets."""

    key: tuple[Any, ...]
    program: int
    first: _Call
    ordinals: list[int] = field(default_factory=list)
    calls: int = 0
    host_ns: int = 0
    device_ns: int = 0
    observed: list[_Call] = field(default_factory=list)
    cases: list[dict[str, Any]] = field(default_factory=list)
    name: str = ""

    @property
    def captured_ns(self) -> int:
        return self.device_ns or self.host_ns

    @property
    def bytes(self) -> int:
        """About what one case takes."""
        return sum(each.end - each.first for each in self.first.storages.values()) + self.first.output_bytes


def write_task(plan: Plan, out: str, wanted: OpSelection, options: TaskOptions) -> TaskResult:
    """Write the task of a selection into a new folder. `plan` is for the whole capture, made with keep_going.

    Raises UsageError for a selection that is no task, ReplayRefused for what a task cannot express, and what
    `observe_ops` raises.
    """
    refuse_incomplete(plan.reader, False)
    task = _KernelTask(plan, wanted, options) if wanted.kernel is not None else _FusionTask(plan, wanted, options)
    with new_folder(out, options.force, "a kernel task", _is_task) as folder:
        return task.write(folder, out)


def _is_task(folder: Path) -> bool:
    try:
        load_task(folder)
    except (OSError, ValueError):
        return False
    return True


class _Task:
    """What both kinds of tasks have in common."""

    kind = ""

    def __init__(self, plan: Plan, wanted: OpSelection, options: TaskOptions) -> None:
        self.plan, self.reader, self.wanted, self.options = plan, plan.reader, wanted, options
        self.workloads: list[_Workload] = []
        self.left_out: list[str] = []
        self.programs: list[str] = []  # names of functions in reference.py

    def collect(self) -> None:
        raise NotImplementedError

    def reference(self) -> str:
        """The text of reference.py, without how inputs are made."""
        raise NotImplementedError

    def description(self) -> dict[str, Any]:
        """What task.json says of this kind."""
        raise NotImplementedError

    def arguments(self, call: _Call) -> dict[str, Any]:
        raise NotImplementedError

    def keyword_only(self, call: _Call) -> list[str]:
        return []

    def work(self, call: _Call) -> dict[str, Any]:
        raise NotImplementedError

    def write(self, folder: Path, out: str) -> TaskResult:
        self.collect()
        self.workloads.sort(key=lambda each: (-each.captured_ns, -each.calls, each.first.ordinal))
        for number, workload in enumerate(self.workloads):
            workload.name = f"w{number:02d}"
        self._choose()
        verified = self._contents(folder)
        (folder / "reference.py").write_text(self.reference() + self._make(), encoding="utf-8")
        (folder / "check.py").write_text(check_text(), encoding="utf-8")
        facts = self._json(verified)
        (folder / "task.json").write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(_readme(facts), encoding="utf-8")
        if self.options.form is not None:
            write_form(folder, facts, self.reference(), self.options.form)
        size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
        calls = sum(each.calls for each in self.workloads)
        return TaskResult(out, len(self.workloads), calls, size, verified, self.left_out)

    def _choose(self) -> None:
        """Which calls are in the task with their content: of each workload one, the heaviest first, then a second one
        that may have other content, as long as there is room."""
        room = self.options.limit_bytes if self.options.inputs != "none" else 0
        for turn in range(_MOST_CASES if self.options.inputs == "captured" else 1):
            for workload in self.workloads:
                if turn and (len(workload.ordinals) < 2 or not workload.observed):
                    continue
                if workload.bytes > room:
                    if not turn and self.options.inputs != "none":
                        self.left_out.append(
                            f"{workload.name}: its inputs and outputs of {workload.bytes:,} bytes are over the size "
                            f"limit; its inputs are synthesized"
                        )
                    continue
                room -= workload.bytes
                workload.observed.append(workload.first if not turn else self.call_at(workload.ordinals[-1]))
        without = [each for each in self.workloads if not each.observed or self.options.inputs != "captured"]
        if without:
            made = self._made([each.first for each in without])
            for workload in without:
                for storage in workload.first.storages.values():
                    storage.made = made.get(storage.number)
                    storage.first, storage.end = 0, self.reader.storage(storage.number).bytes

    def call_at(self, ordinal: int) -> _Call:
        raise NotImplementedError

    def _made(self, calls: list[_Call]) -> dict[int, InputFill]:
        """How the inputs of calls are made, by storage: as a replay of these ops without content makes them."""
        ordinals = sorted({record.ordinal for call in calls for record in call.records})
        kept = KeptRecords(np.array(ordinals, np.int64), len(ordinals))
        return made_inputs(self.reader, kept, Planner(self.reader, kept, None).plan())

    def _contents(self, folder: Path) -> str:
        """Write the files of inputs and outputs; how the replay was verified."""
        chosen = [(workload, call) for workload in self.workloads for call in workload.observed]
        if self.options.inputs == "captured" and chosen:
            ordinals = frozenset(record.ordinal for _workload, call in chosen for record in call.records)

            def make() -> _Observer:
                for file in folder.iterdir():  # of an earlier attempt
                    file.unlink()
                for workload in self.workloads:
                    workload.cases.clear()
                return _Observer(self, folder, chosen)

            make()
            return observe_ops(self.plan, ordinals, make, self.options.verify, twice=True).verification.text
        for workload, call in chosen:
            storages = enumerate(call.storages.values())
            self.keep(folder, workload, call, [_array(each, _filled(each, place)) for place, each in storages])
        return "not replayed: its inputs are synthesized" if chosen else "not replayed: it has no content"

    def keep(self, folder: Path, workload: _Workload, call: _Call, arrays: list[Array]) -> None:
        """Write a case, unless its inputs are those of an earlier one."""
        hashed = hashlib.sha256()
        for each in arrays:
            if each.name.startswith("input."):
                hashed.update(each.data)
        digest = hashed.hexdigest()
        if any(digest == each["digest"] for each in workload.cases):
            return
        file = f"{workload.name}.{len(workload.cases)}.safetensors"
        try:
            write_safetensors(folder / file, arrays)
        except OSError as error:
            raise CaptureFailed(f"{folder / file}: cannot be written: {error.strerror}") from error
        workload.cases.append({"file": file, "ordinal": call.ordinal, "digest": digest})

    def _make(self) -> str:
        """How inputs without content are made, for reference.py."""
        texts, rows = [], []
        for workload in self.workloads:
            for number, storage in workload.first.storages.items():
                if storage.made is not None and storage.made.expression:
                    why = f"  # {storage.made.why}" if storage.made.why else ""
                    rows.append(f'    "{workload.name}.{number}": lambda n, g: {storage.made.expression},{why}')
                    texts.append(storage.made.expression)
        helpers = script_helpers(texts)
        head = "\n\n# How inputs without content are made: n elements, with a generator.\n"
        return helpers + head + "MAKE = {\n" + "".join(f"{row}\n" for row in rows) + "}\n"

    def _json(self, verified: str) -> dict[str, Any]:
        total_calls, total_ns = _totals(self.reader)
        measured = _measured(self.options.measured)
        measured_ns = sum(measured.values())
        rows = []
        for workload in self.workloads:
            call, signature = workload.first, str(workload.key[0])
            measured_here = measured.get(signature)
            rows.append(
                {
                    "name": workload.name,
                    "signature": signature,
                    "program": workload.program,
                    "calls": workload.calls,
                    "share_of_calls": workload.calls / max(total_calls, 1),
                    "captured_ns": workload.captured_ns or None,
                    "share_of_captured_time": workload.captured_ns / total_ns if total_ns else None,
                    "measured_ns": measured_here,
                    "share_of_measured_time": None if measured_here is None else measured_here / measured_ns,
                    "storages": [self._storage_json(workload, each) for each in call.storages.values()],
                    "arguments": self.arguments(call),
                    "keyword_only": self.keyword_only(call),
                    "shared_memory": [
                        [name for name, _value in each.tensors]
                        for each in call.storages.values()
                        if len({name for name, _value in each.tensors}) > 1
                    ],
                    "written": [
                        name for each in call.storages.values() if each.written for name, _value in each.tensors
                    ],
                    "results": [_result_json(each) for each in call.outputs],
                    "cases": workload.cases,
                    **self.work(call),
                }
            )
        session = self.reader.session
        return {
            "format": FORMAT,
            "version": VERSION,
            **self.description(),
            "selection": self.wanted.text,
            "capture_session": session.session_id,
            "torch_version": session.torch_version,
            "devices": sorted({str(each) for each in self.reader.devices if each is not None}),
            "settings": dict(session.settings),
            "inputs": self.options.inputs,
            "made_up": self.plan.synthesis.reason or None,
            "verified": verified,
            "workloads": rows,
            "left_out": self.left_out,
        }

    def _storage_json(self, workload: _Workload, storage: _Storage) -> dict[str, Any]:
        value = storage.tensors[0][1]
        made = storage.made is not None and storage.made.expression
        dtype = storage.made.dtype if storage.made is not None else TORCH_DTYPE[value.meta.dtype]
        length = storage.end - storage.first
        if length % dtype.itemsize:
            dtype = torch.uint8
        return {
            "entry": storage.entry,
            "arguments": list(dict.fromkeys(name for name, _value in storage.tensors)),
            "bytes": length,
            "dtype": word_of(dtype),
            "device": str(self.plan.device_map.target(value.meta.device)),
            "captured_offset_bytes": storage.first,
            "captured_bytes": self.reader.storage(storage.number).bytes,
            "make": f"{workload.name}.{storage.number}" if made else None,
        }

    def tensor_json(self, value: TensorValue, storage: _Storage, place: int) -> dict[str, Any]:
        """How check.py makes a tensor."""
        meta = value.meta
        item = TORCH_DTYPE[meta.dtype].itemsize
        return {
            "storage": place,
            "dtype": word_of(TORCH_DTYPE[meta.dtype]),
            "sizes": list(meta.sizes),
            "strides": list(meta.strides),
            "offset": value.offset - storage.first // item,
            "captured_offset": value.offset,
            "device": str(self.reader.devices[meta.device]),
            "flags": [flag.name for flag in (TensorFlag.conj, TensorFlag.neg) if meta.flags & flag],
        }

    def refuse(self, record: Record, why: str) -> ReplayRefused:
        name = self.reader.kernels[record.signature.kernel].qualified_name
        return ReplayRefused(f"{self.reader.path}: ordinal {record.ordinal} ({name}) cannot be in a kernel task: {why}")

    def written_slots(self, record: Record) -> set[int]:
        effects = self.plan.preparation.effects(record.signature_id, SlotLayout(record.signature))
        return {*effects.writes, *effects.unsure}


def _filled(storage: _Storage, place: int) -> bytes:
    """The content that check.py makes of a storage without any."""
    made = storage.made
    length = storage.end - storage.first
    if made is None or not made.expression:
        return bytes(length)
    values = torch.zeros(length // made.dtype.itemsize, dtype=made.dtype)
    space: dict[str, Any] = {"torch": torch}
    exec(script_helpers([made.expression]), space)
    make = eval(f"lambda n, g: {made.expression}", space)  # our own text, of numbers that were checked
    values[:] = make(len(values), torch.Generator().manual_seed(place))
    return row_major_bytes(values).ljust(length, b"\0")


def _array(storage: _Storage, data: bytes) -> Array:
    """A storage's content, with sizes where its first view is all of it."""
    meta = storage.tensors[0][1].meta
    item = TORCH_DTYPE[meta.dtype].itemsize
    dense, step = True, 1
    for size, stride in zip(reversed(meta.sizes), reversed(meta.strides), strict=True):
        dense &= size == 1 or stride == step
        step *= size
    if dense and step * item == len(data):
        return Array(storage.entry, data, meta.dtype, meta.sizes)
    if storage.made is None and len(data) % item == 0:
        return Array(storage.entry, data, meta.dtype, (len(data) // item,))
    return Array(storage.entry, data, DType.uint8, (len(data),))


def _result_json(value: TensorValue | Value) -> dict[str, Any]:
    if isinstance(value, TensorValue):
        meta = value.meta
        return {"dtype": word_of(TORCH_DTYPE[meta.dtype]), "sizes": list(meta.sizes), "strides": list(meta.strides)}
    return {"type": type(value).__name__}


def _totals(reader: CaptureReader) -> tuple[int, int]:
    """Calls of all ops of the capture, and their time as far as known."""
    calls = host = device = 0
    for record in reader.records():
        if record.kind is RecordKind.op:
            calls += record.calls
            host += (record.duration_ns or 0) * record.calls
            device += (record.device_duration_ns or 0) * record.calls
    return calls, device or host


_MEASURED_ROW = "BM_op/"


def _measured(document: dict[str, Any] | None) -> dict[str, float]:
    """Nanoseconds of all calls of each signature, from the rows of single ops."""
    rows = [] if document is None else document["benchmarks"]
    return {
        row["name"].removeprefix(_MEASURED_ROW): row["median_real_time"] * row["count"]
        for row in rows
        if row["name"].startswith(_MEASURED_ROW) and row.get("median_real_time") and row.get("op")
    }


class _Observer:
    """Writes the inputs and outputs of the chosen calls from a replay."""

    def __init__(self, task: _Task, folder: Path, chosen: Sequence[tuple[_Workload, _Call]]) -> None:
        self._task, self._folder = task, folder
        self._by_ordinal: dict[int, list[tuple[_Workload, _Call]]] = defaultdict(list)
        self._inputs: dict[int, dict[int, bytes]] = {}
        self._outputs: dict[int, dict[str, Array]] = {}
        for workload, call in chosen:
            for record in call.records:
                self._by_ordinal[record.ordinal].append((workload, call))

    def takes(self, record: Record, give: GiveTensor) -> None:
        for _workload, call in self._by_ordinal[record.ordinal]:
            if record.ordinal == call.ordinal:
                self._inputs[call.ordinal], self._outputs[call.ordinal] = {}, {}
            known = self._inputs[call.ordinal]
            for value in tensors_of(record.args):
                storage = call.storages.get(value.storage)
                if storage is not None and value.storage not in known:
                    known[value.storage] = _bytes_of(give(value, ""), storage)

    def gives(self, record: Record, give: GiveTensor) -> None:
        for workload, call in self._by_ordinal[record.ordinal]:
            found = self._outputs[call.ordinal]
            for value in tensors_of((*record.args, *record.results)):
                if call.last_use.get(value.storage) != record.ordinal:
                    continue
                there = give(value, "")
                storage = call.storages.get(value.storage)
                if storage is not None and storage.written:
                    name = storage.entry.replace("input.", "written.", 1)
                    found.setdefault(name, Array(name, _bytes_of(there, storage)))
                for place, output in enumerate(call.outputs):
                    name = f"result.{place}"
                    if isinstance(output, TensorValue) and output.storage == value.storage and name not in found:
                        meta = output.meta
                        tensor = view_inside(
                            there.untyped_storage(),
                            TORCH_DTYPE[meta.dtype],
                            meta.sizes,
                            meta.strides,
                            output.offset,
                            meta.flags,
                        )
                        found[name] = Array(name, row_major_bytes(tensor), meta.dtype, meta.sizes)
            if record.ordinal == call.records[-1].ordinal:
                known = self._inputs.pop(call.ordinal)
                inputs = [_array(storage, known[number]) for number, storage in call.storages.items()]
                self._task.keep(self._folder, workload, call, [*inputs, *self._outputs.pop(call.ordinal).values()])


def _bytes_of(tensor: torch.Tensor, storage: _Storage) -> bytes:
    return row_major_bytes(byte_tensor(tensor.untyped_storage())[storage.first : storage.end])


def _storages(values: Sequence[tuple[str, Value]], crop: bool, reader: CaptureReader) -> dict[int, _Storage]:
    """The storages of named arguments, in order. With `crop` only the bytes that the tensors span, with their
    alignment."""
    found: dict[int, _Storage] = {}
    for name, value in values:
        for place, tensor in enumerate(tensors_of([value])):
            full = name if isinstance(value, TensorValue) else f"{name}.{place}"
            found.setdefault(tensor.storage, _Storage(tensor.storage)).tensors.append((full, tensor))
    for number, storage in found.items():
        storage.end = reader.storage(number).bytes
        if crop:
            spans = [_span(tensor) for _name, tensor in storage.tensors]
            first = min(low for low, _high in spans) // _ALIGNMENT * _ALIGNMENT
            storage.first, storage.end = first, max(first, *(high for _low, high in spans))
    return found


def _span(value: TensorValue) -> tuple[int, int]:
    """The bytes of its storage that a tensor reaches."""
    item = TORCH_DTYPE[value.meta.dtype].itemsize
    return value.offset * item, (value.offset + spanned(value.meta.sizes, value.meta.strides)) * item


def _times(workload: _Workload, records: Sequence[Record], calls: int) -> None:
    workload.calls += calls
    workload.host_ns += sum((each.duration_ns or 0) * each.calls for each in records)
    workload.device_ns += sum((each.device_duration_ns or 0) * each.calls for each in records)


def _meta_tensors() -> Callable[[TensorValue, str], torch.Tensor]:
    """Makes tensors without content for values; those that share a storage do so, too."""
    storages: dict[int, torch.UntypedStorage] = {}

    def give(value: TensorValue, _name: str) -> torch.Tensor:
        if value.storage not in storages:
            storages[value.storage] = torch.empty(0, dtype=torch.uint8, device="meta").untyped_storage()
        meta = value.meta
        tensor = torch.empty(0, dtype=TORCH_DTYPE[meta.dtype], device="meta")
        return tensor.set_(storages[value.storage], value.offset, meta.sizes, meta.strides)

    return give


def _isolated(reader: CaptureReader, record: Record) -> IsolatedCall:
    give = _meta_tensors()
    names = [node.name for node in record.signature.args]
    values = python_values(reader, record.signature.args, record.args, give, "")
    results = python_values(reader, record.signature.results, record.results, give, "")
    kernel = reader.kernels[record.signature.kernel]
    by_name = {argument.name for argument in parse_schema(kernel.schema).arguments if argument.kwarg_only}
    given = list(zip(names, values, strict=True))
    return IsolatedCall(
        tuple(value for name, value in given if name not in by_name),
        {name: value for name, value in given if name in by_name},
        results[0] if len(results) == 1 else tuple(results),
    )


class _KernelTask(_Task):
    """The calls of one kernel: an operator of PyTorch's own, or a Triton kernel."""

    def __init__(self, plan: Plan, wanted: OpSelection, options: TaskOptions) -> None:
        super().__init__(plan, wanted, options)
        self.kernels: dict[int, int] = {}  # kernel → program

    @property
    def kernel(self) -> Kernel:
        return self.reader.kernels[next(iter(self.kernels))]

    @property
    def kind(self) -> str:  # type: ignore[override]
        return "operator" if self.kernel.kind is KernelKind.operator else self.kernel.kind.name

    def collect(self) -> None:
        known: dict[tuple[Any, ...], _Workload] = {}
        kept = resolve_selection(self.reader, self.wanted)
        records = (self.reader.record(ordinal) for ordinal in kept.ordinals.tolist())
        for record in records:
            if record.kind is not RecordKind.op:
                continue
            program = self.kernels.setdefault(record.signature.kernel, len(self.kernels))
            tensors = list(tensors_of(record.args))
            first_uses = [
                next(i for i, each in enumerate(tensors) if each.storage == value.storage) for value in tensors
            ]
            offsets = [value.offset * TORCH_DTYPE[value.meta.dtype].itemsize % _ALIGNMENT for value in tensors]
            key = (str(signature_of(record, self.reader, values=True)), tuple(first_uses), tuple(offsets), program)
            workload = known.get(key)
            if workload is None:
                why = op_problem(self.plan, record)
                if why is None and any(value.meta.flags & TensorFlag.zero for value in tensors):
                    why = "a tensor has no memory"
                if why is not None:
                    self.left_out.append(f"ordinal {record.ordinal} ({key[0]}): {why}")
                    known[key] = _Workload(key, program, _Call([record], {}, [], {}))
                    continue
                workload = known[key] = _Workload(key, program, self._call(record))
                self.workloads.append(workload)
            workload.ordinals.append(record.ordinal)
            _times(workload, [record], record.calls)
        named = sorted({self.reader.kernels[each].qualified_name for each in self.kernels})
        if len({(self.reader.kernels[each].kind, self.reader.kernels[each].name) for each in self.kernels}) > 1 or (
            self.kernel.kind is KernelKind.operator and len(named) > 1
        ):
            raise UsageError(
                f"{self.wanted.text}: selects {len(named)} kernels; a task is of one: {', '.join(named[:8])}"
            )
        if not self.workloads:
            raise ReplayRefused(
                f"{self.reader.path}: {self.wanted.text}: none of the calls can be in a kernel task",
                tuple(self.left_out),
            )

    def call_at(self, ordinal: int) -> _Call:
        return self._call(self.reader.record(ordinal))

    def _call(self, record: Record) -> _Call:
        named = list(zip((node.name for node in record.signature.args), record.args, strict=True))
        storages = _storages(named, self.options.inputs == "captured", self.reader)
        written = self.written_slots(record)
        for slot, value in enumerate(tensors_of(record.args)):
            storages[value.storage].written |= slot in written
        outputs: list[TensorValue | Value] = [
            each for each in nested_values(record.results) if each is not None and not isinstance(each, list | tuple)
        ]
        last = dict.fromkeys((value.storage for value in tensors_of((*record.args, *record.results))), record.ordinal)
        return _Call([record], storages, outputs, last)

    def arguments(self, call: _Call) -> dict[str, Any]:
        encoder = _Encoder(self, call)
        (record,) = call.records
        return {
            node.name: encoder.value(value, lambda value: None, node.name)
            for node, value in zip(record.signature.args, record.args, strict=True)
        }

    def keyword_only(self, call: _Call) -> list[str]:
        given = [node.name for node in call.records[0].signature.args]
        found, gap = [], False
        for argument in parse_schema(self.kernel.schema).arguments:
            gap |= argument.kwarg_only or argument.name not in given
            if gap and argument.name in given:
                found.append(argument.name)
        return found

    def description(self) -> dict[str, Any]:
        kernel = self.kernel
        return {
            "name": kernel.qualified_name,
            "kind": self.kind,
            "operator": kernel.name,
            "schema": kernel.schema,
            "function": self._function(),
        }

    def _function(self) -> str:
        base = re.sub(r"\W", "_", self.kernel.name.rpartition("::")[2])
        return base if base.isidentifier() and self.kernel.kind is KernelKind.operator else "kernel"

    def reference(self) -> str:
        kernel = self.kernel
        if kernel.kind is KernelKind.operator:
            number = next(iter(self.kernels))
            text = kernel_skeleton(self.reader, number)
            text = text.replace("A replacement for", "The reference:", 1)
            (function,) = re.findall(r"^def (\w+)\(\n", text, re.MULTILINE)
            return f"{text}\n\nPROGRAMS = [{function}]\n"
        if kernel.kind is KernelKind.inductor_cpp:
            return self._cpp_reference()
        sections = TritonSections(self.reader, self.options.allow_code, FRAME)
        bodies = []
        for number, program in self.kernels.items():
            stored = StoredKernel.read(contents_of(self.reader, self.reader.kernels[number]))
            names = [argument.name for argument in parse_schema(self.reader.kernels[number].schema).arguments]
            given = {name: f"*{name}" if name == stored.grid else name for name in names}
            launch = sections.launch(self.reader.kernels[number], given, "")
            bodies.append(f"def program_{program}({', '.join(map(identifier, names))}):\n    {launch}\n\n")
        return "\n".join(
            [
                f'"""{kernel.qualified_name}, with its source from the capture."""',
                "",
                *sections.head(),
                "import torch",
                *sections.imports(),
                *sections.sections(),
                "",
                "",
                *bodies,
                self._programs(),
            ]
        )

    def _cpp_reference(self) -> str:
        """Of C++ that Inductor generated: its source, which Inductor builds."""
        kernel = self.kernel
        if not self.options.allow_code:
            raise ReplayRefused(
                f"{self.reader.path}: {kernel.qualified_name}: its task has its source from the capture, which runs "
                f"with the task; --allow-code allows that"
            )
        lines = [
            f'"""{kernel.qualified_name}, with its source from the capture."""',
            "",
            "import torch",
            "from torch._inductor.async_compile import AsyncCompile",
            "",
            "compiling = AsyncCompile()",
        ]
        for number, program in self.kernels.items():
            stored = StoredCppKernel.read(contents_of(self.reader, self.reader.kernels[number]))
            if stored.source is None:
                raise ReplayRefused(f"{self.reader.path}: {kernel.qualified_name}: the capture has no source of it")
            types = [f"{'' if each.written else 'const '}{each.passed_as}" for each in stored.arguments]
            source = stored.source.partition(BINDINGS)[0].strip()
            lines.append(f"program_{program} = compiling.cpp_pybinding({types!a}, {source!a})")
        return "\n".join([*lines, "compiling.wait(globals())", self._programs()])

    def _programs(self) -> str:
        return _programs([f"program_{program}" for program in self.kernels.values()], self._function())

    def work(self, call: _Call) -> dict[str, Any]:
        found = work_of(self.reader.kernels[call.records[0].signature.kernel], _isolated(self.reader, call.records[0]))
        return {
            "flops": found.flops,
            "flops_reason": found.flops_reason or None,
            "bytes_read": found.bytes_read,
            "bytes_written": found.bytes_written,
            "bytes_reason": found.bytes_reason or None,
            "compute_dtype": None if found.dtype is None else word_of(found.dtype),
        }


class _Encoder(VectorEncoder):
    """Tensors as check.py makes them."""

    def __init__(self, task: _Task, call: _Call) -> None:
        super().__init__(task.reader)
        self._task, self._storages = task, call.storages

    def tensor(self, value: TensorValue, tensor: torch.Tensor, key: str) -> dict[str, Any]:
        place = list(self._storages).index(value.storage)
        return self._task.tensor_json(value, self._storages[value.storage], place)


class _FusionTask(_Task):
    """The ops of a range, or of each pass through a scope, as one function."""

    kind = "fusion"

    def __init__(self, plan: Plan, wanted: OpSelection, options: TaskOptions) -> None:
        super().__init__(plan, wanted, options)
        self.sections = TritonSections(plan.reader, options.allow_code, FRAME)
        self._passes: dict[int, _Call] = {}
        self._bodies: dict[str, int] = {}

    def collect(self) -> None:
        known: dict[tuple[Any, ...], _Workload] = {}
        for records, stop in self._ranges():
            if len(records) > _MOST_OPS:
                raise UsageError(
                    f"{self.wanted.text}: {len(records)} ops are too many for one function, {_MOST_OPS} are the most"
                )
            call = self._call(records, stop)
            program = self._bodies.setdefault(self._body(call), len(self._bodies))
            key = (f"{len(records)} ops, program {program}", json.dumps(self.arguments(call)))
            if key not in known:
                known[key] = _Workload(key, program, call)
                self.workloads.append(known[key])
            self._passes[call.ordinal] = call
            known[key].ordinals.append(call.ordinal)
            _times(known[key], records, 1)

    def _ranges(self) -> Iterator[tuple[list[Record], int]]:
        """The ops of each pass, and where it ends."""
        kept = resolve_selection(self.reader, self.wanted)
        passes: list[list[Record]] = [[]]
        used: set[int] = set()
        depth = 0
        for ordinal in kept.ordinals.tolist():
            record = self.reader.record(ordinal)
            if record.kind is RecordKind.scope_begin and self.wanted.scope is not None:
                if not depth:
                    passes.append([])
                    used.clear()
                depth += 1
            elif record.kind is RecordKind.scope_end:
                depth = max(depth - 1, 0)
            elif record.kind is RecordKind.op:
                passes[-1].append(record)
                used.update(value.storage for value in tensors_of((*record.args, *record.results)))
            elif passes[-1] and (
                record.kind in (RecordKind.unsupported, RecordKind.collective)
                or (
                    record.kind is RecordKind.storage_import
                    and any(isinstance(value, StorageValue) and value.id in used for value in record.args)
                )
            ):
                raise ReplayRefused(
                    f"{self.reader.path}: ordinal {ordinal} ({record.kind.name}) is between the ops, so they are no "
                    f"function of their inputs"
                )
        for each in passes:
            if each:
                yield each, each[-1].ordinal + 1

    def call_at(self, ordinal: int) -> _Call:
        return self._passes[ordinal]

    def _call(self, records: list[Record], stop: int) -> _Call:
        made: set[int] = set()
        inputs: list[tuple[str, Value]] = []
        taken: set[int] = set()
        last: dict[int, int] = {}
        created: dict[int, TensorValue] = {}
        used_at: dict[int, int] = {}
        for record in records:
            why = problem_of(self.reader, (*record.args, *record.results))
            resolved = self.plan.kernels[record.signature.kernel]
            if not isinstance(resolved, ResolvedKernel):
                why = why or str(resolved)
            elif resolved.draws and not draws_nothing(record, resolved):
                why = "it draws random numbers"
            if why is not None:
                raise self.refuse(record, why)
            for value in tensors_of(record.args):
                if value.storage not in made and value.storage not in taken:
                    taken.add(value.storage)
                    inputs.append((f"x{len(inputs)}", value))
                last[value.storage] = used_at[value.storage] = record.ordinal
            for value in tensors_of(record.results):
                if value.storage not in taken:
                    made.add(value.storage)
                    created.setdefault(value.id, value)
                last[value.storage] = record.ordinal
        storages = _storages(inputs, False, self.reader)
        for record in records:
            for slot in self.written_slots(record):
                value = list(tensors_of(record.args))[slot]
                if value.storage in storages:
                    storages[value.storage].written = True
        return _Call(records, storages, self._outputs(records, stop, created, last), last)

    def _outputs(
        self, records: list[Record], stop: int, created: dict[int, TensorValue], last: dict[int, int]
    ) -> list[TensorValue | Value]:
        """What the ops make and do not keep to themselves: tensors that are used later, and tensors and numbers that
        nothing uses. What died before any other op was nobody's result, unless everything did."""
        storages = {value.storage for value in created.values()}
        died: set[int] = set()  # before any other op
        later: set[int] = set()
        among = True
        for record in self.reader.records(records[0].ordinal):
            among &= record.kind is not RecordKind.op or record.ordinal < stop
            if record.kind is RecordKind.storage_release:
                numbers = {value.id for value in record.args if isinstance(value, StorageValue)} & storages
                died |= numbers if among else set()
                storages -= numbers
                if not storages:
                    break
            elif record.kind is not RecordKind.digest and not among:
                later |= {value.storage for value in tensors_of(record.args)} & storages
        made: list[tuple[TensorValue | Value, bool]] = []
        for record in records:
            for value in nested_values(record.results):
                if isinstance(value, TensorValue):
                    if created.get(value.id) is value and (
                        value.storage in later or last[value.storage] == record.ordinal
                    ):
                        made.append((value, value.storage not in died))
                elif isinstance(value, bool | int | float | complex | str):
                    made.append((value, True))
        found = [value for value, lives in made if lives] or [value for value, _lives in made]
        if len(found) == 0 and not any(self.written_slots(record) for record in records):
            raise ReplayRefused(
                f"{self.reader.path}: {self.wanted.text}: the ops have no result that is used after them"
            )
        return found

    def _body(self, call: _Call) -> str:
        """The function of a pass, with names in order of appearance: passes that do the same have one text."""
        events = ScriptEvents(self.reader)
        events.inputs = [Input(number, storage.end, None) for number, storage in call.storages.items()]
        events.events = [ScriptOp(record) for record in call.records]
        body = BodyWriter(events, operator_changes(self.reader), self.sections).write()
        lines = [f"s{number} = x{place}.untyped_storage()" for place, number in enumerate(call.storages)]
        lines += [re.sub(r"  # \d+: ", "  # ", line) for line in body.lines]
        names = []
        for record in call.records:
            for index, value in enumerate(record.results):
                for each in nested_values([value]):
                    if any(each is output for output in call.outputs):
                        names.append(
                            f"t{each.id}" if isinstance(each, TensorValue) else f"value_{record.ordinal}_{index}"
                        )
        lines.append(f"return {', '.join(names)}")
        text = "\n".join(f"    {line}" for line in lines)
        numbers: dict[str, str] = {}

        def renamed(found: re.Match[str]) -> str:
            return numbers.setdefault(found[0], f"{found[0][0]}{len(numbers)}")

        parameters = ", ".join(f"x{place}" for place in range(len(call.storages)))
        return f"({parameters}):\n" + re.sub(r"\b(?:[ts]\d+|value_\d+_\d+)\b", renamed, text)

    def arguments(self, call: _Call) -> dict[str, Any]:
        return {
            f"x{place}": self.tensor_json(storage.tensors[0][1], storage, place)
            for place, storage in enumerate(call.storages.values())
        }

    def description(self) -> dict[str, Any]:
        records = self.workloads[0].first.records
        names = list(dict.fromkeys(self.reader.kernels[each.signature.kernel].qualified_name for each in records))
        return {
            "name": self.wanted.text.replace("--", ""),
            "kind": self.kind,
            "operator": None,
            "schema": None,
            "function": "fused",
            "operators": names,
        }

    def reference(self) -> str:
        programs = [f"def program_{number}{body}\n" for body, number in self._bodies.items()]
        names = [f"program_{number}" for number in self._bodies.values()]
        return "\n".join(
            [
                f'"""The ops of {self.wanted.text}, as captured. Arguments are the first views of their storages."""',
                "",
                *self.sections.head(),
                "import torch",
                *self.sections.imports(),
                script_helpers(["view("]),
                *self.sections.sections(),
                "",
                "",
                "\n\n".join(programs),
                f"\n{_programs(names, 'fused')}",
            ]
        )

    def work(self, call: _Call) -> dict[str, Any]:
        known = unknown = 0
        dtype = None
        for record in call.records:
            found = work_of(self.reader.kernels[record.signature.kernel], _isolated(self.reader, record))
            known += found.flops or 0
            unknown += found.flops is None and found.kernel_class != "data movement"
            dtype = dtype or found.dtype
        read = sum(each.end - each.first for each in call.storages.values())
        written = sum(each.end - each.first for each in call.storages.values() if each.written)
        return {
            "flops": known or None,
            "flops_reason": f"at least: of {unknown} ops they are not known" if unknown else None,
            "bytes_read": read,
            "bytes_written": written + call.output_bytes,
            "bytes_reason": None,
            "compute_dtype": None if dtype is None else word_of(dtype),
        }


def _programs(names: list[str], function: str) -> str:
    """The list of functions; a single one also has the name that a candidate's has."""
    alone = f"{function} = {names[0]}  # this file is a candidate as it stands\n" if len(names) == 1 else ""
    return f"PROGRAMS = [{', '.join(names)}]\n{alone}"


def _readme(facts: dict[str, Any]) -> str:
    rows = "\n".join(
        f"| {each['name']} | {each['calls']} | "
        + ("?" if each["share_of_captured_time"] is None else f"{each['share_of_captured_time']:.1%}")
        + f" | {each['flops'] if each['flops'] is not None else 'unknown'} | {each['bytes_read']} | "
        + f"`{each['signature']}` |"
        for each in facts["workloads"]
    )
    what = f"`{facts['schema']}`" if facts["schema"] else f"the ops {', '.join(facts['operators'])}, as one function"
    return f"""# {facts["name"]}

Write a function `{facts["function"]}` that replaces {what}.

`reference.py` has the original, `task.json` the calls that a captured program makes of it; `*.safetensors` have their
inputs, and what they gave.

```sh
python check.py                 # the reference itself
python check.py mine.py         # is it right, and how fast is it?
python check.py --variants --guard mine.py
opreplay-benchmark --compare --candidates=mine.py .     # with OpReplay: ranked, with intervals
```

The function gets the arguments of the original: those under `keyword_only` in `task.json` by name, the others by
position. It must return new memory where the original does, write what the original writes and nothing else, and be
right for other values than the captured ones. `check.py` says why it rejects a kernel.

| workload | calls | of captured time | FLOPs | bytes read | signature |
| --- | --- | --- | --- | --- | --- |
{rows}
"""
