"""What the tests of the format share."""

from __future__ import annotations

from pathlib import Path

import pytest

from .samples import write_everything


@pytest.fixture()
def capture(tmp_path: Path) -> Path:
    path = tmp_path / "hostile.opreplay"
    write_everything(path)
    return path
