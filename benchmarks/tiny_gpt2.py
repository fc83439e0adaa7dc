"""The launch-bound model that the benchmarks share: GPT-2 with 6 layers, width 64, on 16 tokens, random weights.

Its operators take a few microseconds each, so what is measured is the cost of issuing them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def model(layers: int = 6, width: int = 64, positions: int = 16, vocabulary: int = 256) -> GPT2LMHeadModel:
    """A GPT-2 with random weights, in evaluation mode."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=4,
        n_positions=positions,
        vocab_size=vocabulary,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()


def forward() -> Callable[[], None]:
    """One forward pass, without gradients."""
    network = model()
    tokens = torch.randint(256, (1, 16))

    def run() -> None:
        with torch.no_grad():
            network(input_ids=tokens, use_cache=False)

    return run


def training_step() -> Callable[[], None]:
    """One training step with AdamW, one small operator after the other (foreach=False)."""
    network = model().train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, foreach=False)
    tokens = torch.randint(256, (1, 16))

    def run() -> None:
        optimizer.zero_grad()
        network(input_ids=tokens, use_cache=False).logits.logsumexp(-1).mean().backward()
        optimizer.step()

    return run


def operators(run: Callable[[], None]) -> int:
    """How many operators one call of `run` dispatches."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    with Counting() as counting:
        run()
    return counting.count
