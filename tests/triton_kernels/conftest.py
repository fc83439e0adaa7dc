"""The captures of `programs.py`, made once: Triton decides when it is imported that it interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run_interpreted(*arguments: str, interpret: str = "1") -> subprocess.CompletedProcess[str]:
    """A Python program in a process in which Triton interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": interpret, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def captures(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The directory of the captures, and for each whether its program computes the same without one."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("triton")
    done = run_interpreted("-m", "tests.triton_kernels.programs", str(folder))
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)
