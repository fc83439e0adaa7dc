"""What is done when the interpreter exits, after the program's own atexit functions: what these compute is recorded.

Functions registered with `atexit` run in reverse order, so `prepare` is called before the program registers its own:
`opreplay-capture` does so before the program begins, the recorder's modules when they are imported. Imports no torch.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable

_functions: list[Callable[[], None]] = []


@functools.cache
def prepare() -> None:
    """Atexit functions that are registered from now on run before those of `at_last`. Idempotent."""
    atexit.register(_end)


def at_last(function: Callable[[], None]) -> None:
    """Call a function then."""
    prepare()
    _functions.append(function)


def _end() -> None:
    for function in _functions:
        function()
