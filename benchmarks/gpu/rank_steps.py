"""The step about ranks: a job of one, captured by torchrun, replayed alone and by it. Several need more devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from figures import WORK, replays, tell, telling

HERE = Path(__file__).resolve().parent
LIMIT_S = 60


def _torchrun(tool: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A tool under torchrun, as one rank. What it prints is in the log, too."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command += ["-m", f"opreplay_tools.{tool}", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S)
    print("$", *command, done.stdout[-3000:], done.stderr[-3000:], sep="\n", flush=True)
    return done


def ranks() -> None:
    alone, together = (f"one rank, {how}: replays as captured" for how in ("alone", "by torchrun"))
    with telling(alone, together, share=1):
        folder = WORK / "ranks"
        captured = _torchrun("capture", "--force", "-o", f"{folder}/", HERE / "one_rank.py")
        if captured.returncode:
            raise RuntimeError(f"opreplay-capture: exit code {captured.returncode}: {captured.stderr[-300:]}")
        replays(alone, folder / "rank0.opreplay")
        done = _torchrun("run", "--verify=bitwise", folder)
        tell(together, done.returncode == 0, said=(done.stdout + done.stderr)[-600:])
