"""How long a replay spends in each scope, taken at the scope records while it runs."""

from __future__ import annotations

from .execute import OnScope, RunClock


class ScopeTimes:
    """A scope callback that adds up time by scope path, and calls the caller's own if there is one.

    Time is the host's, from begin to end, of the outermost pass where a scope is entered again inside itself. What
    stops the replay's clock is not counted.
    """

    def __init__(self, clock: RunClock, then: OnScope | None) -> None:
        self._clock = clock
        self._then = then
        self._open: dict[str, list[int]] = {}
        self._totals: dict[str, int] = {}

    def __call__(self, event: str, name: str, path: str, ordinal: int) -> None:
        now = self._clock.now()
        if event == "begin":
            self._open.setdefault(path, []).append(now)
        elif self._open.get(path):
            began = self._open[path].pop()
            if not self._open[path]:
                self._totals[path] = self._totals.get(path, 0) + now - began
        if self._then is not None:
            self._then(event, name, path, ordinal)

    def totals(self) -> dict[str, int]:
        """Nanoseconds by scope path."""
        return dict(self._totals)
