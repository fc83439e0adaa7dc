"""Making a kernel task of a capture of 10,000 ops, and judging 20 kernels on 30 workloads.

Making it is timed apart from the verified replay that its contents come from, and from writing bytes: a task without
contents. The kernels are honest ones: one that is rejected ends early.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from measuring import arguments, row, scratch

import replayfmt
from replayfmt.benchmark.candidates.judged import run_judge
from replayfmt.benchmark.candidates.task_cases import Options
from replayfmt.dump.selection import OpSelection
from replayfmt.export.kernel_task import write_task
from replayfmt.export.task_workloads import TaskOptions
from replayfmt.replay.plan import Plan

KERNEL = (
    "import torch\ndef addmm(self, mat1, mat2, *, beta=1, alpha=1):\n"
    "    return torch.mm(mat1, mat2) * alpha + self * beta\n"
)


def program(ops: int, shapes: int) -> None:
    layers = [torch.nn.Linear(64, 64 + shape) for shape in range(shapes)]
    x = torch.randn(8, 64)
    with torch.no_grad():
        for number in range(ops // 2):
            layers[number % shapes](x)


def made(capture: Path, out: Path, options: TaskOptions) -> float:
    began = time.perf_counter()
    with Plan(capture, keep_going=True) as plan:
        write_task(plan, str(out), OpSelection(kernel=("aten::addmm",)), options)
    return time.perf_counter() - began


def main() -> None:
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    ops, shapes, kernels = (200, 3, 2) if quick else (10_000, 30, 20)
    with scratch() as directory:
        capture = directory / "work.opreplay"
        with replayfmt.capture(capture):
            program(ops, shapes)
        without = made(capture, directory / "none", TaskOptions("none"))
        captured = made(capture, directory / "task", TaskOptions())
        row(f"kernel task of {ops:,} ops, without contents", without, "s", at_most=10, captured_s=captured)
        files = [directory / f"mine_{number}.py" for number in range(kernels)]
        for file in files:
            file.write_text(KERNEL)
        began = time.perf_counter()
        found = run_judge(str(directory / "task"), [str(file) for file in files], Options())
        judged = time.perf_counter() - began
        assert all(each["verdict"] == "accepted" for each in found["candidates"])
        what = f"judging {kernels} kernels on {shapes} workloads, on {os.cpu_count()} processors"
        row(what, judged, "s", at_most=120)


if __name__ == "__main__":
    main()
