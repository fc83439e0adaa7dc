"""docs/initializers.md: its code is run in order, as one program, and does what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from replayfmt.initializers import Role

PAGE = Path(__file__).parents[2] / "docs" / "initializers.md"


@pytest.mark.slow
def test_the_code_of_the_page_runs_and_says_what_the_page_says(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    program = tmp_path / "page.py"
    program.write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert "an argument of shop::lookup for which no safe value is known" in out
    assert "ok - not verified: the content of 3 storages was synthesized and" in out
    assert "compared the dtypes and sizes of 1 op's results" in out
    assert "table_of_rows (4, 16)" in out and "lengths_of_entries (4,)" in out
    assert "lookup: 4 entries of up to 16 rows" in out
    assert "{'lookup_batch', 'flat'}" in out or "{'flat', 'lookup_batch'}" in out


def test_the_page_names_every_role() -> None:
    rows = [line.split("|")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    named = {name.strip() for row in rows for name in row.split(",")}
    assert {role.name for role in Role} <= named
