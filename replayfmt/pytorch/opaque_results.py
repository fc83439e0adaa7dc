"""Results that no replay reproduces, even though the operator is reproduced: bytes that a kernel leaves unwritten, and
addresses of the process.

They are never compared, and never embedded in a capture that is made of another one. Some are known (operators.py), a
user names others as `OPERATOR[:INDEX]`, and a replay finds them by running an operator twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from replayfmt.errors import UsageError

from .operators import opaque_results

FLAG = "--opaque-result"

_SPEC = re.compile(r"(?P<operator>\w+::\w+(?:\.\w+)?)(?::(?P<index>[0-9]{1,4}))?", re.ASCII)


@dataclass(frozen=True)
class OpaqueSpec:
    """What a user says: all results of an operator (with or without its overload), or the one at `index`."""

    operator: str
    index: int | None = None

    @staticmethod
    def parse(text: str) -> OpaqueSpec:
        """`OPERATOR[:INDEX]`. Raises UsageError for anything else."""
        found = _SPEC.fullmatch(text)
        if found is None:
            raise UsageError(f"{FLAG}={text}: expected OPERATOR[:INDEX], such as aten::_ctc_loss:1")
        index = found["index"]
        return OpaqueSpec(found["operator"], None if index is None else int(index))

    def __str__(self) -> str:
        return self.operator if self.index is None else f"{self.operator}:{self.index}"


class OpaqueResults:
    """What is known: of all operators, of a capture's program, of one replay."""

    def __init__(self, given: Iterable[str | OpaqueSpec] = ()) -> None:
        """Raises UsageError for a text that is not of the form `OPERATOR[:INDEX]`."""
        self._given = tuple(OpaqueSpec.parse(each) if isinstance(each, str) else each for each in given)
        self._found: dict[tuple[str, str, int], str] = {}

    def of(self, name: str, overload: str, count: int) -> Mapping[int, str]:
        """The opaque ones among the `count` results of an operator, by index, with the reason."""
        found = {index: why for index, why in opaque_results(name).items() if index < count}
        for spec in self._given:
            if spec.operator in (name, f"{name}.{overload}"):
                indices = range(count) if spec.index is None else (spec.index,) if spec.index < count else ()
                found.update(dict.fromkeys(indices, f"{FLAG}={spec}"))
        found.update({index: why for (of, its, index), why in self._found.items() if (of, its) == (name, overload)})
        return found

    def found(self, name: str, overload: str, index: int, why: str) -> None:
        """A replay found one."""
        if index not in self.of(name, overload, index + 1):
            self._found[name, overload, index] = why

    def unmatched(self, operators: Iterable[tuple[str, str, int]]) -> list[str]:
        """A sentence for each that was given and is a result of none of these (name, overload, number of results)."""
        counts: dict[str, int] = {}
        for name, overload, count in operators:
            for text in (name, f"{name}.{overload}"):
                counts[text] = max(count, counts.get(text, 0))
        return [
            f"{FLAG}={spec}: "
            + (
                f"{spec.operator} has {counts[spec.operator]} results, counted from 0"
                if spec.operator in counts
                else f"no operator {spec.operator} is called"
            )
            for spec in self._given
            if counts.get(spec.operator, 0) <= (spec.index or 0)
        ]

    @property
    def text(self) -> str:
        """What was given and found, as a user would say it: a session's policy."""
        found = (f"{name}.{overload}:{index}" for name, overload, index in self._found)
        return " ".join(dict.fromkeys([*map(str, self._given), *found]))
