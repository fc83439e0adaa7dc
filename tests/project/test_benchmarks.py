"""The benchmark scripts run to their end; what they measure is no test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, str(ROOT / "benchmarks/run.py")]
OTHERS = {"run", "measuring", "tiny_gpt2"}
SCRIPTS = [path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in OTHERS]


def test_every_benchmark_gives_its_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = subprocess.run([*RUN, "--quick", f"--out={out}"], cwd=tmp_path, text=True, timeout=600,
                          stdin=subprocess.DEVNULL, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) >= len(SCRIPTS)
    for row in rows:
        assert row["what"] in done.stdout
        # The peer is in the bench extra, which the suite does without.
        assert isinstance(row["measured"], float) or row["details"]["reason"] == "IREE's tools are not installed"


def test_an_unknown_benchmark_is_wrong_usage() -> None:
    done = subprocess.run([*RUN, "speed_of_light"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "speed_of_light" in done.stderr
