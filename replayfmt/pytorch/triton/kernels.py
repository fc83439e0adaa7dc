"""A Triton kernel as a capture holds it: a schema, its source, and metadata that say how its launches are made.

`LaunchForm` lays out the arguments of a launch as those of a schema, and back. `declaration_of` says how a kernel is
declared: enough to launch its binary where its source was left out of a capture.
"""

from __future__ import annotations

import collections
import hashlib
import json
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from keyword import iskeyword
from types import ModuleType
from typing import Any

import torch

from replayfmt.format.validation import parse_json

from .accesses import Accesses
from .compiled import BINARIES, STAGES, StoredBinary, attached_stages, compiled_accesses, compiled_metadata
from .sources import DECLARED, KernelFunction, StandaloneSource, annotation, argument_kind, is_callable_of_triton

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


def launch_text(arguments: Iterable[tuple[str, Any]]) -> str:
    """The arguments of a launch in one line, tensors by their dtype: what an autotuner's choice is kept under."""
    return ", ".join(f"{name}={_written_out(value)}" for name, value in arguments)


def _written_out(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    for kind in (float, int):
        if isinstance(value, kind) and not isinstance(value, bool):
            return repr(kind(value))
    return repr(list(map(int, value))) if isinstance(value, list | tuple) else repr(value)


class FormMaker:
    """Lays out the launches of one kernel."""

    def __init__(self, parameters: Iterable[str], constexprs: Iterable[str], source: StandaloneSource) -> None:
        self._parameters, self._constexprs, self._source = tuple(parameters), frozenset(constexprs), source
        for name in self._parameters:
            if not _IDENTIFIER.match(name):
                raise NotRepresentable(f"the name of its parameter {name!a} is none that a schema can have")

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
            return {"reinterpret": base, "as": str(getattr(value.dtype, "name", value.dtype))}
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


_KIND = re.compile(r"\**[A-Za-z0-9_]{0,32}\Z")
_FREE = ("triton", "tl")


def declaration_of(source: StandaloneSource, given: Iterable[str]) -> dict[str, Any]:
    """The declaration of a module's kernel, and of the functions of these names, as JSON."""
    names = dict.fromkeys([source.name, *given])
    return {"functions": {name: _declared(source.functions[name]) for name in names}}


def _declared(function: KernelFunction) -> dict[str, Any]:
    parameters = function.signature.parameters.values()
    return {
        "constexpr": function.constexpr,
        "options": dict(function.declared),
        "parameters": {}
        if function.constexpr
        else {name: argument_kind(function, name) for name in function.signature.parameters},
        "by_name": [each.name for each in parameters if each.kind is each.KEYWORD_ONLY],
    }


def source_without_bodies(declaration: Any) -> str:
    """The module of a declaration. Raises ValueError for what is none."""
    functions = declaration.get("functions") if isinstance(declaration, Mapping) else None
    if not isinstance(functions, Mapping) or not functions:
        raise ValueError("its declaration has no functions")
    head = "import triton\nimport triton.language as tl\n"
    return "\n\n".join([head, *(_definition(name, each) for name, each in functions.items())])


def _definition(name: Any, function: Any) -> str:
    if not isinstance(function, Mapping) or set(function) != {"constexpr", "options", "parameters", "by_name"}:
        raise ValueError(f"its declaration of {name!a} is none")
    kinds, by_name = function["parameters"], function["by_name"]
    if not isinstance(kinds, Mapping) or not isinstance(by_name, list):
        raise ValueError(f"its declaration of {name!a} has no parameters")
    for each in (name, *kinds):
        if not isinstance(each, str) or not each.isidentifier() or iskeyword(each) or each in _FREE:
            raise ValueError(f"{each!a} in its declaration is not the name of a function or of a parameter")
    decorator = "@triton.constexpr_function" if function["constexpr"] else f"@triton.jit({_options(function)})"
    parameters = [f"{each}{_checked(text)}" for each, text in kinds.items() if each not in by_name]
    if by_name:
        parameters += ["*", *(f"{each}{_checked(kinds[each])}" for each in kinds if each in by_name)]
    body = '    tl.static_assert(False, "the source of this kernel is not in the capture")\n'
    return f"{decorator}\ndef {name}({', '.join(parameters)}):\n{body}"


def _options(function: Mapping[str, Any]) -> str:
    options = function["options"]
    if not isinstance(options, Mapping) or not set(options) <= set(DECLARED):
        raise ValueError(f"its declaration has options that triton.jit does not take: {options!a}")
    for value in _leaves(options.values()):
        if not isinstance(value, bool | int) and not (isinstance(value, str) and value.isidentifier()):
            raise ValueError(f"{value!a} in its declaration is not the value of an option")
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list):
            yield from _leaves(value)
        else:
            yield value


def _checked(kind: Any) -> str:
    if not isinstance(kind, str) or not _KIND.match(kind):
        raise ValueError(f"{kind!a} in its declaration is not the kind of a parameter")
    return annotation(kind)


VERSION = 1
INTERPRETER = "interpreter"
INDUCTOR = "inductor"  # compiled it, and kept the binary for itself
TRACED = "traced"  # Inductor compiled it where a trace was made; its source was found later
_ARITHMETIC = ("enable_fp_fusion", "default_dot_input_precision", "sanitize_overflow", "debug")


@dataclass(frozen=True)
class KernelCode:
    """A kernel that is written to a capture. `identity`: those of its metadata that its variant is made of; `contents`:
    role, name and content of each other attachment. `read`: the parameters through which it may read, None if its
    intermediate code does not tell. `written`: the tensor arguments that it may write, `assumed`: those of them of
    which nothing tells that it does; `found_in` what tells of the others (`ir`, `source`). `changed`: those of the
    assumed ones whose content a launch changed, None if it was not compared."""

    name: str
    identity: Mapping[str, Any]
    details: Mapping[str, Any]
    form: LaunchForm
    contents: tuple[tuple[str, str, bytes], ...]
    read: frozenset[str] | None
    written: frozenset[str]
    assumed: frozenset[str]
    found_in: str
    changed: frozenset[str] | None = None

    @classmethod
    def of_launch(
        cls,
        name: str,
        source: StandaloneSource,
        form: LaunchForm,
        accesses: Accesses,
        configuration: str,
        compiled: Any = None,
        *,
        target: str = INTERPRETER,
        binary: bool = True,
    ) -> KernelCode:
        """The kernel of a launch. `configuration`: what an autotuner chose, "" if none did. `compiled`: what Triton
        compiled for it; without it, `target` says what ran it. `binary`: whether Triton launches its binary for such
        arguments. Raises NotRepresentable."""
        identity: dict[str, Any] = {
            "kind": "triton",
            "version": VERSION,
            "function": source.name,
            "parameters": form.parameters,
            "constexprs": form.constexprs,
            "grid": form.grid,
            "options": form.options,
            "dtypes": form.dtypes,
            "source_sha256": hashlib.sha256(source.text.encode()).hexdigest(),
        }
        details: dict[str, Any] = {}
        written, stored, found_in = accesses.written, accesses.stored, "source"
        makes_pointers = accesses.makes_pointers or bool(accesses.casts_to & form.pointers)
        stages: list[tuple[str, bytes]] = []
        read: frozenset[str] | None = None
        if compiled is None:
            details["target"] = target
        else:
            identity |= compiled_metadata(compiled, source.name_of)
            stages = [each for each in attached_stages(compiled) if binary or each[0] not in BINARIES]
            details["declaration"] = declaration_of(source, form.functions)
            found = compiled_accesses(compiled)
            if found is not None:
                (written, stored, read, makes_pointers), found_in = found, "ir"
        if makes_pointers:
            raise NotRepresentable("it turns integers into pointers, so that what it reads and writes is not known")
        details["triton"] = "" if target == TRACED else sys.modules["triton"].__version__
        if configuration:
            details["configuration"] = configuration
        tensors = form.tensors
        may = frozenset(each for each in tensors if written is None or form.owner[each] in written)
        return cls(
            name,
            identity,
            details,
            form.without_values(),
            (
                ("source", f"{name}.py", source.text.encode()),
                *((role, f"{name}.{role}", content) for role, content in stages),
            ),
            read,
            may,
            frozenset(each for each in may if form.owner[each] not in stored),
            found_in,
        )

    def found_to_change(self, changed: frozenset[str]) -> KernelCode:
        """The kernel of a launch that changed the content of these of the assumed arguments, and of no others."""
        return replace(self, written=self.written - self.assumed | changed, changed=changed)

    @property
    def writes(self) -> str:
        """How it is known what it writes."""
        if not self.assumed:
            return self.found_in
        return "assumed" if self.changed is None else "compared"

    @property
    def schema(self) -> str:
        return self.form.schema(self.name, _variant({**self._identity, "types": self.form.types}), self.written)

    @property
    def attached(self) -> tuple[tuple[str, str, bytes], ...]:
        """Role, name and content of each attachment."""
        source, *stages = self.contents
        metadata = {**self._identity, **self.details, "writes": self.writes}
        return (source, ("metadata", f"{self.name}.json", json.dumps(metadata, indent=1).encode()), *stages)

    @property
    def _identity(self) -> Mapping[str, Any]:
        return self.identity if self.changed is None else {**self.identity, "changed": sorted(self.changed)}


@dataclass(frozen=True)
class StoredKernel:
    """A kernel as it was read from a capture. Nothing of it was run. `source`: None if it was left out. `compiled`: all
    that Triton said of what it compiled, options among it."""

    source: str | None
    function: str
    parameters: Mapping[str, Any]
    grid: str
    options: Mapping[str, str]
    dtypes: Mapping[str, str]
    target: Any
    triton: str
    binary: StoredBinary | None
    compiled: Mapping[str, Any]
    declaration: Any
    source_sha256: str
    configuration: str  # "" if no autotuner chose one

    def arithmetic_options(self, target: Any, known: Iterable[str]) -> dict[str, Any]:
        """How it computes, where its source is compiled for a target: options that it was compiled with, of those that
        the target's compiler knows, and that Triton otherwise chooses by its version and the environment."""
        if not isinstance(self.target, dict) or self.target.get("backend") != target.backend:
            return {}
        names = [name for name in _ARITHMETIC if name in known and name not in self.options]
        return {name: self.compiled[name] for name in names if isinstance(self.compiled.get(name), bool | str)}

    @property
    def module(self) -> str:
        """The text of a module with the kernel: its source, else one from which its binary can be launched. Raises
        ValueError if there is neither."""
        if self.source is not None:
            return self.source
        if self.binary is None or self.declaration is None:
            raise ValueError("the capture has no source of it" + (", and no declaration" if self.binary else ""))
        return source_without_bodies(self.declaration)

    @classmethod
    def read(cls, contents: Mapping[str, bytes]) -> StoredKernel:
        """From its attachments, by role. Raises ValueError that says what is wrong with them."""
        if "metadata" not in contents:
            raise ValueError("the capture has no metadata of it")
        try:
            metadata = parse_json(contents["metadata"])
            source = contents["source"].decode() if "source" in contents else None
        except ValueError as error:
            raise ValueError(f"its source or its metadata cannot be read ({error})") from None
        if not isinstance(metadata, dict) or metadata.get("kind") != "triton" or metadata.get("version") != VERSION:
            raise ValueError(f"its metadata are not those of a Triton kernel of version {VERSION}")
        if source is not None and hashlib.sha256(source.encode()).hexdigest() != metadata.get("source_sha256"):
            raise ValueError("its source does not match the hash in its metadata")
        kinds = {"function": str, "parameters": dict, "grid": str, "options": dict, "dtypes": dict, "triton": str}
        for key, kind in kinds.items():
            if not isinstance(metadata.get(key), kind):
                raise ValueError(f"its metadata have no {key}")
        for key in ("options", "dtypes"):
            if not all(isinstance(value, str) for value in metadata[key].values()):
                raise ValueError(f"the {key} in its metadata are not names")
        stages = {role: content for role, content in contents.items() if role in STAGES}
        return cls(
            source,
            target=metadata.get("target"),
            binary=StoredBinary(metadata, stages) if any(role in stages for role in BINARIES) else None,
            compiled=compiled if isinstance(compiled := metadata.get("compiled"), dict) else {},
            declaration=metadata.get("declaration"),
            source_sha256=str(metadata.get("source_sha256")),
            configuration=str(metadata.get("configuration") or ""),
            **{key: metadata[key] for key in kinds},
        )


def _variant(identity: Mapping[str, Any]) -> str:
    """The overload of a kernel: the beginning of its identity's SHA-256, after a letter."""
    return "v" + hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
