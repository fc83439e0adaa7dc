"""Which operators are composites, and for which backends such a one is a kernel.

A composite of PyTorch's own is what its parts are (replayfmt.pytorch.operators says whose). One of another package is a
kernel: what its function does to memory itself does not show in its parts.
"""

from __future__ import annotations

import torch

# Composites for which these backends may have a kernel of their own, which the dispatcher then prefers to the parts.
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
