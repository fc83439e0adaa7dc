"""`os.execv` and its family: they replace the program; nothing of it runs afterwards, not even atexit handlers.

So the capture is completed first. Imports no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..hooks.patches import Patch, PatchSet

_NAMES = ("execv", "execve")  # os.execl, os.execvp and the others call these


class ProgramReplacement:
    """Calls `finish`, with the name of the function, before this process is replaced by another program."""

    def __init__(self, finish: Callable[[str], None]) -> None:
        self._finish = finish
        self._patches = PatchSet(
            Patch(module, name, functools.partial(self._finishing, f"os.{name}"))
            for module in ("os", "posix")
            for name in _NAMES
        )

    def install(self) -> None:
        self._patches.install()

    def remove(self) -> None:
        """Idempotent."""
        self._patches.remove()

    def _finishing(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replace(*args: Any, **kwargs: Any) -> Any:
            self._finish(name)
            return original(*args, **kwargs)

        return replace
