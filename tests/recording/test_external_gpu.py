"""Copies of files on a GPU: found by content, synthesized from statistics taken there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from replayfmt.replay.plan import Plan

from .conftest import Capture
from .external import origins, range_bytes, recipes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    save_file({"up": torch.randn(64, 64), "down": torch.randn(64, 64)}, path)
    return path


def test_copies_on_a_gpu_refer_to_the_named_file(capture: Capture, saved: Path) -> None:
    loaded = {name: tensor.cuda() for name, tensor in load_file(saved).items()}
    captured = capture(lambda: loaded["up"] @ loaded["down"], digests="ops", files=[saved])
    assert origins(captured) == ["external_file"] * 2
    assert range_bytes(captured)[0] == loaded["up"].cpu().numpy().tobytes()
    with Plan(captured.path) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"


def test_a_model_moved_to_a_gpu_while_it_is_captured_refers_to_the_mapped_file(capture: Capture, saved: Path) -> None:
    loaded = load_file(saved)
    captured = capture(lambda: loaded["up"].cuda() @ loaded["down"].to("cuda", non_blocking=True), digests="ops")
    assert origins(captured) == ["external_file"] * 2
    with Plan(captured.path) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"


def test_statistics_are_taken_on_the_gpu(capture: Capture) -> None:
    weights = torch.randn(1000, device="cuda") + 4
    indices = torch.arange(10, device="cuda")
    captured = capture(lambda: weights[indices] * 2, payload="integers")
    assert sorted(origins(captured)) == ["initializer", "payload"]
    known = recipes(captured)[0].statistics
    assert known is not None and known.mean == pytest.approx(float(weights.double().mean()), rel=1e-6)
