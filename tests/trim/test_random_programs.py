"""Random programs, random ranges: the trimmed capture verifies bit for bit, from the inputs the ops had."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import replayfmt
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture

from .trimmed import compare, trim

# What a step does to the tensors there are; each takes two places among them and a small number.
# fmt: off
STEPS = ("add", "add_", "view", "transpose", "narrow", "copy_", "dropout", "normal_", "clone", "empty", "drop", "scope",
         "seed", "outside", "resize", "dtype", "item", "list", "index", "out")
# fmt: on


def run(steps: list[tuple[str, int, int, int]]) -> None:
    """The program. Every tensor has six elements, however they lie."""
    pool = [torch.arange(6.0), torch.ones(2, 3)]
    for name, one, other, number in steps:
        a, b = pool[one % len(pool)], pool[other % len(pool)]
        match name:
            case "add":
                pool.append(a.reshape(-1) + b.reshape(-1) * number)
            case "add_":
                a.add_(number)
            case "view":
                pool.append(a.reshape(3, 2))
            case "transpose":
                pool.append(a.reshape(2, 3).t())
            case "narrow":
                a.reshape(-1)[number % 6].mul_(2)
            case "copy_":
                a.copy_(b.reshape(a.shape).clone())
            case "dropout":
                pool.append(torch.nn.functional.dropout(a, 0.5))
            case "normal_":
                a.normal_()
            case "clone":
                pool.append(a.clone())
            case "empty":
                fresh = torch.empty(6)
                fresh[:3] = 1
                fresh[3:] = number
                pool.append(fresh)
            case "drop":
                if len(pool) > 2:
                    del pool[one % len(pool)]
            case "scope":
                with replayfmt.scope(f"s{number}"):
                    a.mul_(0.5)
            case "seed":
                torch.manual_seed(number)
            case "outside":
                a.numpy()[...] = number
            case "resize":
                grown = a.clone()
                grown.resize_(8).fill_(number)
                pool.append(grown[:6])
            case "dtype":
                torch.set_default_dtype(torch.float64)
                pool.append((a.double() + torch.ones(a.shape)).float())
                torch.set_default_dtype(torch.float32)
            case "item":
                a.sum().item()
            case "list":
                pool += [torch.cat(a.reshape(-1).split(2))]
            case "index":
                a.reshape(-1)[torch.tensor([0, number % 6])] = 1
            case "out":
                torch.add(a.reshape(-1), 1, out=torch.empty(0))


@pytest.mark.slow
@settings(max_examples=25)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.integers(0, 9), st.integers(0, 5)),
        min_size=3,
        max_size=14,
    ),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
@example(steps=[("copy_", 0, 0, 0), ("add_", 0, 0, 0)], cut=(1.0, 0.5))  # what copy_ replaces is not kept
def test_any_range_of_any_program_replays_from_the_inputs_it_had(
    steps: list[tuple[str, int, int, int]], cut: tuple[float, float]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "in.opreplay", Path(folder) / "out.opreplay"
        torch.manual_seed(0)
        with replayfmt.capture(path):
            run(steps)
        with open_capture(path) as reader:
            start, stop = sorted(int(share * reader.record_count) for share in cut)
            kept = sum(record.kind is RecordKind.op for record in reader.records(start, stop))
        if kept:
            trim(path, out, ops=f"{start}:{stop}")
            # What a resize leaves beyond the end was never written; the digests know, a comparison of bytes does not.
            assert compare(path, out, content=not any(name == "resize" for name, *_ in steps)) == kept


@pytest.mark.slow
@settings(max_examples=15)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.integers(0, 9), st.integers(0, 5)),
        min_size=4,
        max_size=14,
    ),
    kernel=st.sampled_from(["aten::*_", "aten::mul*", "aten::view", "aten::*l*", "aten::fill_", "aten::sum"]),
)
@example(steps=[("copy_", 0, 0, 0)], kernel="aten::*_")
def test_any_kernels_of_any_program_replay_from_the_inputs_they_had(
    steps: list[tuple[str, int, int, int]], kernel: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "in.opreplay", Path(folder) / "out.opreplay"
        torch.manual_seed(0)
        with replayfmt.capture(path):
            run(steps)
        try:
            trim(path, out, kernel=kernel)
        except replayfmt.errors.UsageError:
            return
        assert compare(path, out, content=not any(name in ("resize", "empty") for name, *_ in steps)) > 0
