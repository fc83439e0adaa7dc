"""Reports operators of other packages, and kernels called past the dispatcher, whose work bypassed the recorder.

What such an operator returns, or declares that it writes, must be the work of a recorded op: the operator itself, or
one that it calls. Otherwise (a kernel for an autograd key that does the work itself, a mode of the program around a
composite) work was done that no replay does, and an unsupported record says so. Only calls from Python are seen, not
calls from C++.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from replayfmt.pytorch.operators import is_pytorchs
from replayfmt.pytorch.registry import find_overload
from replayfmt.pytorch.tensors.looks import shape_of, storage_of

from ..core import Core
from ..dispatch.kernels import tensors_in
from ..dispatch.wrappers import plain_parts
from ..frames import leave_no_own_frame
from ..hooks.patches import Patch, Patched, PatchSet
from ..storages.trackers import Tracker, Written, has_bytes

_Written = tuple[torch.Tensor, Tracker | None, Written | None]
_UNSEEN = "the operator's kernel did its work where no recorded op did it: "


class RecorderForWork(Protocol):
    """What this module needs from a recorder."""

    def recording(self) -> bool: ...


class DeclaredWork(Patched):
    """The patches of one capture that see calls of operators from Python."""

    def __init__(self, recorder: RecorderForWork, core: Core) -> None:
        self._recorder = recorder
        self._core = core
        self._patches = PatchSet(
            [
                Patch("torch._ops", "OpOverload.__call__", self._around),
                Patch("torch._ops", "OpOverloadPacket.__call__", self._around),
                # Both take a set of dispatch keys, in which the recorder's may be missing. The first is what
                # `OpOverload.redispatch` calls, the second what `torch.library.get_kernel` returns.
                Patch("torch._C", "_DispatchOperatorHandle.redispatch_boxed", self._around_keys),
                Patch("torch._C", "_SafeKernelFunction.call_boxed", self._around_keys),
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

    def _around_keys(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(called: Any, /, keys: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                run = functools.partial(original, called, keys)
                operator = self._core.attempt(_operator_of, called) if self._recorder.recording() else None
                if operator is None:
                    return run(*args, **kwargs)
                return watch(self._core, run, operator, operator._schema.name, args, kwargs)
            except BaseException as error:
                leave_no_own_frame(error)
                raise

        return call


def _operator_of(called: Any) -> torch._ops.OpOverload | None:
    """The operator of a handle, or of which a kernel is."""
    schema = getattr(called, "op_handle", called).schema()
    return find_overload(schema.name, schema.overload_name or "default")


def watch(
    core: Core, original: Callable[..., Any], operator: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
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


def _forget_writes(core: Core, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Written]:
    """The tensors that a call is declared to write, with the recorded writes known so far, which are removed while the
    operator runs."""
    written = []
    for tensor in _written(operator, args, kwargs):
        tracker = core.storages.tracker_of(storage_of(tensor))
        written.append((tensor, tracker, None if tracker is None else tracker.written))
        if tracker is not None:
            tracker.written = None
    return written


def _tell(core: Core, name: str, unwritten: list[torch.Tensor], result: Any) -> None:
    with core.lock:
        if unwritten:
            core.records.unsupported("unseen_work", name, f"{_UNSEEN}it declares that it writes an argument")
            for tensor in unwritten:
                core.outside.written(tensor)
        elif any(_is_no_ops_work(core, tensor) for tensor in _memories(tensors_in(result))):
            core.records.unsupported("unseen_work", name, f"{_UNSEEN}it returned what no op wrote")


def _is_no_ops_work(core: Core, tensor: torch.Tensor) -> bool:
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


def _remember(tracker: Tracker | None, known: Written | None) -> bool:
    """Merge the writes known before with those made since. Returns whether there were any since."""
    if tracker is None:
        return False
    since = tracker.written
    tracker.written = since if known is None else known if since is None else known | since
    return since is not None


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
