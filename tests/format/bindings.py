"""FlatBuffers' own bindings of the schema, made by flatc: readers and writers that owe nothing to ours."""

from __future__ import annotations

import atexit
import functools
import importlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

SCHEMA = Path(__file__).parents[2] / "schema" / "opreplay.fbs"


def bindings(name: str) -> ModuleType:
    """The generated module of a table or struct. Skips the test without flatc."""
    _generate()
    return importlib.import_module(f"opreplay_schema.{name}")


@functools.cache
def _generate() -> None:
    flatc = shutil.which("flatc")
    if flatc is None:
        pytest.skip("needs flatc (Debian: apt-get install flatbuffers-compiler)")
    folder = tempfile.mkdtemp(prefix="opreplay-schema-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    subprocess.run([flatc, "--python", "-o", folder, str(SCHEMA)], check=True, timeout=600)
    sys.path.append(folder)
