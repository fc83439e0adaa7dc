"""Registers the operator `demo::rms_norm`, written as one would first write it: one PyTorch operation after the other.

Importing this file is what makes the operator known: to the program that uses it, and to a replay of that program.
"""

import torch
from torch import Tensor


@torch.library.custom_op("demo::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(torch.float32)).to(x.dtype)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return torch.empty_like(x)
