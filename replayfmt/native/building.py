"""Compiles C++ sources against the installed PyTorch, keeps the libraries in the user's cache, and loads them.

A library's name holds a digest of all that it was made of: source, PyTorch, compiler, flags. It is written under
another name and renamed, so that processes which build at the same time do not disturb each other, and ends with a
digest of itself, so that a damaged one is built again. Only what the user alone can have written is loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from importlib import resources
from pathlib import Path

import torch

_COMPILERS = ("c++", "g++", "clang++")
# Without contraction, a product is rounded before it is added to something, as NumPy does it.
_FLAGS = ("-O2", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off")
_PATIENCE_S = 600
_DIGEST_BYTES = hashlib.sha256().digest_size


class NotAvailable(Exception):
    """There is no such library here. `reason` is for the session and names nothing of the machine, `detail` is for the
    user."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def library(source: str, *, with_python: bool = False) -> ctypes.PyDLL:
    """The library of a source file beside this module (`thread_watch.cpp`), built where the cache has none. Its
    functions are called without giving up the interpreter's lock. `with_python`: it also needs the interpreter's
    headers. Raises NotAvailable."""
    try:
        return _load(_built(source, compiler(), with_python))
    except OSError as error:
        raise NotAvailable("the library cannot be built or loaded", str(error)) from error


def compile_library(source: Path, output: Path, *flags: str, with_python: bool = False) -> None:
    """Compile one C++ file against the installed PyTorch. `flags`: more of them. Raises NotAvailable."""
    command = [*compiler(), *_flags(with_python), *flags, str(source), "-o", str(output), *_linked(with_python)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotAvailable("the compiler failed", str(error)) from error
    if done.returncode != 0:
        said = [line for line in done.stdout.splitlines() if line.strip()]
        errors = [line for line in said if "error" in line.lower()] or said or ["it said nothing"]
        raise NotAvailable("the compiler failed", f"{command[0]} (exit code {done.returncode}): {errors[0][:300]}")


def compiler() -> list[str]:
    """The command that compiles C++: that of the environment variable CXX, or the first one found. Raises
    NotAvailable."""
    for words in (shlex.split(os.environ.get("CXX", "")), *([name] for name in _COMPILERS)):
        found = shutil.which(words[0]) if words else None
        if found is not None:
            return [found, *words[1:]]
    raise NotAvailable("no C++ compiler", f"none of {', '.join(_COMPILERS)} was found")


def _flags(with_python: bool) -> list[str]:
    where = Path(torch.__file__).parent / "include"
    if not (where / "ATen" / "record_function.h").is_file():
        raise NotAvailable("this PyTorch has no headers", f"{where} does not hold them")
    flags = [*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", f"-I{where}"]
    if with_python:
        python = Path(sysconfig.get_path("include"))
        if not (python / "Python.h").is_file():
            raise NotAvailable("this Python has no headers", f"{python} does not hold Python.h")
        flags += [f"-I{where / 'torch' / 'csrc' / 'api' / 'include'}", f"-I{python}"]
    return flags


def _linked(with_python: bool) -> list[str]:
    libraries = ("torch_python", "torch", "torch_cpu", "c10") if with_python else ("torch_cpu", "c10")
    return [f"-L{Path(torch.__file__).parent / 'lib'}", *(f"-l{name}" for name in libraries)]


# ------------------------------------------------------------------------------------------------------------ the cache


def _built(source: str, command: list[str], with_python: bool = False) -> Path:
    """The path of the library, which is there."""
    files = {source: resources.files(__package__).joinpath(source).read_bytes()}
    if with_python:
        headers = [each for each in resources.files(__package__).iterdir() if each.name.endswith(".h")]
        files |= {each.name: each.read_bytes() for each in sorted(headers, key=lambda each: each.name)}
    text = b"".join(files.values())
    path = _directory() / f"{Path(source).stem}-{_key(text, command, with_python)}.so"
    if not _is_whole(path):
        say(f"building a part of the recorder in C++, once for PyTorch {torch.__version__} (takes seconds)")
        with tempfile.TemporaryDirectory(prefix="opreplay-") as scratch:
            written, made = Path(scratch, source), Path(scratch, "made.so")
            for name, content in files.items():
                Path(scratch, name).write_bytes(content)
            compile_library(written, made, with_python=with_python)
            _keep(made.read_bytes(), path)
    return path


def _key(text: bytes, command: list[str], with_python: bool) -> str:
    """What tells libraries apart."""
    where = os.stat(command[0])
    parts = (
        hashlib.sha256(text).hexdigest(),
        torch.__version__,
        torch.version.git_version,
        platform.machine(),
        os.path.realpath(command[0]),
        where.st_size,
        where.st_mtime_ns,
        command[1:],
        _flags(with_python),
        sys.implementation.cache_tag,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _directory() -> Path:
    """Where libraries are kept; made where it is not there. Raises NotAvailable where others can write to it."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    directory = Path(base, "opreplay", "native")
    try:
        for path in (directory.parent, directory):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_own(path)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(f"{directory} cannot be written")
    except OSError as error:
        raise NotAvailable("no cache", f"{error}; XDG_CACHE_HOME names another place") from error
    for above in directory.parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise NotAvailable("the cache is not safe", f"everybody can replace what is in {above}")
    return directory


def check_own(path: Path) -> None:
    """Raise NotAvailable where somebody else than this user can have written what is there."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotAvailable(
            "the cache is not safe",
            f"{path} is a link, belongs to another user, or can be written by others: remove it",
        )


def _is_whole(path: Path) -> bool:
    """Whether a library is there and ends with its own digest. Raises NotAvailable where it may be another user's."""
    try:
        check_own(path)
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _keep(content: bytes, path: Path) -> None:
    """Write a library and its digest under its name at once."""
    descriptor, name = tempfile.mkstemp(dir=path.parent)  # for this user alone
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content + hashlib.sha256(content).digest())
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _load(path: Path) -> ctypes.PyDLL:
    return ctypes.PyDLL(str(path))


def say(text: str) -> None:
    with suppress(Exception):  # the program's own stderr may refuse it
        print(f"opreplay: {text}", file=sys.stderr, flush=True)
