"""The zip artifact: event_replay_ir.json, a script that replays it with only PyTorch, and a README.

Ops are TraceLens EventReplay IR: one JSON object for each call, with its arguments and how to make its tensors.
Integers and booleans that calls take (indices, lengths, masks) cannot be replaced with zeros and are stored.
"""

from __future__ import annotations

import base64
import json
import math
import os
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from replayfmt.dump.selection import OpSelection, resolve_selection
from replayfmt.errors import ReplayRefused, UsageError
from replayfmt.format.codes import DType, KernelKind, Layout, MemoryFormat, OpStatus, RecordKind, TensorFlag
from replayfmt.format.model import DeviceValue, GeneratorValue, Record, StorageValue, TensorValue
from replayfmt.format.operator_schema import parse_operator_schema
from replayfmt.format.output import check_place, new_file
from replayfmt.format.reader import CaptureReader
from replayfmt.format.source import Closing
from replayfmt.format.validation import counted, printable
from replayfmt.initializers import TensorInfo
from replayfmt.pytorch.operators import refused_names
from replayfmt.pytorch.tensors.memory import DTYPE_CODE, INTEGERS, TORCH_DTYPE, undispatched
from replayfmt.replay.plan import Plan

from .replay_script import DTYPES
from .replay_script import INTEGERS as INTEGERS_NAME
from .tables import refuse_capture

OWN = "opreplay"  # the member that holds what the IR has no place for

DTYPE_NAMES: dict[DType, str] = {
    **{DTYPE_CODE[dtype]: name for name, dtype in DTYPES.items()},
    **{DType[f"{sign}int{bits}"]: f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)},
}
_REAL = frozenset(
    {DType.float16, DType.bfloat16, DType.float32, DType.float64, DType.complex32, DType.complex64, DType.complex128}
)
_FLAGS = ((TensorFlag.conj, "conj"), (TensorFlag.neg, "neg"))


class Inexpressible(Exception):
    """Why the IR cannot express a call."""


class EntryMaker:
    """Makes the IR entries of a capture's ops."""

    def __init__(self, reader: CaptureReader) -> None:
        self._reader = reader

    def name(self, record: Record) -> str:
        """The operator of an op: `aten::mm.default`."""
        return self._reader.kernels[record.signature.kernel].qualified_name

    def devices(self) -> dict[str, dict[str, str]]:
        """The capture's device properties besides names."""
        known = {
            str(each): {"name": each.name, "fingerprint": each.fingerprint}
            for each in self._reader.devices
            if each is not None and (each.name or each.fingerprint)
        }
        return {name: {key: text for key, text in about.items() if text} for name, about in known.items()}

    def entry(self, record: Record, count: int = 1) -> dict[str, Any]:
        """The entry of an op. Raises Inexpressible."""
        kernel = self._reader.kernels[record.signature.kernel]
        if kernel.kind is not KernelKind.operator:
            raise Inexpressible(
                f"it is not an operator but a kernel of the kind {kernel.kind.name}, which the IR has no form for"
            )
        if record.signature.status is OpStatus.raised:
            raise Inexpressible("it raised an exception when it was captured, which the IR has no form for")
        try:
            schema = parse_operator_schema(kernel.schema)
        except ValueError as error:
            raise Inexpressible(f"its schema cannot be read: {error}") from None
        memory: dict[int, int] = {}  # numbers of the storages of this call
        places = {argument.name: place for place, argument in enumerate(schema.arguments)}
        positional: list[dict[str, Any]] = []
        keywords: list[dict[str, Any]] = []
        for node, value in zip(record.signature.args, record.args, strict=True):
            if node.name not in places:
                raise Inexpressible(f"its schema has no argument {node.name!r}")
            declared = schema.arguments[places[node.name]]
            written, beside = self._value(value, memory)
            item = {"arg_name": node.name, "arg_type": declared.type.text, "value": written}
            if beside is not None:
                item[OWN] = beside
            # An argument after one that was left to its default is named: the IR's positions have no gaps.
            in_turn = not declared.keyword_only and len(positional) == places[node.name]
            (positional if in_turn else keywords).append(item)
        own = {"overload": kernel.overload, "schema": kernel.schema}
        return {
            "op_name": kernel.name,
            "replay_ir": {"list_pos_args": positional, "list_kwargs": keywords},
            "count": count,
            OWN: own,
        }

    def _value(self, value: Any, memory: dict[int, int]) -> tuple[Any, Any]:
        """A value in the IR's form, and its extra members."""
        if isinstance(value, DType | Layout | MemoryFormat):
            return int(value) - 1, None  # as traces store them: PyTorch's numbers
        if value is None or isinstance(value, bool | str | int | float):
            return value, None
        if isinstance(value, complex):
            return str(value), None  # as Python's complex() reads it
        if isinstance(value, TensorValue):
            return self._tensor(value, memory)
        if isinstance(value, DeviceValue):
            return str(self._reader.devices[value.id]), None
        if isinstance(value, GeneratorValue):
            generator = self._reader.generators[value.id]
            if generator is None or not generator.default:
                raise Inexpressible("it draws from a random generator of its own")
            return None, {"generator": str(self._reader.devices[generator.device])}
        if isinstance(value, list | tuple):
            return self._items(value, memory)
        kind = "a storage" if isinstance(value, StorageValue) else type(value).__name__.removesuffix("Value").lower()
        raise Inexpressible(f"an argument is {kind}, which the IR has no form for")

    def _items(self, values: list[Any] | tuple[Any, ...], memory: dict[int, int]) -> tuple[Any, Any]:
        if isinstance(values, tuple):
            raise Inexpressible("an argument is a tuple, which the IR has no form for")
        pairs = [self._value(each, memory) for each in values]
        beside = [own for _value, own in pairs]
        return [value for value, _own in pairs], beside if any(own is not None for own in beside) else None

    def _tensor(self, value: TensorValue, memory: dict[int, int]) -> tuple[Any, Any]:
        meta = value.meta
        if meta.layout is not Layout.strided:
            raise Inexpressible(f"an argument is a tensor with the layout {meta.layout.name}")
        if meta.flags & TensorFlag.zero:
            raise Inexpressible("an argument is one of autograd's tensors without memory")
        if meta.dtype not in DTYPE_NAMES:
            raise Inexpressible(f"an argument is a tensor of dtype {meta.dtype.name}")
        spec = {
            "shape": list(meta.sizes),
            "dtype": DTYPE_NAMES[meta.dtype],
            "strides": list(meta.strides),
            "init": "normal" if meta.dtype in _REAL else "zeros",
        }
        own: dict[str, Any] = {"device": str(self._reader.devices[meta.device]), "offset": value.offset}
        if value.storage:
            own["storage"] = memory.setdefault(value.storage, len(memory))
            own["storage_bytes"] = self._reader.storage(value.storage).bytes
        flags = [name for flag, name in _FLAGS if meta.flags & flag]
        if flags:
            own["flags"] = flags
        return spec, own


_INTEGERS = {DTYPE_CODE[each] for each in INTEGERS}
_MOST_ELEMENTS = 1 << 22  # quantized weights are integers, too; they need no content
Texts = dict[str, str]


class Integers(Closing):
    """Content of the arguments of ops, as text. `problem` says why there is none at all. Close it after use."""

    def __init__(self, reader: CaptureReader) -> None:
        self._reader = reader
        self.missing = 0  # integer arguments without content
        self.problem = ""
        self._plan: Plan | None = None

    def _prepared(self) -> Plan | None:
        """The plan of a replay, once it is needed."""
        if self._plan is None and not self.problem:
            try:
                self._plan = Plan(self._reader, ("cpu",) if self._reader.accelerators else (), True, keep_going=True)
            except ReplayRefused as error:
                self.problem = f"{error}: {'; '.join(error.findings)}"
            except UsageError as error:
                self.problem = str(error)
        return self._plan

    def close(self) -> None:
        if self._plan is not None:
            self._plan.close()

    def of(self, record: Record) -> Texts:
        """Zlib-compressed bytes in base64 by argument (`indices[1]` in lists): the elements in row-major order,
        little-endian, those of repeated dimensions once."""
        found: Texts = {}
        for node, value in zip(record.signature.args, record.args, strict=True):
            for label, tensor in _tensors(node.name, value):
                if tensor.meta.dtype not in _INTEGERS or not tensor.storage or not math.prod(tensor.meta.sizes):
                    continue
                content = self._content(tensor)
                if content is None:
                    self.missing += 1
                else:
                    found[label] = base64.b64encode(zlib.compress(content)).decode()
        return found

    def _content(self, value: TensorValue) -> bytes | None:
        meta = value.meta
        sizes = tuple(size if stride else 1 for size, stride in zip(meta.sizes, meta.strides, strict=True))
        dtype = TORCH_DTYPE[meta.dtype]
        end = value.offset + 1 + sum((size - 1) * stride for size, stride in zip(sizes, meta.strides, strict=True))
        inside = end * dtype.itemsize <= self._reader.storage(value.storage).bytes
        if math.prod(sizes) > _MOST_ELEMENTS or not inside or (plan := self._prepared()) is None:
            return None
        info = TensorInfo(
            value.storage, dtype, sizes, meta.strides, value.offset, str(self._reader.devices[meta.device])
        )
        with undispatched():
            content = plan.synthesis.content(info)
            return None if content is None else bytes(content.contiguous().view(-1).view(torch.uint8).numpy())


def _tensors(label: str, value: Any) -> Iterator[tuple[str, TensorValue]]:
    if isinstance(value, TensorValue):
        yield label, value
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield from _tensors(f"{label}[{place}]", each)


IR_NAME, SCRIPT_NAME, README_NAME = "event_replay_ir.json", "replay.py", "README.md"
_TIMELESS = (1980, 1, 1, 0, 0, 0)  # the same capture produces the same bytes
_EXECUTABLE = 0o755 << 16
_SHOWN = 20


@dataclass
class Exported:
    """The outcome of an export. `left_out` has a sentence and a count for each reason; `without_integers` counts the
    arguments of integers and booleans whose content is unknown, and `no_integers` says why none is."""

    entries: int = 0
    calls: int = 0
    without_integers: int = 0
    no_integers: str = ""
    left_out: Counter[str] = field(default_factory=Counter)


def export_replay_zip(
    reader: CaptureReader,
    out: str | os.PathLike[str],
    wanted: OpSelection = OpSelection(),  # noqa: B008 - frozen
    *,
    unique: bool = False,
    partial: bool = False,
    force: bool = False,
    on_record: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write the selected ops of a capture as a zip artifact.

    With `unique`, calls with the same arguments become one entry with their count. With `partial`, calls that the IR
    cannot express are left out; otherwise they are refused. `on_record(done, total)` is called with the progress.

    Raises UsageError if nothing is selected or `out` is the capture, ReplayRefused with a finding for each reason,
    OutputExists, and CaptureFailed if the file cannot be written.
    """
    refuse_capture(reader, out)
    check_place(out, force)
    exported = Exported()
    with Integers(reader) as integers:
        entries, content = _entries(reader, wanted, unique, exported, on_record, integers)
        exported.without_integers, exported.no_integers = integers.missing, integers.problem
    if exported.left_out and not partial:
        reasons = tuple(f"{reason}: {counted(count, 'call')}" for reason, count in exported.left_out.most_common())
        raise ReplayRefused(
            f"{reader.path}: {sum(exported.left_out.values()):,} of {counted(exported.calls, 'call')} cannot be "
            f"expressed in EventReplay IR; nothing was written; --partial leaves them out",
            reasons,
        )
    texts = {
        IR_NAME: json.dumps(entries, indent=1),
        INTEGERS_NAME: json.dumps(content, indent=1),
        SCRIPT_NAME: _script(),
        README_NAME: _readme(reader, wanted, entries, exported),
    }
    _write(out, texts)
    return exported


def _script() -> str:
    """The script, with what it refuses to run."""
    text = files(__package__).joinpath("replay_script.py").read_text(encoding="utf-8")
    for name, refused in zip(("REFUSED_NAMESPACES", "REFUSED_OPERATORS"), refused_names(), strict=True):
        empty, filled = f"{name}: tuple[str, ...] = ()\n", ",\n    ".join(map(repr, refused))
        assert text.count(empty) == 1
        text = text.replace(empty, f"{name}: tuple[str, ...] = (\n    {filled},\n)\n")
    return text


def _entries(
    reader: CaptureReader,
    wanted: OpSelection,
    unique: bool,
    exported: Exported,
    on_record: Callable[[int, int], None] | None,
    integers: Integers,
) -> tuple[list[dict[str, Any]], dict[int, Texts]]:
    """The entries, and by their numbers the content of their integer arguments."""
    maker = EntryMaker(reader)
    found: dict[str, dict[str, Any]] = {}
    entries: list[dict[str, Any]] = []
    content: dict[int, Texts] = {}
    kept = resolve_selection(reader, wanted)
    for done, ordinal in enumerate(kept.ordinals.tolist()):
        if on_record is not None and not done % 1024:
            on_record(done, len(kept.ordinals))
        record = reader.record(ordinal)
        if record.kind not in (RecordKind.op, RecordKind.unsupported, RecordKind.collective):
            continue
        count = record.calls
        exported.calls += count
        try:
            entry = _entry(maker, record, count)
        except Inexpressible as error:
            exported.left_out[str(error)] += count
            continue
        key = json.dumps({**entry, "count": 0}) if unique else ""
        known = found.get(key) if unique else None
        if known is not None:
            known["count"] += count
            continue
        found[key] = entry
        if texts := integers.of(record):
            content[len(entries)] = texts
        entries.append(entry)
    exported.entries = len(entries)
    if entries and (devices := maker.devices()):
        entries[0][OWN]["devices"] = devices  # the IR is a list: it has no place for data about all of it
    return entries, content


def _entry(maker: EntryMaker, record: Record, count: int) -> dict[str, Any]:
    if record.kind is RecordKind.op:
        try:
            return maker.entry(record, count)
        except Inexpressible as error:
            raise Inexpressible(f"{maker.name(record)}: {error}") from None
    if record.kind is RecordKind.collective:
        raise Inexpressible("a collective")
    raise Inexpressible(
        f"{record.argument('op') or 'a call'}: it is unsupported in the capture, {record.argument('reason')}"
    )


def _write(out: str | os.PathLike[str], texts: dict[str, str]) -> None:
    with new_file(out, force=True) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            info = zipfile.ZipInfo(name, _TIMELESS)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = _EXECUTABLE if name == SCRIPT_NAME else 0o644 << 16
            archive.writestr(info, text)


def escaped(text: str) -> str:
    """Text from a capture for Markdown: on one line, and nothing in it is markup."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>()#+-.!|" else c for c in printable(text))


def _readme(reader: CaptureReader, wanted: OpSelection, entries: list[dict[str, Any]], exported: Exported) -> str:
    names = Counter[str]()
    for entry in entries:
        names[entry["op_name"]] += entry["count"]
    torch_version = reader.session.torch_version or "an unknown version"
    lines = [
        "# Operator calls to replay",
        "",
        f"{exported.entries} entries for {sum(names.values())} operator calls, exported from "
        f"{escaped(Path(reader.path).name)} (PyTorch {escaped(torch_version)}; selection: {escaped(wanted.text)}).",
        "",
        f"- `{IR_NAME}`: the calls as TraceLens EventReplay IR: operators, arguments, dtypes, shapes, strides, counts.",
        f"- `{INTEGERS_NAME}`: integers and booleans that the calls take, by entry number and argument: "
        f"captured, or synthesized to fit the calls (zlib in base64).",
        f"- `{SCRIPT_NAME}`: creates inputs and runs every call on its own. It needs only PyTorch.",
        "",
        "```sh",
        f"python {SCRIPT_NAME}                    # every call, where it was recorded",
        f"python {SCRIPT_NAME} --device=cpu --verbose --op-filter=mm",
        "```",
        "",
        "It prints the time of each call, times its count, and exits with 1 if a call failed.",
        "",
        "Not included: other contents (floating-point inputs are normally distributed), results, what one call passed",
        "to the next, random generators' states, numeric settings. `opreplay` members hold what the IR has no place",
        "for: overloads, devices, offsets, memory that arguments of one call share. `opreplay-import` reads the",
        "archive back.",
        "",
        *([escaped(without_integers(exported)), ""] if exported.without_integers else ()),
        "| operator | calls |",
        "| --- | --- |",
        *(f"| {escaped(name)} | {count} |" for name, count in names.most_common(_SHOWN)),
    ]
    others = names.most_common()[_SHOWN:]
    if others:
        lines.append(f"| {len(others)} more | {sum(count for _name, count in others)} |")
    if exported.left_out:
        lines += [
            "",
            "Left out, because the IR cannot express it:",
            "",
            *(f"- {escaped(reason)}: {counted(count, 'call')}" for reason, count in exported.left_out.most_common()),
        ]
    return "\n".join(lines) + "\n"


def without_integers(exported: Exported) -> str:
    """The note on integers whose content is unknown, "" if there are none."""
    if not exported.without_integers:
        return ""
    why = (
        f"the capture cannot be prepared for a replay here: {exported.no_integers}"
        if exported.no_integers
        else "ops of the capture computed them, no initializer is for them, or they are large"
    )
    return f"{exported.without_integers} arguments of integers or booleans are 0: {why}"
