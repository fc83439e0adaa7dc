"""The recorder beneath autograd: what the hook in PyTorch's dispatcher (native/recorder.cpp) calls around operators.

It decides what a call is as the dispatch mode does (mode.py), but it does not run the operator: the hook does, with the
arguments as they are. Nothing of the program's thread is masked here, so operators of other packages run as ever, and
composites come in parts. Operators that are written in Python are observed by a dispatch mode, as in mode.py.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from replayfmt.native.hook import DispatchHook

from ..core import Core
from ..custom_operators.insides import Manner
from ..custom_operators.observing import ObservingMode, observe
from ..frames import is_recorders, leave_no_frames
from ..interrupts import is_interrupt
from ..state.autocast import read_autocast
from ..stream.records import Unrepresentable
from .call import OpCall
from .collectives import describe_collective
from .kernels import Action, CapturedKernel, tensors_in

# What `before` answers where the call is not recorded: the operator runs alone, in parts that come here, or in Python.
_ALONE, _IN_PARTS, _IN_PYTHON = None, False, True


_FAKE_TENSORS = os.path.join("torch", "_subclasses", "fake_tensor.py")


class _Begun:
    """A call that runs. `call`: None where there is nothing to record but `problem`; `drawing`: with the lock held."""

    __slots__ = ("args", "call", "drawing", "kernel", "kwargs", "problem")

    def __init__(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.kernel, self.args, self.kwargs = kernel, args, kwargs
        self.call: OpCall | None = None
        self.problem: Unrepresentable | None = None
        self.drawing = False


class NativeMode(ObservingMode):
    """Records into one core. Never on a thread's stack of modes."""

    masks = False
    autocast = staticmethod(lambda own: read_autocast())

    def __init__(self, core: Core, hook: DispatchHook) -> None:
        TorchDispatchMode.__init__(self)  # without the fast path
        self.core = core
        self._hook = hook

    # ----------------------------------------------------------------------------------------------- called by the hook

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Begun | bool | None:
        """An operator is about to run."""
        try:
            return self._before(func, args, kwargs)
        except BaseException as error:
            leave_no_frames(error)
            raise

    def after(self, begun: _Begun, result: Any, started: int, ended: int) -> None:
        """It returned."""
        core = self.core
        try:
            if begun.call is not None:
                try:
                    core.returned(begun.call, result, started, ended)
                except BaseException:
                    core.interrupted(begun.args, begun.kwargs, result)
                    raise
                finally:
                    if begun.drawing:
                        core.lock.release()
                core.pump()
            elif begun.problem is not None:
                core.unsupported_op(begun.kernel, begun.args, begun.kwargs, begun.problem)
            elif begun.kernel.action is Action.scope_enter:
                core.scope_begin(str(begun.args[0]), user=False, token="record_function")
            elif begun.kernel.action is Action.scope_exit:
                core.attempt(self._leave_function)
        except BaseException as error:
            leave_no_frames(error)
            raise

    def raised(self, begun: _Begun, error: BaseException | None, started: int, ended: int) -> None:
        """It raised. `error`: where Python did."""
        try:
            if begun.call is not None:
                try:
                    self.core.raised(begun.call, started, ended, is_interrupt(error))
                finally:
                    if begun.drawing:
                        self.core.lock.release()
        except BaseException as interrupt:
            leave_no_frames(interrupt)
            raise

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that `before` left to Python."""
        try:
            return observe(self, self.core.calls.kernel_of(func), args, kwargs)
        except BaseException as error:
            leave_no_frames(error)
            raise

    def run_inside(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._hook.shown():
            return function(*args, **kwargs)

    # --------------------------------------------------------------------------------------------------------- deciding

    def _before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Begun | bool | None:
        core = self.core
        kernel = None if core.finished else core.attempt(core.calls.kernel_of, func)
        if kernel is None:
            return _IN_PARTS
        if not kernel.own:
            core.arrivals[kernel.name] += 1
        if core.attempt(_is_traced, args, kwargs):
            return _IN_PARTS
        begun = _Begun(kernel, args, kwargs)
        if kernel.action is not Action.record and not core.attempt(kernel.has_own_kernel, args, kwargs):
            if kernel.action is Action.decompose:
                return _IN_PARTS
            if kernel.action is Action.collective:
                detail = core.attempt(describe_collective, (*args, *kwargs.values()))
                begun.problem = Unrepresentable("collective", detail or "")
            return begun
        if not core.on and not core.attempt(self._begins):
            return _ALONE
        if core.options.stop_op is not None and core.attempt(self._ends):
            return _ALONE
        key = None if kernel.body is None else core.attempt(kernel.body.key, args, kwargs)
        if kernel.body is not None and key is not None:
            manner = core.insides.manner(kernel.name, kernel.body.is_python(key))
            if manner is not Manner.whole:
                return _IN_PARTS if manner is Manner.inside else _IN_PYTHON
        if kernel.random and kernel.namespace == "aten" and core.attempt(kernel.draws, args, kwargs):
            # The order of draws is the order of records.
            core.lock.acquire()
            begun.drawing = True
        try:
            return self._begin(begun)
        except BaseException:
            if begun.drawing:
                core.lock.release()
            core.interrupted(args, kwargs, None)
            raise

    def _begin(self, begun: _Begun) -> _Begun | None:
        made = self.core.before(begun.kernel, begun.args, begun.kwargs, self.autocast)
        if isinstance(made, OpCall):
            begun.call = made
            return begun
        if begun.drawing:
            begun.drawing = False
            self.core.lock.release()
        if made is None:
            return _ALONE
        begun.problem = made
        return begun


def _is_traced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a fake tensor is being made: nothing is computed."""
    tensors = tensors_in((*args, *kwargs.values()))
    if not tensors or not all(tensor.is_meta for tensor in tensors):
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_recorders(frame.f_code):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.endswith(_FAKE_TENSORS)
