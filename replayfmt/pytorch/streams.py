"""Streams and events of accelerators: which streams are current, and what PyTorch tells of events and waits.

PyTorch calls back where a stream or an event is used, also by C++ code of its own (backward passes), once its trace is
active: `_gpu_trace` of the device's module has the callbacks. Devices whose module has none, or that give no handles of
streams, cannot be followed.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .accelerators import device_module, kind_here

_ACTIVE = "_ZN3c104impl8GPUTrace9haveStateE"  # c10::impl::GPUTrace::haveState


class Callbacks(NamedTuple):
    """What to call, by the names that `_gpu_trace` has. Handles are integers; the device is the current one."""

    EventRecord: Callable[[int, int], None]
    EventWait: Callable[[int, int], None]
    EventDeletion: Callable[[int], None]
    EventSynchronization: Callable[[int], None]
    StreamSynchronization: Callable[[int], None]
    DeviceSynchronization: Callable[[], None]


def followed_kind() -> str:
    """The kind of accelerator of this PyTorch whose streams can be followed, be one there or not; "" without."""
    kind = kind_here()
    return "" if not kind or _trace(kind) is None else kind


def tells_of_memory(kind: str) -> bool:
    """Whether PyTorch's trace also calls back for each allocation of a kind of device, which costs microseconds."""
    return kind in ("cuda", "xpu")


def current_streams(indices: list[int]) -> list[torch.Stream]:
    """The current streams of accelerators by index, of those whose current stream is not their default one."""
    current = torch._C._accelerator_getStream  # what torch.accelerator.current_stream calls, at half its cost
    streams = [current(index) for index in indices]
    return [stream for stream in streams if stream.stream_id]


def handle_of(stream: torch.Stream) -> int:
    """The handle by which the trace names a stream."""
    return int(stream.native_handle)  # type: ignore[attr-defined]


def _trace(kind: str) -> Any:
    module = device_module(kind)
    if kind in ("cuda", "xpu"):
        importlib.import_module(f"torch.{kind}._gpu_trace")
    return getattr(module, "_gpu_trace", None)


class GpuTrace:
    """PyTorch's trace, active between `install` and `remove`."""

    def __init__(self, kind: str, callbacks: Callbacks) -> None:
        trace = _trace(kind)
        self._lists = [getattr(trace, f"{name}Callbacks").callback_list for name in Callbacks._fields]
        self._callbacks = callbacks
        self._was_active: bool | None = None

    @property
    def active(self) -> bool:
        """Whether the callbacks are called."""
        return self._was_active is not None

    def install(self) -> None:
        """Have the callbacks called. Idempotent."""
        if self.active:
            return
        flag = _flag()
        self._was_active = flag.value
        for registered, callback in zip(self._lists, self._callbacks, strict=True):
            registered.append(callback)
        torch._C._activate_gpu_trace()
        flag.value = True  # PyTorch activates it once in a process

    def remove(self) -> None:
        """Have them called no more; without others the trace is off as before, and costs nothing. Idempotent."""
        if self._was_active is None:
            return
        for registered, callback in zip(self._lists, self._callbacks, strict=True):
            if callback in registered:
                registered.remove(callback)
        _flag().value = self._was_active
        self._was_active = None


def _flag() -> ctypes.c_bool:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    return ctypes.c_bool.in_dll(library, _ACTIVE)


def keeps_memory_for_streams(kind: str) -> bool:
    """Whether tensors of a kind of device can say that another stream uses their memory (`record_stream`)."""
    key = {"cuda": "CUDA", "xpu": "XPU"}.get(kind, "PrivateUse1")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::record_stream", key))


class SetStreams:
    """Sets the current streams of some accelerators. What a replay calls where the captured program had others."""

    def __init__(self, streams: list[torch.Stream]) -> None:
        self._streams = streams

    def __call__(self) -> None:
        index = torch.accelerator.current_device_index()
        for stream in self._streams:
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(index)  # setting a stream makes its device current


def default_stream(device: torch.device) -> torch.Stream:
    """An accelerator's default stream."""
    kind = torch.accelerator.current_stream(device.index).device_type
    return torch.Stream(stream_id=0, device_index=device.index, device_type=kind)
