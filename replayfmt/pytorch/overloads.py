"""Operator overloads: found by name, their schemas, what their arguments must be, and how they are called.

Schemas from untrusted captures and traces are read within limits. Operators are looked up in the dispatcher's registry
and nowhere else. `ArgumentRules` has the preconditions without which kernels read out-of-bounds memory. A Python
function can stand in for an operator that is not registered (`as_operator`).

`direct_function` finds the fastest Python function that reaches an operator. Calling an overload object goes through
PyTorch's boxed calling convention; `torch.add` and its like do not, and take half a microsecond less. Which overload
such a function dispatches to is decided by its arguments' Python types, so it is tried out: with stand-ins for the
tensors and the record's own values, under a dispatch mode that stops it there.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket, _OpNamespace
from torch.utils._python_dispatch import TorchDispatchMode

from replayfmt.format.codes import ValueKind
from replayfmt.format.model import Node
from replayfmt.format.operator_schema import canonical_schema, name_problem

_LONGEST = 1 << 14  # characters; PyTorch's own schemas have up to some 600
_DEEPEST = 32  # brackets inside brackets
_LONGEST_LIST = 64  # the length in `int[2]`; PyTorch's own go up to 6
_BRACKETS = re.compile(r"[()\[\]]")
_LENGTHS = re.compile(r"\[\s*(\d+)")
_LONG_NUMBER = re.compile(r"\d{41}")


@lru_cache(1 << 12)  # texts come from a file, most of them often
def parse_schema(text: str) -> torch.FunctionSchema:
    """The schema that `text` says. Raises ValueError for one that no operator has, RuntimeError as the parser does."""
    if len(text) > _LONGEST:
        raise ValueError(f"a schema of {len(text)} characters; expected at most {_LONGEST}")
    if not text.isascii():
        raise ValueError("a schema with characters that no name has")
    depth = 0
    for bracket in _BRACKETS.findall(text):
        depth += 1 if bracket in "([" else -1
        if not 0 <= depth <= _DEEPEST:
            raise ValueError(f"a schema with unmatched brackets, or more than {_DEEPEST} inside each other")
    if _LONG_NUMBER.search(text):
        raise ValueError("a schema with a number of more than 40 digits")
    longest = max(map(int, _LENGTHS.findall(text)), default=0)
    if longest > _LONGEST_LIST:
        raise ValueError(f"a schema with a list of the length {longest}; expected at most {_LONGEST_LIST}")
    try:
        schema: torch.FunctionSchema = torch._C.parse_schema(canonical_schema(text))
    except IndexError as error:  # a number that fits no C++ type, of which it says no more than `stoll`
        raise ValueError(f"a schema with a number out of range ({error})") from None
    return schema


def printed_schema(schema: torch.FunctionSchema) -> str:
    """A schema as text that `parse_schema` and PyTorch read: str() of one is not, where it writes unnamed memory."""
    return canonical_schema(str(schema))


def find_overload(name: str, overload: str = "default") -> OpOverload | None:
    """The operator that is registered as `aten::add` with the overload `Tensor`; None if there is none."""
    if name_problem(name, overload) or not is_registered(name, overload):
        return None
    packet = _packet(name)
    found = getattr(packet, overload, None) if packet is not None else None
    if not isinstance(found, OpOverload) or found.name() != (name if overload == "default" else f"{name}.{overload}"):
        return None
    return found


def is_registered(name: str, overload: str = "default") -> bool:
    try:
        torch._C._dispatch_find_schema_or_throw(name, "" if overload == "default" else overload)
    except RuntimeError:
        return False
    return True


def overloads_of(name: str) -> list[OpOverload]:
    """Every registered overload of a name, in PyTorch's order."""
    packet = None if name_problem(name, "default") else _packet(name)
    found = [find_overload(name, overload) for overload in packet.overloads()] if packet is not None else []
    return [each for each in found if each is not None]


def _packet(name: str) -> OpOverloadPacket | None:
    namespace, _separator, base = name.partition("::")
    operators = getattr(torch.ops, namespace, None)
    packet = getattr(operators, base, None) if isinstance(operators, _OpNamespace) else None
    return packet if isinstance(packet, OpOverloadPacket) else None


# Enumerations that PyTorch passes as integers, and uses as indices without a look: what stands for one in a capture.
_ENUMERATIONS = {"ScalarType": ValueKind.dtype, "Layout": ValueKind.layout, "MemoryFormat": ValueKind.memory_format}
_ENUMERATION = re.compile("|".join(_ENUMERATIONS))
# Operators that look at the first of their tensors, whether there is one or not.
_NEED_A_TENSOR = frozenset({"aten::_stack", "aten::_foreach_clone", "aten::_foreach_copy"})


# What stands for an argument of a type in a call of compiled code, which takes what it is given for what it expects.
_KINDS = {
    "Tensor": (ValueKind.tensor,),
    "int": (ValueKind.int,),
    "float": (ValueKind.float, ValueKind.int),
    "bool": (ValueKind.bool,),
}


def exact_arguments(schema: torch.FunctionSchema, nodes: Sequence[Node]) -> str:
    """Why a call of code with this schema cannot have arguments of this structure, or "". It takes all of them."""
    name, arguments = schema.name, {argument.name: str(argument.type) for argument in schema.arguments}
    given = [node.name for node in nodes]
    if given != list(arguments):
        return f"{name} takes the arguments {list(arguments)}, the capture has {given}"
    for node in nodes:
        if node.kind not in _KINDS.get(arguments[node.name], ()):
            return f"{name} takes {arguments[node.name]} as `{node.name}`, the capture has {node.kind.name}"
    return ""


class ArgumentRules:
    def __init__(self, schema: torch.FunctionSchema) -> None:
        self._name = schema.name
        self._needs_a_tensor = schema.name in _NEED_A_TENSOR
        # By argument: the enumeration that it is, and the lengths that a list of a fixed length may have.
        self._enumerations: dict[str, ValueKind] = {}
        self._lengths: dict[str, frozenset[int]] = {}
        arguments: Sequence[Any] = schema.arguments
        for argument in arguments:
            found = _ENUMERATION.search(str(argument.real_type))
            if found:
                self._enumerations[argument.name] = _ENUMERATIONS[found[0]]
            # A list of one stands for all dimensions; `int[1]` takes any number. A pool without a stride has an empty
            # one, which its backward operator is given as it is.
            if argument.N is not None and argument.N > 1:
                also = (0,) if argument.name == "stride" else ()
                self._lengths[argument.name] = frozenset({1, argument.N, *also})

    def problem(self, nodes: Sequence[Node]) -> str:
        """What is wrong with arguments of this structure, or ""."""
        for node in nodes:
            enumeration, lengths = self._enumerations.get(node.name), self._lengths.get(node.name)
            if enumeration is not None and node.kind is ValueKind.int:
                return f"{self._name} takes a {enumeration.name} as `{node.name}`, the capture has an integer"
            if node.kind not in (ValueKind.list, ValueKind.tuple):
                continue
            if lengths and len(node.children) not in lengths:
                expected = " or ".join(str(length) for length in sorted(lengths))
                return f"{self._name} takes {expected} values as `{node.name}`, the capture has {len(node.children)}"
            if self._needs_a_tensor and not node.children:
                return f"{self._name} takes at least one tensor as `{node.name}`, the capture has none"
        return ""


_TENSORS = re.compile(r"Tensor|List\[Tensor\]")
_HOLDERS = tuple(
    holder
    for holder in (
        torch._C._VariableFunctions,
        torch._C.TensorBase,
        torch._C._nn,
        getattr(torch._C, "_linalg", None),
        getattr(torch._C, "_fft", None),
        getattr(torch._C, "_special", None),
    )
    if holder is not None
)
_NATIVE = (type(len), type(str.join))  # functions and methods implemented in C
_ABSENT = object()
# The argument parser takes a tensor without dimensions for a number too, an integer one also for a size or an index.
# None is kept: a program that lists its tensors would find it.
_STAND_INS = (
    partial(torch.zeros, (1,), dtype=torch.float32, device="cpu"),
    partial(torch.zeros, (), dtype=torch.float32, device="cpu"),
    partial(torch.zeros, (), dtype=torch.int64, device="cpu"),
)


class _Arrived(Exception):
    """Stops a call once it reached the dispatcher."""


class _Catch(TorchDispatchMode):
    """Keeps what arrives first, and ends the call."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first call imports all of torch._dynamo, which takes seconds

    def __init__(self) -> None:
        super().__init__()
        self.func: Any = None
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.func, self.args, self.kwargs = func, args, kwargs or {}
        raise _Arrived


def takes_numbers(func: OpOverload) -> bool:
    """Whether numbers may stand for tensors among its arguments, which only some ways to call it allow."""
    return bool(torch._C._should_allow_numbers_as_tensors(func._schema.name.partition("::")[2]))


def direct_function(
    overload: OpOverload, text: str, values: Sequence[Any], tensors: Sequence[int]
) -> Callable[..., Any]:
    """A function to call as `text` says: one that reaches `overload` directly, or else the overload itself.

    `text` has a `%s` for the function and one for each of `values`; those at the positions `tensors` are tensors,
    and stand-ins take their place here.
    """
    for candidate in _candidates(overload):
        if all(_arrives(candidate, overload, text, values, tensors, stand_in) for stand_in in _STAND_INS):
            return candidate
    call: Callable[..., Any] = overload._op
    return call


def _candidates(overload: OpOverload) -> Iterator[Callable[..., Any]]:
    namespace, _, base = overload._schema.name.partition("::")
    # PyTorch's own functions return symbolic integers (the lengths that flash attention returns) as tensors.
    if namespace != "aten" or not all(_TENSORS.fullmatch(str(each.type)) for each in overload._schema.returns):
        return
    for holder in _HOLDERS:
        for name in (base, base.removeprefix("linalg_"), base.removeprefix("fft_"), base.removeprefix("special_")):
            found = getattr(holder, name, None)
            if isinstance(found, _NATIVE):
                yield found


def _arrives(
    candidate: Callable[..., Any],
    overload: OpOverload,
    text: str,
    values: Sequence[Any],
    tensors: Sequence[int],
    stand_in: Callable[[], torch.Tensor],
) -> bool:
    """Whether a call of `candidate` arrives at the dispatcher as the call of the overload would."""
    stood_for = set(tensors)
    names = {f"x{index}": stand_in() if index in stood_for else value for index, value in enumerate(values)}
    call = compile(text % ("f", *names), "<opreplay probe>", "eval")
    wanted = eval(call, {"f": lambda *args, **kwargs: (args, kwargs), **names})  # the plan's text, not the file's
    catch = _Catch()
    # The dispatcher has to consult Python here, even if the surrounding replay has disabled that.
    keys = torch._C.DispatchKey
    with (
        torch._C.DisableTorchFunction(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._SetExcludeDispatchKeyGuard(keys.Python, False),
        torch._C._SetExcludeDispatchKeyGuard(keys.PythonTLSSnapshot, False),
        warnings.catch_warnings(),
        catch,
    ):
        warnings.simplefilter("ignore")  # of a form of call that is tried here and may not be used
        try:
            eval(call, {"f": candidate, **names})
        except _Arrived:
            pass
        except (TypeError, ValueError, RuntimeError, IndexError):
            return False
    if catch.func is not overload:
        return False
    return _same(_bound(overload, *wanted), _bound(overload, catch.args, catch.kwargs))


def _bound(overload: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The value of every argument of the schema, defaults included."""
    bound = []
    for position, argument in enumerate(overload._schema.arguments):
        if position < len(args):
            bound.append(args[position])
        else:
            bound.append(kwargs.get(argument.name, argument.default_value if argument.has_default_value() else _ABSENT))
    return bound


def _same(one: Any, other: Any) -> bool:
    """Whether two argument values are the same for the dispatcher; tensors and generators by identity."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor | torch.Generator) or isinstance(other, torch.Tensor | torch.Generator):
        return one is other
    return type(one) is type(other) and (one == other or (one != one and other != other))


CALLABLES_NAMESPACE = "opreplay_callables"
CALLABLES_OVERLOAD = "callable"  # what a capture names as the overload of a function without a schema
_library: torch.library.Library | None = None
_known: dict[tuple[str, int], OpOverload] = {}


def parameter_names(function: Callable[..., Any], count: int) -> list[str]:
    """The names of a function's first `count` parameters; `arg0`, `arg1`… if it has no signature."""
    generic = [f"arg{index}" for index in range(count)]
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return generic
    plain = [each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return plain[:count] if len(plain) >= count and len(plain) == len(parameters) else generic


def call_problem(function: Callable[..., Any], count: int, keywords: Sequence[str]) -> str:
    """Why a function cannot be called with so many arguments, and others by name; "" if it can, as far as is known."""
    if len(set(keywords)) < len(keywords) or not all(name.isidentifier() for name in keywords):
        return f"arguments by the names {', '.join(map(repr, keywords))}"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*range(count), **dict.fromkeys(keywords))
    except TypeError as error:
        return str(error)
    return ""


def schema_text(name: str, parameters: Sequence[tuple[str, str]], keywords: Sequence[tuple[str, str]] = ()) -> str:
    """The schema of a function under an operator's name; `parameters` are (name, type), `keywords` those that it is
    given by name."""
    listed = [f"{kind} {parameter}" for parameter, kind in parameters]
    by_name = [f"{kind} {parameter}" for parameter, kind in keywords]
    return f"{name}.{CALLABLES_OVERLOAD}({', '.join([*listed, *(['*'] if by_name else []), *by_name])}) -> Any"


def as_operator(schema: str, function: Callable[..., Any]) -> OpOverload:
    """An operator that calls a function with the arguments that a schema of `schema_text` has.

    Raises RuntimeError and ValueError for a schema that cannot be read.
    """
    global _library
    known = _known.get((schema, id(function)))
    if known is not None:
        return known
    known_arguments = parse_schema(schema).arguments
    arguments = [argument.name for argument in known_arguments]
    count = sum(not argument.kwarg_only for argument in known_arguments)
    by_position = all(name == f"arg{index}" for index, name in enumerate(arguments[:count]))

    def call(*given: Any, **named: Any) -> Any:
        values = dict(zip(arguments, given, strict=False)) | named
        first = [values.pop(name) for name in arguments[:count]] if by_position else []
        return function(*first, **values)

    if _library is None:
        _library = torch.library.Library(CALLABLES_NAMESPACE, "FRAGMENT")
    digest = hashlib.sha256(f"{schema}|{id(function)}".encode()).hexdigest()[:16]
    name = f"{schema.partition('.')[0].replace('::', '__')}_{digest}"
    _library.define(f"{name}{schema[schema.index('(') :]}")
    _library.impl(name, call, "CompositeExplicitAutograd")
    found = find_overload(f"{CALLABLES_NAMESPACE}::{name}")
    assert found is not None, "it was defined just now"
    _known[schema, id(function)] = found
    return found
