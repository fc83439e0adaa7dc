"""What a dispatch mode masks, autocast above all, reaches custom operators and the parts of composites all the same."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replayfmt.format.codes import RecordKind

from .conftest import Capture

_seen: list[torch.dtype] = []


@torch.library.custom_op("opreplay_autocast::project", mutates_args=())
def project(x: torch.Tensor) -> torch.Tensor:
    product = x @ torch.full((4, 4), 1.01)
    _seen.append(product.dtype)
    return product.float()


@project.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return project(grad)


project.register_autograd(_backward)


def program() -> Any:
    x = torch.rand(4, 4, generator=torch.Generator().manual_seed(2))
    results = [project(x)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results.append(project(x))
        with torch.autocast("cpu", enabled=False):
            results.append(project(x))
        results.append(project(x @ x))
        thread = threading.Thread(target=lambda: results.append(project(x)))
        thread.start()
        thread.join()
    with torch.autocast("cpu", dtype=torch.float16):
        results.append(project(x))
    results.append(project(x) + 1)
    return results


def test_custom_operators_compute_the_same_with_and_without_a_capture(capture: Capture) -> None:
    _seen.clear()
    expected = program()
    plain = list(_seen)
    assert {torch.float32, torch.bfloat16, torch.float16} == set(plain)
    _seen.clear()
    captured = capture(program, digests="ops")
    assert _seen == plain
    assert all(torch.equal(a, b) for a, b in zip(expected, captured.returned, strict=True))
    stated = [
        record.argument("autocast.cpu")
        for record in captured.records(RecordKind.global_state)
        if any(node.name == "autocast.cpu" for node in record.signature.args)
    ]
    assert stated == ["bfloat16", "", "bfloat16", "", "float16", ""]
    _seen.clear()
    captured.replays()
    assert _seen == plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_so_do_their_gradients(capture: Capture, dtype: torch.dtype) -> None:
    x = torch.rand(4, 4, requires_grad=True)

    def step() -> Any:
        with torch.autocast("cpu", dtype=dtype):
            loss = project(x).sum() + torch.func.vmap(lambda row: (row * 2).sum())(x).sum()
        (gradient,) = torch.autograd.grad(loss, x)
        return gradient

    _seen.clear()
    expected = step()
    plain = list(_seen)
    _seen.clear()
    captured = capture(step, digests="ops")
    assert _seen == plain and torch.equal(expected, captured.returned)
    captured.replays()


class Passing(TorchDispatchMode):
    """A mode of the program's. PyTorch masks autocast in what its handler calls."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("passing", [False, True])
def test_the_parts_of_composites_are_in_inference_mode_what_they_are_without_a_capture(
    capture: Capture, passing: bool
) -> None:
    x, weight, bias = torch.randn(4, 4), torch.randn(12, 4, requires_grad=True), torch.randn(12)
    strided = torch.randn(16).as_strided((4, 1, 4), (1, 16, 4))  # times what requires gradients: mm in place of bmm
    cell, rnn = torch.nn.GRUCell(4, 4), torch.nn.GRU(4, 4, num_layers=2)

    @torch.inference_mode()
    def program() -> list[torch.Tensor]:
        results = []
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                results += [torch.einsum("ij,kj->ik", x, weight), torch.nn.functional.linear(x, weight, bias)]
                results += [cell(x), rnn(x)[0], torch.cdist(x, weight), torch.linalg.multi_dot([x, x, x.t()])]
                with torch.autocast("cpu", enabled=False):
                    results.append(torch.einsum("ij,kj->ik", x, weight))
        results += [torch.nn.functional.linear(strided, weight, bias), *weight.chunk(2), weight.narrow(0, 0, 2)]
        return [*results, torch.einsum("ij,kj->ik", x, weight)]

    def run() -> list[torch.Tensor]:
        if not passing:
            return program()
        with Passing():
            return program()

    expected = run()
    captured = capture(run)
    assert [result.dtype for result in captured.returned] == [result.dtype for result in expected]
    assert all(map(torch.equal, captured.returned, expected))
    assert passing or {torch.bfloat16, torch.float32} <= {result.dtype for result in expected}
    captured.replays()
