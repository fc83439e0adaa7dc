"""Memory that others write: what can be seen enters again and replays; what cannot is never silently wrong."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from in_process import Tools

import replayfmt
from replayfmt.format.model import Device
from replayfmt.format.reader import open_capture

from .table import recorded


def _by_numpy() -> torch.Tensor:
    x = torch.ones(3)
    y = x + 1
    x.numpy()[:] = 5
    return x + y


def _by_another_library() -> torch.Tensor:
    array = np.ones(3, dtype=np.float32)
    x = torch.from_dlpack(array)
    y = x + 1
    array[:] = 7
    return x + y


def _fill(x: torch.Tensor) -> None:
    x.fill_(9)


def _by_another_process() -> torch.Tensor:
    x = torch.ones(3).share_memory_()
    y = x + 1
    child = mp.get_context("fork").Process(target=_fill, args=(x,))
    child.start()
    child.join()
    return x + y


@pytest.mark.parametrize("program", [_by_numpy, _by_another_library, _by_another_process])
def test_writes_that_leave_a_mark_enter_again_and_replay(
    tools: Tools, tmp_path: Path, program: Callable[[], Any]
) -> None:
    path = recorded(tmp_path, program)
    assert tools("run", "--verify=bitwise", path).code == 0
    imports = tools("dump", path, "--jq", 'select(.kind=="storage_import") | .reason').out.split()
    assert '"outside_write"' in imports


def _by_address() -> torch.Tensor:
    x = torch.ones(3)
    y = x + 1
    ctypes.memmove(torch._C.StorageBase.data_ptr(x.untyped_storage()), (ctypes.c_float * 3)(4, 4, 4), 12)
    return x + y


@pytest.mark.slow
def test_a_write_that_leaves_no_mark_is_found_by_the_audit_and_differs_without(tools: Tools, tmp_path: Path) -> None:
    done = tools("run", recorded(tmp_path, _by_address, "plain"))
    assert done.code == 1 and "the replay differs from the capture" in done.err
    assert tools("run", "--verify=bitwise", recorded(tmp_path, _by_address, "audited", audit=True)).code == 0


class _ForeignStorage:
    """Stands for memory on an accelerator that another process or library gave."""

    device = torch.device("cuda", 0)
    _cdata = 0

    def nbytes(self) -> int:
        return 64

    def data_ptr(self) -> int:
        return 4096

    def resizable(self) -> bool:
        return False


def test_foreign_memory_on_an_accelerator_is_an_unsupported_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "replayfmt.recording.stream.records.describe_device", lambda device: Device("cuda", 0, "no GPU")
    )
    monkeypatch.setattr("replayfmt.recording.storages.trackers.address_of", lambda storage: storage.data_ptr())
    foreign = _ForeignStorage()
    path = tmp_path / "foreign.opreplay"
    with replayfmt.capture(path, payload="none", digests="none", recorder="python") as recorder:
        torch.ones(2)
        core = recorder._core
        assert core is not None
        with core.lock:
            core.storages.enter(foreign, None)  # type: ignore[arg-type]
    with open_capture(path) as reader:
        assert reader.summary.unsupported == {"foreign_memory": 1}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_another_library_on_a_gpu_is_refused(tools: Tools, tmp_path: Path) -> None:
    x = torch.ones(3, device="cuda")
    given = torch.from_dlpack(torch.utils.dlpack.to_dlpack(x))
    path = recorded(tmp_path, lambda: given + 1)
    done = tools("run", path)
    assert done.code == 1 and "unsupported, foreign_memory" in done.err
