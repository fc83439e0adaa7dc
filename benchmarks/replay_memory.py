"""Replay's peak memory against the program's: one training step of a GPT-2 whose activations outweigh its weights.

The program, alone, and the replay of its capture run in processes of their own. Each one's figure is the most it had
resident, mapped files included, above what it had after its imports. The copy of written storages that gives every
execution fresh state is reported apart, as the plan gives it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

from measuring import arguments, forget_peak, resident_bytes, row, scratch


def program(quick: bool, path: Path | None) -> None:
    """Two training steps; with `path`, the second one is captured."""
    import tiny_gpt2
    import torch

    import replayfmt

    torch.set_num_threads(1)
    before = begin()
    network = tiny_gpt2.model(2, 64, 64, 256) if quick else tiny_gpt2.model(4, 256, 256, 4096)
    network.train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    tokens = torch.randint(256, (2, 64) if quick else (8, 256))

    def step() -> None:
        optimizer.zero_grad()
        network(input_ids=tokens, use_cache=False).logits.logsumexp(-1).mean().backward()
        optimizer.step()

    step()
    if path is None:
        step()
    else:
        with replayfmt.capture(path):
            step()
    end(before)


def replay(path: Path) -> None:
    """Plan and execute the capture once, unverified."""
    import torch

    import replayfmt
    import replayfmt.replay.plan  # what a replay imports is not what it needs for the work

    torch.set_num_threads(1)
    before = begin()
    plan = replayfmt.Plan(replayfmt.open(path))
    plan.execute(verify="none")
    end(before)


def begin() -> int:
    forget_peak()
    return resident_bytes()


def end(before: int) -> None:
    print(json.dumps({"peak_bytes": resident_bytes("VmHWM") - before}))


def in_process(what: str, quick: bool, path: Path | None = None) -> int:
    """Run one of the two in a process of its own. Returns its peak in bytes."""
    command = [sys.executable, __file__, "--only", what, *["--quick"] * quick, *[str(path)] * (path is not None)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])["peak_bytes"]


def main() -> None:
    if sys.argv[1:2] == ["--only"]:
        rest = [Path(name) for name in sys.argv[3:] if name != "--quick"]
        if sys.argv[2] == "replay":
            replay(rest[0])
        else:
            program("--quick" in sys.argv, rest[0] if rest else None)
        return
    quick = arguments(__doc__).quick
    with scratch() as directory:
        path = directory / "memory.opreplay"
        in_process("program", quick, path)
        rounds = 1 if quick else 3
        alone = median(in_process("program", quick) for _ in range(rounds))
        replayed = median(in_process("replay", quick, path) for _ in range(rounds))
        written = written_bytes(path)
    row("replay, peak memory / program's, without the restored copy", (replayed - written) / alone, at_most=1.05,
        program_mib=alone / 2**20, replay_mib=replayed / 2**20, restored_copy_mib=written / 2**20)


def written_bytes(path: Path) -> int:
    """Bytes of the imported storages that captured ops write: what a replay has to restore before each execution."""
    import replayfmt

    return replayfmt.Plan(replayfmt.open(path)).restored_bytes


if __name__ == "__main__":
    main()
