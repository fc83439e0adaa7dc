"""A replacement for vLLM's rotary embedding, in plain PyTorch: rotates queries and keys in place (docs/serving.md)."""

import torch


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox, rope_dim_offset=0, inverse=False):
    cos, sin = cos_sin_cache[positions].float().chunk(2, -1)
    for each in (query, key):
        if each is not None:
            heads = each.view(*each.shape[:-1], -1, head_size) if each.dim() == 2 else each
            one, other = heads.float().chunk(2, -1)
            c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
            heads.copy_(torch.cat((one * c - other * s, other * c + one * s), -1))
