"""Memory that nobody wrote: what only passes through it is no work, and is never compared."""

from __future__ import annotations

from typing import Any

import torch

from .conftest import Capture


def leave_behind(value: float) -> None:
    """Freed memory of small tensors holds this value: what `empty` gives next."""
    kept = [torch.full((size,), value) for size in range(1, 200) for _ in range(4)]
    del kept


def test_circular_padding_copies_unwritten_corners_that_are_not_compared(capture: Capture) -> None:
    x = torch.randn(1, 2, 4, 4)

    def program() -> Any:
        leave_behind(1e30)
        return torch.nn.functional.pad(x, (1, 1, 2, 1), mode="circular") + 1

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    leave_behind(2.0)
    captured.replays()


def test_what_was_copied_from_unwritten_memory_is_compared_again_once_it_is_written(capture: Capture) -> None:
    def program() -> Any:
        leave_behind(1e30)
        half = torch.empty(8)
        half[:4] = 1
        copied = half.clone()
        known = torch.zeros(8).copy_(half)
        known.fill_(3)
        return copied, known, known + 1

    captured = capture(program, digests="ops")
    leave_behind(2.0)
    captured.replays()


def test_noise_of_rrelu_is_only_written_and_read_in_training(capture: Capture) -> None:
    def program() -> Any:
        leave_behind(1e30)
        results = []
        for training in (False, True):
            x = torch.randn(5, requires_grad=True)
            y = torch.nn.functional.rrelu(x, training=training)
            y.sum().backward()
            results += [y.detach(), x.grad]
        with torch.no_grad():
            results.append(torch.nn.functional.rrelu_(torch.randn(5)))
        return results

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    leave_behind(2.0)
    captured.replays()
