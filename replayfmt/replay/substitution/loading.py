"""What a substitution asks for (`SELECTOR[@FORMAT]=PATH[:NAME]`), and the functions in its file: loaded, found, and
checked for how they can be called.

The first equals sign ends the selector: none of the four kinds of selector contains one. PATH is the longest prefix of
the rest that is a file, so that a path may contain colons, at signs and equals signs; NAME is what follows the next
colon.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch._ops import OpOverload

from replayfmt.errors import UsageError, first_line
from replayfmt.format.model import Kernel
from replayfmt.format.signature_grammar import Parser, SignatureText
from replayfmt.format.validation import parse_json, require_regular_file, some_of, text_of
from replayfmt.pytorch.op_libraries import printing_aside
from replayfmt.pytorch.overloads import overloads_of
from replayfmt.pytorch.triton.compiled import GivenCubin

FLAG = "--replay-kernel-substitution"
FORM = "SELECTOR[@FORMAT]=PATH[:NAME]"
Format = Literal["python", "torch-library", "triton", "cubin"]
FORMATS: tuple[Format, ...] = ("python", "torch-library", "triton", "cubin")
ALL = "all"
_ANY = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"

_LIBRARY_ENDINGS = (".so", ".dylib", ".dll", ".pyd")
_OPERATOR = re.compile(r"[A-Za-z_][A-Za-z0-9_]*::[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)?\Z")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:::[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)?)?\Z")


@dataclass(frozen=True)
class Selector:
    """Which calls: exactly one of these fields is set. `text` is how the user wrote it."""

    text: str
    kernel_id: int | None = None
    operator: str | None = None  # aten::mm, or aten::mm.default for one overload
    signature: SignatureText | None = None
    everything: bool = False


@dataclass(frozen=True)
class SubstitutionRequest:
    """One requested substitution, by a file or by a function. `told` is the prefix of error messages about it."""

    selector: Selector
    told: str
    path: str = ""
    name: str = ""
    format: Format | None = None
    function: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Substitution:
    """A Python function in place of the kernels that `selector` (as on the command line) selects."""

    selector: str
    function: Callable[..., Any]

    def request(self) -> SubstitutionRequest:
        """The request. Raises UsageError if the selector is invalid or the function cannot be called."""
        told = f"Substitution({text_of('selector', self.selector)!r})"
        if not callable(self.function):
            raise UsageError(f"{told}: expected a function, got {type(self.function).__name__}")
        name = getattr(self.function, "__name__", "function")
        return SubstitutionRequest(parse_selector(self.selector, told), told, name=name, function=self.function)


def parse_request(text: str) -> SubstitutionRequest:
    """Parse a substitution from the command line. Raises UsageError that says what is missing or wrong."""
    told = f"{FLAG}={text}"
    left, equals, right = text.partition("=")
    if not equals:
        raise UsageError(f"{told}: expected {FORM}")
    selector, form = _split_format(left, told)
    parsed = parse_selector(selector, told)
    if not right:
        raise UsageError(f"{told}: the path is empty; expected {FORM}")
    path, name = split_path(right)
    if not path:
        raise UsageError(f"{told}: the path is empty; expected {FORM}")
    if name is not None and not _NAME.match(name):
        raise UsageError(
            f"{told}: {name!r} is neither a function's nor an operator's name; expected PATH:NAME with a "
            "name like mm, or mine::mm for a torch-library"
        )
    return SubstitutionRequest(parsed, told, path, name or "", form or infer_format(path, name or "", told))


def parse_selector(text: str, told: str) -> Selector:
    """Parse a kernel id, an operator's name, a signature, or `all`. Raises UsageError."""
    text = text.strip()
    if not text:
        raise UsageError(
            f"{told}: the selector is empty; expected a kernel id, an operator like aten::mm or "
            "aten::mm.default, a signature, or all"
        )
    if text == ALL:
        return Selector(text, everything=True)
    if "(" in text:
        return Selector(text, signature=Parser(text).signature())
    if re.fullmatch(r"[+-]?[0-9]+", text):
        if not text.isdecimal() or not 0 < int(text) < 2**32:
            raise UsageError(f"{told}: kernel id {text}: ids count from 1; opreplay-dump shows those of a capture")
        return Selector(text, kernel_id=int(text))
    if not _OPERATOR.match(text):
        raise UsageError(
            f"{told}: {text!r} is not a selector; expected a kernel id, an operator like aten::mm or "
            "aten::mm.default, a signature like 'aten::mm.default(float32[2,3], *)', or all"
        )
    return Selector(text, operator=text)


def _split_format(left: str, told: str) -> tuple[str, Format | None]:
    """The selector and the format after it. A signature contains at signs, all before its last parenthesis."""
    end = left.rfind(")") + 1
    head, at, form = left[end:].partition("@")
    if not at:
        return left, None
    if not form:
        raise UsageError(f"{told}: the format is empty; expected {_ANY} after the @")
    for known in FORMATS:
        if form == known:
            return left[:end] + head, known
    raise UsageError(f"{told}: {form!r} is not a format; expected {_ANY}")


def split_path(text: str) -> tuple[str, str | None]:
    """PATH and NAME of `PATH[:NAME]`: the longest prefix that is a file, else up to the last possible name.

    NAME is None if none was given.
    """
    if os.path.exists(text):
        return text, None
    for position in range(len(text) - 1, -1, -1):
        if text[position] == ":" and os.path.isfile(text[:position]):
            return text[:position], text[position + 1 :]
    # Not a file: split where a name could begin, so that the error can say which file was meant.
    for position, character in enumerate(text):
        if character == ":" and (_NAME.match(text[position + 1 :]) or position == len(text) - 1):
            return text[:position], text[position + 1 :]
    return text, None


def infer_format(path: str, name: str, told: str) -> Format:
    """The format of a file by its extension and by the name asked for. Raises UsageError if neither determines it."""
    if path.lower().endswith(_LIBRARY_ENDINGS):
        return "torch-library"
    if path.lower().endswith(".cubin"):
        return "cubin"
    if path.lower().endswith(".py"):
        return "torch-library" if "::" in name else "python"
    raise UsageError(
        f"{told}: the format of {path!r} cannot be inferred from its name; put @python or @torch-library after "
        f"the selector"
    )


_PLAIN = (type(None), bool, int, float, str)
_ABSENT = object()


def schema_signature(schema: torch.FunctionSchema) -> inspect.Signature:
    """The Python signature of an operator's overload. Default values that Python writes differently are kept as they
    are."""
    parameters = []
    for argument in schema.arguments:
        kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        parameters.append((argument.name, kind, default))
    # Schemas may have a required argument after one with a default; Python's signatures may not.
    needed = [
        index
        for index, (_name, kind, default) in enumerate(parameters)
        if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and default is inspect.Parameter.empty
    ]
    last_needed = needed[-1] if needed else -1
    return inspect.Signature(
        [
            inspect.Parameter(name, kind, default=inspect.Parameter.empty if index < last_needed else default)
            for index, (name, kind, default) in enumerate(parameters)
        ]
    )


def check_binding(signature: inspect.Signature | None, schema: torch.FunctionSchema, what: str) -> None:
    """Raises UsageError, beginning with `what`, if a function of this signature cannot replace the schema's
    operator."""
    if signature is None:
        return  # C code without a signature: the checked pass calls it
    for args, kwargs in _calls(schema):
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(f"{what}: it takes {signature}, which does not bind {schema}: {error}") from None
    bound = _named_parameters(signature, schema)
    for argument in schema.arguments:
        parameter = bound.get(argument.name)
        if parameter is None or not argument.has_default_value() or parameter.default is inspect.Parameter.empty:
            continue
        wanted, given = _plain(argument.default_value), _plain(parameter.default)
        if wanted is not _ABSENT and given is not _ABSENT and not _same(wanted, given):
            raise UsageError(
                f"{what}: its default for {parameter.name!r} is {parameter.default!r}, the operator's is "
                f"{argument.default_value!r}; calls that leave it out mean the operator's"
            )


def _calls(schema: torch.FunctionSchema) -> list[tuple[list[str], dict[str, str]]]:
    """Calls that the operator accepts, with names in place of values: all arguments, the required ones, each by
    name."""
    everything: tuple[list[str], dict[str, str]] = ([], {})
    required: tuple[list[str], dict[str, str]] = ([], {})
    skipped = False
    for argument in schema.arguments:
        if argument.kwarg_only:
            everything[1][argument.name] = argument.name
        else:
            everything[0].append(argument.name)
        if argument.has_default_value():
            skipped = skipped or not argument.kwarg_only
        elif argument.kwarg_only or skipped:
            required[1][argument.name] = argument.name
        else:
            required[0].append(argument.name)
    by_name = [
        (required[0], {**required[1], argument.name: argument.name})
        for argument in schema.arguments
        if argument.has_default_value()
    ]
    return [everything, required, *by_name]


def _named_parameters(signature: inspect.Signature, schema: torch.FunctionSchema) -> dict[str, inspect.Parameter]:
    """The parameter that receives each of the schema's arguments, if it is a named parameter."""
    positional = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    arrived: dict[str, inspect.Parameter] = {}
    for position, argument in enumerate(schema.arguments):
        if not argument.kwarg_only and position < len(positional):
            arrived[argument.name] = positional[position]
        elif argument.name in signature.parameters:
            arrived[argument.name] = signature.parameters[argument.name]
    return arrived


def _plain(value: Any) -> Any:
    """A default that both sides write the same way; _ABSENT if they may not (dtypes and the like are numbers)."""
    if isinstance(value, list | tuple):
        plain = [_plain(each) for each in value]
        return _ABSENT if any(each is _ABSENT for each in plain) else plain
    return value if isinstance(value, _PLAIN) else _ABSENT


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)


_LISTED = 12
_LONGEST_TRACEBACK = 40  # lines


@dataclass(frozen=True)
class Replacement:
    """A function that replaces kernels. `label` names it for people, `file` is where its code is, "" if unknown.

    `signature` is how it can be called, None if Python does not know (functions written in C).
    """

    call: Callable[..., Any]
    label: str
    file: str
    line: int
    signature: inspect.Signature | None

    def place_of(self, error: BaseException) -> str:
        """`file:line` of the innermost frame of an exception in this file, else of the function."""
        found = ""
        for frame in traceback.extract_tb(error.__traceback__):
            if self.file and os.path.abspath(frame.filename) == self.file:
                found = f"{self.file}:{frame.lineno}"
        return found or (f"{self.file}:{self.line}" if self.file and self.line else self.file or self.label)

    def traceback_of(self, error: BaseException) -> tuple[str, ...]:
        """An exception's traceback in lines, from its first frame in this file on; empty if there is none.

        Below that, frames of other files are left out, except the one that raised.
        """
        frames = traceback.extract_tb(error.__traceback__)
        own = [bool(self.file) and os.path.abspath(frame.filename) == self.file for frame in frames]
        if not any(own):
            return ()
        kept = [frame for index, frame in enumerate(frames) if own[index] or index == len(frames) - 1]
        lines = "".join((*traceback.format_list(kept), *traceback.format_exception_only(error))).rstrip().split("\n")
        return tuple(line.rstrip() for line in lines[-_LONGEST_TRACEBACK:])


class Library:
    """What a loaded file offers: `functions` by name, the operators it registered, or a binary."""

    def __init__(
        self,
        path: str,
        form: Format,
        module: ModuleType | None = None,
        operators: Sequence[str] = (),
        cubin: GivenCubin | None = None,
    ) -> None:
        self._path, self._form, self._module, self._operators = path, form, module, tuple(operators)
        self._cubin = cubin

    @property
    def label(self) -> str:
        return os.path.basename(self._path)

    def cubin(self, entry: str) -> GivenCubin:
        """The binary, of which the kernel `entry` was asked for ("": none)."""
        assert self._cubin is not None
        return dataclasses.replace(self._cubin, entry=entry)

    def find(self, name: str, told: str) -> Replacement:
        """The function or operator of a name. Raises UsageError that lists the available ones."""
        return self._operator(name, told) if self._form == "torch-library" else self._function(name, told)

    def offer(self, kernel: Kernel) -> Replacement | None:
        """The file's replacement under a kernel's own name, for `all`; None if it has none."""
        base = kernel.name.rpartition("::")[2]
        if self._form == "torch-library":
            named = [name for name in self._operators if name.partition("::")[2].partition(".")[0] == base]
            return self._operator(named[0], self._path) if len(named) == 1 else None
        return self._function(base, self._path) if base in self.exported() else None

    def exported(self) -> list[str]:
        """Names of the functions that the file itself defines, or those that its `__all__` lists."""
        module = self._module
        if module is None:
            return []
        listed = getattr(module, "__all__", None)
        if listed is not None:
            return [str(name) for name in listed]
        return [
            name
            for name, value in vars(module).items()
            if callable(value)
            and not name.startswith("__")
            and not inspect.isclass(value)
            and getattr(value, "__module__", None) == module.__name__
        ]

    def _function(self, name: str, told: str) -> Replacement:
        function = getattr(self._module, name, None)
        if not callable(function):
            there = some_of(self.exported(), _LISTED) or "no functions"
            what = f"{name!r} in it is not a function" if function is not None else f"it defines no function {name!r}"
            raise UsageError(f"{told}: {self._path}: {what}; it has {there}; name one with PATH:NAME")
        return replacement_of(function, f"{os.path.basename(self._path)}:{name}")

    def _operator(self, name: str, told: str) -> Replacement:
        if "::" not in name:
            named = [each for each in self._operators if each.partition("::")[2].partition(".")[0] == name]
            if len(named) != 1:
                raise UsageError(
                    f"{told}: {self._path} registers {len(named)} operators called {name!r}; it registers "
                    f"{some_of(self._operators, _LISTED) or 'none that were not there before'}; name one with "
                    "PATH:NAMESPACE::NAME"
                )
            name = named[0]
        overload = find_operator(name)
        if isinstance(overload, str):
            raise UsageError(
                f"{told}: {overload}; {self._path} registers {some_of(self._operators, _LISTED) or 'none'}"
            )
        # Called as Python code would call it; the dispatcher chooses its kernel, as it does for the original.
        return Replacement(
            overload._op, f"{os.path.basename(self._path)}:{name}", "", 0, schema_signature(overload._schema)
        )


def replacement_of(function: Callable[..., Any], label: str) -> Replacement:
    code = getattr(inspect.unwrap(function), "__code__", None)
    try:
        signature: inspect.Signature | None = inspect.signature(function)
    except (TypeError, ValueError):
        signature = None
    file = os.path.abspath(code.co_filename) if code is not None else ""
    return Replacement(function, label, file, code.co_firstlineno if code is not None else 0, signature)


def find_operator(name: str) -> OpOverload | str:
    """The overload that `ns::op[.overload]` names, or a sentence that says why there is none."""
    base, _, overload = name.partition(".")
    found = {each._overloadname: each for each in overloads_of(base)}
    if not found:
        return f"there is no operator {base}"
    there = list(found)
    chosen = overload or ("default" if "default" in there else there[0] if len(there) == 1 else "")
    if chosen not in there:
        return f"the operator {base} has the overloads {', '.join(there)}; name one of them"
    return found[chosen]


def load_function(text: str) -> Callable[..., Any]:
    """The function that PATH.py:NAME names, the value of --judge; the file is run. Raises UsageError."""
    path, name = split_path(text)
    if name is None:
        raise UsageError(f"--judge={text}: names no function; expected PATH.py:NAME")
    try:
        require_regular_file(path)
        module = _import(os.path.realpath(path))
    except (Exception, SystemExit) as error:
        raise UsageError(f"--judge={text}: {path} does not load: {_in_one_line(error, path)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"--judge={text}: {path} has no function {name}")
    return function


def load(request: SubstitutionRequest) -> Library:
    """Load the file of a request. Raises UsageError if it cannot be read or does not load."""
    form = request.format
    assert form is not None
    path = os.path.realpath(request.path)
    try:
        require_regular_file(path)
        with open(path, "rb"):
            stamp = os.stat(path).st_mtime_ns
    except OSError as error:
        raise UsageError(f"{request.told}: {request.path}: cannot be read: {error.strerror}") from None
    if form == "cubin":
        try:
            return Library(request.path, form, cubin=read_cubin(path))
        except UsageError as error:
            raise UsageError(f"{request.told}: {error}") from None
    is_python = path.lower().endswith(".py")
    if (path, form) in _LIBRARIES:
        known, stamp_then = _LIBRARIES[path, form]
        if stamp == stamp_then or not is_python:
            return known
    before = set(torch._C._dispatch_get_all_op_names())
    module = None
    try:
        if form == "torch-library" and not is_python:
            torch.ops.load_library(path)
        else:
            module = _import(path)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{request.told}: {request.path} does not load: {_in_one_line(error, path)}") from error
    operators = sorted(set(torch._C._dispatch_get_all_op_names()) - before)
    library = Library(request.path, form, module, operators)
    _LIBRARIES[path, form] = library, stamp
    return library


# Each with the time when its file was changed. PyTorch refuses to register an operator twice, so files stay loaded for
# the life of the process; a Python file that was changed since is loaded again, and may have registered nothing.
_LIBRARIES: dict[tuple[str, Format], tuple[Library, int]] = {}


def read_cubin(path: str, entry: str = "") -> GivenCubin:
    """A cubin and its sidecar. Raises UsageError for one that cannot be read."""
    sidecar_path = os.path.splitext(path)[0] + ".json"
    sidecar = None
    try:
        if os.path.lexists(sidecar_path):
            require_regular_file(sidecar_path)
            with open(sidecar_path, "rb") as opened:
                sidecar = parse_json(opened.read())
        with open(path, "rb") as opened:
            return GivenCubin(opened.read(), entry, sidecar_path, sidecar)
    except (OSError, ValueError) as error:
        raise UsageError(f"{sidecar_path}: cannot be read: {error}") from None


def _import(path: str) -> ModuleType:
    """Import a Python file as a separate module; its folder is importable while it loads."""
    name = f"opreplay_substitution_{len(_LIBRARIES)}_{os.path.basename(path).partition('.')[0]}"
    loader = importlib.machinery.SourceFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = os.path.dirname(path)
    sys.path.insert(0, folder)
    try:
        # Not exec_module: it would write, and might use, cached bytecode next to a file that is being edited.
        code = loader.source_to_code(loader.get_data(path), path)
        with printing_aside():
            exec(code, module.__dict__)  # the user's file, named on the command line
    except BaseException:
        sys.modules.pop(name, None)
        raise
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
    return module


def _in_one_line(error: BaseException, path: str) -> str:
    """An exception in one line, with the line of the file that it came from."""
    line = None
    if isinstance(error, SyntaxError) and error.filename == path:
        line = error.lineno
    for frame in traceback.extract_tb(error.__traceback__):
        if os.path.realpath(frame.filename) == path:
            line = frame.lineno
    text = error.msg if isinstance(error, SyntaxError) else first_line(error)
    return f"{type(error).__name__}: {text}" + (f" ({os.path.basename(path)}:{line})" if line else "")
