"""Compiles and loads C++ kernels of captures. Only a replay calls it, where the user allows code.

A kernel's library is a Python extension, with the binding that Inductor gave it: a call from generated code costs what
it cost the compiled program. It is compiled with the captured flags, of which only those are taken that a kernel needs,
by this machine's compiler with this PyTorch's headers: neither Dynamo nor Inductor is imported. What was compiled here
is kept in the user's cache, under a digest of everything that it depends on.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from replayfmt.native.building import NotAvailable, compiler, open_own, own_cache, run_compiler, say
from replayfmt.pytorch.inductor.code_machine import machine_of_code
from replayfmt.pytorch.inductor.cpp_kernels import ENTRY

_TORCH = Path(torch.__file__).parent
# What a kernel may be compiled with: compilers have too many flags that read or write files to list those. Some of a
# harmless look do (-fopt-info-vec=FILE writes into the working directory).
_FLAG = re.compile(
    r"-(D ?[A-Za-z_]\w*(=[\w.]+)?|O[0-3s]|g[0-3]?|std=[a-z0-9+]+|shared|pedantic|W[a-z0-9=-]+"
    r"|m(arch|cpu|tune)=[a-z0-9.+-]+|m(no-)?(altivec|amx|avx|bmi|f16c|fma|sse|sve|vsx|vx|zvector)[a-z0-9.=-]*"
    r"|f(PIC|openmp|fp-contract=[a-z]+|excess-precision=[a-z]+|visibility=hidden)"
    r"|f(no-)?(associative-math|fast-math|finite-math-only|math-errno|omit-frame-pointer|reciprocal-math|rounding-math"
    r"|signed-zeros|trapping-math|tree-loop-vectorize|tree-vectorize|unsafe-math-optimizations)"
    r"|l(torch|torch_cpu|torch_python|c10|gomp|omp|iomp5))\Z"
)
_ADDRESS = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"  # where the binding finds the function that gives addresses


class CannotLoad(Exception):
    """A kernel's library cannot be made or loaded here; says why."""


def load(library: bytes) -> Callable[..., Any]:
    """The kernel of a library. Raises CannotLoad."""
    with tempfile.TemporaryDirectory(prefix="opreplay-", dir=_directory()) as scratch:
        path = Path(scratch, "kernel.so")
        path.touch(mode=0o600)
        path.write_bytes(library)
        return _loaded(path)  # which the system has mapped by then


def compiled(source: str, flags: Sequence[str]) -> bytes:
    """The library for a source: from the cache, or compiled now. Raises CannotLoad."""
    wrong = [flag for flag in flags if not _FLAG.match(flag)]
    if wrong:
        raise CannotLoad(f"the captured flag {wrong[0]!a} is not one that a kernel is compiled with")
    path = _directory() / f"{_digest(source, flags)}.so"
    try:
        with open_own(path) as cached:
            content = cached.read()
        if hashlib.sha256(content[:-32]).digest() == content[-32:]:
            return content[:-32]
    except FileNotFoundError:
        pass
    except NotAvailable as problem:
        raise CannotLoad(str(problem)) from None
    content = _compiled(source, flags)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content + hashlib.sha256(content).digest())
    os.replace(file.name, path)
    return content


def _compiled(source: str, flags: Sequence[str]) -> bytes:
    linked = [flag for flag in flags if flag.startswith("-l")]
    include = _TORCH / "include"
    with tempfile.TemporaryDirectory(prefix="opreplay-", dir=_directory()) as scratch:
        given, made = Path(scratch, "kernel.cpp"), Path(scratch, "kernel.so")
        given.write_text(source, encoding="utf-8")
        say("compiling a C++ kernel of the capture")
        command = [
            *compiler(),
            *(flag for flag in flags if flag not in linked),
            *(f"-I{each}" for each in (sysconfig.get_path("include"), include, include / "torch/csrc/api/include")),
            str(given),
            *("-o", str(made)),
            f"-L{_TORCH / 'lib'}",
            *linked,
        ]
        try:
            run_compiler(command)
            return made.read_bytes()
        except (NotAvailable, OSError) as problem:
            raise CannotLoad(f"it cannot be compiled here: {problem}") from None


def _loaded(path: Path) -> Callable[..., Any]:
    name = f"opreplay_{path.parent.name}.{ENTRY}"
    before = os.environ.get(_ADDRESS)
    os.environ[_ADDRESS] = str(torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr)  # type: ignore[attr-defined]
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function: Callable[..., Any] = getattr(module, ENTRY)
        return function
    except (ImportError, OSError, AttributeError) as error:
        raise CannotLoad(f"its library cannot be loaded here: {error}") from None
    finally:
        sys.modules.pop(name, None)
        if before is None:
            del os.environ[_ADDRESS]
        else:
            os.environ[_ADDRESS] = before


def _digest(source: str, flags: Sequence[str]) -> str:
    parts = (source, *flags, *map(str, machine_of_code().items()), _version())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@cache
def _version() -> str:
    """What the compiler says that it is."""
    try:
        with suppress(OSError):
            said = subprocess.run([*compiler(), "--version"], capture_output=True, text=True, timeout=60, check=False)
            return said.stdout.partition("\n")[0]
    except (NotAvailable, subprocess.TimeoutExpired):
        pass
    return ""


def _directory() -> Path:
    """The directory for code of captures, of this user alone. Raises CannotLoad."""
    try:
        return own_cache("code")
    except NotAvailable as problem:
        raise CannotLoad(str(problem)) from None
