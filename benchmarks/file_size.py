"""File bytes an op, metadata only, times included.

A steady loop works in place on the same tensors; ids keep changing wherever a program allocates as it goes, as nearly
every real one does, and each allocation's death is a record as well. Bytes are the whole file's, definitions, index and
padding included, divided by the ops alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import tiny_gpt2
import torch
from measuring import arguments, row, scratch

import replayfmt
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture


def steady_loop() -> Callable[[], None]:
    """A recurrent layer that writes into buffers it already has."""
    torch.manual_seed(0)
    state, weight, gate = torch.randn(8, 32), torch.randn(32, 32) / 6, torch.randn(8, 32)
    buffer = torch.empty(8, 32)

    def run() -> None:
        torch.mm(state, weight, out=buffer)
        buffer.add_(gate, alpha=0.5)
        buffer.tanh_()
        state.mul_(0.9).add_(buffer)
        torch.sigmoid(state, out=gate)
        torch.clamp(gate, 0.1, 0.9, out=gate)
        state.sub_(gate, alpha=0.25)

    return run


def measure(name: str, run: Callable[[], None], times: int, at_most: float, directory: Path) -> None:
    path = directory / "size.opreplay"
    with replayfmt.capture(path, payload="none", force=True), torch.no_grad():
        for _ in range(times):
            run()
    capture = open_capture(str(path))
    ops, records, length = capture.summary.records[RecordKind.op], capture.record_count, capture.length
    capture.close()
    row(
        f"file, {name}: bytes an op",
        length / ops,
        "bytes",
        at_most=at_most,
        ops=ops,
        records=records,
        file_bytes=length,
    )


def with_gradients(run: Callable[[], None]) -> Callable[[], None]:
    def enabled() -> None:
        with torch.enable_grad():
            run()

    return enabled


def main() -> None:
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    with scratch() as directory:
        measure("steady loop", steady_loop(), 10 if quick else 50_000, 8, directory)
        measure("ever-changing ids, forward", tiny_gpt2.forward(), 2 if quick else 1_700, 16, directory)
        measure(
            "ever-changing ids, training step",
            with_gradients(tiny_gpt2.training_step()),
            1 if quick else 250,
            16,
            directory,
        )


if __name__ == "__main__":
    main()
