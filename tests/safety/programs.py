"""Small programs whose captures are changed. Between them they give every kind of record and definition that a program
on a CPU can give: a short capture is read, planned and replayed many times faster than one that has it all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import replayfmt

Program = Callable[[Path], Any]
# Content that no captured operator makes.
_WEIGHT, _INDEX = torch.arange(16.0), torch.tensor([1, 2])


def views_and_resizes(_folder: Path) -> Any:
    doubled = _WEIGHT * 2
    part = doubled.view(4, 4).t()[1:]
    filled = torch.empty(4)
    filled.copy_(part[0])
    filled.untyped_storage().resize_(64)
    return doubled, part, filled


def random_numbers_and_lists(_folder: Path) -> Any:
    drawn = torch.rand(3)
    joined = torch.cat([torch.ones(5), drawn])
    first, second = joined.chunk(2)
    torch._foreach_mul_([first, second], 2.0)
    return joined


def generator_of_its_own(_folder: Path) -> Any:
    return torch.randn(2, generator=torch.Generator().manual_seed(3))


def indices_and_missing_arguments(_folder: Path) -> Any:
    return _WEIGHT[_INDEX], torch.native_layer_norm(_WEIGHT.view(4, 4), [4], None, None, 1e-5)


def layouts(_folder: Path) -> Any:
    strided = torch.zeros(8).as_strided((2, 2), (2, 1), 1)
    sparse = torch.ones(2, 2).to_sparse() * 2
    quantized = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 3, torch.qint8).dequantize()
    return strided, sparse, quantized


def reads_and_writes_of_the_host(_folder: Path) -> Any:
    weight = torch.arange(6.0)
    doubled = weight * 2
    doubled.sum().item()
    doubled.tolist()
    doubled.numpy()[0] = 5
    weight.set_(doubled)  # type: ignore[call-overload]
    return weight + 1, doubled


def scalars_of_every_kind(_folder: Path) -> Any:
    image = torch.zeros(1, 2, 2, 2, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    filled = torch.full((2,), float("-inf"), dtype=torch.float16)
    turned = torch.ones(2, dtype=torch.complex64) * 1j
    return image, filled, turned, torch.nn.functional.gelu(torch.ones(2), approximate="tanh") > 0


def scopes_settings_and_failures(_folder: Path) -> Any:
    one = torch.ones(2)
    with replayfmt.scope("inner"), torch.no_grad():
        added = one + 1
    with contextlib.suppress(RuntimeError):
        torch.mm(one, added)
    return added


def mapped_file(folder: Path) -> Any:
    path = folder / "tokens.bin"
    if not path.exists():  # captures made before refer to it as it is
        np.arange(8, dtype=np.int64).tofile(path)
    return torch.from_file(str(path), shared=False, size=6, dtype=torch.int64)[1:] + 1


PROGRAMS: tuple[Program, ...] = (
    views_and_resizes,
    random_numbers_and_lists,
    generator_of_its_own,
    indices_and_missing_arguments,
    layouts,
    reads_and_writes_of_the_host,
    scalars_of_every_kind,
    scopes_settings_and_failures,
    mapped_file,
)


def together(*programs: Program) -> Program:
    """One program that does what each of them does."""
    return lambda folder: [program(folder) for program in programs]
