"""The dispatch mode: sees every operator call of the threads that carry it, and passes it on for recording.

Every thread has its own stack of dispatch modes. Three kinds of calls have rules of their own: collectives, which are
launched and waited for (../collectives.py); higher-order operators, whose bodies are recorded as ordinary operators;
and numbers passed where an operator takes tensors.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._C import (
    DispatchKey,
    _get_dispatch_stack_at,
    _len_torch_dispatch_stack,
    _pop_torch_dispatch_stack,
    _push_on_torch_dispatch_stack,
)
from torch.utils._python_dispatch import TorchDispatchMode

from replayfmt.pytorch.tensors.memory import call_undispatched

from ..capture_session import CaptureSession
from ..composite_operators import RecordingGranularity, autocast_below_mode
from ..frames import is_interrupt, leave_no_frames
from ..kernels import Action, CapturedKernel, caller_of, tensor_places
from ..special_values import dispatches_itself
from ..stream.records import Unrepresentable

_ONLY_CALL_THEIR_BODY = ("invoke_subgraph", "strict_mode")


def run_higher_order(mode: RecordingMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one higher-order operator with its inner operators recorded."""
    name = func.name()
    if name == "cond":
        return mode.run_inside(_cond, args, kwargs)
    if name == "scan":
        from torch._higher_order_ops.scan import generic_scan

        return mode.run_inside(_scan, (generic_scan, *args), kwargs)
    eager = func.py_kernels.get(DispatchKey.CompositeExplicitAutograd)
    if eager is None:
        return mode.run_inside(func, args, kwargs)
    if name in _ONLY_CALL_THEIR_BODY or _is_base(func):
        recorded = [
            _with_recorder(mode, arg) if callable(arg) and not isinstance(arg, torch.Tensor) else arg for arg in args
        ]
        return eager(*recorded, **kwargs)
    return mode.run_inside(eager, args, kwargs)


def _is_base(func: Any) -> bool:
    from torch._higher_order_ops.base_hop import BaseHOP

    return isinstance(func, BaseHOP)


def _some_dispatch_themselves(types: Any) -> bool:
    return any(map(dispatches_itself, types))


def _with_recorder(mode: RecordingMode, body: Any) -> Any:
    @functools.wraps(body, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        return mode.run_inside(body, args, kwargs)

    if getattr(body, "_boxed_call", False):
        run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _cond(predicate: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    taken = predicate.item() if isinstance(predicate, torch.Tensor) else predicate
    return (true_fn if taken else false_fn)(*operands)


def _scan(generic_scan: Any, combine_fn: Any, init: Any, xs: Any, additional_inputs: Any = ()) -> Any:
    return generic_scan(combine_fn, init, xs, additional_inputs=additional_inputs)


_NUMBERS: dict[type, torch.dtype] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}


def with_tensors(tensor_places: tuple[int, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an operator, with numbers in tensors' places turned into tensors."""
    places = [index for index in tensor_places if index < len(args) and type(args[index]) in _NUMBERS]
    if not places:
        return args
    made = list(args)
    for index in places:
        made[index] = call_undispatched(torch.scalar_tensor, args[index], dtype=_NUMBERS[type(args[index])])
    return tuple(made)


_clock = time.perf_counter_ns


class RecordingMode(TorchDispatchMode):
    """Records into one core. Inert once the core is finished: a thread may carry it longer than the capture lasts."""

    supports_higher_order_operators = True
    masks = True  # PyTorch disables autocast, autograd and more for what its handler calls
    autocast = staticmethod(autocast_below_mode)
    told = True  # what it sees is recorded at once
    captures_graph = False  # what it sees becomes part of a graph of a device
    launched = False  # whether work without an operator was done under it

    def __init__(self, core: CaptureSession) -> None:
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
        finally:
            if self.core.closed:  # PyTorch puts the mode back when this returns
                self.core.attempt(self.core.ask_to_leave)

    def _dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Decides what kind of call this is, and returns its result."""
        core = self.core
        if core.finished:
            return self._run_unrecorded(func, args, kwargs)
        if types and core.attempt(_some_dispatch_themselves, types):  # `detach` names plain classes too
            return func(*args, **kwargs) if _is_tracing(types) else NotImplemented
        if _len_torch_dispatch_stack() and self._is_above_others():
            return self._beneath(func, args, kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            with core.thread_watch.covered():
                return run_higher_order(self, func, args, kwargs)
        kernel = core.attempt(core.calls.kernel_of, func)
        if kernel is None:
            return self._run_unrecorded(func, args, kwargs)
        if not kernel.own:
            core.arrivals[kernel.name] += 1
        args = core.attempt(with_tensors, kernel.tensor_places, args) or args
        whole = kernel.action in (Action.record, Action.collective)
        if not whole and not core.attempt(kernel.has_own_kernel, args, kwargs):
            return self._special(kernel, args, kwargs)
        return self.issue(kernel, args, kwargs, self._dispatched)

    def issue(
        self,
        kernel: CapturedKernel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        record: Callable[..., Any] | None = None,
    ) -> Any:
        """Call a kernel, and record it. Returns its result. `record`: what does both; None: no dispatcher calls it."""
        core = self.core
        if core.finished:
            return kernel.call(*args, **kwargs)
        if not core.on and not core.attempt(self._begins):
            result = kernel.call(*args, **kwargs)
            if core.on:
                core.began_earlier(kernel, args, kwargs)
            return result
        if core.options.stop_op is not None and core.attempt(self._ends):
            return kernel.call(*args, **kwargs)
        return (record or self.record)(kernel, args, kwargs)

    def _dispatched(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        core = self.core
        if kernel.action is Action.collective:
            return self._collective(kernel, args, kwargs)
        key = None if kernel.body is None else core.attempt(kernel.body.key, args, kwargs)
        if kernel.body is not None and key is not None:
            manner = core.insides.manner(kernel.name, kernel.body.is_python(key), kernel.own)
            if manner is RecordingGranularity.inside and not kernel.own:
                return self.run_inside(kernel.body, args, kwargs)
            if manner is not RecordingGranularity.whole:
                return self.observed(kernel, args, kwargs)
        return self.record(kernel, args, kwargs)

    def observed(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator whose kernel is written in Python, and record it according to what happens inside."""
        raise NotImplementedError("dispatch/custom_operators.py does")

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
        core.flush_if_due()
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

    def _is_above_others(self) -> bool:
        """Whether other modes lie below this one. A thread that joined in a step while PyTorch had set this mode aside
        (where an argument dies, say) has it twice: once from here on."""
        remove_mode(self)
        return bool(_len_torch_dispatch_stack())

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
        result = kernel.call(*args, **kwargs)
        core.attempt(self.note_special, kernel, args)
        return result

    def note_special(self, kernel: CapturedKernel, args: tuple[Any, ...]) -> None:
        """A call that is no op in the capture returned: note what it says of others, if anything."""
        core = self.core
        if kernel.action is Action.scope_enter:
            core.scope_begin(str(args[0]), user=False, token="record_function")
        elif kernel.action is Action.scope_exit:
            core.attempt(self._leave_function)
        elif kernel.action is Action.stream_use:
            core.stream_used(*args)

    def _collective(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        launch = self.core.before_collective(kernel, args, kwargs)
        if isinstance(launch, Unrepresentable):
            return self._run_unsupported(kernel, args, kwargs, launch)
        result = kernel.call(*args, **kwargs)
        if launch is not None:
            self.core.after_collective(launch, result)
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

    def _run_unrecorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        call = self.core.attempt(caller_of, func) or func
        if any(type(each) in _NUMBERS for each in args):
            args = self.core.attempt(lambda: with_tensors(tensor_places(func), args)) or args
        return call(*args, **kwargs)

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


def mode_stack() -> list[Any]:
    """The modes, outermost first."""
    return [_get_dispatch_stack_at(index) for index in range(_len_torch_dispatch_stack())]


def set_modes(modes: list[Any]) -> None:
    """Make these the thread's modes."""
    while _len_torch_dispatch_stack():
        _pop_torch_dispatch_stack(None)
    for mode in modes:
        _push_on_torch_dispatch_stack(mode)


def remove_mode_at(place: int) -> None:
    above = [_pop_torch_dispatch_stack(None) for _ in range(_len_torch_dispatch_stack() - place)]
    for mode in reversed(above[:-1]):
        _push_on_torch_dispatch_stack(mode)


def remove_mode(mode: Any) -> None:
    """Remove a mode, if the thread has it."""
    stack = mode_stack()
    if mode in stack:
        remove_mode_at(stack.index(mode))


def remove_finished_modes() -> bool:
    """Remove the modes of captures that are over. Returns whether there were any."""
    finished = [
        place for place, mode in enumerate(mode_stack()) if isinstance(mode, RecordingMode) and mode.core.finished
    ]
    for place in reversed(finished):
        remove_mode_at(place)
    return bool(finished)
