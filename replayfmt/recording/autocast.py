"""Autocast as the program has it: inside a dispatch mode PyTorch masks it, and what else comes before the mode.

Operators of PyTorch's own have been cast when they reach the mode. The code of a custom operator runs below it and may
depend on autocast, so it gets what it would get without a capture, and the stream states what that was. A composite
that comes whole is run in parts with all that it would have without the mode.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch._C import DispatchKey

from replayfmt.pytorch.settings import AUTOCAST_DEVICES

_KEYS = {"cpu": DispatchKey.AutocastCPU, "cuda": DispatchKey.AutocastCUDA}


def autocast_of_program() -> dict[str, str]:
    """The autocast settings that the op under way was called with, under their setting's names: a dtype's name, or ""
    for off. Call it inside a dispatch mode's handler."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        return {f"autocast.{device}": _read(device) for device in AUTOCAST_DEVICES}


def _read(device: str) -> str:
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.") if torch.is_autocast_enabled(device) else ""


class WithAutocast:
    """Calls a custom operator from inside a dispatch mode's handler as its program would have called it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        casting = [device for device in AUTOCAST_DEVICES if autocast_of_program()[f"autocast.{device}"]]
        if not casting:
            return self._call(*args, **kwargs)
        excluded = torch._C._dispatch_tls_local_exclude_set()
        for device in casting:
            excluded = excluded.remove(_KEYS[device])
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
            return self._call(*args, **kwargs)


class InParts:
    """Runs a composite from inside a dispatch mode's handler in parts, as the dispatcher does where there is no mode.

    (`OpOverload.decompose` prefers decompositions written in Python, whose results are others.)
    """

    def __init__(self, func: torch._ops.OpOverload) -> None:
        self._func = func
        # What kernels of the composite's own have called is not cast, or made a view, a second time.
        self._excluded = torch._C.DispatchKeySet(DispatchKey.Undefined)
        for key in (*_KEYS.values(), DispatchKey.ADInplaceOrView):
            if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key.name):
                self._excluded = self._excluded.add(key)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Elsewhere than in inference mode, composites are taken apart before they come to the mode.
        if not torch.is_inference_mode_enabled() or _below_another_handler():
            return self._run(args, kwargs)
        # Composites look at whether views of parameters require gradients: all of what the mode masks is put back.
        outside = torch._C._RestorePythonTLSSnapshot()  # type: ignore[attr-defined]
        with outside, torch._C._ExcludeDispatchKeyGuard(self._excluded):
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _below_another_handler() -> bool:
    """Whether a mode or a tensor of the program's is handling an operator: PyTorch masks the same for what that calls,
    with a capture or without."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__" and frame.f_globals.get("__package__") != __package__:
            return True
        frame = frame.f_back
    return False
