"""Lets a program construct tensors of its own classes: `class T(torch.Tensor): ...; T([1.0])`.

PyTorch's constructor converts the result of its operators to a `T`. Under any dispatch mode, that result is already a
Python object of another class, and the constructor raises. So the mode is removed for the duration of the call. The new
tensor is content that no op produced: it is imported at its first use.

(A program that bypasses `torch.Tensor.__new__` and calls that of `torch._C.TensorBase` still gets the error.)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Protocol

import torch

from ..frames import leave_no_frames
from .import_watch import Watch
from .patches import Patch, PatchSet

_original: Callable[..., Any] = torch.Tensor.__new__
_recorder: RecorderForConstruction | None = None


class RecorderForConstruction(Protocol):
    """What the construction needs from a recorder."""

    def paused(self) -> AbstractContextManager[Any]: ...

    def attempt(self, step: Callable[..., Any], *args: Any) -> Any:
        """Run recorder code: a failure in it ends the recording, not the program."""
        ...


def construct(*args: Any, **kwargs: Any) -> Any:
    """`torch.Tensor.__new__` for a program under capture. (One function for all captures, because Dynamo compares by
    identity.)"""
    recorder = _recorder
    try:
        if recorder is None or not args or args[0] is torch.Tensor:
            return _original(*args, **kwargs)
        with recorder.paused():
            return _original(*args, **kwargs)
    except BaseException as error:
        leave_no_frames(error)
        raise


class Construction:
    """The patch of one capture."""

    def __init__(self, recorder: RecorderForConstruction) -> None:
        self._recorder = recorder
        self._patches = PatchSet([Patch("torch", "Tensor.__new__", lambda _: staticmethod(construct))])
        self._dynamo: Watch | None = None

    def install(self) -> None:
        global _recorder
        _recorder = self._recorder
        self._patches.install()
        self._dynamo = Watch("torch._dynamo.polyfills.tensor", partial(self._recorder.attempt, _tell_dynamo))

    def remove(self) -> None:
        """Restore everything. Idempotent."""
        global _recorder
        if _recorder is self._recorder:
            _recorder = None
        self._patches.remove()
        if self._dynamo is not None:
            self._dynamo.stop()
            self._dynamo = None


def _tell_dynamo(polyfills: Any) -> None:
    """Dynamo traces a polyfill in place of PyTorch's constructor (since 2.12); make it do the same for the recorder's,
    whichever of the two was installed when Dynamo was imported."""
    polyfill = getattr(polyfills, "tensor_pynew", None)
    if polyfill is None:
        return
    traced = polyfill.__torch_dynamo_polyfill__
    for function in (_original, construct):
        with suppress(ValueError):  # already registered
            torch.compiler.substitute_in_graph(function, skip_signature_check=True)(traced)
