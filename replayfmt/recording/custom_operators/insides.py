"""Which operators of other packages are recorded as the operators inside them, by the user's choice or by
observation."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from fnmatch import fnmatchcase


class Manner(Enum):
    """How a call is recorded."""

    whole = 1  # as one op
    inside = 2  # as the operators that are called inside
    observed = 3  # as one op, unless it is observed to hide state


class Insides:
    """The decision for each operator, by name (`vllm::unified_attention`)."""

    def __init__(self, inside: Iterable[str], whole: Iterable[str]) -> None:
        """Both are patterns of operator names."""
        asked = [(pattern, Manner.whole) for pattern in whole] + [(pattern, Manner.inside) for pattern in inside]
        self._asked = dict(asked)
        self._unmatched = dict(asked)
        self._decided: dict[str, Manner] = {}

    def manner(self, name: str, python: bool, own: bool) -> Manner:
        """How a call of an operator is recorded. `python`: its kernel is a Python function of the program's. `own`: the
        operator is PyTorch's, which would run its own kernel in a replay."""
        if own:
            return Manner.inside if python else Manner.whole
        decided = self._decided.get(name)
        if decided is None:
            default = Manner.observed if python else Manner.whole
            matching = [pattern for pattern in self._asked if fnmatchcase(name, pattern)]
            for pattern in matching:
                self._unmatched.pop(pattern, None)
            decided = self._decided[name] = self._asked[matching[0]] if matching else default
        return decided

    def unmatched(self) -> list[str]:
        """A message for every pattern that has matched no operator so far."""
        problem = "no operator of that name was called while recording"
        return [f"--{manner.name}={pattern}: {problem}" for pattern, manner in self._unmatched.items()]

    def hides_state(self, name: str) -> None:
        """An observed operator hides state: from now on the operators inside it are recorded."""
        self._decided[name] = Manner.inside
