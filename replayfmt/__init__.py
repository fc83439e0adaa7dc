"""OpReplay: capture the operators a PyTorch program issues into one file, and do that work again without the program.

`open` needs no torch; `capture`, `scope`, `Recorder` and `Plan` import it when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replayfmt.api import Capture, open
from replayfmt.errors import OpReplayError, ReplayMismatch, ReplayRefused

if TYPE_CHECKING:
    from replayfmt.recording.recorder import Recorder, capture, scope
    from replayfmt.replay.plan import Plan

__all__ = [
    "Capture",
    "OpReplayError",
    "Plan",
    "Recorder",
    "ReplayMismatch",
    "ReplayRefused",
    "capture",
    "open",
    "scope",
]

_NEEDS_TORCH = {
    "Recorder": "replayfmt.recording.recorder",
    "capture": "replayfmt.recording.recorder",
    "scope": "replayfmt.recording.recorder",
    "Plan": "replayfmt.replay.plan",
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_NEEDS_TORCH[name]), name)
