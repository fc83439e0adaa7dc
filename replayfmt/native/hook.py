"""Has PyTorch hand every operator to the recorder beneath autograd: the Python side of recorder.cpp."""

from __future__ import annotations

import atexit
import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .building import NotAvailable, library

KNOWN_PYTORCH = ((2, 11), (2, 13))  # the first and the last release whose dispatcher the hook was made for


class OperatorForHook(NamedTuple):
    """What the hook has to know of an operator beside its schema."""

    plain: bool  # its calls may take the hot path
    writes: tuple[int, ...]  # the arguments that it writes, by index
    watches: tuple[int, ...]  # the settings that it depends on, as indices into numeric_state.WATCHED
    dropout: int | None  # index of the argument without which it draws no random numbers
    takes_numbers: bool  # also where its schema says tensors


@dataclass(frozen=True)
class UnknownValue:
    """Stands for a value of the dispatcher's that Python cannot have. `type` is its type in the schema."""

    type: str


class Functions(NamedTuple):
    """What the hook calls, in the order of `Functions` in recorder.cpp."""

    before: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
    after: Callable[[Any, Any, int, int], int | None]
    raised: Callable[[Any, BaseException | None, int, int], None]
    interrupted: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
    run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
    describe: Callable[[Any], OperatorForHook | None]
    context: Callable[[], int]
    late: Callable[[Any, tuple[Any, ...], dict[str, Any], Any, int, int], int | None]
    late_raised: Callable[[Any, tuple[Any, ...], dict[str, Any], BaseException | None, int, int], None]
    pump: Callable[[], None]
    unknown: Callable[[str], Any] = UnknownValue


class DispatchHook:
    """The hook in PyTorch's dispatcher. There is one in a process, and one capture at a time has it. To make it raises
    NotAvailable where another library has its key."""

    def __init__(self, found: ctypes.PyDLL) -> None:
        found.opreplay_recorder_begin.argtypes = [ctypes.py_object]
        found.opreplay_recorder_types.restype = ctypes.py_object
        found.opreplay_recorder_key.restype = ctypes.c_uint64
        self._library = found
        self._types = found.opreplay_recorder_types()
        self._key = int(found.opreplay_recorder_key())
        if not found.opreplay_recorder_take_key():
            raise NotAvailable("its dispatch key is in use", "another library has the fallback for Fake")
        atexit.register(self.end)  # a thread that is still there must not wait for an interpreter that ends

    def session(self, began_ns: int, chunk_records: int, scalars: bool) -> Any:
        """A `Session` of session.h, for one capture: `began_ns` is when it began."""
        return self._types.Session(began_ns, chunk_records, scalars)

    def begin(self, functions: Functions, session: Any) -> None:
        """Call these around the operators of the threads that take part; recorder.cpp says what with."""
        self._library.opreplay_recorder_begin((*functions, session))

    def end(self) -> None:
        """Call them no more. Threads may go on taking part: that has no effect."""
        self._library.opreplay_recorder_end()

    def include(self, takes_part: bool) -> bool:
        """Whether the calling thread takes part from here on; returns whether it did."""
        return bool(self._library.opreplay_recorder_include(int(takes_part)))

    def included(self) -> bool:
        """Whether the calling thread takes part."""
        return bool(self._library.opreplay_recorder_included())

    def leave_finished(self) -> bool:
        """Where no capture has the hook, the calling thread takes part no more. Whether it did."""
        return not self._library.opreplay_recorder_active() and self.include(False)

    def sees(self) -> bool:
        """Whether an operator that the calling thread called now would come."""
        return bool(self._library.opreplay_recorder_sees())

    def hidden(self) -> AbstractContextManager[None]:
        """The operators that the calling thread calls inside do not come."""
        return self._hiding(1)

    def shown(self) -> AbstractContextManager[None]:
        """They come, also where this is inside of an operator."""
        return self._hiding(0)

    @contextmanager
    def _hiding(self, hides: int) -> Iterator[None]:
        was = self._library.opreplay_recorder_hide(hides)
        try:
            yield
        finally:
            # A signal handler may raise in the middle: then once more.
            try:
                self._library.opreplay_recorder_hide(was)
            except BaseException:
                self._library.opreplay_recorder_hide(was)
                raise

    def without_key(self, keys: torch._C.DispatchKeySet) -> torch._C.DispatchKeySet:
        """A set of dispatch keys without the recorder's, of which Python's half of the dispatcher knows nothing."""
        return torch._C.DispatchKeySet.from_raw_repr(keys.raw_repr() & ~self._key)


_loaded: DispatchHook | None = None


def loaded_hook() -> DispatchHook | None:
    """The hook, where a capture of this process had it."""
    return _loaded


@functools.cache
def dispatch_hook() -> DispatchHook | NotAvailable:
    """The hook, or why there is none: looked for once."""
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
    """Raise NotAvailable where the dispatcher may work in another way, or another library has the hook's key."""
    first, last = KNOWN_PYTORCH
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if not first <= (major, minor) <= last:
        raise NotAvailable("not made for this PyTorch", f"{known_pytorch()} is known, this is {torch.__version__}")
    kernels = torch._C._dispatch_get_registrations_for_dispatch_key("Fake")
    if kernels:
        raise NotAvailable("its dispatch key is in use", f"Fake has a kernel of {kernels[0]}")
