"""Text for people's terminals: what captures, traces and paths contain must not steer them."""

from __future__ import annotations

import re

# In JSON only strings hold such characters; json.dumps and jq leave those beyond ASCII as they are.
_BEYOND_ASCII = re.compile(r"[^\x20-\x7e]")


def printable(text: str, limit: int | None = None) -> str:
    """Text on one line that cannot steer a terminal: what is not printable is escaped, what is too long is cut."""
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable_json(text: str) -> str:
    """JSON on one line with the same meaning, and with what is not printable escaped."""
    return text if text.isprintable() else _BEYOND_ASCII.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    if character.isprintable():
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
