"""PyTorch's own operators for which the program has kernels of its own.

Libraries of Triton kernels register such kernels in the place of PyTorch's (`torch.library.Library("aten", "IMPL")`),
extensions register them in C++ (`TORCH_LIBRARY_IMPL(aten, CPU, m)`). A replay calls PyTorch's kernel, so a call of such
an operator is recorded as the operators and launches inside it. Kernels for gradients and casts run above the recorder,
which sees what they call in any case.
"""

from __future__ import annotations

import functools
import os
import re

import torch

_KEYS = ("CPU", "CUDA", "XPU", "MPS", "HPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
_PYTORCH = os.path.dirname(torch.__file__) + os.sep
_FOR_PROGRAMS = os.path.join(_PYTORCH, "library.py")  # where `torch.library.impl` registers what programs give it
# As the dispatcher prints a kernel that is in use, and where PyTorch's own in C++ are registered, in any build of it.
_KERNEL = re.compile(rf"^({'|'.join(_KEYS)})(?:\[alias\])?: (?:fallthrough )?registered at (.*?):\d+", re.MULTILINE)
_IN_PYTORCHS_SOURCE = re.compile(r"(?:^|/)(?:aten/src/ATen|torch/csrc)/")


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
        return key in _replaced_in_cpp(name)
    place = _places(name).get(key)
    return place is not None and (place == _FOR_PROGRAMS or not place.startswith(_PYTORCH))


def forget_libraries() -> None:
    """A library was loaded, which may have registered kernels."""
    _replaced_in_cpp.cache_clear()


@functools.cache
def _replaced_in_cpp(name: str) -> frozenset[str]:
    """The keys for which an extension has a kernel. (Asking the dispatcher takes 50 us.)"""
    return frozenset(
        key
        for key, place in _places(name).items()
        if not (place.startswith(_PYTORCH) or _IN_PYTORCHS_SOURCE.search(place))
    )


def _places(name: str) -> dict[str, str]:
    """Where the kernels of an operator were registered, by dispatch key."""
    return dict(_KERNEL.findall(torch._C._dispatch_dump(name)))
