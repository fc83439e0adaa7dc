"""What there is to run: the entries of PyTorch's own OpInfo database with their samples, and random programs."""

from __future__ import annotations

import copy
import functools
import importlib.util
import random
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree
from trim.random_programs import STEPS, run_steps

from .expressions import run_expression
from .modes import WITH_GRADIENTS, Case

PROGRAMS = 1000
_PROGRAMS_AN_ENTRY = 50
_DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)
_NEW_MEMORY = "its result is new memory"
# Of which a run need not be equal to another one.
_WAVERING = {
    **dict.fromkeys(("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"), _NEW_MEMORY),
    "new_empty_strided": _NEW_MEMORY,
    "linalg.lstsq": "its last bits depend on where its memory is",
}


class Entry(Protocol):
    """Cases that go together."""

    name: str

    def why_not(self, mode: str) -> str | None:
        """Why there is nothing of it to run in a mode. None: there is."""
        ...

    def cases(self, mode: str) -> Iterator[Case]:
        """The cases, made anew: equal to those made before, and sharing nothing with them."""
        ...


class OpEntry:
    """The samples of one OpInfo."""

    def __init__(self, op: Any) -> None:
        self._op = op
        self.name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name

    def why_not(self, mode: str) -> str | None:
        if self._op.name in _WAVERING:
            return _WAVERING[self._op.name]
        if self._dtype(False) is None:
            return "it has no kernel for the CPU"
        if mode in WITH_GRADIENTS and not (self._op.supports_autograd and self._dtype(True) is not None):
            return "it has no gradient"
        if mode == "create_graph" and not self._op.supports_gradgrad:
            return "it has no second gradient"
        return None

    def _dtype(self, gradient: bool) -> torch.dtype | None:
        kept = self._op.supported_backward_dtypes("cpu") if gradient else self._op.supported_dtypes("cpu")
        known = [dtype for dtype in _DTYPES if dtype in kept] or ([] if gradient else sorted(kept, key=str))
        return known[0] if known else None

    def cases(self, mode: str) -> Iterator[Case]:
        gradient = mode in (*WITH_GRADIENTS, "autocast") and self._op.supports_autograd
        dtype = self._dtype(True) if gradient else None
        gradient = dtype is not None
        dtype = dtype or self._dtype(False)
        _seed()
        for index, sample in enumerate(self._samples(dtype, gradient)):
            yield self._case(f"sample {index}", sample, sample.output_process_fn_grad)
        if mode == "plain" and self._op.error_inputs_func is not None:
            for index, error in enumerate(_quietly(self._op.error_inputs("cpu"))):
                yield self._case(f"error {index}", error.sample_input, lambda result: result)

    def _case(self, label: str, sample: Any, differentiable: Callable[[Any], Any]) -> Case:
        given = _own((sample.input, sample.args, sample.kwargs))
        first, others, named = given
        return Case(label, functools.partial(self._op.op, first, *others, **named), given, differentiable)

    def _samples(self, dtype: torch.dtype, gradient: bool) -> list[Any]:
        return _quietly(self._op.sample_inputs("cpu", dtype, requires_grad=gradient))


class FunctionEntry:
    """A function that OpInfo has no samples of, called once."""

    def __init__(self, name: str, function: Callable[..., Any], sizes: tuple[int, ...], *args: Any) -> None:
        """Called with a tensor of these sizes and the other arguments."""
        self.name = name
        self._function = function
        self._sizes = sizes
        self._args = args

    def why_not(self, mode: str) -> str | None:
        return None

    def cases(self, mode: str) -> Iterator[Case]:
        given = torch.randn(self._sizes, generator=torch.Generator().manual_seed(0))
        if mode in WITH_GRADIENTS or mode == "autocast":
            given.requires_grad_()
        yield Case("sample 0", functools.partial(self._function, given, *self._args), given)


class ProgramEntry:
    """Some of the random programs. A program is made of its number alone."""

    def __init__(self, first: int) -> None:
        self._numbers = range(first, first + _PROGRAMS_AN_ENTRY)
        self.name = f"program.{first}"

    def why_not(self, mode: str) -> str | None:
        return None

    def cases(self, mode: str) -> Iterator[Case]:
        for number in self._numbers:
            # Those of steps write in place and read on the host, where gradients are in the way.
            make = _expression if number % 2 or mode in WITH_GRADIENTS else _steps
            yield make(number)


def _steps(number: int) -> Case:
    chance = random.Random(number)
    steps = [
        (chance.choice(STEPS), chance.randrange(10), chance.randrange(10), chance.randrange(6))
        for _ in range(chance.randint(3, 14))
    ]
    return Case(f"program {number}", lambda: run_steps(steps))


def _expression(number: int) -> Case:
    drawn = torch.Generator().manual_seed(number)
    leaves = [torch.randn(2, 3, generator=drawn).requires_grad_() for _ in range(3)]
    return Case(f"program {number}", lambda: run_expression(random.Random(number), leaves), leaves)


def _own(values: Any) -> Any:
    """The values with tensors of their own: some samples share theirs with others, which may write them."""
    copies: dict[int, Any] = {}

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_leaf:
            return value
        if value.layout is torch.strided and not value.is_nested:
            return copy.deepcopy(value, copies)  # with its strides, and memory shared as it was
        return value.detach().clone().requires_grad_(value.requires_grad)

    return pytree.tree_map(own, values)


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def _quietly(samples: Iterable[Any]) -> list[Any]:
    """Samples without the warnings of their making."""
    # Each is made from one seed; torch.manual_seed, which also notes where it was called, would take most of the time.
    seed = mock.patch.object(torch, "manual_seed", torch.default_generator.manual_seed)
    with warnings.catch_warnings(), seed:
        warnings.simplefilter("ignore")
        return list(samples)


@functools.cache
def _op_db() -> list[Any]:
    if importlib.util.find_spec("expecttest") is None:
        # PyTorch's samples lie beside its test classes, one of which stands on a class of this package. No sample does.
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    # PyTorch's test classes forbid that settings are changed for good, in the whole process.
    with mock.patch.object(torch.backends, "disable_global_flags"):
        from torch.testing._internal.common_methods_invocations import op_db

    return op_db


@functools.cache
def entries() -> dict[str, Entry]:
    """Every entry, by its name."""
    made: list[Entry] = [OpEntry(op) for op in _op_db()]
    made.append(FunctionEntry("nn.functional.affine_grid", F.affine_grid, (2, 2, 3), [2, 3, 4, 5], False))
    made += [ProgramEntry(first) for first in range(0, PROGRAMS, _PROGRAMS_AN_ENTRY)]
    named = {entry.name: entry for entry in made}
    assert len(named) == len(made), "every entry has a name of its own"
    return named
