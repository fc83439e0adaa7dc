"""Kernels for `demo::rms_norm` that are wrong, each in a way that is easy to write and hard to see. None gets through:

opreplay-run --replay-kernel-substitution=demo::rms_norm=examples/wrong_rms_norm.py norm.opreplay
opreplay-run --replay-kernel-substitution=demo::rms_norm=examples/wrong_rms_norm.py:in_place norm.opreplay
opreplay-run --replay-kernel-substitution=demo::rms_norm=examples/wrong_rms_norm.py:one_buffer norm.opreplay
"""

import rms_norm_op  # noqa: F401
import torch
from torch import Tensor

_buffers: dict[torch.Size, Tensor] = {}


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Divides by the standard deviation: the same as long as the mean is zero, and it nearly is."""
    return x * torch.rsqrt(x.var(-1, keepdim=True) + eps) * weight


def in_place(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Right result, but the input is gone, and the program still needs it."""
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x.mul_(scale).mul(weight)


def one_buffer(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Right result, until the next call writes over it."""
    out = _buffers.setdefault(x.shape, torch.empty_like(x))
    return torch.mul(torch.nn.functional.rms_norm(x, weight.shape, None, eps), weight, out=out)
