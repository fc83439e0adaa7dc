"""Finds the operator of a traced call, and its overload.

A name is looked up in the JIT registry, then in `torch.ops`, then among the attributes of the modules that register its
namespace, if the user allows importing them; the outcome says where it was found. Traces name the operator but not the
overload: that is found by matching the recorded arguments against every schema of the name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from replayfmt.format.model import Kernel
from replayfmt.format.operator_schema import name_problem
from replayfmt.pytorch.op_libraries import OpLibraries
from replayfmt.pytorch.operators import ALWAYS_THERE, operator_named
from replayfmt.pytorch.overloads import (
    call_problem,
    is_registered,
    overloads_of,
    parameter_names,
    parse_schema,
    printed_schema,
    schema_text,
)
from replayfmt.pytorch.traced_names import REMOVED, TracedNames

from .arguments import BASES, ArgumentForm, RecordedArgument, schema_type, score

REPLACED = "what --rewrite=portable replaces"
REGISTRY, TORCH_OPS, ATTRIBUTE = "the JIT registry", "torch.ops", "a module's attribute"
# Names in traces for code that torch.compile generated: by version, a region, its autograd function, a graph's call.
COMPILED_CODE = re.compile(r"Torch-Compiled Region|CompiledFunction(Backward)?\Z|## Call CompiledFxGraph")


# Collectives are made of others: each of these namespaces calls those before it, and the functional ones each other.
# What a backend or `record_param_comms` names is the lowest; `symm_mem` fuses collectives with other work.
_COLLECTIVE_LAYERS = {
    "c10d": 1,
    "c10d_functional": 2,
    "_c10d_functional": 2,
    "_c10d_functional_autograd": 3,
    "_dtensor": 4,
    "symm_mem": 5,
}
FUSED_LAYER = 5


def collective_layer(name: str) -> int:
    """How far above the backend a collective's name (`c10d::send`, `nccl:all_reduce`) is."""
    return _COLLECTIVE_LAYERS.get(name.partition("::")[0], 0)


def only_wraps(name: str) -> bool:
    """Whether an operator among collectives is none: what a functional one returns is only put into an object."""
    return name.endswith("::_wrap_tensor_autograd")


def is_part(layer: int, around: int) -> bool:
    """Whether a collective of one layer is a part of the one of another around it; -1: there is none. Of two of `c10d`
    the outer one was not over as the program began the inner one."""
    return layer < around or (layer == around and layer != _COLLECTIVE_LAYERS["c10d"])


def only_moves(name: str, schema: torch.FunctionSchema | None) -> bool:
    """Whether an operator only allocates, makes views, or moves elements, as collectives do to prepare their
    buffers."""
    known = operator_named(name)
    if known.idle or known.moves_elements or known.reads_nothing or known.copies >= 0:
        return True
    return schema is not None and _views_only(schema)


def _views_only(schema: torch.FunctionSchema) -> bool:
    return bool(schema.returns) and all(
        each.alias_info is not None and not each.alias_info.is_write for each in schema.returns
    )


# What Inductor calls its kernels: by category and what they fuse, templates by what they compute.
_GENERATED = re.compile(
    r"triton_((poi|red|per|tem|for|mix|spl|unk|\w+_fused)_|((add|b|baddb|scaled_|grouped_|)mm|conv|flex)|\d+\Z)"
)


def is_generated_kernel(name: str) -> bool:
    """Whether a Triton kernel is named like one that torch.compile generated."""
    return _GENERATED.match(name) is not None


@dataclass(frozen=True)
class FoundOperator:
    """One overload. `found` says where, `callable` is a module's attribute (there is no registered schema then)."""

    schema: torch.FunctionSchema
    found: str
    callable: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        """`aten::mm`."""
        return self.schema.name

    @property
    def overload(self) -> str:
        """`default` where the overload has no name."""
        return self.schema.overload_name or "default"

    @cached_property
    def dispatched(self) -> bool:
        """Whether the dispatcher knows it; TorchScript has operators of its own, which are not captured work."""
        return is_registered(self.name, self.overload)

    @cached_property
    def composite(self) -> bool:
        """Whether it has no device kernels of its own: it only calls other operators."""
        name = self.schema.name + (f".{self.schema.overload_name}" if self.schema.overload_name else "")
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        if not self.dispatched or any(has(name, key) for key in ("CPU", "CUDA", "HIP", "XPU", "PrivateUse1")):
            return False
        return any(
            has(name, key)
            for key in (
                "CompositeImplicitAutograd",
                "CompositeExplicitAutograd",
                "CompositeExplicitAutogradNonFunctional",
            )
        )

    @cached_property
    def only_views(self) -> bool:
        """Whether it returns only views of its arguments, and does not write to them."""
        return _views_only(self.schema)

    @cached_property
    def traceable(self) -> bool:
        """Whether a trace can record its arguments: not if it needs an object of its library's own type."""
        return all(
            schema_type(each).base in BASES or each.has_default_value() or schema_type(each).optional
            for each in self.schema.arguments
        )

    @cached_property
    def kernel(self) -> Kernel:
        """The kernel as a capture names it."""
        return Kernel(self.name, self.overload, printed_schema(self.schema))


@dataclass(frozen=True)
class OperatorChoice:
    """The overload of a call, or why there is none: `reason` is that of the unsupported record, `detail` a sentence.

    `assumed` says what about the choice is uncertain.
    """

    operator: FoundOperator | None
    reason: str = ""
    detail: str = ""
    assumed: tuple[str, ...] = ()


def without_overload(name: str) -> str:
    """`aten::add` for `aten::add.Tensor`."""
    return name.partition(".")[0]


class Operators:
    """Looks operators up, each name once."""

    def __init__(self, libraries: OpLibraries | None = None, names: TracedNames | None = None) -> None:
        self._libraries = libraries or OpLibraries()
        self.names = names or TracedNames()
        self._candidates: dict[str, tuple[list[FoundOperator], str]] = {}
        self._texts: dict[str, FoundOperator | None] = {}

    def exists(self, name: str) -> bool:
        """Whether anything of that name can be found."""
        return bool(self.candidates(name)[0])

    def candidates(self, name: str) -> tuple[list[FoundOperator], str]:
        """Every overload of a name, those that the dispatcher knows first; if there are none, why not. For a name with
        an overload (`aten::add.Tensor`, as the profiler's `capture_overload_names` prints it), that one."""
        name, _dot, overload = name.partition(".")
        if name not in self._candidates:
            self._candidates[name] = self._find_meant(name)
        found, why = self._candidates[name]
        if overload and found:
            found = [each for each in found if each.overload == overload]
            why = "" if found else f"{name} has no overload {overload!r} here"
        return found, why

    def _find_meant(self, name: str) -> tuple[list[FoundOperator], str]:
        why = ""
        for each in self.names.meant(name):
            found, reason = self._find(each)
            if found:
                return found, ""
            why += f"; {reason}" if why else reason
        return [], why

    def _find(self, name: str) -> tuple[list[FoundOperator], str]:
        if name_problem(name, "default"):
            return [], f"{name!r} is not an operator name"
        found = self._registered(name)
        if found:
            return found, ""
        if name in REMOVED:
            return [], f"no operator {name} is registered here: {REMOVED[name]}"
        namespace = name.partition("::")[0]
        if namespace in ALWAYS_THERE and not self._libraries.modules_for(namespace):
            return [], (
                f"no operator {name} is registered here: it is not PyTorch {torch.__version__}'s, but of another "
                "version or of a build with other backends; --op-alias names one that replaces it"
            )
        why = self._libraries.provide(name, lambda: bool(self._registered(name)))
        found = self._registered(name)
        return found, "" if found else f"no operator {name} is registered here, {why}"

    def attribute(self, name: str) -> Callable[..., Any] | None:
        """The function of an operator's name in a module that the user specified for its namespace; used if nothing is
        registered under that name."""
        for each in self.names.meant(without_overload(name)):
            namespace, _separator, base = each.partition("::")
            found = self._libraries.callable(namespace, base) if base.isidentifier() else None
            if found is not None:
                return found
        return None

    def by_types(self, name: str, recorded: Sequence[RecordedArgument], keywords: Sequence[str] = ()) -> OperatorChoice:
        """A named function as an operator, with a schema made from the types of the recorded arguments, of which the
        last have been given by name: `keywords`.

        Trailing arguments that the trace does not record are left to the function's defaults.
        """
        function = self.attribute(name)
        if function is None:
            return OperatorChoice(None, "no_schema", self.candidates(name)[1])
        given = list(recorded)
        while len(given) > len(keywords) and given[-1].form is ArgumentForm.unrecorded:
            given.pop()
        count = len(given) - len(keywords)
        kinds = [_type_of(each) for each in given]
        if "Tensor" not in kinds and "Tensor[]" not in kinds:
            return OperatorChoice(None, "no_schema", f"{name} is a function here that was called without tensors")
        if "" in kinds:
            what = _shown(given[kinds.index("")])
            return OperatorChoice(None, "import_incomplete", f"{name} has no schema, and its argument {what} no type")
        problem = call_problem(function, count, keywords)
        if problem:
            return OperatorChoice(
                None, "import_incomplete", f"{name} is a function here that cannot be called so: {problem}"
            )
        named = list(zip([*parameter_names(function, count), *keywords], kinds, strict=True))
        text = schema_text(self.names.meant(without_overload(name))[-1], named[:count], named[count:])
        where = f"{function.__module__}.{getattr(function, '__qualname__', name)}"
        rest = len(recorded) - len(given)
        left = f"; {rest} arguments are left to its defaults" if rest else ""
        return OperatorChoice(
            FoundOperator(parse_schema(text), ATTRIBUTE, function),
            assumed=(f"no operator is registered: {where} is called by the recorded types{left}",),
        )

    def _registered(self, name: str) -> list[FoundOperator]:
        schemas = torch._C._jit_get_schemas_for_operator(name)
        operators = [FoundOperator(schema, REGISTRY) for schema in schemas]
        if not operators:
            operators = [FoundOperator(each._schema, TORCH_OPS) for each in overloads_of(name)]
        return sorted(operators, key=lambda each: not each.dispatched)

    def choose(self, name: str, recorded: Sequence[RecordedArgument]) -> OperatorChoice:
        """The overload whose schema fits the recorded arguments best."""
        candidates, why = self.candidates(name)
        if not candidates:
            return OperatorChoice(None, "no_schema", why)
        scored = [(points, each) for each in candidates if (points := score(each.schema, recorded)) is not None]
        usable = [(points, each) for points, each in scored if each.dispatched]
        if not usable:
            shown = ", ".join(_shown(each) for each in recorded)
            schemas = "; ".join(printed_schema(each.schema) for each in candidates if each.dispatched)
            return OperatorChoice(
                None, "import_incomplete", f"no overload of {name} takes ({shown}); there are: {schemas}"
            )
        best = max(points for points, _each in usable)
        chosen = [each for points, each in usable if points == best]
        assumed: tuple[str, ...] = ()
        if len(chosen) > 1:
            names = ", ".join(each.overload for each in chosen)
            assumed = (f"overload {chosen[0].overload}: the recorded types fit {names} equally well",)
        return OperatorChoice(chosen[0], assumed=(*self.alias(name, chosen[0]), *assumed))

    def alias(self, name: str, operator: FoundOperator) -> tuple[str, ...]:
        """A note if a traced name is not the operator's own."""
        name = without_overload(name)
        return () if name == operator.name else (self.names.alias_sentence(name, operator.name),)

    def by_schema(self, text: str) -> OperatorChoice:
        """The overload whose schema text is in the trace, as it is in this torch."""
        try:
            schema = parse_schema(text)
        except (RuntimeError, ValueError) as error:
            return OperatorChoice(None, "no_schema", f"the schema {text!r} cannot be read: {str(error).strip()}")
        candidates, why = self.candidates(schema.name)
        for each in candidates:
            if each.overload == (schema.overload_name or "default") and each.dispatched:
                changed = (
                    ()
                    if printed_schema(each.schema) == printed_schema(schema)
                    else (f"{each.name}.{each.overload} has another schema here: {printed_schema(each.schema)}",)
                )
                return OperatorChoice(each, assumed=changed)
        return OperatorChoice(None, "no_schema", why or f"{schema.name} has no overload {schema.overload_name!r} here")


_PLAIN = {bool: "bool", int: "int", float: "float", complex: "complex"}


def _type_of(recorded: RecordedArgument) -> str:
    """A schema type for a recorded argument, "" if the trace does not say enough."""
    if recorded.form is ArgumentForm.tensor:
        return "Tensor"
    if recorded.form in (ArgumentForm.nothing, ArgumentForm.unrecorded):
        return "Any?"
    if recorded.form is ArgumentForm.number:
        return _PLAIN[type(recorded.value)]
    if recorded.form is ArgumentForm.items:
        kinds = {_type_of(item) for item in recorded.items}
        return f"{kinds.pop()}[]" if len(kinds) == 1 and not kinds & {"", "Any?"} else ""
    return ""


def _shown(recorded: RecordedArgument) -> str:
    if recorded.form is ArgumentForm.tensor and recorded.tensor is not None:
        dtype = recorded.tensor.dtype
        return f"Tensor {dtype.name if dtype is not None else '?'}{list(recorded.tensor.sizes or ())}"
    if recorded.form is ArgumentForm.items:
        return f"[{', '.join(map(_shown, recorded.items[:4]))}{', and more' if len(recorded.items) > 4 else ''}]"
    return recorded.shown or "not recorded"
