"""Sees collectives that pass no operator, or began before the capture, and records them as unsupported.

Programs call a group's backend itself (`group._get_backend(device).allreduce(...)`), or a process group written in
Python: no operator tells of it. And a collective in flight when the capture begins writes its results later: what shows
it is that the program waits for it before the capture has launched any. While an operator of `c10d` runs, which has a
record of its own, nothing is recorded here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .patches import Patch, PatchSet
from .undispatched import RecorderForHooks, tensors_of

Function = Callable[..., Any]

_MODULE = "torch._C._distributed_c10d"
_METHODS = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
_WAITS = ("wait", "synchronize", "result", "get_future", "block_current_stream")
_EARLIER = (
    "a collective that was launched before the capture began is waited for in it: what it writes, and when, is not "
    "recorded. Begin the capture where no collective is in flight"
)


class DirectCollectives:
    """The hooks of one capture. `launched()`: whether it has a record of a collective."""

    def __init__(self, recorder: RecorderForHooks, launched: Callable[[], bool]) -> None:
        self._recorder, self._launched = recorder, launched
        self._replaced: list[tuple[type, str, Function, Function]] = []  # methods of groups that are written in Python
        patches = []
        if torch.distributed.is_available():
            for owner, names, hook in (("Backend", _METHODS, self._direct), ("Work", _WAITS, self._waiting)):
                held = vars(getattr(torch._C._distributed_c10d, owner))
                patches += [Patch(_MODULE, f"{owner}.{name}", hook) for name in names if name in held]
            patches.append(Patch(_MODULE, "ProcessGroup.__init__", self._made))
        self._patches = PatchSet(patches)

    def install(self) -> None:
        self._patches.install()
        if torch.distributed.is_available():
            for group in _below(torch._C._distributed_c10d.ProcessGroup):
                self._recorder.attempt(self._replace, group)

    def remove(self) -> None:
        """Restore everything. Idempotent."""
        self._patches.remove()
        while self._replaced:
            group, name, original, replacement = self._replaced.pop()
            if vars(group).get(name) is replacement:
                setattr(group, name, original)

    def _made(self, original: Function) -> Function:
        """A group of a class that may have been written since the capture began."""

        @functools.wraps(original)
        def init(group: Any, *args: Any, **kwargs: Any) -> None:
            original(group, *args, **kwargs)
            self._recorder.attempt(self._replace_of, type(group))

        return init

    def _replace_of(self, group: type) -> None:
        below = set(_below(torch._C._distributed_c10d.ProcessGroup))
        for each in group.__mro__:
            if each in below:
                self._replace(each)

    def _replace(self, group: type) -> None:
        done = {replacement for _group, _name, _original, replacement in self._replaced}
        for name in _METHODS:
            original = vars(group).get(name)
            if callable(original) and original not in done:
                replacement = self._direct(original)
                setattr(group, name, replacement)
                self._replaced.append((group, name, original, replacement))

    def _direct(self, original: Function) -> Function:
        recorder = self._recorder

        @functools.wraps(original)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.launching():
                return original(group, *args, **kwargs)
            recorder.attempt(tell, group, (args, kwargs))
            with recorder.paused():
                work = original(group, *args, **kwargs)
            recorder.attempt(mark, (args, kwargs))
            return work

        def tell(group: Any, given: Any) -> None:
            detail = (
                f"a collective on {type(group).__name__} itself, rank {group.rank()} of {group.size()}, passes no "
                "operator; collectives are not replayed yet"
            )
            recorder.unsupported("collective", f"{type(group).__name__}.{original.__name__}", detail)
            mark(given)

        def mark(given: Any) -> None:
            for tensor in tensors_of(given):
                recorder.mark_outside_write(tensor)

        return call

    def _waiting(self, original: Function) -> Function:
        recorder = self._recorder

        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            results = original(work, *args, **kwargs)
            if recorder.launching() and not recorder.attempt(self._launched):
                recorder.unsupported("collective", f"Work.{original.__name__}", _EARLIER)
            return results

        return wait


def _below(group: type) -> Iterator[type]:
    subclasses: list[type] = group.__subclasses__()
    for each in subclasses:
        yield each
        yield from _below(each)
