"""Reads operator schemas from untrusted captures and traces, and writes them so that they can be read again.

PyTorch's parser is written in C++. It calls itself for every bracket: a few thousand of them end the process. And it
makes what a schema declares: `int[1000000000] x=1` is a list of that length. Nothing else calls it.
"""

from __future__ import annotations

import re

import torch

from replayfmt.format.operator_schema import canonical_schema

_LONGEST = 1 << 14  # characters; PyTorch's own schemas have up to some 600
_DEEPEST = 32  # brackets inside brackets
_LONGEST_LIST = 64  # the length in `int[2]`; PyTorch's own go up to 6
_BRACKETS = re.compile(r"[()\[\]]")
_LENGTHS = re.compile(r"\[\s*(\d+)")
_LONG_NUMBER = re.compile(r"\d{41}")


def parse_schema(text: str) -> torch.FunctionSchema:
    """The schema that `text` says. Raises ValueError for one that no operator has, RuntimeError as the parser does."""
    if len(text) > _LONGEST:
        raise ValueError(f"a schema of {len(text)} characters; expected at most {_LONGEST}")
    if not text.isascii():
        raise ValueError("a schema with characters that no name has")
    depth = 0
    for bracket in _BRACKETS.findall(text):
        depth += 1 if bracket in "([" else -1
        if not 0 <= depth <= _DEEPEST:
            raise ValueError(f"a schema with unmatched brackets, or more than {_DEEPEST} inside each other")
    if _LONG_NUMBER.search(text):
        raise ValueError("a schema with a number of more than 40 digits")
    longest = max(map(int, _LENGTHS.findall(text)), default=0)
    if longest > _LONGEST_LIST:
        raise ValueError(f"a schema with a list of the length {longest}; expected at most {_LONGEST_LIST}")
    try:
        schema: torch.FunctionSchema = torch._C.parse_schema(canonical_schema(text))
    except IndexError as error:  # a number that fits no C++ type, of which it says no more than `stoll`
        raise ValueError(f"a schema with a number out of range ({error})") from None
    return schema


def printed_schema(schema: torch.FunctionSchema) -> str:
    """A schema as text that `parse_schema` and PyTorch read: str() of one is not, where it writes unnamed memory."""
    return canonical_schema(str(schema))
