"""Reading operator schemas that come from a file, a capture or a trace, which may say anything; and writing them so
that they can be read again.

PyTorch's parser is written in C++ and calls itself for every bracket: a few thousand of them end the process.
"""

from __future__ import annotations

import re

import torch

from replayfmt.format.operator_schema import canonical_schema

_LONGEST = 1 << 14      # characters; PyTorch's own schemas have up to some 600
_DEEPEST = 32           # brackets inside brackets
_BRACKETS = re.compile(r"[()\[\]]")


def parse_schema(text: str) -> torch.FunctionSchema:
    """The schema that `text` says. Raises ValueError for one that no operator has, RuntimeError as the parser does."""
    if len(text) > _LONGEST:
        raise ValueError(f"a schema of {len(text)} characters; expected at most {_LONGEST}")
    depth = 0
    for bracket in _BRACKETS.findall(text):
        depth += 1 if bracket in "([" else -1
        if not 0 <= depth <= _DEEPEST:
            raise ValueError(f"a schema with unmatched brackets, or more than {_DEEPEST} inside each other")
    schema: torch.FunctionSchema = torch._C.parse_schema(canonical_schema(text))
    return schema


def printed_schema(schema: torch.FunctionSchema) -> str:
    """A schema as text that `parse_schema` and PyTorch read: str() of one is not, where it writes unnamed memory."""
    return canonical_schema(str(schema))
