"""Parts that can be left out: the core captures, dumps, checks, replays and measures without each of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

OPTIONAL = {
    "importers": ("replayfmt.importers",),
    "probes": ("replayfmt.probes", "replayfmt.probing"),
    "report": ("replayfmt.report",),
    "energy": ("replayfmt.benchmark.energy",),
    "serving": ("replayfmt.initializers.serving",),
    "export": ("replayfmt.export",),
    "trim": ("replayfmt.trim",),
}

PROGRAM = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if any(name == part or name.startswith(part + ".") for part in PARTS):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import torch
import replayfmt
from opreplay_tools import benchmark, check, dump, run

with replayfmt.capture("core.opreplay"):
    torch.ones(3).mul(2).sum().item()
print(replayfmt.run("core.opreplay").verified)
for tool, flags in ((dump, ["--format=jsonl"]), (check, []), (run, []), (benchmark, ["--benchmark-repetitions=1"])):
    sys.argv = [tool.__name__, *flags, "core.opreplay"]
    try:
        tool.main()
    except SystemExit as leaving:
        print(tool.__name__, leaving.code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("part", OPTIONAL)
def test_the_core_works_without(part: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("PARTS", repr(OPTIONAL[part])))
    ran = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("bitwise")
    for tool in ("dump", "check", "run", "benchmark"):
        assert f"opreplay_tools.{tool} 0" in ran.stdout, ran.stdout + ran.stderr
