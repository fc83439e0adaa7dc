"""What holds for every file of the project: no machine's paths, pinned dependencies."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tracked() -> list[Path]:
    """Every file that git tracks or would track."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is no list of the project's own files")
    command = ["git", "ls-files", "-coz", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_a_path_of_the_machine_it_was_written_on() -> None:
    machine = re.compile(rb"/(?:work|root|home/\w+|Users/\w+)/")
    wrong = [
        str(path.relative_to(ROOT))
        for path in tracked()
        if path != Path(__file__) and machine.search(path.read_bytes())
    ]
    assert not wrong


def test_only_golden_captures_are_not_text() -> None:
    golden = ROOT / "tests/golden"
    assert [
        str(path.relative_to(ROOT)) for path in tracked() if b"\0" in path.read_bytes() and path.parent != golden
    ] == []


@pytest.mark.slow
def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in tracked()
        if path.suffix == ".py"
        and path.stat().st_size
        and ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None
    ]
    assert not silent


@pytest.mark.slow
def test_names_say_what_they_hold_and_not_only_its_form() -> None:
    vague = {"walk", "flat", "uses", "facts", "cuts", "utils", "helpers", "misc", "stuff"}
    found = [
        str(path.relative_to(ROOT)) for path in (ROOT / "replayfmt").rglob("*.py") if path.stem in {*vague, "ranges"}
    ]
    for path in sorted((ROOT / "replayfmt").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if named and node.name.strip("_").lower() in vague and "fast_path" not in path.parts:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not found


def test_every_dependency_is_pinned_for_the_suite() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert {re.split(r"[<>=~!\[; ]", requirement)[0] for requirement in asked} <= set(pins)
    assert pins["torch"] == "2.13.0"


@pytest.mark.slow
def test_json_from_outside_is_read_by_one_parser() -> None:
    """parse_json: Python's own raises RecursionError, too, which readers forget."""
    of_tasks = {"task_cases", "task_calls", "check_script", "judged"}
    reads_its_own = of_tasks | {
        "sampler",
        "running",
        "profiling",
        "ranks",
        "compiled",
        "replay_flags",
        "benchmark",
        "trim",
        "signature_grammar",
        "replay_script",
    }  # the last needs torch alone
    found = {
        path.stem
        for folder in ("replayfmt", "tools")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.load", "json.loads")
    }
    assert found - reads_its_own == {"validation"}
