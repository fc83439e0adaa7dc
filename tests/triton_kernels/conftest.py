"""The captures of the programs, made once: Triton decides when it is imported that it interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch._library.triton

from replayfmt.probes.ptx import ptxas_programs

# Whether `wrap_triton` takes kernels that the interpreter runs; PyTorch 2.11's does not.
WRAPS_INTERPRETED = hasattr(torch._library.triton, "_is_interpreted_triton_kernel")


def run_python(
    *arguments: str, interpret: str | None = None, cache: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """A Python process, in which Triton is told to interpret or not, or (None) is told nothing. `cache`: where it keeps
    what it compiles."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    environment.pop("TRITON_INTERPRET", None)
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    if interpret is not None:
        environment["TRITON_INTERPRET"] = interpret
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def skip_unless_triton_compiles() -> None:
    """Skip the test where Triton cannot make binaries for GPUs."""
    pytest.importorskip("triton")
    if not ptxas_programs():
        pytest.skip("there is no ptxas here")


@pytest.fixture(scope="session")
def captures(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The directory of the captures, and for each whether its program computes the same without one."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("triton")
    done = run_python("-m", "tests.triton_kernels.recording_programs", str(folder), interpret="1")
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)
