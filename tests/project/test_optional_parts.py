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
import os
import sys

import torch

class Missing:
    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(each + ".") for each in names):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for part, names in PARTS.items():
    if os.fork():
        os.wait()
        continue
    os.mkdir(part)
    os.chdir(part)
    for stream in (1, 2):
        os.dup2(os.open(f"said{stream}", os.O_CREAT | os.O_WRONLY), stream)
    sys.meta_path.insert(0, Missing())
    import replayfmt
    from opreplay_tools import benchmark, check, dump, run

    with replayfmt.capture("core.opreplay"):
        torch.ones(3).mul(2).sum().item()
    print(replayfmt.run("core.opreplay").verified)
    for tool, flags in ((dump, ["--format=jsonl"]), (check, []), (run, []), (benchmark, ["--benchmark-min-time=1x"])):
        sys.argv = [tool.__name__, *flags, "core.opreplay"]
        try:
            tool.main()
        except SystemExit as leaving:
            print(tool.__name__, leaving.code)
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.slow
def test_the_core_works_without_each_of_them(tmp_path: Path) -> None:
    """In forks of one process, which has imported PyTorch and nothing else."""
    command = [sys.executable, "-c", PROGRAM.replace("PARTS", repr(OPTIONAL))]
    subprocess.run(command, cwd=tmp_path, timeout=600, check=True)
    for part in OPTIONAL:
        said = (tmp_path / part / "said1").read_text()
        assert said.startswith("bitwise"), (tmp_path / part / "said2").read_text()
        for tool in ("dump", "check", "run", "benchmark"):
            assert f"opreplay_tools.{tool} 0" in said, said
