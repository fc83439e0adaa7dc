"""What a launch writes where no code tells: content is compared in an audit, and everything counts as written without
one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from in_process import Tools

from tests.triton_kernels.conftest import run_python

pytest.importorskip("triton")


def run(folder: Path, *, interpret: bool) -> dict[str, Any]:
    arguments = ("-m", "tests.triton_kernels.compared_programs", str(folder))
    done = run_python(*arguments, interpret="1" if interpret else "0", cache=folder / "cache")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "folder": folder}


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("interpreted"), interpret=True)


@pytest.mark.slow
def test_each_launch_says_what_it_changed(interpreted: dict[str, Any]) -> None:
    launches = interpreted["audit"]
    assert {each["writes"] for each in launches} == {"compared"}
    assert [each["written"] for each in launches] == [
        ["b", "out"],
        [],
        ["c"],
        ["b", "c"],  # on one storage, of which a part changed
        ["b"],  # a NaN of other bits
        [],
    ]


@pytest.mark.slow
def test_what_a_launch_left_as_it_was_is_digested(interpreted: dict[str, Any]) -> None:
    assert [each["digests"] for each in interpreted["audit"]] == [2, 4, 3, 2, 3, 4]
    replay = interpreted["replay"]
    assert replay["outcome"] == "ok" and replay["digests"] >= 18, replay


def test_a_replacement_that_writes_what_the_launch_left_is_found(interpreted: dict[str, Any]) -> None:
    found = interpreted["one that writes more"]
    assert len(found["findings"]) == 4, found
    assert all(each.endswith("writes argument a, which the original does not write") for each in found["findings"])


@pytest.mark.parametrize("name", ["no audit", "no content"])
def test_without_a_comparison_everything_counts_as_written(interpreted: dict[str, Any], name: str) -> None:
    """So it does where a replay has other content: what it changes there is not known."""
    for each in interpreted[name]:
        assert each == {"written": ["a", "b", "c", "out"], "writes": "assumed", "digests": 0}


@pytest.mark.slow
def test_what_assembly_does_is_compared_and_what_stores_tell_is_not(tmp_path: Path) -> None:
    found = run(tmp_path, interpret=False)
    assert found["audit"] == [{"written": ["b", "out"], "writes": "compared", "digests": 1}]
    assert found["no audit"] == [{"written": ["a", "b", "out"], "writes": "assumed", "digests": 0}]


def test_a_dump_says_how_writes_were_found(interpreted: dict[str, Any], tools: Tools) -> None:
    for name, how in {"audit": "compared", "no audit": "assumed"}.items():
        path = interpreted["folder"] / f"{name}.opreplay"
        rows = [json.loads(line) for line in tools("dump", "--format=jsonl", path).out.splitlines()]
        ops = [row for row in rows if row["kind"] == "op" and row["op"].startswith("triton::")]
        assert {row["writes"] for row in ops} == {how}
        assert not [row for row in rows if "writes" in row and row not in ops]  # operators have PyTorch's schema
        assert tools("dump", path).out.count(f"  # writes: {how}\n") == len(ops) == 6
