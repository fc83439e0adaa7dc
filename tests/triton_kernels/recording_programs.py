"""Records each of the programs into the directory that it is given, and prints whether they compute the same without a
capture. Arguments: the directory, and the names of programs (none: all of them)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from triton.backends.nvidia.driver import CudaLauncher

import replayfmt
from tests.triton_kernels import library_programs  # noqa: F401 - its programs are among them
from tests.triton_kernels.programs import CACHE, PROGRAMS
from tests.triton_kernels.refused_programs import REFUSED


def main() -> None:
    CudaLauncher.__call__ = lambda _launcher, *launch: launch[9].mul_(2)  # the real one asks for a device
    folder, chosen = Path(sys.argv[1]), sys.argv[2:]
    same = {}
    for name, function in {**PROGRAMS, **REFUSED}.items():
        if chosen and name not in chosen:
            continue
        torch.manual_seed(0)
        with replayfmt.capture(folder / f"{name}.opreplay", digests="ops"):
            result = function()
        CACHE.zero_()
        torch.manual_seed(0)
        same[name] = all(map(torch.equal, *map(tensors, (result, function()))))
        CACHE.zero_()
    print(json.dumps(same))


def tensors(value):
    return [value] if isinstance(value, torch.Tensor) else list(value)


if __name__ == "__main__":
    main()
