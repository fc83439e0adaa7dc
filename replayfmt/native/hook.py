"""Makes PyTorch pass every operator call to the recorder, below autograd: the Python side of recorder.cpp."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import RECORDER_KEY
from .building import NotAvailable, library
from .ending import at_last, prepare

KNOWN_PYTORCH = ((2, 11), (2, 15))  # the first and the last release whose dispatcher the hook was made for
_TAKES_PART, _ACTIVE = 1, 2  # bits of opreplay_recorder_state

prepare()


class OperatorForHook(NamedTuple):
    """What the hook needs to know about an operator besides its schema."""

    plain: bool  # its calls may take the hot path
    writes: tuple[int, ...]  # the arguments that it writes, by index
    watches: tuple[int, ...]  # the settings that it depends on, as indices into numeric_state.WATCHED
    dropout: int | None  # index of its dropout argument: without dropout it draws no random numbers
    takes_numbers: bool  # even where its schema says tensors
    fills: bool  # it writes every element of its first argument, and reads none of them
    empty: bool  # it returns memory that nothing has been written to
    draws: bool  # it fills its first argument with random numbers
    backends: tuple[Any, ...]  # dispatch keys under which it is one kernel, and a composite elsewhere; none: always


@dataclass(frozen=True)
class UnknownValue:
    """A placeholder for a value of the dispatcher that has no Python equivalent. `type` is its type in the schema."""

    type: str


class Functions(NamedTuple):
    """The functions that the hook calls, in the order of `Functions` in recorder.cpp."""

    before: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
    after: Callable[[Any, Any, int, int], int | None]
    raised: Callable[[Any, BaseException | None, int, int], None]
    interrupted: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
    run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
    describe: Callable[[Any], OperatorForHook | None]
    register_thread: Callable[[], None]
    late: Callable[[Any, tuple[Any, ...], dict[str, Any], Any, int, int], int | None]
    late_raised: Callable[[Any, tuple[Any, ...], dict[str, Any], BaseException | None, int, int], None]
    flush_if_due: Callable[[], None]
    wrote: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
    register_storages: Callable[[list[torch.Tensor]], None]
    unknown: Callable[[str], Any] = UnknownValue


class DispatchHook:
    """The hook in PyTorch's dispatcher. There is one per process, and one capture at a time uses it. The constructor
    raises NotAvailable if another library has taken its dispatch key."""

    def __init__(self, found: ctypes.PyDLL) -> None:
        found.opreplay_recorder_begin.argtypes = [ctypes.py_object]
        found.opreplay_recorder_on_taken.argtypes = [ctypes.py_object]
        found.opreplay_recorder_exchange_api.restype = ctypes.c_void_p
        found.opreplay_recorder_types.restype = ctypes.py_object
        found.opreplay_recorder_key.restype = ctypes.c_uint64
        self._library = found
        self._types = found.opreplay_recorder_types()
        self._key = int(found.opreplay_recorder_key())
        # Whether the hook would see an operator that the calling thread called now.
        self.sees: Callable[[], bool] = self._types.sees
        if not found.opreplay_recorder_take_key():
            raise NotAvailable("its dispatch key is in use", f"another library has the fallback for {RECORDER_KEY}")
        at_last(self.end)  # a running thread must not wait for an interpreter that is shutting down

    def session(self, began_ns: int, chunk_records: int, scalars: bool, least_address: int) -> Any:
        """A `Session` of session.h (like recording/stream/session.py). `began_ns`: the capture's start."""
        return self._types.Session(began_ns, chunk_records, scalars, least_address)

    def begin(self, functions: Functions, session: Any, watch: int) -> None:
        """Call these around the operators of participating threads; recorder.cpp says with which arguments. `watch`:
        the address of what the watch on threads shares, or 0."""
        self._library.opreplay_recorder_watched(ctypes.c_void_p(watch))
        self._library.opreplay_recorder_begin((*functions, session))

    def end(self) -> None:
        """Stop calling them. Threads may still be participating; that has no effect."""
        self._library.opreplay_recorder_end()

    def active(self) -> bool:
        """Whether a capture uses the hook."""
        return bool(self._library.opreplay_recorder_state() & _ACTIVE)

    def include(self, takes_part: bool) -> bool:
        """Set whether the calling thread participates from now on. Returns whether it did before."""
        return bool(self._library.opreplay_recorder_include(int(takes_part)))

    def included(self) -> bool:
        """Whether the calling thread participates."""
        return bool(self._library.opreplay_recorder_state() & _TAKES_PART)

    def leave_finished(self) -> bool:
        """If no capture uses the hook, the calling thread stops participating. Returns whether it participated."""
        return not self.active() and self.include(False)

    def hidden(self) -> AbstractContextManager[None]:
        """The hook does not see the operators that the calling thread calls inside."""
        return self._hiding(1)

    def shown(self) -> AbstractContextManager[None]:
        """The hook sees them, even if this is inside an operator."""
        return self._hiding(0)

    @contextmanager
    def _hiding(self, hides: int) -> Iterator[None]:
        was = self._library.opreplay_recorder_hide(hides)
        try:
            yield
        finally:
            # A signal handler may raise in the middle; then try again.
            try:
                self._library.opreplay_recorder_hide(was)
            except BaseException:
                self._library.opreplay_recorder_hide(was)
                raise

    def telling_exchange_api(self, interface: int, taken: Callable[[Any], None]) -> int:
        """The address of an interface like DLPack's C interface (version 1) at this address, whose functions call
        `taken` with each tensor that a library takes, until `forget_taken`."""
        self._library.opreplay_recorder_on_taken(taken)
        return int(self._library.opreplay_recorder_exchange_api(ctypes.c_void_p(interface)))

    def forget_taken(self) -> None:
        """Call nothing any more."""
        self._library.opreplay_recorder_on_taken(None)

    def without_key(self, keys: torch._C.DispatchKeySet) -> torch._C.DispatchKeySet:
        """A set of dispatch keys without the recorder's, which the Python part of the dispatcher does not know."""
        return torch._C.DispatchKeySet.from_raw_repr(keys.raw_repr() & ~self._key)

    def key_guard(self, original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """In place of a guard that gives the calling thread two sets of keys, those that are included and those that
        are excluded: the recorder's key is in each as it is in the thread's now."""
        return self._types.key_guard(original)


_loaded: DispatchHook | None = None


def loaded_hook() -> DispatchHook | None:
    """The hook, if a capture of this process has used it."""
    return _loaded


@functools.cache
def dispatch_hook() -> DispatchHook | NotAvailable:
    """The hook, or why there is none. Looked for only once."""
    global _loaded
    try:
        _check_pytorch()
        _loaded = DispatchHook(library("recorder.cpp"))
        return _loaded
    except NotAvailable as problem:
        return problem


def known_pytorch() -> str:
    """The releases that the hook was made for."""
    first, last = KNOWN_PYTORCH
    return f"{'.'.join(map(str, first))} to {'.'.join(map(str, last))}"


def _check_pytorch() -> None:
    """Raise NotAvailable if this dispatcher may work differently, or another library has taken the hook's key."""
    first, last = KNOWN_PYTORCH
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if not first <= (major, minor) <= last:
        raise NotAvailable("not made for this PyTorch", f"{known_pytorch()} is known, this is {torch.__version__}")
    kernels = torch._C._dispatch_get_registrations_for_dispatch_key(RECORDER_KEY) if _loaded is None else []
    if kernels:
        raise NotAvailable("its dispatch key is in use", f"{RECORDER_KEY} has a kernel of {kernels[0]}")
