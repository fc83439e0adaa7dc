"""`--module-scopes`: every call of an nn.Module is a scope named after the module's path, such as
`transformer.h.0.attn`.

Paths start at the outermost module that was called, the root; the root itself is named after its class. A module keeps
its path when it is later called on its own (checkpointing does that in the backward pass). The scopes come from
PyTorch's global forward hooks, so a module whose `forward` is called directly gets none, nor does one inside a compiled
region.
"""

from __future__ import annotations

import sys
import threading
import weakref
from types import FrameType
from typing import Any

import torch
from torch.nn.modules import module as hooks

from ..frames import outwards
from ..patches import HookHost


class _Open(threading.local):
    """The module scopes that this thread is in: (module, name, the frame that calls its forward)."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.nn.Module, str, FrameType]] = []


class ModuleScopes:
    """The hooks of one capture."""

    def __init__(self, recorder: HookHost) -> None:
        self._recorder = recorder
        self._open = _Open()
        self._paths: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []

    def install(self) -> None:
        self._handles = [
            hooks.register_module_forward_pre_hook(self._begin),
            hooks.register_module_forward_hook(self._end, always_call=True),
        ]

    def remove(self) -> None:
        """Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _begin(self, module: torch.nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling() or not self._recorder.present():
            return
        frame = sys._getframe(1)
        self._leave_abandoned(frame)
        calls = self._open.calls
        name = self._path(module, calls[0][0] if calls else None)
        calls.append((module, name, frame))
        self._recorder.module_scope_begin(name)

    def _end(self, module: torch.nn.Module, _args: Any, _result: Any) -> None:
        if torch.compiler.is_compiling():
            return
        calls = self._open.calls
        if any(entered is module for entered, _, _ in calls):
            while self._leave() is not module:
                pass

    def _leave(self) -> torch.nn.Module:
        module, name, _ = self._open.calls.pop()
        self._recorder.module_scope_end(name)
        return module

    def _leave_abandoned(self, frame: FrameType | None) -> None:
        """Leave scopes whose call is over: PyTorch runs no hooks for exceptions like KeyboardInterrupt."""
        calls = self._open.calls
        if not calls:
            return
        running = set(map(id, outwards(frame)))
        # Frames in `calls` are alive, so their ids are unique.
        while calls and id(calls[-1][2]) not in running:
            self._leave()

    def _path(self, module: torch.nn.Module, root: torch.nn.Module | None) -> str:
        if module not in self._paths:
            # A new root, or a module that was added to its root after the root's first call. A module that was a root
            # itself gets its path under this one.
            top = module if root is None else root
            for name, part in top.named_modules():
                self._paths[part] = name or type(part).__name__
        return self._paths.setdefault(module, type(module).__name__)
