"""What callers hand to the library, looked at where it comes in: a value of the wrong kind is a UsageError that names
the parameter, not an exception out of the middle of the work, and never something else that was meant.

What an object of the caller's own raises (`__fspath__`, `__iter__`) passes. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replayfmt.errors import UsageError

_SHOWN_CHARACTERS = 60


def path_of(name: str, value: Any) -> str:
    """A file's name. Numbers are none: as the number of an open file they would be read, and closed."""
    if isinstance(value, str | bytes | os.PathLike):
        try:
            return os.fsdecode(value)
        except TypeError as error:
            raise UsageError(f"{name}: {error}") from None
    raise UsageError(f"{name}={shown(value)}: expected a path")


def paths_of(name: str, value: Any) -> tuple[str, ...]:
    """Names of files; one alone may stand for itself."""
    if isinstance(value, str | bytes | os.PathLike):
        return (path_of(name, value),)
    return tuple(path_of(name, each) for each in _items(name, value, "a list of paths"))


def text_of(name: str, value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise UsageError(f"{name}={shown(value)}: expected a text")
    return value


def texts_of(name: str, value: Any) -> tuple[str, ...]:
    """Texts; one alone may stand for itself."""
    if isinstance(value, str):
        return (value,)
    return tuple(text_of(name, each) for each in _items(name, value, "a list of texts"))


def flag_of(name: str, value: Any) -> bool:
    """True or False: "no" is neither."""
    if value is True or value is False or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise UsageError(f"{name}={shown(value)}: expected True or False")


def count_of(name: str, value: Any, least: int, most: int) -> int:
    """A whole number between two bounds."""
    if type(value) is not int or not least <= value <= most:
        raise UsageError(f"{name}={shown(value)}: expected a whole number from {least} to {most}")
    return value


def choice_of(name: str, value: Any, allowed: Sequence[str]) -> str:
    """One of a few words."""
    if not isinstance(value, str) or value not in allowed:
        raise UsageError(f"{name}={shown(value)}: expected one of {', '.join(allowed)}")
    return value


def check_function(name: str, value: Any) -> None:
    """Something to call, or None."""
    if value is not None and not callable(value):
        raise UsageError(f"{name}={shown(value)}: expected a function")


def check_kind(name: str, value: Any, kind: type, *, optional: bool = False) -> None:
    """An object of a class of the library's, or None where it is `optional`."""
    if not (optional and value is None) and not isinstance(value, kind):
        raise UsageError(f"{name}={shown(value)}: expected {kind.__name__}")


def items_of(name: str, value: Any, expected: str) -> tuple[Any, ...]:
    """The items of a list or the like."""
    return tuple(_items(name, value, expected))


def _items(name: str, value: Any, expected: str) -> Iterable[Any]:
    if isinstance(value, str | bytes | bytearray | Mapping) or not hasattr(type(value), "__iter__"):
        raise UsageError(f"{name}={shown(value)}: expected {expected}")
    return value


def shown(value: Any) -> str:
    """A value in a message: itself where it is short and plain, else what it is."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        try:
            text = repr(value)
        except ValueError:  # an integer of too many digits to print
            text = "a number of thousands of digits"
        return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
    return f"a {type(value).__name__}"
