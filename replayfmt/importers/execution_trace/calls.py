"""From a node of an execution trace to an operator's call: its arguments by name, their allocations, what was assumed.

One `NodeCalls` goes through the chosen nodes in order. It knows which allocation each tensor is on, infers the strides
that older traces lack, and reads the arguments by the operator's schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import torch

from replayfmt.format.codes import DType, TensorFlag
from replayfmt.pytorch.operators import operator_named
from replayfmt.pytorch.overloads import parse_schema, printed_schema

from ..common.arguments import UNRECORDED, ArgumentReader, Binding, RecordedArgument, TensorSpec, dtype_of
from ..common.operators import OperatorChoice, Operators
from ..common.results import AliasedArgument, Results, Trials, refusal
from ..common.synthesis import contiguous
from .allocations import NUMBERS, Allocations, MemoryMap, PlacedTensor
from .nodes import NodeValues, TensorReader, TracedTensor, TraceNode, form_of, operator_name, recorded_inputs, rounded
from .selection import NodeKind, kind_of

BY = "the execution trace"
# Operators that return a view with other values than those in memory, or that undo this.
_TURNS = {"aten::_conj": TensorFlag.conj, "aten::_neg_view": TensorFlag.neg}


@dataclass
class BoundCall:
    """What all calls have in common whose arguments differ in their memory alone: the operator, and the arguments as it
    reads them. The identity of a tensor is the place of its allocation among those of the node's tensors, from 0.
    `assumed` has the assumptions besides the binding's; `returned` what the operator returns, None if that is in the
    trace or unknown."""

    choice: OperatorChoice
    binding: Binding | None = None
    assumed: list[str] = field(default_factory=list)
    returned: list[TensorSpec] | None = None


@dataclass
class NodeStep:
    """One chosen node, the `number`th. `given` and `returned` say where its tensors are. `bound` is an operator's call;
    `assumed` has the assumptions besides the binding's; `uses` are the tensors that it reads, and those that it
    writes."""

    node: TraceNode
    kind: NodeKind
    number: int
    given: dict[TracedTensor, PlacedTensor]
    returned: dict[TracedTensor, PlacedTensor] = field(default_factory=dict)
    bound: BoundCall | None = None
    assumed: list[str] = field(default_factory=list)
    uses: tuple[list[TracedTensor], list[TracedTensor]] = ([], [])


class _OnAllocations(TensorReader):
    """Tensors with the place of their allocation as identity."""

    def __init__(self, placed: dict[TracedTensor, PlacedTensor], places: dict[int, int]) -> None:
        self._placed, self._places = placed, places

    def spec(self, tensor: TracedTensor) -> TensorSpec:
        where = self._placed.get(tensor)
        if where is None:
            return super().spec(tensor)
        dtype = dtype_of(tensor.type_name)
        place = tensor.device, tensor.offset, self._places[where.allocation]
        return TensorSpec(dtype, tensor.sizes, where.strides, *place, flags=where.flags)


class _Use(Enum):
    """What an operator does with the memory of an argument."""

    read = 1
    written = 2
    both = 3


class _OperatorUse(NamedTuple):
    """What an operator does with the memory of its arguments; `nothing` if it does not touch any."""

    nothing: bool = False
    in_place: bool = False
    arguments: tuple[_Use, ...] = ()


def _uses_of(schema: torch.FunctionSchema | None) -> _OperatorUse:
    """An operator of which nothing is known may write to all."""
    if schema is None:
        return _OperatorUse()
    operator = operator_named(schema.name)
    if operator.changes_view or operator.moves_memory or (operator.reads_nothing and not operator.overwrites_self):
        return _OperatorUse(nothing=True)
    in_place = schema.name.endswith("_") and not operator.overwrites_self
    uses = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            uses.append(_Use.both if in_place and position == 0 else _Use.written)
        else:
            uses.append(_Use.both if argument.name in operator.quiet_writes else _Use.read)
    return _OperatorUse(False, in_place, tuple(uses))


class NodeCalls:
    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self._reader = ArgumentReader(operators.names)
        self.memory = MemoryMap()
        self._trials = Trials()
        self._changed: dict[str, bool] = {}
        self._choices: dict[str, tuple[OperatorChoice, torch.FunctionSchema | None]] = {}
        self._uses: dict[str, _OperatorUse] = {}
        self._bound: dict[Any, BoundCall] = {}
        self._forms: dict[str, int] = {}
        self._form_of: dict[int, tuple[NodeValues, int]] = {}

    @property
    def allocations(self) -> Allocations:
        return self.memory.allocations

    def step(self, node: TraceNode, chosen: bool) -> NodeStep | None:
        """The next chosen node; None for one within it: the memory it allocates belongs to no other node any more. Its
        arguments are read by `bind`."""
        if not chosen:
            self.memory.forget(tensor for _position, tensor in node.outputs.tensors)
            return None
        kind = kind_of(node)
        uses = self._effects(node, kind)
        self.memory.access(*uses)
        given = self.memory.take(tensor for _position, tensor in node.inputs.tensors)
        step = NodeStep(node, kind, self.memory.steps, {each.tensor: each for each in given}, uses=uses)
        step.assumed = [
            f"the {list(tensor.sizes)} tensor at the address of one of another kind is a new allocation, "
            f"which {BY} does not show"
            for tensor in self.memory.replaced
        ]
        step.assumed += [
            f"the {list(each.tensor.sizes)} tensor taken as {_shown_flags(each.flags)}: {BY} does not say "
            "which of the views of its memory it is"
            for each in given
            if each.doubtful
        ]
        strides: Sequence[tuple[int, ...] | None] | None = None
        if step.kind is NodeKind.operator and not node.outputs.strided:
            self.bind(step)
            strides = self._strides(step)
        outputs = [tensor for _position, tensor in node.outputs.tensors]
        returned = self.memory.give(
            list(zip(outputs, strides or [None] * len(outputs), strict=True)),
            given,
            known=not node.schema.startswith("aten::set_"),
            blank=_allocates_only(node),
            turned=_TURNS.get(node.name, TensorFlag(0)),
        )
        step.returned = {each.tensor: each for each in returned}
        return step

    def _effects(self, node: TraceNode, kind: NodeKind) -> tuple[list[TracedTensor], list[TracedTensor]]:
        """The tensors that a node reads, and those that it writes; if it does not say which, all of them."""
        given = node.inputs.tensors
        everything = [tensor for _position, tensor in given]
        if kind is not NodeKind.operator:
            return [], everything
        uses = self._uses.get(node.schema)
        if uses is None:
            uses = self._uses[node.schema] = _uses_of(self._choose(node.schema)[1])
        if uses.nothing:
            return [], []
        returned = {(tensor.device, tensor.storage) for _position, tensor in node.outputs.tensors}
        read, written = [], []
        for position, tensor in given:
            use = uses.arguments[position] if position < len(uses.arguments) else _Use.written
            if use is not _Use.read:
                written.append(tensor)
                if use is _Use.both:
                    read.append(tensor)
            elif (tensor.device, tensor.storage) not in returned or uses.in_place:
                read.append(tensor)  # an op that returns its argument's memory makes a view
        return read, written

    def form(self, values: NodeValues) -> int:
        """A number that values have in common which differ in the ids and addresses of tensors alone."""
        known = self._form_of.get(id(values))
        if known is None:
            number = self._forms.setdefault(form_of(values), len(self._forms))
            known = self._form_of[id(values)] = values, number
        return known[1]

    def bind(self, step: NodeStep) -> None:
        """Read an operator's arguments, once."""
        if step.bound is not None:
            return
        node, made = step.node, self.allocations.made
        places: dict[int, int] = {}
        memory = tuple(
            [
                (
                    places.setdefault(each.allocation, len(places)),
                    each.strides,
                    each.flags,
                    each.strides_known,
                    not each.tensor.sizes and made[each.allocation],
                )
                for each in step.given.values()
            ]
        )
        types = tuple([tensor.type_name for _position, tensor in node.outputs.tensors])
        key = node.schema, self.form(node.inputs), memory, types, node.outputs.strided
        step.bound = self._bound.get(key)
        if step.bound is None:
            step.bound = self._bound[key] = self._bind(step, places)
        step.assumed += step.bound.assumed

    def _bind(self, step: NodeStep, places: dict[int, int]) -> BoundCall:
        node = step.node
        recorded = recorded_inputs(node.inputs, _OnAllocations(step.given, places))
        choice, traced = self._choose(node.schema)
        if choice.operator is None:
            other = self._operators.choose(operator_name(node.schema)[0], recorded)
            if other.operator is None:
                return BoundCall(choice)
            traced = None
            choice = replace(
                other,
                assumed=(
                    *other.assumed,
                    f"overload {other.operator.overload}: the traced one is not here, {node.schema}; this "
                    "one takes the recorded arguments",
                ),
            )
        assert choice.operator is not None
        schema = choice.operator.schema
        unknown: list[str] = []
        if traced is not None and self._differ(node.schema, traced, schema):
            recorded, unknown = _by_name(traced, schema, recorded)
        binding = self._reader.bind(schema, recorded, by=BY)
        binding.missing += unknown
        if len(recorded) > len((traced or schema).arguments):
            binding.missing.append(
                f"{BY} has {len(recorded)} arguments, the operator takes {len((traced or schema).arguments)}"
            )
        assumed = [
            f"{name}={value!r}: {BY} keeps six decimals"
            for name, value in binding.arguments
            if isinstance(value, float) and rounded(value)
        ]
        assumed += _said_of_strides(step, binding, places)
        if not binding.missing:
            made = {places[each.allocation] for each in step.given.values() if self.allocations.made[each.allocation]}
            assumed += self._numbers(node, choice, binding, made)
        if binding.missing:
            return BoundCall(choice, binding, assumed)
        results = self._trials.of(schema, binding.arguments)
        impossible, doubtful = refusal(schema, results)
        binding.missing += [impossible] if impossible else []
        assumed += [doubtful] if doubtful else []
        known = not impossible and not node.outputs.strided
        returned = _returned(results, _tensors([value for _name, value in binding.arguments])) if known else None
        return BoundCall(choice, binding, assumed, returned)

    def _differ(self, text: str, traced: torch.FunctionSchema, here: torch.FunctionSchema) -> bool:
        known = self._changed.get(text)
        if known is None:
            known = self._changed[text] = printed_schema(traced) != printed_schema(here)
        return known

    def traced_schema(self, text: str) -> torch.FunctionSchema | None:
        """The schema that a trace names, None if it cannot be read."""
        return self._choose(text)[1]

    def _choose(self, text: str) -> tuple[OperatorChoice, torch.FunctionSchema | None]:
        known = self._choices.get(text)
        if known is None:
            try:
                traced = parse_schema(text)
            except (RuntimeError, ValueError):
                traced = None
            known = self._choices[text] = self._operators.by_schema(text), traced
        return known

    @staticmethod
    def _strides(step: NodeStep) -> list[tuple[int, ...] | None] | None:
        """Strides of everything an operator returned, inferred by running it without data; None if that fails."""
        returned = step.bound.returned if step.bound is not None else None
        outputs = [tensor for _position, tensor in step.node.outputs.tensors]
        if returned is None or len(returned) != len(outputs):
            return None
        return [
            spec.strides if spec.sizes == tensor.sizes else None for spec, tensor in zip(returned, outputs, strict=True)
        ]

    def _numbers(self, node: TraceNode, choice: OperatorChoice, binding: Binding, made: set[int]) -> list[str]:
        """Mark Python numbers: they reach operators as zero-dimensional tensors that do not participate in type
        promotion, but look in a trace like tensors that do. If that matters, the recorded result shows it. Returns what
        is assumed. `made`: the places of memory that an earlier operator returned."""
        outputs = [dtype_of(tensor.type_name) for _position, tensor in node.outputs.tensors]
        candidates = [
            position
            for position, (_name, value) in enumerate(binding.arguments)
            if isinstance(value, TensorSpec)
            and value.sizes == ()
            and value.device == "cpu"
            and value.dtype in NUMBERS
            and value.identity not in made
        ]
        tensors = sum(isinstance(value, TensorSpec) for _name, value in binding.arguments)
        if not candidates or tensors < 2 or not outputs or outputs[0] is None:
            return []
        if self._returns(choice, binding.arguments) in (None, outputs):
            return []
        changed = list(binding.arguments)
        for position in candidates:
            name, spec = changed[position]
            changed[position] = name, replace(spec, dtype=outputs[0], number=True)
        if self._returns(choice, changed) != outputs:
            return []
        binding.arguments = changed
        names = ", ".join(changed[position][0] for position in candidates)
        return [
            f"{names}: a Python number that was passed as a tensor; taken as {outputs[0].name}, "
            "with which the result has its recorded dtype"
        ]

    def _returns(self, choice: OperatorChoice, arguments: Sequence[tuple[str, Any]]) -> list[DType | None] | None:
        assert choice.operator is not None
        results = self._trials.of(choice.operator.schema, arguments)
        returned = _returned(results, _tensors([value for _name, value in arguments]))
        return None if returned is None else [spec.dtype for spec in returned]


def _said_of_strides(step: NodeStep, binding: Binding, places: Mapping[int, int]) -> list[str]:
    """Where the strides of the arguments come from: older traces have none, damaged ones impossible ones."""
    lack = f"{BY} has none"
    if step.node.inputs.strided:
        if all(tensor.strides is not None for tensor in step.given):
            return []
        lack = f"{BY} has impossible ones"
    known: dict[Any, bool] = {
        (places[each.allocation], each.tensor.sizes, each.strides, each.tensor.offset): each.strides_known
        for each in step.given.values()
        if each.tensor.strides is None
    }
    names: dict[str, set[str]] = {}
    for name, spec in ((name, spec) for name, value in binding.arguments for spec in _tensors(value)):
        computed = known.get((spec.identity, spec.sizes, spec.strides, spec.offset))
        if _strides_tell(spec) and computed is not None:
            plain = spec.strides == contiguous(spec.sizes or ())
            names.setdefault("computed" if computed else "contiguous" if plain else "alike", set()).add(name)
    said = []
    if "contiguous" in names:
        said.append(f"strides of {', '.join(sorted(names['contiguous']))}: {lack}; contiguous")
    if "alike" in names:
        said.append(
            f"strides of {', '.join(sorted(names['alike']))}: {lack}; those of another "
            "tensor of these sizes on the same memory"
        )
    if "computed" in names:
        said.append(
            f"strides of tensors that operators before this one returned: {lack}; "
            "computed by running the operators without data"
        )
    return said


def _returned(results: Results, given: Sequence[TensorSpec]) -> list[TensorSpec] | None:
    """Dtype, sizes, strides and offset of every returned tensor, including those in lists; None if PyTorch cannot
    infer them without data."""
    if results.values is None:
        return None
    found: list[TensorSpec] = []
    waiting = list(results.values)
    while waiting:
        each = waiting.pop(0)
        if isinstance(each, list):
            waiting = [*each, *waiting]
        elif isinstance(each, AliasedArgument):
            found.append(given[each.argument])
        elif each is not None:
            found.append(TensorSpec(each.dtype, each.sizes, each.strides, None, each.offset))
    return found


def _tensors(value: Any) -> list[TensorSpec]:
    if isinstance(value, TensorSpec):
        return [value]
    return [spec for each in value for spec in _tensors(each)] if isinstance(value, list) else []


def _by_name(
    traced: torch.FunctionSchema, here: torch.FunctionSchema, recorded: list[RecordedArgument]
) -> tuple[list[RecordedArgument], list[str]]:
    """Arguments in the order of the local schema, and sentences about those that it does not have."""
    by_name = {argument.name: each for argument, each in zip(traced.arguments, recorded, strict=False)}
    names = [argument.name for argument in here.arguments]
    unknown = [f"{name}: the operator here has no such argument" for name in by_name if name not in names]
    known = [position for position, name in enumerate(names) if name in by_name]
    last = max(known, default=-1)
    return [by_name.get(name, UNRECORDED) for name in names[: last + 1]], unknown


def _allocates_only(node: TraceNode) -> bool:
    """Whether an operator writes nothing to the memory it allocates. Older content that `resize_` keeps counts as
    written."""
    operator = operator_named(operator_name(node.schema)[0])
    given = node.inputs.tensors
    return operator.empty or (operator.resizes and bool(given) and not given[0][1].elements)


def _shown_flags(flags: TensorFlag) -> str:
    named = [word for flag, word in ((TensorFlag.conj, "conjugated"), (TensorFlag.neg, "negated")) if flags & flag]
    return " and ".join(named) or "neither conjugated nor negated"


def _strides_tell(spec: TensorSpec) -> bool:
    """Whether this tensor's strides carry information."""
    return sum(size != 1 for size in spec.sizes or ()) > 0 and 0 not in (spec.sizes or ())
