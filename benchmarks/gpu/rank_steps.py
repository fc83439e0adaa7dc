"""The step about ranks: a job of one, captured by torchrun, replayed alone and by it. Several need more devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from figures import DEVICE, ON_GPU, WORK, captured, replays, tell, telling

HERE = Path(__file__).resolve().parent
LIMIT_S = 60


def _torchrun(tool: str, *arguments: object, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """A tool under torchrun. What it prints is in the log, too."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", f"opreplay_tools.{tool}", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S)
    print("$", *command, done.stdout[-3000:], done.stderr[-3000:], sep="\n", flush=True)
    return done


def ranks() -> None:
    alone, together = (f"one rank, {how}: replays as captured" for how in ("alone", "by torchrun"))
    with telling(alone, together):
        folder = WORK / "ranks"
        ran = _torchrun("capture", "--force", "-o", f"{folder}/", HERE / "one_rank.py")
        if ran.returncode:
            raise RuntimeError(f"opreplay-capture: exit code {ran.returncode}: {ran.stderr[-300:]}")
        replays(alone, folder / "rank0.opreplay")
        done = _torchrun("run", "--verify=bitwise", folder)
        tell(together, done.returncode == 0, said=(done.stdout + done.stderr)[-600:])
    with telling(shared := "per op, shared out to two processes: each measures a part", share=1):
        x, path, out = torch.randn(64, 64, device=DEVICE), WORK / "shared.opreplay", WORK / "shared.json"
        kept = captured(path, lambda: [(x @ x).relu(), x.softmax(-1), x.sum()])
        where = ["--device=cuda:0"] if ON_GPU else []  # there is no other one
        flags = ["--per-op", *where, "--benchmark-min-time=1x", f"--benchmark-out={out}", "--force"]
        done = _torchrun("benchmark", *flags, path, processes=2)
        rows = [] if done.returncode else json.loads(out.read_text())["benchmarks"]
        parts = {row["op"]: row.get("measured_on") for row in rows}
        places = {str(place).partition(",")[0] for place in parts.values()}
        right = done.returncode == 0 and places == {"rank 0", "rank 1"}
        tell(shared, right, measured_on=parts, ops=len(kept), said=done.stderr[-300:])
