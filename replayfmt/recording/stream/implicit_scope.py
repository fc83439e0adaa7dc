"""The scope of a program that has none of its own: everything it does is in it.

`opreplay-capture` cannot know beforehand whether a program names scopes. So the implicit scope opens right before the
first thing that is recorded, unless the program shows by then that it has its own: one of its modules refers to this
package. Where a program names its first scope later after all, the implicit one ends there.
"""

from __future__ import annotations

import sys
from threading import get_ident

from .scopes import OpenScope, Scopes

_PACKAGE = __package__.partition(".")[0]


class ImplicitScope:
    """Made in the program's main thread, whose scope it is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread = get_ident()
        self._open: OpenScope | None = None
        self._given_way = False

    def begin(self, scopes: Scopes) -> None:
        """Recording starts."""
        if self._open is None and not self._given_way and not _program_knows_us():
            self._open = scopes.begin(self.name, user=False, thread=self._thread)

    def give_way(self, scopes: Scopes) -> list[OpenScope]:
        """The program opens a scope of its own. Returns the scopes that end with that."""
        self._given_way = True
        if self._open is not None and get_ident() == self._thread:
            entered, self._open = self._open, None
            return scopes.end(entered)
        return []


def _program_knows_us() -> bool:
    """Whether a module of the program refers to this package or to what names scopes in it."""
    recorder = sys.modules[f"{_PACKAGE}.recording.recorder"]
    ours = {id(sys.modules[_PACKAGE]), id(recorder), id(vars(recorder)["scope"]), id(vars(recorder)["Recorder"])}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != _PACKAGE and any(id(value) in ours for value in list(_contents(module).values())):
            return True
    return False


def _contents(module: object) -> dict[str, object]:
    # sys.modules may hold anything.
    contents = getattr(module, "__dict__", None)
    return contents if isinstance(contents, dict) else {}
