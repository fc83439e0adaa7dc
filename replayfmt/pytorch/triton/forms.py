"""The arguments of a launch as those of a schema, and back.

A schema has tensors, numbers, strings and lists of integers. What else a kernel takes is taken apart: a tuple into its
elements, a tensor descriptor into its tensor, shape and strides. A form says how a parameter is put together again: the
name of an argument, which is passed as it is, or an object with one key:

    {"tuple": [form, …], "class": NAME, "fields": [name, …]}   (class and fields of a named tuple)
    {"list": [form, …]}
    {"constexpr": form}               tl.constexpr of it
    {"dtype": argument}               tl.dtype of its name
    {"function": name}                a function of the kernel's module
    {"reinterpret": argument, "as": dtype}
    {"descriptor": argument, "shape": argument, "strides": argument, "block_shape": argument, "padding": …, …}

Forms come from captures: `Assembly` refuses those that are of no such kind.
"""

from __future__ import annotations

import collections
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch

from .functions import KernelFunction, is_callable_of_triton
from .sources import StandaloneSource

Form = str | dict[str, Any]
Values = Mapping[str, Any]

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}\Z")
_INT64 = range(-(1 << 63), 1 << 63)
_DESCRIPTOR = ("shape", "strides", "block_shape")
_DESCRIPTOR_OPTIONS = ("padding", "round_f32_to_tf32")


class NotRepresentable(Exception):
    """A launch cannot be recorded. The text says why."""


@dataclass
class LaunchForm:
    """A launch laid out: the arguments of its schema by name, in order, with their types; the parameters' forms.

    `owner`: the parameter that each argument belongs to. `grid`: the argument that is the grid.
    """

    types: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    keyword_only: set[str] = field(default_factory=set)
    parameters: dict[str, Form] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    owner: dict[str, str] = field(default_factory=dict)
    constexprs: list[str] = field(default_factory=list)
    grid: str = ""

    def schema(self, name: str, variant: str, written: frozenset[str]) -> str:
        """The schema of the kernel, of which only the arguments `written` are written."""
        ordered = [each for each in self.types if each not in self.keyword_only]
        parts = [self._declared(each, index, written) for index, each in enumerate(ordered)]
        keywords = [each for each in self.types if each in self.keyword_only]
        parts += ["*", *(self._declared(each, len(ordered) + i, written) for i, each in enumerate(keywords))]
        return f"triton::{name}.{variant}({', '.join(parts)}) -> ()"

    def _declared(self, name: str, index: int, written: frozenset[str]) -> str:
        return f"{f'Tensor(a{index}!)' if name in written else self.types[name]} {name}"

    def without_values(self) -> LaunchForm:
        """The form alone, which keeps no tensor alive."""
        return replace(self, values={})

    @property
    def tensors(self) -> list[str]:
        """The arguments that are tensors."""
        return [name for name, kind in self.types.items() if kind == "Tensor"]

    @property
    def pointers(self) -> frozenset[str]:
        """The parameters whose type is that of a pointer, or that hold some. A descriptor's type is its elements'."""
        described = {name for name, form in self.parameters.items() if isinstance(form, dict) and "descriptor" in form}
        return frozenset(self.owner[name] for name in self.tensors) - described

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtype of each tensor argument."""
        return {name: str(self.values[name].dtype).removeprefix("torch.") for name in self.tensors}

    @property
    def functions(self) -> list[str]:
        """The functions of the kernel's module that it is given."""
        return list(_functions(list(self.parameters.values())))

    @property
    def arguments(self) -> dict[str, Any]:
        """The values in the order of the schema."""
        first = [name for name in self.types if name not in self.keyword_only]
        return {name: self.values[name] for name in (*first, *(each for each in self.types if each not in first))}


class FormMaker:
    """Lays out the launches of one kernel."""

    def __init__(self, function: KernelFunction, source: StandaloneSource) -> None:
        self._function, self._source = function, source
        self._parameters = tuple(function.signature.parameters)
        for name in self._parameters:
            if not _IDENTIFIER.match(name):
                raise NotRepresentable(f"the name of its parameter {name!a} is none that a schema can have")
        self._constexprs = {name for name, kind in function.parameter_types.items() if kind == "constexpr"}

    def lay_out(self, bound: Values, options: Values, grid: tuple[int, ...]) -> LaunchForm:
        """One launch. Raises NotRepresentable."""
        form = LaunchForm(constexprs=[name for name in self._parameters if name in self._constexprs])
        for name in self._parameters:
            form.parameters[name] = self._form(form, name, name, bound[name], name in self._constexprs)
        form.grid = self._argument(form, "grid", "grid", list(grid), "int[]", True)
        for name, value in options.items():
            if name in self._parameters:
                form.options[name] = name
            elif value is not None:
                form.options[name] = self._argument(form, name, name, value, _scalar(name, value), True)
        return form

    def _form(self, form: LaunchForm, name: str, owner: str, value: Any, keyword: bool) -> Form:
        """The form of a parameter, or of a part of one; appends its arguments."""
        kind = type(value)
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                raise NotRepresentable(f"its argument {name} is a tensor that is not strided")
            return self._argument(form, name, owner, value, "Tensor", keyword)
        if value is None:
            return self._argument(form, name, owner, None, "Tensor?", keyword)
        if isinstance(value, bool | int | float | str):
            return self._argument(form, name, owner, value, _scalar(name, value), keyword)
        if isinstance(value, torch.dtype):
            return self._argument(form, name, owner, value, "ScalarType", keyword)
        if isinstance(value, tuple | list):
            parts = [self._form(form, f"{name}_{i}", owner, each, keyword) for i, each in enumerate(value)]
            if isinstance(value, list):
                return {"list": parts}
            named = {} if kind is tuple else {"class": kind.__name__, "fields": list(getattr(value, "_fields", ()))}
            if named and len(named["fields"]) != len(parts):
                raise NotRepresentable(f"its argument {name} is a {kind.__qualname__}")
            return {"tuple": parts, **named}
        known = f"{kind.__module__}.{kind.__qualname__}"
        if known == "triton.language.core.constexpr":
            return {"constexpr": self._form(form, name, owner, value.value, True)}
        if known == "triton.language.core.dtype":
            return {"dtype": self._argument(form, name, owner, value.name, "str", True)}
        if known == "triton.runtime.jit.TensorWrapper" and isinstance(value.base, torch.Tensor):
            base = self._argument(form, name, owner, value.base, "Tensor", keyword)
            return {"reinterpret": base, "as": _dtype_name(value.dtype)}
        if known == "triton.tools.tensor_descriptor.TensorDescriptor" and isinstance(value.base, torch.Tensor):
            return self._descriptor(form, name, owner, value)
        if is_callable_of_triton(value) and (function := self._source.name_of(value)) is not None:
            return {"function": function}
        raise NotRepresentable(f"its argument {name} is a {known}")

    def _descriptor(self, form: LaunchForm, name: str, owner: str, value: Any) -> Form:
        made: dict[str, Any] = {"descriptor": self._argument(form, name, owner, value.base, "Tensor", False)}
        for part in _DESCRIPTOR:
            try:
                numbers = [operator.index(each) for each in getattr(value, part)]
            except TypeError:
                raise NotRepresentable(
                    f"the {part} of its descriptor {name} holds other things than integers"
                ) from None
            made[part] = self._argument(form, f"{name}_{part}", owner, numbers, "int[]", False)
        for option in _DESCRIPTOR_OPTIONS:
            if hasattr(value, option):
                made[option] = getattr(value, option)
        return made

    def _argument(self, form: LaunchForm, name: str, owner: str, value: Any, kind: str, keyword: bool) -> str:
        """Append an argument; returns its name, which is another if that is taken."""
        free, number = name, 1
        while free in form.types or (free != owner and free in self._parameters):
            number += 1
            free = f"{name}_{number}"
        form.types[free], form.values[free] = kind, value
        if keyword:
            form.keyword_only.add(free)
        form.owner[free] = owner
        return free


def _functions(forms: list[Form]) -> Iterator[str]:
    for form in forms:
        match form:
            case {"function": str(name)}:
                yield name
            case {"tuple": list(parts)} | {"list": list(parts)}:
                yield from _functions(parts)
            case {"constexpr": inner}:
                yield from _functions([inner])


def _scalar(name: str, value: Any) -> str:
    for kind, text in ((bool, "bool"), (int, "int"), (float, "float"), (str, "str")):
        if isinstance(value, kind):
            if kind is int and value not in _INT64:
                raise NotRepresentable(f"its argument {name} is {value}, which does not fit 64 bits")
            return text
    raise NotRepresentable(f"{name} is a {type(value).__qualname__}")


def _dtype_name(dtype: Any) -> str:
    return str(getattr(dtype, "name", dtype))


class Assembly:
    """Puts the parameters of a kernel together from the arguments of its schema. `module`: the kernel's, loaded."""

    def __init__(self, parameters: Any, arguments: frozenset[str], module: ModuleType) -> None:
        """Raises ValueError for what is no form, or names an argument that is not there."""
        if not isinstance(parameters, dict) or not all(isinstance(name, str) for name in parameters):
            raise ValueError("the forms of the parameters are not an object")
        self._arguments, self._module = arguments, module
        self._makers = [self._maker(form) for form in parameters.values()]

    def assemble(self, values: Values) -> list[Any]:
        """The parameters, in order. Raises KeyError for an argument that is not there."""
        return [make(values) for make in self._makers]

    def _maker(self, form: Any) -> Callable[[Values], Any]:
        if isinstance(form, str):
            return operator.itemgetter(self._named(form))
        if not isinstance(form, dict):
            raise ValueError(f"{form!a} is not the form of a parameter")
        match form:
            case {"tuple": list(parts)}:
                made = [self._maker(part) for part in parts]
                kind = _tuple_class(form.get("class"), form.get("fields"), len(made))
                return lambda values: kind(make(values) for make in made)
            case {"list": list(parts)}:
                made = [self._maker(part) for part in parts]
                return lambda values: [make(values) for make in made]
            case {"constexpr": inner}:
                value, constexpr = self._maker(inner), _language().constexpr
                return lambda values: constexpr(value(values))
            case {"dtype": str(name)}:
                argument, dtype = self._named(name), _language().dtype
                return lambda values: dtype(values[argument])
            case {"reinterpret": str(name), "as": str(kind_name)}:
                return self._reinterpreted(self._named(name), kind_name)
            case {"descriptor": str(name)}:
                return self._descriptor(self._named(name), form)
            case {"function": str(name)}:
                function = getattr(self._module, name, None)
                if not is_callable_of_triton(function):
                    raise ValueError(f"the kernel's source has no function {name!a}")
                return lambda values: function
        raise ValueError(f"{form!a} is not the form of a parameter")

    def _named(self, name: str) -> str:
        if name not in self._arguments:
            raise ValueError(f"the form of a parameter names the argument {name!a}, which the schema does not have")
        return name

    @staticmethod
    def _reinterpreted(name: str, kind: str) -> Callable[[Values], Any]:
        import triton

        dtype: Any = getattr(torch, kind.removeprefix("torch."), None) if kind.startswith("torch.") else None
        dtype = dtype if dtype is not None else triton.language.dtype(kind)
        return lambda values: triton.reinterpret(values[name], dtype)

    def _descriptor(self, base: str, form: dict[str, Any]) -> Callable[[Values], Any]:
        from triton.tools.tensor_descriptor import TensorDescriptor

        shape, strides, block = (self._named(str(form.get(part))) for part in _DESCRIPTOR)
        options = {option: form[option] for option in _DESCRIPTOR_OPTIONS if option in form}
        return lambda values: TensorDescriptor(values[base], values[shape], values[strides], values[block], **options)


def _tuple_class(name: Any, fields: Any, length: int) -> Callable[[Any], Any]:
    if name is None:
        return tuple
    if not isinstance(name, str) or not isinstance(fields, list) or len(fields) != length:
        raise ValueError("the form of a named tuple has no class and fields")
    made = collections.namedtuple(name, fields)  # type: ignore[misc]  # raises ValueError for what are no names
    return lambda values: made(*values)


def _language() -> Any:
    import triton.language

    return triton.language
