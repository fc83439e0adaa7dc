"""What a kernel is made of may change while a program runs. Stored is what ran, or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.triton_kernels.conftest import run_python, skip_unless_triton_compiles

pytest.importorskip("triton")
NOT_WHAT_RAN = "its source, as it is now, is not what was compiled: "


def found_in(folder: Path, *, interpret: bool) -> dict[str, Any]:
    arguments = ("-m", "tests.triton_kernels.changed_programs", str(folder))
    done = run_python(*arguments, interpret="1" if interpret else "0", cache=folder / "cache")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_what_triton_has_compiled_decides_on_the_source(tmp_path: Path) -> None:
    """Each kernel was compiled with 2, which was 3 at its second launch, and compiled again for its third. Before the
    fourth, it was 3 when the capture began."""
    skip_unless_triton_compiles()
    found = found_in(tmp_path, interpret=False)
    kept_in_the_function = {"of_a_default": 2.0}
    for name in ("of_a_module", "of_a_function", "of_a_default", "of_a_cell"):
        *with_a_source, refused = found[name]
        assert with_a_source == [2.0, 2.0, kept_in_the_function.get(name, 3.0)], name
        assert NOT_WHAT_RAN in refused, name
    (refused,) = found["override"]
    assert "TRITON_KERNEL_OVERRIDE" in refused


@pytest.mark.slow
def test_what_the_interpreter_runs_decides_on_the_source(tmp_path: Path) -> None:
    """It reads variables at each launch, and texts and default values once."""
    found = found_in(tmp_path, interpret=True)
    for name in ("of_a_module", "of_a_function", "constant"):
        assert found[name] == [2.0, 3.0, 6.0, "ok"], name
    first, refused, computed, outcome = found["of_a_default"]
    assert (first, computed) == (2.0, 4.0) and "cannot be replayed here" in outcome
    assert refused.endswith("a default value of with_default has changed since it was defined or first called")
    refused, computed = found["file"]
    assert computed == -4.0 and refused.endswith("the text of of_a_file has changed since it was first called")
