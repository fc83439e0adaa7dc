"""Compiled regions are captured as what their generated code calls, and replayed without the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from .conftest import Capture

Program = Callable[[], Any]
pytestmark = pytest.mark.slow
PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(make: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[make.__name__] = make
    return make


@program
def pointwise_and_reduction() -> Program:
    f, x = torch.compile(lambda x: (x.sin() + 1).relu() * x.sum(), fullgraph=True), torch.randn(8, 16)
    return lambda: f(x)


@program
def library_calls_and_views() -> Program:
    f = torch.compile(lambda x, y: (F.gelu(x @ y.t()).view(-1, 4) * 2, x.t()[1:3]))
    x, y = torch.randn(8, 16), torch.randn(4, 16)
    return lambda: f(x, y)


@program
def memory_written_in_parts() -> Program:
    def work(x: Tensor, index: Tensor) -> Tensor:
        both = torch.cat([x.sin(), x[:3]], 0)
        filled = torch.empty(4, 16)
        filled[:2], filled[2:] = x[:2], x[2:4] * 2
        return both.index_put((index,), x[index] * 2, accumulate=True).sum() + filled

    f, x, index = torch.compile(work), torch.randn(8, 16), torch.tensor([0, 3, 3, 5])
    return lambda: f(x, index)


@program
def written_inputs() -> Program:
    def work(x: Tensor, total: Tensor, out: Tensor) -> Tensor:
        total.add_(x.sin())
        total[2:4].mul_(2)
        out.copy_(x * 3)
        return total * x

    f, x, total = torch.compile(work), torch.randn(8, 16), torch.ones(8, 16)
    return lambda: (out := torch.empty(8, 16), f(x, total, out))


@program
def written_through_an_array_between() -> Program:
    f = torch.compile(lambda x: x.sin() + 1)
    array = np.ones((8, 16), np.float32)

    def program() -> list[Tensor]:
        x = torch.from_numpy(array)
        first = f(x)
        array[0] = 5
        second = f(x)
        second.numpy()[1] = 7
        return [first, second, f(second)]

    return program


@program
def random_numbers() -> Program:
    f, x = torch.compile(lambda x: F.dropout(x, 0.5) + torch.rand(8, 16)), torch.randn(8, 16)
    return lambda: [f(x), f(x)]


@program
def dynamic_shapes() -> Program:
    f = torch.compile(lambda x: (x.sin() @ x.t()).softmax(-1) * x.shape[0], dynamic=True)
    marked = torch.compile(lambda x: x.cos() * x.shape[0])
    inputs = [torch.randn(n, 4) for n in (6, 9)]
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0)
    return lambda: [g(x) for x in inputs for g in (f, marked)]


@program
def graph_breaks_and_host_reads() -> Program:
    def work(x: Tensor) -> Tensor:
        y = x.sin() + 1
        torch._dynamo.graph_break()
        return y.cos() * 2 if y.sum().item() > 0 else y

    f, x = torch.compile(work), torch.randn(8, 16)
    return lambda: f(x)


@program
def wrapped_as_an_operator() -> Program:
    f = torch.compile(lambda x: x.sin() * 2 + 1, options={"wrap_inductor_compiled_regions": True})
    x = torch.randn(8)
    return lambda: f(x)


@program
def branches() -> Program:
    f = torch.compile(lambda x: torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos() * 3, (x,)))
    inputs = [torch.ones(8), -torch.ones(8)]
    return lambda: [f(x) for x in inputs]


@program
def convolution_trained() -> Program:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    f, x = torch.compile(model), torch.randn(2, 3, 8, 8)

    def step() -> Tensor:
        loss = f(x).pow(2).mean()
        loss.backward()
        return loss

    return step


@program
def optimizer() -> Program:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    f, update, x = torch.compile(model), torch.compile(adamw.step), torch.randn(5, 8)

    def step() -> list[Tensor]:
        f(x).pow(2).mean().backward()
        update()
        adamw.zero_grad()
        return [each.detach() for each in model.parameters()]

    return step


@program
def custom_operator_inside() -> Program:
    with torch.library._scoped_library("compiled_tests", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        f, x = torch.compile(lambda x: torch.ops.compiled_tests.twice(x.sin()) + 1), torch.randn(8)
    return lambda: f(x)


del PROGRAMS["custom_operator_inside"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_capture_has_what_the_code_calls_and_replays(name: str, capture: Capture) -> None:
    run = PROGRAMS[name]()
    run()
    state = torch.get_rng_state()
    expected = run() if name not in ("optimizer", "written_inputs", "convolution_trained") else None
    torch.set_rng_state(state)
    compiled = dict(counters["stats"])
    captured = capture(run)
    assert dict(counters["stats"]) == compiled, "a capture compiles nothing"
    if expected is not None:
        assert _equal(captured.returned, expected)
    assert captured.unsupported() == []
    assert captured.regions
    captured.replays()
    called, written = captured.kernels(), captured.written_calls()
    generated = [each for each in called if each.startswith("cpp_fused")]
    assert generated
    if name != "branches":  # whose code calls one of two
        assert generated == [each for each in written if each.startswith("cpp_fused")]
        assert not set(written) - set(called)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return len(one) == len(other) and all(map(_equal, one, other))
