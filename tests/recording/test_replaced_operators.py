"""Kernels that a program registers in the place of PyTorch's own: what they call is recorded, not the operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import replayfmt
from replayfmt.format.codes import RecordKind

from .conftest import Capture, Captured

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once")


def difference(left: Tensor, right: Tensor) -> Tensor:
    return left - right


def _names(captured: Captured) -> list[str]:
    return [name.partition(".")[0] for name in captured.ops()]


@contextmanager
def replaced(name: str, kernel: Callable[..., Tensor]) -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(name, kernel, "CPU", allow_override=True)
        yield


def test_what_such_a_kernel_calls_is_recorded(capture: Capture) -> None:
    x, y = torch.randn(4), torch.randn(4)
    with replaced("mul.Tensor", difference):
        captured = capture(lambda: x * y)
    assert _names(captured) == ["aten::sub"]
    captured.replays()


def test_it_is_so_with_one_that_gives_the_same_result(capture: Capture) -> None:
    """Verification would not tell."""
    x = torch.randn(4)
    with replaced("neg", lambda x: x * -1.0):
        captured = capture(lambda: -x)
    assert _names(captured) == ["aten::mul"]
    captured.replays()


def test_it_is_so_from_the_moment_at_which_it_is_registered_until_it_is_taken_back(capture: Capture) -> None:
    x, y = torch.randn(4), torch.randn(4)

    def program() -> Any:
        results = [x * y for _ in range(3)]
        with replaced("mul.Tensor", difference):
            results += [x * y for _ in range(3)]
        return results + [x * y for _ in range(3)]

    captured = capture(program)
    assert _names(captured) == ["aten::mul"] * 3 + ["aten::sub"] * 3 + ["aten::mul"] * 3
    captured.replays()


def test_it_is_so_where_recording_begins_later(capture: Capture) -> None:
    x, y = torch.randn(4), torch.randn(4)

    def program() -> Any:
        results = [x * y for _ in range(3)]
        with replaced("mul.Tensor", difference), replayfmt.scope("recorded"):
            return results + [x * y for _ in range(3)]

    captured = capture(program, start_scope="recorded")
    assert _names(captured) == ["aten::sub"] * 3
    captured.replays()


def test_a_composite_that_has_a_kernel_in_the_place_of_its_parts_is_recorded_as_what_that_calls(
    capture: Capture,
) -> None:
    x, weight = torch.randn(2, 4), torch.randn(4, 4)

    def program() -> Any:
        with torch.inference_mode(), replaced("linear", lambda x, weight, bias=None: x.mm(weight)):
            return torch.nn.functional.linear(x, weight)

    captured = capture(program)
    assert _names(captured) == ["aten::mm"]
    captured.replays()


def test_gradients_are_those_of_the_operator(capture: Capture) -> None:
    x = torch.randn(4, requires_grad=True)

    def program() -> Any:
        with replaced("sin", lambda x: x.cos()):
            x.sin().sum().backward()
        return x.grad

    captured = capture(program)
    assert _names(captured).count("aten::sin") == 0
    assert not captured.records(RecordKind.unsupported)
    captured.replays()


@pytest.mark.parametrize("write", [False, True])
def test_work_inside_that_no_op_does_is_named(capture: Capture, write: bool) -> None:
    """Some kernels call PyTorch's, which they have looked up before."""
    name = "neg.out" if write else "neg"
    pytorchs = torch.library.get_kernel(f"aten::{name}", "CPU")

    def kernel(keys: torch._C.DispatchKeySet, x: Tensor, *, out: Tensor | None = None) -> Any:
        return pytorchs.call_boxed(keys, x) if out is None else pytorchs.call_boxed(keys, x, out=out)

    x, out = torch.randn(4), torch.randn(4)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)
        captured = capture(lambda: torch.neg(x, out=out if write else None) * 2)
    assert set(captured.unsupported()) == {"unseen_work"}
    assert captured.returned.equal(x * -2)


PAST_THE_DISPATCHER: dict[str, Callable[[torch._C.DispatchKeySet, Tensor], Any]] = {
    "kernel": lambda keys, x: torch.library.get_kernel("aten::neg", "CPU").call_boxed(keys, x),
    "operator": lambda keys, x: torch.ops.aten.neg.default.redispatch(keys, x),
    "handle": lambda keys, x: torch._C._dispatch_find_schema_or_throw("aten::neg", "").redispatch_boxed(keys, x),
}


@pytest.mark.parametrize("way", PAST_THE_DISPATCHER)
def test_work_of_a_kernel_that_is_called_past_the_recorder_is_named(capture: Capture, way: str) -> None:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    captured = capture(lambda: PAST_THE_DISPATCHER[way](keys, torch.ones(4)) * 2)
    assert captured.unsupported() == {"unseen_work": 1}
    assert captured.returned.equal(torch.full([4], -2.0))


def test_what_is_recorded_of_such_a_kernel_is_not(capture: Capture) -> None:
    kernel = torch.library.get_kernel("aten::matmul", "CPU")
    keys, x = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), torch.ones(4, 4)
    captured = capture(lambda: kernel.call_boxed(keys, x, x) * 2)
    assert "aten::mm" in _names(captured) and not captured.unsupported()
    captured.replays()


def test_a_kernel_that_has_nothing_to_write_is_not_named(capture: Capture) -> None:
    x = torch.empty(0)
    with replaced("neg.out", lambda x, *, out: out):
        captured = capture(lambda: (torch.neg(x, out=x), torch.ones(2) * 2))
    assert not captured.unsupported()


def test_a_kernel_for_gradients_that_calls_the_one_beneath_is_seen(capture: Capture) -> None:
    def doubled(keys: torch._C.DispatchKeySet, x: Tensor) -> Tensor:
        return 2 * torch.ops.aten.neg.default.redispatch(keys & torch._C._after_autograd_keyset, x)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("neg", doubled, "AutogradCPU", with_keyset=True, allow_override=True)
        captured = capture(lambda: torch.neg(torch.ones(4)))
    assert _names(captured)[-2:] == ["aten::neg", "aten::mul"]
    captured.replays()
