"""Which part of a program is recorded: the limits `steps`, `start_scope` and `stop_scope`, and the program's position
in them.

A step ends when the `step()` of a PyTorch optimizer returns. Scopes are counted by name as they begin, in any thread.
All counts start at 0 when the capture starts.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from replayfmt.errors import UsageError
from replayfmt.format.arguments import shown

_STEPS = re.compile(r"(\d{1,15})?:(\d{1,15})?", re.ASCII)
_NUMBERED = re.compile(r"(.+)#(\d{1,15})", re.ASCII | re.DOTALL)


class StepRange(NamedTuple):
    """The steps from `start` up to, not including, `stop`; None: to the end."""

    start: int
    stop: int | None


class ScopeAt(NamedTuple):
    """A scope's name, and which scope of that name is meant, counted from 0; None: the first suitable one."""

    name: str
    number: int | None


def parse_steps(text: str) -> StepRange:
    """Parse `A:B`; either may be missing. Raises UsageError."""
    found = _STEPS.fullmatch(text) if isinstance(text, str) else None
    if found is None or text == ":":
        raise UsageError(
            f"steps={shown(text)}: expected A:B, the steps from A up to, not including, B; either may be "
            "missing: 10:12, or 500:"
        )
    start, stop = int(found[1] or 0), None if found[2] is None else int(found[2])
    if stop is not None and stop <= start:
        raise UsageError(f"steps={text}: leaves nothing to record: the second number has to be the larger one")
    return StepRange(start, stop)


def parse_scope(text: str) -> ScopeAt:
    """Parse `NAME` or `NAME#N`. A name that itself ends in `#N` needs a number: `block#3#0`."""
    found = _NUMBERED.fullmatch(text)
    return ScopeAt(text, None) if found is None else ScopeAt(found[1], int(found[2]))


class ProgramProgress:
    """How far the program has come. `steps` counts completed steps."""

    def __init__(self, steps: StepRange | None, start: ScopeAt | None, stop: ScopeAt | None) -> None:
        self._steps, self._start, self._stop = steps, start, stop
        self._names = {scope.name for scope in (start, stop) if scope is not None}
        self._begun: Counter[str] = Counter()
        self.steps = 0

    def scope_begun(self, name: str) -> int:
        """A scope begins. Returns which one of its name it is, if that matters."""
        if name not in self._names:
            return -1
        self._begun[name] += 1
        return self._begun[name] - 1

    def is_start(self, name: str, number: int) -> bool:
        """Whether recording starts with this scope."""
        return self._start is not None and name == self._start.name and number >= (self._start.number or 0)

    def is_stop(self, name: str, number: int) -> bool:
        """Whether recording stops when this scope is left."""
        return self._stop is not None and name == self._stop.name and self._stop.number in (None, number)

    def waits(self) -> bool:
        """Whether the first step to record is still to come."""
        return self._steps is not None and self.steps < self._steps.start

    def step_ended(self) -> bool:
        """A step ended. Returns whether it was the last one to record."""
        self.steps += 1
        return self._steps is not None and self.steps == self._steps.stop

    def unmatched(self) -> str | None:
        """A message if the program did not reach the end of the last step."""
        if self._steps is None or self.steps >= (self._steps.stop or self._steps.start + 1):
            return None
        asked = f"{self._steps.start}:{'' if self._steps.stop is None else self._steps.stop}"
        ended = f"{self.steps} step{'' if self.steps == 1 else 's'} ended"
        return (
            f"--steps={asked}: {ended}; a step ends when the step() of an optimizer of PyTorch returns. For other "
            "loops there is --start-scope=NAME#N"
        )
