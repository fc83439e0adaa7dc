"""What these tests share: one thread, a capture maker, files with kernels, and the tools run in this process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import replayfmt

Captured = Callable[..., Path]
Kernels = Callable[..., Path]
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
    """Captures what a function does, with digests of every result; returns the file."""

    def capture(program: Callable[[], Any], name: str = "capture", **options: Any) -> Path:
        path = tmp_path / f"{name}.opreplay"
        with replayfmt.capture(path, **{"digests": "ops", **options}):
            program()
        return path

    return capture


@pytest.fixture
def kernels(tmp_path: Path) -> Kernels:
    """Writes a Python file; torch is imported in it already."""

    def write(code: str, name: str = "kernels.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"import torch\n{code}\n")
        return path

    return write


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Runs a tool in this process as its console script would: exit code, stdout, stderr."""

    def run(name: str, *args: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [f"opreplay-{name}", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            importlib.import_module(f"opreplay_tools.{name}").main()
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return int(left.value.code or 0), printed.out, printed.err

    return run
