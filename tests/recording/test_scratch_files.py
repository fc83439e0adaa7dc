"""Files that a program maps and then writes, removes or replaces itself: their content is in the capture."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import replayfmt
from replayfmt.format.maintenance import check_capture


def _written_memory(path: Path) -> torch.Tensor:
    mapped = torch.from_file(str(path), shared=True, size=1000)
    total = mapped.sum()
    mapped.mul_(2)
    return total + mapped.sum()


def _numpy_memory(path: Path) -> torch.Tensor:
    read = torch.from_numpy(np.asarray(np.memmap(path, np.float32, mode="r"))).sum()
    batch = torch.from_numpy(np.memmap(path, np.float32, mode="r+", offset=400))
    batch[3:7] = batch[:4] + 1
    return read + batch.sum() + torch.from_numpy(np.asarray(np.memmap(path, np.float32, mode="r"))).sum()


def _removed(path: Path) -> torch.Tensor:
    total = torch.from_file(str(path), shared=False, size=1000).sum()
    path.unlink()
    return total


def _removed_with_folder(path: Path) -> torch.Tensor:
    (path.parent / "scratch").mkdir()
    copy = shutil.copy(path, path.parent / "scratch" / "copy.bin")
    total = torch.from_file(str(copy), shared=False, size=1000).sum()
    shutil.rmtree(path.parent / "scratch")
    return total


def _replaced(path: Path) -> torch.Tensor:
    total = torch.from_file(str(path), shared=False, size=1000).sum()
    other = path.with_suffix(".new")
    other.write_bytes(bytes(4000))
    os.replace(other, path)
    return total


def _removed_weights(path: Path) -> torch.Tensor:
    weights = path.with_suffix(".safetensors")
    save_file({"a": torch.rand(10, 20), "b": torch.rand(20)}, weights)
    loaded = load_file(weights)
    result = loaded["a"] @ loaded["b"]
    del loaded
    weights.unlink()
    return result


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize(
    "program", [_written_memory, _numpy_memory, _removed, _removed_with_folder, _replaced, _removed_weights]
)
def test_what_a_program_writes_removes_or_replaces_is_embedded(tmp_path: Path, program) -> None:
    path = tmp_path / "scratch.bin"
    np.random.default_rng(0).random(1000, np.float32).tofile(path)
    with replayfmt.capture(tmp_path / "c.opreplay", digests="ops"):
        program(path)
    for each in tmp_path.glob("scratch*"):
        each.unlink()
    check_capture(tmp_path / "c.opreplay")
    with replayfmt.open(tmp_path / "c.opreplay") as capture:
        assert capture.summary.unsupported == {}
        with replayfmt.Plan(capture) as plan:
            result = plan.execute(verify="bitwise")
    assert result.divergence is None and result.verification.mode == "bitwise"


def test_a_file_that_stays_as_it_was_is_only_referred_to(tmp_path: Path) -> None:
    path = tmp_path / "numbers.bin"
    np.arange(1000, dtype=np.float32).tofile(path)
    with replayfmt.capture(tmp_path / "c.opreplay"):
        torch.from_file(str(path), shared=False, size=1000).sum()
    with replayfmt.open(tmp_path / "c.opreplay") as capture:
        assert capture.summary.storage_payload_bytes == 0


def test_a_file_that_was_written_in_place_is_told_with_the_policy_that_helps(tmp_path: Path) -> None:
    path = tmp_path / "numbers.bin"
    np.arange(1000, dtype=np.float32).tofile(path)
    with replayfmt.capture(tmp_path / "c.opreplay"):
        torch.from_file(str(path), shared=False, size=1000).sum()
        np.ones(5).tofile(path)
    with pytest.raises(replayfmt.ReplayRefused) as refused:
        replayfmt.Plan(tmp_path / "c.opreplay")
    assert "--file-policy=capture-ranges" in str(refused.value.findings) and "remap" not in str(refused.value.findings)


_CLOSES = """
import os, sys, tempfile, torch, replayfmt
from pathlib import Path
path = Path(sys.argv[1])
path.write_bytes(bytes(4000))
with replayfmt.capture(sys.argv[2]):
    torch.from_file(str(path), shared=False, size=1000).sum()
    for descriptor in os.listdir("/proc/self/fd"):
        if int(descriptor) > 2 and os.path.realpath(f"/proc/self/fd/{descriptor}") == os.path.realpath(path):
            os.close(int(descriptor))
            own = os.dup2(1, int(descriptor))
    path.unlink()
os.write(own, b"still open")
"""


@pytest.mark.slow
def test_a_descriptor_that_the_program_took_over_stays_its_own(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CLOSES, str(tmp_path / "numbers.bin"), str(tmp_path / "c.opreplay")],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "still open"), done.stderr
    with replayfmt.open(tmp_path / "c.opreplay") as capture:
        assert list(capture.summary.unsupported) == ["file_changed"]
