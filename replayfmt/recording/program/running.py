"""Runs a program inside this process as `python script.py args…` or `python -m package.module args…` would run it.

It sets up what makes a program the main one: `__main__`, `sys.argv`, `sys.orig_argv`, `sys.path[0]`, how an uncaught
exception is shown, and the exit code. Threads and `atexit` are left to the interpreter: the caller exits through
`sys.exit(code)`. Does not depend on captures and imports no torch.
"""

from __future__ import annotations

import contextlib
import io
import os
import pkgutil
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType, TracebackType

from replayfmt.errors import UsageError

INTERRUPTED = 130  # what a shell reports for a program ended by an interrupt

Compile = Callable[[bytes, str], CodeType]


def compile_source(source: bytes, path: str) -> CodeType:
    """Compile a script as the interpreter does: without our own future statements."""
    return compile(source, path, "exec", dont_inherit=True)


@dataclass(frozen=True)
class Program:
    """A script (a file, or a directory or archive with a `__main__`), or a module, and its arguments."""

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def command(self) -> list[str]:
        """The command line that starts it without the recorder."""
        return ["python", *(["-m"] if self.is_module else []), self.target, *self.arguments]

    def check(self) -> None:
        """Raise UsageError if the script does not exist. (A module is looked for when it runs, as python does.)"""
        if not self.is_module and not os.path.exists(self.target):
            raise UsageError(f"{self.target}: no such script; give a Python file, or -m and a module's name")

    def run(self, compiler: Compile = compile_source) -> int:
        """Run it to the end and return its exit code.

        `compiler` turns a script's source into code. Exceptions of the program are shown as the interpreter shows them
        and do not leave this function.
        """
        main = self._become_main()
        try:
            if self.is_module:
                with _compiling(self.target, compiler):
                    runpy._run_module_as_main(self.target)  # type: ignore[attr-defined]  # what `python -m` calls
            elif pkgutil.get_importer(self.target) is not None:
                runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
            else:
                exec(_load(main, compiler), main.__dict__)
        except SystemExit as leaving:
            return _exit_code(leaving.code)
        except BaseException as error:
            _show(error)
            return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        return 0

    def _become_main(self) -> ModuleType:
        main = ModuleType("__main__")
        vars(main).update(__builtins__=sys.modules["builtins"], __annotations__={})
        global _former_main
        _former_main = sys.modules.get("__main__")  # a module without references would lose its globals
        sys.modules["__main__"] = main
        # runpy puts a module's path into argv[0] once it has found it.
        sys.argv = ["-m" if self.is_module else self.target, *self.arguments]
        sys.orig_argv[1:] = self.command[1:]
        if self.is_module:
            first = os.getcwd()
        elif pkgutil.get_importer(self.target) is not None:
            first = _absolute(self.target)
        else:
            path = _absolute(self.target)
            loader = SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader
            vars(main).update(__file__=path, __cached__=None, __loader__=loader("__main__", path))
            first = os.path.dirname(os.path.realpath(self.target))
        if not sys.flags.safe_path:
            sys.path[0] = first
        elif not self.is_module and not hasattr(main, "__file__"):
            sys.path.insert(0, first)  # a directory or archive is importable even so, or it could not run
        return main


_former_main: ModuleType | None = None


def _absolute(path: str) -> str:
    """As the interpreter makes `__file__` absolute: joined, nothing else."""
    return os.path.join(os.getcwd(), path)


def _load(main: ModuleType, compiler: Compile) -> CodeType:
    path = str(main.__file__)
    loader = main.__loader__
    if isinstance(loader, SourcelessFileLoader):
        code = loader.get_code("__main__")
        if code is None:
            raise ImportError(f"no code in {path}")
        return code
    with io.open_code(path) as file:
        return compiler(file.read(), path)


@contextlib.contextmanager
def _compiling(module: str, compiler: Compile) -> Iterator[None]:
    """Have runpy compile a module's source with `compiler`, if that is not the default one."""
    if compiler is compile_source:
        yield
        return
    finder = _MainFinder(module, compiler)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


class _MainLoader(SourceFileLoader):
    """Loads the module that runs as `__main__`, from its source even if there is compiled code."""

    compiler: Compile = staticmethod(compile_source)

    def get_code(self, fullname: str) -> CodeType:
        return self.compiler(self.get_data(self.path), self.path)


class _MainFinder(MetaPathFinder):
    """Finds the module that runs as `__main__`, or its package's `__main__`, through the other finders."""

    def __init__(self, module: str, compiler: Compile) -> None:
        self._names = (module, f"{module}.__main__")
        self._compiler = compiler

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        others = (finder for finder in tuple(sys.meta_path) if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and isinstance(spec.loader, SourceFileLoader) and spec.submodule_search_locations is None:
            loader = _MainLoader(fullname, spec.loader.path)
            loader.compiler = self._compiler
            spec.loader = loader
        return spec


def _exit_code(code: object) -> int:
    """What the interpreter makes of SystemExit's code."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    if sys.stderr is not None:
        print(code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """Show an uncaught exception without our own frames, through the program's `sys.excepthook` if it has set one."""
    error.__traceback__ = trace = _without_ours(error.__traceback__)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        # Older interpreters do not know this name, so they do not clear it before they delete the program's globals,
        # which finalizers of objects in the traceback need.
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, trace)
    except BaseException as second:
        second.__context__ = None
        second.__traceback__ = _without_ours(second.__traceback__)
        if sys.stderr is None:  # print would take stdout instead
            return
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exception(second, file=sys.stderr)
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(error, file=sys.stderr)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace
