"""Which parameters of a kernel may be written and read, from the source of the kernel and of what it calls.

Followed is where each pointer may end up: a variable may hold every pointer that occurs in any expression assigned to
it anywhere in the function. A pointer that is given to a function counts as written and as read, unless it is known
that the function does not write (`tl.load`) or read (`tl.store`), or it is another function of the kernel, which is
looked into. So what is not found is not written, or not read; what is found may not be.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any, TypeGuard

from .functions import MISSING, KernelFunction, is_callable_of_triton
from .sources import StandaloneSource

_Names = frozenset[str]
_NONE: _Names = frozenset()
# Return what is in memory, not where it is.
_LOADS = frozenset({"load", "gather", "load_tensor_descriptor", "_experimental_descriptor_load", "atomic_load"})
_STORE = "store"  # writes, and reads nothing
# fmt: off
# Write. What else writes is not told from what may.
_WRITES = frozenset({
    _STORE, "scatter", "store_tensor_descriptor", "_experimental_descriptor_store",
    "atomic_add", "atomic_and", "atomic_cas", "atomic_max", "atomic_min", "atomic_or", "atomic_xchg", "atomic_xor",
})
# fmt: on
# May be given pointers, and neither read nor write.
# fmt: off
_PURE = frozenset({
    "program_id", "num_programs", "arange", "cast", "to", "broadcast", "broadcast_to", "expand_dims", "reshape",
    "view", "trans", "permute", "where", "ravel", "make_block_ptr", "advance", "make_tensor_descriptor",
    "multiple_of", "max_contiguous", "max_constancy", "assume", "static_assert", "static_print", "device_assert",
    "device_print", "range", "static_range", "cdiv", "len", "isinstance", "print", "int", "float", "bool", "min",
    "max", "zeros", "full", "constexpr", "tensor",
})
# fmt: on
# What a pointer is, not where it points to.
_FACTS = frozenset({"dtype", "element_ty"})
_TYPES = frozenset({"dtype", "type"})
_CASTS = frozenset({"to", "cast"})
_MENTIONED = re.compile(r"\b(pointer_type|int_to_ptr|str_to_ty)\b")
_OPAQUE = (ast.Lambda, ast.FunctionDef, ast.ClassDef, ast.Global, ast.Nonlocal, ast.Try, ast.With)


class _Unknown(Exception):
    """The function has something that is not followed."""


@dataclass(frozen=True)
class Accesses:
    """What a kernel does with its parameters. `written`: those that it may write, `read`: may read, None if that is not
    known. `stored`: those of `written` that reach something that writes; of the others it is only not known that they
    do not. `makes_pointers`: it turns integers into pointers, so that it may read and write anything; so it does if one
    of `casts_to`, to whose type it turns something, is a pointer."""

    written: _Names | None
    stored: _Names
    makes_pointers: bool
    casts_to: _Names
    read: _Names | None


def accesses_of(source: StandaloneSource, constants: Mapping[str, Any] = MappingProxyType({})) -> Accesses:
    """The accesses of a module's kernel. `constants`: values of its constexprs, which decide on branches."""
    found = _Found(constants)
    # Where something is not followed, a mention of pointer types is all that there is to see.
    mentioned = any(map(_mentions_pointers, source.functions.values()))
    try:
        summary = found.function(source.functions[source.name])
    except (_Unknown, RecursionError):
        return Accesses(None, _NONE, mentioned, _NONE, None)
    return Accesses(summary.written, summary.stored, mentioned, summary.casts_to, summary.read)


@dataclass(frozen=True)
class _Summary:
    """Of one function: the parameters that it may write (`stored`: see `Accesses`) and read, those that its result may
    point into, and those to whose type it turns something."""

    written: _Names
    stored: _Names
    read: _Names
    returned: _Names
    casts_to: _Names


class _Found:
    """What was found so far, by function. `constants` are those of the one that is asked for first, the kernel."""

    def __init__(self, constants: Mapping[str, Any]) -> None:
        self._constants: Mapping[str, Any] = constants
        self._summaries: dict[int, _Summary] = {}
        self._running: set[int] = set()

    def function(self, function: KernelFunction) -> _Summary:
        key = id(function.function)
        if key not in self._summaries:
            if key in self._running:
                raise _Unknown("a function that calls itself")
            constants = {} if self._running else self._constants
            self._running.add(key)
            self._summaries[key] = _Body(self, function, constants).summary()
            self._running.discard(key)
        return self._summaries[key]


class _Body:
    """One function. `held`: the parameters that each local variable may point into."""

    def __init__(self, found: _Found, function: KernelFunction, constants: Mapping[str, Any]) -> None:
        self._found, self._function = found, function
        assigned = {node.id for node in ast.walk(function.tree) if isinstance(node, ast.Name) and _is_stored(node)}
        self._constants = {name: value for name, value in constants.items() if name not in assigned}
        self._outer = {name: function.value_of(name) for name in function.outer_names}
        parameters = tuple(function.signature.parameters)
        self._held: dict[str, _Names] = {name: frozenset({name}) for name in parameters}
        self._written: _Names = _NONE
        self._stored: _Names = _NONE
        self._read: _Names = _NONE
        self._returned: _Names = _NONE
        self._casts_to: _Names = _NONE

    def summary(self) -> _Summary:
        if any(isinstance(node, _OPAQUE) for statement in self._function.tree.body for node in ast.walk(statement)):
            raise _Unknown("something other than plain statements")
        while True:
            before = (dict(self._held), self._so_far())
            for statement in self._function.tree.body:
                self._statement(statement)
            if before == (self._held, self._so_far()):
                return self._so_far()

    def _so_far(self) -> _Summary:
        return _Summary(self._written, self._stored, self._read, self._returned, self._casts_to)

    def _reached(self, node: ast.AST) -> Iterator[ast.AST]:
        """A node and those inside it, but for branches that the constants rule out."""
        taken = decided(node.test, self._constants) if isinstance(node, ast.If) else None
        yield node
        for name, child in ast.iter_fields(node):
            if name != {None: "", True: "orelse", False: "body"}[taken]:
                for each in child if isinstance(child, list) else [child]:
                    if isinstance(each, ast.AST):
                        yield from self._reached(each)

    def _statement(self, statement: ast.stmt) -> None:
        for node in self._reached(statement):
            match node:
                case ast.Assign():
                    for target in node.targets:
                        self._assign(target, self._value(node.value))
                case ast.AnnAssign(value=value) if value is not None:
                    self._assign(node.target, self._value(value))
                case ast.AugAssign() | ast.NamedExpr():
                    self._assign(node.target, self._value(node.value))
                case ast.For() | ast.comprehension():
                    self._assign(node.target, self._value(node.iter))
                case ast.Return(value=value) if value is not None:
                    self._returned |= self._value(value)
                case ast.Call():
                    self._value(node)
                case ast.Delete() | ast.AsyncFor() | ast.AsyncWith() | ast.Await() | ast.Yield() | ast.YieldFrom():
                    raise _Unknown("a statement that kernels do not have")

    def _assign(self, target: ast.expr, value: _Names) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self._held[node.id] = self._held.get(node.id, _NONE) | value

    def _value(self, node: ast.AST) -> _Names:
        """The parameters that an expression's value may point into."""
        match node:
            case ast.Name(id=name):
                return self._held.get(name, _NONE)
            case ast.Attribute(attr=name, value=inner) if name in _FACTS:
                self._value(inner)
                return _NONE
            case ast.Call():
                return self._call(node)
            case ast.Compare():
                for child in ast.iter_child_nodes(node):
                    self._value(child)
                return _NONE
        return self._all(list(ast.iter_child_nodes(node)))

    def _all(self, nodes: list[Any]) -> _Names:
        return frozenset().union(*(self._value(each) for each in nodes)) if nodes else _NONE

    def _call(self, call: ast.Call) -> _Names:
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        name, callee, receiver = self._callee(call.func)
        given = self._all(values) | receiver
        if name in _CASTS:
            self._casts_to |= self._all([each.value for each in values if _is_type(each)])
        if is_callable_of_triton(callee) and not _is_tritons(callee):
            return self._inside(call, callee)
        if name in _LOADS:
            self._read |= given
            return _NONE
        if name in _WRITES:
            self._stored |= given
        if name not in _PURE:
            self._written |= given
            self._read |= given if name != _STORE else _NONE
        return given

    def _callee(self, function: ast.expr) -> tuple[str, Any, _Names]:
        """The name of what is called, the function if it is known, and what the object points into whose method it
        is."""
        if isinstance(function, ast.Name):
            value = MISSING if function.id in self._held else self._outer.get(function.id, MISSING)
            known = value is MISSING and function.id not in self._held  # one of Python's
            home = _is_tritons(value)
            return (
                (getattr(value, "__name__", function.id) if home else function.id) if known or home else "",
                value,
                self._held.get(function.id, _NONE),
            )
        if isinstance(function, ast.Attribute):
            module = self._module(function.value)
            if module is None:
                return function.attr, MISSING, self._value(function.value)
            value = getattr(module, function.attr, MISSING)
            return (function.attr if _is_tritons(value) else ""), value, _NONE
        return "", MISSING, self._value(function)

    def _module(self, node: ast.expr) -> ModuleType | None:
        """The module that an expression names."""
        if isinstance(node, ast.Name):
            value = MISSING if node.id in self._held else self._outer.get(node.id, MISSING)
        elif isinstance(node, ast.Attribute) and (outer := self._module(node.value)) is not None:
            value = getattr(outer, node.attr, MISSING)
        else:
            return None
        return value if isinstance(value, ModuleType) else None

    def _inside(self, call: ast.Call, callee: Any) -> _Names:
        """A call of another function of the kernel."""
        function = KernelFunction.of(callee)
        summary = self._found.function(function)
        if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
            given = self._all([*call.args, *(each.value for each in call.keywords)])
            self._written |= given if summary.written else _NONE
            self._read |= given if summary.read else _NONE
            self._casts_to |= given if summary.casts_to else _NONE
            return given
        names = list(function.signature.parameters)
        passed: Mapping[str, ast.expr] = {
            **dict(zip(names, call.args, strict=False)),
            **{str(keyword.arg): keyword.value for keyword in call.keywords},
        }
        self._written |= self._all([passed[name] for name in summary.written if name in passed])
        self._stored |= self._all([passed[name] for name in summary.stored if name in passed])
        self._read |= self._all([passed[name] for name in summary.read if name in passed])
        self._casts_to |= self._all([passed[name] for name in summary.casts_to if name in passed])
        return self._all([passed[name] for name in summary.returned if name in passed])


def _mentions_pointers(function: KernelFunction) -> bool:
    """Whether a function may turn integers into pointers: the code says so, or something that it uses by another name.
    What comments and the annotations of parameters say turns nothing."""
    arguments = function.tree.args
    code = [*function.tree.body, *arguments.defaults, *(each for each in arguments.kw_defaults if each is not None)]
    names = [getattr(function.value_of(name), "__name__", "") for name in function.outer_names]
    return any(_MENTIONED.search(text) for text in (*map(ast.unparse, code), *names))


def decided(test: ast.expr, constants: Mapping[str, Any]) -> bool | None:
    """Whether a condition holds, None if the constants do not decide it."""
    match test:
        case ast.Name(id=name) if name in constants:
            return bool(constants[name])
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            holds = decided(inner, constants)
            return None if holds is None else not holds
        case ast.BoolOp(op=joined, values=parts):
            found = [decided(part, constants) for part in parts]
            short = isinstance(joined, ast.Or)
            return short if short in found else None if None in found else not short
        case ast.Compare(left=ast.Name(id=name), ops=[compared], comparators=[ast.Constant(value=other)]):
            if name in constants and (isinstance(compared, ast.Eq) or (isinstance(compared, ast.Is) and other is None)):
                return bool(constants[name] == other)
            if name in constants and (
                isinstance(compared, ast.NotEq) or (isinstance(compared, ast.IsNot) and other is None)
            ):
                return bool(constants[name] != other)
    return None


def _is_stored(name: ast.Name) -> bool:
    return not isinstance(name.ctx, ast.Load)


def _is_type(node: ast.AST) -> TypeGuard[ast.Attribute]:
    """Whether an expression is the type of another, not of what that points to."""
    return isinstance(node, ast.Attribute) and node.attr in _TYPES


def _is_tritons(value: Any) -> bool:
    """Whether Triton itself defines a function."""
    module = getattr(getattr(value, "fn", value), "__module__", None)
    return isinstance(module, str) and module.partition(".")[0] == "triton"
