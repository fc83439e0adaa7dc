"""Trimming captures of a GPU's work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import replayfmt
from replayfmt.format.reader import open_capture

from .conftest import Captured
from .trimmed import compare, trim

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def training() -> None:
    layer = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.AdamW(layer.parameters())
    batch = torch.randn(8, 64).cuda()
    for step in range(3):
        with replayfmt.scope(f"step {step}"):
            torch.nn.functional.dropout(layer(batch), 0.5).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_step_on_the_gpu_replays_from_its_memory_and_its_generator(captured: Captured, tmp_path: Path) -> None:
    path, out = captured(training), tmp_path / "out.opreplay"
    result = trim(path, out, scope="step 1")
    assert result.verified.startswith("bitwise") and result.checked.startswith("bitwise")
    assert compare(path, out) == result.ops
    with open_capture(out) as reader:
        assert {str(device) for device in reader.devices[1:]} >= {"cuda:0"}


def test_a_script_of_work_on_the_gpu_gives_what_was_captured(captured: Captured, tmp_path: Path) -> None:
    from replayfmt.dump.selection import OpSelection
    from replayfmt.replay.plan import Plan
    from replayfmt.trim.script import script_with_data

    path, script = captured(training), tmp_path / "script.py"
    with Plan(path, keep_going=True) as plan:
        script_with_data(plan, str(script), str(tmp_path / "data.safetensors"), OpSelection(scope="step 1"))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as captured" in done.stdout and "CAPTURED" not in done.stdout
