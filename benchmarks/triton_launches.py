"""What a launch of a Triton kernel costs in a replay: against Triton's own launcher, for the same kernel and arguments.

Interpreted, the kernel's work is most of both. Compiled, a launch is of a stored binary, through Triton's launcher, on
a device that is not there: what would ask the driver to launch does nothing, so that what is compared is all that
Python does. Triton decides when it is imported which of the two it does: each is a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from measuring import arguments, in_turns, median_of, row, scratch, seconds
from replay_cost import OpTimer

import replayfmt

SWITCH = "TRITON_INTERPRET"
NAMES = {"1": "interpreted", "0": "of a stored binary"}


class NoDevice:
    """Triton's driver of a device whose launches do nothing."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", 90, 32)
        self.utils = SimpleNamespace(
            load_binary=lambda name, binary, shared, device: (object(), object(), 32, 0, 1024),
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
        )

    def launcher_cls(self, _source: Any, _metadata: Any) -> Any:
        return lambda *_arguments: None

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def stand_for_a_device() -> None:
    """Have Triton launch, and replays launch as on a device, on the CPU's memory."""
    import triton

    from replayfmt.format.codes import KernelKind
    from replayfmt.replay.resolution import kernel_lookup
    from replayfmt.replay.resolution.code_kernels import TritonKernel, resolve_triton

    triton.runtime.driver.set_active(NoDevice())
    kernel_lookup.RESOLVERS[KernelKind.triton] = lambda kernel, contents, _types: resolve_triton(
        kernel, contents, frozenset({"cuda"})
    )
    kernel_lookup.prepare_triton = lambda _types: None
    TritonKernel.runs_on = lambda _self, _type: True  # type: ignore[method-assign]


def measure(quick: bool) -> None:
    from triton_add import add_kernel

    interpreted = os.environ[SWITCH] == "1"
    if not interpreted:
        stand_for_a_device()
    launches = 10 if quick else 30 if interpreted else 3000
    x, y, out = (torch.ones(64) for _ in range(3))

    def program() -> None:
        for _ in range(launches):
            add_kernel[(2,)](x, y, out, 64, BLOCK=32, num_warps=1)

    program()
    with scratch() as directory:
        path = directory / "launches.opreplay"
        with replayfmt.capture(path, digests="none"):
            program()
        with replayfmt.Plan(path, allow_code=True) as plan:

            def replay() -> float:
                timer = OpTimer()
                plan.execute(verify="none", timer=timer)
                return timer.seconds

            taken = in_turns({"own": lambda: seconds(program), "replay": replay}, 3 if quick else 15, 1)
    row(
        f"replay, a launch of a Triton kernel, {NAMES[os.environ[SWITCH]]}: time / Triton's own launcher",
        median_of(lambda own, replayed: replayed / own, taken["own"], taken["replay"]),
        at_most=1.2,
        **{f"{key}_us_a_launch": median(value) / launches * 1e6 for key, value in taken.items()},
    )


def main() -> None:
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    if SWITCH in os.environ:
        measure(quick)
        return
    for interpret, name in NAMES.items():
        if find_spec("triton") is None:
            row(f"replay, a launch of a Triton kernel, {name}", None, at_most=1.2, reason="Triton is not installed")
            continue
        subprocess.run([sys.executable, *sys.argv], env={**os.environ, SWITCH: interpret}, check=True)


if __name__ == "__main__":
    main()
