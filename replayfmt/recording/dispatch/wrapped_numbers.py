"""Numbers passed where an operator takes tensors.

C++ code wraps a number as a tensor to call an operator with it (`expand` of what is added to a ZeroTensor, traces of
TorchScript). A dispatch mode receives it as a number, which operators reject when called from Python.
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
    """The arguments of an operator, with numbers in tensors' places turned into tensors."""
    places = [index for index in kernel.tensor_places if index < len(args) and type(args[index]) in _NUMBERS]
    if not places:
        return args
    made = list(args)
    for index in places:
        made[index] = call_undispatched(torch.scalar_tensor, args[index], dtype=_NUMBERS[type(args[index])])
    return tuple(made)
