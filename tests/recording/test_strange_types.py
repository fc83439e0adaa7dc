"""Operators whose schemas name types that the format has no values for: they run, and are unsupported records."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from replayfmt.format.codes import RecordKind
from replayfmt.native import building
from replayfmt.recording import kernels

from .conftest import Capture

PLAIN: dict[str, Any] = {
    "Tensor[][]": lambda: [[torch.ones(2)], []],
    "Tensor?[]": lambda: [torch.ones(2), None],
    "(Tensor, int)": lambda: (torch.ones(2), 1),
    "int[][]": lambda: [[1], [2, 3]],
    "str[]": lambda: ["a", "b"],
    "bool[]": lambda: [True, False],
    "float[]": lambda: [1.5],
    "Scalar[]": lambda: [1, 2.5, True],
    "complex": lambda: 1j,
    "Storage": lambda: torch.ones(2).untyped_storage(),
    "Generator": torch.Generator,
    "Device": lambda: torch.device("cpu"),
    "Device?": lambda: None,
    "ScalarType": lambda: torch.float16,
    "Layout": lambda: torch.strided,
    "MemoryFormat": lambda: torch.channels_last,
    "SymInt": lambda: 3,
    "SymInt[]": lambda: [1, 2],
    "SymBool": lambda: True,
    "NoneType": lambda: None,
}
OPAQUE: dict[str, Any] = {
    "Dict(str, Tensor)": lambda: {"a": torch.ones(2)},
    "Dict(int, int)": lambda: {1: 2},
    "Dict(str, Tensor[])": lambda: {"a": [torch.ones(2)]},
    "Stream": lambda: torch.Stream("cpu"),
    "Future(Tensor)": torch.futures.Future,
}
TYPES = PLAIN | OPAQUE


@pytest.fixture(scope="module")
def operators() -> Iterator[Any]:
    """For each type an operator that takes one, one that returns it, and one that writes beside it."""
    library = torch.library.Library("strange_types", "DEF")
    for number, name in enumerate(TYPES):
        library.define(f"takes{number}(Tensor x, {name} value) -> Tensor")
        library.define(f"returns{number}(Tensor x, {name} value) -> {name}")
        library.define(f"writes{number}(Tensor(a!) x, {name} value) -> ()")
        library.impl(f"takes{number}", lambda x, value: x * 2, "CPU")
        library.impl(f"returns{number}", lambda x, value: value, "CPU")
        library.impl(f"writes{number}", lambda x, value: _thrice(x), "CPU")
    yield torch.ops.strange_types
    library._destroy()


def _thrice(x: torch.Tensor) -> None:
    x.mul_(3)


@pytest.mark.slow
@pytest.mark.parametrize("payload", ["full", "none"])
@pytest.mark.parametrize("number", range(len(TYPES)), ids=list(TYPES))
def test_an_operator_of_any_type_runs(capture: Capture, operators: Any, number: int, payload: str) -> None:
    name = list(TYPES)[number]
    value = TYPES[name]()
    x = torch.ones(4)

    def program() -> Any:
        taken = getattr(operators, f"takes{number}")(x, value)
        returned = getattr(operators, f"returns{number}")(x, value)
        getattr(operators, f"writes{number}")(x, value)
        return taken, returned, x + 1

    kind = type(program()[1])
    x = torch.ones(4)
    captured = capture(program, whole=["strange_types::*"], payload=payload)
    taken, returned, after = captured.returned
    assert taken.tolist() == [2] * 4 and type(returned) is kind and after.tolist() == [4] * 4
    assert captured.unsupported() == ({"opaque_argument": 3} if name in OPAQUE else {})
    if name in OPAQUE:
        reasons = [record.argument("reason") for record in captured.records(RecordKind.storage_import)]
        assert reasons.count("outside_write") == 1  # what the operator wrote
    elif payload == "full" and name not in ("Generator", "Storage"):
        captured.replays()


@pytest.mark.recorder("native")  # under a dispatch mode PyTorch itself raises
def test_an_operator_that_python_cannot_name_runs(capture: Capture) -> None:
    library = torch._C._dispatch_library("DEF", "strange_names", "")
    library.def_("__file__(Tensor x) -> Tensor")
    library.impl_t_t("__file__", "CPU", "")
    operation, _ = torch._C._jit_get_operation("strange_names::__file__")
    x = torch.ones(4)

    def program() -> Any:
        y = x + 1
        return operation(y), y + 1

    captured = capture(program)
    assert captured.returned[1].tolist() == [3] * 4
    assert captured.unsupported() == {"opaque_argument": 1}
    reasons = [record.argument("reason") for record in captured.records(RecordKind.storage_import)]
    assert reasons == ["first_use", "outside_write"]


@pytest.mark.recorder("native")
def test_an_operator_in_the_memory_of_one_that_is_gone_is_told_from_it(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("opreplay_one", "opreplay_two") * 2
    monkeypatch.setattr(kernels, "is_replaced", lambda name: False)  # as if PyTorch had them

    def program() -> None:
        for name in names:
            library = torch._C._dispatch_library("FRAGMENT", "aten", "")  # whose operators take the hot path
            library.def_(f"{name}(Tensor x) -> Tensor")
            library.impl_t_t(name, "CPU", "")
            operation, _ = torch._C._jit_get_operation(f"aten::{name}")
            for _ in range(3):
                operation(torch.ones(4))
            library.reset()

    captured = capture(program)
    called = [name for name in captured.ops() if "opreplay" in name]
    assert called == [f"aten::{name}.default" for name in names for _ in range(3)]


class Struck(Exception):
    """What a signal handler raises."""


def test_what_a_handler_raises_while_an_operator_is_looked_up_reaches_the_program(
    capture: Capture, monkeypatch: pytest.MonkeyPatch, recorder: str
) -> None:
    """Python looks for an operator's name at its first call."""
    library = torch._C._dispatch_library("DEF", f"looked_up_{recorder}", "")
    library.def_("it(Tensor x) -> Tensor")
    library.impl_t_t("it", "CPU", "")
    operation, _ = torch._C._jit_get_operation(f"looked_up_{recorder}::it")
    look, x = torch._ops._OpNamespace.__getattr__, torch.ones(4)

    def strike(*_: Any) -> None:
        raise Struck

    def interrupted(self: Any, name: str) -> Any:
        if name == "it":
            signal.raise_signal(signal.SIGUSR1)
        return look(self, name)

    def program() -> torch.Tensor:
        with monkeypatch.context() as patched, pytest.raises(Struck):
            patched.setattr(torch._ops._OpNamespace, "__getattr__", interrupted)
            operation(x)
        return x + 1

    before = signal.signal(signal.SIGUSR1, strike)
    try:
        captured = capture(program)
    finally:
        signal.signal(signal.SIGUSR1, before)
    captured.replays()


VALUES = """
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/quantized/Quantizer.h>
#include <torch/library.h>

using Stack = torch::jit::Stack;

void make(const c10::OperatorHandle&, Stack* stack) {
  stack->clear();
  stack->emplace_back(at::make_per_tensor_affine_quantizer(0.5, 0, at::kQInt8));
}

void take(const c10::OperatorHandle&, Stack* stack) {
  (*stack)[0].toTensor().mul_(3);
  stack->clear();
}

void both(const c10::OperatorHandle&, Stack* stack) {
  const at::Tensor x = (*stack)[0].toTensor();
  auto& dispatcher = c10::Dispatcher::singleton();
  dispatcher.callBoxed(dispatcher.findSchemaOrThrow("strange_values::make", ""), stack);
  stack->insert(stack->begin(), x);
  dispatcher.callBoxed(dispatcher.findSchemaOrThrow("strange_values::take", ""), stack);
}

TORCH_LIBRARY(strange_values, library) {
  library.def("make(Tensor x) -> Quantizer");
  library.def("take(Tensor(a!) x, Quantizer value) -> ()");
  library.def("both(Tensor(a!) x) -> ()", torch::CppFunction::makeFromBoxedFunction<&both>());
  library.impl("make", c10::DispatchKey::CPU, torch::CppFunction::makeFromBoxedFunction<&make>());
  library.impl("take", c10::DispatchKey::CPU, torch::CppFunction::makeFromBoxedFunction<&take>());
}
"""


@pytest.mark.slow
@pytest.mark.recorder("native")  # under a dispatch mode PyTorch itself raises
def test_an_operator_of_values_that_python_cannot_have_runs(capture: Capture, tmp_path: Path) -> None:
    (tmp_path / "values.cpp").write_text(VALUES)
    building.compile_library(tmp_path / "values.cpp", tmp_path / "values.so", "-O0", "-fvisibility=default")
    torch.ops.load_library(os.fspath(tmp_path / "values.so"))
    x = torch.ones(4)

    def program() -> Any:
        y = x + 1
        torch.ops.strange_values.both(y)
        return y * 2

    captured = capture(program, inside=["strange_values::both"])
    assert captured.returned.tolist() == [12] * 4
    assert captured.unsupported() == {"opaque_argument": 2}
    details = [record.argument("detail") for record in captured.records(RecordKind.unsupported)]
    assert all("Quantizer" in detail for detail in details), details
    reasons = [record.argument("reason") for record in captured.records(RecordKind.storage_import)]
    assert reasons == ["first_use", "outside_write"]
