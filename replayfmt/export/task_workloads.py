"""A kernel task as a folder: workloads with their inputs and outputs, task.json, reference.py, check.py, README.md.

Which calls are workloads, and what the reference is, says the kind of task (kernel_task.py). Contents come from a
verified replay, or are synthesized as a replay without content does it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from replayfmt.benchmark.candidates.judged import check_text
from replayfmt.dump.selection import KeptRecords, OpSelection
from replayfmt.errors import CaptureFailed, ReplayRefused
from replayfmt.format.codes import DType, RecordKind, TensorFlag
from replayfmt.format.model import Record, TensorValue, Value, spanned, tensors_of
from replayfmt.format.reader import CaptureReader
from replayfmt.format.signature_grammar import row_major
from replayfmt.format.signature_layout import SlotLayout
from replayfmt.pytorch.overloads import parse_schema
from replayfmt.pytorch.tensors.memory import TORCH_DTYPE, byte_tensor, row_major_bytes, view_inside
from replayfmt.replay.op_tensors import observe_ops
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.records import GiveTensor, python_values
from replayfmt.replay.run.steps import IsolatedCall
from replayfmt.trim.schedule import Planner
from replayfmt.trim.script import InputFill, made_inputs, script_helpers
from replayfmt.trim.trimming import Verify
from replayfmt.trim.vectors import Array, word_of, write_safetensors

from .task_forms import Form, write_form

Inputs = Literal["captured", "synthesized", "none"]
FORMAT, VERSION = "opreplay-kernel-task", 1
_MOST_CASES = 2
ALIGNMENT = 64


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
class TaskStorage:
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
class TaskCall:
    """One call of the kernel, or one pass through the ops that become one function."""

    records: list[Record]
    storages: dict[int, TaskStorage]
    outputs: list[TensorValue | Value]
    last_use: dict[int, int]  # by storage, the last ordinal that uses it

    @property
    def ordinal(self) -> int:
        return self.records[0].ordinal

    @property
    def output_bytes(self) -> int:
        return sum(each.meta.bytes for each in self.outputs if isinstance(each, TensorValue))


@dataclass
class Workload:
    """Calls that are alike. `function` is the source of what they call, and `arguments` the JSON of what that gets."""

    key: tuple[Any, ...]
    program: int
    first: TaskCall
    ordinals: list[int] = field(default_factory=list)
    calls: int = 0
    host_ns: int = 0
    device_ns: int = 0
    observed: list[TaskCall] = field(default_factory=list)
    cases: list[dict[str, Any]] = field(default_factory=list)
    name: str = ""

    @property
    def captured_ns(self) -> int:
        return self.device_ns or self.host_ns

    @property
    def bytes(self) -> int:
        """About what one case takes."""
        return sum(each.end - each.first for each in self.first.storages.values()) + self.first.output_bytes


class Task:
    """What both kinds of tasks have in common."""

    kind = ""

    def __init__(self, plan: Plan, wanted: OpSelection, options: TaskOptions) -> None:
        self.plan, self.reader, self.wanted, self.options = plan, plan.reader, wanted, options
        self.workloads: list[Workload] = []
        self.left_out: list[str] = []
        self.programs: list[str] = []  # names of functions in reference.py

    def collect(self) -> None:
        raise NotImplementedError

    def reference(self) -> str:
        """The text of reference.py, without how inputs are made."""
        raise NotImplementedError

    def write_launch(self, folder: Path) -> None:
        """Write what is needed to launch a binary in place of the kernel's, if it has one."""

    def description(self) -> dict[str, Any]:
        """What task.json says of this kind."""
        raise NotImplementedError

    def arguments(self, call: TaskCall) -> dict[str, Any]:
        raise NotImplementedError

    def keyword_only(self, call: TaskCall) -> list[str]:
        return []

    def work(self, call: TaskCall) -> dict[str, Any]:
        raise NotImplementedError

    def write(self, folder: Path, out: str) -> TaskResult:
        self.collect()
        self.workloads.sort(key=lambda each: (-each.captured_ns, -each.calls, each.first.ordinal))
        for number, workload in enumerate(self.workloads):
            workload.name = f"w{number:02d}"
        self._choose()
        verified = self._contents(folder)
        (folder / "reference.py").write_text(self.reference() + self._make(), encoding="utf-8")
        self.write_launch(folder)
        (folder / "check.py").write_text(check_text(), encoding="utf-8")
        facts = self._json(verified)
        (folder / "task.json").write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(_readme(facts), encoding="utf-8")
        if self.options.form is not None:
            write_form(folder, Path(os.path.abspath(out)), facts, self.reference(), self.options.form)
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

    def call_at(self, ordinal: int) -> TaskCall:
        raise NotImplementedError

    def _made(self, calls: list[TaskCall]) -> dict[int, InputFill]:
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

    def keep(self, folder: Path, workload: Workload, call: TaskCall, arrays: list[Array]) -> None:
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

    def _storage_json(self, workload: Workload, storage: TaskStorage) -> dict[str, Any]:
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

    def tensor_json(self, value: TensorValue, storage: TaskStorage, place: int) -> dict[str, Any]:
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


def _filled(storage: TaskStorage, place: int) -> bytes:
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


def _array(storage: TaskStorage, data: bytes) -> Array:
    """A storage's content, with sizes where its first view is all of it."""
    meta = storage.tensors[0][1].meta
    item = TORCH_DTYPE[meta.dtype].itemsize
    if meta.bytes == len(data) and row_major(meta.sizes, meta.strides):
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

    def __init__(self, task: Task, folder: Path, chosen: Sequence[tuple[Workload, TaskCall]]) -> None:
        self._task, self._folder = task, folder
        self._by_ordinal: dict[int, list[tuple[Workload, TaskCall]]] = defaultdict(list)
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


def _bytes_of(tensor: torch.Tensor, storage: TaskStorage) -> bytes:
    return row_major_bytes(byte_tensor(tensor.untyped_storage())[storage.first : storage.end])


def storages_of(values: Sequence[tuple[str, Value]], crop: bool, reader: CaptureReader) -> dict[int, TaskStorage]:
    """The storages of named arguments, in order. With `crop` only the bytes that the tensors span, with their
    alignment."""
    found: dict[int, TaskStorage] = {}
    for name, value in values:
        for place, tensor in enumerate(tensors_of([value])):
            full = name if isinstance(value, TensorValue) else f"{name}.{place}"
            found.setdefault(tensor.storage, TaskStorage(tensor.storage)).tensors.append((full, tensor))
    for number, storage in found.items():
        storage.end = reader.storage(number).bytes
        if crop:
            spans = [_span(tensor) for _name, tensor in storage.tensors]
            first = min(low for low, _high in spans) // ALIGNMENT * ALIGNMENT
            storage.first, storage.end = first, max(first, *(high for _low, high in spans))
    return found


def _span(value: TensorValue) -> tuple[int, int]:
    """The bytes of its storage that a tensor reaches."""
    item = TORCH_DTYPE[value.meta.dtype].itemsize
    return value.offset * item, (value.offset + spanned(value.meta.sizes, value.meta.strides)) * item


def add_times(workload: Workload, records: Sequence[Record], calls: int) -> None:
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


def isolated_call(reader: CaptureReader, record: Record) -> IsolatedCall:
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


def programs_text(names: list[str], function: str) -> str:
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
