"""Which scopes are open, in the original capture and in the result.

A kept record may lie inside scopes whose beginning is left out: they are begun again before it. A scope that was left
and entered again in between is another pass, and is ended and begun again. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from replayfmt.format.model import Scope

Pass = tuple[int, int]  # scope id, ordinal of the record that began it (-1: no such record)


class OpenScopes:
    """Follows one pass over the records of a capture."""

    def __init__(self, scopes: Sequence[Scope | None]) -> None:
        self._scopes = scopes
        self._captured: list[Pass] = []
        self._result: list[Pass] = []

    def begin(self, scope: int, ordinal: int, *, kept: bool) -> None:
        """The capture enters a scope here; with `kept`, so does the result."""
        self._captured.append((scope, ordinal))
        if kept:
            self._result.append((scope, ordinal))

    def end(self, scope: int, *, kept: bool) -> None:
        """The capture leaves a scope here; with `kept`, so does the result."""
        for place in range(len(self._captured) - 1, -1, -1):
            if self._captured[place][0] == scope:
                passed = self._captured.pop(place)
                break
        else:
            passed = (scope, -1)
        if kept and passed in self._result:
            self._result.remove(passed)

    def restate(self, scope: int) -> tuple[list[int], list[int]]:
        """The scopes that the result has to leave and to enter, in this order, before a record inside `scope`."""
        over = [passed for passed in reversed(self._result) if passed not in self._captured]
        chain = []
        while scope:
            chain.append(scope)
            definition = self._scopes[scope]
            assert definition is not None
            scope = definition.parent
        wanted = [self._present(each) for each in reversed(chain)]
        # A scope whose beginning is not recorded, such as one in a thread that outlives it, ends with its last record.
        over = [passed for passed in over if passed not in wanted]
        self._result = [passed for passed in self._result if passed not in over]
        entered = [passed for passed in wanted if passed not in self._result]
        self._result += entered
        return [passed[0] for passed in over], [passed[0] for passed in entered]

    def close(self) -> list[int]:
        """The scopes that are still open in the result, innermost first."""
        return [scope for scope, _ordinal in reversed(self._result)]

    def _present(self, scope: int) -> Pass:
        for passed in reversed(self._captured):
            if passed[0] == scope:
                return passed
        return scope, -1
