"""Kernels that nobody wrote for these tests: PyTorch's own, for its tests of torch.compile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replayfmt.format.operator_schema import parse_operator_schema
from tests.triton_kernels.conftest import run_python

pytest.importorskip("triton")


def run(folder: Path, *, interpret: bool) -> list[dict[str, Any]]:
    arguments = ("-m", "tests.triton_kernels.foreign_programs", str(folder))
    done = run_python(*arguments, interpret="1" if interpret else "0", cache=folder / "cache")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_the_interpreter_replays_them(tmp_path: Path) -> None:
    found = run(tmp_path, interpret=True)
    assert len(found) >= 2
    for each in found:
        assert (each.get("outcome"), each["nonzero"]) == ("ok", True) and each["digests"], each


@pytest.mark.slow
def test_the_stored_source_compiles_to_the_captured_code(tmp_path: Path) -> None:
    found = run(tmp_path, interpret=False)
    assert len(found) >= 15  # PyTorch 2.11 has fewer than later ones
    for each in found:
        assert each.get("same") is True and each["ttir"] > 1000, each
    assert {tuple(sorted(written(each["schema"]))) for each in found} == {("out_ptr",), ("in_ptr0", "out_ptr")}
    assert [each["name"] for each in found if "in_ptr0" in written(each["schema"])] == ["indirection_kernel"]


def written(schema: str) -> set[str]:
    return {argument.name for argument in parse_operator_schema(schema).arguments if argument.type.written}
