"""Which Python function a replay calls for an operator: a quick one only where it arrives as the captured call did."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from replayfmt.pytorch.overloads import direct_function

aten = torch.ops.aten
functions, methods = torch._C._VariableFunctions, torch._C.TensorBase


@pytest.mark.parametrize(
    ("overload", "text", "values", "tensors", "expected"),
    [
        (aten.add.Tensor, "%s(%s, %s)", [None, None], [0, 1], functions.add),
        (aten.add.Tensor, "%s(%s, %s, alpha=%s)", [None, None, 2], [0, 1], functions.add),
        (aten.add.Tensor, "%s(%s, %s)", [None, 2.0], [0], functions.add),
        (aten.view.default, "%s(%s, %s)", [None, [1, -1]], [0], methods.view),
        (aten.addmm.default, "%s(%s, %s, %s)", [None, None, None], [0, 1, 2], functions.addmm),
        (
            aten.native_layer_norm.default,
            "%s(%s, %s, None, None, %s)",
            [None, [4], 1e-5],
            [0],
            functions.native_layer_norm,
        ),
        (aten.split.Tensor, "%s(%s, %s, %s)", [None, 2, -1], [0], functions.split),
        (aten.gelu.default, "%s(%s, approximate=%s)", [None, "tanh"], [0], torch._C._nn.gelu),
        (aten.linalg_qr.default, "%s(%s)", [None], [0], torch._C._linalg.linalg_qr),
    ],
)
def test_a_function_that_arrives_as_captured_is_called(
    overload: Any, text: str, values: list[Any], tensors: list[int], expected: Any
) -> None:
    assert direct_function(overload, text, values, tensors) == expected


@pytest.mark.parametrize(
    ("overload", "text", "values", "tensors"),
    [
        (aten.mul.Scalar, "%s(%s, %s)", [None, 2.0], [0]),  # torch.mul gives mul.Tensor
        (aten._unsafe_view.default, "%s(%s, %s)", [None, [1]], [0]),  # no such function
        (aten.zeros.default, "%s(%s, pin_memory=False)", [[2]], []),  # arrives with other arguments
        (aten.add.Tensor, "%s(%s, %s, beta=%s)", [None, None, 2], [0, 1]),
        # Of its nine results, torch's function returns two symbolic integers as tensors.
        (aten._scaled_dot_product_flash_attention.default, "%s(%s, %s, %s)", [None, None, None], [0, 1, 2]),
        (aten._scaled_dot_product_cudnn_attention.default, "%s(%s, %s, %s, None, True)", [None] * 3, [0, 1, 2]),
    ],
)
def test_otherwise_the_overload_itself_is_called(
    overload: Any, text: str, values: list[Any], tensors: list[int]
) -> None:
    assert direct_function(overload, text, values, tensors) == overload._op


def test_finding_a_function_runs_nothing_and_draws_nothing() -> None:
    state = torch.get_rng_state()
    assert direct_function(aten.normal_.default, "%s(%s, %s, %s)", [None, 0.0, 1.0], [0]) == methods.normal_
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_finding_a_function_warns_of_nothing() -> None:
    # PyTorch warns of `add_(Number, Tensor)` once in a process: this needs a fresh one.
    program = (
        "import torch; from replayfmt.pytorch.overloads import direct_function; "
        "direct_function(torch.ops.aten.add_.Tensor, '%s(%s, %s, %s)', [None, 1, 1], [0])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600)
    assert "deprecated" not in done.stderr, done.stderr
