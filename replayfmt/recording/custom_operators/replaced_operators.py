"""PyTorch's own operators for which the program has kernels of its own, written in Python.

Libraries of Triton kernels register such kernels in the place of PyTorch's (`torch.library.Library("aten", "IMPL")`). A
replay calls PyTorch's kernel, so a call of such an operator is recorded as the operators and launches inside it.
Kernels for gradients and casts run above the recorder, which sees what they call in any case.
"""

from __future__ import annotations

import os
import re

import torch

_KEYS = ("CPU", "CUDA", "XPU", "MPS", "HPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
_PYTORCH = os.path.dirname(torch.__file__) + os.sep
_FOR_PROGRAMS = os.path.join(_PYTORCH, "library.py")  # where `torch.library.impl` registers what programs give it


def is_replaced(name: str) -> bool:
    """Whether the program has a kernel of its own for one of PyTorch's operators (`aten::mul.Tensor`)."""
    return any(kernel_is_programs(name, key) for key in _KEYS)


def kernel_is_python(name: str, key: str) -> bool:
    """Whether the kernel of any operator for a dispatch key is a Python function."""
    operator = name.replace("::", "/")
    keys = (key, "") if key == "CompositeImplicitAutograd" else (key,)
    return any(f"{operator}/{each}" in torch.library._impls for each in keys)


def kernel_is_programs(name: str, key: str) -> bool:
    """Whether the kernel for a dispatch key is such a kernel."""
    if not kernel_is_python(name, key):
        return False
    place = re.search(rf"^{key}: registered at (.*):\d+", torch._C._dispatch_dump(name), re.MULTILINE)
    return place is not None and (place[1] == _FOR_PROGRAMS or not place[1].startswith(_PYTORCH))
