"""Which variables exist while a capture is lowered, and when each may be deleted.

A variable holds one tensor, identified by its key, and may be deleted after the last use of that key. One exception
keeps aliasing intact: a tensor that the program made without an op (for example through `.data`) can only be rebuilt
from another tensor on the same storage, so the last variable of a storage stays until the last use of the storage.
"""

from __future__ import annotations

from collections.abc import Iterable


class Variables:
    """The live variables by key, across windows, and the storage of each. Negative keys are storages themselves."""

    def __init__(self) -> None:
        self._storage: dict[int, int] = {}
        self._on: dict[int, dict[int, None]] = {}
        self._idle: set[int] = set()  # past their last use, kept for their storage

    def __contains__(self, key: int) -> bool:
        return key in self._storage

    def define(self, key: int, storage: int) -> list[int]:
        """Add a variable; returns idle ones on its storage, which may now be deleted."""
        self._storage[key] = storage
        on = self._on.setdefault(storage, {})
        idle = [other for other in on if other in self._idle] if self._idle else []
        on[key] = None
        return idle

    def base(self, storage: int) -> int | None:
        """Any variable on a storage; None if there is none."""
        return next(iter(self._on.get(storage, ())), None)

    def all_on(self, storage: int) -> list[int]:
        """Every variable on a storage."""
        return list(self._on.get(storage, ()))

    def alone(self, key: int) -> bool:
        """Whether a variable is the only one on its storage."""
        return len(self._on[self._storage[key]]) == 1

    def keep_idle(self, key: int) -> None:
        """Keep a variable past its last use: it is the only one on a storage that is used again."""
        self._idle.add(key)

    def forget(self, keys: Iterable[int]) -> None:
        """Remove these variables."""
        for key in keys:
            storage = self._storage.pop(key)
            on = self._on[storage]
            del on[key]
            if not on:
                del self._on[storage]
            self._idle.discard(key)
