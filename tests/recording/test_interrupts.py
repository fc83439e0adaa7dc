"""Interrupts (Ctrl-C and the like) wherever they strike: the program may go on, and the capture stays true."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from .conftest import Capture

_STRIKES = 300


class Struck(BaseException):
    """What the handler raises."""


class Striking:
    """A handler that raises, once each time it is armed: the program arms it inside of its `try`."""

    def __init__(self, seed: int) -> None:
        self.armed = False
        self._randomness = random.Random(seed)

    def __call__(self, *_: Any) -> None:
        if self.armed:
            self.armed = False
            raise Struck

    def arm(self) -> None:
        """Strikes within milliseconds. `armed` is False afterwards, also where the exception got lost in a callback."""
        self.armed = True
        signal.setitimer(signal.ITIMER_REAL, self._randomness.uniform(3e-4, 3e-3))


def dispatch_state() -> tuple[Any, ...]:
    """What of a thread's state an op that was interrupted could leave behind."""
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch._C._len_torch_dispatch_stack(),
            torch._C._is_torch_function_enabled(), torch._C._dispatch_tls_local_include_set().raw_repr(),
            torch._C._dispatch_tls_local_exclude_set().raw_repr())


@pytest.fixture
def striking(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Striking]]:
    """Installs a handler for a seed; afterwards everything is as it was."""
    before, grad = signal.getsignal(signal.SIGALRM), torch.is_grad_enabled()

    def install(seed: int) -> Striking:
        handler = Striking(seed)
        signal.signal(signal.SIGALRM, handler)
        return handler

    yield install
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    torch.set_grad_enabled(grad)


@pytest.mark.parametrize("seed", range(2))
def test_an_interrupt_at_any_moment_leaves_a_capture_that_replays(
    capture: Capture, striking: Callable[[int], Striking], seed: int
) -> None:
    strike = striking(seed)
    caught, states = 0, set()

    def program() -> Any:
        nonlocal caught
        x, y = torch.zeros(4), torch.ones(4)
        step, deadline = 0, time.monotonic() + 60
        expected = dispatch_state()
        while caught < _STRIKES and time.monotonic() < deadline:
            try:
                strike.arm()
                while strike.armed:
                    x.add_(y)
                    (x * 0.5).view(2, 2)
                    if step % 7 == 0:
                        y = y.cos_()
                        torch.rand(2)
                        x.tolist()
                    step += 1
            except Struck:
                caught += 1
            states.add(dispatch_state() == expected)
        return x * 1, y * 1

    captured = capture(program, chunk_records=4096)
    assert caught == _STRIKES
    assert states == {True}
    captured.replays()
