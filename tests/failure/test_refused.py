"""Every situation in which a strict replay is refused: what run and benchmark say, and what the dump shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from in_process import Tools

from .table import REFUSED, Row


@pytest.mark.slow
@pytest.mark.parametrize("row", REFUSED, ids=[row.name for row in REFUSED])
def test_a_strict_replay_is_refused_before_the_first_op_and_the_dump_shows_why(
    tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: Row
) -> None:
    path, flags = row.make(tmp_path, monkeypatch)
    before = path.read_bytes()
    for tool, own in (("run", []), ("run", ["--format=jsonl"]), ("benchmark", ["--benchmark-min-time=1x"])):
        done = tools(tool, *flags, *own, path)
        assert done.code == 1, done
        assert done.out == "", "nothing was run"
        first = done.err.splitlines()[0]
        assert re.fullmatch(
            rf"FAILED_PRECONDITION: {re.escape(str(path))}: cannot be replayed here, for "
            rf"{len(done.findings)} reasons?; nothing was run",
            first,
        ), first
        for said in row.said:
            assert [finding for finding in done.findings if re.search(said, finding)], done.findings

    dumped = tools("dump", path, "--jq", row.dumped)
    assert (dumped.code, dumped.err) == (0, "")
    assert "true" in dumped.out.split(), dumped.out
    shown = tools("dump", "--summary", path)
    assert shown.code == 0 and re.search(row.shown, shown.out), shown.out
    assert path.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("row", REFUSED, ids=[row.name for row in REFUSED])
def test_keeping_going_gives_every_op_one_verdict_and_totals_that_add_up(
    tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: Row
) -> None:
    path, flags = row.make(tmp_path, monkeypatch)
    ops = [json.loads(line) for line in tools("dump", path, "--jq", 'select(.kind=="op") | .ordinal').out.splitlines()]
    if "devices" in row.name:  # there is nothing to go on with
        assert tools("run", "--keep-going", *flags, path).code == 1
        return
    if "closed" in row.name:
        flags = [*flags, "--allow-incomplete"]
    done = tools("run", "--keep-going", "--format=jsonl", *flags, path)
    head, *verdicts = map(json.loads, done.out.splitlines())
    assert [each["ordinal"] for each in verdicts] == ops
    assert head["ops"] == len(ops) == sum(head["verdicts"].values())
    assert set(head["verdicts"]) == {"ok", "refused", "failed", "mismatched", "skipped"}
    for name, count in head["verdicts"].items():
        assert sum(each["verdict"] == name for each in verdicts) == count
    assert all(bool(each["reason"]) == (each["verdict"] != "ok") for each in verdicts)
    assert done.code == (0 if "closed" in row.name else 1), "findings are there, though every op may be ok"

    whole = done.code == 0
    assert (head["outcome"] == "ok") == whole, "an outcome never says more than the exit code"
    assert head["unsupported"] == sum(
        row["kind"] == "unsupported" for row in map(json.loads, tools("dump", "--format=jsonl", path).out.splitlines())
    )
    text = tools("run", "--keep-going", *flags, path)
    assert text.code == done.code
    assert whole or not re.search("^verified: ", text.out, re.MULTILINE), text.out
    if head["unsupported"]:
        assert f"not replayed: {head['unsupported']} unsupported record" in text.out
    assert "verdicts: " + ", ".join(f"{count} {name}" for name, count in head["verdicts"].items()) in text.out
    for each in verdicts:
        if each["verdict"] != "ok":
            assert f"  ordinal {each['ordinal']} ({each['op']}): {each['verdict']}: {each['reason']}" in text.out
    for finding in head["findings"]:
        assert f"finding: {finding}" in text.out
