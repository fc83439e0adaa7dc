"""Looks into Triton's objects: the function that a kernel object runs, how it was declared, its parameters."""

from __future__ import annotations

import ast
import builtins
import inspect
import symtable
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any

# What `triton.jit` takes that changes what is compiled. (`repr` and `launch_metadata` are for profilers.)
DECLARED = ("do_not_specialize", "do_not_specialize_on_alignment", "debug", "noinline")
MISSING = object()


class NotStandalone(Exception):
    """A kernel cannot be written down as a module of its own. The text says why."""


def is_callable_of_triton(value: Any) -> bool:
    """Whether a value is a function decorated by Triton: compiled or interpreted, or a constexpr function."""
    kinds = {kind.__module__ + "." + kind.__name__ for kind in type(value).__mro__}
    return bool(kinds & {"triton.runtime.jit.JITCallable", "triton.runtime.interpreter.InterpretedFunction"})


def is_interpreted(value: Any) -> bool:
    """Whether a value is a function that Triton's interpreter runs."""
    return any(kind.__name__ == "InterpretedFunction" for kind in type(value).__mro__)


def is_constexpr_function(value: Any) -> bool:
    """Whether a value is a function that Triton calls while it compiles."""
    return any(kind.__name__ == "ConstexprFunction" for kind in type(value).__mro__)


def is_constexpr_of_function(value: Any) -> bool:
    """Whether a value is `tl.constexpr` of a function of Python, which Triton calls while it compiles."""
    named = f"{type(value).__module__}.{type(value).__qualname__}"
    return named == "triton.language.core.constexpr" and isinstance(value.value, FunctionType)


def kernel_name(kernel: Any) -> str:
    """The name of the function in a kernel object, an autotuner around one included."""
    function: Any = getattr(kernel, "fn", None)
    while hasattr(function, "fn"):
        function = function.fn
    return getattr(function, "__qualname__", None) or getattr(kernel, "name", None) or type(kernel).__name__


@dataclass(frozen=True, eq=False)
class KernelFunction:
    """One function decorated by Triton, or one of Python that such a function calls. `declared`: the options of its
    decorator. `interpreted`: Triton's interpreter runs its text as a part of its module, where the variables of
    enclosing functions are not to be seen."""

    function: FunctionType
    decorator: str  # "" for a function of Python
    interpreted: bool
    declared: Mapping[str, Any]
    text: str

    @classmethod
    def of(cls, kernel: Any) -> KernelFunction:
        """The function in a decorated object, or a function of Python. Raises NotStandalone."""
        if is_constexpr_of_function(kernel):
            return cls._of_python(kernel.value, "@tl.constexpr")
        if isinstance(kernel, FunctionType):
            return cls._of_python(kernel, "")
        function = kernel.fn
        if not isinstance(function, FunctionType):
            raise NotStandalone(f"a {type(function).__name__} was decorated, not a function")
        if getattr(kernel, "is_gluon", bool)():
            raise NotStandalone(f"{function.__name__} is written in Gluon, which lays out data for one kind of device")
        options = getattr(kernel, "kwargs", None) or {name: getattr(kernel, name, None) for name in DECLARED}
        declared = {name: options[name] for name in DECLARED if options.get(name)}
        decorator = "@triton.constexpr_function" if is_constexpr_function(kernel) else "@triton.jit"
        return cls(function, decorator, is_interpreted(kernel), declared, _text(kernel, function))

    @classmethod
    def _of_python(cls, function: FunctionType, decorator: str) -> KernelFunction:
        """A function whose text Triton has not kept."""
        text = _text(None, function)
        (made,) = [each for each in compile(text, "", "exec").co_consts if isinstance(each, CodeType)]
        if not same_code(made, function.__code__):
            raise NotStandalone(f"the text of {function.__qualname__} is not that of the function, or not all of it")
        return cls(function, decorator, False, {}, text)

    @property
    def constexpr(self) -> bool:
        """Whether it runs as Python's, while Triton compiles."""
        return self.decorator != "@triton.jit"

    @property
    def name(self) -> str:
        return self.function.__name__

    @cached_property
    def tree(self) -> ast.FunctionDef:
        """Its definition, without decorators, as `text` has it."""
        (definition,) = ast.parse(self.text).body
        assert isinstance(definition, ast.FunctionDef)
        return definition

    @cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.function)

    @cached_property
    def takes_any_number(self) -> bool:
        """Whether it has parameters like `*args`."""
        return any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in self.signature.parameters.values())

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values of its parameters, by name; `kwargs` may have others. Raises TypeError."""
        names, defaults = self._plain_parameters
        if names and len(args) <= len(names):
            bound = {**defaults, **dict(zip(names, args, strict=False))}
            for name in names[len(args) :]:
                if name in kwargs:
                    bound[name] = kwargs[name]
            if len(bound) == len(names) and not any(name in kwargs for name in names[: len(args)]):
                return bound
        parameters = self.signature.parameters
        slow = self.signature.bind(*args, **{name: value for name, value in kwargs.items() if name in parameters})
        slow.apply_defaults()
        return slow.arguments

    @cached_property
    def _plain_parameters(self) -> tuple[list[str], dict[str, Any]]:
        """The parameters and their defaults, if all may be given by position or by name; else none."""
        parameters = self.signature.parameters.values()
        if any(each.kind is not each.POSITIONAL_OR_KEYWORD for each in parameters):
            return [], {}
        return list(self.signature.parameters), {
            each.name: each.default for each in parameters if each.default is not each.empty
        }

    @cached_property
    def parameter_types(self) -> dict[str, str]:
        """The annotation of each parameter as Triton reads it (`constexpr`, `*fp32`), "" for none."""
        from triton.runtime.jit import _normalize_ty

        found = inspect.get_annotations(self.function)
        return {name: _normalize_ty(found[name]) if name in found else "" for name in self.signature.parameters}

    @cached_property
    def outer_names(self) -> tuple[str, ...]:
        """The names of other things that its definition uses, Python's built-in functions left out."""
        names: dict[str, None] = {}
        (table,) = symtable.symtable(self.text, "kernel", "exec").get_children()
        tables = [table]
        while tables:
            scope = tables.pop()
            tables += scope.get_children()
            names.update((symbol.get_name(), None) for symbol in scope.get_symbols() if symbol.is_global())
        arguments = self.tree.args
        for default in (*arguments.defaults, *(each for each in arguments.kw_defaults if each is not None)):
            names.update((name, None) for name in _names(default))
        local = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_local()}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.AnnAssign):
                names.update((name, None) for name in _names(node.annotation) if name not in local)
        return tuple(name for name in names if self.scope_of(name) is not None or not hasattr(builtins, name))

    def scope_of(self, name: str) -> Mapping[str, Any] | None:
        """The variables in which a name of another thing is found: of enclosing functions, or of its module. What is
        interpreted finds those of its module alone, so that they come first (others are not read, or raise)."""
        scopes: list[Mapping[str, Any]] = [self.enclosing, self.function.__globals__]
        return next((scope for scope in (scopes[::-1] if self.interpreted else scopes) if name in scope), None)

    @property
    def enclosing(self) -> dict[str, Any]:
        """The variables of enclosing functions that it uses."""
        cells = zip(self.function.__code__.co_freevars, self.function.__closure__ or (), strict=True)
        return {name: cell.cell_contents for name, cell in cells if _is_full(cell)}

    def value_of(self, name: str) -> Any:
        """What a name of another thing means now, MISSING if nothing."""
        scope = self.scope_of(name)
        return MISSING if scope is None else scope[name]


def _text(kernel: Any, function: FunctionType) -> str:
    """The definition, from `def` on."""
    given = getattr(kernel, "src", None)
    if not isinstance(given, str):
        try:
            given = inspect.getsource(function)
        except (OSError, TypeError) as error:
            raise NotStandalone(f"Python has no source of {function.__qualname__} ({error})") from None
    text = textwrap.dedent(given)
    try:
        (definition,) = ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        raise NotStandalone(f"the source of {function.__qualname__} is no definition ({error})") from None
    if not isinstance(definition, ast.FunctionDef) or definition.name != function.__name__:
        raise NotStandalone(f"the source of {function.__qualname__} is not that of a function of this name")
    return "".join(text.splitlines(keepends=True)[definition.lineno - 1 : definition.end_lineno]).rstrip() + "\n"


def same_code(first: CodeType, second: CodeType) -> bool:
    """Whether two functions do the same, wherever their texts are."""
    return (
        first.co_code == second.co_code
        and first.co_names == second.co_names
        and first.co_varnames == second.co_varnames
        and len(first.co_consts) == len(second.co_consts)
        and all(map(_same_constant, first.co_consts, second.co_consts))
    )


def _same_constant(first: Any, second: Any) -> bool:
    if isinstance(first, CodeType) and isinstance(second, CodeType):
        return same_code(first, second)
    return type(first) is type(second) and repr(first) == repr(second)


def _names(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises if it is empty
    except ValueError:
        return False
    return True
