"""Text for terminals: captures, traces and paths must not be able to control them."""

from __future__ import annotations

import re
import sys
from contextlib import suppress

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


def counted(number: int, noun: str) -> str:
    """`1,377 ops`, `1 op`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
