"""Lets a program construct tensors of its own classes: `class T(torch.Tensor): ...; T([1.0])`.

PyTorch's constructor takes what its operators return and makes it a `T`. Under a dispatch mode, whichever it is, they
return tensors that already are objects of another class, and the constructor raises. So the mode is taken off for that
moment. What it makes is content that no op produced: it enters the capture at its first use.

(A program that goes past `torch.Tensor.__new__` to that of `torch._C.TensorBase` still gets the error.)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import torch

from ..frames import leave_no_frames
from .import_watch import Watch
from .patches import Patch, PatchSet

_original: Callable[..., Any] = torch.Tensor.__new__
_recorder: RecorderForConstruction | None = None


class RecorderForConstruction(Protocol):
    """What the construction needs of a recorder."""

    def paused(self) -> AbstractContextManager[Any]: ...


def construct(*args: Any, **kwargs: Any) -> Any:
    """`torch.Tensor.__new__` of a program under capture. (One function for all captures: Dynamo goes by identity.)"""
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
        self._dynamo = Watch("torch._dynamo.polyfills.tensor", _tell_dynamo)

    def remove(self) -> None:
        """Put everything back as it was. Idempotent."""
        global _recorder
        if _recorder is self._recorder:
            _recorder = None
        self._patches.remove()
        if self._dynamo is not None:
            self._dynamo.stop()
            self._dynamo = None


def _tell_dynamo(polyfills: Any) -> None:
    """What Dynamo traces in place of PyTorch's constructor, it traces in place of the recorder's, too, whichever of the
    two it found when it was imported."""
    traced = polyfills.tensor_pynew.__torch_dynamo_polyfill__
    for function in (_original, construct):
        with suppress(ValueError):  # it knows this one
            torch.compiler.substitute_in_graph(function, skip_signature_check=True)(traced)
