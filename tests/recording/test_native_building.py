"""The library in C++ is built once, kept where nobody else can write, and done without where it cannot be had."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import replayfmt
from replayfmt.errors import UsageError
from replayfmt.native import building, watching
from replayfmt.recording.options import CaptureOptions
from replayfmt.recording.program.children import ChildrenSeen

from .conftest import Capture

pytestmark = pytest.mark.recorder("python")  # of no recorder at all

STATE = watching.thread_watch("auto").state

PROGRAM = "import torch\ntorch.ones(2).sin()\n"


def run_tool(directory: Path, *flags: str, **environment: str) -> tuple[str, Any]:
    """Capture a program in a process of its own. What it said, and what the session says watched threads."""
    (directory / "program.py").write_text(PROGRAM)
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", "OPREPLAY_NATIVE")}
    done = subprocess.run(
        [sys.executable, "-m", "opreplay_tools.capture", "--force", "-o", "one.opreplay", *flags, "program.py"],
        cwd=directory,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr, replayfmt.open(directory / "one.opreplay").session.policies["thread-watch"]


@pytest.mark.slow
def test_without_a_compiler_the_capture_goes_on_and_says_so(tmp_path: Path) -> None:
    said, state = run_tool(tmp_path, PATH="")
    assert state == "none: no C++ compiler"
    (line,) = [line for line in said.splitlines() if "go unnoticed" in line]
    assert "none of c++, g++, clang++ was found" in line
    said, state = run_tool(tmp_path, "--native=off", PATH="")
    assert (state, "unnoticed" in said) == ("off", False)


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, with a copy of the library that was built before."""
    if STATE != "native":
        pytest.skip(f"the recorder's library cannot be built here ({STATE})")
    path = building._built("thread_watch.cpp", building.compiler())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = building._directory() / path.name
    shutil.copy(path, copy)
    return copy


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


def test_nothing_is_built_where_it_is_off(built: Path, compiled: list[Path], capture: Capture) -> None:
    built.unlink()
    watching._found.cache_clear()
    try:
        capture(lambda: torch.ones(2), native="off")
        assert not compiled and not list(built.parent.iterdir())
        capture(lambda: torch.ones(2))
        assert len(compiled) == 1
    finally:
        watching._found.cache_clear()


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


@pytest.mark.parametrize(
    "change",
    [_open_to_others, _in_a_directory_of_others, _in_a_linked_directory, _a_link, _below_a_directory_of_everybody],
)
def test_what_others_may_have_written_is_never_loaded(built: Path, change: Callable[[Path], None]) -> None:
    change(built)
    with pytest.raises(building.NotAvailable, match="the cache is not safe"):
        building.library("thread_watch.cpp")


def test_a_cache_that_cannot_be_made_is_told(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(building.NotAvailable, match="no cache.*XDG_CACHE_HOME names another place"):
        building.library("thread_watch.cpp")


def test_processes_that_build_at_once_leave_one_whole_library(built: Path, compiled: list[Path]) -> None:
    """Both find none, both build, and each renames its own into place."""
    built.unlink()
    meeting = threading.Barrier(2, timeout=60)
    build = building.compile_library

    def together(source: Path, output: Path, **how: bool) -> None:
        meeting.wait()
        build(source, output, **how)

    building.compile_library = together
    try:
        with ThreadPoolExecutor(2) as pool:
            paths = list(pool.map(lambda _: building._built("thread_watch.cpp", building.compiler()), range(2)))
    finally:
        building.compile_library = build
    assert paths == [built, built] and len(compiled) == 2 and building._is_whole(built)
    assert [path.name for path in built.parent.iterdir()] == [built.name]


def test_a_source_that_does_not_compile_is_told_with_the_first_error(built: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.cpp").write_text("int here = missing;\n")
    with pytest.raises(building.NotAvailable, match="the compiler failed.*missing"):
        building.compile_library(tmp_path / "wrong.cpp", tmp_path / "wrong.so")


def test_a_build_that_fails_is_told_once_and_the_capture_goes_on(
    built: Path, capture: Capture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(source: Path, output: Path, **_: bool) -> None:
        raise building.NotAvailable("the compiler failed", "no space left")

    built.unlink()
    monkeypatch.setattr(building, "compile_library", fails)
    watching._found.cache_clear()
    try:
        for _ in range(2):
            captured = capture(lambda: torch.ones(2))
            assert captured.reader.session.policies["thread-watch"] == "none: the compiler failed"
    finally:
        watching._found.cache_clear()
    assert capsys.readouterr().err.count("no space left") == 1


def test_a_native_recorder_without_libraries_is_refused() -> None:
    with pytest.raises(UsageError, match="recorder='native' needs a library, and native='off' builds and loads none"):
        CaptureOptions(recorder="native", native="off")
