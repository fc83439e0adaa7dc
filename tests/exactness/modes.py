"""The modes that a case is run in, and what a run leaves: results, gradients, warnings, exception, random states."""

from __future__ import annotations

import random
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from .outcomes import Facts, facts_of

MODES = ("plain", "grad", "create_graph", "inference", "autocast")
WITH_GRADIENTS = ("grad", "create_graph")  # these ask for a gradient; autocast takes one where there is one
_SEED = 20


@dataclass
class Case:
    """Something to run once: it may change its inputs. `differentiable` picks of the result what has one gradient."""

    label: str
    program: Callable[[], Any]
    inputs: Any = ()
    differentiable: Callable[[Any], Any] = lambda result: result


@dataclass
class Ran:
    """What a run left. Tensors are as they were returned; nothing was computed with them."""

    case: Case
    values: dict[str, Any] = field(default_factory=dict)
    raised: dict[str, str] = field(default_factory=dict)
    warned: list[str] = field(default_factory=list)
    states: dict[str, Any] = field(default_factory=dict)

    def facts(self) -> Facts:
        """See facts_of."""
        tensors = [leaf for leaf in pytree.tree_leaves(self.case.inputs) if isinstance(leaf, torch.Tensor)]
        facts = facts_of({**self.values, **{f"input[{index}]": tensor for index, tensor in enumerate(tensors)}})
        facts |= {("exception", aspect): text for aspect, text in self.raised.items()}
        facts["warnings", "texts"] = self.warned
        facts |= facts_of({f"state: {name}": value for name, value in self.states.items()})
        return facts


def run(case: Case, mode: str) -> Ran:
    """Run a case, from the same random states each time."""
    ran = Ran(case)
    torch.default_generator.manual_seed(
        _SEED
    )  # torch.manual_seed also notes where it was called, at a hundred times the cost
    random.seed(_SEED)
    np.random.seed(_SEED)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _RUNS[mode](case, ran.values)
        except Exception as error:
            ran.raised = {"type": type(error).__qualname__, "message": str(error), "frames": _frames(error)}
    ran.warned = [f"{warning.category.__name__}: {warning.message}" for warning in caught]
    ran.states = {
        "random numbers": torch.get_rng_state(),
        "random": hash(random.getstate()),
        "numpy.random": hash(np.random.get_state()[1].tobytes()),  # type: ignore[union-attr]
        "settings": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
    }
    return ran


def _frames(error: BaseException) -> str:
    """The functions that an exception came through, below this module's."""
    places = traceback.extract_tb(error.__traceback__)
    return " ".join(
        f"{place.filename.rpartition('/')[2]}:{place.name}" for place in places if place.filename != __file__
    )


def _leaves(inputs: Any) -> list[torch.Tensor]:
    return [
        leaf
        for leaf in pytree.tree_leaves(inputs)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_leaf
    ]


def _outputs(case: Case, result: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(case.differentiable(result))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _directions(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.randn_like(t) if t.layout is torch.strided else torch.ones_like(t) for t in tensors]


def _plain(case: Case, values: dict[str, Any]) -> None:
    values["result"] = case.program()


def _grad(case: Case, values: dict[str, Any]) -> None:
    values["result"] = case.program()
    outputs = _outputs(case, values["result"])
    if outputs:
        torch.autograd.backward(outputs, _directions(outputs))  # the gradients are those of the inputs then


def _create_graph(case: Case, values: dict[str, Any]) -> None:
    leaves = _leaves(case.inputs)
    values["result"] = case.program()
    outputs = _outputs(case, values["result"])
    if not outputs or not leaves:
        return
    given = _directions(outputs)
    first = torch.autograd.grad(outputs, leaves, given, create_graph=True, allow_unused=True)
    values["gradient"] = first
    again = [gradient for gradient in first if gradient is not None and gradient.requires_grad]
    if again:
        values["second gradient"] = torch.autograd.grad(again, leaves, _directions(again), allow_unused=True)


def _inference(case: Case, values: dict[str, Any]) -> None:
    with torch.inference_mode():
        values["result"] = case.program()


def _autocast(case: Case, values: dict[str, Any]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        values["result"] = case.program()
    outputs = _outputs(case, values["result"])
    if outputs:
        torch.autograd.backward(outputs, _directions(outputs))


_RUNS: dict[str, Callable[[Case, dict[str, Any]], None]] = {
    "plain": _plain,
    "grad": _grad,
    "create_graph": _create_graph,
    "inference": _inference,
    "autocast": _autocast,
}


@contextmanager
def settled() -> Iterator[None]:
    """One thread, and every warning each time: else the first run of all would differ from the others."""
    threads, always = torch.get_num_threads(), torch.is_warn_always_enabled()
    torch.set_num_threads(1)
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_warn_always(always)
