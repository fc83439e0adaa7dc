"""Finding ops that differ from themselves: each op is run twice on the same inputs and its results are compared.

Done after a mismatch, up to the place where it showed, to tell a wrong replay from an op that no replay can reproduce.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from replayfmt.pytorch.memory import storage_bytes

from .copies import copied, moved, storages_of
from .execute import Machine
from .steps import Step, Touched

_MOST_REPORTED = 10
_PATIENCE_S = 60.0


def find_nondeterministic(steps: Iterable[Step], machine: Machine, generators: Sequence[torch.Generator | None],
                          patience_s: float = _PATIENCE_S) -> tuple[str, ...]:
    """Sentences that name the ops; the last one says so where the search was given up after `patience_s` seconds."""
    found: list[str] = []
    unique = [generator for generator in generators if generator is not None]
    began = time.monotonic()
    for step in steps:
        machine.prepare(step.window)
        inputs = machine.take(step.window)
        if step.op is None:
            outputs = machine.call(step.window, inputs, None)
        else:
            difference, outputs = _twice(step, step.op, inputs, machine.call, unique)
            if difference is not None:
                name, _scope = machine.describe(step.ordinal)
                found.append(f"ordinal {step.ordinal} ({name}): {difference}")
        machine.values.update(zip(step.window.outputs, outputs, strict=True))
        if len(found) == _MOST_REPORTED:
            return (*found, f"the search ended there, at ordinal {step.ordinal}")
        if time.monotonic() - began > patience_s:
            return (*found, f"the search was given up at ordinal {step.ordinal}, after {patience_s:.0f} s")
    return tuple(found)


def _twice(step: Step, touched: Touched, inputs: list[Any], call: Callable[..., list[Any]],
           generators: list[torch.Generator]) -> tuple[str | None, list[Any]]:
    """How an op's second run differs from its first, and the second run's outputs."""
    keys = step.window.inputs
    written = [index for index, key in enumerate(keys) if key in touched.written_keys]
    copies = moved(inputs, {at: copied(storage) for at, storage in storages_of(inputs, written).items()})
    before = [generator.get_state() for generator in generators]
    first = call(step.window, list(copies), None)
    for generator, state in zip(generators, before, strict=True):
        generator.set_state(state)
    kept = [inputs[index] for index in written]
    second = call(step.window, inputs, None)
    pairs = list(zip((copies[index] for index in written), kept, strict=True))
    if touched.fills:
        pairs += zip(first, second, strict=True)
    for one, other in pairs:
        difference = _difference(one, other)
        if difference is not None:
            return difference, second
    return None, second


def _difference(one: Any, other: Any) -> str | None:
    if not isinstance(one, torch.Tensor) or one.layout is not torch.strided or one.is_quantized:
        return None
    if one.dtype != other.dtype or one.shape != other.shape:
        return "its results have other shapes"
    left, right = one.contiguous(), other.contiguous()
    if storage_bytes(left.untyped_storage()) == storage_bytes(right.untyped_storage()):
        return None
    unequal = (left != right) & ~(left.isnan() & right.isnan())
    count = int(unequal.sum())
    if not count:
        return None
    largest = float((left.to(torch.float64) - right.to(torch.float64)).abs().nan_to_num().max())
    return f"{count} of {left.numel()} elements differ, by at most {largest:.3g}"
