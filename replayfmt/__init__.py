"""OpReplay: capture the operators a PyTorch program issues into one file, and do that work again without the program.

Every name is imported when it is first used: `open` needs no torch, `capture`, `scope`, `Recorder` and `Plan` do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replayfmt.errors import OpReplayError, ReplayMismatch, ReplayRefused

if TYPE_CHECKING:
    from replayfmt.api import Capture, open
    from replayfmt.importers.importing import import_trace
    from replayfmt.pytorch.op_libraries import register_op_library
    from replayfmt.pytorch.traced_names import register_op_alias, register_string_default
    from replayfmt.recording.recorder import Recorder, capture, scope
    from replayfmt.replay.plan import Plan
    from replayfmt.replay.substitution.requests import Substitution

__all__ = [
    "Capture",
    "OpReplayError",
    "Plan",
    "Recorder",
    "ReplayMismatch",
    "ReplayRefused",
    "Substitution",
    "capture",
    "import_trace",
    "open",
    "register_op_alias",
    "register_op_library",
    "register_string_default",
    "scope",
]

_HOME = {
    "Capture": "replayfmt.api",
    "open": "replayfmt.api",
    "Recorder": "replayfmt.recording.recorder",
    "capture": "replayfmt.recording.recorder",
    "scope": "replayfmt.recording.recorder",
    "Plan": "replayfmt.replay.plan",
    "import_trace": "replayfmt.importers.importing",
    "register_op_library": "replayfmt.pytorch.op_libraries",
    "register_op_alias": "replayfmt.pytorch.traced_names",
    "register_string_default": "replayfmt.pytorch.traced_names",
    "Substitution": "replayfmt.replay.substitution.requests",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
