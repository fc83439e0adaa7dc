"""Inductor's generated C++ kernels: what a capture stores of one, and how a replay compiles and loads it.

A kernel is one function named `kernel`, whose signature says what it reads and writes. `machine_of_code` has what a
compiled kernel must find again to run as it did: this processor, this PyTorch, this Python. `without_paths` takes the
paths of the machine that compiled a library out of it: a capture may be shared.

`load` compiles and loads kernels. Only a replay calls it, where the user allows code. A kernel's library is a Python
extension, with the binding that Inductor gave it. It is compiled with the captured flags, of which only those are taken
that a kernel needs, by this machine's compiler with this PyTorch's headers: neither Dynamo nor Inductor is imported.
What was compiled here is kept in the user's cache, under a digest of everything that it depends on.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import platform
import re
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from replayfmt.format.validation import parse_json
from replayfmt.native.building import NotAvailable, compiler, open_own, own_cache, run_compiler, say

from .environment import cpu_capability, cpu_model

_HEADER = struct.Struct("<4sBB10x2HI3QI6H")  # of a file of 64 bits, little-endian
_SECTION = struct.Struct("<2I4Q2I2Q")
_NO_BITS, _ALLOCATED = 8, 2


def without_paths(library: bytes) -> bytes:
    """The library without debugging information, which nothing loads, and without the directory of PyTorch's headers,
    which messages of errors name; nothing moves."""
    headers = str(Path(torch.__file__).parent).encode()
    return _without_debugging(library).replace(headers, b"/" * len(headers))


def _without_debugging(library: bytes) -> bytes:
    """With zeros in its place. What is no library of this kind, or has none, is returned as it is."""
    if len(library) < _HEADER.size:
        return library
    magic, bits, order, *_kind, offset, _flags, _size, _entry, _entries, entry, count, names = _HEADER.unpack_from(
        library
    )
    end = offset + entry * count
    if (magic, bits, order) != (b"\x7fELF", 2, 1) or entry != _SECTION.size or end > len(library) or names >= count:
        return library
    sections = [_SECTION.unpack_from(library, offset + entry * number) for number in range(count)]
    texts = library[sections[names][4] : sections[names][4] + sections[names][5]]
    changed = bytearray(library)
    for name, kind, flags, _address, begin, length, *_rest in sections:
        debugging = texts[name:].startswith((b".debug", b".zdebug"))
        if debugging and kind != _NO_BITS and not flags & _ALLOCATED and begin + length <= len(library):
            changed[begin : begin + length] = bytes(length)
    return bytes(changed)


@functools.cache
def machine_of_code() -> dict[str, str]:
    """What a library depends on that was compiled for the machine at hand, by name."""
    return {
        "machine": platform.machine(),
        "cpu": cpu_model() or "",
        "cpu_features": _features(),
        "cpu_capability": cpu_capability(),
        "libc": " ".join(platform.libc_ver()),
        "python": str(sysconfig.get_config_var("SOABI")),
        "torch": torch.__version__,
    }


def differences(captured: dict[str, str]) -> list[str]:
    """The names of what is different here."""
    here = machine_of_code()
    return [name for name in here if captured.get(name) != here[name]]


def _features() -> str:
    """A digest of what the processor can do; "" if the system does not say."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return ""
    for line in cpuinfo.read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return hashlib.sha256(" ".join(sorted(value.split())).encode()).hexdigest()[:16]
    return ""


NAMESPACE = "inductor_cpp"
ENTRY = "kernel"
_SIGNATURE = re.compile(rf'extern\s+"C"[^(){{}};]*?\bvoid\s+{ENTRY}\s*\(([^(){{}};]*)\)')
_PARAMETER = re.compile(
    r"(?P<const>const\s+)?(?P<type>[A-Za-z_][\w:]*(?:<[\w:]+>)?)(?:\s*(?P<star>\*)\s*|\s+)(?P<name>\w+)\Z"
)
_DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "at::Half": torch.float16,
    "at::BFloat16": torch.bfloat16,
    "int64_t": torch.int64,
    "int32_t": torch.int32,
    "int16_t": torch.int16,
    "int8_t": torch.int8,
    "uint64_t": torch.uint64,
    "uint32_t": torch.uint32,
    "uint16_t": torch.uint16,
    "uint8_t": torch.uint8,
    "bool": torch.bool,
    "at::complex<at::Half>": torch.complex32,
    "at::complex<float>": torch.complex64,
    "at::complex<double>": torch.complex128,
    "at::Float8_e4m3fn": torch.float8_e4m3fn,
    "at::Float8_e5m2": torch.float8_e5m2,
    "at::Float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "at::Float8_e5m2fnuz": torch.float8_e5m2fnuz,
}
_SCALARS = {"int64_t": "int", "float": "float"}  # the numbers that Inductor's Python binding takes


@dataclass(frozen=True)
class CppArgument:
    """One parameter. `dtype`: the elements that a pointer points to, None for a number. `written`: its memory may be
    written."""

    name: str
    type: str
    dtype: torch.dtype | None
    written: bool

    @property
    def passed_as(self) -> str:
        """Its type in C++, without qualifiers."""
        return self.type if self.dtype is None else f"{self.type}*"


def parameters_of(source: str) -> str:
    """The text of the kernel's parameters in a C++ source. Raises ValueError if there is not one kernel."""
    found = _SIGNATURE.findall(source)
    if len(found) != 1:
        raise ValueError(f'{len(found)} functions `extern "C" void {ENTRY}(…)`, expected one')
    return " ".join(found[0].split())


def parse_parameters(text: str) -> tuple[CppArgument, ...]:
    """The parameters of a kernel. Raises ValueError with the reason if they cannot be told."""
    arguments = tuple(_argument(each.strip()) for each in text.split(",")) if text.strip() else ()
    if len({argument.name for argument in arguments}) != len(arguments):
        raise ValueError("two parameters of one name")
    return arguments


def _argument(text: str) -> CppArgument:
    match = _PARAMETER.match(text)
    if match is None:
        raise ValueError(f"the parameter {text!r} is neither a number nor a pointer to elements")
    kind = match["type"]
    if match["star"]:
        if kind not in _DTYPES:
            raise ValueError(f"the parameter {text!r} points to no elements of a tensor")
        return CppArgument(match["name"], kind, _DTYPES[kind], match["const"] is None)
    if kind not in _SCALARS:
        raise ValueError(f"the parameter {text!r} is a number that Inductor passes to no kernel")
    return CppArgument(match["name"], kind, None, False)


def variant_of(*parts: str | bytes) -> str:
    """The name of one code object among those of a kernel's name: from what it is compiled from, and how."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little") + content)
    return f"v{digest.hexdigest()[:16]}"


def schema_of(name: str, variant: str, arguments: Sequence[CppArgument]) -> str:
    """The schema of a kernel, in the dispatcher's grammar."""
    written = 0
    texts = []
    for argument in arguments:
        if argument.dtype is None:
            texts.append(f"{_SCALARS[argument.type]} {argument.name}")
        elif argument.written:
            texts.append(f"Tensor(a{written}!) {argument.name}")
            written += 1
        else:
            texts.append(f"Tensor {argument.name}")
    return f"{NAMESPACE}::{name}.{variant}({', '.join(texts)}) -> ()"


@dataclass(frozen=True)
class StoredCppKernel:
    """What a capture stores of a kernel, in attachments by role.

    `parameters`: the text of its parameters. `source`: all that was compiled, with the Python binding that Inductor
    gives it; None if it was left out. `library`: what it was compiled to, None likewise. `flags`: the compiler's words
    without paths; empty if it is not known how the library was compiled. `compiled_for`: what the library fits
    (code_machine.py).
    """

    parameters: str
    source: str | None
    library: bytes | None
    flags: tuple[str, ...]
    compiled_for: Mapping[str, str]

    @property
    def arguments(self) -> tuple[CppArgument, ...]:
        """Raises ValueError."""
        return parse_parameters(self.parameters)

    def variant(self) -> str:
        """The name that tells this code object from others. The source must be there."""
        assert self.source is not None
        return variant_of(self.source, *self.flags, self.compiled_for["torch"])

    def contents(self) -> dict[str, bytes]:
        """The attachments' bytes, by role."""
        assert self.source is not None and self.library is not None
        metadata = {
            "parameters": self.parameters,
            "writes": "signature",  # how it is known what the kernel writes
            "flags": list(self.flags),
            "compiled_for": dict(self.compiled_for),
            "object_sha256": hashlib.sha256(self.library).hexdigest(),
        }
        text = json.dumps(metadata, indent=1, sort_keys=True)
        return {"source": self.source.encode(), "object": self.library, "metadata": text.encode()}

    @staticmethod
    def read(contents: Mapping[str, bytes]) -> StoredCppKernel:
        """The reverse. Raises ValueError if this is no stored kernel, or its library is another than it says."""
        try:
            metadata = parse_json(contents["metadata"])
            parameters, flags, target = metadata["parameters"], metadata["flags"], metadata["compiled_for"]
            source = contents["source"].decode() if "source" in contents else None
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"what is stored of it cannot be read ({type(error).__name__}: {error})") from None
        texts = (
            [parameters, *flags, *target.values()] if isinstance(flags, list) and isinstance(target, dict) else [None]
        )
        if not all(isinstance(text, str) for text in texts) or "torch" not in target:
            raise ValueError("what is stored of it cannot be read (its metadata has other types than expected)")
        library = contents.get("object")
        if library is not None and hashlib.sha256(library).hexdigest() != metadata.get("object_sha256"):
            raise ValueError("its stored library does not match the digest that is stored with it")
        if source is not None and parameters_of(source) != parameters:
            raise ValueError("its stored source has other parameters than stored with it")
        return StoredCppKernel(parameters, source, library, tuple(flags), target)


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
