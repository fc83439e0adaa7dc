"""Keeping going: every op gets a verdict, and the totals add up."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import Tools

import replayfmt
from replayfmt.errors import ReplayRefused, UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.format.model import Kernel, Record
from replayfmt.format.reader import open_capture
from replayfmt.replay.plan import Plan
from replayfmt.replay.results import OpVerdict, ReplayResult

from .conftest import Captured, unknown_use
from .rewriting import rewrite


def kept_going(path: Path, verify: str = "auto") -> tuple[ReplayResult, dict[str, list[OpVerdict]]]:
    """The result, and the verdicts by operator name."""
    with Plan(path, keep_going=True) as plan:
        result = plan.execute(verify=verify, keep_going=True)  # type: ignore[arg-type]
    assert result.verdicts is not None
    assert sum(result.totals().values()) == len(result.verdicts) == result.ops
    by_name: dict[str, list[OpVerdict]] = {}
    for verdict in result.verdicts:
        by_name.setdefault(verdict.op.partition(".")[0].removeprefix("aten::"), []).append(verdict)
    return result, by_name


@pytest.mark.slow
def test_a_good_capture_is_ok_throughout(captured: Captured) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(model.parameters())

    def program() -> None:
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()

    result, _verdicts = kept_going(captured(program))
    assert result.outcome == "ok" and result.verification.digests > 0
    assert result.totals() == {"ok": result.ops, "refused": 0, "failed": 0, "mismatched": 0, "skipped": 0}


def test_an_op_that_is_refused_makes_those_that_need_it_skipped(captured: Captured, tmp_path: Path) -> None:
    def program() -> None:
        a = torch.ones(3)
        b = a.exp()
        c = b.sin()
        b.add_(1)
        c.cos()
        a.tanh()

    def change(kernel: Kernel) -> Kernel:
        return replace(kernel, name="nowhere::exp") if kernel.name == "aten::exp" else kernel

    path = rewrite(captured(program), tmp_path / "refused.opreplay", kernel=change)
    result, verdicts = kept_going(path)
    assert result.outcome == "incomplete"
    (refused,) = verdicts["nowhere::exp"]
    assert refused.verdict == "refused" and "does not exist" in refused.reason
    for name in ("sin", "add_", "cos"):
        assert [each.verdict for each in verdicts[name]] == ["skipped"], name
    assert verdicts["sin"][0].reason == f"it needs a result that ordinal {refused.ordinal} did not produce"
    assert [each.verdict for each in verdicts["tanh"]] == ["ok"]


def test_an_op_that_fails_spoils_what_it_should_have_written(captured: Captured, tmp_path: Path) -> None:
    def program() -> None:
        a = torch.ones(6)
        b = a.view(2, 3)
        b.exp()
        a.sin()

    def change(record: Record, ints: list[int], floats: list[float]) -> None:
        if ints[:2] == [2, 3]:
            ints[0] = 5

    result, verdicts = kept_going(rewrite(captured(program), tmp_path / "fails.opreplay", change=change))
    (failed,) = verdicts["view"]
    assert failed.verdict == "failed" and "shape '[5, 3]' is invalid" in failed.reason
    assert verdicts["exp"][0].verdict == "skipped"
    assert verdicts["sin"][0].verdict == "ok"
    assert result.outcome == "incomplete"


def test_a_mismatch_is_given_to_the_op_and_the_rest_still_runs(captured: Captured, tmp_path: Path) -> None:
    source = captured(lambda: (torch.full((4,), 2.0).mul(3.0), torch.ones(4).exp()))

    def change(record: Record, ints: list[int], floats: list[float]) -> None:
        if len(floats) == 1 and floats[0] == 3.0:
            floats[0] = 4.0

    result, verdicts = kept_going(rewrite(source, tmp_path / "changed.opreplay", change=change))
    assert result.outcome == "mismatched"
    assert verdicts["mul"][0].verdict == "mismatched" and "sampled elements differ" in verdicts["mul"][0].reason
    assert verdicts["exp"][0].verdict == "ok"
    assert result.totals()["mismatched"] == 1


def test_a_live_digest_blames_the_last_op_that_wrote_the_memory(captured: Captured, tmp_path: Path) -> None:
    kept = []

    def program() -> None:
        x = torch.full((4,), 2.0)
        x.mul_(3.0)
        kept.append(x)

    def change(record: Record, ints: list[int], floats: list[float]) -> None:
        if record.kind is RecordKind.op and len(floats) == 1 and floats[0] == 3.0:
            floats[0] = 4.0

    result, verdicts = kept_going(rewrite(captured(program, digests="live"), tmp_path / "c.opreplay", change=change))
    assert result.outcome == "mismatched"
    assert verdicts["mul_"][0].verdict == "mismatched" and verdicts["full"][0].verdict == "ok"


def test_content_that_is_missing_refuses_its_readers(captured: Captured) -> None:
    rows = torch.arange(3)
    path = captured(lambda: (unknown_use(rows).sin(), torch.ones(2).cos()), payload="none")
    result, verdicts = kept_going(path)
    refused = verdicts["_convert_indices_from_coo_to_csr"][0]
    assert refused.verdict == "refused" and "is not in the capture" in refused.reason
    assert verdicts["sin"][0].verdict == "skipped"
    assert verdicts["cos"][0].verdict == "ok"
    assert result.verification.mode == "none"


def test_a_record_that_is_no_op_and_was_not_done_is_said_though_every_op_ran(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.ones(4, dtype=np.float32)
    shared = torch.from_numpy(array)

    def program() -> None:
        shared.exp()
        array[1] = 5
        shared.sin()

    def without_sin(record: Record, ints: list[int], floats: list[float]) -> bool:
        kernel = names[record.signature.kernel]
        return kernel is None or kernel.name != "aten::sin"

    path = captured(program, digests="none")
    with open_capture(path) as reader:
        names = list(reader.kernels)
    path = rewrite(path, tmp_path / "imported.opreplay", change=without_sin)
    assert kept_going(path)[0].outcome == "ok"

    def fails(*_arguments: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("replayfmt.replay.run.content.Content.load", fails)
    result, verdicts = kept_going(path)
    assert [each.verdict for each in verdicts["exp"]] == ["ok"]
    assert result.outcome == "incomplete"
    assert result.left_out == ("ordinal 2 (storage_import): OSError: the disk is gone",)


def test_content_imported_again_can_be_trusted_again(captured: Captured, tmp_path: Path) -> None:
    array = np.ones(4, dtype=np.float32)
    shared = torch.from_numpy(array)

    def program() -> None:
        shared.add_(1)
        shared.exp()
        array[1] = 5
        shared.sin()

    def change(kernel: Kernel) -> Kernel:
        return replace(kernel, name="nowhere::add_") if kernel.name == "aten::add_" else kernel

    _result, verdicts = kept_going(rewrite(captured(program), tmp_path / "again.opreplay", kernel=change))
    assert [verdicts[name][0].verdict for name in ("nowhere::add_", "exp", "sin")] == ["refused", "skipped", "ok"]


def test_a_plan_that_keeps_going_does_nothing_else(captured: Captured, tmp_path: Path) -> None:
    rows, weight = torch.arange(3), torch.ones(3)
    path = captured(lambda: unknown_use(rows), payload="none")
    with Plan(path, keep_going=True) as plan:
        assert plan.findings
        with pytest.raises(ReplayRefused):
            plan.execute()
    whole = captured(lambda: weight.exp(), "whole")
    with Plan(whole) as plan, pytest.raises(UsageError, match="keep_going"):
        plan.execute(keep_going=True)


def test_the_tool_lists_verdicts_and_exits_with_1(captured: Captured, tools: Tools) -> None:
    rows = torch.arange(3)
    path = captured(lambda: (unknown_use(rows).sin(), torch.ones(2).cos()), payload="none")

    def run(*args: str) -> tuple[int, str]:
        return tools("run", "--keep-going", *args)[:2]

    code, out = run(str(path))
    assert code == 1
    assert "verdicts: 2 ok, 1 refused, 0 failed, 0 mismatched, 1 skipped" in out
    assert "replayed: 2 of 4 ops of 4 kernels, on cpu" in out
    assert "csr.default): refused: the content of storage" in out and "has no content in the capture" in out
    code, out = run("--format=jsonl", str(path))
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 1 and rows[0]["verdicts"]["refused"] == 1 and len(rows[0]["findings"]) == 1
    with open_capture(path) as reader:
        ops = [record.ordinal for record in reader.records() if record.kind is RecordKind.op]
    assert [row["ordinal"] for row in rows[1:]] == ops
    assert Counter(row["verdict"] for row in rows[1:]) == {"ok": 2, "refused": 1, "skipped": 1}
    assert run(str(captured(lambda: torch.ones(3).exp(), "whole")))[0] == 0


def ordinal_of(path: Path, name: str) -> int:
    with replayfmt.open(path) as capture:
        return next(op.ordinal for op in capture.ops if op.kernel.name == name)


@pytest.mark.slow
def test_a_part_runs_with_what_it_needs_and_is_judged_alone(captured: Captured, tools: Tools, tmp_path: Path) -> None:
    """By scope, kernel or range, as everywhere; what is wrong elsewhere is not its matter."""

    def program() -> torch.Tensor:
        x = torch.randn(4, 4)
        with replayfmt.scope("one"):
            y = x.mm(x).relu()
        with replayfmt.scope("two"):
            return (y + 1).tanh()

    path = captured(program, digests="ops")
    tanh = ordinal_of(path, "aten::tanh")

    def spoil(record: Record, ints: list[int], _floats: list[float]) -> None:
        if record.kind is RecordKind.digest and record.argument("of") == tanh:
            ints[2] ^= 1

    spoiled = rewrite(path, tmp_path / "spoiled.opreplay", change=spoil)
    assert tools("run", spoiled).code == 1
    one = tools("run", "--scope=one", "--format=jsonl", spoiled)
    rows = [json.loads(row) for row in one.out.splitlines()]
    ran = {row["op"].partition(".")[0] for row in rows if row["kind"] == "verdict"}
    assert one.code == 0 and rows[0]["outcome"] == "incomplete" and rows[0]["verification"]["mode"] == "bitwise"
    assert {"aten::relu", "aten::mm"} <= ran and "aten::tanh" not in ran
    assert (
        tools("run", "--kernel=aten::tanh", spoiled).code == tools("run", f"--ops={tanh}:{tanh + 1}", spoiled).code == 1
    )
    refused = tools("run", "--scope=one", "--warm", path)
    assert refused.code == 2 and "opreplay-trim" in refused.err
