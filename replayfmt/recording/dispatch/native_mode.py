"""The recorder below autograd: what the hook in PyTorch's dispatcher (native/recorder.cpp) calls around operators.

It classifies calls like the dispatch mode (mode.py), but does not run the operator: the hook does, with the arguments
as they are. No thread state of the program is masked here, so operators of other packages run as usual, and composites
arrive in parts. Operators written in Python are observed by a dispatch mode, as in mode.py.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import TorchDispatchMode

from replayfmt.native.hook import DispatchHook, Functions, OperatorForHook

from ..arguments import OpCall
from ..capture_session import CaptureSession
from ..collectives import Launch
from ..composite_operators import RecordingGranularity, read_autocast
from ..frames import beyond_recorders, is_interrupt, leave_no_frames
from ..kernels import Action, CapturedKernel, tensors_in
from ..stream.program_state import watched_indices
from ..stream.records import Unrepresentable
from .custom_operators import ObservingMode

# What `before` returns if the call is not recorded: the operator runs by itself, in parts that arrive here, or in
# Python.
_ALONE, _IN_PARTS, _IN_PYTHON = None, False, True


_Step = TypeVar("_Step", bound=Callable[..., Any])
_HOT_RESULTS = (torch.TensorType, torch.ListType, torch.NumberType, torch.IntType, torch.FloatType, torch.BoolType)
_MAKES_FAKE_TENSORS = tuple(os.path.join("torch", "_subclasses", name) for name in ("fake_tensor.py", "fake_impls.py"))


class _Begun:
    """A call in progress. `kernel`: only the name, if Python has no such operator. `call`: None if there is nothing to
    record but `problem`. `early`: recording had not begun. `drawing`: the lock is held."""

    __slots__ = ("args", "call", "drawing", "early", "kernel", "kwargs", "launch", "problem")

    def __init__(self, kernel: CapturedKernel | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.kernel, self.args, self.kwargs = kernel, args, kwargs
        self.call: OpCall | None = None
        self.problem: Unrepresentable | None = None
        self.launch: Launch | None = None
        self.early = False
        self.drawing = False


def _outermost(step: _Step) -> _Step:
    """Run a method as an outermost frame of the recorder: a failure inside ends the capture, and a signal handler's
    exception propagates without recorder frames. Returns None on failure."""

    @functools.wraps(step)
    def called(mode: NativeMode, *args: Any) -> Any:
        try:
            with DisableTorchFunction():
                result = called.__wrapped__(mode, *args)
            return result
        except BaseException as error:
            if not mode.core.failed(error):
                leave_no_frames(error)
                raise
            return None

    return called  # type: ignore[return-value]


class NativeMode(ObservingMode):
    """Records into one core. It is never on a thread's stack of modes."""

    masks = False
    autocast = staticmethod(lambda own: read_autocast())

    def __init__(self, core: CaptureSession, hook: DispatchHook) -> None:
        TorchDispatchMode.__init__(self)
        self.core = core
        self._hook = hook
        self._session: Any = core.session

    # ----------------------------------------------------------------------------------------------- called by the hook

    def functions(self) -> Functions:
        return Functions(
            self.before,
            self.after,
            self.raised,
            self.interrupted,
            self.run,
            self.describe,
            self.register_thread,
            self.late,
            self.late_raised,
            self.core.flush_if_due,
            self.wrote,
            self.register_storages,
        )

    @_outermost
    def after(self, begun: _Begun, result: Any, started: int, ended: int) -> int | None:
        """An operator returned. Returns its record's signature, if it has one."""
        core = self.core
        signature = None
        if begun.call is not None:
            try:
                signature = core.returned(begun.call, result, started, ended)
            finally:
                self._release(begun)
            core.flush_if_due()
        elif isinstance(begun.kernel, str):
            core.unreachable_op(begun.kernel, begun.args, begun.kwargs, result)
        elif begun.early:
            core.began_earlier(begun.kernel, begun.args, begun.kwargs)
        elif begun.launch is not None:
            core.after_collective(begun.launch, result)
        elif begun.problem is not None:
            core.unsupported_op(begun.kernel, begun.args, begun.kwargs, begun.problem)
        else:
            self.note_special(begun.kernel, begun.args)
        return signature

    @_outermost
    def raised(self, begun: _Begun, error: BaseException | None, started: int, ended: int) -> None:
        """It raised. `error`: the exception, if Python raised it."""
        if begun.call is not None:
            self.core.raised(begun.call, started, ended, is_interrupt(error))
        elif isinstance(begun.kernel, str):
            self.core.unreachable_op(begun.kernel, begun.args, begun.kwargs, None)
        self._release(begun)

    @_outermost
    def interrupted(self, begun: _Begun | None, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A signal handler raised in one of the other callbacks, around an operator that ran. `args` and `kwargs`:
        those of an operator on the hot path."""
        if begun is not None:
            self._release(begun)
            args, kwargs = begun.args, begun.kwargs
        self.core.interrupted(args, kwargs, result)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that `before` left to Python."""
        try:
            return self.observed(self.core.calls.kernel_of(func), args, kwargs)
        except BaseException as error:
            leave_no_frames(error)
            raise

    def _release(self, begun: _Begun) -> None:
        """Let other threads draw random numbers again."""
        if begun.drawing:
            begun.drawing = False
            self._session.release_draws()
            self.core.lock.release()

    # ---------------------------------------------------------------------------------------------- for the hot path

    @_outermost
    def describe(self, func: Any) -> OperatorForHook | None:
        kernel = self.core.calls.kernel_of(func)
        operator = kernel.operator
        fills = kernel.writes == (0,) and operator.overwrites_self and kernel.writes_all(0)
        draws = kernel.random and kernel.dropout < 0
        returns = func._schema.returns
        plain = (
            kernel.namespace == "aten"
            and (kernel.action is Action.record or bool(kernel.own_kernels))
            and kernel.body is None
            and not (draws and any(not isinstance(each.type, torch.TensorType) for each in returns))
            and not (kernel.opaque_results or kernel.unnameable or kernel.in_place_view)
            and not (kernel.mixed_lists or kernel.only_with or operator.moves_memory)
            and not (operator.casts_inside or operator.resizes or operator.changes_view)
            and not (operator.makes_tensor_of or operator.grows_arguments)
            and not (kernel.view and self.core.options.payload == "integers")
            and not any(part in kernel.name for part in ("quantize", "fbgemm", "meta"))
            and all(isinstance(each.type, _HOT_RESULTS) for each in returns)
        )
        dropout = kernel.dropout if kernel.random and kernel.dropout >= 0 else None
        return OperatorForHook(
            plain,
            kernel.writes,
            watched_indices(kernel.name),
            dropout,
            not kernel.tensor_places,
            fills,
            operator.empty,
            draws,
            kernel.own_kernels,
        )

    @_outermost
    def register_thread(self) -> None:
        """The calling thread is about to record for the first time: it gets a context, which the hot path is told."""
        _ = self.core.scopes.contexts[get_ident()]

    @_outermost
    def register_storages(self, tensors: list[torch.Tensor]) -> None:
        """An operator is about to use storages that the hot path does not know. Those that need no care take it from
        then on."""
        try:
            self.core.register_storages(tensors)
        except BaseException:
            self.core.interrupted(tuple(tensors), {}, None)
            raise

    @_outermost
    def late(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, started: int, ended: int
    ) -> int | None:
        """An operator ran on the hot path, and some of its results are unknown."""
        kernel = self._kernel_of(func)
        signature = self.core.ran(kernel, args, kwargs, result, started, ended)
        kernel.ran(result)
        self.core.flush_if_due()
        return signature

    @_outermost
    def wrote(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operator on the hot path wrote to storages that other threads have had the complete path look after since
        it began."""
        with self.core.lock:
            if self.core.on:
                self.core.calls.wrote(self._kernel_of(func), args, kwargs)

    @_outermost
    def late_raised(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        error: BaseException | None,
        started: int,
        ended: int,
    ) -> None:
        """An operator raised on the hot path."""
        with self.core.lock:
            call = self.core.before(self._kernel_of(func), args, kwargs)
            if isinstance(call, OpCall):
                self.core.raised(call, started, ended, is_interrupt(error))

    def _kernel_of(self, func: Any) -> CapturedKernel:
        return func if isinstance(func, CapturedKernel) else self.core.calls.kernel_of(func)

    def run_inside(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._hook.shown():
            return function(*args, **kwargs)

    # --------------------------------------------------------------------------------------------------------- deciding

    @_outermost
    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Begun | bool | None:
        """An operator is about to run."""
        core = self.core
        if isinstance(func, str):
            recorded = not core.finished and (core.on or self._begins())
            return _Begun(func, args, kwargs) if recorded else _ALONE
        kernel = None if core.finished else core.calls.kernel_of(func)
        if kernel is None:
            return _IN_PARTS
        if not kernel.own:
            core.arrivals[kernel.name] += 1
        if _is_traced(args, kwargs):
            return _IN_PARTS
        begun = _Begun(kernel, args, kwargs)
        collective = kernel.action is Action.collective
        if kernel.action is not Action.record and not collective and not kernel.has_own_kernel(args, kwargs):
            return _IN_PARTS if kernel.action is Action.decompose else begun
        if not core.on and not self._begins():
            begun.early = core.joining or core.several
            return begun if begun.early else _ALONE
        if core.options.stop_op is not None and self._ends():
            return _ALONE
        if collective:
            launch = core.before_collective(kernel, args, kwargs)
            if isinstance(launch, Unrepresentable):
                begun.problem = launch
            else:
                begun.launch = launch
            return begun
        key = None if kernel.body is None else kernel.body.key(args, kwargs)
        if kernel.body is not None and key is not None:
            manner = core.insides.manner(kernel.name, kernel.body.is_python(key), kernel.own)
            if manner is not RecordingGranularity.whole:
                return _IN_PARTS if manner is RecordingGranularity.inside and not kernel.own else _IN_PYTHON
        draws = kernel.random and kernel.namespace == "aten" and kernel.draws(args, kwargs)
        try:
            if draws:  # the order of draws is the order of records
                core.lock.acquire()
                begun.drawing = True
                self._session.reserve_draws()
            return self._begin(kernel, begun)
        except BaseException:
            if begun.drawing:
                self._release(begun)
            elif draws and core.lock._is_owned():  # type: ignore[attr-defined]
                core.lock.release()
            core.interrupted(args, kwargs, None)
            raise

    def _begin(self, kernel: CapturedKernel, begun: _Begun) -> _Begun | None:
        made = self.core.begin(kernel, begun.args, begun.kwargs, self.autocast)
        if isinstance(made, OpCall):
            begun.call = made
            return begun
        self._release(begun)
        if made is None:
            return _ALONE
        begun.problem = made
        return begun


def _is_traced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a fake tensor is being made: nothing is computed."""
    tensors = tensors_in((*args, *kwargs.values()))
    device = kwargs.get("device")
    on_meta = all(tensor.is_meta for tensor in tensors) if tensors else device is not None and device.type == "meta"
    if not on_meta:
        return False
    frame = next(beyond_recorders(sys._getframe(1)), None)
    return frame is not None and frame.f_code.co_filename.endswith(_MAKES_FAKE_TENSORS)
