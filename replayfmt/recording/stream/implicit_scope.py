"""The scope of a program without scopes of its own: it surrounds everything that the program does.

`opreplay-capture` cannot know beforehand whether a program names scopes. So the implicit scope opens right before the
first record, unless one of the program's modules already refers to this package, which shows that it has scopes of its
own. If a program still names its first scope later, the implicit one ends there.
"""

from __future__ import annotations

import sys
from threading import get_ident

from .scopes import OpenScope, Scopes

_PACKAGE = __package__.partition(".")[0]


class ImplicitScope:
    """The implicit scope. Created in the program's main thread, to which it belongs."""

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
        """The program opens a scope of its own. Returns the scopes that end because of it."""
        self._given_way = True
        if self._open is not None and get_ident() == self._thread:
            entered, self._open = self._open, None
            return scopes.end(entered)
        return []


def _program_knows_us() -> bool:
    """Whether a module of the program refers to this package or to what it names scopes with."""
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
