"""OpReplay: capture the operators a PyTorch program issues into one file, and replay them without the program.

Every name is imported when it is first used: `open` needs no torch, `capture`, `run` and `Plan` do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replayfmt.errors import OpReplayError, ReplayMismatch, ReplayRefused

if TYPE_CHECKING:
    from replayfmt.api import Capture, Op, Ops, open
    from replayfmt.benchmark.convenience import Benchmarked, benchmark
    from replayfmt.compare.comparison import compare
    from replayfmt.importers.importing import import_ranks, import_trace
    from replayfmt.pytorch.op_libraries import register_op_library
    from replayfmt.pytorch.traced_names import register_op_alias, register_string_default
    from replayfmt.recording.recorder import Recorder, capture, scope
    from replayfmt.recording.requests import CaptureRequests, request_capture
    from replayfmt.replay.convenience import Replayed, run
    from replayfmt.replay.plan import Plan
    from replayfmt.replay.substitution.loading import Substitution
    from replayfmt.trim.recorded import record_replay

    __version__: str

# Where each public name that is not here already is defined; "" names a package, which stands for itself.
_HOME = {
    "Benchmarked": "replayfmt.benchmark.convenience",
    "Capture": "replayfmt.api",
    "CaptureRequests": "replayfmt.recording.requests",
    "Op": "replayfmt.api",
    "Ops": "replayfmt.api",
    "Plan": "replayfmt.replay.plan",
    "Recorder": "replayfmt.recording.recorder",
    "Replayed": "replayfmt.replay.convenience",
    "Substitution": "replayfmt.replay.substitution.loading",
    "benchmark": "",
    "capture": "replayfmt.recording.recorder",
    "compare": "",
    "import_ranks": "replayfmt.importers.importing",
    "import_trace": "replayfmt.importers.importing",
    "open": "replayfmt.api",
    "record_replay": "replayfmt.trim.recorded",
    "register_op_alias": "replayfmt.pytorch.traced_names",
    "register_op_library": "replayfmt.pytorch.op_libraries",
    "register_string_default": "replayfmt.pytorch.traced_names",
    "request_capture": "replayfmt.recording.requests",
    "run": "replayfmt.replay.convenience",
    "scope": "replayfmt.recording.recorder",
}

__all__ = [
    "Benchmarked",
    "Capture",
    "CaptureRequests",
    "Op",
    "OpReplayError",
    "Ops",
    "Plan",
    "Recorder",
    "ReplayMismatch",
    "ReplayRefused",
    "Replayed",
    "Substitution",
    "__version__",
    "benchmark",
    "capture",
    "compare",
    "import_ranks",
    "import_trace",
    "open",
    "record_replay",
    "register_op_alias",
    "register_op_library",
    "register_string_default",
    "request_capture",
    "run",
    "scope",
]


def __getattr__(name: str) -> Any:
    import gc
    from importlib import import_module

    if name == "__version__":
        return import_module("replayfmt.version").own_version()
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOME[name]
    collects = gc.isenabled()
    gc.disable()  # the new objects would bring about a full collection, which takes as long as the import
    try:
        return getattr(import_module(home), name) if home else import_module(f"{__name__}.{name}")
    finally:
        if collects:
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
