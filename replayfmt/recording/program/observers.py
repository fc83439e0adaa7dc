"""Who else needs PyTorch's RecordFunction callbacks, which a capture with the hook may turn off in its thread."""

from __future__ import annotations

import sys

_OF_AUTOGRAD = (
    "_enable_profiler",
    "_enable_profiler_legacy",
    "_enable_record_function",
    "_prepare_profiler",
    "_set_empty_test_observer",
    "_toggle_collection_dynamic",
)
_OF_PROFILER = ("_add_execution_trace_observer", "_enable_execution_trace_observer")

# Every function of Python's that registers callbacks, or turns RecordFunction on or off, by module, under each name by
# which PyTorch's own modules call it.
DOORS: dict[str, tuple[str, ...]] = {
    "torch._C": ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy", "_xpu_recordMemoryHistory"),
    "torch._C._autograd": _OF_AUTOGRAD,
    "torch.autograd": _OF_AUTOGRAD,
    "torch.autograd.profiler": _OF_AUTOGRAD,
    "torch.autograd.profiler_legacy": _OF_AUTOGRAD,
    "torch._C._profiler": _OF_PROFILER,
    "torch.profiler.profiler": _OF_PROFILER,
}


def guards_exist() -> bool:
    """Whether compiled code may exist, whose guards are looked through inside a RecordFunction (thread_watch.cpp)."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is None:
        return False
    compiled = getattr(getattr(frames, "input_codes", None), "seen", True)
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", None)
    return bool(compiled) or backends is None or any(map(callable, backends.values()))
