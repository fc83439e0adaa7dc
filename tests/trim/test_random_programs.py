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

from .random_programs import STEPS
from .random_programs import run_steps as run
from .trimmed import compare, trim


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
