"""One operator call while it is being recorded, and the data collected about its values."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from replayfmt.format.codes import ValueKind

from ..storages.trackers import Tracker
from .kernels import CapturedKernel


class Token(NamedTuple):
    """One node of a key: its kind, its constant, and the number of children that follow."""

    kind: ValueKind
    constant: int | str | None = None
    children: int = 0


class TensorUse(NamedTuple):
    """A plain tensor that is an argument or a result of a call. `argument` is its index in the schema (or among the
    results)."""

    argument: int
    tensor: torch.Tensor
    storage: torch.UntypedStorage
    tracker: Tracker
    number: int  # tensor id
    meta: int


class CallValues:
    """The values of one call, while they are collected."""

    __slots__ = ("argument", "floats", "ints", "key", "tensors", "uses")

    def __init__(self) -> None:
        self.key: list[Token] = []
        self.tensors: list[int] = []
        self.ints: list[int] = []
        self.floats: list[float] = []
        self.uses: list[TensorUse] = []
        self.argument = 0


class OpCall:
    """A call that is being recorded."""

    __slots__ = ("__weakref__", "args", "contents", "generators", "kernel", "kwargs", "places", "ran", "values")

    def __init__(
        self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any], *, ran: bool = False
    ) -> None:
        """`ran`: it has run before anything of it was looked at."""
        self.kernel = kernel
        self.ran = ran
        self.args = args
        self.kwargs = kwargs
        self.values = CallValues()
        self.generators: list[torch.Generator] = []
        self.places: Any = None  # where it writes, if that is a part of partly unwritten memory (partial_writes.py)
        self.contents: list[tuple[TensorUse, int | None]] = []  # the content of its assumed arguments before it ran
