"""Kernels of which neither source nor intermediate code tells what they write, recorded with an audit, which compares.
As a script it works in the directory that it is given, and prints what it found as JSON: where Triton interprets, of
the source; where it compiles, for a device that is not there, of the intermediate code."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

import replayfmt
from replayfmt.errors import OpReplayError
from replayfmt.format.attachments import contents_of
from replayfmt.format.codes import KernelKind, RecordKind
from replayfmt.format.operator_schema import parse_operator_schema
from replayfmt.format.reader import CaptureReader
from tests.triton_kernels.fake_device import install

# Does what the kernel does, and writes to what that only reads.
MORE = """
import torch

def more(a, b, c, out, n, *, BLOCK, grid):
    b.copy_(a * 2)
    if n > 4:
        c.add_(n)
    out.copy_(torch.arange(4))
    a.add_(1)
"""


@triton.jit
def unclear_kernel(a, b, c, out, n, BLOCK: tl.constexpr):
    """What a function inside does is not followed."""
    at = tl.arange(0, BLOCK)
    put = lambda p, values: tl.store(p + at, values, mask=at < 4)  # noqa: E731
    put(b, tl.load(a + at, mask=at < 4) * 2)
    if n > 4:
        put(c, tl.load(c + at, mask=at < 4) + n)
    tl.store(out + at, at)


@triton.jit
def assembled_kernel(a, b, out, n):
    """Assembly may store to what it is given."""
    tl.inline_asm_elementwise("st.global.f32 [$1], $3; mov.u32 $0, 0;", "=r,l,l,r", [a, b, n], tl.int32, False, 1)
    tl.store(out, n)


def interpreted(folder: Path) -> dict[str, Any]:
    a, b, c, out = torch.arange(4.0), torch.zeros(4), torch.ones(4), torch.zeros(4, dtype=torch.int64)
    shared = torch.zeros(8)
    strange = torch.from_numpy(np.full(4, 0x7FC00001, np.uint32).view(np.float32))  # not the NaN that 2 * NaN is
    nan = torch.full((4,), float("nan"))

    def program() -> None:
        def launch(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int) -> None:
            unclear_kernel[(1,)](a, b, c, out, n, BLOCK=4)

        launch(a, b, c, 1)
        launch(a, b, c, 1)  # what it stores is there
        launch(a, b, c, 5)
        launch(a, shared[4:], shared[:4], 1)  # two arguments on one storage
        launch(nan, strange, c, 1)
        launch(nan, strange, c, 1)

    found = {}
    for name, options in {
        "audit": {"audit": True},
        "no audit": {},
        "no content": {"audit": True, "payload": "integers"},
    }.items():
        for tensor in (b, c, shared):
            tensor.zero_()
        strange.copy_(torch.from_numpy(np.full(4, 0x7FC00001, np.uint32).view(np.float32)))
        path = folder / f"{name}.opreplay"
        with replayfmt.capture(path, **options):  # type: ignore[arg-type]
            program()
        found[name] = launches(path)
    path = folder / "audit.opreplay"
    found["replay"] = replayed(path)
    more = folder / "more.py"
    more.write_text(MORE, encoding="utf-8")
    found["one that writes more"] = replayed(path, [f"triton::unclear_kernel@python={more}:more"])
    return found


def compiled(folder: Path) -> dict[str, Any]:
    def assembled(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, n: int) -> None:
        b[0], out[0] = n, n

    install(90, {"assembled_kernel": assembled})
    found = {}
    for name in ("audit", "no audit"):
        a, b, out = torch.ones(4), torch.ones(4), torch.ones(4)
        path = folder / f"{name}.opreplay"
        with replayfmt.capture(path, audit=name == "audit"):
            assembled_kernel[(1,)](a, b, out, 3)
        found[name] = launches(path)
    return found


def launches(path: Path) -> list[dict[str, Any]]:
    """Of each launch: what its schema says that it writes, how that was found, and what was digested after it."""
    found: list[dict[str, Any]] = []
    with CaptureReader(path) as reader:
        assert reader.summary is not None and not reader.summary.unsupported, reader.summary.unsupported
        for ordinal in range(reader.record_count):
            record = reader.record(ordinal)
            kernel = reader.kernels[record.signature.kernel] if record.signature.kind is RecordKind.op else None
            if kernel is not None and kernel.kind is KernelKind.triton:
                arguments = parse_operator_schema(kernel.schema).arguments
                metadata = json.loads(contents_of(reader, kernel)["metadata"])
                written = [each.name for each in arguments if each.type.written]
                found.append({"written": written, "writes": metadata["writes"], "ordinal": ordinal, "digests": 0})
            elif record.signature.kind is RecordKind.digest and record.argument("of") != -1:
                assert record.argument("of") == found[-1]["ordinal"]
                found[-1]["digests"] += 1
    for each in found:
        del each["ordinal"]
    return found


def replayed(path: Path, substitutions: list[str] | None = None) -> dict[str, Any]:
    try:
        with replayfmt.Plan(path, allow_code=True, substitutions=substitutions or []) as plan:
            result = plan.execute(verify="close" if substitutions else "bitwise")
    except OpReplayError as error:
        return {"error": str(error), "findings": [str(each) for each in getattr(error, "findings", ())]}
    return {"outcome": result.outcome, "digests": result.verification.digests, "divergence": str(result.divergence)}


def main() -> None:
    folder = Path(sys.argv[1])
    print(json.dumps(interpreted(folder) if os.environ["TRITON_INTERPRET"] == "1" else compiled(folder)))


if __name__ == "__main__":
    main()
