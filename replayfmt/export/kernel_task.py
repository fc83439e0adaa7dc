"""Turns a kernel, a scope or a range of ops of a capture into a task for authors of kernels: one folder that needs only
PyTorch (docs/kernel-tasks.md).

A kernel's task has a workload for each distinct call; that of a scope or a range is one function of all its ops, with a
workload for each distinct pass. `task_workloads` writes the folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replayfmt.benchmark.candidates.binaries import LAUNCH
from replayfmt.benchmark.candidates.task_cases import load_task
from replayfmt.benchmark.per_op.groups import work_of
from replayfmt.dump.kernel_skeleton import kernel_skeleton
from replayfmt.dump.selection import OpSelection, resolve_selection
from replayfmt.errors import ReplayRefused, UsageError
from replayfmt.format.attachments import contents_of
from replayfmt.format.codes import KernelKind, RecordKind, TensorFlag
from replayfmt.format.model import Kernel, Record, StorageValue, TensorValue, Value, nested_values, tensors_of
from replayfmt.format.output import new_folder
from replayfmt.format.signature_text import signature_of
from replayfmt.format.validation import parse_json
from replayfmt.pytorch.overloads import parse_schema
from replayfmt.pytorch.tensors.memory import TORCH_DTYPE
from replayfmt.pytorch.triton.kernels import StoredKernel
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.kernels import ResolvedKernel
from replayfmt.trim.script import FRAME, operator_changes, script_helpers
from replayfmt.trim.script_text import BodyWriter, Input, ScriptEvents
from replayfmt.trim.script_triton import CodeSections, identifier
from replayfmt.trim.trimming import refuse_incomplete
from replayfmt.trim.vectors import VectorEncoder, draws_nothing, op_problem, problem_of, word_of

from .task_workloads import (
    ALIGNMENT,
    Task,
    TaskCall,
    TaskOptions,
    TaskResult,
    Workload,
    add_times,
    isolated_call,
    programs_text,
    storages_of,
)

_MOST_OPS = 2000  # of one fused function


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


class _KernelTask(Task):
    """The calls of one kernel: an operator of PyTorch's own, or code that the capture has."""

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
        known: dict[tuple[Any, ...], Workload] = {}
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
            offsets = [value.offset * TORCH_DTYPE[value.meta.dtype].itemsize % ALIGNMENT for value in tensors]
            key = (str(signature_of(record, self.reader, values=True)), tuple(first_uses), tuple(offsets), program)
            workload = known.get(key)
            if workload is None:
                why = op_problem(self.plan, record)
                if why is None and any(value.meta.flags & TensorFlag.zero for value in tensors):
                    why = "a tensor has no memory"
                if why is not None:
                    self.left_out.append(f"ordinal {record.ordinal} ({key[0]}): {why}")
                    known[key] = Workload(key, program, TaskCall([record], {}, [], {}))
                    continue
                workload = known[key] = Workload(key, program, self._call(record))
                self.workloads.append(workload)
            workload.ordinals.append(record.ordinal)
            add_times(workload, [record], record.calls)
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

    def call_at(self, ordinal: int) -> TaskCall:
        return self._call(self.reader.record(ordinal))

    def _call(self, record: Record) -> TaskCall:
        named = list(zip((node.name for node in record.signature.args), record.args, strict=True))
        storages = storages_of(named, self.options.inputs == "captured", self.reader)
        written = self.written_slots(record)
        for slot, value in enumerate(tensors_of(record.args)):
            storages[value.storage].written |= slot in written
        outputs: list[TensorValue | Value] = [
            each for each in nested_values(record.results) if each is not None and not isinstance(each, list | tuple)
        ]
        last = dict.fromkeys((value.storage for value in tensors_of((*record.args, *record.results))), record.ordinal)
        return TaskCall([record], storages, outputs, last)

    def arguments(self, call: TaskCall) -> dict[str, Any]:
        encoder = _Encoder(self, call)
        (record,) = call.records
        return {
            node.name: encoder.value(value, None, node.name)
            for node, value in zip(record.signature.args, record.args, strict=True)
        }

    def keyword_only(self, call: TaskCall) -> list[str]:
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
            "configurations": [self._configuration(self.reader.kernels[each]) for each in self.kernels],
        }

    def _configuration(self, kernel: Kernel) -> str | None:
        """What the program's autotuner chose for a kernel, by program; None without one."""
        if kernel.kind is not KernelKind.triton:
            return None
        chosen = parse_json(contents_of(self.reader, kernel)["metadata"]).get("configuration")
        return None if chosen is None else str(chosen)

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
        sections = CodeSections(self.reader, self.options.allow_code, FRAME)
        bodies = []
        for number, program in self.kernels.items():
            names = [argument.name for argument in parse_schema(self.reader.kernels[number].schema).arguments]
            given = {name: name for name in names}
            if kernel.kind is KernelKind.triton:
                grid = StoredKernel.read(contents_of(self.reader, self.reader.kernels[number])).grid
                given[grid] = f"*{grid}"
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
                programs_text([f"program_{program}" for program in self.kernels.values()], self._function()),
            ]
        )

    def write_launch(self, folder: Path) -> None:
        if self.kernel.kind is KernelKind.triton and len(self.kernels) == 1:
            (folder / LAUNCH).mkdir()
            for role, content in contents_of(self.reader, self.kernel).items():
                (folder / LAUNCH / role).write_bytes(content)

    def work(self, call: TaskCall) -> dict[str, Any]:
        (record,) = call.records
        found = work_of(self.reader.kernels[record.signature.kernel], isolated_call(self.reader, record))
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

    def __init__(self, task: Task, call: TaskCall) -> None:
        super().__init__(task.reader)
        self._task, self._storages = task, call.storages

    def tensor(self, value: TensorValue, tensor: Any, key: str) -> dict[str, Any]:
        place = list(self._storages).index(value.storage)
        return self._task.tensor_json(value, self._storages[value.storage], place)


class _FusionTask(Task):
    """The ops of a range, or of each pass through a scope, as one function."""

    kind = "fusion"

    def __init__(self, plan: Plan, wanted: OpSelection, options: TaskOptions) -> None:
        super().__init__(plan, wanted, options)
        self.sections = CodeSections(plan.reader, options.allow_code, FRAME)
        self._passes: dict[int, TaskCall] = {}
        self._bodies: dict[str, int] = {}

    def collect(self) -> None:
        known: dict[tuple[Any, ...], Workload] = {}
        for records, stop in self._ranges():
            if len(records) > _MOST_OPS:
                raise UsageError(
                    f"{self.wanted.text}: {len(records)} ops are too many for one function, {_MOST_OPS} are the most"
                )
            call = self._call(records, stop)
            program = self._bodies.setdefault(self._body(call), len(self._bodies))
            key = (f"{len(records)} ops, program {program}", json.dumps(self.arguments(call)))
            if key not in known:
                known[key] = Workload(key, program, call)
                self.workloads.append(known[key])
            self._passes[call.ordinal] = call
            known[key].ordinals.append(call.ordinal)
            add_times(known[key], records, 1)

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

    def call_at(self, ordinal: int) -> TaskCall:
        return self._passes[ordinal]

    def _call(self, records: list[Record], stop: int) -> TaskCall:
        made: set[int] = set()
        inputs: list[tuple[str, Value]] = []
        taken: set[int] = set()
        last: dict[int, int] = {}
        created: dict[int, TensorValue] = {}
        all_written: set[int] = set()
        unread: set[int] = set()  # written in place, and not read since
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
                last[value.storage] = record.ordinal
            for value in tensors_of(record.results):
                if value.storage not in taken:
                    made.add(value.storage)
                    created.setdefault(value.id, value)
                last[value.storage] = record.ordinal
            given = list(tensors_of(record.args))
            written = {given[slot].storage for slot in self.written_slots(record)}
            unread = unread - {value.storage for value in given} | written
            all_written |= written
        storages = storages_of(inputs, False, self.reader)
        for number, storage in storages.items():
            storage.written = number in all_written
        return TaskCall(records, storages, self._outputs(records, stop, created, last, unread), last)

    def _outputs(
        self, records: list[Record], stop: int, created: dict[int, TensorValue], last: dict[int, int], unread: set[int]
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
                        value.storage in later | unread or last[value.storage] == record.ordinal
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

    def _body(self, call: TaskCall) -> str:
        """The function of a pass, with names in order of appearance: passes that do the same have one text."""
        events = ScriptEvents(self.reader)
        events.inputs = [Input(number, storage.end, None) for number, storage in call.storages.items()]
        events.events = [*call.records]
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

    def arguments(self, call: TaskCall) -> dict[str, Any]:
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
                f"\n{programs_text(names, 'fused')}",
            ]
        )

    def work(self, call: TaskCall) -> dict[str, Any]:
        known = unknown = 0
        dtype = None
        for record in call.records:
            found = work_of(self.reader.kernels[record.signature.kernel], isolated_call(self.reader, record))
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
