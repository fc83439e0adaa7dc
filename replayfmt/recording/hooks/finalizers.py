"""Counts the operators of finalizers that the garbage collector calls in the middle of the recorder's own work.

There the recorder sees nothing of what the thread calls, and it cannot record one operator in the middle of another. So
while the collector runs, a dispatch mode counts them, and the capture tells them as unsupported work.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch._C import _pop_torch_dispatch_stack, _push_on_torch_dispatch_stack
from torch.utils._python_dispatch import TorchDispatchMode

from ..dispatch.mode_stack import mode_stack
from ..frames import is_recorders


class Finalizers:
    """Those of one capture. `found(operator)` is called with the name of each operator; it must not take a lock."""

    def __init__(self, found: Callable[[str], None]) -> None:
        self._found = found
        self._counting: dict[int, _Counting] = {}  # by thread

    def install(self) -> None:
        gc.callbacks.append(self._collecting)

    def remove(self) -> None:
        """Idempotent."""
        if self._collecting in gc.callbacks:
            gc.callbacks.remove(self._collecting)

    def _collecting(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "stop":
            mode = self._counting.pop(get_ident(), None)
            if mode is not None and mode in mode_stack():
                _pop_torch_dispatch_stack(None)
        elif is_recorders(sys._getframe(1).f_code):
            mode = self._counting[get_ident()] = _Counting(self._found)
            _push_on_torch_dispatch_stack(mode)


class _Counting(TorchDispatchMode):
    def __init__(self, found: Callable[[str], None]) -> None:
        super().__init__()
        self._found = found

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload):
            self._found(func._schema.name)
        return func(*args, **(kwargs or {}))
