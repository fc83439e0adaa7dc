"""Kernels that PyTorch compiles from CUDA source and launches without an operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from .conftest import Capture

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def by_jiterator(x: torch.Tensor) -> torch.Tensor:
    from torch.cuda.jiterator import _create_jit_fn

    doubled: torch.Tensor = _create_jit_fn("template <typename T> T doubled(T x) { return x + x; }")(x)
    return doubled


def by_nvrtc(x: torch.Tensor) -> torch.Tensor:
    source = 'extern "C" __global__ void doubled(float* x, int n) { int i = threadIdx.x; if (i < n) x[i] += x[i]; }'
    torch.cuda._compile_kernel(source, "doubled")((1, 1, 1), (32, 1, 1), (x, x.numel()))
    return x


@pytest.mark.parametrize("launch", [by_jiterator, by_nvrtc])
def test_a_launch_is_unsupported_and_what_it_wrote_is_imported(
    capture: Capture, launch: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    captured = capture(lambda: (launch(torch.ones(8, device="cuda")) + 1).tolist())
    assert captured.returned == [3.0] * 8
    assert captured.unsupported() == {"outside_operator": 1}
