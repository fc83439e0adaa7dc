"""Every regular expression of the package takes time that grows with the text, not with its square."""

from __future__ import annotations

import ast
import importlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import replayfmt

LENGTH = 1 << 16
LONGEST_S = 1.0  # of CPU time; a quadratic pattern takes a minute
FOLDERS = (Path(replayfmt.__file__).parent, Path(replayfmt.__file__).parents[1] / "tools")
_CALLS = {"compile", "match", "fullmatch", "search", "sub", "subn", "findall", "finditer", "split"}


def _patterns() -> dict[tuple[str, int, str], set[str]]:
    """Where each pattern is: by its text, flags, and how it is used (`match`, `fullmatch`, or `search`)."""
    found: dict[tuple[str, int, str], set[str]] = {}
    for folder in FOLDERS:
        for path in sorted(folder.rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            used = [each for each in ast.walk(tree) if isinstance(each, ast.Attribute)]
            for node in ast.walk(tree):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                    continue
                module, first = node.func.value, node.args[0]
                text = first.value if isinstance(first, ast.Constant) else _built(path, first)
                if not (isinstance(module, ast.Name) and module.id == "re" and node.func.attr in _CALLS):
                    continue
                if not isinstance(text, str):
                    continue
                uses = {node.func.attr}
                if node.func.attr == "compile":
                    names = [
                        ast.unparse(each.targets[0])
                        for each in ast.walk(tree)
                        if isinstance(each, ast.Assign) and each.value is node
                    ]
                    uses = {each.attr for each in used if ast.unparse(each.value) in names} & _CALLS or {"search"}
                for use in uses:
                    kind = use if use in ("match", "fullmatch") else "search"
                    found.setdefault((text, _flags(node), kind), set()).add(f"{path.name}:{node.lineno}")
    return found


def _built(path: Path, text: ast.expr) -> str | None:
    """A pattern that is put together from the module's own texts, and from others that are known at run time alone."""
    if not isinstance(text, ast.JoinedStr):
        return None
    package = "opreplay_tools" if path.parent == FOLDERS[1] else "replayfmt"
    root = FOLDERS[1] if package == "opreplay_tools" else FOLDERS[0]
    module = importlib.import_module(".".join([package, *path.relative_to(root).with_suffix("").parts]))
    try:
        return str(eval(ast.unparse(text), {**vars(module)}))
    except (AttributeError, NameError, TypeError):  # it has a function's variable, mostly escaped: any text does
        parts = (each.value if isinstance(each, ast.Constant) else "name|other" for each in text.values)
        return "".join(map(str, parts))


def _flags(call: ast.Call) -> int:
    names = [each.attr for each in ast.walk(call) if isinstance(each, ast.Attribute)]
    flags = [getattr(re, name) for name in names if isinstance(getattr(re, name, None), re.RegexFlag)]
    return int(sum(dict.fromkeys(flags)))


PATTERNS = _patterns()


def _samples(pattern: str, flags: int) -> list[str]:
    """Texts that begin as the pattern wants, repeat a part of it very often, and end otherwise."""
    pieces: list[str] = []
    prefixes = [""]
    _collect(re._parser.parse(pattern, flags), pieces, prefixes)  # type: ignore[attr-defined]
    units = list(dict.fromkeys([*pieces, *prefixes[1:], "".join(pieces)[:200]]))[:24]
    starts = list(dict.fromkeys(prefixes))[:12]
    return [
        (start + unit * (LENGTH // len(unit)))[:LENGTH] + end
        for unit in units
        if unit
        for start in starts
        for end in ("\x00", "!\n")
    ]


def _collect(parsed, pieces: list[str], prefixes: list[str]) -> None:
    for op, value in parsed:
        name = str(op)
        if name == "LITERAL":
            piece = chr(value)
        elif name == "NOT_LITERAL":
            piece = "a" if value != ord("a") else "b"
        elif name == "ANY":
            piece = "x"
        elif name == "IN":
            piece = _member(value)
        elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            inner: list[str] = []
            _collect(value[2], inner, prefixes)
            pieces += [*inner, "".join(inner)]
            piece = "".join(inner)
        elif name == "SUBPATTERN":
            _collect(value[-1], pieces, prefixes)
            continue
        elif name == "BRANCH":
            for branch in value[1]:
                _collect(branch, pieces, [*prefixes])
            continue
        else:
            continue
        pieces.append(piece)
        prefixes.append(prefixes[-1] + piece)


def _member(options) -> str:
    for op, value in options:
        name = str(op)
        if name == "NEGATE":
            refused = {each for kind, each in options if str(kind) == "LITERAL"}
            return next(letter for letter in "ax1 -" if ord(letter) not in refused)
        if name == "LITERAL":
            return chr(value)
        if name == "RANGE":
            return chr(value[0])
        if name == "CATEGORY":
            return {"CATEGORY_SPACE": " ", "CATEGORY_DIGIT": "1", "CATEGORY_NOT_SPACE": "a"}.get(str(value), "a")
    return "a"


def test_the_package_s_patterns_are_found_also_those_that_are_put_together() -> None:
    assert len(PATTERNS) > 50
    places = {place.partition(":")[0] for places in PATTERNS.values() for place in places}
    assert {"json_stream.py", "redaction.py", "op_libraries.py"} <= places


@pytest.mark.sweep
@pytest.mark.parametrize("group", range(8))
def test_patterns_take_linear_time(group: int) -> None:
    slow = []
    for pattern, flags, use in sorted(PATTERNS)[group::8]:
        compiled = re.compile(pattern, flags)
        for text in _samples(pattern, flags):
            took = _longest(getattr(compiled, "finditer" if use == "search" else use), text)
            if took > LONGEST_S:
                slow.append(f"{sorted(PATTERNS[pattern, flags, use])}: {pattern!r} took {took:.1f} s on {text[:40]!r}…")
                break
    assert slow == []


@pytest.mark.sweep
@pytest.mark.parametrize("pattern", ["*a" * 40 + "*b", "*?a" * 20 + "b", "[!b]*" * 30 + "b", "*" * 200 + "b"])
def test_a_user_s_pattern_of_names_takes_linear_time_on_any_name(pattern: str) -> None:
    assert _longest(lambda name: fnmatchcase(name, pattern), "a" * LENGTH) <= LONGEST_S


def _longest(use: Callable[[str], object], text: str) -> float:
    """The CPU time of a search; of short texts first, so that a slow pattern does not take hours."""
    for length in (256, 1024, 4096, 16384, len(text)):
        began = time.process_time()
        found = use(text[: length - 2] + text[-2:])
        if isinstance(found, Iterator):
            deque(found, 0)
        took = time.process_time() - began
        if took > LONGEST_S:
            return took
    return took
