"""The benchmark scripts run to their end; what they measure is no test's business."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, str(ROOT / "benchmarks/run.py")]
OTHERS = {"run", "measuring", "tiny_gpt2", "capture_turns"}
SCRIPTS = [path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in OTHERS]
# A trace to import: those of other tools may not be here.
PRODUCT = {
    "ph": "X",
    "cat": "cpu_op",
    "name": "aten::mm",
    "pid": 1,
    "tid": 1,
    "ts": 10.0,
    "dur": 5.0,
    "args": {
        "External id": 1,
        "Input type": ["float", "float"],
        "Input Dims": [[4, 8], [8, 3]],
        "Input Strides": [[8, 1], [3, 1]],
        "Concrete Inputs": ["", ""],
    },
}


@pytest.mark.sweep
def test_every_benchmark_gives_its_rows(tmp_path: Path) -> None:
    out, traces = tmp_path / "rows.json", tmp_path / "traces"
    (traces / "kineto").mkdir(parents=True)
    (traces / "kineto" / "product.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": [PRODUCT]}))
    done = subprocess.run(
        [*RUN, "--quick", f"--out={out}"],
        cwd=tmp_path,
        text=True,
        timeout=1800,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "OPREPLAY_TRACES": str(traces)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) >= len(SCRIPTS)
    for row in rows:
        assert row["what"] in done.stdout
        # What is in the bench extra, which the suite does without.
        assert isinstance(row["measured"], float) or row["details"]["reason"].endswith(" not installed")


@pytest.mark.slow
def test_an_unknown_benchmark_is_wrong_usage() -> None:
    done = subprocess.run([*RUN, "speed_of_light"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and "speed_of_light" in done.stderr
