"""The programs of a check: a GPT-2 and a Llama, each in a training step and a decode step, in plain PyTorch.

The training steps keep a GPU busy; the decode steps, one token each with a static cache, are bound by their launches.
On the host all of them are tiny.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from figures import DEVICE, ON_GPU
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    batch: int
    length: int
    vocabulary: int


SIZE = Size(512, 8, 64, 512, 4096) if ON_GPU else Size(64, 2, 2, 32, 256)
HEAD = 64 if ON_GPU else 16


class Cache:
    """Keys and values of one layer, at static addresses."""

    def __init__(self, batch: int, heads: int, dtype: torch.dtype) -> None:
        shape = (batch, heads, SIZE.length, HEAD)
        self.keys, self.values = (torch.zeros(shape, device=DEVICE, dtype=dtype) for _ in range(2))

    def put(self, at: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys.index_copy_(2, at, keys), self.values.index_copy_(2, at, values)


class Block(nn.Module):
    """A layer; of a Llama with rotated positions, fewer heads of keys than of queries, and a gated MLP."""

    def __init__(self, llama: bool) -> None:
        super().__init__()
        width, self.llama = SIZE.width, llama
        self.heads = width // HEAD
        self.key_heads = self.heads // 2 if llama else self.heads
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.norms = nn.ModuleList(norm(width) for _ in range(2))
        self.qkv = nn.Linear(width, (self.heads + 2 * self.key_heads) * HEAD, bias=not llama)
        self.projection = nn.Linear(width, width, bias=not llama)
        self.up = nn.Linear(width, (8 if llama else 4) * width, bias=not llama)
        self.down = nn.Linear(4 * width, width, bias=not llama)

    def forward(
        self,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: Cache | None = None,
        at: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, -1, HEAD).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.key_heads, self.key_heads), 1)
        if rotation is not None:
            q, k = rotated(q, *rotation), rotated(k, *rotation)
        if cache is not None:
            assert at is not None
            k, v = cache.put(at, k, v)
        causal = cache is None
        done = scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=self.llama)
        x = x + self.projection(done.transpose(1, 2).reshape(batch, length, width))
        up = self.up(self.norms[1](x))
        if self.llama:
            gate, value = up.chunk(2, -1)
            return x + self.down(silu(gate) * value)
        return x + self.down(nn.functional.gelu(up, approximate="tanh"))


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat((one * cosine - other * sine, other * cosine + one * sine), -1)


class Model(nn.Module):
    def __init__(self, llama: bool, dtype: torch.dtype, layers: int = SIZE.layers) -> None:
        super().__init__()
        self.llama = llama
        self.tokens = nn.Embedding(SIZE.vocabulary, SIZE.width)
        self.positions = None if llama else nn.Embedding(SIZE.length, SIZE.width)
        self.blocks = nn.ModuleList(Block(llama) for _ in range(layers))
        self.norm = (nn.RMSNorm if llama else nn.LayerNorm)(SIZE.width)
        self.to(DEVICE, dtype)
        angles = torch.outer(torch.arange(SIZE.length), 10_000.0 ** (-torch.arange(0, HEAD, 2) / HEAD))
        self.rotation = tuple(each.to(DEVICE, dtype) for each in (angles.cos(), angles.sin()))

    def forward(
        self,
        tokens: torch.Tensor,
        at: torch.Tensor,
        caches: list[Cache] | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(at)
        rotation = (self.rotation[0][at], self.rotation[1][at]) if self.llama else None
        for number, block in enumerate(self.blocks):
            x = block(x, rotation, caches[number] if caches else None, at, mask)
        return self.norm(x) @ self.tokens.weight.T


class Training:
    """A training step with AdamW. `math`: with attention whose backward pass is deterministic on a GPU, too."""

    def __init__(
        self,
        llama: bool,
        *,
        math: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        batch: int = SIZE.batch,
        layers: int = SIZE.layers,
    ) -> None:
        torch.manual_seed(0)
        self.model = Model(llama, dtype, layers)
        self.run: nn.Module = self.model
        # Fused, AdamW counts its steps on the device; otherwise on the host.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=not llama)
        self.given = torch.randint(SIZE.vocabulary, (batch, SIZE.length)).to(DEVICE)
        self.at, self.math = torch.arange(SIZE.length, device=DEVICE), math

    def step(self) -> None:
        with sdpa_kernel(SDPBackend.MATH) if self.math else contextlib.nullcontext():
            logits = self.run(self.given, self.at)
            self.loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), self.given[:, 1:].flatten())
            self.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> list[torch.Tensor]:
        return [self.loss, *self.model.parameters()]


class Decoding:
    """A decode step: one token for each sequence, the most likely one next."""

    def __init__(self, llama: bool, *, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(0)
        self.model = Model(llama, dtype).eval()
        batch = 4 if ON_GPU else 2
        self.caches = [Cache(batch, block.key_heads, dtype) for block in self.model.blocks]  # type: ignore[arg-type]
        self.token = torch.randint(SIZE.vocabulary, (batch, 1)).to(DEVICE)
        self.at = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        self.places = torch.arange(SIZE.length, device=DEVICE)

    @torch.no_grad()
    def step(self) -> None:
        logits = self.model(self.token, self.at, self.caches, (self.places <= self.at)[None, None, None])
        self.token.copy_(logits[:, -1:].argmax(-1))
        self.at.add_(1).remainder_(SIZE.length)

    def state(self) -> list[torch.Tensor]:
        return [self.token, self.at, *(each for cache in self.caches for each in (cache.keys, cache.values))]


def program(name: str, *, math: bool = False) -> Training | Decoding:
    """One of goals.PROGRAMS, afresh."""
    model, kind = name.split()
    return Training(model == "Llama", math=math) if kind == "training" else Decoding(model == "Llama")
