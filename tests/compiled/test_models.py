"""Compiled models: captured as their kernels, and replayed bit for bit in a process without PyTorch's compilers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .conftest import Capture

pytestmark = pytest.mark.slow

# Replays a capture bit for bit, and says which of the modules that it imported must not be needed.
REPLAY = """
import sys
from replayfmt.replay.plan import Plan
with Plan(sys.argv[1], allow_code=True) as plan:
    result = plan.execute(verify="bitwise")
    print(result.outcome, result.verification.digests > 0, *result.notes, sep="; ")
print([name for name in sys.modules if name.partition(".")[2].split(".")[0] in ("_dynamo", "_inductor")])
"""


def gpt2() -> Callable[[], Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    return training(GPT2LMHeadModel(config))


def llama() -> Callable[[], Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8,
    )
    model, tokens = LlamaForCausalLM(config).eval(), torch.randint(0, 32, (2, 6))
    compiled = torch.compile(model)

    def infer() -> Tensor:
        with torch.no_grad():
            return compiled(tokens, use_cache=False).logits

    return infer


def training(model: nn.Module) -> Callable[[], Any]:
    """A step with AdamW, forward, backward and update compiled."""
    tokens = torch.randint(0, 32, (2, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled, update = torch.compile(model), torch.compile(optimizer.step)

    def step() -> list[Tensor]:
        loss = compiled(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        update()
        optimizer.zero_grad()
        return [loss.detach(), *(each.detach() for each in model.parameters())]

    return step


class Residual(nn.Module):
    """A small ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.out = nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)))
        return self.out((y + self.second(y)).mean((2, 3)))


def resnet() -> Callable[[], Any]:
    model = Residual().eval()
    compiled, x = torch.compile(model), torch.randn(2, 3, 8, 8)

    def infer() -> Tensor:
        with torch.no_grad():
            return compiled(x)

    return infer


@pytest.mark.parametrize("make", [pytest.param(gpt2, marks=pytest.mark.sweep), llama, resnet])
def test_a_model_is_captured_with_its_kernels_and_replays_without_the_compiler(
    make: Callable[[], Callable[[], Any]], capture: Capture
) -> None:
    run = make()
    run()
    captured = capture(run)
    assert captured.unsupported() == []
    called, written = captured.kernels(), captured.written_calls()
    of_libraries = [each for each in written if not each.startswith(("cpp_fused", "empty_strided"))]
    assert of_libraries and not set(of_libraries) - set(called)
    assert [each for each in called if each.startswith("cpp_fused")] == [
        each for each in written if each.startswith("cpp_fused")
    ]
    assert [each for each in called if each in of_libraries] == of_libraries or make is gpt2  # its loss calls some, too
    done = subprocess.run(
        [sys.executable, "-c", REPLAY, str(captured.path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    replayed, modules = done.stdout.splitlines()
    assert replayed.startswith("ok; True") and "run from the stored library" in replayed
    assert modules == "[]"
