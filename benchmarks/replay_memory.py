"""Replay's peak memory against the program's: one training step of a GPT-2 whose activations outweigh its weights.

The program, alone, and the replay of its capture run in processes of their own. Each one's figure is the most it had
resident, mapped files included, above what it had after its imports. A second execution starts from fresh state again,
for which the replay keeps a copy of what the step writes: parameters and optimizer state. That copy does not count.
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
    states = [value for state in optimizer.state.values() for value in state.values()]
    end(before, written_bytes=sum(tensor.nbytes for tensor in [*network.parameters(), *states]))


def replay(executions: int, path: Path) -> None:
    """Plan and execute the capture, unverified."""
    import torch

    import replayfmt
    import replayfmt.replay.plan  # what a replay imports is not what it needs for the work

    torch.set_num_threads(1)
    before = begin()
    plan = replayfmt.Plan(path)
    for _ in range(executions):
        plan.execute(verify="none")
    end(before)  # executing starts the system's mark again: it is the last execution's


def begin() -> int:
    forget_peak()
    return resident_bytes()


def end(before: int, **more: int) -> None:
    print(json.dumps({"peak_bytes": resident_bytes("VmHWM") - before, **more}))


def in_process(*asked: str) -> dict[str, int]:
    """Run one of the two in a process of its own. Returns what it measured, in bytes."""
    done = subprocess.run([sys.executable, __file__, "--only", *asked], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    if sys.argv[1:2] == ["--only"]:
        what, *rest = sys.argv[2:]
        if what == "program":
            program(rest[0] == "quick", Path(rest[1]) if rest[1:] else None)
        else:
            replay(int(rest[0]), Path(rest[1]))
        return
    quick = arguments(__doc__).quick
    size, rounds = ("quick", 1) if quick else ("full", 3)
    with scratch() as directory:
        path = str(directory / "memory.opreplay")
        written = in_process("program", size, path)["written_bytes"]
        alone = median(in_process("program", size)["peak_bytes"] for _ in range(rounds))
        once = median(in_process("replay", "1", path)["peak_bytes"] for _ in range(rounds))
        again = median(in_process("replay", "2", path)["peak_bytes"] for _ in range(rounds))
    details = {
        "program_mib": alone / 2**20,
        "first_mib": once / 2**20,
        "later_mib": again / 2**20,
        "copy_mib": written / 2**20,
    }
    row("replay, peak memory / program's: first execution", once / alone, at_most=1.05, **details)
    row(
        "replay, peak memory / program's: later ones, the copy that restores apart",
        (again - written) / alone,
        at_most=1.05,
        **details,
    )


if __name__ == "__main__":
    main()
