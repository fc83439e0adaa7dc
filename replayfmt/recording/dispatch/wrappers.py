"""Tensors that wrap others, and the plain tensors that a tensor consists of."""

from __future__ import annotations

import torch

from replayfmt.format.codes import Layout
from replayfmt.pytorch.tensors.composites import is_composite, take_apart
from replayfmt.pytorch.tensors.dtypes import TORCH_LAYOUT
from replayfmt.pytorch.tensors.looks import layout_of
from replayfmt.pytorch.tensors.memory import call_undispatched


def dispatches_itself(kind: type) -> bool:
    """Whether a tensor class has a `__torch_dispatch__` of its own."""
    dispatch = kind.__torch_dispatch__  # type: ignore[attr-defined]
    return dispatch is not torch.Tensor.__torch_dispatch__ and dispatch is not torch._C._disabled_torch_dispatch_impl


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor wraps others, whose operators arrive one by one."""
    return dispatches_itself(type(tensor))


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A strided tensor itself, or the tensors that a composite consists of; none for a tensor without memory of its
    own."""
    if is_wrapper(tensor) or layout_of(tensor) is TORCH_LAYOUT[Layout.mkldnn]:
        return []
    if not is_composite(tensor):
        return [tensor]
    try:
        _form, parts = call_undispatched(take_apart, tensor)
    except TypeError:
        return []
    return [part for part in parts if isinstance(part, torch.Tensor)]
