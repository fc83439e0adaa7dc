"""What an initializer is, and the request it gets: which content is needed, and all that the capture says of its use.

An initializer states its purpose by operator and argument, or by dtype and role. One for an operator fills the tensor
that the operator reads, or several arguments of one call together; one without an operator fills whole storages, as
one row of elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import torch

from replayfmt.errors import UsageError
from replayfmt.format.model import Recipe
from replayfmt.pytorch.tensors.memory import INTEGERS

from .demands import FLOATS, Demand, DemandStep, Role


@dataclass(frozen=True)
class TensorInfo:
    """A captured tensor without its content. Strides and offset are in elements; `device` is the captured one.

    Tensors with the same `storage` share memory.
    """

    storage: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    device: str

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Call:
    """One op of the capture. `arguments` maps names to values; tensors are TensorInfo, lists are tuples.

    `scope` is the path of the scope it ran in (`execute/step 3`), `annotation` what its importer or tool noted about
    it. `schema` is None if there is no kernel for it here; `elementwise`: each element that it returns depends only on
    the elements at the same place.
    """

    ordinal: int
    name: str
    overload_name: str
    arguments: Mapping[str, Any]
    results: tuple[Any, ...]
    scope: str
    annotation: Mapping[str, Any]
    schema: torch.FunctionSchema | None = None
    elementwise: bool = False

    def tensor(self, argument: str, position: int | None = None) -> TensorInfo | None:
        """A tensor argument, or the one at `position` of a list; None if that is not a tensor."""
        value = self.arguments.get(argument)
        if position is not None:
            value = value[position] if isinstance(value, tuple) and position < len(value) else None
        return value if isinstance(value, TensorInfo) else None

    def integer(self, argument: str, default: int | None = None) -> int | None:
        """An integer argument; `default` if it was not given."""
        value = self.arguments.get(argument, default)
        return value if isinstance(value, int) else default

    def number(self, argument: str, default: float | None = None) -> float | None:
        """An argument that is a real number; `default` if it was not given."""
        value = self.arguments.get(argument, default)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else default

    def result(self, index: int) -> TensorInfo | None:
        value = self.results[index] if index < len(self.results) else None
        return value if isinstance(value, TensorInfo) else None


def first_name(call: Call, names: Iterable[str]) -> str | None:
    """The first of these names under which the call has a tensor: libraries name the same argument differently."""
    return next((name for name in names if call.tensor(name) is not None), None)


def first_tensor(call: Call, names: Iterable[str]) -> TensorInfo | None:
    name = first_name(call, names)
    return None if name is None else call.tensor(name)


def first_integer(call: Call, names: Iterable[str]) -> int | None:
    return next((number for name in names if (number := call.integer(name)) is not None), None)


@dataclass(frozen=True)
class Use:
    """One op that reads a storage's content: as `argument`, at `position` where that is a list.

    What it reads is the content itself where `steps` is empty and `followed` is true, else what the program computed
    from it: by `steps`, or, where `followed` is false, in a way that is not followed. `view` is the tensor to fill so
    that the op reads what was filled, None if no single one is known.
    """

    call: Call
    argument: str
    position: int | None
    tensor: TensorInfo
    view: TensorInfo | None
    steps: tuple[DemandStep, ...] = ()
    followed: bool = True

    @property
    def label(self) -> str:
        """`indices`, or `indices[1]` in a list."""
        return self.argument if self.position is None else f"{self.argument}[{self.position}]"


@dataclass(frozen=True)
class Request:
    """Content that is wanted for a storage, or for several of one call.

    `call` is the op the initializer was chosen for, `wanted` its tensor arguments without content by label (`indices`,
    in lists `indices[1]`). Of the first one's storage, `uses` are all known uses, `demand` what they ask of integers
    together (None if that is unknown), `recipe` what the capture says about its content, and `version` counts how
    often the program gave it new content from outside. `seed` depends on the storage and its version alone. `options`
    are what the user set for initializers, by name (`moe-routing`); `shared` is what the initializers of one plan
    remember for each other.
    """

    call: Call
    wanted: Mapping[str, TensorInfo]
    uses: tuple[Use, ...]
    demand: Demand | None
    recipe: Recipe | None
    version: int
    seed: int
    content: Callable[[TensorInfo], torch.Tensor | None] = field(repr=False, default=lambda info: None)
    notes: list[str] = field(repr=False, default_factory=list)
    options: Mapping[str, str] = field(default_factory=dict)
    shared: dict[Any, Any] = field(repr=False, default_factory=dict)

    @property
    def label(self) -> str:
        """The label of the argument, of the first where there are several."""
        return next(iter(self.wanted))

    @property
    def tensor(self) -> TensorInfo:
        """The tensor to fill, the first where there are several."""
        return self.wanted[self.label]

    @property
    def generator(self) -> torch.Generator:
        """A fresh generator on the CPU that starts from `seed`."""
        return torch.Generator().manual_seed(self.seed & (1 << 63) - 1)

    def known(self, argument: str, position: int | None = None) -> torch.Tensor | None:
        """The content of another tensor argument of the call, on the CPU: captured, or made by an initializer before.

        None if it is unknown when the plan is made.
        """
        info = self.call.tensor(argument, position)
        return None if info is None else self.content(info)

    def note(self, text: str) -> None:
        """A line for the user, printed once with the replay's result."""
        if text not in self.notes:
            self.notes.append(text)


Content = torch.Tensor | Mapping[str, torch.Tensor]
Fill = Callable[[Request], Content]


@lru_cache(maxsize=1 << 14)
def _names(
    wanted: str, arguments: tuple[str, ...], op: str, overload: str, argument: str, label: str
) -> bool:  # asked for every storage
    if not (fnmatchcase(op, wanted) or fnmatchcase(f"{op}.{overload}", wanted)):
        return False
    # A label is not a pattern: its brackets are literal.
    return not arguments or any(text == label or fnmatchcase(argument, text) for text in arguments)


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
        return self.op is not None and _names(self.op, self.arguments, op, overload, argument, label)

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
