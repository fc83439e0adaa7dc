"""What the replay's tests share: one thread, so that results do not depend on the machine, and a capture maker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from one_thread import one_thread as one_thread

import replayfmt

Captured = Callable[..., Path]


def unknown_use(rows: torch.Tensor) -> torch.Tensor:
    """Reads integers in a way that no built-in initializer knows to be safe. The result does not need them."""
    return torch._convert_indices_from_coo_to_csr(rows, 4)


@pytest.fixture
def captured(tmp_path: Path) -> Captured:
    """Captures what a function does, with digests of every result unless told otherwise; returns the file."""

    def capture(program: Callable[[], Any], name: str = "capture", **options: Any) -> Path:
        path = tmp_path / f"{name}.opreplay"
        options.setdefault("digests", "ops" if options.get("payload") != "none" else "none")
        with replayfmt.capture(path, **options):
            program()
        return path

    return capture
