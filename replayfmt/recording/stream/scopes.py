"""Named regions: which scope each thread is in, and the records that mark where scopes begin and end.

A program without scopes of its own has one implicit scope, which surrounds everything that it does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import get_ident
from typing import Any

from replayfmt.errors import UsageError

from .buffer import Contexts, RecordBuffer
from .records import Records


@dataclass
class OpenScope:
    """A scope that is open. `user`: opened by the program itself, so digests are taken at its end. `number`: which one
    of its name it is, if that matters."""

    name: str
    id: int
    user: bool
    token: Any = None
    number: int = -1


class Scopes:
    """The scope stacks of all threads. Callers hold the recorder's lock. `recorded`: begins and ends make records."""

    def __init__(self, buffer: RecordBuffer, records: Records, threads: list[int]) -> None:
        """`threads` collects the idents of other threads, as each records for the first time."""
        self._buffer = buffer
        self._records = records
        self._others = threads
        self.first_record: Callable[[int], None] | None = None  # called with a thread's ident before its first record
        self.recorded = False
        self._main = get_ident()
        self._stacks: dict[int, list[OpenScope]] = {self._main: []}
        self._threads: dict[int, int] = {self._main: 0}
        self._context_ids: dict[tuple[int, int], int] = {}
        self.contexts = buffer.contexts = Contexts(self._register)
        self._refresh(self._main)

    def stand_in(self) -> None:
        """The calling thread is the recorder's own: its records count as the main thread's."""
        with self._buffer.lock:
            self._threads[get_ident()] = self._threads[self._main]
            self._refresh(get_ident())

    def _register(self, ident: int) -> int:
        with self._buffer.lock:
            self._threads.setdefault(ident, min(len(self._threads), 0xFFFF))
            context = self._refresh(ident)
            if ident != self._main and not self._others:
                self._others.append(ident)
        if self.first_record is not None:
            self.first_record(ident)
        return context

    def _scope_of(self, ident: int) -> int:
        stack = self._stacks.get(ident)
        if stack:
            return stack[-1].id
        if ident == self._main:
            return 0
        return self._scope_of(self._main)

    def _refresh(self, ident: int) -> int:
        context = self.contexts[ident] = self._context_for(self._threads[ident], self._scope_of(ident))
        return context

    def _lead(self, ident: int, scope: int) -> None:
        """If this is the main thread, those without scopes of their own are in `scope` from now on. Their records lie
        between its begin and its end: they go in after the one, and out before the other."""
        if ident == self._main:
            for other in list(self.contexts):
                if other != ident and not self._stacks.get(other):
                    self.contexts[other] = self._context_for(self._threads[other], scope)

    def begin(self, name: str, user: bool, token: Any = None, thread: int | None = None) -> OpenScope:
        """Enter a scope of the calling thread, or of `thread`."""
        ident = get_ident() if thread is None else thread
        if ident not in self._threads:
            self._register(ident)
        scope = OpenScope(name, self._buffer.writer.scope(self._scope_of(ident), name), user, token)
        self._stacks.setdefault(ident, []).append(scope)
        self._refresh(ident)
        if self.recorded:
            self._records.scope_begin(name)
        self._lead(ident, scope.id)
        return scope

    def find(self, match: Callable[[OpenScope], bool]) -> OpenScope | None:
        """The innermost open scope of this thread that matches."""
        return next((scope for scope in reversed(self._stacks.get(get_ident(), [])) if match(scope)), None)

    def open_of(self, names: Iterable[str]) -> set[str]:
        """Which of these names the calling thread's scopes have, or the main thread's where it has none of its own."""
        stack = self._stacks.get(get_ident()) or self._stacks[self._main]
        return {scope.name for scope in stack}.intersection(names)

    def end(self, scope: OpenScope) -> list[OpenScope]:
        """Leave a scope of this thread and everything inside it. Returns what was left, innermost first."""
        ident = get_ident()
        stack = self._stacks.get(ident, [])
        if not any(entry is scope for entry in stack):
            return []
        left = []
        while True:
            innermost = stack[-1]
            self._lead(ident, stack[-2].id if len(stack) > 1 else 0)
            if self.recorded:
                self._records.scope_end(innermost.name)
            stack.pop()
            self._refresh(ident)
            left.append(innermost)
            if innermost is scope:
                return left

    def innermost(self, name: str) -> OpenScope:
        """The innermost open scope of this thread of that name. Raises UsageError if none is open."""
        scope = self.find(lambda entry: entry.name == name)
        if scope is None:
            raise UsageError(f"the scope {name!r} is not open in this thread")
        return scope

    def record_open(self) -> None:
        """Recording starts: scopes that are already open begin now."""
        self.recorded = True
        ident = get_ident()
        for stack in filter(None, self._stacks.values()):
            before = self.contexts[ident]
            for scope in stack:
                self.contexts[ident] = self._context_for(self._threads[ident], scope.id)
                self._records.scope_begin(scope.name)
            self.contexts[ident] = before

    def record_ends(self) -> None:
        """Recording stops: every scope that is open ends now, innermost first."""
        if not self.recorded:
            return
        ident = get_ident()
        before = self.contexts[ident]
        # Threads' own stacks first: they lie inside the main thread's.
        for stack in sorted(self._stacks.items(), key=lambda item: item[0] == self._main):
            for scope in reversed(stack[1]):
                self.contexts[ident] = self._context_for(self._threads[ident], scope.id)
                self._records.scope_end(scope.name)
        self.contexts[ident] = before
        self.recorded = False

    def _context_for(self, thread: int, scope: int) -> int:
        context = self._context_ids.get((thread, scope))
        if context is None:
            context = self._context_ids[thread, scope] = self._buffer.context(thread, scope)
        return context

    def thread_ended(self) -> list[OpenScope]:
        """The calling thread ends, and its scopes with it."""
        ident = get_ident()
        stack = self._stacks.get(ident)
        left = self.end(stack[0]) if stack else []
        if ident != self._main:
            self._stacks.pop(ident, None)
            self.contexts.pop(ident, None)
        return left


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
