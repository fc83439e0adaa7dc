"""Embedding payloads: the speed of a capture that embeds tensors, against safetensors.torch.save_file of the same.

The capture is a real one, from start to close: each tensor enters because an operator uses it. Closing a capture makes
it durable (fsync), so safetensors' file is synchronized as well in the row that has the target; the other row shows
the same without that. The tensors are weights as a model has them: random, hence hardly compressible.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from measuring import arguments, in_turns, median_of, row, scratch
from safetensors.torch import save_file

import replayfmt


def synchronize(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def main() -> None:
    quick = arguments(__doc__).quick
    torch.manual_seed(0)
    count, elements = (4, 1 << 16) if quick else (96, 1 << 20)
    tensors = {
        f"layer{n}.weight": torch.randn(elements).to(torch.bfloat16 if n % 3 == 2 else torch.float32)
        for n in range(count)
    }
    length = sum(tensor.nbytes for tensor in tensors.values())
    written: list[int] = []
    with scratch() as directory:
        ours, theirs = directory / "payload.opreplay", directory / "payload.safetensors"

        def capture() -> None:
            with replayfmt.capture(ours, payload="full", digests="none", force=True):
                for tensor in tensors.values():
                    tensor.view(-1)
            written.append(ours.stat().st_size)

        def save() -> None:
            save_file(tensors, theirs)

        def save_durably() -> None:
            save()
            synchronize(theirs)

        def fresh(work: Callable[[], None]) -> float:
            ours.unlink(missing_ok=True)
            theirs.unlink(missing_ok=True)
            begin = perf_counter()
            work()
            return perf_counter() - begin

        taken = in_turns(
            {work.__name__: lambda w=work: fresh(w) for work in (capture, save_durably, save)}, 1 if quick else 7
        )
    details = {
        "bytes": length,
        "file_bytes": written[-1],
        "tensors": count,
        **{f"{name}_gb_a_second": length / median(value) / 1e9 for name, value in taken.items()},
    }
    row(
        "embedding payloads: speed / safetensors.torch.save_file and fsync",
        median_of(lambda c, s: s / c, taken["capture"], taken["save_durably"]),
        **details,
    )
    row(
        "embedding payloads: speed / safetensors.torch.save_file alone",
        median_of(lambda c, s: s / c, taken["capture"], taken["save"]),
        at_least=0.7,
        **details,
    )


if __name__ == "__main__":
    main()
