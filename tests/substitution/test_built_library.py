"""A built extension as a replacement: compiled here, loaded by PyTorch, checked and called like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from stable_library import build, needs_compiler

from .conftest import Captured, Tool

SOURCE = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
using torch::stable::Tensor;

template <int wrong>
Tensor negated(const Tensor& self) {
    Tensor out = torch::stable::empty_like(self);
    const float* from = static_cast<const float*>(self.data_ptr());
    float* to = static_cast<float*>(out.data_ptr());
    for (int64_t i = 0; i < self.numel(); ++i) to[i] = -from[i] + wrong;
    return out;
}

STABLE_TORCH_LIBRARY(opreplay_built, m) {
    m.def("neg(Tensor self) -> Tensor");
    m.def("wrong(Tensor self) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(opreplay_built, CPU, m) {
    m.impl("neg", TORCH_BOX(&negated<0>));
    m.impl("wrong", TORCH_BOX(&negated<1>));
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("built"), SOURCE)


@pytest.mark.slow
@needs_compiler
def test_a_built_extension_is_loaded_checked_and_called(library: Path, captured: Captured, tool: Tool) -> None:
    path = captured(lambda: torch.arange(6.0).view(2, 3).neg().sum().item())
    for given in (f"aten::neg={library}", f"aten::neg@torch-library={library}:opreplay_built::neg"):
        code, out, err = tool("run", f"--replay-kernel-substitution={given}", path)
        assert (code, err) == (0, "")
        assert "aten::neg.default(float32[2,3]) by kernels.so:opreplay_built::neg: 1 call, values equal" in out
    code, _out, err = tool("run", f"--replay-kernel-substitution=aten::neg={library}:opreplay_built::wrong", path)
    assert code == 1 and "6 of 6 elements are too far off" in err
    code, _out, err = tool("run", f"--replay-kernel-substitution=aten::sum={library}", path)
    assert code == 2 and "registers 0 operators called 'sum'; it registers opreplay_built::neg, opreplay" in err
    code, out, _err = tool("run", f"--replay-kernel-substitution=all={library}", path)
    assert code == 0 and "substituted: 1 call of 1 signature" in out
