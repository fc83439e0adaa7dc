"""The dispatch mode: sees every operator call of the threads that carry it, and passes it on for recording.

It decides what to do by the kind of call: composites are run in parts, wrapper subclasses unwrapped, fake and
functional tensors left alone, collectives and opaque arguments recorded as unsupported. The operator itself always
runs, with the given arguments, and the program gets whatever it returns or raises.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack, _pop_torch_dispatch_stack, _push_on_torch_dispatch_stack
from torch.utils._python_dispatch import TorchDispatchMode

from ..core import Core
from ..custom_operators.insides import Manner
from ..frames import leave_no_frames
from ..interrupts import is_interrupt
from ..state.autocast import autocast_below_mode
from ..stream.records import Unrepresentable
from .collectives import describe_collective
from .higher_order import run_higher_order
from .kernels import Action, CapturedKernel, caller_of
from .wrapped_numbers import with_tensors
from .wrappers import dispatches_itself

_clock = time.perf_counter_ns


class RecordingMode(TorchDispatchMode):
    """Records into one core. Inert once the core is finished: a thread may carry it longer than the capture lasts."""

    supports_higher_order_operators = True
    masks = True  # PyTorch disables autocast, autograd and more for what its handler calls
    autocast = staticmethod(autocast_below_mode)
    told = True  # what it sees is recorded at once
    captures_graph = False  # what it sees becomes part of a graph of a device
    launched = False  # whether work without an operator was done under it

    def __init__(self, core: Core) -> None:
        super().__init__()
        self.core = core

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Compiled code runs as it would without a capture; hooks record that it did.
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return self._dispatch(func, types, args, kwargs or {})
        except BaseException as error:
            leave_no_frames(error)
            raise

    def _dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Decides what kind of call this is, and returns its result."""
        core = self.core
        if core.finished:
            return self._unrecorded(func)(*args, **kwargs)
        if types and any(map(dispatches_itself, types)):  # `detach` names plain classes too
            return func(*args, **kwargs) if _is_tracing(types) else NotImplemented
        if _len_torch_dispatch_stack():
            return self._beneath(func, args, kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            with core.thread_watch.covered():
                return run_higher_order(self, func, args, kwargs)
        kernel = core.attempt(core.calls.kernel_of, func)
        if kernel is None:
            return self._unrecorded(func)(*args, **kwargs)
        if not kernel.own:
            core.arrivals[kernel.name] += 1
        args = core.attempt(with_tensors, kernel, args) or args
        if kernel.action is not Action.record and not core.attempt(kernel.has_own_kernel, args, kwargs):
            return self._special(kernel, args, kwargs)
        if not core.on and not core.attempt(self._begins):
            return self._before_start(kernel, args, kwargs)
        if core.options.stop_op is not None and core.attempt(self._ends):
            return kernel.call(*args, **kwargs)
        key = None if kernel.body is None else core.attempt(kernel.body.key, args, kwargs)
        if kernel.body is not None and key is not None:
            manner = core.insides.manner(kernel.name, kernel.body.is_python(key), kernel.own)
            if manner is Manner.inside and not kernel.own:
                return self.run_inside(kernel.body, args, kwargs)
            if manner is not Manner.whole:
                return self.observed(kernel, args, kwargs)
        return self.record(kernel, args, kwargs)

    def issue(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a kernel that no dispatcher calls, and record it. Returns its result."""
        core = self.core
        if core.finished:
            return kernel.call(*args, **kwargs)
        if not core.on and not core.attempt(self._begins):
            return self._before_start(kernel, args, kwargs)
        if core.options.stop_op is not None and core.attempt(self._ends):
            return kernel.call(*args, **kwargs)
        return self.record(kernel, args, kwargs)

    def observed(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator whose kernel is written in Python, and record it according to what happens inside."""
        raise NotImplementedError("custom_operators/observing.py does")

    # --------------------------------------------------------------------------------------------------------- ordinary

    def record(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op and record it. Returns its result."""
        core = self.core
        if kernel.random and kernel.namespace == "aten" and core.attempt(kernel.draws, args, kwargs):
            # The order of draws is the order of records. (Other operators may wait for threads that record, too.)
            with core.lock:
                return self._record(kernel, args, kwargs)
        return self._record(kernel, args, kwargs)

    def _record(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        core = self.core
        try:
            call = core.before(kernel, args, kwargs)
        except BaseException:
            core.interrupted(args, kwargs, None)
            raise
        # The op runs outside of every exception handler, so that what it raises has the same context as without a
        # capture.
        if call is None:
            return kernel.call(*args, **kwargs)
        if isinstance(call, Unrepresentable):
            return self._run_unsupported(kernel, args, kwargs, call)
        started = _clock()
        try:
            result = kernel.call(*args, **kwargs)
        except BaseException:
            core.raised(call, started, _clock(), is_interrupt(sys.exception()))
            raise
        try:
            core.recorded(call, result, started, _clock())
        except BaseException:
            core.interrupted(args, kwargs, result)
            raise
        core.pump()
        return result

    def _before_start(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = kernel.call(*args, **kwargs)
        if self.core.on:
            self.core.began_earlier(kernel, args, kwargs)
        return result

    def _begins(self) -> bool:
        """Before recording has begun: whether it begins with this op."""
        core, options = self.core, self.core.options
        with core.lock:
            if core.finished or core.joining:
                return False
            core.ops_seen += 1
            waits_for_scope = options.start_scope is not None and not self._inside_start()
            if waits_for_scope or core.progress.waits() or core.ops_seen <= (options.start_op or 0):
                return False
            core.ops_seen -= 1
            core.resume()
            return core.on

    def _inside_start(self) -> bool:
        progress = self.core.progress
        return self.core.scopes.find(lambda scope: progress.is_start(scope.name, scope.number)) is not None

    def _ends(self) -> bool:
        """If ops are counted: whether this op is past the last one to record."""
        core = self.core
        with core.lock:
            core.ops_seen += 1
            assert core.options.stop_op is not None
            if core.ops_seen > core.options.stop_op:
                core.stop()
        return not core.on

    # ---------------------------------------------------------------------------------------------------- special cases

    def _beneath(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handles another mode below this one: a tracer that does not really run anything, or a mode that replaces what
        is called."""
        keys = torch._C._TorchDispatchModeKey
        if any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)):
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        problem = "another dispatch mode lies beneath the recorder and may have replaced the op"
        kernel = self.core.attempt(self.core.calls.kernel_of, func)
        if kernel is not None:
            self.core.unsupported_op(kernel, args, kwargs, Unrepresentable("host_call", problem))
        return result

    def _special(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        core = self.core
        if kernel.action is Action.decompose:
            assert kernel.parts is not None
            return self.run_inside(kernel.parts, (bool(core.attempt(kernel.parts.unmasks)), *args), kwargs)
        if kernel.action is Action.collective:
            detail = core.attempt(describe_collective, kernel.name, (*args, *kwargs.values()))
            return self._run_unsupported(kernel, args, kwargs, Unrepresentable("collective", detail or ""))
        result = kernel.call(*args, **kwargs)
        if kernel.action is Action.scope_enter:
            core.scope_begin(str(args[0]), user=False, token="record_function")
        elif kernel.action is Action.scope_exit:
            core.attempt(self._leave_function)
        elif kernel.action is Action.stream_use:
            core.stream_used(*args)
        return result

    def _leave_function(self) -> None:
        scopes = self.core.scopes
        scope = scopes.find(lambda entry: entry.token == "record_function")
        if scope is not None:
            self.core.scope_end(scope)

    def run_inside(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """From within a call that is not recorded, call something whose operators are."""
        depth = _len_torch_dispatch_stack()
        try:
            _push_on_torch_dispatch_stack(self)
            return function(*args, **kwargs)
        finally:
            # A signal handler may raise after any call, including those that push and pop the mode.
            try:
                if _len_torch_dispatch_stack() > depth:
                    _pop_torch_dispatch_stack(None)
            except BaseException:
                if _len_torch_dispatch_stack() > depth:
                    _pop_torch_dispatch_stack(None)
                raise

    def _unrecorded(self, func: Any) -> Callable[..., Any]:
        """A function that runs an operator without recording it."""
        if not isinstance(func, torch._ops.OpOverload):
            return func
        return self.core.attempt(caller_of, func) or func

    def _run_unsupported(
        self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any], problem: Unrepresentable
    ) -> Any:
        result = kernel.call(*args, **kwargs)
        self.core.unsupported_op(kernel, args, kwargs, problem)
        return result


def _is_tracing(types: Any) -> bool:
    """Whether an op's tensors are placeholders, as in tracing: nothing is computed."""
    names = (
        ("torch._subclasses.fake_tensor", "FakeTensor"),
        ("torch._subclasses.functional_tensor", "FunctionalTensor"),
    )
    for module, name in names:
        kept = getattr(sys.modules.get(module), name, None)  # None: torch is still importing it
        if kept is not None and any(issubclass(kind, kept) for kind in types):
            return True
    return False
