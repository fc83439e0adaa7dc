"""Reading operator schemas that come from a file: a capture or a trace, which may say anything.

PyTorch's parser is written in C++ and calls itself for every bracket: a few thousand of them end the process.
"""

from __future__ import annotations

import re

import torch

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
    schema: torch.FunctionSchema = torch._C.parse_schema(text)
    return schema
