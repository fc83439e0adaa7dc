"""Kernels that an extension registers in the place of PyTorch's own: what they call is recorded, not the operator, and
work that they do themselves is named."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from replayfmt.native import building
from replayfmt.recording.kernels import forget_libraries, is_replaced

from .conftest import Capture, Captured
from .test_thread_watch import watched

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once")

EXTENSION = r"""
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sqrt.h>
#include <torch/library.h>
#include <optional>

namespace {
at::Tensor negative(const at::Tensor& x) {
  auto made = at::empty_like(x);
  for (int64_t index = 0; index < x.numel(); index++) {
    made.mutable_data_ptr<float>()[index] = -x.const_data_ptr<float>()[index];
  }
  return made;
}

at::Tensor magnitude(const at::Tensor& x) { return at::sqrt(at::mul(x, x)); }

std::optional<torch::Library> kernels;

__attribute__((constructor)) void replace() {
  kernels.emplace(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  kernels->impl("neg", negative);
  kernels->impl("abs", magnitude);
}
}

extern "C" void restore() { kernels.reset(); }
"""


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("replaced")
    (directory / "kernels.cpp").write_text(EXTENSION)
    building.compile_library(directory / "kernels.cpp", directory / "kernels.so", "-O0", "-fvisibility=default")
    return directory / "kernels.so"


@pytest.fixture
def load(built: Path, tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Loads the extension: a copy of it, because it registers its kernels when it is loaded first."""
    copies: list[Path] = []

    def load() -> None:
        copies.append(tmp_path / f"kernels{len(copies)}.so")
        shutil.copyfile(built, copies[-1])
        torch.ops.load_library(str(copies[-1]))

    yield load
    for copy in copies:
        ctypes.CDLL(str(copy)).restore()


def names(captured: Captured) -> list[str]:
    return [name.partition(".")[0].removeprefix("aten::") for name in captured.ops()]


@pytest.mark.slow
@pytest.mark.recorder("python", "native")
@watched
def test_what_such_a_kernel_calls_is_recorded(capture: Capture, load: Callable[[], None]) -> None:
    load()
    x = torch.randn(4)
    captured = capture(lambda: x.abs())
    assert names(captured) == ["mul", "sqrt"]
    captured.replays()


@watched
def test_its_own_work_is_named(capture: Capture, load: Callable[[], None]) -> None:
    load()
    captured = capture(lambda: torch.neg(torch.ones(4)) * 2)
    assert captured.unsupported()["unseen_work"] == 1
    assert captured.returned.equal(torch.full([4], -2.0))


@watched
def test_it_is_so_from_the_moment_at_which_it_is_loaded(capture: Capture, load: Callable[[], None]) -> None:
    x = torch.randn(4)

    def program() -> Any:
        before = [x.abs() for _ in range(3)]
        load()
        return before + [x.abs() for _ in range(3)]

    captured = capture(program)
    assert names(captured) == ["abs"] * 3 + ["mul", "sqrt"] * 3
    captured.replays()


@watched
def test_a_capture_looks_anew(capture: Capture, load: Callable[[], None]) -> None:
    x = torch.randn(4)
    first = capture(lambda: x.abs())
    load()
    second = capture(lambda: x.abs())
    assert (names(first), names(second)) == (["abs"], ["mul", "sqrt"])


def test_no_kernel_of_pytorchs_is_taken_for_such_a_one() -> None:
    forget_libraries()
    every = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    assert len(every) > 1000
    assert not [name for name in every if is_replaced(name)]
