"""Tensors that stand for others, operators that call others, operators of the program's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode

from .conftest import Capture


class Quantized(torch.Tensor):
    """A wrapper like torchao's: integers and a scale."""

    @staticmethod
    def __new__(cls, integers: torch.Tensor, scale: torch.Tensor) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=torch.float32)

    def __init__(self, integers: torch.Tensor, scale: torch.Tensor) -> None:
        self.integers, self.scale = integers, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [arg.integers.float() * arg.scale if isinstance(arg, cls) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


class Named(torch.Tensor):
    """A subclass without dispatch of its own."""


def wrappers() -> Any:
    from torch.masked import masked_tensor
    from torch.testing._internal.two_tensor import TwoTensor

    two = TwoTensor(torch.randn(3), torch.randn(3)) * 2 + 1
    weight = Quantized(torch.randint(-5, 5, (4, 4), dtype=torch.int8), torch.tensor(0.1))
    masked = masked_tensor(torch.randn(4), torch.tensor([True, False, True, True]))
    jagged = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    return (
        two.a + two.b,
        torch.randn(2, 4) @ weight,
        (masked + masked).get_data(),
        (jagged * 2).values().sum(),
        torch.nn.functional.linear(jagged, torch.randn(5, 3)).values(),
        torch.randn(3).as_subclass(Named) + 1,
    )


def control_flow() -> Any:
    from torch._higher_order_ops.associative_scan import associative_scan
    from torch._higher_order_ops.map import map as map_over
    from torch._higher_order_ops.scan import scan
    from torch._higher_order_ops.while_loop import while_loop

    x = torch.randn(4)
    return (
        torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v * 2, (x,)),
        torch.cond(torch.tensor(True), lambda v: v + 1, lambda v: v * 2, (x,)),
        while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * 2), (torch.tensor(0), x)),
        scan(lambda carry, v: (carry + v, carry * v), torch.zeros(3), torch.randn(5, 3)),
        associative_scan(torch.add, torch.randn(5, 3), 0, combine_mode="generic"),
        map_over(lambda v, w: v + w, torch.randn(4, 3), torch.ones(3)),
    )


def flexible_attention() -> Any:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 16, 16, device="cpu")
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + i - j), flex_attention(q, k, v, block_mask=mask)


@torch.library.custom_op("recording_tests::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@torch.library.custom_op("recording_tests::increment", mutates_args=("x",))
def increment(x: torch.Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("recording_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(x.shape)


_library = torch.library.Library("recording_tests_library", "DEF")
_library.define("describe(Tensor x, str text) -> Tensor")
_library.impl("describe", lambda x, text: x.sin() * len(text), "CPU")


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0]


def own_operators() -> Any:
    x = torch.randn(4)
    y = scale(x, 2.5)
    increment(y)
    noise = [noisy(y), noisy(y), torch.rand(2)]  # draws without the tag that says so
    z = x.clone().requires_grad_()
    Exponential.apply(z).sum().backward()
    return y, noise, torch.ops.recording_tests_library.describe(x, "abc"), z.grad


def tracing() -> Any:
    with FakeTensorMode():
        torch.empty(3) + 1
    make_fx(lambda x: x + 1)(torch.ones(2))
    torch.export.export(torch.nn.ReLU(), (torch.randn(3),))
    meta = torch.nn.Linear(3, 4, device="meta")
    meta(torch.ones(2, 3, device="meta"))
    real = meta.to_empty(device="cpu")
    torch.nn.init.ones_(real.weight)
    return real.weight + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [wrappers, control_flow, flexible_attention, own_operators, tracing], ids=lambda p: p.__name__
)
def test_it_is_captured_in_ops_that_replay_bit_for_bit(capture: Capture, program: Callable[[], Any]) -> None:
    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    captured.replays()


def test_the_work_of_a_tensor_that_dispatches_itself_is_recorded(capture: Capture) -> None:
    weight = Quantized(torch.ones(4, 4, dtype=torch.int8), torch.tensor(0.1))
    captured = capture(lambda: [torch.ones(2, 4) @ weight for _ in range(3)])
    names = ["aten::ones.default", "aten::_to_copy.default", "aten::mul.Tensor", "aten::mm.default"]
    assert captured.ops() == names * 3
    captured.replays()


def test_operators_of_the_programs_own_are_single_ops(capture: Capture) -> None:
    ops = capture(own_operators).ops()
    assert ops.count("recording_tests::noisy.default") == 2
    assert "recording_tests_library::describe.default" in ops


def test_what_is_only_traced_is_not_recorded(capture: Capture) -> None:
    def program() -> torch.Tensor:
        with FakeTensorMode():
            torch.empty(3).cos()
        return torch.ones(3)

    assert capture(program).ops() == ["aten::ones.default"]


def test_what_is_traced_may_be_of_known_sizes_in_memory_of_unknown_length(capture: Capture) -> None:
    def program() -> list[int]:
        fake = FakeTensorMode(shape_env=ShapeEnv())
        x = fake.from_tensor(torch.ones(16), symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC]))
        lengths = []
        for _ in range(3):
            with fake, enable_python_dispatcher():
                lengths.append(len(x.unbind(0)))
            torch.ones(3).detach()
        return lengths

    captured = capture(program)
    assert captured.returned == [16] * 3
    assert set(captured.ops()) == {"aten::ones.default", "aten::detach.default"}


@torch.inference_mode()
def test_a_composite_is_not_taken_for_the_last_of_its_parts(capture: Capture) -> None:
    """`square(x)` is `pow` of x."""
    x = torch.randn(3)

    def program() -> list[torch.Tensor]:
        results = []
        for _ in range(5):
            x.cos()
            results.append(torch.square(x))
        attended = [torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 2, 4, 8)] * 3) for _ in range(4)]
        return results + attended

    expected = program()
    captured = capture(program)
    assert all(map(torch.equal, captured.returned, expected))
    assert captured.ops().count("aten::pow.Tensor_Scalar") == 5
    captured.replays()


def test_nested_tensors_come_where_plain_ones_did(capture: Capture) -> None:
    """What the hot path asks of plain tensors cannot be asked of nested ones."""
    plain, nested = torch.randn(4, 4), torch.nested.nested_tensor([torch.ones(2), -torch.ones(3)])

    def program() -> list[torch.Tensor]:
        for _ in range(4):
            torch.relu(plain)
        return [*torch.relu(nested).unbind(), torch.relu(plain)]

    captured = capture(program)
    assert [result.sum().item() for result in captured.returned[:2]] == [2, 0]
    assert captured.ops().count("aten::relu.default") == 6
    captured.replays()


@torch.inference_mode()
def test_a_composite_is_run_in_the_parts_that_it_has_without_a_capture(capture: Capture) -> None:
    """PyTorch also has decompositions of these written in Python, which compute something slightly different."""
    image, sequence = torch.randn(2, 3, 9, 9), torch.randn(5, 2, 3)
    packed = torch.nn.utils.rnn.pack_padded_sequence(sequence, [5, 3])
    lstm, gru = torch.nn.LSTM(3, 4, 2), torch.nn.GRU(3, 4)

    def program() -> list[torch.Tensor]:
        interpolate = torch.nn.functional.interpolate
        sizes = {"linear": image[0], "bilinear": image, "trilinear": image[None]}
        enlarged = [interpolate(x, scale_factor=1.7, mode=mode) for mode, x in sizes.items()]
        return [*enlarged, lstm(packed)[0].data, gru(packed)[0].data]

    expected = program()
    captured = capture(program)
    assert all(map(torch.equal, captured.returned, expected))
    assert "aten::upsample_bilinear2d.default" in captured.ops()
    captured.replays()


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("moded", [False, True])
def test_a_composite_under_a_mode_of_the_programs_own_is_recorded(
    capture: Capture, inference: bool, moded: bool
) -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)

    def program() -> torch.Tensor:
        with torch.inference_mode(inference), Passing() if moded else contextlib.nullcontext():
            return torch.einsum("ij,kj->ik", x, w) + torch.matmul(x, w)

    captured = capture(program)
    assert torch.equal(captured.returned, program())
    assert captured.unsupported() == {} and "aten::add.Tensor" in captured.ops() and len(captured.ops()) > 2
    captured.replays()


def test_what_is_made_under_a_mode_of_the_programs_own_is_seen_by_it_as_without_a_capture(capture: Capture) -> None:
    seen: list[str] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def program() -> list[str]:
        seen.clear()
        with Noting():
            torch.tensor([1.0, 2.0]) + torch.tensor(())[:0].sum()
        return list(seen)

    assert capture(program).returned == program()
