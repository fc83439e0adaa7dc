"""Autocast as the program has it: inside a dispatch mode PyTorch masks it.

Operators of PyTorch's own have been cast when they reach the mode. The code of a custom operator runs below it and may
depend on autocast, so it gets what it would get without a capture, and the stream states what that was.
"""

from __future__ import annotations

from collections.abc import Callable
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
