"""A GPT-2 training step, trimmed every way: its forward pass, its optimizer, one kernel, what lies in between."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import replayfmt
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture

from .trimmed import compare, ops, trim

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example that the demo captures: dropout, AdamW, gradient clipping."""
    path = tmp_path_factory.mktemp("gpt2") / "step.opreplay"
    with replayfmt.capture(path):
        runpy.run_path(str(ROOT / "examples" / "gpt2_training_step.py"))
    return path


@pytest.mark.slow
def test_a_training_step_replays_without_what_initialized_it(step: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.opreplay"
    result = trim(step, out, scope="execute")
    assert result.verified.startswith("bitwise") and result.checked.startswith("bitwise")
    with open_capture(step) as reader:
        inside = [record for record in ops(reader) if reader.scope_path(record.scope).startswith("execute")]
    assert compare(step, out) == result.ops == len(inside)
    with open_capture(out) as reader:
        assert reader.summary.records[RecordKind.generator_state] == 1, "dropout starts where it started"


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["aten::_foreach_*", "aten::*layer_norm*"])
def test_one_kind_of_kernel_with_the_inputs_it_had(step: Path, tmp_path: Path, kernel: str) -> None:
    out = tmp_path / "out.opreplay"
    result = trim(step, out, kernel=kernel)
    assert compare(step, out) == result.ops > 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_a_tenth_of_the_step_from_anywhere(step: Path, tmp_path: Path, part: int) -> None:
    out = tmp_path / "out.opreplay"
    with open_capture(step) as reader:
        count = reader.record_count
    start = count * (3 * part + 1) // 9
    result = trim(step, out, ops=f"{start}:{start + count // 10}")
    assert compare(step, out) == result.ops
    assert out.stat().st_size < 1_500_000
