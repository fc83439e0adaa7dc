"""A kernel as a module of its own, which needs nothing but Triton: its function, the functions that it calls, and the
values of the global variables that they read. And the way back: loading such a module.

The functions' texts are those of the program. Changed are annotations, which may name types that are not there, and
names that mean different things in the modules that the functions come from.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import linecache
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from .functions import MISSING, KernelFunction, NotStandalone, is_callable_of_triton, is_constexpr_of_function

_HEAD = ("import triton", "import triton.language as tl")
_MODULES = ("triton", "math")  # that a standalone module may import, or parts of them
_INDENT = "    "
_Edit = tuple[int, int, int, int, str]  # first line and column, last line and column (of UTF-8 bytes), new text


@dataclass(frozen=True, eq=False)
class StandaloneSource:
    """The module's text, and the name of the kernel in it. `functions`: by name, those that it defines, and `decorated`
    the program's objects for them. `reads`: the variables of the program whose values are in it: where, name, value,
    and the text of what may be changed in place."""

    text: str
    name: str
    functions: Mapping[str, KernelFunction]
    decorated: Mapping[str, Any]
    reads: tuple[tuple[Mapping[str, Any], str, Any, str | None], ...]

    def holds(self) -> bool:
        """Whether the program's variables still have the values that are in it."""
        return all(
            scope.get(name, MISSING) is value and text == _text_of_mutable(value)
            for scope, name, value, text in self.reads
        )

    def name_of(self, kernel: Any) -> str | None:
        """The name in the module of a decorated function, None if it is not there."""
        return next((name for name, each in self.decorated.items() if each is kernel), None)


def standalone_source(kernel: Any, also: tuple[Any, ...] = ()) -> StandaloneSource:
    """The module of a decorated function, and of others that it is given as arguments. Raises NotStandalone."""
    writer = _SourceWriter()
    others = [writer.function(each) for each in also]
    name = writer.function(kernel)
    return writer.source(name, others)


class _SourceWriter:
    """One module while it is put together."""

    def __init__(self) -> None:
        self._imports: list[str] = []
        self._values: list[str] = []
        self._texts: dict[str, str] = {}  # of functions, by name
        self._taken: dict[str, Any] = {"triton": ("module", "triton"), "tl": ("module", "triton.language")}
        self._functions: dict[str, KernelFunction] = {}
        self._names: dict[int, str] = {}
        self._decorated: dict[str, Any] = {}
        self._reads: list[tuple[Mapping[str, Any], str, Any, str | None]] = []

    def source(self, name: str, others: list[str]) -> StandaloneSource:
        last = [*others, name]
        order = [each for each in self._texts if each not in last] + list(dict.fromkeys(last))
        blocks = ["\n".join([*_HEAD, *self._imports])]
        if self._values:
            blocks.append("\n".join(self._values))
        text = "\n\n\n".join([*blocks, *(self._texts[each].rstrip("\n") for each in order)]) + "\n"
        return StandaloneSource(text, name, dict(self._functions), dict(self._decorated), tuple(self._reads))

    def function(self, kernel: Any) -> str:
        """The name under which a decorated function is in the module."""
        known = self._names.get(id(kernel))
        if known is not None:
            return known
        function = KernelFunction.of(kernel)
        name = self._free(function.name, ("function", id(kernel)))
        self._names[id(kernel)] = name
        self._decorated[name] = kernel
        self._functions[name] = function
        renamed = {}
        for outer in function.outer_names:
            value = function.value_of(outer)
            if value is MISSING:
                raise NotStandalone(f"{function.name} uses {outer}, which is not defined")
            scope = function.scope_of(outer)
            assert scope is not None
            if scope is function.function.__globals__:
                self._reads.append((scope, outer, value, _text_of_mutable(value)))
            here = self._outer(function, outer, value)
            if here != outer:
                renamed[outer] = here
        self._texts[name] = _decorator(function) + _definition(function, name, renamed)
        return name

    def _outer(self, function: KernelFunction, name: str, value: Any, within: str = "") -> str:
        """The name in the module of something that a function uses. `within`: of which module, as the function names
        it, with a dot."""
        if isinstance(value, ModuleType):
            return self._module(function, name, value, within)
        module, base = _home(value)
        if module:
            where = self._free(name, ("import", module, base))
            self._line(self._imports, f"from {module} import {base}" + (f" as {where}" if where != base else ""))
            return where
        if _is_part(function, value):
            return self.function(value)
        text = _literal(value)
        if text is None:
            raise NotStandalone(
                f"{function.name} reads the global variable {name}, which holds a {type(value).__qualname__}: only "
                "numbers, strings, tuples of them, constexprs, dtypes and functions of Triton can be written down"
            )
        where = self._free(name, ("value", text))
        self._line(self._values, f"{where} = {text}")
        return where

    def _module(self, function: KernelFunction, name: str, module: ModuleType, within: str) -> str:
        """A module: imported if it is Triton's, else replaced by one that has what the function uses of it."""
        if module.__name__.partition(".")[0] in _MODULES:
            where = self._free(name, ("module", module.__name__))
            if (where, module.__name__) not in (("triton", "triton"), ("tl", "triton.language")):
                plain = where == module.__name__
                self._line(self._imports, f"import {module.__name__}" + ("" if plain else f" as {where}"))
            return where
        used = _attributes(function.tree, within + name)
        if None in used:
            raise NotStandalone(f"{function.name} uses the module {module.__name__} other than by its attributes")
        known = self._taken.get(name)
        where = name if known == ("part", module.__name__) else self._free(name, ("part", module.__name__))
        self._line(self._imports, "from types import FunctionType, ModuleType")
        self._line(self._values, f"{where} = ModuleType({name!r})")
        for attribute in used:
            value = getattr(module, str(attribute), MISSING)
            if value is MISSING:
                raise NotStandalone(f"{function.name} uses {name}.{attribute}, which does not exist")
            self._reads.append((vars(module), str(attribute), value, _text_of_mutable(value)))
            inner = self._outer(function, str(attribute), value, f"{within}{name}.")
            if inner in self._texts or _is_part(function, value):
                self._texts[f"{where}.{attribute}"] = f"{where}.{attribute} = {inner}"
            else:
                self._line(self._values, f"{where}.{attribute} = {inner}")
        return where

    def _free(self, name: str, meaning: Any) -> str:
        """`name`, or one like it if that means something else."""
        number, free = 1, name
        while self._taken.setdefault(free, meaning) != meaning:
            number += 1
            free = f"{name}_{number}"
        return free

    @staticmethod
    def _line(lines: list[str], line: str) -> None:
        if line not in lines:
            lines.append(line)


def _is_part(function: KernelFunction, value: Any) -> bool:
    """Whether something that a function uses is a function, which its module has, too."""
    plain = function.constexpr and isinstance(value, FunctionType)
    return plain or is_callable_of_triton(value) or is_constexpr_of_function(value)


def _home(value: Any) -> tuple[str, str]:
    """Module and name of something that Triton itself defines, "" for others."""
    inner = getattr(value, "fn", value)
    module, name = getattr(inner, "__module__", None), getattr(inner, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module.partition(".")[0] not in _MODULES:
        return "", ""
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return "", ""
    return (module, name) if found is value or _is_copy(value, found) else ("", "")


def _is_copy(value: Any, function: Any) -> bool:
    """Whether a value is a function of the same text, from a module that was loaded a second time."""
    if not isinstance(value, FunctionType) or not isinstance(function, FunctionType):
        return False
    first, second = value.__code__, function.__code__
    return first == second and first.co_filename == second.co_filename


def _literal(value: Any) -> str | None:
    """An expression for a value, None if there is none."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return repr(value)
    if kind is float:
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if kind in (tuple, list):
        parts = [_literal(each) for each in value]
        if None in parts:
            return None
        inside = ", ".join(map(str, parts))
        return f"[{inside}]" if kind is list else f"({inside}{',' if len(parts) == 1 else ''})"
    named = f"{kind.__module__}.{kind.__qualname__}"
    if named == "triton.language.core.constexpr":
        inner = _literal(value.value)
        return None if inner is None else f"tl.constexpr({inner})"
    return f"tl.dtype({value.name!r})" if named == "triton.language.core.dtype" else None


def _text_of_mutable(value: Any) -> str | None:
    """The expression for what may be changed in place, None for other values."""
    return _literal(value) if isinstance(value, list | tuple) or type(value).__name__ == "constexpr" else None


def _attributes(tree: ast.AST, name: str) -> list[str | None]:
    """What is used of a module, which may be named with dots: the attributes, None for the module itself."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    found: dict[str | None, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and _dotted(node) == name:
            parent = parents.get(node)
            found[parent.attr if isinstance(parent, ast.Attribute) else None] = None
    return list(found)


def _dotted(node: ast.expr) -> str:
    """The name that an expression is, "" for other expressions."""
    if isinstance(node, ast.Attribute) and (inner := _dotted(node.value)):
        return f"{inner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _decorator(function: KernelFunction) -> str:
    options = ", ".join(f"{name}={value!r}" for name, value in function.declared.items())
    return function.decorator + (f"({options})" if options else "") + ("\n" if function.decorator else "")


def _definition(function: KernelFunction, name: str, renamed: Mapping[str, str]) -> str:
    """The function's text with another name, other names in it, and annotations that need nothing but Triton."""
    tree = function.tree
    edits: list[_Edit] = []
    if name != function.name:
        line = function.text.splitlines()[tree.lineno - 1].encode()
        start = line.index(function.name.encode(), line.index(b"def") + 3)
        edits.append((tree.lineno, start, tree.lineno, start + len(function.name.encode()), name))
    annotations: set[ast.AST] = set()
    arguments = tree.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        note = argument.annotation
        if note is not None:
            annotations.update(ast.walk(note))
            assert note.end_lineno is not None and note.end_col_offset is not None
            kind = "" if function.constexpr else annotation(argument_kind(function, argument.arg))
            edits.append(
                (
                    argument.lineno,
                    argument.col_offset + len(argument.arg.encode()),
                    note.end_lineno,
                    note.end_col_offset,
                    kind,
                )
            )
    if tree.returns is not None:
        annotations.update(ast.walk(tree.returns))
        edits.append(_without_returns(function, tree))
    if renamed:
        nested = (ast.Lambda, ast.FunctionDef, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)
        if any(isinstance(node, nested) and node is not tree for node in ast.walk(tree)):
            raise NotStandalone(f"{function.name} has functions inside it and uses names that mean several things")
        edits += [
            (node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0, renamed[node.id])
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and node.id in renamed and node not in annotations
        ]
    return edited(function.text, edits)


def argument_kind(function: KernelFunction, name: str) -> str:
    """What Triton reads in the annotation of a parameter: `constexpr`, a type with or without `const`, or nothing."""
    from triton._utils import type_canonicalisation_dict

    kind = function.parameter_types[name]
    known = kind.startswith("*") or "const" in kind or kind in type_canonicalisation_dict.values()
    return kind if known else ""


def annotation(kind: str) -> str:
    """The annotation of a parameter of a kind."""
    return ": tl.constexpr" if kind == "constexpr" else f": {kind!r}" if kind else ""


def _without_returns(function: KernelFunction, tree: ast.FunctionDef) -> _Edit:
    """Takes out `-> type`."""
    note = tree.returns
    assert note is not None and note.end_lineno is not None and note.end_col_offset is not None
    lines = [line.encode() for line in function.text.splitlines()]
    row, column = note.lineno - 1, note.col_offset
    while (arrow := lines[row].rfind(b"->", 0, column)) < 0:
        row -= 1
        column = len(lines[row])
    return row + 1, arrow, note.end_lineno, note.end_col_offset, ""


def edited(text: str, edits: list[_Edit]) -> str:
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    for row, column, end_row, end_column, new in sorted(edits, reverse=True):
        tail = lines[end_row - 1][end_column:]
        lines[row - 1 : end_row] = [lines[row - 1][:column] + new.encode() + tail]
    return b"".join(lines).decode()


# ------------------------------------------------------------------------------------------------------------- loading


def load_source(text: str, label: str) -> ModuleType:
    """Run a standalone module. Only what the user has allowed to run may be given. Raises what it raises."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    file = f"<opreplay {label} {digest}>"
    # Triton reads the text of functions where Python finds it.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    module = ModuleType(f"opreplay_triton_{digest}")
    module.__file__ = file
    exec(compile(text, file, "exec"), vars(module))
    return module
