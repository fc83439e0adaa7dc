"""What the trim tests share: captures made in process, one thread, and ways to trim and compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import replayfmt

Captured = Callable[..., Path]


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
