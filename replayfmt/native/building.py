"""Loads the C++ libraries: the one shipped with the package, else one from the user's cache, where it is built at first
use with the installed compiler.

A library's file name contains a digest of everything that it must match: source, platform, and the PyTorch and Python
that it uses, if it does. The file ends with a digest of itself: a damaged library is rebuilt, and so is one that this
system cannot load. One process builds, and others, such as further ranks, wait for what it builds. A library is written
under a temporary name and renamed, so that one is whole whatever happens. Only files that no other user can have
written are loaded from the cache: every directory on the way is checked, and a file is opened once, then checked and
loaded by its descriptor. `python -m replayfmt.native` builds the libraries for a wheel.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import grp
import hashlib
import itertools
import os
import platform
import pwd
import shlex
import shutil
import signal
import stat
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from replayfmt.format.validation import tell

_COMPILERS = ("c++", "g++", "clang++")
# Without contraction, a product is rounded before it is added, as in NumPy. PyTorch's headers check themselves unless
# NDEBUG is defined, as it is in PyTorch itself.
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-fno-plt", "-DNDEBUG")
_WITH_PYTHON = ("recorder.cpp",)  # sources that need the interpreter's headers, and all headers beside this module
_WITH_TORCH = (*_WITH_PYTHON, "thread_watch.cpp")  # sources that need PyTorch; the others fit every PyTorch and Python
_PATIENCE_S = 600
_TURN_S = 180  # that one process lets another one build
_CARRIED = Path(__file__).parent / "built"
_DIGEST_BYTES = hashlib.sha256().digest_size


class NotAvailable(Exception):
    """The library is not available here. `reason` is for the session and reveals nothing about the machine; `detail` is
    for the user."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def library(source: str) -> ctypes.PyDLL:
    """The library of a source file beside this module (`thread_watch.cpp`); PyTorch is imported for those alone that
    use it. Its functions are called without releasing the GIL. Raises NotAvailable."""
    try:
        name = _name(source)
        found = _loaded(_CARRIED / name)
        if found is None:
            path = _cache() / name
            found = _loaded(path, own=True)
        if found is None:
            with _building(path.parent):
                found = _loaded(path, own=True)
                if found is None:
                    _build(source, path)
                    found = _loaded(path, own=True, new=True)
        if found is None:
            raise NotAvailable("the library cannot be built or loaded", f"{path} was built, and is damaged")
        return found
    except OSError as error:
        raise NotAvailable("the library cannot be built or loaded", str(error)) from error


def build_all(directory: Path) -> list[Path]:
    """Build every library for this PyTorch and this Python into a directory, to be shipped in a wheel. Returns the
    files. Raises NotAvailable."""
    directory.mkdir(parents=True, exist_ok=True)
    sources = sorted(each.name for each in Path(__file__).parent.glob("*.cpp"))
    paths = [directory / _name(source) for source in sources]
    for source, path in zip(sources, paths, strict=True):
        path.write_bytes(_compiled(source))
    return paths


def compile_library(source: Path, output: Path, *flags: str, with_python: bool = False) -> None:
    """Compile one C++ file against the installed PyTorch. `flags`: additional ones. Raises NotAvailable."""
    run_compiler([*compiler(), *_flags(with_python), *flags, str(source), "-o", str(output), *_linked(with_python)])


def run_compiler(command: list[str]) -> None:
    """Run a compiler. Raises NotAvailable with its first error if it fails."""
    try:
        code, said = _run(command)
    except OSError as error:
        raise NotAvailable("the compiler failed", str(error)) from error
    if code != 0:
        lines = [line for line in said.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines or ["it said nothing"]
        raise NotAvailable("the compiler failed", f"{command[0]} (exit code {code}): {errors[0][:300]}")


def _run(command: list[str]) -> tuple[int, str]:
    """Exit code and output of a compiler. If interrupted, ends it together with all processes that it started."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "LC_ALL": "C"},
        process_group=0,
    )
    try:
        said, _ = process.communicate(timeout=_PATIENCE_S)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise NotAvailable("the compiler did not end", f"{command[0]} ran for {_PATIENCE_S} seconds") from None
        raise
    return process.returncode, said


def compiler() -> list[str]:
    """The C++ compiler's command: the environment variable CXX, or the first compiler found. Raises NotAvailable."""
    for words in (shlex.split(os.environ.get("CXX", "")), *([name] for name in _COMPILERS)):
        found = shutil.which(words[0]) if words else None
        if found is not None:
            return [found, *words[1:]]
    raise NotAvailable("no C++ compiler", f"none of {', '.join(_COMPILERS)} was found")


def _torch_folder() -> Path:
    import torch

    return Path(torch.__file__).parent


def _flags(with_python: bool) -> list[str]:
    """What a source that uses PyTorch is compiled with."""
    import torch

    where = _torch_folder() / "include"
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
    return [f"-L{_torch_folder() / 'lib'}", *(f"-l{name}" for name in libraries)]


# ------------------------------------------------------------------------------------------------------ the libraries


def _files(source: str) -> dict[str, bytes]:
    """The files that a library is compiled from, by name."""
    here = Path(__file__).parent
    headers = "*.h" if source in _WITH_PYTHON else "watched.h" if source in _WITH_TORCH else ""
    paths = [here / source, *(sorted(here.glob(headers)) if headers else ())]
    return {path.name: path.read_bytes() for path in paths}


def _name(source: str) -> str:
    """The file name of the library for this platform, the current sources, and the PyTorch and Python that they use."""
    fits: list[object] = [_files(source), _FLAGS, platform.machine()]
    if source in _WITH_TORCH:
        import torch

        fits += [
            torch.__version__,
            [getattr(torch.version, name, None) for name in ("git_version", "debug", "cuda", "hip", "xpu")],
            torch.compiled_with_cxx11_abi(),
            sysconfig.get_config_var("SOABI"),
        ]
    return f"{Path(source).stem}-{hashlib.sha256(repr(fits).encode()).hexdigest()[:32]}.so"


def _compiled(source: str) -> bytes:
    """A library, compiled, followed by its digest."""
    with tempfile.TemporaryDirectory(prefix="opreplay-") as scratch:
        for name, content in _files(source).items():
            Path(scratch, name).write_bytes(content)
        made = Path(scratch, "made.so")
        if source in _WITH_TORCH:
            compile_library(Path(scratch, source), made, with_python=source in _WITH_PYTHON)
        else:
            run_compiler([*compiler(), *_FLAGS, "-pthread", str(Path(scratch, source)), "-o", str(made)])
        content = made.read_bytes()
    return content + hashlib.sha256(content).digest()


def _loaded(path: Path, own: bool = False, new: bool = False) -> ctypes.PyDLL | None:
    """A library, if it exists, is intact, and loads on this system; raises OSError if a `new` one does not load. With
    `own`, raises NotAvailable if it may be another user's."""
    try:
        file = open_own(path) if own else path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        content = file.read()
        if hashlib.sha256(content[:-_DIGEST_BYTES]).digest() != content[-_DIGEST_BYTES:]:
            return None
        try:
            found = ctypes.PyDLL(_name_of_open(file.fileno(), path))
        except OSError:  # built on another system, with another C library
            if new:
                raise
            return None
    found._name = str(path)
    return found


_loads = itertools.count()


def _name_of_open(descriptor: int, path: Path) -> str:
    """A name that leads to what is open. It is another one each time: the system's loader takes a name that it has seen
    for the same library, and descriptors are used again."""
    folder = "/proc/self/fd/"
    return f"{folder}{'./' * next(_loads)}{descriptor}" if os.path.isdir(folder) else str(path)


# ------------------------------------------------------------------------------------------------------------ the cache


@contextmanager
def _building(directory: Path) -> Iterator[None]:
    """While no other process builds in that directory; or while one seems to for very long, as a child does that was
    forked by one that built."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + _TURN_S
        with suppress(OSError):  # this file system has no locks
            while time.monotonic() < end:
                with suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _build(source: str, path: Path) -> None:
    """Build a library and put it into the cache atomically."""
    compiler()
    if source in _WITH_TORCH:
        _flags(source in _WITH_PYTHON)
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent)  # for this user alone
    except OSError as error:
        raise _no_cache(error) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            say(f"building {source}, once: this can take a minute")
            content = _compiled(source)
            try:
                file.write(content)
                file.close()
                os.replace(name, path)
            except OSError as error:
                raise _no_cache(error) from error
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _cache() -> Path:
    """The directory of the cached libraries."""
    return own_cache("native")


def own_cache(name: str) -> Path:
    """A directory of cached files, created if missing. Raises NotAvailable if others can write to it or replace it."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(base):
        raise _no_cache("this user has no home directory")
    directory = Path(os.path.realpath(base), "opreplay", name)
    try:
        for path in reversed([directory, *directory.parents]):
            try:
                found = path.lstat()
            except FileNotFoundError:
                with suppress(FileExistsError):
                    path.mkdir(mode=0o700)
                found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) and not stat.S_ISLNK(found.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
            if path in (directory, directory.parent):
                _refuse_foreign(path, found)
            elif not _is_safe_above(found):
                raise NotAvailable("the cache is not safe", f"another user can replace what is in {path}")
    except OSError as error:
        raise _no_cache(error) from error
    return directory


def _no_cache(why: object) -> NotAvailable:
    return NotAvailable("no cache", f"{why}; XDG_CACHE_HOME names another place")


def _is_safe_above(found: os.stat_result) -> bool:
    """Whether no other user can replace what is in a directory. Root can anyway."""
    mode = found.st_mode
    if found.st_uid not in (0, os.geteuid()) or stat.S_ISLNK(mode):
        return False
    if mode & stat.S_ISVTX:  # like /tmp: what is ours there remains ours
        return True
    return not mode & stat.S_IWOTH and not (mode & stat.S_IWGRP and not _is_private_group(found.st_gid))


def _is_private_group(number: int) -> bool:
    """Whether a group is the one that many systems make for each user, who then lets it write as a rule."""
    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return bool(user.pw_uid) and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def open_own(path: Path) -> BinaryIO:
    """A file of a cache, open. Raises NotAvailable if another user can have written it; FileNotFoundError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError:
        _refuse_foreign(path, path.lstat())  # a link
        raise
    try:
        _refuse_foreign(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _refuse_foreign(path: Path, found: os.stat_result) -> None:
    """Raise NotAvailable if another user can have written what was found at `path`."""
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotAvailable(
            "the cache is not safe",
            f"{path} is a link, belongs to another user, or can be written by others: remove it",
        )


def say(text: str) -> None:
    tell(f"opreplay: {text}")


_missing: set[str] = set()


def say_missing(consequences: Mapping[str, NotAvailable]) -> None:
    """Say what the lack of a library means: one line for each reason, once per process."""
    new = {consequence: problem for consequence, problem in consequences.items() if consequence not in _missing}
    _missing.update(new)
    for reason in dict.fromkeys(problem.reason for problem in new.values()):
        because = {consequence: problem for consequence, problem in new.items() if problem.reason == reason}
        say(f"{', and '.join(because)} ({next(iter(because.values()))})")
