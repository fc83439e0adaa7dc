"""Operators of other packages: recorded whole, or as the operators inside them if they hide state.

An operator that is written in Python is observed: what its kernel does decides how it is recorded. `DeclaredWork`
reports operators, and kernels called past the dispatcher, whose work bypassed the recorder.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replayfmt.pytorch.operators import is_pytorchs
from replayfmt.pytorch.overloads import find_overload
from replayfmt.pytorch.tensors.memory import shape_of, storage_of

from ..arguments import OpCall
from ..calls import PassedThrough
from ..capture_session import CaptureSession
from ..composite_operators import autocast_of_program
from ..frames import is_interrupt, leave_no_own_frame
from ..kernels import Action, CapturedKernel, tensors_in
from ..patches import HookHost, Patch, Patched, PatchSet, around
from ..special_values import plain_parts
from ..storages.trackers import ATTRIBUTE, Tracker, has_bytes
from ..stream.program_state import address, drawn_from, generator_state
from ..stream.records import Unrepresentable
from .mode import RecordingMode

_Written = tuple[torch.Tensor, Tracker | None, list[tuple[int, int, int]]]
_UNSEEN = "the operator's kernel did its work where no recorded op did it: "


class DeclaredWork(Patched):
    """The patches of one capture that see calls of operators from Python."""

    def __init__(self, recorder: HookHost, core: CaptureSession) -> None:
        self._recorder = recorder
        self._core = core
        call_with_keys = around(self._around_keys, leave_no_own_frame)
        self._patches = PatchSet(
            [
                Patch("torch._ops", "OpOverload.__call__", self._around),
                Patch("torch._ops", "OpOverloadPacket.__call__", self._around),
                # Both take a set of dispatch keys, in which the recorder's may be missing. The first is what
                # `OpOverload.redispatch` calls, the second what `torch.library.get_kernel` returns.
                Patch("torch._C", "_DispatchOperatorHandle.redispatch_boxed", call_with_keys),
                Patch("torch._C", "_SafeKernelFunction.call_boxed", call_with_keys),
            ]
        )

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(operator: Any, /, *args: Any, **kwargs: Any) -> Any:
            try:
                name = self._core.attempt(_name, operator) or ""
                if not name or is_pytorchs(name.partition("::")[0]) or not self._recorder.recording():
                    return original(operator, *args, **kwargs)
                return watch(self._core, functools.partial(original, operator), operator, name, args, kwargs)
            except BaseException as error:
                leave_no_own_frame(error)
                raise

        return call

    def _around_keys(self, original: Callable[..., Any], called: Any, /, keys: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(original, called, keys)
        operator = self._core.attempt(_operator_of, called) if self._recorder.recording() else None
        if operator is None:
            return run(*args, **kwargs)
        return watch(self._core, run, operator, operator._schema.name, args, kwargs)


def _operator_of(called: Any) -> torch._ops.OpOverload | None:
    """The operator of a handle, or of which a kernel is."""
    schema = getattr(called, "op_handle", called).schema()
    return find_overload(schema.name, schema.overload_name or "default")


def watch(
    core: CaptureSession,
    original: Callable[..., Any],
    operator: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a call of an operator. Unless the recorder sees it, its work must be that of recorded ops."""
    before = core.arrivals[name]
    written = core.attempt(_forget_writes, core, operator, args, kwargs) or []
    unwritten: list[torch.Tensor] = []
    try:
        result = original(*args, **kwargs)
    finally:
        unwritten += [tensor for tensor, tracker, known in written if not _remember(tracker, known)]
        unwritten = [tensor for tensor in unwritten if shape_of(tensor).numel()]
    if core.arrivals[name] == before and core.on:
        core.attempt(_tell, core, name, unwritten, result)
    return result


def _forget_writes(
    core: CaptureSession, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[_Written]:
    """The tensors that a call is declared to write, with the recorded writes known so far, which are removed while the
    operator runs."""
    written = []
    for tensor in _written(operator, args, kwargs):
        tracker = core.storages.tracker_of(storage_of(tensor))
        written.append((tensor, tracker, [] if tracker is None else tracker.entry.written()))
        if tracker is not None:
            tracker.entry.clear_written()
    return written


def _tell(core: CaptureSession, name: str, unwritten: list[torch.Tensor], result: Any) -> None:
    with core.lock:
        if unwritten:
            core.records.unsupported("unseen_work", name, f"{_UNSEEN}it declares that it writes an argument")
            for tensor in unwritten:
                core.outside.written(tensor)
        elif any(_is_no_ops_work(core, tensor) for tensor in _memories(tensors_in(result))):
            core.records.unsupported("unseen_work", name, f"{_UNSEEN}it returned what no op wrote")


def _is_no_ops_work(core: CaptureSession, tensor: torch.Tensor) -> bool:
    if shape_of(tensor).numel() == 0:
        return False
    storage = storage_of(tensor)
    tracker = core.storages.tracker_of(storage)
    if tracker is None:
        return has_bytes(storage, storage.nbytes(), storage.device)
    state = tracker.state
    return state is not None and state.coverage is not None and not state.coverage.touched


def _name(operator: Any) -> str:
    """An overload's or a packet's name without overload."""
    if isinstance(operator, torch._ops.OpOverload):
        return operator._schema.name
    return operator._qualified_op_name


def _remember(tracker: Tracker | None, known: list[tuple[int, int, int]]) -> bool:
    """Add the writes known before to those made since. Returns whether there were any since."""
    if tracker is None:
        return False
    since = tracker.entry.written()
    for tensor, _meta, _offset in known:
        tracker.entry.note_written(tensor)
    return bool(since)


def _written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call of an operator is declared to write."""
    given: dict[int, torch.Tensor] = {}
    for place, name in _written_places(operator):
        value = args[place] if place < len(args) else kwargs.get(name)
        given.update((id(tensor), tensor) for tensor in _memories(tensors_in(value)))
    return list(given.values())


@functools.lru_cache(maxsize=4096)
def _written_places(operator: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that an overload, or any overload of a packet, is declared to write."""
    schemas = [operator._schema] if isinstance(operator, torch._ops.OpOverload) else operator._schemas.values()
    written = {
        (place, argument.name): None
        for schema in schemas
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    return tuple(written)


def _memories(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those of some tensors, or of their parts, that have memory of their own."""
    own = [tensor for tensor in tensors if not torch._C._functorch.is_functorch_wrapped_tensor(tensor)]
    return [part for tensor in own for part in plain_parts(tensor)]


_clock = time.perf_counter_ns
_LAUNCHED = "inside the operator ran a compiled region or a launch, before it was seen to hide state"
_KEPT = (
    "the operator is written in Python and keeps memory that it allocated, which a replay of the call would not "
    "find; capture with --inside and its name to record the operators inside"
)


class PendingOp(NamedTuple):
    """An op that has run and is not recorded yet."""

    kernel: CapturedKernel
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    started: int
    ended: int
    states: list[tuple[torch.Generator, bytes]]  # generators, with their states before the op


def observe(mode: RecordingMode, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator written in Python and record it."""
    core = mode.core
    assert kernel.body is not None
    body = kernel.body if mode.masks else kernel.body.unmasked
    around = mode if isinstance(mode, Observer) and not mode.told else None
    if around is not None and core.attempt(around.hides, kernel, args, kwargs) is not False:
        around.tell()
        around = None
    call: OpCall | None = None
    if around is None:
        begun = core.before(kernel, args, kwargs, mode.autocast)
        if isinstance(begun, Unrepresentable):  # the call cannot be recorded, so what it does must be
            core.insides.hides_state(kernel.name)
            return mode.run_inside(body, args, kwargs)
        if begun is None:
            return kernel.call(*args, **kwargs) if mode.masks else body(*args, **kwargs)
        call = begun
    observer = core.attempt(Observer, core, kernel, args, kwargs, around)
    if observer is None:  # recording has failed
        return kernel.call(*args, **kwargs) if mode.masks else body(*args, **kwargs)
    states = core.attempt(observer.states, kernel, args, kwargs) if around is not None else None
    started = _clock()
    try:
        result = observer.run_inside(body, args, kwargs)
    except BaseException:
        if call is not None and not observer.told:
            core.raised(call, started, _clock(), is_interrupt(sys.exception()))
        raise
    ended = _clock()
    core.attempt(observer.look_at_result, result)
    if not observer.told:
        if call is not None:
            core.recorded(call, result, started, ended)
        elif around is not None:
            core.attempt(around.note, PendingOp(kernel, args, kwargs, result, started, ended, states or []))
        core.attempt(observer.leave, result)
    core.flush_if_due()
    return result


def _run_replaced(mode: RecordingMode, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a kernel of the program's for one of PyTorch's own operators, whose parts are recorded."""
    assert kernel.body is not None
    run = functools.partial(mode.run_inside, kernel.body if mode.masks else kernel.body.unmasked)

    def inside(*args: Any, **kwargs: Any) -> Any:
        return run(args, kwargs)

    if kernel.operator.empty:
        return inside(*args, **kwargs)
    return watch(mode.core, inside, kernel.func, kernel.name, args, kwargs)


class ObservingMode(RecordingMode):
    """The mode of a capture that looks inside operators written in Python."""

    def observed(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (_run_replaced if kernel.own else observe)(self, kernel, args, kwargs)


class Observer(ObservingMode):
    """Observes the inside of one call. `told`: what happened so far has been recorded, and everything after it is
    recorded directly."""

    def __init__(
        self,
        core: CaptureSession,
        kernel: CapturedKernel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        around: Observer | None,
    ) -> None:
        TorchDispatchMode.__init__(self)
        self.core = core
        self.told = False
        self._kernel = kernel
        self._around = around
        self._pending: list[tuple[PendingOp, list[tuple[torch.Generator, bytes, bytes]]]] = []  # with states after it
        self._skipped_scopes = 0
        given = list(_given(kernel, args, kwargs))
        self._own = {number for _index, number, _tensor in given}
        self._names = {number: kernel.arguments[index].name for index, number, _tensor in given}
        self._writable = {number for index, number, _tensor in given if kernel.arguments[index].written}
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._generators = {address(v) for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)}

    # ---------------------------------------------------------------------------------------------------------- the ops

    def record(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        core = self.core
        if not self.told and core.attempt(self.hides, kernel, args, kwargs) is not False:
            self.tell()
        if self.told:
            return super().record(kernel, args, kwargs)
        states = core.attempt(self.states, kernel, args, kwargs) or []
        started = _clock()
        result = kernel.call(*args, **kwargs)
        core.attempt(self.note, PendingOp(kernel, args, kwargs, result, started, _clock(), states))
        return result

    def _run_unsupported(
        self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any], problem: Unrepresentable
    ) -> Any:
        self.tell()
        return super()._run_unsupported(kernel, args, kwargs, problem)

    def _special(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entered, left = kernel.action is Action.scope_enter, kernel.action is Action.scope_exit
        if (entered and not self.told) or (left and self._skipped_scopes):
            self._skipped_scopes += 1 if entered else -1
            return kernel.call(*args, **kwargs)
        return super()._special(kernel, args, kwargs)

    def _ends(self) -> bool:
        return self.told and super()._ends()

    def hides(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an op that is about to run means that the call must be recorded as the operators inside it."""
        autocast = None if kernel.own or not kernel.operator.casts_inside else autocast_of_program()
        if self.core.numeric.moved(kernel.name, autocast) or kernel.operator.moves_memory:
            return True
        if kernel.in_place_view and kernel.name != "aten::detach_":
            return True
        for value in (*args, *kwargs.values()):
            if isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
                return True
            if isinstance(value, torch.Generator) and address(value) not in self._generators:
                return True
        for index, number, tensor in _given(kernel, args, kwargs):
            written = kernel.arguments[index].written
            if number not in self._own:
                if written or not kernel.operator.lifts:
                    return True
                self._own.add(number)
            elif written and number not in self._writable:
                if number in self._names:  # else it came from elsewhere: an array, say
                    self.core.records.notes[
                        f"{self._kernel.name} writes its argument {self._names[number]!r}, which its schema does "
                        f"not declare (Tensor(a!)); the operators inside it are recorded instead"
                    ] = None
                return True
            elif written and (shape_of(tensor).numel() == 0 or _is_watched(tensor)):
                return True
        return False

    def states(
        self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[torch.Generator, bytes]]:
        """The generators that an op may draw from, and their states before it."""
        if not (kernel.random and kernel.draws(args, kwargs)):
            return []
        tensors = tensors_in((*args, *kwargs.values()))
        devices = {torch.device("cpu"), *(tensor.device for tensor in tensors)}
        return [(each, generator_state(each)) for each in drawn_from(args, kwargs, devices)]

    def note(self, op: PendingOp) -> None:
        for storage in _storages(op.result):
            number = storage._cdata
            if number not in self._own:
                self._own.add(number)
                self._writable.add(number)
                self._made[number] = weakref.ref(storage)
        drawn = [(generator, before, generator_state(generator)) for generator, before in op.states]
        self._pending.append((op, drawn))

    def tell(self) -> None:
        """Record the ops that ran inside so far, and from now on every op directly."""
        if self.told:
            return
        if self._around is not None:
            self._around.tell()
        self.told = True
        self.core.insides.hides_state(self._kernel.name)
        if self.launched:
            self.core.attempt(self._unsupported, "unseen_work", _LAUNCHED)
        for op, drawn in self._pending:
            self.core.attempt(_tell_late, self.core, op, drawn)
        self._pending.clear()

    # ------------------------------------------------------------------------------------------------------- the end

    def look_at_result(self, result: Any) -> None:
        """The call returned."""
        declared = any(each.alias_info is not None for each in self._kernel.func._schema.returns)
        for storage in _storages(result) if not declared else ():
            if storage._cdata in self._names:
                self.core.records.notes[
                    f"{self._kernel.name} returns the memory of its argument {self._names[storage._cdata]!r}, which "
                    "its schema does not declare (Tensor(a))"
                ] = None
        known = self.core.storages.tracker_of
        if any(storage._cdata not in self._own and known(storage) is not None for storage in _storages(result)):
            self.tell()

    def leave(self, result: Any) -> None:
        """The call was recorded whole. Memory that it allocated and that outlives it is state that a replay does not
        have, unless it is kept for gradients."""
        for storage in _storages(result):
            self._made.pop(storage._cdata, None)
        self._pending.clear()
        if self._around is not None:
            self._around._made.update(self._made)
        elif not any(tensor.requires_grad for tensor in tensors_in(result)) and self._is_kept():
            self.core.insides.hides_state(self._kernel.name)
            self._unsupported("hidden_state", _KEPT)

    def _is_kept(self) -> bool:
        """Whether memory that the inside allocated is still there."""
        if all(storage() is None for storage in self._made.values()):
            return False
        gc.collect()  # what is only held by objects that refer to each other (Triton's interpreter makes such) is gone
        return any(storage() is not None for storage in self._made.values())

    def _unsupported(self, reason: str, detail: str) -> None:
        with self.core.lock:
            self.core.records.unsupported(reason, self._kernel.name, detail)


def _tell_late(core: CaptureSession, op: PendingOp, drawn: list[tuple[torch.Generator, bytes, bytes]]) -> None:
    """Record an op that has run."""
    with core.lock:
        if core.on:
            try:
                call = core.calls.before(op.kernel, op.args, op.kwargs, drawn)
                core.calls.after(call, op.result, op.started, op.ended)
            except PassedThrough:
                pass
            except Unrepresentable as problem:
                core.unsupported_op(op.kernel, op.args, op.kwargs, problem)


def _is_watched(tensor: torch.Tensor) -> bool:
    """Whether the recorder compares the tensor's content at each use, which means that writes must be recorded
    immediately."""
    tracker = getattr(storage_of(tensor), ATTRIBUTE, None)
    return tracker is not None and tracker.state is not None and tracker.state.watched


def _given(
    kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """For each tensor that has memory: the argument's index, a number that identifies its storage while it lives, and
    the tensor."""
    values = (*enumerate(args), *((kernel.indices[name], value) for name, value in kwargs.items()))
    for index, value in values:
        for tensor in tensors_in(value):
            for part in plain_parts(tensor):
                yield index, storage_of(part)._cdata, part


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors_in(value):
        for part in plain_parts(tensor):
            yield storage_of(part)
