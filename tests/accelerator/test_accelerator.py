"""Capture and replay on an accelerator that is not CUDA: a simulated one, in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from replayfmt.native.building import NotAvailable
from replayfmt.native.hook import dispatch_hook

_HERE = Path(__file__).parent
_FILES = sorted(_HERE.glob("*on_device.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem)
def test_what_holds_on_an_accelerator(path: Path) -> None:
    if isinstance(found := dispatch_hook(), NotAvailable):
        pytest.skip(f"the accelerator cannot be built here ({found})")
    if "graph" in path.stem and not hasattr(torch.accelerator, "Graph"):
        pytest.skip("this PyTorch has graphs of CUDA alone")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                # The threads of backward passes are not ended in order with the interpreter: leave without it.
                "import os, sys, pytest; code = pytest.main(sys.argv[1:]); sys.stdout.flush(); os._exit(int(code))",
                "-q",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
                str(path),
            ],
            capture_output=True,
            text=True,
            cwd=_HERE.parent.parent,
            env={**os.environ, "TMPDIR": folder},
        )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
