"""One call's arguments: as a trace recorded them, and as an operator's schema reads them.

What a trace says about one argument, before the overload is known, is recorded first. `bind` reads a list of such by a
schema: numbers become the enumerations, booleans and integers that the schema requires; what the trace omits is taken
from the schema's default, with a note, or reported as missing. The first functions read type names as traces print
them: C++ type names (`c10::BFloat16`), PyTorch's scalar type names (`BFloat16`) and Python's (`torch.bfloat16`), also
wrapped as `Tensor(long int)`; `schema_type` reduces the type of a schema's argument to what this needs.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any

import torch

from replayfmt.format.codes import DType, Layout, MemoryFormat, TensorFlag
from replayfmt.pytorch.traced_names import Guess, TracedNames

# fmt: off
_CPLUSPLUS = {
    "unsigned char": DType.uint8, "uint8_t": DType.uint8, "signed char": DType.int8, "char": DType.int8,
    "int8_t": DType.int8, "short": DType.int16, "short int": DType.int16, "int16_t": DType.int16, "int": DType.int32,
    "int32_t": DType.int32, "long": DType.int64, "long int": DType.int64, "long long": DType.int64,
    "long long int": DType.int64, "int64_t": DType.int64, "__int64": DType.int64, "half": DType.float16,
    "__half": DType.float16, "__nv_bfloat16": DType.bfloat16, "float": DType.float32, "double": DType.float64,
    "bool": DType.bool, "unsigned short": DType.uint16, "unsigned short int": DType.uint16,
    "short unsigned int": DType.uint16, "uint16_t": DType.uint16, "unsigned int": DType.uint32,
    "unsigned": DType.uint32, "uint32_t": DType.uint32, "unsigned long": DType.uint64,
    "long unsigned int": DType.uint64, "unsigned long int": DType.uint64, "unsigned long long": DType.uint64,
    "long long unsigned int": DType.uint64, "uint64_t": DType.uint64, "complex<half>": DType.complex32,
    "complex<float>": DType.complex64, "complex<double>": DType.complex128,
}
# fmt: on
# The names of c10::ScalarType, which some traces use where others use C++ names.
_SCALAR_TYPES = {
    "byte": DType.uint8,
    "char": DType.int8,
    "short": DType.int16,
    "int": DType.int32,
    "long": DType.int64,
    "half": DType.float16,
    "float": DType.float32,
    "double": DType.float64,
    "complexhalf": DType.complex32,
    "complexfloat": DType.complex64,
    "complexdouble": DType.complex128,
    "cfloat": DType.complex64,
    "cdouble": DType.complex128,
}
_BY_NAME = {dtype.name.lower(): dtype for dtype in DType if dtype}
_PREFIXES = ("c10::", "at::", "std::", "torch.", "thrust::", "const ", "::")


@lru_cache(maxsize=4096)
def dtype_of(name: str) -> DType | None:
    """The dtype of a type name, None if it is not a known dtype.

    >>> dtype_of("long int"), dtype_of("c10::Float8_e4m3fn"), dtype_of("BFloat16"), dtype_of("torch.int8")
    """
    text = " ".join(name.split())
    stripped = True
    while stripped:
        stripped = False
        for prefix in _PREFIXES:
            if text.startswith(prefix):
                text, stripped = text[len(prefix) :], True
    text = text.removesuffix(" const").replace("c10::", "").replace("at::", "").replace("std::", "")
    lowered = text.lower().replace("< ", "<").replace(" >", ">")
    return _CPLUSPLUS.get(lowered) or _BY_NAME.get(lowered) or _SCALAR_TYPES.get(lowered)


@lru_cache(maxsize=4096)
def wrapped(name: str) -> tuple[str, list[str]]:
    """A type name split into its parts: `Tensor(float)` is ("Tensor", ["float"]), `GenericList[Int,Tensor(c10::Half)]`
    is ("GenericList", ["Int", "Tensor(c10::Half)"]); a name that wraps nothing has no inner names."""
    text = name.strip()
    for opening, closing in ("()", "[]"):
        head, found, rest = text.partition(opening)
        if found and rest.endswith(closing) and head.isidentifier():
            return head, _split(rest[:-1])
    return text, []


def _split(text: str) -> list[str]:
    """Comma-separated names, not split at commas inside brackets."""
    parts: list[str] = []
    depth, start = 0, 0
    for position, character in enumerate(text):
        if character in "([<{":
            depth += 1
        elif character in ")]>}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    last = text[start:].strip()
    return [*parts, last] if last or parts else []


def scalar_type(number: int) -> DType | None:
    """The dtype for a c10::ScalarType's number, None if there is none: the format's codes are those plus one."""
    return DType(number + 1) if 0 <= number < max(DType) else None


def layout(number: int) -> Layout | None:
    return Layout(number + 1) if 0 <= number < max(Layout) else None


def memory_format(number: int) -> MemoryFormat | None:
    return MemoryFormat(number + 1) if 0 <= number < max(MemoryFormat) else None


def layout_of(name: str) -> Layout | None:
    """The layout for a name: `torch.strided`, `Strided`, `SparseCsr`."""
    text = name.removeprefix("torch.").lower().replace("_", "")
    text = {"sparse": "sparsecoo", "mkldnn": "mkldnn"}.get(text, text)
    return next((each for each in Layout if each and each.name.replace("_", "") == text), None)


def memory_format_of(name: str) -> MemoryFormat | None:
    """The memory format for a name: `torch.channels_last`, `ChannelsLast`, `Preserve`."""
    text = name.removeprefix("torch.").lower().replace("_", "").removesuffix("format")
    names = {each.name.replace("_", "").removesuffix("format"): each for each in MemoryFormat if each}
    return names.get(text)


_NAMES = {"Scalar": "number", "SymInt": "int", "SymFloat": "float", "SymBool": "bool", "string": "str"}


# Element types of values that a trace can contain; any other is an object of a library's own type.
BASES = frozenset(
    {
        "Tensor",
        "int",
        "float",
        "number",
        "bool",
        "complex",
        "str",
        "ScalarType",
        "Layout",
        "MemoryFormat",
        "Device",
        "Generator",
    }
)


@dataclass(frozen=True)
class ArgumentType:
    """`base` is Tensor, int, float, number, bool, complex, str, ScalarType, Layout, MemoryFormat, Device, Generator, or
    another name; `depth` is the number of lists around it; `length` is a list's fixed length, 0 if it has none.
    `inner_optional` says for each list level, outermost first, whether its elements may be None."""

    base: str
    optional: bool = False
    depth: int = 0
    length: int = 0
    inner_optional: tuple[bool, ...] = ()

    @property
    def element(self) -> ArgumentType:
        """The type of a list's elements."""
        assert self.depth
        return ArgumentType(self.base, self.inner_optional[0], self.depth - 1, 0, self.inner_optional[1:])

    def __str__(self) -> str:
        text = self.base
        for optional in reversed(self.inner_optional):
            text += "?[]" if optional else "[]"
        return text + ("?" if self.optional else "")


_known: dict[str, ArgumentType] = {}


def schema_type(argument: Any) -> ArgumentType:
    """The type of a schema's argument (torch._C.Argument)."""
    real = argument.real_type
    length = argument.N or 0
    key = f"{real}|{length}"
    found = _known.get(key)
    if found is None:
        found = _known[key] = _of(real, length)
    return found


def _of(kind: Any, length: int = 0) -> ArgumentType:
    optional = False
    if isinstance(kind, torch._C.OptionalType):
        optional, kind = True, kind.getElementType()
    if isinstance(kind, torch._C.ListType):
        inner = _of(kind.getElementType())
        return ArgumentType(inner.base, optional, inner.depth + 1, length, (inner.optional, *inner.inner_optional))
    text = str(kind)
    return ArgumentType(_NAMES.get(text, text), optional)


class ArgumentForm(Enum):
    """What a trace says about an argument."""

    tensor = "a tensor"
    items = "a list"
    number = "a number"
    text = "text"  # a string, a dtype's or a device's name: text that the schema has to interpret
    nothing = "None"  # the trace says that it is None
    unrecorded = "nothing"  # the trace says nothing: None, or a kind of value that it does not record
    truncated = "a truncated value"
    hidden = "a value"  # a number or a list of numbers, whose value is not recorded


@dataclass(frozen=True)
class TensorSpec:
    """What a trace says about a tensor; None: not recorded. `identity` names its storage if the trace knows it,
    `offset` is in elements, `device` a name such as `cuda:0`. `lacks` says why no such tensor can be made."""

    dtype: DType | None
    sizes: tuple[int, ...] | None
    strides: tuple[int, ...] | None = None
    device: str | None = None
    offset: int = 0
    identity: Hashable = None
    number: bool = False  # a Python number that was passed as a zero-dimensional tensor
    flags: TensorFlag = TensorFlag(0)  # conjugated or negated views
    lacks: str = ""


@dataclass(frozen=True)
class RecordedArgument:
    """One argument as recorded. `value` is a bool, int, float or complex for a number, a str for text."""

    form: ArgumentForm
    value: Any = None
    tensor: TensorSpec | None = None
    items: tuple[RecordedArgument, ...] = ()
    shown: str = ""  # as the trace prints it, for messages


@dataclass(frozen=True)
class DeviceName:
    """A device as an argument; `name` is None if the trace does not say which device."""

    name: str | None


@dataclass(frozen=True)
class DefaultGenerator:
    """The default random generator, passed explicitly."""

    device: str | None = None


class ReturnedStorage(Enum):
    """A storage that a trace does not name: that of the tensor which the operator returns on it."""

    it = "the storage of what is returned"


RETURNED_STORAGE = ReturnedStorage.it

# What an argument may be once it is bound: None, bool, int, float, complex, str, DType, Layout, MemoryFormat,
# DeviceName, DefaultGenerator, ReturnedStorage, TensorSpec, or a list of these.
Bound = Any


@dataclass
class Binding:
    """Arguments as a schema reads them, in its order, without those that were certainly left to their defaults.

    `assumed` has sentences about what the trace does not say, `missing` about what could not be determined: if there
    are any of those, the call cannot be made.
    """

    arguments: list[tuple[str, Bound]] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


NOTHING = RecordedArgument(ArgumentForm.nothing, shown="None")
UNRECORDED = RecordedArgument(ArgumentForm.unrecorded, shown="")
NO_NUMBERS = RecordedArgument(ArgumentForm.unrecorded, value="no numbers", shown="")  # in place of lists of numbers
HIDDEN_NUMBER = RecordedArgument(ArgumentForm.hidden, value="a number", shown="a number")
HIDDEN_LIST = RecordedArgument(ArgumentForm.hidden, value="a list of numbers", shown="a list of numbers")
_NUMBER = re.compile(r"[+-]?(\d+(?:\.\d*)?([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?)f?\Z")
_LONGEST_NUMBER = 100  # characters
_DEEPEST = 8  # lists inside lists
_COMPLEX = re.compile(r"\(\s*([^,()]+),\s*([^,()]+)\)\Z|(.+?)([+-][^+-]+(?:[eE][+-]\d+)?)j\Z")
_WORDS: dict[str, Any] = {
    "true": True,
    "false": False,
    "inf": float("inf"),
    "-inf": float("-inf"),
    "nan": float("nan"),
    "infinity": float("inf"),
    "-infinity": float("-inf"),
    "-nan": float("nan"),
}


def number(text: str) -> bool | int | float | complex | None:
    """A number as C++ or Python prints it; None if the text is not a number. Integers stay integers."""
    text = text.strip()
    if len(text) > _LONGEST_NUMBER:
        return None
    word = _WORDS.get(text.lower())
    if word is not None:
        return word
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if _NUMBER.match(text):
        return float(text.rstrip("f"))
    found = _COMPLEX.match(text)
    if found:
        parts = [number(part) for part in found.groups() if part is not None]
        if len(parts) == 2 and all(isinstance(part, int | float) for part in parts):
            return complex(parts[0], parts[1])  # type: ignore[arg-type]
    return None


def parse(text: str, depth: int = 0) -> RecordedArgument:
    """Parse a value: `[1, 2]`, `0.5`, `False`, `None`; anything else is text. `depth` is the number of lists around
    it."""
    stripped = text.strip()
    if stripped in ("None", "<None>", "null"):
        return NOTHING
    if "..." in stripped and stripped.rstrip("]) ,").endswith("..."):
        return RecordedArgument(ArgumentForm.truncated, shown=stripped)
    if stripped[:1] == "[" and stripped[-1:] == "]" and depth < _DEEPEST:
        return of_list([parse(part, depth + 1) for part in _elements(stripped[1:-1])], stripped)
    value = number(stripped)
    if value is not None:
        return RecordedArgument(ArgumentForm.number, value, shown=stripped)
    return RecordedArgument(ArgumentForm.text, stripped, shown=stripped)


def _elements(text: str) -> list[str]:
    parts: list[str] = []
    depth, start = 0, 0
    for position, character in enumerate(text):
        if character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif character == "," and not depth:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]] if text.strip() else []


def of_tensor(spec: TensorSpec, shown: str = "") -> RecordedArgument:
    return RecordedArgument(ArgumentForm.tensor, tensor=spec, shown=shown)


def of_list(items: Sequence[RecordedArgument], shown: str = "") -> RecordedArgument:
    """A list; it is truncated if one of its items is."""
    if any(item.form is ArgumentForm.truncated for item in items):
        return RecordedArgument(ArgumentForm.truncated, shown=shown)
    return RecordedArgument(ArgumentForm.items, items=tuple(items), shown=shown)


def of_value(value: Any) -> RecordedArgument:
    """A Python value from JSON as a recorded argument."""
    if value is None:
        return NOTHING
    if isinstance(value, bool | int | float | complex):
        return RecordedArgument(ArgumentForm.number, value, shown=repr(value))
    if isinstance(value, list | tuple):
        return of_list([of_value(each) for each in value], repr(value))
    return RecordedArgument(ArgumentForm.text, str(value), shown=str(value))


def fits(kind: ArgumentType, recorded: RecordedArgument) -> int | None:
    """How well a recorded argument fits a schema type: 3 exactly, 2 by conversion, 1 possibly; None: not at all."""
    form = recorded.form
    if form is ArgumentForm.nothing:
        return 3 if kind.optional else 1 if kind.base == "Tensor" and not kind.depth else None
    if form is ArgumentForm.unrecorded:
        if kind.optional:
            return 3
        # Undefined tensors, and values of kinds that the profiler does not record; it records all plain numbers.
        plain = kind.base in ("int", "float", "number", "bool", "complex")
        return None if plain and (recorded is NO_NUMBERS or not kind.depth) else 1
    if form is ArgumentForm.hidden:
        plain = kind.base not in ("Tensor", "str", "Device", "Generator")
        return 2 if plain and bool(kind.depth) is (recorded is HIDDEN_LIST) else None
    if form is ArgumentForm.truncated:
        return 2 if kind.depth or kind.base == "str" else 1
    if kind.depth:
        if form is not ArgumentForm.items:
            # One number may stand for a list if the schema gives the list's length: `int[2] stride`.
            return 1 if form is ArgumentForm.number and kind.length and fits(kind.element, recorded) else None
        worst = 3
        for item in recorded.items:
            each = fits(kind.element, item)
            if each is None:
                return None
            worst = min(worst, each)
        return worst
    if form is ArgumentForm.tensor:
        return 3 if kind.base == "Tensor" else 1 if kind.base == "Any" else None
    if form is ArgumentForm.items:
        return 1 if kind.base == "Any" else None
    return _scalar_fits(kind.base, recorded)


def _scalar_fits(base: str, recorded: RecordedArgument) -> int | None:
    value = recorded.value
    if recorded.form is ArgumentForm.text:
        if base in ("str", "Device"):
            return 3
        readers: dict[str, Any] = {"ScalarType": dtype_of, "Layout": layout_of, "MemoryFormat": memory_format_of}
        if base in readers:
            return 3 if readers[base](value) else None
        return 1 if base in ("Generator", "Any", "Stream", "Storage") else None
    if isinstance(value, bool):
        return {"bool": 3, "number": 2, "Any": 1}.get(base)
    if isinstance(value, int):
        if base in ("ScalarType", "Layout", "MemoryFormat"):
            return 3 if _ENUMERATIONS[base](value) else None
        return {
            "int": 3,
            "number": 3,
            "float": 2,
            "bool": 1 if value in (0, 1) else None,
            "complex": 1,
            "Device": 1,
            "Any": 1,
        }.get(base)
    if isinstance(value, float):
        return {"float": 3, "number": 3, "complex": 1, "Any": 1}.get(base)
    return {"complex": 3, "number": 3, "Any": 1}.get(base)


_ENUMERATIONS: dict[str, Any] = {"ScalarType": scalar_type, "Layout": layout, "MemoryFormat": memory_format}


def score(schema: torch.FunctionSchema, recorded: Sequence[RecordedArgument]) -> int | None:
    """How well recorded arguments, by position, fit a schema; None: not at all.

    Arguments that the trace lacks (older PyTorch had fewer) must have defaults.
    """
    arguments = schema.arguments
    if len(recorded) > len(arguments):
        return None
    total = 0
    for argument, each in zip(arguments, recorded, strict=False):
        well = fits(schema_type(argument), each)
        if well is None:
            return None
        total += well
    for argument in arguments[len(recorded) :]:
        if not argument.has_default_value():
            return None
        total -= 1
    return total


class ArgumentReader:
    """Reads recorded arguments by a schema. `names` has replacements for strings that a trace dropped."""

    def __init__(self, names: TracedNames | None = None) -> None:
        self._names = names or TracedNames()
        self._read: dict[int, tuple[torch.FunctionSchema, list[tuple[Any, ArgumentType]]]] = {}

    def bind(
        self, schema: torch.FunctionSchema, recorded: Sequence[RecordedArgument], *, by: str = "the trace"
    ) -> Binding:
        """Bind every argument of the schema, as far as the trace or its default says. `by` names the trace in notes."""
        known = self._read.get(id(schema))  # PyTorch makes its arguments anew each time that they are looked at
        if known is None:
            known = self._read[id(schema)] = schema, [(each, schema_type(each)) for each in schema.arguments]
        binding = Binding()
        for position, (argument, kind) in enumerate(known[1]):
            each = recorded[position] if position < len(recorded) else None
            self._one(binding, schema, argument, kind, each, by)
        return binding

    def _one(
        self,
        binding: Binding,
        schema: torch.FunctionSchema,
        argument: Any,
        kind: ArgumentType,
        recorded: RecordedArgument | None,
        by: str,
    ) -> None:
        name = argument.name
        if recorded is None:
            self._default(binding, schema, argument, f"{by} does not have it")
            return
        if recorded.form is ArgumentForm.truncated:
            binding.missing.append(f"{name}: {by} holds only a part of it ({_short(recorded.shown)})")
            return
        if recorded.form is ArgumentForm.hidden:
            self._default(binding, schema, argument, f"{by} does not record the values of numbers", given=True)
            return
        if recorded.form is ArgumentForm.unrecorded:
            self._unrecorded(binding, schema, argument, kind, by)
            return
        value, problem = decode(kind, recorded)
        if problem:
            binding.missing.append(f"{name}: {problem}")
        else:
            binding.arguments.append((name, value))

    def _unrecorded(
        self, binding: Binding, schema: torch.FunctionSchema, argument: Any, kind: ArgumentType, by: str
    ) -> None:
        name = argument.name
        if kind.base == "Device" and not kind.depth:
            binding.arguments.append((name, DeviceName(None)))
        elif kind.base == "str" and not kind.depth:
            self._default(binding, schema, argument, f"{by} drops strings")
        elif kind.base == "Generator":
            binding.arguments.append((name, None))
            binding.assumed.append(f"{name}: {by} does not record generators; the default one is used")
        elif kind.optional:
            binding.arguments.append((name, None))
            if kind.depth and kind.element.optional:
                binding.assumed.append(f"{name}=None: {by} does not record lists that may hold None")
        elif kind.base == "Tensor" and not kind.depth:
            binding.missing.append(f"{name}: a tensor, but {by} records none there (undefined, or not recorded)")
        else:
            what = "long lists" if str(kind) == "Tensor[]" else "arguments"
            self._default(binding, schema, argument, f"{by} does not record {what} of type {kind}")

    def _default(
        self, binding: Binding, schema: torch.FunctionSchema, argument: Any, why: str, *, given: bool = False
    ) -> None:
        """Take what is known instead of an argument. `given`: it was, so that None cannot be meant."""
        kind = schema_type(argument)
        numeric = kind.base in ("int", "float", "number", "bool", "complex")
        said = self._names.number(schema.name, argument.name) if numeric else None
        if said is not None:
            value, problem = decode(kind, parse(said))
            if problem:
                binding.missing.append(f"{argument.name}: --number-default says {problem}")
                return
            binding.arguments.append((argument.name, value))
            binding.assumed.append(Guess(f"{argument.name}={said}: {why}; as you said"))
            return
        known = self._names.string(schema.name, argument.name) if kind.base == "str" and not kind.depth else None
        if known is not None and not (known.by_name and argument.has_default_value()):
            binding.arguments.append((argument.name, known.value))
            binding.assumed.append(Guess(f"{argument.name}={known.value!r}: {why}; {known.source}"))
        elif argument.has_default_value() and not (given and argument.default_value is None):
            # The operator fills it in; the value is only in the note.
            binding.assumed.append(f"{argument.name}={argument.default_value!r}: {why}; the schema's default")
        else:
            hint = f"; --number-default={schema.name}.{argument.name}=VALUE says what it was" if numeric else ""
            binding.missing.append(f"{argument.name}: {why}, and it has no default{hint}")


def decode(kind: ArgumentType, recorded: RecordedArgument) -> tuple[Bound, str]:
    """A recorded argument read as a schema type: (value, ""), or (None, what is wrong)."""
    if recorded.form is ArgumentForm.nothing:
        if kind.optional or kind.base == "Tensor":
            return None, ""
        return None, f"None, expected {kind}"
    if kind.depth:
        if recorded.form is ArgumentForm.items:
            values = []
            for item in recorded.items:
                value, problem = decode(kind.element, item)
                if problem:
                    return None, problem
                values.append(value)
            return values, ""
        if recorded.form is ArgumentForm.number and kind.length:
            value, problem = decode(kind.element, recorded)
            return [value] * kind.length, problem
        return None, f"{recorded.form.value} ({_short(recorded.shown)}), expected {kind}"
    if recorded.form is ArgumentForm.unrecorded:
        return None, "" if kind.optional or kind.base == "Tensor" else "not recorded"
    if recorded.form is ArgumentForm.tensor:
        if kind.base not in ("Tensor", "Any"):
            return None, f"a tensor, expected {kind}"
        return _tensor(recorded)
    value = _decode_scalar(kind.base, recorded)
    if value is _WRONG:
        return None, f"{_short(recorded.shown)}, expected {kind}"
    return value, ""


_WRONG = object()


def _decode_scalar(base: str, recorded: RecordedArgument) -> Any:
    value = recorded.value
    if recorded.form is ArgumentForm.text:
        if base == "str":
            return value
        if base == "Device":
            return DeviceName(value)
        if base == "Generator":
            return DefaultGenerator()
        if base == "Storage":
            return RETURNED_STORAGE
        if base in ("ScalarType", "Layout", "MemoryFormat"):
            readers: dict[str, Any] = {"ScalarType": dtype_of, "Layout": layout_of, "MemoryFormat": memory_format_of}
            found = readers[base](value)
            return _WRONG if found is None else found
        return _WRONG
    if recorded.form is not ArgumentForm.number:
        return _WRONG
    if base in _ENUMERATIONS and isinstance(value, int):
        found = _ENUMERATIONS[base](value)
        return _WRONG if found is None else found
    if base == "bool":
        return bool(value) if value in (0, 1) else _WRONG
    if base == "int":
        return value if isinstance(value, int) and not isinstance(value, bool) else _WRONG
    if base == "float":
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else _WRONG
    if base == "number":
        return value
    if base == "complex":
        return complex(value)
    if base == "Device" and isinstance(value, int):
        return DeviceName(None)
    return _WRONG


def _tensor(recorded: RecordedArgument) -> tuple[Bound, str]:
    spec = recorded.tensor
    assert spec is not None
    if spec.lacks or spec.sizes is None:
        return None, spec.lacks or "a tensor whose sizes are not recorded"
    if spec.dtype is None:
        return None, f"a tensor of sizes {list(spec.sizes)} whose dtype is not recorded"
    return spec, ""


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
