"""Launches of Triton kernels recorded on a device that is not there, then probed: the replay runs on the CPU, and a
small interpreter runs the PTX on the memory of its tensors. Triton compiles in one process, and interprets in another:

python -m tests.probes.recorded_launches record CAPTURE
python -m tests.probes.recorded_launches probe CAPTURE DIR     prints what came of it as JSON
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import replayfmt
from replayfmt.errors import OpReplayError
from replayfmt.format.attachments import contents_of
from replayfmt.format.reader import CaptureReader
from replayfmt.probes.definitions import find_probe
from replayfmt.probes.ptx import AssembledPtx, PtxModule, parse_ptx
from replayfmt.probes.recordings import LaunchShape
from replayfmt.probing import LaunchableKernel, collect, plan_probe
from replayfmt.replay.plan import Plan
from replayfmt.replay.resolution.code_kernels import TritonKernel, resolve_triton
from replayfmt.replay.run.steps import IsolatedCall

from .interpreter import HostMemory, launch

N, BLOCK = 300, 128


def record(path: str) -> None:
    from tests.triton_kernels.fake_device import install

    from . import triton_sources as kernels

    def add(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor, n: int, block: int) -> None:
        torch.add(x[:n], y[:n], out=out[:n])

    def gather(x: torch.Tensor, index: torch.Tensor, out: torch.Tensor, n: int, block: int) -> None:
        torch.index_select(x, 0, index[:n], out=out[:n])

    install(80, {"triton_add": add, "triton_gather": gather})
    torch.manual_seed(0)
    with replayfmt.capture(path, digests="ops"):
        x, y, out = torch.randn(N), torch.randn(N), torch.zeros(N)
        grid = (-(-N // BLOCK),)
        kernels.triton_add[grid](x, y, out, N, BLOCK=BLOCK, num_warps=2)
        kernels.triton_add[grid](out, y, out, N, BLOCK=BLOCK, num_warps=2)  # overwrites what it reads
        index = torch.randint(0, N, (N,), dtype=torch.int32)
        kernels.triton_gather[grid](x, index, out, N, BLOCK=BLOCK)


def compile_again(path: str) -> dict[str, Any]:
    """What a kernel without its binary is, once a replay on the device that is not there has compiled it."""
    from tests.triton_kernels.fake_device import install

    install(80, {"triton_add": lambda *_arguments: None})
    with CaptureReader(path) as reader:
        kernel = next(each for each in reader.kernels if each is not None and "triton_add" in each.name)
        contents = {role: contents_of(reader, kernel)[role] for role in ("source", "metadata")}
        resolved = resolve_triton(kernel, lambda: contents, frozenset({"cuda"}))
        assert isinstance(resolved, TritonKernel) and resolved.loaded() is resolved, resolved
        before = len(resolved.launched_here())
        arguments = (torch.ones(N), torch.ones(N), torch.ones(N), N)
        named = {"BLOCK": BLOCK, "grid": [3], "num_warps": 2, "num_ctas": 1, "num_stages": 3}
        resolved.call(*arguments, **named)
        (launched,) = resolved.launched_here()
        call = IsolatedCall(arguments, named, None)
        stored, here = LaunchableKernel(reader, kernel), LaunchableKernel(reader, kernel, launched)
        same = [kernel.parameters(call) for kernel in (stored, here)]
        return {
            "before": before,
            "how": resolved.how,
            "same parameters": same[0] == same[1],
            "same shape": stored.shape([3]) == here.shape([3]),
            "entry": here.entry.name,
        }


class InterpretingDevice:
    """Runs PTX on the CPU. `spoils`: launches of kernels with a probe also write here, as a broken probe would."""

    device = torch.device("cpu")

    def __init__(self, spoils: Callable[[list[int]], None] | None = None) -> None:
        self.launches: list[str] = []
        self._spoils = spoils

    def load(self, code: AssembledPtx, text: str, entry: str) -> tuple[PtxModule, str]:
        assert code.cubin[:4] == b"\x7fELF"
        return parse_ptx(text), entry

    def launch(self, kernel: Any, shape: LaunchShape, parameters: Sequence[np.generic]) -> None:
        module, entry = kernel
        bits = [int.from_bytes(each.tobytes(), "little") for each in parameters]
        launch(module, entry, HostMemory(), shape.grid, shape.block, *bits)
        probed = "%opreplay_" in module.text
        self.launches.append("probed" if probed else "original")
        if probed and self._spoils is not None:
            self._spoils(bits)

    def timed_ms(self, work: Callable[[], None]) -> float:
        began = time.perf_counter()
        work()
        return (time.perf_counter() - began) * 1e3


def spoiled(bits: list[int]) -> None:
    """Changes a byte of the third argument, which the kernel writes."""
    HostMemory().bytes[bits[2] + 5 - HostMemory().base] ^= 1


def probed(path: str, folder: Path, tool: str, kernel: str, **options: Any) -> dict[str, Any]:
    device = InterpretingDevice(spoiled if options.pop("broken", False) else None)
    with Plan(path, keep_going=True, allow_code=options.pop("allow_code", True)) as plan:
        try:
            planned = plan_probe(plan, kernel, find_probe(tool), **options)
            done = collect(plan, planned, device, folder)
        except OpReplayError as error:
            return {"error": type(error).__name__, "text": str(error), "launches": device.launches}
        rows = [
            {
                "ordinal": each.ordinal,
                "outcome": each.outcome,
                "why": each.why,
                "records": each.records,
                "recording": each.recording and str(each.recording),
            }
            for each in done
        ]
        return {"rows": rows, "launches": device.launches, "planned": [each.ordinal for each in planned.launches]}


def main() -> None:
    action, path, *rest = sys.argv[1:]
    if action == "record":
        record(path)
        return print(json.dumps(compile_again(path)))
    folder = Path(rest[0])
    found = {
        "schedule": probed(path, folder / "schedule", "block_sched", "triton::triton_add"),
        "bytes": probed(path, folder / "bytes", "gmem_bytes", "triton::triton_gather"),
        "dmat": probed(path, folder / "dmat", "dmat", "triton::triton_add", at_most=1),
        "broken probe": probed(path, folder / "broken", "block_sched", "triton::triton_add", broken=True),
        "too many bytes": probed(path, folder / "much", "block_sched", "triton::triton_add", most_bytes=90),
        "too many records": probed(path, folder / "more", "dmat", "triton::triton_add", most_bytes=4000),
        "not allowed": probed(path, folder / "code", "block_sched", "triton::triton_add", allow_code=False),
        "unknown": probed(path, folder / "none", "block_sched", "triton::nothing"),
        "operator": probed(path, folder / "operator", "block_sched", "aten::randn"),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
