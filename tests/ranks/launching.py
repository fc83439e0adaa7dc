"""Programs of several ranks, and their captures: processes of this machine over gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

BIN = Path(sys.executable).parent
WORLD = 2
BEGIN = """
import hashlib, os, sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)

def out(name, *tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(bytes(tensor.detach().reshape(-1).contiguous().view(torch.uint8).tolist()))
    print(rank, name, digest.hexdigest()[:16], flush=True)
"""
END = """
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def launch(
    folder: Path, *command: object, ranks: tuple[int, ...] = (0, 1), world: int = WORLD
) -> list[tuple[int, str]]:
    """Run a command as ranks of one job, as torchrun would; of each, exit code and what it printed."""
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    started = [
        subprocess.Popen(
            [*map(str, command)],
            cwd=folder,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ranks
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


def results(launched: list[tuple[int, str]]) -> list[str]:
    """What the program printed, of all ranks."""
    for code, text in launched:
        assert code == 0, text
    return sorted(line for _code, text in launched for line in text.splitlines() if line[:2] in ("0 ", "1 "))


def captured(folder: Path, program: str, *flags: str) -> list[str]:
    """Capture a program to the folder `out`; what it printed."""
    (folder / "program.py").write_text(BEGIN + program + END)
    return results(launch(folder, BIN / "opreplay-capture", *flags, "-o", "out/", "program.py"))


def plain(folder: Path, program: str) -> list[str]:
    """What a program prints without a capture."""
    (folder / "program.py").write_text(BEGIN + program + END)
    launched = launch(folder, sys.executable, "program.py")
    if any("terminate called without an active exception" in text for _code, text in launched):
        launched = launch(folder, sys.executable, "program.py")  # now and then a thread of PyTorch's outlives the exit
    return results(launched)
