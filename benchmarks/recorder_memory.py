"""Recorder memory: how much the process grows while five million operators are recorded.

The loop allocates and frees a tensor with nearly every operator, so ids keep changing. Growth is what is resident after
five million operators above what was resident after the first million, when every buffer has been used.
"""

from __future__ import annotations

import torch
from measuring import arguments, progress, resident_bytes, row, scratch

import replayfmt


def step(state: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Ten operators, nine of which allocate."""
    hidden = state @ weight
    hidden = hidden.relu() + state
    centred = hidden - hidden.mean()
    centred = centred * 0.5
    return centred.tanh().add_(0.125).clamp(-1, 1)


def main() -> None:
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    torch.manual_seed(0)
    million = 10_000 if quick else 1_000_000
    for recorder in ("native", "python"):
        measure(recorder, million)


def measure(recorder: str, million: int) -> None:
    state, weight = torch.randn(4, 4), torch.randn(4, 4)
    resident = []
    with scratch() as directory:
        path = directory / "long.opreplay"
        with torch.no_grad(), replayfmt.capture(path, payload="none", recorder=recorder):
            for count in range(5 * million // 10):
                state = step(state, weight)
                if (count + 1) * 10 % million == 0:
                    resident.append(resident_bytes())
                    progress(f"{(count + 1) * 10} operators: {resident[-1] / 2**20:.0f} MiB")
        length = path.stat().st_size
    row(
        f"{recorder} recorder's memory: growth from the first to the fifth million operators",
        (resident[-1] - resident[0]) / 2**20,
        "MiB",
        at_most=8,
        resident_mib=[round(r / 2**20, 1) for r in resident],
        file_bytes=length,
    )


if __name__ == "__main__":
    main()
