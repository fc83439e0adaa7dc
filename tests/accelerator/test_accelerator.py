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


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "all else"])
def test_what_holds_on_an_accelerator(graphs: bool) -> None:
    """Many files share a process, because importing PyTorch takes longer than the tests of most."""
    if isinstance(found := dispatch_hook(), NotAvailable):
        pytest.skip(f"the accelerator cannot be built here ({found})")
    if graphs and not hasattr(torch.accelerator, "Graph"):
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
                *sorted(map(str, (each for each in _HERE.glob("*on_device.py") if ("graph" in each.stem) is graphs))),
            ],
            capture_output=True,
            text=True,
            cwd=_HERE.parent.parent,
            env={**os.environ, "TMPDIR": folder},
        )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
