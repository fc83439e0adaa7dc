"""What the tests of the format share."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from in_process import Tool, Tools

from .samples import write_everything


@pytest.fixture()
def run(tools: Tools) -> Tool:
    """Runs opreplay-check in this process."""
    return partial(tools, "check")


@pytest.fixture()
def capture(tmp_path: Path) -> Path:
    path = tmp_path / "hostile.opreplay"
    write_everything(path)
    return path
