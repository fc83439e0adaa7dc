"""Which operators are composites, and for which backends they have a kernel of their own.

A PyTorch composite is equivalent to its parts (replayfmt.pytorch.operators says whose an operator is). A composite of
another package is treated as a kernel: what its function itself does to memory does not show in its parts.
"""

from __future__ import annotations

import torch

from ..state.autocast import BACKENDS


def _is_key(name: str) -> bool:
    """Whether the dispatcher knows a key by this name: it does not parse all that its enumeration has."""
    try:
        torch._C._dispatch_has_kernel_for_dispatch_key("aten::add.Tensor", name)
    except RuntimeError:
        return False
    return name in torch._C.DispatchKey.__members__


# Keys that may have their own kernel for a composite; the dispatcher then prefers it to the parts.
_KEYS = tuple(
    key
    for layout in ("", "Sparse", "SparseCsr", "Quantized", "NestedTensor")
    for key in (f"{layout}{backend}" for backend in BACKENDS)
    if _is_key(key)
)


def is_composite_operator(name: str) -> bool:
    """Whether an overload (`aten::add.Tensor`) has a kernel that stands for its parts, gradients included."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def own_backends(name: str) -> tuple[str, ...]:
    """The dispatch keys for which a composite has a kernel of its own besides its parts."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    nested = has(name, "CompositeImplicitAutogradNestedTensor")
    return tuple(key for key in _KEYS if has(name, key) or (nested and key.startswith("Nested")))
