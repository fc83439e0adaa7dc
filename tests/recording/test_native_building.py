"""The library in C++ is built once, kept where nobody else can write, and done without where it cannot be had."""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

import replayfmt
from replayfmt.benchmark.per_op import roofline
from replayfmt.errors import UsageError
from replayfmt.native import building, hook, watching
from replayfmt.pytorch import cpp_kernels
from replayfmt.recording import capture_session
from replayfmt.recording.options import CaptureOptions
from replayfmt.recording.program.children import ChildrenSeen

from .conftest import Capture

pytestmark = pytest.mark.recorder("python")  # of no recorder at all

STATE = watching.thread_watch("auto").state

PROGRAM = "import torch\ntorch.ones(2).sin()\n"
COMPILERS = "none of c++, g++, clang++ was found"
IN_PYTHON = "opreplay: recording with the recorder that is written in Python"
WITHOUT = f"{IN_PYTHON}, and operators that run in threads of C++ code go unnoticed"


@pytest.mark.slow
def test_without_a_compiler_the_capture_goes_on_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", "OPREPLAY_NATIVE")}
    for flag, state in (("--native=auto", "none: no C++ compiler"), ("--native=off", "off")):
        done = subprocess.run(
            [sys.executable, "-m", "opreplay_tools.capture", "--force", "-o", "one.opreplay", flag, "program.py"],
            cwd=tmp_path,
            env={**kept, "PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache"), "OPREPLAY_RECORDER": "auto"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        *said, summary = done.stderr.splitlines()
        assert summary.startswith("opreplay-capture: ")
        assert said == [line for line in [f"{WITHOUT} (no C++ compiler: {COMPILERS})"] if state != "off"]
        policies = replayfmt.open(tmp_path / "one.opreplay").session.policies
        assert policies["thread-watch"] == state and policies["recorder"].startswith("python: ")


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, with a copy of the library that was built before."""
    if STATE != "native":
        pytest.skip(f"the recorder's library cannot be built here ({STATE})")
    name = building._name("thread_watch.cpp")
    path = Path(building.library("thread_watch.cpp")._name)
    assert path.name == name
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = building._cache() / name
    shutil.copy(path, copy)
    copy.chmod(0o600)
    return copy


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries are looked for as in a new process."""
    monkeypatch.delenv("OPREPLAY_NATIVE", raising=False)
    monkeypatch.setattr(watching, "_found", functools.cache(watching._found.__wrapped__))
    monkeypatch.setattr(capture_session, "dispatch_hook", functools.cache(hook.dispatch_hook.__wrapped__))
    monkeypatch.setattr(building, "_missing", set())


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, built: Path) -> list[Path]:
    """What would be compiled: the compiler is replaced by a copy of what it makes."""
    made: list[Path] = []
    content = built.read_bytes()[: -building._DIGEST_BYTES]

    def compile_library(source: Path, output: Path, **_: bool) -> None:
        made.append(source)
        output.write_bytes(content)

    monkeypatch.setattr(building, "compile_library", compile_library)
    return made


@pytest.mark.guarantee("native-off")
@pytest.mark.usefixtures("anew")
def test_nothing_is_built_where_it_is_off(built: Path, compiled: list[Path], capture: Capture) -> None:
    built.unlink()
    capture(lambda: torch.ones(2), native="off")
    assert not compiled and not list(built.parent.iterdir())
    capture(lambda: torch.ones(2))
    assert len(compiled) == 1


def test_the_compiler_is_none_of_the_programs_children() -> None:
    children = ChildrenSeen()
    children.install()
    try:
        with children.own():
            subprocess.run([sys.executable, "-c", ""], check=True)
        assert children.seen == {}
        subprocess.run([sys.executable, "-c", ""], check=True)
        assert len(children.seen) == 1
    finally:
        children.remove()


def test_a_library_that_is_there_is_not_built_again(built: Path, compiled: list[Path]) -> None:
    assert building.library("thread_watch.cpp")._name == str(built) and not compiled


@pytest.mark.usefixtures("anew")
def test_a_library_that_is_there_needs_no_compiler(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert watching.thread_watch("auto").state == "native"
    monkeypatch.setattr(torch, "__version__", f"{torch.__version__}.another")
    watching._found.cache_clear()
    assert watching.thread_watch("auto").state == "none: no C++ compiler", "of another PyTorch, none is there"


def test_a_library_that_the_package_carries_comes_first(
    built: Path, compiled: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried = tmp_path / "carried"
    monkeypatch.setattr(building, "_CARRIED", carried)
    paths = building.build_all(carried)
    assert built.name in {path.name for path in paths} and all(path.is_file() for path in paths)
    against_torch = {path.stem for path in compiled}
    assert against_torch < {path.stem.partition("-")[0] for path in paths}, "the others need no PyTorch"
    shutil.rmtree(built.parents[2])
    assert building.library("thread_watch.cpp")._name == str(carried / built.name)
    assert not built.parents[2].exists(), "the cache is not asked"
    (carried / built.name).unlink()  # the one that is loaded stays as it is
    (carried / built.name).write_bytes(b"x" * 5000)
    assert building.library("thread_watch.cpp")._name == str(built), "a damaged one is passed over"


def test_a_whole_library_of_another_system_is_built_again(built: Path, compiled: list[Path]) -> None:
    whole = built.read_bytes()
    other = whole[:18] + (b"\xb7" if whole[18:19] != b"\xb7" else b"\x3e") + whole[19 : -building._DIGEST_BYTES]
    built.write_bytes(other + hashlib.sha256(other).digest())  # as if for another processor
    building.library("thread_watch.cpp")
    assert len(compiled) == 1 and built.read_bytes() == whole


@pytest.mark.guarantee("library-private", "library-digest")
@pytest.mark.parametrize(
    "damage",
    [lambda content: b"", lambda content: content[:5000], lambda content: content[:5000] + b"x" + content[5001:]],
)
def test_a_damaged_library_is_built_again_before_it_is_loaded(
    built: Path, compiled: list[Path], damage: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = built.read_bytes()
    built.write_bytes(damage(whole))
    building.library("thread_watch.cpp")
    assert len(compiled) == 1 and built.read_bytes() == whole
    assert capsys.readouterr().err.count("\n") == 1
    assert [path.name for path in built.parent.iterdir()] == [built.name], "nothing is left of the build"
    assert built.stat().st_mode & 0o077 == 0 and built.parent.stat().st_mode & 0o777 == 0o700


def _open_to_others(built: Path) -> None:
    built.chmod(0o622)


def _in_a_directory_of_others(built: Path) -> None:
    built.parent.chmod(0o770)


def _in_a_linked_directory(built: Path) -> None:
    moved = built.parent.with_name("elsewhere")
    built.parent.rename(moved)
    built.parent.symlink_to(moved)


def _a_link(built: Path) -> None:
    moved = built.with_name("elsewhere.so")
    built.rename(moved)
    built.symlink_to(moved)


def _below_a_directory_of_everybody(built: Path) -> None:
    built.parents[2].chmod(0o777)


def _below_a_directory_of_a_group(built: Path) -> None:
    os.chown(built.parents[2], -1, 12345)
    built.parents[2].chmod(0o770)


def _through_a_link_below_a_directory_of_everybody(built: Path) -> None:
    open_to_all = built.parents[3] / "shared"
    open_to_all.mkdir()
    built.parents[2].rename(open_to_all / "cache")
    built.parents[2].symlink_to(open_to_all / "cache")
    open_to_all.chmod(0o777)


def _of_another_user(built: Path) -> None:
    os.chown(built, 12345, -1)


def _in_a_directory_of_another_user(built: Path) -> None:
    os.chown(built.parent, 12345, -1)


def _below_a_directory_of_another_user(built: Path) -> None:
    os.chown(built.parents[2], 12345, -1)


def _below_a_sticky_directory_of_another_user(built: Path) -> None:
    _below_a_directory_of_another_user(built)
    built.parents[2].chmod(0o1777)


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.mark.guarantee("library-owner")
@pytest.mark.parametrize(
    "change",
    [
        _open_to_others,
        _in_a_directory_of_others,
        _in_a_linked_directory,
        _a_link,
        _below_a_directory_of_everybody,
        _through_a_link_below_a_directory_of_everybody,
        pytest.param(_below_a_directory_of_a_group, marks=as_root),
        pytest.param(_of_another_user, marks=as_root),
        pytest.param(_in_a_directory_of_another_user, marks=as_root),
        pytest.param(_below_a_directory_of_another_user, marks=as_root),
        pytest.param(_below_a_sticky_directory_of_another_user, marks=as_root),
    ],
)
@pytest.mark.parametrize("name", ["native", "code"])
def test_what_others_may_have_written_is_never_loaded(built: Path, change: Callable[[Path], None], name: str) -> None:
    path = built
    if name == "code":
        built.parent.rename(built.parent.with_name("code"))
        path = built.parent.with_name("code") / f"{cpp_kernels._digest('', ())}.so"
        (path.parent / built.name).rename(path)
    change(path)
    with pytest.raises((building.NotAvailable, cpp_kernels.CannotLoad), match="the cache is not safe"):
        if name == "code":
            cpp_kernels.compiled("", ())
        else:
            building.library("thread_watch.cpp")


def test_a_cache_that_a_link_leads_to_and_one_in_a_sticky_directory_are_used(built: Path, compiled: list[Path]) -> None:
    elsewhere = built.parents[3] / "elsewhere"
    built.parents[2].rename(elsewhere)
    built.parents[2].symlink_to(elsewhere)
    built.parents[3].chmod(0o1777)
    assert building.library("thread_watch.cpp")._name == str(elsewhere / built.relative_to(built.parents[2]))
    assert not compiled


@pytest.mark.guarantee("library-owner")
def test_what_is_loaded_is_what_was_checked(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is another one as soon as it has been opened."""
    opened = building.open_own

    def open_own(path: Path) -> BinaryIO:
        file = opened(path)
        path.unlink()
        path.write_bytes(b"no library")
        return file

    monkeypatch.setattr(building, "open_own", open_own)
    before = len(os.listdir("/proc/self/fd"))
    assert building.library("thread_watch.cpp")._name == str(built) and built.read_bytes() == b"no library"
    assert len(os.listdir("/proc/self/fd")) == before


def test_libraries_that_are_opened_one_after_the_other_are_not_taken_for_one(built: Path, tmp_path: Path) -> None:
    """They have the same descriptor."""
    handles = []
    for number in range(2):
        source, made = tmp_path / "one.cpp", tmp_path / f"{number}.so"
        source.write_text(f'extern "C" __attribute__((visibility("default"))) int number() {{ return {number}; }}')
        building.compile_library(source, made)
        content = made.read_bytes()
        made.write_bytes(content + hashlib.sha256(content).digest())
        made.chmod(0o600)
        library = building._loaded(made, own=True)
        assert library is not None
        handles.append(library)
    assert [each.number() for each in handles] == [0, 1]


@pytest.mark.guarantee("library-private")
def test_with_any_umask_what_is_made_is_this_users_alone(
    built: Path, compiled: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / "cache"))
    before = os.umask(0)
    try:
        building.library("thread_watch.cpp")
        roofline._write(roofline.cache_file(), {})
    finally:
        os.umask(before)
    made = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    assert len(made) == 6 and not [each for each in made if each.stat().st_mode & 0o077]


def test_a_cache_that_cannot_be_made_is_told(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(building.NotAvailable, match="no cache.*XDG_CACHE_HOME names another place"):
        building.library("thread_watch.cpp")


@pytest.mark.guarantee("library-private")
def test_of_processes_that_need_a_library_at_once_one_builds_it(built: Path, compiled: list[Path]) -> None:
    built.unlink()
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: building.library("thread_watch.cpp")._name, range(2)))
    assert paths == [str(built)] * 2 and len(compiled) == 1
    assert [path.name for path in built.parent.iterdir()] == [built.name]


@pytest.mark.guarantee("library-private")
def test_processes_that_build_at_once_leave_one_whole_library(
    built: Path, compiled: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has the lock and does not give it back: both find none, both build, and each renames its own into
    place."""
    whole = built.read_bytes()
    built.unlink()
    meeting = threading.Barrier(2, timeout=60)
    build = building.compile_library

    def together(source: Path, output: Path, **how: bool) -> None:
        meeting.wait()
        build(source, output, **how)

    monkeypatch.setattr(building, "compile_library", together)
    monkeypatch.setattr(building, "_TURN_S", 0.2)
    lock = os.open(built.parent, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with ThreadPoolExecutor(2) as pool:
            paths = list(pool.map(lambda _: building.library("thread_watch.cpp")._name, range(2)))
    finally:
        os.close(lock)
    assert paths == [str(built)] * 2 and len(compiled) == 2 and built.read_bytes() == whole
    assert [path.name for path in built.parent.iterdir()] == [built.name]


def test_a_source_that_does_not_compile_is_told_with_the_first_error(built: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.cpp").write_text("int here = missing;\n")
    with pytest.raises(building.NotAvailable, match="the compiler failed.*missing"):
        building.compile_library(tmp_path / "wrong.cpp", tmp_path / "wrong.so")


class Obstacles:
    """What keeps libraries from being built, and the reason that is told."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self._patch = monkeypatch

    def _compiler(self, text: str) -> None:
        path = self._directory / "compiler"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o700)
        self._patch.setenv("CXX", str(path))

    def no_compiler(self) -> str:
        self._patch.setenv("PATH", "")
        return "no C++ compiler"

    def a_compiler_that_fails(self) -> str:
        self._compiler("echo error: no space left; exit 1")
        return "the compiler failed"

    def a_compiler_that_cannot_start(self) -> str:
        self._compiler("")
        (self._directory / "compiler").write_bytes(b"\x7fELF")
        return "the compiler failed"

    def a_compiler_that_makes_nothing(self) -> str:
        self._compiler("exit 0")
        return "the library cannot be built or loaded"

    def a_compiler_whose_parts_hang(self) -> str:
        """They hold its output open: this goes on only when they have ended, too."""
        self._compiler("sleep 100000 & wait")
        self._patch.setattr(building, "_PATIENCE_S", 0.1)
        return "the compiler did not end"

    def no_headers_of_pytorch(self) -> str:
        self._patch.setattr(building, "_torch_folder", lambda: self._directory)
        return "this PyTorch has no headers"

    def no_home(self) -> str:
        self._patch.delenv("XDG_CACHE_HOME")
        self._patch.setattr(os.path, "expanduser", lambda path: path)  # as where the user is not known
        return "no cache"

    def a_cache_that_cannot_be_made(self) -> str:
        (self._directory / "file").write_text("")
        self._patch.setenv("XDG_CACHE_HOME", str(self._directory / "file"))
        return "no cache"

    def a_cache_that_cannot_be_written(self) -> str:
        def mkstemp(dir: Path) -> tuple[int, str]:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(dir))

        self._patch.setattr(building.tempfile, "mkstemp", mkstemp)
        return "no cache"

    def a_cache_that_is_full(self) -> str:
        class Full:
            def __init__(self, descriptor: int, mode: str) -> None:
                self._file = fdopen(descriptor, mode)

            def __enter__(self) -> Full:
                return self

            def __exit__(self, *_: object) -> None:
                self._file.close()

            def write(self, content: bytes) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        fdopen = os.fdopen
        self._patch.setattr(building, "_compiled", lambda _: b"")
        self._patch.setattr(building.os, "fdopen", Full)
        return "no cache"


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("obstacle", [name for name in vars(Obstacles) if not name.startswith("_")])
def test_what_keeps_libraries_from_being_built_is_one_line_and_python_records(
    obstacle: str, capture: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def program() -> torch.Tensor:
        return torch.arange(6.0).reshape(2, 3).sum()

    alone = capture(program, recorder="python", native="off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    reason = getattr(Obstacles(tmp_path, monkeypatch), obstacle)()
    for _ in range(2):
        captured = capture(program, recorder="native")
        policies = captured.reader.session.policies
        assert policies["recorder"] == f"python: {reason}" and policies["thread-watch"] == f"none: {reason}"
        assert captured.ops() == alone.ops() != []
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("opreplay: building ")]
    assert len(said) == 1 and said[0].startswith(f"{WITHOUT} ({reason}: ")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("known", [((2, 9), (2, 10)), ((99, 0), (99, 1))])
def test_a_pytorch_that_the_hook_was_not_made_for_is_told(
    known: tuple[tuple[int, int], tuple[int, int]],
    capture: Capture,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(hook, "KNOWN_PYTORCH", known)
    captured = capture(lambda: torch.ones(2), recorder="auto", native="auto")
    assert captured.reader.session.policies["recorder"] == "python: not made for this PyTorch"
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith(IN_PYTHON)]
    assert said == [
        f"{IN_PYTHON} (not made for this PyTorch: {hook.known_pytorch()} is known, this is {torch.__version__})"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("namespace", "take"), [("_", "fallback(print"), ("aten", "impl('sin', print")])
def test_a_dispatch_key_that_another_library_has_is_left_to_it(namespace: str, take: str, tmp_path: Path) -> None:
    if STATE != "native":
        pytest.skip(f"the recorder's library cannot be built here ({STATE})")
    program = (
        f"import replayfmt, torch\nlibrary = torch.library.Library('{namespace}', 'IMPL')\nlibrary.{take}, 'Fake')\n"
        "with replayfmt.capture('one.opreplay', recorder='native'):\n"
        "    torch.ones(2).sin()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"{IN_PYTHON} (its dispatch key is in use: ") and done.stderr.count("\n") == 1
    captured = replayfmt.open(tmp_path / "one.opreplay")
    assert captured.session.policies["recorder"] == "python: its dispatch key is in use" and len(captured.ops) == 2


@pytest.mark.guarantee("native-off")
def test_a_native_recorder_without_libraries_is_refused() -> None:
    with pytest.raises(UsageError, match="recorder='native' needs a library, and native='off' builds and loads none"):
        CaptureOptions(recorder="native", native="off")
