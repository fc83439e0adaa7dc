"""Checks of what comes from outside: parameters of callers, files of users, depth of JSON; and text that is safe to
print.

A parameter of the wrong kind is a UsageError that names it, raised where it comes in. Text of captures, traces and
paths is escaped before it is shown, since it must not be able to control a terminal.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from replayfmt.errors import UsageError

# In JSON only strings hold such characters; json.dumps and jq leave those beyond ASCII as they are.
_BEYOND_ASCII = re.compile(r"[^\x20-\x7e]")


def printable(text: str, limit: int | None = None) -> str:
    """Text on one line that cannot control a terminal: unprintable characters are escaped, long text is cut."""
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def tell(text: str) -> None:
    """Print one line on the program's stderr, if it has one that takes it."""
    with suppress(Exception):
        if sys.stderr is not None:  # print would take stdout instead
            print(printable(text), file=sys.stderr, flush=True)


Units = Sequence[tuple[float, str]]
SECONDS: Units = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns"))  # of nanoseconds


def fitting(value: float, units: Units) -> tuple[float, str]:
    """The largest of the units, which come first, that a value has one of; else the smallest."""
    return next((unit for unit in units if abs(value) >= unit[0]), units[-1])


def in_units(value: float, units: Units) -> str:
    """A value with a unit that fits."""
    scale, unit = fitting(value, units)
    return f"{value / scale:.4g} {unit}"


def counted(number: int, noun: str) -> str:
    """`1,377 ops`, `1 op`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def some_of(items: Collection[Any], most: int, show: Callable[[Any], str] = str, separator: str = ", ") -> str:
    """`a, b, c and 4 more`."""
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return separator.join(map(show, islice(items, most))) + more


def scope_count(names: int, entered: int) -> str:
    """`5 scopes`, `3 scopes entered 8 times`: how many different ones there are, and how often one was entered."""
    times = f" entered {entered:,} times" if entered > names else ""
    return f"{counted(min(names, entered), 'scope')}{times}"


def printable_json(text: str) -> str:
    """JSON on one line with the same meaning, and with unprintable characters escaped."""
    return text if text.isprintable() else _BEYOND_ASCII.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    if character.isprintable():
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def nested_deeper(value: Any, limit: int) -> bool:
    """Whether a JSON value has lists and objects inside one another deeper than that."""
    level = [value]
    for _depth in range(limit + 1):
        if not level:
            return False
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list | tuple)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


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
    """An object of a class of the library's, or None where it is `optional`. For a protocol, any object that has its
    methods: from Python 3.12 on `isinstance` does not find those that `__getattr__` makes."""
    methods = getattr(kind, "__protocol_attrs__", ())
    fits = isinstance(value, kind) or (methods and all(callable(getattr(value, each, None)) for each in methods))
    if not fits and not (optional and value is None):
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


def aligned(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of a table: every column but the last one ends where it does in the other rows."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for row in rows:
        padded = [f"{cell:>{width}}" for cell, width in zip(row, widths, strict=False)]
        yield printable("  ".join([*padded, row[-1]]))


def csv_text(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table as CSV: RFC 4180 with newlines as line ends."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(rows)
    return text.getvalue()


def require_regular_file(path: str | os.PathLike[str]) -> None:
    """Raise OSError where there is nothing at a path, or it is neither a regular file nor a directory (as which opening
    it fails)."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "not a regular file")


def parse_json(text: str | bytes, **options: Any) -> Any:
    """The value of JSON from outside. Raises ValueError, also for values that are nested too deeply to read."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: str | os.PathLike[str], named: str, wanted: str) -> Any:
    """The value in a JSON file of the user's. `named` is how messages call the file, `wanted` says what was expected
    of it. Raises UsageError for a file that cannot be read, or is not JSON."""
    try:
        require_regular_file(path)
        return parse_json(Path(path).read_bytes())
    except OSError as error:
        raise UsageError(f"{named}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"{named}: is not JSON; {wanted}") from None
