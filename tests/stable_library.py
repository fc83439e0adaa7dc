"""Operator libraries in C++, built against PyTorch's stable interface."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

COMPILER = shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def build(folder: Path, code: str) -> Path:
    """Builds a library in a folder; skips the test where this torch cannot be built against."""
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(code)
    home = Path(torch.__file__).parent
    if not (home / "include/torch/csrc/stable/library.h").exists():
        pytest.skip("this torch has no headers of the stable interface")
    assert COMPILER is not None
    headers, libraries = f"-I{home / 'include'}", [f"-L{home / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10"]
    command = [COMPILER, "-std=c++20", "-O0", "-fPIC", "-shared", headers, "-o", library, source, *libraries]
    subprocess.run(command, check=True, timeout=600)
    return library
