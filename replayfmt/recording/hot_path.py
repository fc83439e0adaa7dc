"""Steers the hot path: the native session of a capture (native/session.h), which records calls without Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from replayfmt.native.watching import ThreadWatch

from .options import CaptureOptions
from .state.numeric_state import NumericState
from .stream.scopes import Scopes


def allowed(options: CaptureOptions) -> bool:
    """Whether calls may be recorded there. (Otherwise there is something to do around each.)"""
    return not (options.audit or options.digests == "ops" or options.stop_op is not None)


def tell_what_changes(native: Any, numeric: NumericState, scopes: Scopes, watch: ThreadWatch) -> None:
    """The session hears of the settings that the stream states, and of the scopes that threads are in."""
    watch.tell_how_to_cover(native)
    native.settle()
    numeric.restating, numeric.restated = native.unsettle, native.settle
    scopes.contexts.follow(native.set_context)


@contextmanager
def still(native: Any, goes_on: Callable[[], bool]) -> Iterator[None]:
    """Other threads append no record meanwhile: their calls take the complete path, which waits for the recorder's lock
    (the caller holds it). `goes_on`: whether recording does, afterwards. `native`: None where there is no session, or
    no other thread."""
    if native is None or not native.hot:
        yield
        return
    try:
        native.hot = False
        yield
    finally:
        native.hot = goes_on()
