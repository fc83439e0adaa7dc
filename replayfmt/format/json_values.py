"""JSON from a file: a check of its depth, before anything recurses into it."""

from __future__ import annotations

from typing import Any


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
