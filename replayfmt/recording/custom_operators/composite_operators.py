"""Which operators are recorded whole, and which as the parts that they call.

A composite of PyTorch's own is what its parts are. One of another package is a kernel: what its function does to memory
itself is seen in no part.
"""

from __future__ import annotations

import torch

INTERNAL_NAMESPACES = ("aten", "prim", "prims", "quantized", "mkldnn", "mkl", "_quantized")

# Whose composites are what their parts are. Those of other packages are kernels: what they do themselves is not seen.
PYTORCH_NAMESPACES = (
    *INTERNAL_NAMESPACES, "inductor", "sparse", "onednn", "mkldnn_prepacked", "static_runtime", "_test", "fsdp",
    "quantized_decomposed",
)
# Those of PyTorch's that do work of their own, through addresses, which is seen in none of their parts.
_DO_WORK_THEMSELVES = frozenset(
    f"aten::_sobol_engine_{what}" for what in ("draw", "ff_", "scramble_", "initialize_state_")
)

# Composites for which these backends may have a kernel of their own, which the dispatcher then prefers to the parts.
_BACKENDS = (
    "CPU", "CUDA", "Meta", "SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA", "QuantizedCPU", "QuantizedCUDA",
    "NestedTensorCPU", "NestedTensorCUDA",
)


def comes_whole(name: str) -> bool:
    """Whether an operator is recorded as the one kernel that it is, although it may be a composite."""
    return name.partition("::")[0] not in PYTORCH_NAMESPACES or name in _DO_WORK_THEMSELVES


def is_composite_operator(name: str) -> bool:
    """Whether an overload (`aten::add.Tensor`) has a kernel that stands for its parts, gradients included."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def own_backends(name: str) -> tuple[str, ...]:
    """The backends for which a composite has a kernel of its own beside its parts."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    nested = has(name, "CompositeImplicitAutogradNestedTensor")
    return tuple(key for key in _BACKENDS if has(name, key) or (nested and key.startswith("Nested")))


def overload_of(name: str) -> torch._ops.OpOverload:
    """The overload of a qualified name (`aten::add.Tensor`, `aten::mm`), which must be registered."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
