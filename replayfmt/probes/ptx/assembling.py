"""Run ptxas, of an installed CUDA or of the triton wheel, on PTX."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from replayfmt.errors import LibraryMissing
from replayfmt.probes.recordings.logs import PtxasFigures, read_ptxas_log

from .parsing import PtxError, parse_ptx

_TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class AssembledPtx:
    """Machine code, what ptxas says of each kernel in it, and what it printed."""

    cubin: bytes
    figures: dict[str, PtxasFigures]
    log: str
    ptxas: str


@cache
def ptxas_programs() -> tuple[str, ...]:
    """Every ptxas there is, the newest first: in `CUDA_HOME`, on `PATH`, in the triton wheel."""
    found: list[str] = []
    if home := os.environ.get("CUDA_HOME"):
        found.append(str(Path(home, "bin", "ptxas")))
    if on_path := shutil.which("ptxas"):
        found.append(on_path)
    triton = find_spec("triton")  # finds it without importing it
    for folder in (triton.submodule_search_locations or []) if triton else []:
        found += [str(path) for path in sorted(Path(folder, "backends", "nvidia", "bin").glob("ptxas*"))]
    versions = {path: _version(path) for path in dict.fromkeys(found)}
    return tuple(
        sorted((path for path, version in versions.items() if version), key=lambda p: versions[p], reverse=True)
    )


def _version(path: str) -> tuple[int, ...]:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", done.stdout)
    return tuple(map(int, found.groups())) if found else ()


def assemble(text: str, target: str | None = None) -> AssembledPtx:
    """Assemble PTX for a target, by default its own. Each ptxas is tried, as old ones do not know new PTX and new
    ones no old targets. Raises PtxError with the first error of the newest, LibraryMissing where there is no ptxas."""
    programs = ptxas_programs()
    if not programs:
        raise LibraryMissing("assembling PTX needs ptxas: install CUDA and set CUDA_HOME, or pip install triton")
    arch = target or parse_ptx(text).target
    errors: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        source, cubin, log = Path(folder, "probed.ptx"), Path(folder, "probed.cubin"), Path(folder, "probed.log")
        source.write_text(text)
        for ptxas in programs:
            command = [ptxas, f"-arch={arch}", "--verbose", str(source), "-o", str(cubin)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                errors.append(f"{ptxas}: took more than {_TIMEOUT_SECONDS} s")
                continue
            if done.returncode == 0:
                log.write_text(done.stderr + done.stdout)
                return AssembledPtx(cubin.read_bytes(), read_ptxas_log(log)["probed"], log.read_text(), ptxas)
            errors.append(next((line for line in done.stderr.splitlines() if "error" in line or "fatal" in line), ""))
    raise PtxError(f"PTX: ptxas does not assemble it for {arch}: {errors[0].replace(str(source), 'the PTX')}")
