"""One operator call while it is being recorded."""

from __future__ import annotations

from typing import Any

import torch

from .arguments import CallValues
from .kernels import KernelFacts


class OpCall:
    """A call that is being recorded."""

    __slots__ = ("args", "facts", "generators", "kwargs", "values")

    def __init__(self, facts: KernelFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.facts = facts
        self.args = args
        self.kwargs = kwargs
        self.values = CallValues()
        self.generators: list[torch.Generator] = []
