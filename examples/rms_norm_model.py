"""A small model that calls a custom operator, `demo::rms_norm`: what the kernel substitution examples replace.

opreplay-capture -o norm.opreplay examples/rms_norm_model.py
"""

import rms_norm_op
import torch

import replayfmt

torch.manual_seed(0)

with replayfmt.scope("init"):
    weights = [torch.randn(256, 256) / 16 for _ in range(4)]
    scales = [torch.rand(256) + 0.5 for _ in range(4)]
    tokens = torch.randn(2, 64, 256)

with replayfmt.scope("execute"), torch.no_grad():
    hidden = tokens
    for weight, scale in zip(weights, scales, strict=True):
        hidden = hidden + torch.tanh(rms_norm_op.rms_norm(hidden, scale) @ weight)
    last = rms_norm_op.rms_norm(hidden[:, -1], scales[0], eps=1e-5)

print(f"result {last.square().mean().item():.4f}")
