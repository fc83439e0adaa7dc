"""What the trim tests share: captures made in process, one thread, and ways to trim and compare."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opreplay_tools import trim as trim_tool

import replayfmt

Captured = Callable[..., Path]
Tool = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def captured(tmp_path: Path) -> Captured:
    """Captures what a function does, as the tool does by default; returns the file."""

    def capture(program: Callable[[], Any], name: str = "capture", **options: Any) -> Path:
        path = tmp_path / f"{name}.opreplay"
        with replayfmt.capture(path, **options):
            program()
        return path

    return capture


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Tool:
    """The tool in this process: exit code, stdout, stderr."""

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["opreplay-trim", *map(str, args)])
        with pytest.raises(SystemExit) as left:
            trim_tool.main()
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return int(left.value.code or 0), printed.out, printed.err

    return run
