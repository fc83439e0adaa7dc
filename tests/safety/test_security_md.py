"""SECURITY.md: every guarantee has a test marked with its name, and every mark is a guarantee."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()


def _marked() -> set[str]:
    """The guarantees that tests are marked with."""
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for mark in getattr(node, "decorator_list", ()):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.guarantee":
                    found.update(ast.literal_eval(name) for name in mark.args)
    return found


@pytest.mark.slow
def test_every_guarantee_has_a_test_and_every_mark_is_a_guarantee() -> None:
    stated = {
        name
        for line in re.findall(r"^- ((?:`[a-z-]+`(?:, )?)+):", TEXT, re.M)
        for name in line.strip("`").split("`, `")
    }
    assert len(stated) > 35
    assert stated == _marked()


def test_every_flag_that_it_names_exists() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "tools").glob("*.py"))
    for flag in set(re.findall(r"`(--[a-z-]+)", TEXT)) - {"--version"}:
        assert f'"{flag}"' in sources, flag
