"""How far apart results may be: `exact`, `ulp:N`, `rtol,atol` by dtype, a file by kernel, or `auto`.

`auto` is derived from each op itself by replays (spread.py); everything else is a rule for a kernel and a dtype.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from replayfmt.errors import UsageError
from replayfmt.format.codes import DType

from .distances import EXACT, Allowed

_EXPECTED = "exact, ulp:N, RTOL,ATOL, DTYPE=RTOL,ATOL;…, auto, or a JSON file of these by kernel"


@dataclass(frozen=True)
class Tolerance:
    """Rules in the order they were given: a pattern of kernel names, a dtype or "" for all, and what is allowed. The
    first that fits decides; where none does, results must be equal."""

    text: str
    rules: tuple[tuple[str, str, Allowed], ...] = ()
    auto: bool = False

    @property
    def exact(self) -> bool:
        return not self.auto and all(allowed.exact for _kernel, _dtype, allowed in self.rules)

    def of(self, kernel: str, dtype: DType) -> Allowed:
        """What is allowed for a result of a kernel, by its qualified name."""
        name = kernel.rpartition(".")[0]
        for pattern, wanted, allowed in self.rules:
            if wanted in ("", dtype.name) and (fnmatchcase(kernel, pattern) or fnmatchcase(name, pattern)):
                return allowed
        return EXACT


def parse_tolerance(text: str) -> Tolerance:
    """The tolerance that a text or the file it names says. Raises UsageError."""
    if text == "auto":
        return Tolerance(text, auto=True)
    path = Path(text)
    if text.endswith(".json"):
        return Tolerance(text, tuple(_from_file(path)))
    return Tolerance(text, tuple(("*", dtype, allowed) for dtype, allowed in _rules(text, f"--tolerance={text}")))


def _rules(text: Any, where: str) -> list[tuple[str, Allowed]]:
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"{where}: {text!r} is not a tolerance; expected {_EXPECTED}")
    found = []
    for part in text.split(";"):
        dtype, equals, rule = part.strip().rpartition("=")
        if equals and dtype not in DType.__members__:
            raise UsageError(f"{where}: {dtype!r} is not a dtype; expected one such as float32")
        found.append((dtype, _allowed(rule.strip(), where)))
    return found


def _allowed(rule: str, where: str) -> Allowed:
    if rule == "exact":
        return EXACT
    kind, _, number = rule.partition(":")
    try:
        if kind == "ulp" and 0 <= int(number) < 1 << 62:
            return Allowed(ulp=int(number))
        relative, absolute = (float(each) for each in rule.split(","))
        if relative >= 0 and absolute >= 0 and math.isfinite(relative + absolute):
            return Allowed(relative=relative, absolute=absolute)
    except ValueError:
        pass
    raise UsageError(f"{where}: {rule!r} is not a tolerance; expected {_EXPECTED}")


def _from_file(path: Path) -> list[tuple[str, str, Allowed]]:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--tolerance={path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--tolerance={path}: is not JSON: {error}") from None
    if not isinstance(given, dict) or not given:
        raise UsageError(f'--tolerance={path}: expected an object such as {{"aten::mm": "1e-5,1e-8", "*": "exact"}}')
    return [
        (pattern, dtype, allowed)
        for pattern, text in given.items()
        for dtype, allowed in _rules(text, f"--tolerance={path}: {pattern}")
    ]
