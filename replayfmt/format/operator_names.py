"""Valid operator names: the only ones that a capture may hold, and that may be looked up.

PyTorch's own parser of names takes no others. A name is data: whoever looks one up asks the dispatcher's registry for
it, and never follows it through the attributes of Python objects.
"""

from __future__ import annotations

import re

_LONGEST = 512
_OVERLOAD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_NAME = re.compile(rf"[A-Za-z_][A-Za-z0-9_]*::{_OVERLOAD.pattern}")


def name_problem(name: str, overload: str) -> str:
    """Why `name` and `overload` (`default` for the one without a name) name no operator; "" where they may."""
    if len(name) > _LONGEST or len(overload) > _LONGEST:
        return f"an operator's name of {max(len(name), len(overload))} characters, allowed {_LONGEST}"
    if not _NAME.match(name) or not _OVERLOAD.match(overload):
        return f"{f'{name}.{overload}'!a} is not an operator name, expected NAMESPACE::OPERATOR.OVERLOAD"
    return ""
