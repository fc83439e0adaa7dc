"""A program under capture goes on whatever private name of PyTorch is missing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from private_names import NAMES
from torch.utils._python_dispatch import TorchDispatchMode

from replayfmt.errors import OpReplayError
from replayfmt.recording.recorder import Recorder

_PLACES = (torch._C, torch._C._functorch, torch._C._autograd)


@torch.library.custom_op("missing_names::noisy", mutates_args=("x",))
def noisy(x: torch.Tensor) -> torch.Tensor:
    x += 1
    return torch.nn.functional.dropout(x, 0.5) * 2


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


class Own(torch.Tensor):
    pass


def program() -> list[Any]:
    """Work of every kind that passes through a hook or the complete path on the host."""
    torch.manual_seed(0)
    x = torch.arange(6.0).reshape(2, 3)
    seen: list[Any] = [x.tolist(), x.numpy().sum().item(), np.asarray(x).shape, x.data_ptr() == x.data_ptr()]
    seen.append(torch.from_dlpack(x).sum().item())
    seen.append(x.clone().apply_(lambda value: value + 1).tolist())
    torch.ones(3).untyped_storage().resize_(64)
    seen.append(noisy(x.clone()).tolist())
    seen.append(scripted(x).tolist())
    seen.append(Own([1.0]).tolist())
    weight = torch.ones(3, 3, requires_grad=True)
    torch.nn.functional.relu(x @ weight).sum().backward()
    seen.append(weight.grad.tolist() if weight.grad is not None else None)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        seen.append((x @ x.t()).float().tolist())
    thread = threading.Thread(target=lambda: seen.append(torch.rand(3).tolist()))
    thread.start()
    thread.join()
    seen.append(to_dense())
    return seen


def to_dense() -> list[float]:
    return torch.sparse_coo_tensor([[0]], [1.0], (2,)).to_dense().tolist()


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def without(place: Any, name: str, run: Callable[[], Any]) -> Any:
    value = getattr(place, name)
    delattr(place, name)
    try:
        return run()
    finally:
        setattr(place, name, value)


def outcome(place: Any, name: str, run: Callable[[], Any] = program) -> Any:
    """What a program computes without a name, or the error that it meets."""
    try:
        return without(place, name, run)
    except Exception as error:
        return error


@pytest.mark.sweep
@pytest.mark.recorder("python", "native")
def test_a_name_that_is_missing_ends_the_capture_and_not_the_program(tmp_path: Path) -> None:
    tried, wrong = [], []
    program()
    for place in _PLACES:
        for name in sorted({row.rpartition(".")[2] for row in NAMES}):
            if name not in vars(place) or isinstance(alone := outcome(place, name), Exception):
                continue  # PyTorch needs it
            with Passing():
                if isinstance(outcome(place, name, to_dense), Exception):
                    continue  # PyTorch 2.14 does under any dispatch mode
            tried.append(name)
            recorder = Recorder(tmp_path / f"{name}.opreplay")
            recorder.start()
            try:
                under_capture = outcome(place, name)
            finally:
                try:
                    recorder.close()
                except OpReplayError:
                    recorder.close()
            if repr(under_capture) != repr(alone):
                wrong.append(f"{name}: {under_capture!r}")
    assert not wrong
    assert len(tried) > 10
    assert torch._C._len_torch_dispatch_stack() == 0
