"""opreplay-run: what it prints, where, and the exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Tool, Tools

import replayfmt
from replayfmt.format.model import Record

from .conftest import Captured, unknown_use
from .rewriting import rewrite


@pytest.fixture
def tool(tools: Tools) -> Tool:
    return partial(tools, "run")


def training() -> None:
    layer = torch.nn.Linear(4, 4)
    for step in range(2):
        with replayfmt.scope(f"step {step}"):
            layer(torch.ones(2, 4)).sum().backward()


def test_a_run_says_what_it_did_and_how_it_was_verified(captured: Captured, tool: Any) -> None:
    path = captured(training)
    code, out, err = tool(str(path))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == str(path)
    assert lines[1].startswith("replayed: ") and "kernels in 2 scopes, on cpu" in lines[1]
    assert re.fullmatch(
        r"time: [\d.]+ (us|ms|s), [\d.]+ (ns|us|ms|s) an op "
        r"\(cold: the first execution, with allocation and page faults\)",
        lines[2],
    )
    assert lines[3].startswith("  step 0: ") and lines[4].startswith("  step 1: ")
    assert lines[5:7] == ["verified: bitwise", "  why: same device, torch, libraries, thread count and CPU capability"]
    assert lines[7].startswith("  compared: ") and "digests" in lines[7]
    assert lines[8].startswith("peak memory, cpu: ")
    assert max(map(len, lines[1:])) <= 100


def test_a_close_comparison_says_how_close(captured: Captured, tool: Any) -> None:
    path = captured(training)
    _code, out, _err = tool("--verify=close", str(path))
    assert "  tolerances: float32 0.001, relative to the value or the tensor's root mean square" in out
    row = json.loads(tool("--verify=close", "--format=jsonl", str(path)).out.splitlines()[0])
    assert row["verification"]["tolerances"] == {"float32": 0.001}
    row = json.loads(tool("--verify=bitwise", "--format=jsonl", str(path)).out.splitlines()[0])
    assert row["verification"]["tolerances"] == {}


def test_scopes_that_are_entered_again_are_not_counted_as_others(captured: Captured, tool: Any) -> None:
    def steps() -> None:
        for _ in range(3):
            with replayfmt.scope("step"):
                torch.ones(2).add(1)

    out = tool(str(captured(steps))).out
    assert "in 1 scope entered 3 times, on cpu" in out


def test_a_second_execution_is_asked_for_and_its_time_stands_beside_the_first(captured: Captured, tool: Any) -> None:
    path = captured(training)
    code, out, err = tool("--warm", str(path))
    lines = out.splitlines()
    assert (code, err) == (0, "") and [line.partition(" (")[2] for line in lines if line.startswith("time: ")] == [
        "cold: the first execution, with allocation and page faults)",
        "warm: execution 2)",
    ]
    assert [line.split(":")[0] for line in lines[2:8]] == ["time", "  step 0", "  step 1"] * 2
    assert lines[8] == "verified: bitwise"
    for flags in (["--warm"], ["--warm", "--keep-going"], []):
        code, out, err = tool(*flags, "--format=jsonl", str(path))
        row = json.loads(out.splitlines()[0])
        assert (code, err, row["execution"]) == (0, "", 1)
        if not flags:
            assert row["warm"] is None
            continue
        assert (
            row["warm"]["execution"] == 2
            and row["warm"]["elapsed_ns"] > 0
            and list(row["warm"]["scope_ns"]) == ["step 0", "step 1"]
        )


def test_what_ran_before_makes_an_execution_warm(captured: Captured, tool: Any) -> None:
    """The checked pass of a substitution, and the pass that checks the shapes of made-up content."""
    bare = captured(training, payload="none", digests="none")
    code, out, _err = tool("--verify=none", str(bare))
    assert code == 0 and "(warm: execution 2)" in out
    code, out, _err = tool("--warm", str(bare))
    once = tool(str(bare))[1]
    assert code == 0 and "(cold: " in out and "(warm: execution 2)" in out
    assert [line for line in out.splitlines() if " contents, " in line] == [
        line for line in once.splitlines() if " contents, " in line
    ], "what was made up is told once"


def test_rows_hold_the_same_for_programs(captured: Captured, tool: Any) -> None:
    code, out, _err = tool("--format=jsonl", "--verify=none", str(captured(training)))
    (row,) = map(json.loads, out.splitlines())
    assert code == 0
    assert row["kind"] == "replay" and row["outcome"] == "ok" and row["ops"] > 0 and row["elapsed_ns"] > 0
    assert row["verification"]["mode"] == "none" and row["verification"]["asked"] == "none"
    assert list(row["scope_ns"]) == ["step 0", "step 1"]
    assert row["divergence"] is None and row["verdicts"] is None and row["findings"] == []


@pytest.mark.slow
def test_a_mismatch_exits_with_1_and_names_the_first_divergence(captured: Captured, tool: Any, tmp_path: Path) -> None:
    source = captured(lambda: torch.full((4,), 2.0).mul(3.0))

    def change(record: Record, ints: list[int], floats: list[float]) -> None:
        if len(floats) == 1 and floats[0] == 3.0:
            floats[0] = 4.0

    path = rewrite(source, tmp_path / "changed.opreplay", change=change)
    code, out, err = tool(str(path))
    assert code == 1
    assert err.startswith(f"DATA_LOSS: {path}: the replay differs from the capture: ordinal ")
    assert "(aten::mul.Tensor), result 0" in err
    assert "replayed: up to ordinal 3, where it differs, of 2 ops of 2 kernels, on cpu" in out
    assert " an op" not in out, "how many ops that took is not known"
    code, out, _err = tool("--format=jsonl", str(path))
    assert code == 1 and json.loads(out)["divergence"]["op"] == "aten::mul.Tensor"
    assert tool("--verify=none", str(path))[0] == 0
    command = Path(sys.executable).with_name("opreplay-run")
    run = subprocess.Popen([command, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None and run.stderr is not None
    run.stdout.close()  # whoever reads the summary: it did not match
    assert run.stderr.read().startswith("DATA_LOSS: ")
    run.stderr.close()
    assert run.wait(600) == 1


def test_a_refusal_exits_with_1_and_lists_every_finding(captured: Captured, tool: Any) -> None:
    rows = torch.arange(3)
    code, out, err = tool(str(captured(lambda: unknown_use(rows), payload="none")))
    assert (code, out) == (1, "")
    first, *findings = err.splitlines()
    assert first.startswith("FAILED_PRECONDITION: ") and "nothing was run" in first
    assert len(findings) == 1 and findings[0].startswith("  storage 1 has no content in the capture (int64[3]")


def test_an_op_that_fails_is_one_line_with_its_ordinal_and_name(captured: Captured, tool: Any, tmp_path: Path) -> None:
    source = captured(lambda: torch.ones(6).view(2, 3))

    def change(record: Record, ints: list[int], floats: list[float]) -> None:
        if ints[:2] == [2, 3]:
            ints[0] = 5

    code, _out, err = tool(str(rewrite(source, tmp_path / "changed.opreplay", change=change)))
    assert code == 1
    assert len(err.splitlines()) == 1
    assert "(aten::view.default) failed: RuntimeError: shape '[5, 3]' is invalid" in err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--device=warp"], "INVALID_ARGUMENT: --device=warp"),
        (["--device=cpu:7"], "INVALID_ARGUMENT: --device=cpu:7: this machine has 1 cpu device(s)"),
        (["--verify=maybe"], "Invalid value for '--verify'"),
        (["--format=xml"], "Invalid value for '--format'"),
        (["--substitute"], "No such option"),
        (["--device-profiling-mode=host-ops"], "INVALID_ARGUMENT"),
    ],
)
def test_wrong_usage_exits_with_2(captured: Captured, tool: Any, args: list[str], said: str) -> None:
    code, out, err = tool(*args, str(captured(lambda: torch.ones(2))))
    assert (code, out) == (2, "")
    assert said in err


def test_no_capture_is_wrong_usage(tool: Any) -> None:
    assert tool()[0] == 2


def test_what_is_no_capture_exits_with_3(tool: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.opreplay"
    text.write_text("not a capture\n" * 50)
    empty = tmp_path / "empty.opreplay"
    empty.touch()
    for path, status in (
        (tmp_path / "missing", "NOT_FOUND"),
        (tmp_path, "NOT_FOUND"),
        (text, "DATA_LOSS"),
        (empty, "DATA_LOSS"),
    ):
        code, out, err = tool(str(path))
        assert (code, out) == (3, "")
        assert err.startswith(f"{status}: {path}") and len(err.splitlines()) == 1


def test_a_damaged_payload_exits_with_3(captured: Captured, tool: Any, tmp_path: Path) -> None:
    weight = torch.randn(4096)
    path = captured(lambda: weight.exp())
    damaged = bytearray(path.read_bytes())
    place = damaged.find(bytes(weight[100:110].view(torch.uint8).tolist()))
    assert place > 0
    damaged[place] ^= 1
    path.write_bytes(damaged)
    code, _out, err = tool(str(path))
    assert code == 3 and err.startswith("DATA_LOSS: ")


def test_an_incomplete_capture_runs_only_where_that_is_allowed(captured: Captured, tool: Any, tmp_path: Path) -> None:
    path = rewrite(captured(training), tmp_path / "open.opreplay", close=False)
    code, _out, err = tool(str(path))
    assert code == 1 and "--allow-incomplete" in err
    assert tool("--allow-incomplete", str(path))[0] == 0


def test_the_playbook_is_printed(tool: Any) -> None:
    code, out, _err = tool("--agents-md")
    assert code == 0 and "opreplay-run" in out


@pytest.mark.slow
def test_the_installed_command_works_and_a_closed_pipe_ends_it_quietly(captured: Captured) -> None:
    path = captured(training)
    command = f"'{Path(sys.executable).with_name('opreplay-run')}' --format=jsonl '{path}' | head -c 1 >/dev/null"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=600)
    assert done.stderr == ""
    assert done.returncode in (0, 141)
