"""SECURITY.md: every statement names tests, and those tests are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()


def _functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    assert len(named) > 25
    for file, function in named:
        assert (ROOT / file).is_file(), file
        assert function in _functions(ROOT / file), f"{file}::{function}"


def test_every_guarantee_names_a_test() -> None:
    heads = ("| ---", "| guarantee")
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith(heads)]
    assert len(rows) > 15
    for row in rows:
        _, statement, tests, _ = row.split("|")
        assert statement.strip() and "`tests/" in tests, row


def test_every_flag_that_it_names_exists() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "tools").glob("*.py"))
    for flag in set(re.findall(r"`(--[a-z-]+)", TEXT)) - {"--version"}:
        assert f'"{flag}"' in sources, flag
