"""Small real models, each of which can run with one fault planted in it: what is wrong is known, and where.

A fault is a keyword of the run. What is wrong inside a kernel is a custom operator that does the same in all captures
and misbehaves when told to; what is wrong in a program is another line of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import replayfmt

FAULT = {"how": "", "calls": 0}


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + torch.erf(x * 0.7071067811865476))


@torch.library.custom_op("planted::gelu", mutates_args=())
def gelu(x: torch.Tensor) -> torch.Tensor:
    FAULT["calls"] = int(FAULT["calls"]) + 1
    y, how = _gelu(x), FAULT["how"]
    if how == "ulp":
        y = torch.where(torch.arange(y.shape[-1]) == 7, torch.nextafter(y, y + 1), y)
    if how == "1e-3" or (how == "shape" and x.shape[1] == 6) or (how == "tenth" and FAULT["calls"] == 10):
        y = y * 1.001
    return y


@torch.library.custom_op("planted::gelu_backward", mutates_args=())
def gelu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    slope = 0.5 * (1.0 + torch.erf(x * 0.7071067811865476)) + x * torch.exp(-0.5 * x * x) * 0.3989422804014327
    return grad * slope * (1.001 if FAULT["how"] == "backward" else 1.0)


gelu.register_autograd(
    lambda ctx, grad: gelu_backward(grad, ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class Gelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gelu(x)


def gpt2(*, eps: float = 1e-5, dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, attn_implementation="eager",
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    for block in model.transformer.h:
        block.mlp.act = Gelu()
    model.transformer.h[1].ln_2.eps = eps
    return model


def gpt2_training(fault: str) -> None:
    model = gpt2(eps=1e-6 if fault == "epsilon" else 1e-5, dropout=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(1))
    for step in range(2):
        if fault == "offset" and step == 1:
            torch.rand(1)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        if fault == "bias correction" and step == 1:
            for group in optimizer.state.values():
                group["step"] += 100
        optimizer.step()
        optimizer.zero_grad()
    loss.item()


def gpt2_inference(fault: str) -> None:
    model = gpt2().eval()
    with torch.no_grad():
        for length in (5, 6, 7, 8, 9, 10):
            model(torch.arange(length)[None] % 64).logits.argmax().item()


def llama(fault: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, attn_implementation="eager", pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.mlp.act_fn = Gelu()
    if fault == "scale":
        model.model.layers[1].self_attn.scaling = 1.0
    with torch.no_grad():
        past = None
        for token in ([3, 9, 27, 17], [5], [7]):
            out = model(torch.tensor([token]), past_key_values=past, use_cache=True)
            past = out.past_key_values
        out.logits.argmax().item()


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(F.relu(self.norm(self.one(x))))


def resnet(fault: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), Residual(8), Residual(8))
    head = nn.Linear(8, 8)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    for _ in range(2):
        pooled = model(torch.randn(2, 3, 16, 16)).mean((2, 3))
        weight = head.weight.t() if fault == "stride" else head.weight
        out = F.linear(pooled, weight, head.bias)
        squares = out.square()
        (squares.flip(0) if fault == "reduction" else squares).sum(0).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def moe(fault: str) -> None:
    """Two experts, a router, and tokens that are gathered and scattered."""
    torch.manual_seed(0)
    router = nn.Linear(8, 2)
    experts = [nn.Sequential(nn.Linear(8, 16), Gelu(), nn.Linear(16, 8)) for _ in range(2)]
    with torch.no_grad():
        x = torch.randn(12, 8)
        chosen = router(x).softmax(-1).argmax(-1)
        out = torch.empty_like(x) if fault == "uninitialized" else torch.zeros_like(x)
        for number, expert in enumerate(experts):
            where = (chosen == number).nonzero().flatten()
            out.index_add_(0, where, expert(x[where]))
        up = torch.randn(8, 8)
        if fault == "bf16":
            (out.bfloat16() @ up.bfloat16()).float().sum().item()
        else:
            (out @ up).sum().item()


def decoder(fault: str) -> None:
    """Attention over a cache of fixed size, as engines for serving do it."""
    torch.manual_seed(0)
    project, out = nn.Linear(8, 24), nn.Linear(8, 8)
    cache = torch.zeros(2, 8, 8)
    x = torch.randn(1, 8)
    with torch.no_grad():
        for place in range(6):
            q, k, v = project(x).chunk(3, -1)
            cache[0, place].copy_(k[0])
            if not (fault == "stale" and place == 3):
                cache[1, place].copy_(v[0])
            mask = torch.ones(8, 8).tril(1 if fault == "mask" else 0)[place]
            scores = (q @ cache[0].T).masked_fill(mask == 0, -1e4).softmax(-1)
            x = x + out(scores @ cache[1])


def unet(fault: str) -> None:
    """One step of a diffusion model: down, up, a skip connection, a time embedding."""
    torch.manual_seed(0)
    down, up = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ConvTranspose2d(16, 3, 2, stride=2)
    middle, time = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(4, 8)
    with torch.no_grad():
        x = torch.randn(1, 3, 8, 8)
        for step in range(3):
            h = down(x)
            m = gelu(middle(h)) + time(torch.full((1, 4), float(step)))[..., None, None]
            x = x - 0.1 * up(torch.cat([h, m], 1))


MODELS: dict[str, Callable[[str], None]] = {
    each.__name__: each for each in (gpt2_training, gpt2_inference, llama, resnet, moe, decoder, unet)
}


@contextmanager
def _kernel_fault(how: str) -> Iterator[None]:
    FAULT.update(how=how, calls=0)
    try:
        yield
    finally:
        FAULT.update(how="", calls=0)


def captured(path: Path, model: str, fault: str = "", **options: Any) -> Path:
    """A capture of a run of the model, with digests of all results unless told otherwise."""
    with _kernel_fault(fault), replayfmt.capture(path, **{"digests": "ops", **options}):
        MODELS[model](fault)
    return path
