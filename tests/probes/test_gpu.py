"""Probes run on a GPU: nothing changes, everything is recorded, and counts are those of the kernels' arithmetic."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import replayfmt
from replayfmt.probes.definitions import find_probe
from replayfmt.probes.recordings import ProbeRecording
from replayfmt.probing import collect, plan_probe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
N, BLOCK = 1 << 16, 1024


def captured(path: Path) -> Path:
    from . import triton_sources as kernels

    with replayfmt.capture(path):
        x, out = torch.randn(N, device="cuda"), torch.zeros(N, device="cuda")
        kernels.triton_relu[(N // BLOCK,)](x, out, N, BLOCK=BLOCK)
        a, b = (torch.randn(64, 64, device="cuda", dtype=torch.float16) for _ in range(2))
        kernels.triton_matmul[(1,)](a, b, torch.zeros(64, 64, device="cuda"), 64, BLOCK=64)
    return path


def records(path: Path, probe: str, kernel: str, folder: Path) -> np.ndarray:
    from replayfmt.probing import CudaDevice

    definition = find_probe(probe)
    with replayfmt.Plan(path, keep_going=True, allow_code=True) as plan:
        planned = plan_probe(plan, kernel, definition)
        (launch,) = collect(plan, planned, CudaDevice(torch.device("cuda", 0)), folder)
    assert launch.outcome == "bitwise" and launch.recording is not None, launch.why
    return np.asarray(ProbeRecording.open(launch.recording).section(0).records(definition.layout))


def test_blocks_ran_on_the_devices_multiprocessors(tmp_path: Path) -> None:
    saved = records(captured(tmp_path / "a.opreplay"), "block_sched", "triton::triton_relu", tmp_path / "run")
    assert len(saved) == N // BLOCK and (saved["elapsed"] > 0).all()
    assert saved["sm"].max() < torch.cuda.get_device_properties(0).multi_processor_count


def test_a_copy_moves_each_byte_twice(tmp_path: Path) -> None:
    saved = records(captured(tmp_path / "a.opreplay"), "gmem_bytes", "triton::triton_relu", tmp_path / "run")
    assert saved["sync_bytes"].sum() + saved["async_bytes"].sum() == 2 * 4 * N


def test_a_matrix_product_of_one_block_reads_and_writes_its_matrices_once(tmp_path: Path) -> None:
    saved = records(captured(tmp_path / "a.opreplay"), "gmem_bytes", "triton::triton_matmul", tmp_path / "run")
    assert saved["sync_bytes"].sum() + saved["async_bytes"].sum() == 64 * 64 * (2 + 2 + 4)


def test_every_access_has_a_record(tmp_path: Path) -> None:
    saved = records(captured(tmp_path / "a.opreplay"), "dmat", "triton::triton_relu", tmp_path / "run")
    assert (saved["address"] > 0).all()
