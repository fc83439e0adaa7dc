"""A kernel as a module of its own, which needs nothing but Triton, and the way back: loading such a module.

The module has the kernel's function, the functions that it calls, and the values of the global variables that they
read. `KernelFunction` looks into Triton's objects: the function that a kernel object runs, how it was declared, its
parameters. `compiled_difference` and `interpreted_difference` say whether the module that is kept of a kernel is what
was compiled, or what Triton's interpreter runs. Imports no torch.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import inspect
import linecache
import math
import re
import symtable
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from types import CodeType, FunctionType, ModuleType
from typing import Any

from replayfmt.errors import first_line

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
    function = kernel
    while getattr(function, "fn", None) is not None:
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
        return enclosed_by(self.function)

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


def enclosed_by(function: Any) -> dict[str, Any]:
    """The variables of enclosing functions that a function uses, without those that have no value yet."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it is empty
            found[name] = cell.cell_contents
    return found


_HEAD = ("import triton", "import triton.language as tl")
_MODULES = ("triton", "math")  # that a standalone module may import, or parts of them
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


_CHANGED = (
    "a variable of an enclosing function or of another module, a default value, or a function that it uses has "
    "changed since then"
)
# Places in the source, which a module of its own has others of, and names of functions, which have the module's.
_PLACE = re.compile(r" loc\((?:[^()\"]|\"[^\"]*\"|\((?:[^()\"]|\"[^\"]*\")*\))*\)")
_SYMBOL = re.compile(r'@(?:"[^"]*"|[\w$.]+)')


def compiled_difference(source: StandaloneSource, compiled: Any) -> str:
    """Why the module of a kernel cannot stand for what Triton compiled of it, or ""."""
    from triton import knobs

    if knobs.compilation.override or getattr(compiled.metadata, "ir_override", None):
        return "code that was put in the place of what Triton makes of its source (TRITON_KERNEL_OVERRIDE, ir_override)"
    made = compiled.asm.get("source")
    if made is None:
        return "Triton kept no intermediate code of it to compare its source with"
    try:
        again = _first_code(source, compiled)
    except Exception as error:  # Triton's compiler refuses it, or this version of Triton is not known
        return f"its source cannot be compared with what was compiled: {type(error).__name__}: {first_line(error)}"
    return (
        "" if _plain(str(made)) == _plain(again) else f"its source, as it is now, is not what was compiled: {_CHANGED}"
    )


def _first_code(source: StandaloneSource, compiled: Any) -> str:
    """The intermediate code that Triton makes of the module's kernel, as for a compiled kernel."""
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    module = vars(load_source(source.text, source.name))
    made, target = compiled.src, compiled.metadata.target
    constants = {
        path: module[str(source.name_of(value))] if is_callable_of_triton(value) else value
        for path, value in made.constants.items()
    }
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options(compiled.metadata._asdict())
    kernel = type(made)(module[source.name], made.signature, constants, made.attrs)
    given = {
        "target": target,
        "options": options,
        "codegen_fns": backend.get_codegen_implementation(options),
        "module_map": backend.get_module_map(),
        "context": context,
    }
    taken = inspect.signature(kernel.make_ir).parameters  # which differ between versions of Triton
    return str(kernel.make_ir(**{name: value for name, value in given.items() if name in taken}))


def _plain(code: str) -> str:
    """Intermediate code without places, its functions numbered."""
    lines = [line for line in code.splitlines() if not line.startswith("#loc")]
    numbers: dict[str, str] = {}
    text = _PLACE.sub("", "\n".join(lines))
    return _SYMBOL.sub(lambda found: numbers.setdefault(found[0], f"@{len(numbers)}"), text)


def interpreted_difference(source: StandaloneSource) -> str:
    """Why the module of a kernel cannot stand for what Triton's interpreter runs, or "". Raises AttributeError for a
    version of Triton that is not known."""
    for name, decorated in source.decorated.items():
        if source.functions[name].constexpr:
            continue  # it runs as Python compiled it
        running, called = decorated.rewrite(), source.functions[name].name
        again = type(decorated.rewriter)(decorated.fn, **decorated.kwargs).rewrite_ast()
        if not same_code(running.__code__, again.__code__):
            return f"the text of {called} has changed since it was first called"
        if not _defaults(running) == _defaults(again) == _defaults(decorated.fn):
            return f"a default value of {called} has changed since it was defined or first called"
    return ""


def _defaults(function: Any) -> list[str]:
    found = [each.default for each in inspect.signature(function).parameters.values()]
    return [repr(getattr(value, "value", value)) for value in found]
