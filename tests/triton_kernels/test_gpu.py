"""Launches on a GPU, replayed from the stored binary."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from in_process import Tools

import replayfmt
from replayfmt.errors import ReplayRefused
from replayfmt.format.codes import KernelKind, RecordKind
from replayfmt.format.reader import CaptureReader
from tests.triton_kernels.test_recording import WRITTEN

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
# The first two's operators keep memory on the host, and NumPy has no arrays of a GPU's memory.
ON_THE_HOST = {"inside_an_operator", "inside_an_operator_with_state", "written_through_an_array_between"}
ADD_IN_ANY_ORDER = {"layer_norm"}  # floats, by atomics: two runs differ in their last bits
# They read numbers of their modules that are no constexprs, which Triton's compiler refuses.
INTERPRETED = {"autotuned_by_a_class_of_its_own", "calling", "names_of_a_script"}
HERE = sorted(set(WRITTEN) - ON_THE_HOST - INTERPRETED)


def unsupported(path: Path) -> list[object]:
    """What the capture says that a replay could not do."""
    with CaptureReader(path) as reader:
        records = [each for each in reader.records() if each.kind is RecordKind.unsupported]
        return [each.argument("detail") for each in records]


def replayed(path: Path, in_any_order: bool = False) -> tuple[str, ...]:
    """The notes of a replay without a difference."""
    try:
        with replayfmt.Plan(path, allow_code=True) as plan:
            result = plan.execute(verify="close" if in_any_order else "bitwise")
    except ReplayRefused as refused:
        pytest.fail("\n".join([str(refused), *refused.findings]))
    assert result.outcome == "ok", result.divergence
    return tuple(result.notes)


@pytest.mark.parametrize("name", HERE)
def test_a_launch_is_replayed_from_its_binary(name: str, tmp_path: Path) -> None:
    programs = importlib.import_module("tests.triton_kernels.recording_programs")  # it registers operators
    path = tmp_path / "gpu.opreplay"
    torch.manual_seed(0)
    with torch.device("cuda"), replayfmt.capture(path):
        kept = programs.PROGRAMS[name]()
    assert kept is not None and unsupported(path) == []
    with CaptureReader(path) as reader:
        kernels = [each for each in reader.kernels if each is not None and each.kind is KernelKind.triton]
        assert kernels
        roles = {reader.attachments[number].role for each in kernels for number in each.attachments}
        assert {"source", "metadata", "ttir", "ttgir", "llir", "ptx", "cubin"} <= roles
    (note,) = [note for note in replayed(path, name in ADD_IN_ANY_ORDER) if "triton kernel" in note]
    assert "launched from the stored binary" in note


def test_kernels_that_inductor_generated_are_replayed_bitwise(tmp_path: Path) -> None:
    """What its code allocates enters without content."""
    x, weights = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    compiled = torch.compile(lambda x: torch.softmax(torch.nn.functional.gelu(x @ weights), -1) + 1)
    path = tmp_path / "compiled.opreplay"
    expected = compiled(x)
    with replayfmt.capture(path):
        result = compiled(x)
    assert torch.equal(result, expected) and unsupported(path) == []
    with CaptureReader(path) as reader:
        assert any(each is not None and each.kind is KernelKind.triton for each in reader.kernels)
        imports = [each for each in reader.records() if each.kind is RecordKind.storage_import]
        assert {each.argument("reason") for each in imports} == {"first_use"}
    replayed(path)


def test_a_kernel_that_takes_three_times_as_long_is_found(tmp_path: Path, tools: Tools) -> None:
    """So much that it is found while other programs use the GPU, too."""
    busy_kernels = importlib.import_module("tests.triton_kernels.busy_kernels")
    path = tmp_path / "busy.opreplay"
    x = torch.ones(1 << 16, device="cuda")
    with replayfmt.capture(path):
        busy_kernels.busy[(256,)](x, 20_000, 20_000, BLOCK=256)
    chosen = f"triton::busy@triton={busy_kernels.__file__}:busy_for_longer"
    options = ("--compare", "--allow-code", "--benchmark-min-time=50x", "--benchmark-format=json")
    ran = tools("benchmark", *options, f"--replay-kernel-substitution={chosen}", path)
    assert ran.code == 0, ran.err
    compared = [each for each in json.loads(ran.out)["comparisons"] if each["calls"]]
    assert [each["verdict"] for each in compared] == ["slower"]


def test_launches_are_reconciled_with_the_whole_replay(tmp_path: Path, tools: Tools) -> None:
    programs = importlib.import_module("tests.triton_kernels.recording_programs")
    path, out = tmp_path / "gpu.opreplay", tmp_path / "a.json"
    with torch.device("cuda"), replayfmt.capture(path):
        kept = programs.PROGRAMS[HERE[0]]()
    ran = tools("benchmark", "--reconcile", "--allow-code", f"--benchmark-out={out}", path)
    assert kept is not None and ran.code == 0 and "reconciliation of BM_replay" in ran.out, ran.err
    found = json.loads(out.read_text())["reconciliation"]
    assert found["isolated_hot"]["total_ns"] > 0 and found["isolated_cold"]["total_ns"] > 0
    assert found["whole_replay_ns"] > 0 and found["whole_replay_host_ns"] > 0
