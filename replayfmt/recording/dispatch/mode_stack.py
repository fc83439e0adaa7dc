"""The calling thread's stack of dispatch modes. Every thread has its own."""

from __future__ import annotations

from typing import Any

from torch._C import (
    _get_dispatch_stack_at,
    _len_torch_dispatch_stack,
    _pop_torch_dispatch_stack,
    _push_on_torch_dispatch_stack,
)

from .mode import RecordingMode


def mode_stack() -> list[Any]:
    """The modes, outermost first."""
    return [_get_dispatch_stack_at(index) for index in range(_len_torch_dispatch_stack())]


def set_modes(modes: list[Any]) -> None:
    """Make these the thread's modes."""
    while _len_torch_dispatch_stack():
        _pop_torch_dispatch_stack(None)
    for mode in modes:
        _push_on_torch_dispatch_stack(mode)


def remove_mode_at(place: int) -> None:
    above = [_pop_torch_dispatch_stack(None) for _ in range(_len_torch_dispatch_stack() - place)]
    for mode in reversed(above[:-1]):
        _push_on_torch_dispatch_stack(mode)


def remove_mode(mode: Any) -> None:
    """Remove a mode, if the thread has it."""
    stack = mode_stack()
    if mode in stack:
        remove_mode_at(stack.index(mode))


def remove_finished_modes() -> bool:
    """Remove the modes of captures that are over. Returns whether there were any."""
    finished = [
        place for place, mode in enumerate(mode_stack()) if isinstance(mode, RecordingMode) and mode.core.finished
    ]
    for place in reversed(finished):
        remove_mode_at(place)
    return bool(finished)
