"""Events and streams that a program asks whether their work is done (`query`), of which PyTorch's trace tells nothing.

Once the answer is yes the host knows what it would know after a wait, and may use the memory without another edge: the
answer is recorded as that wait. A no needs no record: what the program does meanwhile is in the capture.

`torch.Event` and `torch.Stream` are types whose attributes Python does not let one set, so their namespace is changed.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from replayfmt.pytorch.accelerators import device_module

from .patches import Patch, PatchSet, StandIn

_TYPES: tuple[type, ...] = (torch.Event, torch.Stream)
_METHOD = "query"
# Attributes of the devices' own classes that hold what the trace calls an event. What these classes inherit from
# torch.Event has no value.
_HANDLES = ("cuda_event", "sycl_event")


class Answers(Protocol):
    """Who is told what the program learned."""

    def attempt(self, step: Callable[..., Any], *args: Any) -> Any:
        """Run recorder code: a failure in it ends the recording, not the program."""
        ...

    def event_is_done(self, handle: int | None) -> None:
        """An event is; None: it is not known which."""
        ...

    def stream_is_done(self, stream: Any) -> None: ...


def builtin_types_are_seen() -> bool:
    """Whether queries of the types that are written in C can be seen in this Python."""
    return all(_METHOD in _namespace(each) for each in _TYPES)


def _namespace(of: type) -> dict[str, Any]:
    found = gc.get_referents(vars(of))
    return found[0] if len(found) == 1 and isinstance(found[0], dict) else {}


class StreamQueries:
    """The patches of one capture that see queries."""

    def __init__(self, kind: str, answers: Answers) -> None:
        """`kind`: of accelerator."""
        self._wraps = {"Event": partial(_Query, answers, _of_event), "Stream": partial(_Query, answers, _of_stream)}
        module = device_module(kind)
        named = [(name, getattr(module, name, None)) for name in self._wraps]
        self._patches = PatchSet(
            Patch(f"torch.{kind}", f"{name}.{_METHOD}", self._wraps[name])
            for name, found in named
            if isinstance(found, type) and found not in _TYPES
        )
        self._originals: list[tuple[type, Any]] = []

    def install(self) -> None:
        self._patches.install()
        for each in _TYPES if builtin_types_are_seen() else ():
            original = _namespace(each)[_METHOD]
            self._originals.append((each, original))
            _set(each, self._wraps[each.__name__](original))

    def remove(self) -> None:
        """Restore everything. Idempotent."""
        self._patches.remove()
        while self._originals:
            _set(*self._originals.pop())


def _set(of: type, method: Any) -> None:
    _namespace(of)[_METHOD] = method
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(of))


def _of_event(answers: Answers, event: Any) -> None:
    handles = ("event_id",) if type(event) is torch.Event else _HANDLES
    answers.event_is_done(next((int(getattr(event, name)) for name in handles if hasattr(event, name)), None))


def _of_stream(answers: Answers, stream: Any) -> None:
    answers.stream_is_done(stream)


class _Query(StandIn):
    """Replaces one `query`."""

    def __init__(self, answers: Answers, tell: Callable[[Answers, Any], None], original: Callable[..., Any]) -> None:
        super().__init__(original)
        self._answers = answers
        self._tell = tell

    def __call__(self, of: Any, *args: Any, **kwargs: Any) -> Any:
        done = self._original(of, *args, **kwargs)
        if done:
            self._answers.attempt(self._tell, self._answers, of)
        return done
