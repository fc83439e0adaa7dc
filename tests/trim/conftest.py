"""What the trim tests share: captures made in process, one thread, and ways to trim and compare."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from in_process import Tool as Tool
from in_process import Tools
from one_thread import one_thread as one_thread

import replayfmt

Captured = Callable[..., Path]


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
def tool(tools: Tools, trim_here: None) -> Tool:
    """Runs opreplay-trim in this process, and the replay of its result."""
    return partial(tools, "trim")
