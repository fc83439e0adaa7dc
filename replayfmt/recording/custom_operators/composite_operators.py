"""Which operators are composites, and for which backends they have a kernel of their own.

A PyTorch composite is equivalent to its parts (replayfmt.pytorch.operators says whose an operator is). A composite of
another package is treated as a kernel: what its function itself does to memory does not show in its parts.
"""

from __future__ import annotations

import torch

# Backends that may have their own kernel for a composite; the dispatcher then prefers it to the parts.
_BACKENDS = (
    "CPU",
    "CUDA",
    "Meta",
    "SparseCPU",
    "SparseCUDA",
    "SparseCsrCPU",
    "SparseCsrCUDA",
    "QuantizedCPU",
    "QuantizedCUDA",
    "NestedTensorCPU",
    "NestedTensorCUDA",
)


def is_composite_operator(name: str) -> bool:
    """Whether an overload (`aten::add.Tensor`) has a kernel that stands for its parts, gradients included."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def own_backends(name: str) -> tuple[str, ...]:
    """The backends for which a composite has a kernel of its own besides its parts."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    nested = has(name, "CompositeImplicitAutogradNestedTensor")
    return tuple(key for key in _BACKENDS if has(name, key) or (nested and key.startswith("Nested")))
