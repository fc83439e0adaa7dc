"""Which initializer fills which storage: the user's before the built-in ones, and of each the first that matches.

An initializer names what it is for by operator and argument, or by dtype and role. One for an operator fills the tensor
that the operator reads, or several arguments of one call together; one without an operator fills whole storages, as one
row of elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from replayfmt.errors import UsageError

from .demands import Role
from .floats import FLOATS
from .request import Request
from .roles import INTEGERS

Content = torch.Tensor | Mapping[str, torch.Tensor]
Fill = Callable[[Request], Content]


@dataclass(frozen=True)
class Initializer:
    """What fills content that was not captured.

    `op` is an operator name (`aten::embedding`, with or without its overload) or a shell pattern, None for any; then
    `arguments` are patterns of argument names, none for any. `dtypes` and `roles` limit it further where they are
    given. A `joint` one is called once for all arguments of a call that it matches and that are wanted, and returns a
    mapping from label to tensor; any other returns one tensor, of the wanted dtype and sizes. `accepts` may refuse a
    request when the plan is made. `origin` says where it comes from.
    """

    name: str
    fill: Fill
    op: str | None = None
    arguments: tuple[str, ...] = ()
    dtypes: frozenset[torch.dtype] = frozenset()
    roles: frozenset[Role] = frozenset()
    joint: bool = False
    accepts: Callable[[Request], bool] | None = None
    description: str = ""
    origin: str = "built-in"

    def __post_init__(self) -> None:
        if not self.name or not callable(self.fill):
            raise UsageError("an initializer needs a name and a function that fills")
        if self.arguments and self.op is None:
            raise UsageError(f"initializer {self.name}: arguments={list(self.arguments)} needs op, the operator that "
                             "has them")
        if self.joint and self.op is None:
            raise UsageError(f"initializer {self.name}: joint needs op, the operator that has the arguments")
        for text in (self.op, *self.arguments):
            if text is not None and (not isinstance(text, str) or not text):
                raise UsageError(f"initializer {self.name}: {text!r} is no name or pattern")

    @property
    def whole(self) -> bool:
        """Whether it fills whole storages instead of tensors."""
        return self.op is None

    def names(self, op: str, overload: str, argument: str, label: str) -> bool:
        """Whether it is for an operator's argument, given by name and by label (with its place in a list)."""
        if self.op is None or not (fnmatchcase(op, self.op) or fnmatchcase(f"{op}.{overload}", self.op)):
            return False
        # A label is no pattern: its brackets are literal.
        return not self.arguments or any(text == label or fnmatchcase(argument, text) for text in self.arguments)

    def matches_content(self, dtype: torch.dtype, role: Role | None) -> bool:
        """Whether dtype and role are among those it is for. `role` is None where uses do not tell."""
        return (not self.dtypes or dtype in self.dtypes) and (not self.roles or role in self.roles)

    def __str__(self) -> str:
        """What it matches, in one line."""
        what = self.wanted
        return f"{what}: {self.description}" if self.description else what

    @property
    def wanted(self) -> str:
        """What it is for, without its description."""
        parts = []
        if self.op is not None:
            parts.append(self.op + (f"({', '.join(self.arguments)})" if self.arguments else ""))
        if self.dtypes:
            known = {FLOATS: "floating point", INTEGERS: "integers"}.get(self.dtypes)
            names = sorted(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            parts.append(known or " or ".join(names))
        if self.roles:
            parts.append("role " + " or ".join(sorted(role.name for role in self.roles)))
        return ", ".join(parts) or "anything"


_registered: list[Initializer] = []
_collecting: list[list[Initializer]] = []


def register(op: str | None = None, *, argument: str | Sequence[str] = (),
             dtype: torch.dtype | Iterable[torch.dtype] = (),
             role: Role | Iterable[Role] = (), joint: bool = False, name: str = "", description: str = "",
             accepts: Callable[[Request], bool] | None = None) -> Callable[[Fill], Fill]:
    """Decorator: from now on plans use the function as an initializer, after those that were registered before.

    In a file given to --replay-initializer only the plans of that command do. See Initializer for what the arguments
    mean; the name is the function's unless it is given, the description the first line of its docstring.
    Raises UsageError where they contradict each other.
    """
    def decorate(function: Fill) -> Fill:
        text = description or (function.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        made = Initializer(
            name or getattr(function, "__name__", ""), function, op, (argument,) if isinstance(argument, str) else
            tuple(argument), frozenset({dtype} if isinstance(dtype, torch.dtype) else dtype),
            frozenset({role} if isinstance(role, Role) else role), joint, accepts, text,
            origin=getattr(function, "__module__", "") or "registered")
        into = _collecting[-1] if _collecting else _registered
        if any(other.name == made.name for other in into):
            raise UsageError(f"an initializer called {made.name} is registered already; give it another name")
        into.append(made)
        return function

    return decorate


def unregister(name: str) -> None:
    """Forget an initializer that was registered in this process. Raises UsageError where there is none of that name."""
    for index, each in enumerate(_registered):
        if each.name == name:
            del _registered[index]
            return
    raise UsageError(f"no initializer called {name} is registered")


@contextmanager
def collecting() -> Iterator[list[Initializer]]:
    """Within it, what is registered goes into the list it gives, and nowhere else."""
    found: list[Initializer] = []
    _collecting.append(found)
    try:
        yield found
    finally:
        _collecting.pop()


class Registry:
    """The initializers of one plan, in the order in which they are tried."""

    def __init__(self, given: Sequence[Initializer] = (), options: Mapping[str, str] | None = None) -> None:
        """`given` come first, then those registered in this process, then the built-in ones. `options` are handed to
        every initializer. Raises UsageError for an option that no initializer knows, or a wrong value."""
        from .builtin import BUILT_IN, check_option

        self.options = dict(options or {})
        for name, value in self.options.items():
            check_option(name, value)

        for each in given:
            if not isinstance(each, Initializer):
                raise UsageError(f"initializers are Initializer objects, not {_type_name(each)}")
        self.users = (*given, *_registered)
        self.initializers = (*self.users, *BUILT_IN)

    def __iter__(self) -> Iterator[Initializer]:
        return iter(self.initializers)

    def lines(self) -> list[str]:
        """Every initializer in order: where it comes from, its name, what it matches."""
        width = max(len(each.name) for each in self.initializers)
        return [f"{number:3}  {each.name:{width}}  {each}" + (f"  ({each.origin})" if each.origin != "built-in" else "")
                for number, each in enumerate(self.initializers, 1)]


def _type_name(value: Any) -> str:
    return type(value).__name__
