"""Initializers, which fill storages whose content was not captured. docs/initializers.md shows how to write one.

from replayfmt.initializers import register

@register("my::lookup", argument="table")
def table(request):
    return torch.zeros(request.tensor.sizes, dtype=request.tensor.dtype)
"""

from .demands import Demand, Role
from .initializer import Call, Initializer, Request, TensorInfo, Use
from .registry import Registry, load_initializers, register, unregister

__all__ = [
    "Call",
    "Demand",
    "Initializer",
    "Registry",
    "Request",
    "Role",
    "TensorInfo",
    "Use",
    "load_initializers",
    "register",
    "unregister",
]
