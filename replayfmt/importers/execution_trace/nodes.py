"""The nodes of a PyTorch execution trace, in one form for every schema version.

ExecutionTraceObserver writes a node when its function returns, so children come before their parent; it assigns the
node's id when the function is entered. Schema 1.0.1 keeps everything in flat keys; from 1.0.2 on values, types and
attributes are grouped; 1.0.4 names the files of Triton kernels; 1.1.0 describes collectives; 1.1.1 has strides, and
ranges of integer tensors if the program requested them.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from operator import mul
from typing import Any, NamedTuple

from replayfmt.errors import InvalidCapture, UnsupportedVersion
from replayfmt.format.validation import parse_json

from ..common.arguments import NOTHING, ArgumentForm, RecordedArgument, TensorSpec, dtype_of, of_list, wrapped
from ..common.synthesis import contiguous
from ..common.trace_files import MOST_RANKS

OLDEST, NEWEST = (1, 0, 1), (1, 1, 1)
# The observer stops after this many items of a list, one more than its limit.
_CUT_LIST_ITEMS = 4097
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:-.*)?\Z")
_TENSOR_FIELDS = 6  # tensor id, storage id, offset, elements, bytes an element, device
_INTEGER = frozenset({int})
_LIMIT = 1 << 60
USER_SCOPE = 7  # at::RecordScope::USER_SCOPE: record_function and the profiler's own marks


def schema_version(text: object, path: str) -> tuple[int, int, int]:
    """The version in a trace's `schema` field. Raises if it is invalid, or unknown to this reader."""
    found = _VERSION.match(text) if isinstance(text, str) else None
    if found is None:
        raise InvalidCapture(f"{path}: the execution trace's schema is {text!r}, expected a version such as 1.1.1")
    version = int(found[1]), int(found[2]), int(found[3])
    if not OLDEST <= version <= NEWEST:
        raise UnsupportedVersion(
            f"{path}: execution trace schema {text}; this reader knows 1.0.1 to 1.1.1; record the "
            "trace with another PyTorch, or update OpReplay"
        )
    return version


@lru_cache(maxsize=4096)
def operator_name(schema: str) -> tuple[str, str]:
    """(`aten::add_`, `Tensor`) of `aten::add_.Tensor(Tensor(a!) self, ...) -> Tensor(a!)`; "" without an overload."""
    name, _separator, overload = schema.partition("(")[0].partition(".")
    return name, overload


class NodeValues(NamedTuple):
    """A node's inputs or outputs, by position: tensors, in lists as well, as TracedTensors, anything else as the trace
    has it. `tensors` are those that are defined, each with the position of its argument. `strided`: the trace has
    strides, as from schema 1.1.1 on."""

    values: list[Any]
    types: tuple[str, ...]
    strided: bool
    tensors: list[tuple[int, TracedTensor]]


_NO_ATTRIBUTES: Mapping[str, Any] = {}


class TraceNode(NamedTuple):
    """One node. `schema` is "" if it is not an operator; `kernel_file` names a Triton kernel's source. `attributes` are
    those that have no field of their own."""

    id: int
    name: str
    parent: int
    thread: int
    scope: int
    schema: str
    inputs: NodeValues
    outputs: NodeValues
    kernel_backend: str = ""
    kernel_file: str = ""
    forward: int = 0
    attributes: Mapping[str, Any] = _NO_ATTRIBUTES

    def integer_ranges(self) -> dict[int, tuple[int, int]]:
        """Smallest and largest element of integer input tensors, by number among all input tensors."""
        text = self.attributes.get("tensor_range")
        if not isinstance(text, str) or not text:
            return {}
        try:
            found = parse_json(text)
            return {int(index): (int(low), int(high)) for index, (low, high) in found.items()}
        except (ValueError, TypeError, AttributeError, OverflowError):
            return {}


_UNUSED = ("rf_id", "seq_id", "fw_tid")  # attributes


def node_of(row: Any, known: dict[str, NodeValues] | None = None) -> TraceNode:
    """A node from its JSON object. `known` has values that other nodes had, which are made once. Raises ValueError if
    it is not one, or lacks a required field."""
    if not isinstance(row, dict):
        raise ValueError(f"it is not an object: {json.dumps(row)[:60]}")
    try:
        if "attrs" in row:
            said = {each["name"]: each["value"] for each in row["attrs"]}
            take = said.pop
            thread, scope, schema = take("tid", 0), take("scope", 0), take("op_schema", "")
            backend, kernel_file, forward = take("kernel_backend", ""), take("kernel_file", ""), take("fw_parent", 0)
            for name in _UNUSED:
                take(name, None)
            number, parent = row["id"], row["ctrl_deps"]
            _check_numbers(number, parent, thread, scope)
            return TraceNode(
                number,
                sys.intern(str(row["name"])),
                parent,
                thread,
                scope,
                sys.intern(str(schema)),
                _grouped(row["inputs"], known),
                _grouped(row["outputs"], known),
                sys.intern(str(backend)),
                sys.intern(str(kernel_file)),
                forward if isinstance(forward, int) and 0 <= forward < _LIMIT else 0,
                said if said and any(said.values()) else _NO_ATTRIBUTES,
            )
        numbers = row["id"], row["parent"], row["tid"], row["scope"]
        _check_numbers(*numbers)
        number, parent, thread, scope = numbers
        return TraceNode(
            number,
            str(row["name"]),
            parent,
            thread,
            scope,
            str(row.get("op_schema", "")),
            _values(row["inputs"], row["input_shapes"], row["input_types"], None),
            _values(row["outputs"], row["output_shapes"], row["output_types"], None),
        )
    except KeyError as error:
        raise ValueError(f"it has no {error}: {json.dumps(row)[:80]}") from None
    except (TypeError, ValueError, AttributeError):
        wrong = [name for name in ("inputs", "outputs") if "attrs" in row and not isinstance(row.get(name), dict)]
        what = f"its {wrong[0]} are not an object" if wrong else "a field of it has a value of another type"
        raise ValueError(f"{what}: {json.dumps(row)[:80]}") from None


def communication(node: TraceNode) -> Mapping[str, Any]:
    """What a `record_param_comms` node says about its collective: `collective_name`, `dtype`, `in_msg_nelems`,
    `out_msg_nelems`, `pg_name`, `pg_desc`, `pg_size`, as far as present. Empty if it says nothing.

    Schemas before 1.1.0 have no attributes for it, only the function's inputs: tensors (unless it only waits), a
    sequence number, the group (a number, from 1.0.3 on a name and a description), the rank, the collective's name, the
    split sizes of input and output, and from 1.0.3 on the group's first rank, stride and size.
    """
    if "collective_name" in node.attributes:
        return node.attributes
    values, kinds = node.inputs.values, node.inputs.types
    place = next((place for place, kind in enumerate(kinds) if kind == "String"), 0)
    if place < 3 or place >= len(values):
        return {}
    group, splits = values[place - 2], [each for each in values[place + 1 : place + 3] if isinstance(each, list)]
    facts: dict[str, Any] = {"collective_name": str(values[place])}
    if isinstance(group, list) and len(group) == 2:
        facts |= {"pg_name": str(group[0]), "pg_desc": str(group[1])}
    elif isinstance(group, int):
        facts["pg_name"] = str(group)
    given = [tensor for position, tensor in node.inputs.tensors if position < place]
    if given:
        facts |= {"dtype": given[0].type_name, "in_msg_nelems": sum(tensor.elements for tensor in given)}
    returned = [tensor for _position, tensor in node.outputs.tensors]
    if returned:
        facts["out_msg_nelems"] = sum(tensor.elements for tensor in returned)
    size = values[place + 5] if place + 5 < len(values) else max(map(len, splits), default=0)
    return facts | {"pg_size": size} if isinstance(size, int) and size > 0 else facts


# For these collectives the recorded rank is the process's; for others (broadcast, reduce) it may be the root's.
_TELL_RANK = ("allreduce", "allgather", "_allgather_base", "reduce_scatter", "_reduce_scatter_base", "barrier")


def rank_said(node: TraceNode) -> int | None:
    """The rank of the process according to a node: a collective of the group of all ranks. None if it does not say."""
    if node.name != "record_param_comms":
        return None
    values, kinds = node.inputs.values, node.inputs.types
    place = next((place for place, kind in enumerate(kinds) if kind == "String"), 0)
    if not 3 <= place < len(values) or values[place] not in _TELL_RANK:
        return None
    group, rank = values[place - 2], values[place - 1]
    of_all = isinstance(group, list) and len(group) == 2 and group[1] == "default_pg"
    return rank if of_all and type(rank) is int and 0 <= rank < MOST_RANKS else None


GROUPS = "## process_group:init ##"


def groups_listed(node: TraceNode) -> list[dict[str, Any]]:
    """The process groups that a node lists."""
    if node.name != GROUPS or not node.inputs.values:
        return []
    try:
        listed = parse_json(node.inputs.values[0])
    except (ValueError, TypeError):
        return []
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []


def world_said(groups: Sequence[Mapping[str, Any]]) -> int:
    """How many ranks the group of all has, among these; 1 if it is not there."""
    sizes = (each.get("group_size") for each in groups if each.get("pg_desc") == "default_pg")
    return max((size for size in sizes if type(size) is int and 1 <= size <= MOST_RANKS), default=1)


def _check_numbers(*numbers: Any) -> None:
    """Raise ValueError for what is no id."""
    if {*map(type, numbers)} != _INTEGER or min(numbers) < 0 or max(numbers) >= _LIMIT:
        raise ValueError(f"{numbers!r:.40} are not ids")


_MOST_KNOWN = 1 << 14


def _grouped(group: Mapping[str, Any], known: dict[str, NodeValues] | None) -> NodeValues:
    said = group["values"], group["shapes"], group["types"], group.get("strides")
    if known is None:
        return _values(*said)
    key = repr(said)
    found = known.get(key)
    if found is None:
        if len(known) >= _MOST_KNOWN:
            known.clear()
        found = known[key] = _values(*said)
    return found


def form_of(values: NodeValues) -> str:
    """What tells these values from others, besides the ids and addresses of tensors: which of them are the same is
    told."""
    numbers: dict[TracedTensor, int] = {}

    def form(value: Any) -> Any:
        if type(value) is TracedTensor:
            return (numbers.setdefault(value, len(numbers)), *value[2:]) if value.device else tuple(value)
        return list(map(form, value)) if type(value) is list else value

    return repr((values.types, values.strided, form(values.values)))


def _values(values: Any, shapes: Any, types: Any, strides: Any) -> NodeValues:
    found, shapes = list(values), list(shapes)
    strides = None if strides is None else list(strides)
    names, places = _kinds(tuple(map(str, types)))
    tensors: list[tuple[int, TracedTensor]] = []
    for position, kind, tensor_type in places:
        if position >= len(found):
            continue
        value, sizes, steps = found[position], _at(shapes, position), _at(strides, position)
        if tensor_type is None:
            found[position] = several = _read(value, sizes, steps, kind)
            if isinstance(several, list):
                tensors += ((position, one) for one in _defined(several))
            continue
        tensor = traced_tensor(value, sizes, steps, tensor_type)
        if tensor is not None:
            found[position] = tensor
            if tensor.device:
                tensors.append((position, tensor))
    return NodeValues(found, names, strides is not None, tensors)


@lru_cache(maxsize=4096)
def _kinds(names: tuple[str, ...]) -> tuple[tuple[str, ...], list[tuple[int, str, str | None]]]:
    """The types of a node's values, made once, and those of them that have tensors, with their positions, and that of
    its elements where a value is one."""
    places: list[tuple[int, str, str | None]] = []
    for position, name in enumerate(names):
        if "Tensor" in name:
            head, inner = wrapped(name)
            places.append((position, name, None if head != "Tensor" else inner[0] if inner else ""))
    return names, places


def _read(value: Any, sizes: Any, strides: Any, kind: str) -> Any:
    """A value with its tensors as TracedTensors."""
    head, inner = wrapped(kind)
    if head == "Tensor":
        found = traced_tensor(value, sizes, strides, inner[0] if inner else "")
        return value if found is None else found
    if isinstance(value, list) and head in ("GenericList", "Tuple", "TensorList"):
        return [
            _read(each, _at(sizes, index), _at(strides, index), _at(inner, index) or "")
            for index, each in enumerate(value)
        ]
    return value


def _defined(values: list[Any]) -> Iterator[TracedTensor]:
    for each in values:
        if type(each) is TracedTensor:
            if each.device:
                yield each
        elif isinstance(each, list):
            yield from _defined(each)


class TracedTensor(NamedTuple):
    """A tensor as a node has it. `storage` stands for the address of its memory, which another allocation may get
    later. `strides` is None if the trace has none."""

    id: int
    storage: int
    offset: int
    elements: int
    item_bytes: int
    device: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None
    type_name: str

    @property
    def defined(self) -> bool:
        """Whether the tensor is defined."""
        return bool(self.device)

    def end(self, strides: tuple[int, ...]) -> int:
        """Where its memory ends, in bytes from the start of its storage, with these strides."""
        if not self.elements:
            return 0
        return (self.offset + sum(map(mul, self.sizes, strides)) - sum(strides) + 1) * self.item_bytes


def traced_tensor(value: object, sizes: object, strides: object, type_name: str) -> TracedTensor | None:
    """A tensor made from its six numbers; None if they do not describe a tensor."""
    if not isinstance(value, list) or len(value) != _TENSOR_FIELDS or not isinstance(value[5], str):
        return None
    if not isinstance(sizes, list) or not set(map(type, (*value[:5], *sizes))) <= _INTEGER:
        return None
    known = isinstance(strides, list) and set(map(type, strides)) <= _INTEGER
    return _tensor_of(tuple(value), tuple(sizes), tuple(strides) if known else None, type_name)  # type: ignore[arg-type]


@lru_cache(maxsize=1 << 14)
def _tensor_of(
    value: tuple[Any, ...], shape: tuple[int, ...], step: tuple[int, ...] | None, type_name: str
) -> TracedTensor | None:
    """Made once: each tensor stands at several places of a trace, and each place is read several times."""
    number, storage, offset, elements, item_bytes, device = value
    if min(*value[:5], *shape) < 0 or max(value[:5]) >= _LIMIT:
        return None
    if step is not None and (len(step) != len(shape) or min(step, default=0) < 0):
        step = None
    tensor = TracedTensor(number, storage, offset, elements, item_bytes, device, shape, step, type_name)
    if device and elements != math.prod(shape):
        return None
    return tensor if tensor.end(contiguous(shape) if step is None else step) < _LIMIT else None


def _at(values: Any, index: int) -> Any:
    """An element that may be missing."""
    return values[index] if type(values) in (list, tuple) and index < len(values) else None


class TensorReader:
    """Returns the TensorSpec of a traced tensor."""

    def spec(self, tensor: TracedTensor) -> TensorSpec:
        """The tensor as the trace describes it, without its allocation."""
        return TensorSpec(dtype_of(tensor.type_name), tensor.sizes, tensor.strides, tensor.device, tensor.offset)


def as_traced(value: Any) -> Any:
    """A value as the trace has it."""
    if type(value) is TracedTensor:
        return list(value[:_TENSOR_FIELDS])
    return [as_traced(each) for each in value] if isinstance(value, list) else value


def recorded_inputs(values: NodeValues, reader: TensorReader) -> list[RecordedArgument]:
    """What the trace says about each argument, in the schema's order."""
    return [_recorded(value, _at(values.types, position) or "", reader) for position, value in enumerate(values.values)]


def _recorded(value: object, kind: str, reader: TensorReader) -> RecordedArgument:
    if type(value) is TracedTensor:
        if value.defined:
            return RecordedArgument(ArgumentForm.tensor, tensor=reader.spec(value))
        if value.type_name.startswith("nullptr"):
            return NOTHING
        # Tensors without a storage (sparse, nested, of symbolic sizes) have a dtype anyway.
        shown = json.dumps(as_traced(value))
        return RecordedArgument(ArgumentForm.truncated, shown=f"a tensor without a storage: {shown}")
    head, inner = wrapped(kind)
    if head == "Tensor":
        return RecordedArgument(ArgumentForm.truncated, shown=json.dumps(value))
    shown = json.dumps(as_traced(value))
    if isinstance(value, list):
        if len(value) >= _CUT_LIST_ITEMS:
            return RecordedArgument(ArgumentForm.truncated, shown=f"a list of which {len(value)} items are recorded")
        items = [_recorded(item, _at(inner, index) or "", reader) for index, item in enumerate(value)]
        return of_list(items, shown)
    if isinstance(value, str):
        return _text(value, head)
    if value is None:
        return NOTHING
    if isinstance(value, bool | int | float):
        return RecordedArgument(ArgumentForm.number, float(value) if head == "Double" else value, shown=shown)
    return RecordedArgument(ArgumentForm.truncated, shown=shown)


_REAL_WORDS = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan"), "-nan": float("nan")}


def _text(value: str, kind: str) -> RecordedArgument:
    if kind == "None" or value == "<None>":
        return NOTHING
    if kind == "Double" and value.lower() in _REAL_WORDS:
        return RecordedArgument(ArgumentForm.number, _REAL_WORDS[value.lower()], shown=value)
    if kind in ("String", "Device", "Storage"):
        return RecordedArgument(ArgumentForm.text, value, shown=value)
    # "<Generator>", "<Object>", "<ComplexDouble>": the observer prints the kind of such values, not the value.
    return RecordedArgument(ArgumentForm.unrecorded if kind == "Generator" else ArgumentForm.truncated, shown=value)


def rounded(value: float) -> bool:
    """Whether a number may have lost digits: the observer prints six decimals, and 1e-8 becomes 0.000000."""
    if value != value or value in (float("inf"), float("-inf")):
        return False
    text = f"{value:.6f}"
    return float(text) == value and (value == 0 or text[-1] != "0")
