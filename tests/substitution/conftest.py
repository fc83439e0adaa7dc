"""What these tests share: one thread, a capture maker, files with kernels, and the tools run in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_process import Tool as Tool
from in_process import Tools
from one_thread import one_thread as one_thread

import replayfmt

Captured = Callable[..., Path]
Kernels = Callable[..., Path]


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
def tool(tools: Tools) -> Tool:
    """Runs a tool in this process: `tool("run", path)`."""
    return tools
