"""Numbers passed where an operator takes tensors.

C++ code wraps a number as a tensor to call an operator with it (`expand` of what is added to a ZeroTensor, traces of
TorchScript). To a dispatch mode it comes as a number, which operators refuse when they are called from Python.
"""

from __future__ import annotations

from typing import Any

import torch

from replayfmt.pytorch.tensors.memory import call_undispatched

from .kernels import CapturedKernel

_NUMBERS: dict[type, torch.dtype] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}


def with_tensors(kernel: CapturedKernel, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of an operator with tensors for the numbers in their places."""
    places = [index for index in kernel.tensor_places if index < len(args) and type(args[index]) in _NUMBERS]
    if not places:
        return args
    made = list(args)
    for index in places:
        made[index] = call_undispatched(torch.scalar_tensor, args[index], dtype=_NUMBERS[type(args[index])])
    return tuple(made)
