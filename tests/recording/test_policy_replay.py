"""Captures whose content was left out replay their shapes and kernels, say that nothing was verified, and fail loudly
where what they compute decides what comes next."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import replayfmt
from replayfmt.errors import OpReplayError
from replayfmt.replay.plan import Plan

from .conftest import Capture, Captured


def training_step() -> Any:
    torch.manual_seed(3)
    embedding, layer = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 16)
    tokens = torch.tensor([[1, 2, 30, 4]])
    optimizer = torch.optim.AdamW([*embedding.parameters(), *layer.parameters()])

    def step() -> Any:
        optimizer.zero_grad()
        hidden = torch.nn.functional.dropout(layer(embedding(tokens)), 0.1)
        loss = torch.nn.functional.cross_entropy(hidden[0], tokens[0] % 16)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


@pytest.mark.parametrize("payload", ["integers", "none"])
def test_a_training_step_runs_without_its_content(capture: Capture, payload: str) -> None:
    captured = capture(training_step(), payload=payload)
    with Plan(captured.path) as plan:
        result = plan.execute(verify="auto")
        assert result.outcome == "ok"
        assert "not verified" in str(result.verification)
        with pytest.raises(OpReplayError):
            plan.execute(verify="bitwise")


@pytest.mark.parametrize("payload", ["integers", "none"])
def test_sizes_that_depend_on_content_are_not_taken_for_granted(capture: Capture, payload: str) -> None:
    values = torch.tensor([-1.0, 50.0, 100.0]).repeat(20)

    def program() -> Any:
        return (values == 50).nonzero().shape  # no statistics tell that

    captured = capture(program, payload=payload)
    assert outcome_of(captured) != "ok"


def outcome_of(captured: Captured) -> str:
    try:
        with Plan(captured.path) as plan:
            return plan.execute(verify="auto").outcome
    except OpReplayError as error:
        return type(error).__name__


def test_the_same_content_is_synthesized_each_time(capture: Capture) -> None:
    weights = torch.randn(6, 6) * 3 + 100
    captured = capture(lambda: weights.sum(), payload="integers")
    with replayfmt.open(captured.path) as opened:
        (op,) = opened.ops
        first, second = op.replay(), op.replay()
    assert torch.equal(first, second)
    assert float(first) == pytest.approx(float(weights.sum()), rel=0.05)  # it resembles what it stands for
