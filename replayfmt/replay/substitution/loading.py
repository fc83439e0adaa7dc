"""Loads the files of substitutions, and finds the functions in them.

A file is the user's own, named on the command line, and its code is run. Any error in it becomes one line with the
place. Each file is loaded once per process.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch._ops import OpOverload

from replayfmt.errors import UsageError
from replayfmt.format.model import Kernel
from replayfmt.format.regular_files import require_regular_file
from replayfmt.pytorch.op_libraries import printing_aside
from replayfmt.pytorch.registry import overloads_of
from replayfmt.pytorch.triton.given_binaries import GivenCubin

from .binding import schema_signature
from .requests import Format, SubstitutionRequest

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
        """The file's name."""
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
            there = self.exported()
            what = f"{name!r} in it is not a function" if function is not None else f"it defines no function {name!r}"
            raise UsageError(
                f"{told}: {self._path}: {what}; it has {_listed(there) or 'no functions'}; name one with PATH:NAME"
            )
        return replacement_of(function, f"{os.path.basename(self._path)}:{name}")

    def _operator(self, name: str, told: str) -> Replacement:
        if "::" not in name:
            named = [each for each in self._operators if each.partition("::")[2].partition(".")[0] == name]
            if len(named) != 1:
                raise UsageError(
                    f"{told}: {self._path} registers {len(named)} operators called {name!r}; it registers "
                    f"{_listed(self._operators) or 'none that were not there before'}; name one with "
                    "PATH:NAMESPACE::NAME"
                )
            name = named[0]
        overload = find_operator(name)
        if isinstance(overload, str):
            raise UsageError(f"{told}: {overload}; {self._path} registers {_listed(self._operators) or 'none'}")
        # Called as Python code would call it; the dispatcher chooses its kernel, as it does for the original.
        return Replacement(
            overload._op, f"{os.path.basename(self._path)}:{name}", "", 0, schema_signature(overload._schema)
        )


def replacement_of(function: Callable[..., Any], label: str) -> Replacement:
    """A Python function as a replacement."""
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


class Loader:
    """Loads files, each once."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[str, Format], Library] = {}

    def load(self, request: SubstitutionRequest) -> Library:
        """Load the file of a request. Raises UsageError if it cannot be read or does not load."""
        assert request.format is not None
        path = os.path.realpath(request.path)
        self._readable(path, request)
        key = (path, request.format)
        if request.format == "cubin":
            return Library(request.path, "cubin", cubin=_cubin(path, request.told))
        if key not in self._loaded:
            self._loaded[key] = self._load(path, request)
        return self._loaded[key]

    def _readable(self, path: str, request: SubstitutionRequest) -> None:
        try:
            require_regular_file(path)
            with open(path, "rb"):
                pass
        except OSError as error:
            raise UsageError(f"{request.told}: {request.path}: cannot be read: {error.strerror}") from None

    def _load(self, path: str, request: SubstitutionRequest) -> Library:
        form = request.format
        assert form is not None
        known = _LIBRARIES.get((path, form))
        if known is not None and _unchanged(known, path):
            return known.library
        before = set(torch._C._dispatch_get_all_op_names())
        module = None
        stamp = os.stat(path).st_mtime_ns
        try:
            if form == "torch-library" and not path.lower().endswith(".py"):
                torch.ops.load_library(path)
            else:
                module = _import(path)
        except (Exception, SystemExit) as error:
            raise UsageError(f"{request.told}: {request.path} does not load: {_in_one_line(error, path)}") from error
        operators = sorted(set(torch._C._dispatch_get_all_op_names()) - before)
        library = Library(request.path, form, module, operators)
        _LIBRARIES[path, form] = _Loaded(library, stamp)
        return library


def _cubin(path: str, told: str) -> GivenCubin:
    """A cubin and its sidecar. Raises UsageError for a sidecar that cannot be read."""
    sidecar_path = os.path.splitext(path)[0] + ".json"
    sidecar = None
    try:
        if os.path.lexists(sidecar_path):
            require_regular_file(sidecar_path)
            with open(sidecar_path, "rb") as opened:
                sidecar = json.load(opened)
        with open(path, "rb") as opened:
            return GivenCubin(opened.read(), "", sidecar_path, sidecar)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{told}: {sidecar_path}: cannot be read: {error}") from None


@dataclass(frozen=True)
class _Loaded:
    library: Library
    modified_ns: int


# PyTorch refuses to register an operator twice, so files stay loaded for the life of the process.
_LIBRARIES: dict[tuple[str, Format], _Loaded] = {}


def _unchanged(known: _Loaded, path: str) -> bool:
    """Whether an earlier load of a file can be reused: a changed Python file that registered nothing can be loaded
    again."""
    return os.stat(path).st_mtime_ns == known.modified_ns or not path.lower().endswith(".py")


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
    text = error.msg if isinstance(error, SyntaxError) else str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" + (f" ({os.path.basename(path)}:{line})" if line else "")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
