"""Imports TraceLens EventReplay IR: `event_replay_ir.json`, or the zip artifact that contains it.

The IR lists single calls with their counts; nothing connects them, so each gets separate inputs. It names operators
without their overloads, which are found by the recorded arguments; artifacts written by opreplay-export have them, and
devices and shared memory as well, in members named `opreplay`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch

from replayfmt.errors import InvalidCapture
from replayfmt.format.codes import Layout, TensorFlag
from replayfmt.format.model import TensorMeta
from replayfmt.format.validation import parse_json
from replayfmt.format.writer import Moment

from .common.arguments import (
    NOTHING,
    UNRECORDED,
    ArgumentForm,
    ArgumentReader,
    ArgumentType,
    Binding,
    DeviceName,
    RecordedArgument,
    TensorSpec,
    dtype_of,
    fits,
    of_list,
    of_value,
    parse,
    schema_type,
)
from .common.json_stream import JsonStream
from .common.operators import FoundOperator, OperatorChoice, Operators
from .common.options import ImportOptions
from .common.report import ImportReport, ReportEntry
from .common.results import Trials, refusal
from .common.synthesis import (
    ImportedSession,
    Tensor,
    TracedStorage,
    bytes_needed,
    contiguous,
    imported_session,
    plain_device,
)
from .common.trace_files import TraceFile

KIND = "tracelens"
BY = "the IR"
_OWN = "opreplay"
_IR_NAME = "event_replay_ir.json"
# EventReplay runs on CUDA devices by default; the IR does not say where calls ran.
_DEVICE = "cuda:0"
_TENSOR = ArgumentType("Tensor")
_FLAGS = {"conj": TensorFlag.conj, "neg": TensorFlag.neg}


def import_tracelens(
    path: str | PathLike[str], out: str | PathLike[str], options: ImportOptions | None = None, *, force: bool = False
) -> ImportReport:
    """Make the capture `out` of an IR file, and report on it.

    Raises CaptureNotFound and InvalidCapture for the file, OutputExists and CaptureFailed for the capture.
    """
    options = options or ImportOptions()
    report = ImportReport(Path(path).name, KIND)
    operators = Operators(options.libraries, options.names)
    file = TraceFile(
        path, wanted=lambda name: Path(name).name == _IR_NAME or name.endswith("_ir.json"), progress=options.progress
    )
    with JsonStream(file) as stream:
        entries = (value for key, value in stream.entries(()) if key == "")
        first = next(entries, None)
        if not isinstance(first, dict) or not _is_entry(first):
            raise InvalidCapture(
                f"{fspath(path)}: not EventReplay IR: expected a list of objects with op_name and "
                "replay_ir" + "".join(f"; {problem}" for problem in stream.problems[:1])
            )
        session = imported_session(
            KIND, report.source, policies={"devices": "recorded" if isinstance(first.get(_OWN), dict) else "assumed"}
        )
        with ImportedSession(out, session, force=force) as capture:
            writer = _Writer(capture, report, operators)
            _describe_devices(capture, first.get(_OWN), report)
            writer.write(first)
            for entry in entries:
                if _is_entry(entry):
                    writer.write(entry)
                else:
                    report.problems.append("an entry that is not an object with op_name and replay_ir was passed over")
        report.problems += [str(problem) for problem in stream.problems]
    report.notes.append("calls have no inputs in common: each gets its own")
    if writer.placed:
        report.notes.append(f"{BY} does not say where calls ran: assumed to be {_DEVICE}, where EventReplay runs them")
    return report


def _is_entry(value: Any) -> bool:
    return (
        isinstance(value, dict) and isinstance(value.get("op_name"), str) and isinstance(value.get("replay_ir"), dict)
    )


def _describe_devices(capture: ImportedSession, own: Any, report: ImportReport) -> None:
    """Copy an export's descriptions of the devices it names."""
    devices = own.get("devices") if isinstance(own, dict) else None
    for name, about in devices.items() if isinstance(devices, dict) else ():
        try:
            texts = [str(about.get(key, "")) for key in ("name", "fingerprint")]
            if texts[1] and not isinstance(parse_json(texts[1]), dict):
                raise ValueError("its fingerprint is not a JSON object")
            capture.device(name, replace(plain_device(name), name=texts[0], fingerprint=texts[1]))
        except (ValueError, AttributeError) as error:
            report.problems.append(f"what the file says of device {name!r:.40} was passed over: {error}")


@dataclass
class _Beside:
    """What an `opreplay` member says about one tensor."""

    storage: int | None
    storage_bytes: int
    flags: TensorFlag


@dataclass
class _Call:
    """One entry, parsed. The last `keywords` arguments were given by name. `beside` has what is known about tensors, by
    the identity in their specs."""

    name: str
    recorded: list[RecordedArgument]
    names: list[str]
    keywords: int = 0
    beside: dict[int, _Beside] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class _Writer:
    """Writes one entry after the other. `placed`: the device of some call had to be assumed."""

    def __init__(self, capture: ImportedSession, report: ImportReport, operators: Operators) -> None:
        self._capture, self._report, self._operators = capture, report, operators
        self._reader, self._trials = ArgumentReader(operators.names), Trials()
        self.placed = False

    def write(self, entry: Mapping[str, Any]) -> None:
        name = str(entry["op_name"])
        given = entry.get("count")
        count = given if isinstance(given, int) and not isinstance(given, bool) and given > 0 else 1
        own = entry.get(_OWN)
        call = _read(name, entry["replay_ir"])
        if not own:
            # TraceLens reads profiler traces, which drop strings: it writes an empty one.
            call.recorded = [
                UNRECORDED if each.form is ArgumentForm.text and not each.value else each for each in call.recorded
            ]
        choice, binding = self._bind(call, own if isinstance(own, dict) else {})
        if choice.operator is None:
            self._unsupported(call, count, choice.reason, choice.detail)
            return
        missing = [*call.problems, *binding.missing]
        doubtful = ""
        if not missing:
            schema = choice.operator.schema
            impossible, doubtful = refusal(schema, self._trials.of(schema, binding.arguments))
            missing += [impossible] if impossible else []
        if missing:
            self._unsupported(call, count, "import_incomplete", "; ".join(missing))
            return
        assumed = [*choice.assumed, *binding.assumed, *([doubtful] if doubtful else [])]
        self.placed |= not isinstance(own, dict) and _on_device(binding)
        note: dict[str, Any] = {"import": "inferred" if assumed else "exact", "count": count}
        if assumed:
            note["assumed"] = assumed
        try:
            ordinal = self._op(call, choice, binding, note)
        except ValueError as error:
            self._unsupported(call, count, "import_incomplete", str(error))
            return
        shown, told, operator = _shown(call), tuple(assumed), choice.operator
        self._report.add(
            (name, operator.overload, shown, told),
            lambda: ReportEntry(name, operator.overload, "inferred" if told else "exact", shown, operator.found, told),
            ordinal,
            count,
        )

    def _bind(self, call: _Call, own: Mapping[str, Any]) -> tuple[OperatorChoice, Binding]:
        """The operator and its arguments: by name if the entry gives the overload, else by position."""
        text = own.get("schema")
        choice = self._operators.by_schema(text) if isinstance(text, str) else None
        if choice is None or choice.operator is None:
            choice = self._by_names(call) or self._operators.choose(call.name, call.recorded)
        if choice.reason == "no_schema":  # a plain function, by the types of what it was given
            choice = self._operators.by_types(call.name, call.recorded, call.names[len(call.names) - call.keywords :])
        if choice.operator is None:
            return choice, Binding()
        schema = choice.operator.schema
        if all(call.names) and set(call.names) <= {argument.name for argument in schema.arguments}:
            return choice, _by_name(self._reader, schema, call, bool(own))
        return choice, self._reader.bind(schema, call.recorded, by=BY)

    def _by_names(self, call: _Call) -> OperatorChoice | None:
        """The overload whose argument names fit best; None leaves the choice to the positions."""
        best: tuple[int, FoundOperator] | None = None
        for each in self._operators.candidates(call.name)[0]:
            points = _named_score(each.schema, call) if each.dispatched else None
            if points is not None and (best is None or points > best[0]):
                best = points, each
        return None if best is None else OperatorChoice(best[1], assumed=self._operators.alias(call.name, best[1]))

    def _op(self, call: _Call, choice: OperatorChoice, binding: Binding, note: dict[str, Any]) -> int:
        assert choice.operator is not None
        storages: dict[int, TracedStorage] = {}

        def value(each: Any) -> Any:
            if isinstance(each, TensorSpec):
                return self._tensor(each, call, storages)
            if isinstance(each, list):
                return [value(item) for item in each]
            if isinstance(each, DeviceName) and each.name is None:
                return DeviceName(_DEVICE)
            return each

        arguments = [(name, value(each)) for name, each in binding.arguments]
        # The IR has no results, and no other call uses them.
        ordinal = self._capture.op(choice.operator.kernel, arguments, None, Moment(), note)
        self._capture.release(list(dict.fromkeys(storages.values())))
        return ordinal

    def _tensor(self, spec: TensorSpec, call: _Call, storages: dict[int, TracedStorage]) -> Tensor:
        assert spec.dtype is not None and spec.sizes is not None
        strides = contiguous(spec.sizes) if spec.strides is None else spec.strides
        device = self._capture.device(spec.device or _DEVICE)
        beside = call.beside.get(spec.identity) if isinstance(spec.identity, int) else None
        length = bytes_needed(spec.dtype, spec.sizes, strides, spec.offset)
        flags = TensorFlag(0)
        if beside is not None:
            flags = beside.flags
            length = max(length, beside.storage_bytes)
        number = beside.storage if beside is not None and beside.storage is not None else -1 - len(storages)
        storage = storages.get(number)
        if storage is None or storage.bytes < length:
            storage = storages[number] = TracedStorage(length, device)
        return Tensor(storage, TensorMeta(spec.dtype, Layout.strided, device, spec.sizes, strides, flags), spec.offset)

    def _unsupported(self, call: _Call, count: int, reason: str, detail: str) -> None:
        note = {"import": "incomplete", "count": count}
        ordinal = self._capture.unsupported(reason, call.name, detail, Moment(), note)
        shown = _shown(call)
        self._report.add(
            (call.name, shown, reason, detail),
            lambda: ReportEntry(call.name, "", "incomplete", shown, reason=reason, detail=detail),
            ordinal,
            count,
        )


def _named_score(schema: torch.FunctionSchema, call: _Call) -> int | None:
    """How well arguments fit a schema by their names; None: not at all."""
    by_name = dict(zip(call.names, call.recorded, strict=True))
    if not set(by_name) <= {argument.name for argument in schema.arguments}:
        return None
    total = 0
    for argument in schema.arguments:
        recorded = by_name.get(argument.name)
        if recorded is None:
            if not argument.has_default_value():
                return None
            total -= 1
            continue
        well = fits(schema_type(argument), recorded)
        if well is None:
            return None
        total += well
    return total


def _by_name(reader: ArgumentReader, schema: torch.FunctionSchema, call: _Call, complete: bool) -> Binding:
    """Arguments by their names. If the IR is `complete`, what it omits was omitted from the call."""
    by_name = dict(zip(call.names, call.recorded, strict=True))
    numbers = {name: each.value for name, each in by_name.items() if each.form is ArgumentForm.number}
    binding = Binding()
    full = reader.bind(schema, [by_name.get(argument.name, NOTHING) for argument in schema.arguments], by=BY)
    for argument in schema.arguments:
        if argument.name in by_name:
            continue
        if not argument.has_default_value():
            binding.missing.append(f"{argument.name}: {BY} does not have it, and it has no default")
        elif not complete:
            binding.assumed.append(
                f"{argument.name}={argument.default_value!r}: {BY} does not have it; the schema's default"
            )
    bound = dict(full.arguments)
    for argument in schema.arguments:
        # Operators take Python numbers where their schema says Tensor, and promote types differently for them.
        if schema_type(argument) == _TENSOR and argument.name in numbers:
            bound[argument.name] = numbers[argument.name]
    binding.arguments = [
        (argument.name, bound[argument.name])
        for argument in schema.arguments
        if argument.name in by_name and argument.name in bound
    ]
    binding.assumed += [text for text in full.assumed if text.partition(":")[0].partition("=")[0] in by_name]
    binding.missing += [
        text for text in full.missing if (name := text.partition(":")[0]) in by_name and name not in bound
    ]
    return binding


def _read(name: str, ir: Mapping[str, Any]) -> _Call:
    call = _Call(name, [], [])
    for key in ("list_pos_args", "list_kwargs"):
        arguments = ir.get(key, [])
        for argument in arguments if isinstance(arguments, list) else []:
            if not isinstance(argument, dict) or "value" not in argument:
                call.problems.append(f"{BY} has an argument without a value")
                continue
            kind = str(argument.get("arg_type", ""))
            call.names.append(str(argument.get("arg_name", "")))
            call.keywords += key == "list_kwargs"
            call.recorded.append(_argument(call, argument["value"], kind, argument.get(_OWN)))
    return call


def _argument(call: _Call, value: Any, kind: str, own: Any) -> RecordedArgument:
    if isinstance(own, dict) and "generator" in own:
        return RecordedArgument(ArgumentForm.text, str(own["generator"]), shown="generator")
    if isinstance(value, dict):
        return _tensor_argument(call, value, own if isinstance(own, dict) else {})
    if isinstance(value, list):
        beside = own if isinstance(own, list) and len(own) == len(value) else [None] * len(value)
        items = [_argument(call, each, kind, mine) for each, mine in zip(value, beside, strict=True)]
        return of_list(items, str(value))
    if isinstance(value, str) and kind.startswith(("Scalar", "complex", "number")):
        try:
            return of_value(complex(value))  # as opreplay-export writes what JSON has no numbers for
        except ValueError:
            return parse(value)
    return of_value(value)


def _tensor_argument(call: _Call, value: Mapping[str, Any], own: Mapping[str, Any]) -> RecordedArgument:
    shape, strides = _integers(value.get("shape")), _integers(value.get("strides"))
    if shape is None:
        return RecordedArgument(ArgumentForm.truncated, shown=str(dict(value))[:80])
    number = len(call.beside)
    flags = [_FLAGS[each] for each in own.get("flags", ()) if each in _FLAGS]
    storage = own.get("storage")
    call.beside[number] = _Beside(
        storage if isinstance(storage, int) else None, _natural(own.get("storage_bytes")), TensorFlag(sum(flags))
    )
    device = own.get("device")
    spec = TensorSpec(
        dtype_of(str(value.get("dtype", ""))),
        shape,
        strides if strides else None if shape else (),
        device if isinstance(device, str) else None,
        _natural(own.get("offset")),
        number,
    )
    return RecordedArgument(ArgumentForm.tensor, tensor=spec, shown=f"{value.get('dtype')}{list(shape)}")


def _integers(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        return None
    return tuple(value)


def _natural(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _on_device(binding: Binding) -> bool:
    """Whether a call has tensors, or makes some, whose device the IR does not say."""
    return any(
        isinstance(each, TensorSpec | DeviceName)
        for _name, value in binding.arguments
        for each in (value if isinstance(value, list) else [value])
    )


def _shown(call: _Call) -> str:
    return ", ".join(each.shown for each in call.recorded)
