"""Random programs with gradients: each draws its operators, with views, writes in place and branches between them."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor
# What takes two tensors of two rows and three columns and gives one, which may be a view on the first.
_STEPS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a + b * 0.5,
    lambda a, b: a * b,
    lambda a, b: a / (b.abs() + 1),
    lambda a, b: a @ b.t() @ a,
    lambda a, b: torch.where(a > b, a, -b),
    lambda a, b: torch.cat([a, b])[1:3],
    lambda a, b: torch.stack([a, b]).amax(0),
    lambda a, b: torch.addmm(a, b[:, :2], b),
    lambda a, b: torch.maximum(a, b).cumsum(1),
    lambda a, b: a.sin().mul_(b),
    lambda a, b: a.clone().index_add_(0, torch.tensor([1, 0]), b),
    lambda a, b: a.clone().masked_fill_(b > 0, 0.0),
    lambda a, b: torch.atan2(a, b),
    lambda a, b: F.linear(a, torch.eye(3) * 0.5, b[0]),
    lambda a, b: F.layer_norm(a, (3,), b[0], b[1]),
    lambda a, b: F.conv1d(a[None], b[:, None, :1].expand(2, 2, 1))[0],
    lambda a, b: F.scaled_dot_product_attention(a[None], b[None], a[None])[0],
    lambda a, b: F.softmax(a, -1) * F.log_softmax(b, 0),
    lambda a, b: F.dropout(a, 0.3) + F.gelu(b),
    lambda a, b: F.silu(a) - F.elu(b, inplace=False),
    lambda a, b: F.embedding(torch.tensor([1, 0]), a) + b.flip(0),
    lambda a, b: F.mse_loss(a, b) * a,
    lambda a, b: torch.einsum("ij,kj->ik", a, b).repeat(1, 2)[:, :3],
    lambda a, b: torch.vmap(lambda row: row * row.sum())(a),
    lambda a, b: checkpoint(lambda x, y: x.tanh() * y, a, b, use_reentrant=False),
    lambda a, b: a.double().exp().clamp(max=3).float() + b.detach(),
    lambda a, b: a.t().reshape(2, 3).relu(),
    lambda a, b: a[:, torch.tensor([2, 0, 1])] + a.var(),
    lambda a, b: a.sort(1).values - b.std(0),
    lambda a, b: a.norm() * b.sigmoid(),
    lambda a, b: a.logsumexp(0) + b.mean(1, keepdim=True),
    lambda a, b: a.to(torch.bfloat16).float() * b,
    lambda a, b: torch.view_as_real(torch.complex(a, b).exp()).sum(-1).clamp(-3, 3),
    lambda a, b: a.as_strided((2, 3), (1, 1)) * 2,
    lambda a, b: a.unfold(1, 3, 1).squeeze(1) + b.narrow(0, 0, 1),
    lambda a, b: a.scatter(1, torch.zeros(2, 1, dtype=torch.long), b[:, :1]),
    lambda a, b: a * 2 if a.sum() > b.sum() else b * 2,
    lambda a, b: torch.randn_like(a) * a + torch.rand(3) * b,
    lambda a, b: torch._foreach_mul([a, b], 0.5)[1] + a,
    lambda a, b: a.max(1, keepdim=True).values + b.min(),
]


def run_expression(chance: random.Random, leaves: list[Tensor]) -> list[Tensor]:
    """Some steps, on the leaves and what they gave so far; returns the last results."""
    pool = list(leaves)
    for _ in range(chance.randint(3, 12)):
        step = chance.choice(_STEPS)
        pool.append(step(chance.choice(pool), chance.choice(pool)))
    return pool[-3:]
