"""Faults planted in real models are found as the first divergence, and intact pairs are not accused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import replayfmt.compare

from .models import MODELS, captured

# The model, the fault, the kind of the first divergence, and a kernel that it names.
FAULTS = [
    ("gpt2_inference", "ulp", "op", "planted::gelu.default"),
    ("llama", "1e-3", "op", "planted::gelu.default"),
    ("gpt2_inference", "shape", "op", "planted::gelu.default"),
    ("gpt2_inference", "tenth", "op", "planted::gelu.default"),
    ("gpt2_training", "backward", "op", "planted::gelu_backward.default"),
    ("llama", "scale", "arguments", "aten::mul.Tensor"),
    ("resnet", "stride", "arguments", "aten::addmm.default"),
    ("decoder", "stale", "block", "aten::copy_.default"),
    ("moe", "uninitialized", "block", "aten::zeros_like.default"),
    ("gpt2_training", "offset", "randomness", "aten::bernoulli_.float"),
    ("gpt2_training", "epsilon", "arguments", "aten::native_layer_norm.default"),
    ("resnet", "reduction", "block", "aten::flip.default"),
    ("moe", "bf16", "block", "aten::mm.default"),
    ("decoder", "mask", "arguments", "aten::tril.default"),
    ("gpt2_training", "bias correction", "block", "aten::add_.Tensor"),
]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_an_intact_pair_is_equal(intact: Callable[[str], Path], tmp_path: Path, model: str) -> None:
    made = replayfmt.compare(intact(model), captured(tmp_path / "b.opreplay", model))
    assert made.outcome == "equal", str(made)
    assert not made.roots and made.alignment.share == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("model", "fault", "kind", "kernel"), FAULTS, ids=[fault for _model, fault, *_ in FAULTS])
def test_a_planted_fault_is_the_first_divergence(
    intact: Callable[[str], Path], tmp_path: Path, model: str, fault: str, kind: str, kernel: str
) -> None:
    made = replayfmt.compare(intact(model), captured(tmp_path / "b.opreplay", model, fault))
    assert made.outcome == "different"
    assert made.first is not None, str(made)
    assert (made.first.kind, kernel in {*made.first.kernels[0], *made.first.kernels[1]}) == (kind, True), str(made)
