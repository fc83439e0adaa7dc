"""Launches of kernels of which something changes while the program runs. As a script it records them into the directory
that it is given, and prints what is in the captures as JSON: where Triton compiles, for a device that is not there;
where it interprets, of what comes of the replays, too."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

import replayfmt
from replayfmt.errors import OpReplayError
from replayfmt.format.attachments import contents_of
from replayfmt.format.codes import KernelKind, RecordKind
from replayfmt.format.reader import CaptureReader
from tests.triton_kernels.fake_device import install

settings = ModuleType("settings")
vars(settings)["BY"] = tl.constexpr(2.0)


@triton.jit
def twice(x):
    return x * 2


@triton.jit
def thrice(x):
    return x * 3


changing = twice
DEFAULT = tl.constexpr(2.0)
CONSTANT = tl.constexpr(2.0)


@triton.jit
def with_default(x, by=DEFAULT):
    return x * by


@triton.jit
def of_a_module(x, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(x + places, tl.load(x + places) * settings.BY)


@triton.jit
def of_a_function(x, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(x + places, changing(tl.load(x + places)))


@triton.jit
def of_a_default(x, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(x + places, with_default(tl.load(x + places)))


@triton.jit
def of_a_constant(x, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(x + places, tl.load(x + places) * CONSTANT)


def enclosing(by: Any) -> tuple[Any, Callable[[Any], None]]:
    @triton.jit
    def of_a_cell(x, BLOCK: tl.constexpr):
        places = tl.arange(0, BLOCK)
        tl.store(x + places, tl.load(x + places) * by)

    def change(new: Any) -> None:
        nonlocal by
        by = new

    return of_a_cell, change


of_a_cell, change_cell = enclosing(tl.constexpr(2.0))


def change() -> None:
    global changing, DEFAULT
    vars(settings)["BY"] = DEFAULT = tl.constexpr(3.0)
    changing = thrice
    change_cell(tl.constexpr(3.0))


def change_back() -> None:
    global changing, DEFAULT
    vars(settings)["BY"] = DEFAULT = tl.constexpr(2.0)
    changing = twice
    change_cell(tl.constexpr(2.0))


KERNELS = {each.__name__: each for each in (of_a_module, of_a_function, of_a_default, of_a_cell)}


def found_in(path: Path) -> list[Any]:
    """Of each launch: what was multiplied by, as the source has it, or why there is none."""
    found: list[Any] = []
    with CaptureReader(path) as reader:
        for record in reader.records():
            if record.kind is RecordKind.unsupported:
                found.append({node.name: node.constant for node in record.signature.args}["detail"])
            elif record.kind is RecordKind.op and reader.kernels[record.signature.kernel].kind is KernelKind.triton:
                text = contents_of(reader, reader.kernels[record.signature.kernel])["source"].decode()
                by = [each for each in ("3.0", "* 3", "2.0", "* 2") if each in text]
                found.append(float(by[0].removeprefix("* ")))
    return found


def compiled(folder: Path) -> dict[str, Any]:
    """Each kernel is compiled with 2, and launched again after the change, and for other arguments."""
    found = {}
    for name, kernel in KERNELS.items():
        x, path = torch.ones(16), folder / f"{name}.opreplay"
        with replayfmt.capture(path):
            kernel[(1,)](x, BLOCK=8)
            change()
            kernel[(1,)](x, BLOCK=8)
            kernel[(1,)](x, BLOCK=16)
            change_back()
        found[name] = found_in(path)
        change()
        path = folder / f"{name}_before.opreplay"
        with replayfmt.capture(path):
            kernel[(1,)](x.zero_(), BLOCK=8)
        found[name] += found_in(path)
        change_back()
    triton.knobs.compilation.override = True
    with replayfmt.capture(folder / "override.opreplay"):
        of_a_constant[(1,)](torch.ones(16).neg_(), BLOCK=8)
    found["override"] = found_in(folder / "override.opreplay")
    return found


def replayed(path: Path) -> list[Any]:
    try:
        with replayfmt.Plan(path, allow_code=True) as plan:
            return [plan.execute(verify="bitwise").outcome]
    except OpReplayError as error:
        return [str(error)]


def interpreted(folder: Path) -> dict[str, Any]:
    found = {}
    for name in ("of_a_module", "of_a_function", "of_a_default"):
        x, path = torch.ones(16), folder / f"{name}.opreplay"
        with replayfmt.capture(path):
            KERNELS[name][(1,)](x, BLOCK=8)
            change()
            KERNELS[name][(1,)](x, BLOCK=8)
            change_back()
        found[name] = [*found_in(path), x[0].item(), *replayed(path)]
    x, path = torch.ones(16), folder / "constant.opreplay"
    with replayfmt.capture(path):
        of_a_constant[(1,)](x, BLOCK=8)
        CONSTANT.value = 3.0
        of_a_constant[(1,)](x, BLOCK=8)
    found["constant"] = [*found_in(path), x[0].item(), *replayed(path)]
    file = folder / "edited.py"
    file.write_text(EDITED)
    specification = importlib.util.spec_from_file_location("edited", file)
    edited = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(edited)
    x, path = torch.ones(16), folder / "edited.opreplay"
    edited.of_a_file[(1,)](x, BLOCK=8)
    file.write_text(EDITED.replace("* 2", "* 3.0"))
    with replayfmt.capture(path):
        x.neg_()
        edited.of_a_file[(1,)](x, BLOCK=8)
    found["file"] = [*found_in(path), x[0].item()]
    return found


EDITED = """
import triton
import triton.language as tl

@triton.jit
def of_a_file(x, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(x + places, tl.load(x + places) * 2)
"""


def main() -> None:
    folder = Path(sys.argv[1])
    if os.environ["TRITON_INTERPRET"] == "1":
        found = interpreted(folder)
    else:
        install(90, defaultdict(lambda: lambda *_arguments: None))
        found = compiled(folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
