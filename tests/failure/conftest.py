"""What the tests of the failure contract share: one thread, a folder of files of every kind, and an end to waiting."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from one_thread import one_thread as one_thread

from replayfmt.benchmark.energy.windows import EnergyWindow, WindowsFile

from .table import recorded

_LONGEST_S = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory: `step.opreplay`, `trace.json`, and what is no file: `folder` and `fifo`."""
    folder, before = tmp_path_factory.mktemp("hostile"), Path.cwd()
    content = torch.arange(4.0)
    recorded(folder, lambda: (content * 2).sum().item(), "step")
    (folder / "trace.json").write_text('{"traceEvents": []}')
    windows = [EnergyWindow("whole", "whole", 1, 1_700_000_001 * 10**9, 1_700_000_002 * 10**9, 10**9, 2 * 10**9)]
    (folder / "windows.jsonl").write_text(WindowsFile({}, 0, windows, []).text())
    samples = "".join(f"{1_700_000_000 + index / 20},0,30\n" for index in range(60))
    (folder / "power.csv").write_text(f"timestamp,gpu,power_w\n{samples}")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "fifo")
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture
def ends_in_time() -> Iterator[None]:
    """Something that waits for a pipe waits for ever."""
    signal.alarm(_LONGEST_S)
    yield
    signal.alarm(0)
