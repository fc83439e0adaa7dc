"""Kernels that were not written for these tests: those that PyTorch tests torch.compile with. As a script it records
each launch into the directory that it is given, and prints what came of it as JSON: where Triton interprets, of the
replay; where it compiles, for a device that is not there, what the stored source compiles to."""

from __future__ import annotations

import json
import os
import re
import sys
import typing
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import torch
import torch.utils._triton

import replayfmt
from replayfmt.errors import OpReplayError
from replayfmt.format.attachments import contents_of
from replayfmt.format.codes import KernelKind
from replayfmt.format.reader import CaptureReader
from replayfmt.replay.resolution.code_kernels import resolve_triton
from tests.triton_kernels.fake_device import install

torch.utils._triton.has_triton = lambda **_options: True  # it asks for a device
NAMES = ("HAS_CUDA_AND_TRITON", "HAS_GPU", "HAS_MTIA_AND_TRITON", "HAS_XPU_AND_TRITON")
asked = ModuleType("torch.testing._internal.inductor_utils")  # and that needs more than PyTorch
vars(asked).update(dict.fromkeys(NAMES, False))
sys.modules[asked.__name__] = asked
from torch.testing._internal import triton_utils as kernels  # noqa: E402

SIZE, BLOCK = 40, 16
GRID = (3,)


def launches() -> typing.Iterator[tuple[str, torch.Tensor, tuple, dict]]:
    """The name of each kernel, what it writes, and what it is launched with."""
    block = {"BLOCK_SIZE": BLOCK}
    for name in (
        "add_kernel",
        "sub_kernel",
        "cond_op_kernel",
        "atomic_add_kernel",
        "add_kernel_with_import",
        "add_4_times_kernel",
    ):
        x, y, out = torch.randn(SIZE), torch.randn(SIZE), torch.zeros(SIZE)
        yield name, out, (x, y, out, SIZE), block
    x, y, out = torch.randn(SIZE), torch.randn(SIZE), torch.empty(SIZE)
    yield "add_kernel_with_optional_param", out, (x, None, out, SIZE), {"ARGS_PASSED": "one", **block}
    yield "add_kernel_with_scaling", out, (x, y, out, SIZE, 0.5), block
    yield "add_kernel_out_of_order_fn2", out, (x, y, SIZE, out), block
    yield "add_kernel_with_boolean_param", out, (x, y, out, SIZE, True), block
    yield "kernel_with_docstring_double_quotes", out, (out, SIZE), block
    yield "kernel_with_docstring_single_quotes", out, (out, SIZE), block
    yield "kernel_with_backslash_in_docstring", out, (out, SIZE), block
    kept = torch.rand(SIZE) > 0.5
    yield "masked_add_kernel_with_bool_tensor", out, (x, y, kept, out, SIZE), block
    yield "indirection_kernel", out, (x, out, SIZE), {"ACTIVATION": "mul2_inplace_kernel", **block}
    yield "indirection_kernel", out, (x, out, SIZE), {"ACTIVATION": "add_kernel", **block}
    wide, narrow = torch.randn(16, 32), torch.zeros(16, 16)
    yield "double_strided_kernel", narrow, (wide, narrow, 32, 16), {"X_BLOCK_SIZE": 16, "Y_BLOCK_SIZE": 16}


def replayed(path: Path) -> dict[str, object]:
    try:
        with replayfmt.Plan(path, allow_code=True) as plan:
            result = plan.execute(verify="bitwise")
    except OpReplayError as error:
        return {"error": str(error), "findings": list(getattr(error, "findings", ()))}
    return {"outcome": result.outcome, "digests": result.verification.digests}


def recompiled(path: Path, values: dict[str, typing.Any]) -> dict[str, object]:
    """Whether the stored source compiles to the intermediate code that was captured, places in the source apart."""
    with CaptureReader(path) as reader:
        (kernel,) = [each for each in reader.kernels if each is not None and each.kind is KernelKind.triton]
        contents = contents_of(reader, kernel)
    code = {role: contents[role] for role in ("source", "metadata")}
    resolved = resolve_triton(kernel, lambda: code, frozenset({"cuda"}))
    loaded = resolved if isinstance(resolved, str) else resolved.loaded()
    if isinstance(loaded, str):
        return {"error": loaded}
    compiled = json.loads(contents["metadata"])["compiled"]
    resolved.call(**values, **{name: compiled[name] for name in ("num_warps", "num_ctas", "num_stages")})
    ((again,),) = [found[0].values() for found in resolved._function.device_caches.values()]
    return {"same": plain(again.asm["ttir"]) == plain(contents["ttir"].decode()), "ttir": len(contents["ttir"])}


def plain(ttir: str) -> str:
    """Without places in the source."""
    lines = [line for line in ttir.splitlines() if not line.startswith("#loc")]
    return re.sub(r" loc\((?:[^()]|\([^()]*\))*\)", "", "\n".join(lines))


def main() -> None:
    folder, found = Path(sys.argv[1]), []
    interprets = os.environ["TRITON_INTERPRET"] == "1"
    if not interprets:
        install(90, defaultdict(lambda: lambda *arguments: None))
    torch.manual_seed(0)
    for number, (name, out, positional, named) in enumerate(launches()):
        kernel = getattr(kernels, name, None)
        if kernel is None:
            continue  # PyTorch 2.11 has not all of them
        annotations = kernel.fn.__annotations__
        if interprets and "tl.constexpr" in annotations.values():
            continue  # the interpreter does not read annotations in quotes
        path = folder / f"{number}.opreplay"
        grid = (1, 1) if "strided" in name else GRID
        with replayfmt.capture(path):
            kernel[grid](*positional, **named)
        with replayfmt.open(path) as capture:
            schema = next(kernel.schema for kernel in capture.kernels if kernel.name.startswith("triton::"))
            said = {"name": name, "schema": schema, "nonzero": bool(out.count_nonzero())}
            values = {**dict(zip(kernel.arg_names, positional, strict=False)), **named, "grid": list(grid)}
        found.append({**said, **(replayed(path) if interprets else recompiled(path, values))})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
