"""`--mark MODULE:CALLABLE=SCOPE`: makes every call of one of the program's callables a scope.

A mark waits until the program imports the module and then replaces the callable by a wrapper: in the module for a
function, in the class for a method. The program's main module (`__main__`) does its work while it is imported, so there
the wrapper is put in place right after the definition: the source is compiled with an extra statement after each. A
mark that never found its callable is reported at the end. Imports no torch.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import CodeType, ModuleType
from typing import Any

from replayfmt.errors import UsageError

from ..frames import leave_no_frames
from ..patches import Watch

OpenScope = Callable[[str], AbstractContextManager[Any]]

_NAME = r"[^\W\d]\w*"
_SPEC = re.compile(rf"(?P<module>{_NAME}(?:\.{_NAME})*):(?P<callable>{_NAME}(?:\.{_NAME})*)=(?P<scope>[^=]+)")


@dataclass
class Mark:
    """One `--mark`. `problem` says why its callable was not found; "" once it is. `calls` counts calls."""

    module: str
    callable: str
    scope: str
    problem: str = field(default="", compare=False)
    calls: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        self.problem = f"the program never imported {self.module}"

    def __str__(self) -> str:
        return f"{self.module}:{self.callable}={self.scope}"


def parse_mark(text: str) -> Mark:
    """`MODULE:CALLABLE=SCOPE` as a Mark. Raises UsageError if it is not of that form."""
    found = _SPEC.fullmatch(text)
    if found is None:
        raise UsageError(
            f"--mark={text}: expected MODULE:CALLABLE=SCOPE, for instance "
            "trainer.loop:Trainer.step=step or __main__:train_step=execute"
        )
    if "/" in found["scope"]:
        raise UsageError(f"--mark={text}: a scope's name has no '/'; nested scopes come from nested calls")
    return Mark(found["module"], found["callable"], found["scope"].strip())


class Marks:
    def __init__(self, marks: Iterable[Mark], open_scope: OpenScope, main_module: str | None = None) -> None:
        """`open_scope(name)` returns the context manager that each marked call runs in. `main_module` is the name of
        the module that runs as `__main__`, if it has one: marks may use either name."""
        self.marks = tuple(marks)
        self._open_scope = open_scope
        self._main_names = ("__main__", main_module)
        self._watches: list[Watch] = []

    def install(self) -> None:
        """Wait for the modules. Wrappers stay in place for the rest of the process; while nothing is recorded they cost
        one call."""
        global _of_main
        _of_main = self
        for mark in self.marks:
            if mark.module in self._main_names:
                name = mark.callable.partition(".")[0]
                mark.problem = f"the main module defines no function or class {name}"
            else:
                self._watches.append(Watch(mark.module, functools.partial(self._apply, mark)))

    def remove(self) -> None:
        """Stop waiting. Idempotent."""
        for watch in self._watches:
            watch.stop()
        self._watches.clear()

    def compiler(self, otherwise: Callable[[bytes, str], CodeType]) -> Callable[[bytes, str], CodeType]:
        """The function that compiles the program's script: `otherwise`, unless a mark is for `__main__`."""
        names = {mark.callable.partition(".")[0] for mark in self.marks if mark.module in self._main_names}
        return functools.partial(_compile_marked, names) if names else otherwise

    def unmatched(self) -> list[str]:
        """One sentence for every mark that never found its callable."""
        return [f"--mark={mark}: {mark.problem}" for mark in self.marks if mark.problem]

    def never_called(self) -> list[str]:
        """One sentence for every mark whose callable was found and not called."""
        return [f"--mark={mark}: was never called" for mark in self.marks if not mark.problem and not mark.calls]

    def apply_to_main(self, name: str, main: ModuleType) -> None:
        """Put the wrappers in place for marks on `name`, which the main module has just defined."""
        for mark in self.marks:
            if mark.module in self._main_names and mark.callable.partition(".")[0] == name:
                self._apply(mark, main)

    def _apply(self, mark: Mark, module: ModuleType) -> None:
        *path, name = mark.callable.split(".")
        holder: Any = module
        for part in path:
            if not hasattr(holder, part):
                mark.problem = f"{holder.__name__} has no {part}"
                return
            holder = getattr(holder, part)
        # In a class, the descriptor must be wrapped. A module may create its attributes on demand, and an object's
        # method is the bound one.
        raw = inspect.getattr_static(holder, name, None) if isinstance(holder, type) else getattr(holder, name, None)
        if raw is None:
            mark.problem = f"{getattr(holder, '__name__', holder)} has no {name}"
            return
        wrapped = self._wrap(mark, raw)
        if wrapped is not None:
            setattr(holder, name, wrapped)
            mark.problem = ""

    def _wrap(self, mark: Mark, raw: Any) -> Any:
        """`raw` with each call in the mark's scope, as the same kind of descriptor. None, with `problem` set, if it
        cannot be wrapped."""
        if isinstance(raw, (staticmethod, classmethod)):
            inner = self._wrap(mark, raw.__func__)
            return None if inner is None else type(raw)(inner)
        if isinstance(raw, type):
            mark.problem = f"{mark.callable} is a class; name one of its methods, such as {mark.callable}.__call__"
            return None
        if not (inspect.isroutine(raw) or isinstance(raw, functools.partial)):
            kind = f"an object of class {type(raw).__name__}"
            mark.problem = f"{mark.callable} is {kind}, not a function or method" + (
                f"; name one of its methods, such as {mark.callable}.forward" if callable(raw) else ""
            )
            return None
        if inspect.isgeneratorfunction(raw) or inspect.isasyncgenfunction(raw):
            mark.problem = (
                f"{mark.callable} is a generator function: its work runs between other work, so it cannot be a "
                f"scope; mark what it calls"
            )
            return None
        open_scope, scope = self._open_scope, mark.scope
        if inspect.iscoroutinefunction(raw):

            @functools.wraps(raw)
            async def wait(*args: Any, **kwargs: Any) -> Any:
                mark.calls += 1
                try:
                    with open_scope(scope):
                        return await raw(*args, **kwargs)
                except BaseException as error:
                    leave_no_frames(error)
                    raise

            return wait

        @functools.wraps(raw)
        def call(*args: Any, **kwargs: Any) -> Any:
            mark.calls += 1
            try:
                with open_scope(scope):
                    return raw(*args, **kwargs)
            except BaseException as error:
                leave_no_frames(error)
                raise

        return call


# ------------------------------------------------------------------------------------------- marks in the main module

_of_main: Marks | None = None


def defined(name: str) -> None:
    """Called by the main module's marked code after a definition of `name`."""
    import __main__

    if _of_main is not None:
        _of_main.apply_to_main(name, __main__)


def _compile_marked(names: set[str], source: bytes, path: str) -> CodeType:
    """Compile a script with a call of `defined` after each top-level definition of one of `names`."""
    tree = ast.parse(source, path)
    for statements in _top_level(tree):
        for index in range(len(statements) - 1, -1, -1):
            node = statements[index]
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name in names:
                # A self-contained expression: it adds nothing to the script's namespace.
                call = ast.parse(f"__import__({__name__!r}, fromlist=['defined']).defined({node.name!r})").body[0]
                for part in ast.walk(call):
                    if "lineno" in part._attributes:
                        ast.copy_location(part, node)
                statements.insert(index + 1, call)
    return compile(tree, path, "exec", dont_inherit=True)


def _top_level(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements that run in the module's own namespace, inside `if`, `try`, `with` and loops too."""
    for _, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield value
            for statement in value:
                if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    yield from _top_level(statement)
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, (ast.excepthandler, ast.match_case)):
                    yield from _top_level(item)
