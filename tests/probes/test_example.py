"""The example of probes: recordings of a simulated GPU, from which every kind of report is made."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from .test_report import is_picture, ran

ROOT = Path(__file__).parents[2]
REPORTS = {
    "schedule": ["exclusive"],
    "dmat": ["attention"],
    "overhead": ["costs/block_sched", "costs/gmem_bytes", "costs/dmat"],
    "memory": ["gpt2/decode=costs/dmat", "--predict=fill:32768,1,1:128,1,1:16:warp"],
    "latency": ["latency.csv"],
    "warps": ["alone=exclusive", "beside=shared"],
    **{kind: [f"counts/{kind}.bin"] for kind in ("gmem_bytes", "tensorop_count", "progress")},
}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example") / "recordings"
    before = sys.argv
    try:
        sys.argv = ["probe_recordings.py", str(folder)]
        runpy.run_path(str(ROOT / "examples" / "probe_recordings.py"), run_name="__main__")
    finally:
        sys.argv = before
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", REPORTS)
def test_every_report_of_the_example_is_tables_and_a_picture(
    kind: str, recordings: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(recordings)
    assert ran(monkeypatch, "report", kind, *REPORTS[kind], "-o", f"reports-{kind}") == 0
    printed = capsys.readouterr().out
    folder = recordings / f"reports-{kind}"
    assert (folder / f"{kind}.txt").read_text() == printed and is_picture(folder, kind)
    tables = json.loads((folder / f"{kind}.json").read_text())["tables"]
    assert all(rows for name, rows in tables.items() if "outliers" not in name)
    if kind == "schedule":
        assert tables["whole launch"][0]["blocks"] == 32768 and tables["whole launch"][0]["sms"] == 132
    if kind == "dmat":
        assert [row["tensor"] for row in tables["by tensor"]] == ["k", "v", "q", "out"]


def test_the_kinds_of_reports_are_those_of_the_example() -> None:
    from replayfmt.probes.reporting import KINDS

    assert set(REPORTS) == set(KINDS)
