"""Python code of the program that runs in the middle of PyTorch's or the recorder's own work.

`Construction` lets a program construct tensors of its own classes: `class T(torch.Tensor): ...; T([1.0])`.
`Interruptions` counts the operators of finalizers and signal handlers that run in the middle of the recorder's work.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import get_ident
from types import BuiltinFunctionType, FrameType
from typing import Any

import torch
from torch._C import _pop_torch_dispatch_stack, _push_on_torch_dispatch_stack
from torch.utils._python_dispatch import TorchDispatchMode

from replayfmt.format.output import in_main_thread

from ..dispatch.mode import mode_stack
from ..frames import leave_no_frames, leave_no_own_frame
from ..patches import HookHost, Patch, Patched, PatchSet, StandIn, Watch

_original: Callable[..., Any] = torch.Tensor.__new__
_recorder: HookHost | None = None


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


class Construction(Patched):
    """The patch of one capture."""

    def __init__(self, recorder: HookHost) -> None:
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


_OURS = __name__.partition(".")[0]
_handlers: Any = sys.modules["_signal"]  # what Python calls; the functions of `signal` are replaced


class Interruptions(Patched):
    """Those of one capture. `unseen`: whether the recorder misses what the calling thread runs now. `found(operator)`
    is called with the name of each operator. Neither may take a lock. `attempt(step, …)` runs a step of the recorder in
    the middle of the program: None if it fails."""

    def __init__(
        self, unseen: Callable[[], bool], found: Callable[[str], None], attempt: Callable[..., _Counting | None]
    ) -> None:
        self._unseen, self._found, self._attempt = unseen, found, attempt
        self._counting: dict[int, _Counting] = {}  # by thread, while the collector runs
        self._patches = PatchSet(
            Patch("signal", name, partial(_Signal, counted))
            for name, counted in (("signal", self._counted), ("getsignal", None))
        )

    def install(self) -> None:
        gc.callbacks.append(self._collecting)
        self._patches.install()
        self._replace_handlers(self._counted)

    def remove(self) -> None:
        """Idempotent."""
        if self._collecting in gc.callbacks:
            gc.callbacks.remove(self._collecting)
            self._patches.remove()
            self._replace_handlers(_programs)

    def _collecting(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            mode = self._attempt(self._begin)
            if mode is not None:
                self._counting[get_ident()] = mode
        else:
            mode = self._counting.pop(get_ident(), None)
            if mode is not None:
                self._attempt(_end_counting, mode)

    @contextmanager
    def _in_handler(self) -> Iterator[None]:
        mode = self._attempt(self._begin)
        try:
            yield
        finally:
            if mode is not None:
                self._attempt(_end_counting, mode)

    def _begin(self) -> _Counting | None:
        if not self._unseen():
            return None
        mode = _Counting(self._found)
        _push_on_torch_dispatch_stack(mode)
        return mode

    # --------------------------------------------------------------------------------------------------------- handlers

    @staticmethod
    def _replace_handlers(replacement: Callable[[Any], Any]) -> None:
        """Handlers can be set in the main thread only. Elsewhere they stay: they pass calls on."""
        if not in_main_thread():
            return
        for number in signal.valid_signals():
            handler = _handlers.getsignal(number)
            replaced = replacement(handler)
            if replaced is not handler:
                with suppress(OSError, ValueError):
                    _handlers.signal(number, replaced)

    def _counted(self, handler: Any) -> Any:
        """What stands in the place of the program's handler. The recorder's own run no operators."""
        handler = _programs(handler)
        ours = str(getattr(handler, "__module__", "")).partition(".")[0] == _OURS
        if not callable(handler) or isinstance(handler, BuiltinFunctionType | signal.Handlers) or ours:
            return handler
        return _Handler(handler, self._in_handler)


class _Signal(StandIn):
    """`signal.signal` or `signal.getsignal`: the program sees its own handlers."""

    def __init__(self, counted: Callable[[Any], Any] | None, original: Callable[..., Any]) -> None:
        super().__init__(original)
        self._counted = counted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._counted is not None and len(args) == 2:
            args = (args[0], self._counted(args[1]))
        try:
            return _programs(self._original(*args, **kwargs))
        except BaseException as error:
            leave_no_own_frame(error)
            raise


class _Handler(StandIn):
    def __init__(self, original: Callable[..., Any], around: Callable[[], Any]) -> None:
        super().__init__(original)
        self._around = around

    @property
    def programs(self) -> Any:
        return self._original

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        try:
            with self._around():
                return self._original(number, frame)
        except BaseException as error:
            leave_no_own_frame(error)
            raise


def _programs(handler: Any) -> Any:
    """The handler that the program set."""
    return handler.programs if isinstance(handler, _Handler) else handler


def _end_counting(mode: _Counting) -> None:
    if mode in mode_stack():
        _pop_torch_dispatch_stack(None)


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
