"""Operators of other packages that are written in Python: recorded whole, or as the operators inside them if they hide
state.

A replay calls an operator with its recorded arguments. That reproduces it only if it depends on nothing else. An
attention operator that takes a layer's name, for instance, uses it to find that layer's caches in this process. So each
call is observed from inside. As long as it uses only its arguments and memory that it allocates itself, nothing inside
is recorded, and the call becomes one record, whose kernel can be substituted by name. Once the inside

- uses memory from elsewhere, or a generator from elsewhere,
- writes an argument that the schema does not declare as written,
- changes numeric settings, or which memory a tensor refers to,
- or returns memory that the capture knows from elsewhere,

the operators called inside so far are recorded, the rest follow one by one, and all later calls of that operator are
recorded in the same way. Memory that the inside creates from host values (`torch.tensor`, `from_numpy`) counts as its
own.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replayfmt.pytorch.tensors.looks import shape_of, storage_of

from ..core import Core
from ..dispatch.call import OpCall
from ..dispatch.calls import PassedThrough
from ..dispatch.kernels import Action, CapturedKernel, tensors_in
from ..dispatch.mode import RecordingMode
from ..dispatch.wrappers import plain_parts
from ..interrupts import is_interrupt
from ..state.autocast import autocast_of_program
from ..state.randomness import address, drawn_from, generator_state
from ..storages.trackers import ATTRIBUTE
from ..stream.records import Unrepresentable
from .declared_work import watch

_clock = time.perf_counter_ns
_LAUNCHED = "inside the operator ran a compiled region or a launch, before it was seen to hide state"
_KEPT = (
    "the operator is written in Python and keeps memory that it allocated, which a replay of the call would not "
    "find; capture with --inside and its name to record the operators inside"
)


class Told(NamedTuple):
    """An op that has run and is not recorded yet."""

    kernel: CapturedKernel
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    started: int
    ended: int
    drawn: list[tuple[torch.Generator, bytes, bytes]]  # generators, with their states before and after the op


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
    states = observer.states(kernel, args, kwargs) if around is not None else []
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
            around.note(kernel, args, kwargs, result, started, ended, states)
        core.attempt(observer.leave, result)
    core.pump()
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
        self, core: Core, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any], around: Observer | None
    ) -> None:
        TorchDispatchMode.__init__(self)
        self.core = core
        self.told = False
        self._kernel = kernel
        self._around = around
        self._pending: list[Told] = []
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
        states = self.states(kernel, args, kwargs)
        started = _clock()
        result = kernel.call(*args, **kwargs)
        self.note(kernel, args, kwargs, result, started, _clock(), states)
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
                self.core.records.notes[
                    f"{self._kernel.name} writes its argument {self._names.get(number, '')!r}, which its schema does "
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
        return self.core.attempt(self._states, kernel, args, kwargs) or []

    def _states(
        self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[torch.Generator, bytes]]:
        if not (kernel.random and kernel.draws(args, kwargs)):
            return []
        tensors = tensors_in((*args, *kwargs.values()))
        devices = {torch.device("cpu"), *(tensor.device for tensor in tensors)}
        return [(each, generator_state(each)) for each in drawn_from(args, kwargs, devices)]

    def note(
        self,
        kernel: CapturedKernel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        started: int,
        ended: int,
        states: list[tuple[torch.Generator, bytes]],
    ) -> None:
        """An op ran."""
        self.core.attempt(self._note, kernel, args, kwargs, result, started, ended, states)

    def _note(
        self,
        kernel: CapturedKernel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        started: int,
        ended: int,
        states: list[tuple[torch.Generator, bytes]],
    ) -> None:
        for storage in _storages(result):
            number = storage._cdata
            if number not in self._own:
                self._own.add(number)
                self._writable.add(number)
                self._made[number] = weakref.ref(storage)
        drawn = [(generator, before, generator_state(generator)) for generator, before in states]
        self._pending.append(Told(kernel, args, kwargs, result, started, ended, drawn))

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
        for op in self._pending:
            self.core.attempt(_tell_late, self.core, op)
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


def _tell_late(core: Core, op: Told) -> None:
    """Record an op that has run."""
    with core.lock:
        if core.on:
            try:
                call = core.calls.before(op.kernel, op.args, op.kwargs, op.drawn)
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
