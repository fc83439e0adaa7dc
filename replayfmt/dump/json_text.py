"""How values are written as JSON: every row is plain ASCII that any JSON parser reads without loss.

Integers beyond 2^53 are strings of digits, because parsers that keep numbers as doubles (jq among them) round them;
non-finite floats are the strings "NaN", "Infinity" and "-Infinity"; lone surrogates, which strict parsers refuse,
become U+FFFD.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

EXACT = 2**53
_ENCODER = json.JSONEncoder()
# In text from json.dumps: the parts that `encode` may write differently.
_UNLIKE = re.compile(r"NaN|Infinity|[0-9]{16}|\\ud[89a-f]")


def quote(text: str) -> str:
    """A JSON string."""
    if not text.isascii():
        # Through UTF-16, so that two surrogates that make a pair become the character they mean.
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return _ENCODER.encode(text)


def integer(value: int) -> str:
    """A JSON number, or a string of digits where a double would round it."""
    return str(value) if -EXACT <= value <= EXACT else f'"{value}"'


def integers(column: np.ndarray) -> list[int | str]:
    """A column of integers, in a form whose text is JSON: `integer` of each, but fast."""
    values: list[int | str] = column.tolist()
    if column.size and (column.max() > EXACT or (column.dtype.kind == "i" and column.min() < -EXACT)):
        return [value if -EXACT <= int(value) <= EXACT else f'"{value}"' for value in values]
    return values


def number(value: float) -> str:
    """A JSON number, or the name of a non-finite value as a string."""
    if math.isfinite(value):
        return repr(value)
    return '"NaN"' if math.isnan(value) else '"Infinity"' if value > 0 else '"-Infinity"'


def encode_fast(value: Any) -> str:
    """`encode`, for values that come by the million."""
    text = json.dumps(value, separators=(",", ":"))
    return encode(value) if _UNLIKE.search(text) else text


def encode(value: Any) -> str:
    """Any plain value (None, bool, int, float, str, lists, tuples and mappings of them) as compact JSON."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return integer(value)
    if isinstance(value, float):
        return number(value)
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{quote(str(key))}:{encode(item)}" for key, item in value.items()) + "}"
    return "[" + ",".join(encode(item) for item in value) + "]"
