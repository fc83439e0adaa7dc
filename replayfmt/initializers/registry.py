"""Which initializer fills which storage: the first that matches, the user's before the built-in ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from replayfmt.errors import UsageError
from replayfmt.format.arguments import check_kind, items_of, text_of

from .builtin import BUILT_IN, check_option
from .demands import Role
from .initializer import Fill, Initializer
from .request import Request

_registered: list[Initializer] = []
_collecting: list[list[Initializer]] = []


def register(
    op: str | None = None,
    *,
    argument: str | Sequence[str] = (),
    dtype: torch.dtype | Iterable[torch.dtype] = (),
    role: Role | Iterable[Role] = (),
    joint: bool = False,
    name: str = "",
    description: str = "",
    accepts: Callable[[Request], bool] | None = None,
) -> Callable[[Fill], Fill]:
    """Decorator: from now on plans use the function as an initializer, after those that were registered before.

    In a file given to --replay-initializer only the plans of that command do. See Initializer for what the arguments
    mean; the name is the function's unless it is given, the description the first line of its docstring.
    Raises UsageError if they contradict each other.
    """

    def decorate(function: Fill) -> Fill:
        text = description or (function.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        made = Initializer(
            name or getattr(function, "__name__", ""),
            function,
            op,
            (argument,) if isinstance(argument, str) else tuple(argument),
            frozenset({dtype} if isinstance(dtype, torch.dtype) else dtype),
            frozenset({role} if isinstance(role, Role) else role),
            joint,
            accepts,
            text,
            origin=getattr(function, "__module__", "") or "registered",
        )
        into = _collecting[-1] if _collecting else _registered
        if any(other.name == made.name for other in into):
            raise UsageError(f"an initializer called {made.name} is registered already; give it another name")
        into.append(made)
        return function

    return decorate


def unregister(name: str) -> None:
    """Forget an initializer that was registered in this process. Raises UsageError if there is none of that name."""
    for index, each in enumerate(_registered):
        if each.name == name:
            del _registered[index]
            return
    raise UsageError(f"no initializer called {name} is registered")


@contextmanager
def collecting() -> Iterator[list[Initializer]]:
    """While it is open, registrations go to the list that it yields, and nowhere else."""
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
        if options is not None:
            check_kind("initializer_options", options, Mapping)
        self.options = dict(options or {})
        for name, value in self.options.items():
            check_option(name, text_of(f"initializer_options[{name!r}]", value))
        given = items_of("initializers", given, "a list of Initializer objects")
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
        return [
            f"{number:3}  {each.name:{width}}  {each}" + (f"  ({each.origin})" if each.origin != "built-in" else "")
            for number, each in enumerate(self.initializers, 1)
        ]


def _type_name(value: Any) -> str:
    return type(value).__name__
