"""How long `opreplay-benchmark --per-op` takes, with default settings, to measure 1,000 distinct ops.

Twelve operators on 84 shapes each: random numbers, element by element, reductions, matrix products, copies, and some
that write one of their inputs, which is put back before each call. The tool is a process of its own; its start counts.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import torch
from measuring import arguments, row, scratch

import replayfmt

SIZES = tuple(range(8, 176, 2))


def calls(size: int) -> None:
    a, b = torch.randn(size, size), torch.randn(size, size)
    a + b
    a * b
    torch.mm(a, b)
    a.sum()
    torch.softmax(a, 1)
    a.t().contiguous()
    torch.cat([a, b])
    a.add_(b)
    a.mul_(0.5)
    a.tanh_()


def main() -> None:
    sizes = SIZES[:2] if arguments(__doc__).quick else SIZES
    torch.set_num_threads(1)
    with scratch() as directory:
        path, out = directory / "thousand.opreplay", directory / "results.json"
        with replayfmt.capture(path, digests="none"):
            for size in sizes:
                calls(size)
        began = time.perf_counter()
        command = [sys.executable, "-m", "opreplay_tools.benchmark", "--per-op", f"--benchmark-out={out}", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        context = json.loads(out.read_text())["context"]
    row(
        f"measuring {context['selected']:,} distinct ops, default settings",
        seconds,
        "s",
        at_most=120,
        processor_s=used.ru_utime + used.ru_stime,
        distinct_ops=context["distinct_ops"],
        successful=context["successful"],
        not_measured=context["not_measured_calls"],
    )


if __name__ == "__main__":
    main()
