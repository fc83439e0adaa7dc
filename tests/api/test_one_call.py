"""`replayfmt.run(path)` and `replayfmt.benchmark(path)`: what the tools do, in one call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from replay.rewriting import rewrite

import replayfmt
from replayfmt.errors import CaptureNotFound, UsageError

from .conftest import NAME


def test_run_replays_verifies_and_prints_what_the_tool_prints(small: Path) -> None:
    replayed = replayfmt.run(small, verify="bitwise", devices=["cpu"])
    assert replayed.outcome == "ok" and replayed.divergence is None and replayed.elapsed_ns > 0
    assert replayed.verified.startswith("bitwise")
    lines = str(replayed).splitlines()
    assert lines[0] == str(small) and lines[1].startswith(f"replayed: {replayed.result.ops} ops of ")
    assert "verified: bitwise" in lines and repr(replayed) == str(replayed)
    assert replayed.rows[0]["outcome"] == "ok" and json.dumps(replayed.rows)
    assert "<b>" not in replayed._repr_html_() and "&lt;b&gt;" in replayed._repr_html_()


@pytest.mark.slow
def test_a_difference_is_raised_unless_the_caller_looks_for_it(small: Path, tmp_path: Path) -> None:
    changed = rewrite(
        small,
        tmp_path / "changed.opreplay",
        payload=lambda number, content: bytes([content[0] ^ 1]) + content[1:] if number == 1 else content,
    )
    with pytest.raises(replayfmt.ReplayMismatch, match="differs from the capture: ordinal"):
        replayfmt.run(changed, verify="bitwise")
    replayed = replayfmt.run(changed, verify="bitwise", check=False)
    assert replayed.outcome == "mismatched" and replayed.divergence is not None
    going = replayfmt.run(changed, verify="bitwise", check=False, keep_going=True)
    assert going.result.totals()["mismatched"] >= 1
    pytest.importorskip("pandas")
    verdicts = going.to_pandas("verdict")
    assert (verdicts["verdict"] == "mismatched").sum() == going.result.totals()["mismatched"]
    assert list(going.to_pandas()["outcome"]) == ["mismatched"]
    with pytest.raises(UsageError, match="this replay has rows of the kinds replay, verdict"):
        going.to_pandas("substitution")


@pytest.mark.slow
def test_benchmark_measures_scopes_and_prints_the_tools_table(small: Path) -> None:
    measured = replayfmt.benchmark(small, scopes=[NAME], min_time="3x", warmup=0, repetitions=2)
    assert [row["run_type"] for row in measured.rows] == ["iteration"] * 2 + ["aggregate"] * 4
    assert measured.rows[0]["iterations"] == 3 and measured.median_ns > 0
    assert f"BM_replay/scope:{NAME}" in str(measured) and "verified  before and after timing, bitwise" in str(measured)
    assert json.loads(measured.json())["context"]["capture"] == str(small)
    assert measured.csv().startswith("name,iterations") and measured.warnings
    assert "\x1b" not in str(measured) and "<b>" not in measured._repr_html_()
    one = replayfmt.benchmark(small, scopes=NAME, min_time="1x", verify="none")
    assert len(one.rows) == 1 and "not verified" in str(one)


def test_what_the_tools_refuse_is_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(CaptureNotFound):
        replayfmt.run(tmp_path / "nowhere.opreplay")
    with pytest.raises(UsageError, match="--benchmark-min-time=soon"):
        replayfmt.benchmark(small, min_time="soon")
    with pytest.raises(UsageError, match="no scope of that name"):
        replayfmt.benchmark(small, scopes=["nothing"])
    with pytest.raises(UsageError, match="--cuda-graph needs a device that has graphs"):
        replayfmt.benchmark(small, min_time="1x", cuda_graph=True)
    with pytest.raises(UsageError, match="measures the whole replay"):
        replayfmt.benchmark(small, scopes=[NAME], cuda_graph=True)
