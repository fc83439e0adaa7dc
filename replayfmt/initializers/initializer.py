"""What an initializer is.

It states its purpose by operator and argument, or by dtype and role. An initializer for an operator fills the tensor
that the operator reads, or several arguments of one call together; one without an operator fills whole storages, as
one row of elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from replayfmt.errors import UsageError
from replayfmt.pytorch.tensors.dtypes import INTEGERS

from .demands import Role
from .floats import FLOATS
from .request import Request

Content = torch.Tensor | Mapping[str, torch.Tensor]
Fill = Callable[[Request], Content]


@dataclass(frozen=True)
class Initializer:
    """What fills content that was not captured.

    `op` is an operator name (`aten::embedding`, with or without its overload) or a shell pattern, None for any; then
    `arguments` are patterns of argument names, none for any. `dtypes` and `roles` limit it further where they are
    given. A `joint` one is called once for all wanted arguments of a call that it matches, and returns a mapping from
    label to tensor; any other returns one tensor, of the wanted dtype and sizes. `accepts` may refuse a
    request when the plan is made. `origin` says where it comes from.
    """

    name: str
    fill: Fill
    op: str | None = None
    arguments: tuple[str, ...] = ()
    dtypes: frozenset[torch.dtype] = frozenset()
    roles: frozenset[Role] = frozenset()
    joint: bool = False
    accepts: Callable[[Request], bool] | None = None
    description: str = ""
    origin: str = "built-in"

    def __post_init__(self) -> None:
        if not self.name or not callable(self.fill):
            raise UsageError("an initializer needs a name and a function that fills")
        if self.arguments and self.op is None:
            raise UsageError(
                f"initializer {self.name}: arguments={list(self.arguments)} needs op, the operator that has them"
            )
        if self.joint and self.op is None:
            raise UsageError(f"initializer {self.name}: joint needs op, the operator that has the arguments")
        for text in (self.op, *self.arguments):
            if text is not None and (not isinstance(text, str) or not text):
                raise UsageError(f"initializer {self.name}: {text!r} is not a name or pattern")

    @property
    def whole(self) -> bool:
        """Whether it fills whole storages instead of tensors."""
        return self.op is None

    def names(self, op: str, overload: str, argument: str, label: str) -> bool:
        """Whether it is for an operator's argument, given by name and by label (with its place in a list)."""
        if self.op is None or not (fnmatchcase(op, self.op) or fnmatchcase(f"{op}.{overload}", self.op)):
            return False
        # A label is not a pattern: its brackets are literal.
        return not self.arguments or any(text == label or fnmatchcase(argument, text) for text in self.arguments)

    def matches_content(self, dtype: torch.dtype, role: Role | None) -> bool:
        """Whether it is for this dtype and role. `role` is None if the uses do not determine it."""
        return (not self.dtypes or dtype in self.dtypes) and (not self.roles or role in self.roles)

    def __str__(self) -> str:
        """What it matches, in one line."""
        what = self.wanted
        return f"{what}: {self.description}" if self.description else what

    @property
    def wanted(self) -> str:
        """What it is for, without its description."""
        parts = []
        if self.op is not None:
            parts.append(self.op + (f"({', '.join(self.arguments)})" if self.arguments else ""))
        if self.dtypes:
            named = {FLOATS: "floating point", INTEGERS: "integers", FLOATS | INTEGERS: "integers or floating point"}
            known = named.get(self.dtypes)
            names = sorted(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            parts.append(known or " or ".join(names))
        if self.roles:
            parts.append("role " + " or ".join(sorted(role.name for role in self.roles)))
        return ", ".join(parts) or "anything"
