"""Files that tools write: where they cannot be, every tool says so alike, and a full disk leaves nothing of them."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from in_process import Tools

import replayfmt
from replayfmt.errors import CaptureFailed
from replayfmt.format.maintenance import recover_capture


@dataclass(frozen=True)
class Sources:
    """What the tools read: a capture, one that was cut off, one that refers to a file, and a trace."""

    capture: Path
    cut: Path
    external: Path
    trace: Path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    folder = tmp_path_factory.mktemp("sources")
    found = Sources(folder / "c.opreplay", folder / "cut.partial", folder / "e.opreplay", folder / "t.json")
    weight = torch.randn(32, 32)
    torch.save({"weight": weight}, folder / "w.pt")
    mapped = torch.load(folder / "w.pt", mmap=True)["weight"]
    for path, given in ((found.capture, weight), (found.external, mapped)):
        with replayfmt.capture(path, digests="ops"):
            x = torch.randn(32, 32)
            for _ in range(20):
                x = (x @ given).relu() / 8 + torch.ones(32)
    whole = found.capture.read_bytes()
    found.cut.write_bytes(whole[: -len(whole) // 8])
    args = {"Input type": ["float"], "Input Dims": [[4]], "Input Strides": [[1]], "Concrete Inputs": [""]}
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::relu", "pid": 1, "tid": 1, "ts": 1, "dur": 5, "args": args}
    found.trace.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [event]}))
    return found


PROFILE = "--device-profiling-mode=host-ops"
# Everything that writes: the tool, and what it is called with; OUT is the folder to write to.
WRITERS: dict[str, tuple[str, ...]] = {
    "trim": ("trim", "--ops=5:9", "CAPTURE", "OUT/o.opreplay"),
    "strip": ("trim", "--payload=none", "CAPTURE", "OUT/o.opreplay"),
    "script": ("trim", "--ops=5:9", "--script=OUT/o.py", "--script-data=OUT/o.safetensors", "CAPTURE"),
    "vectors": ("trim", "--ops=5:9", "--vectors=OUT/o", "CAPTURE"),
    "import": ("import", "-o", "OUT/o.opreplay", "TRACE"),
    "import-report": ("import", "-o", "BESIDE/o.opreplay", "--report=OUT/o.jsonl", "TRACE"),
    "recover": ("check", "--recover", "OUT/o.opreplay", "CUT"),
    "add-digests": ("check", "--add-digests", "EXTERNAL", "OUT/o.opreplay"),
    "export": ("export", "CAPTURE", "OUT/o.zip"),
    "benchmark": ("benchmark", "--benchmark-min-time=1x", "--benchmark-out=OUT/o.json", "CAPTURE"),
    "per-op": ("benchmark", "--per-op", "--op-limit=1", "--benchmark-out=OUT/o.json", "CAPTURE"),
    "profile": ("run", PROFILE, "--device-profiling-output=OUT/o.json", "CAPTURE"),
}


def arguments(name: str, sources: Sources, out: Path) -> list[str]:
    values = {
        "OUT": str(out),
        "BESIDE": str(out.parent),
        "CAPTURE": str(sources.capture),
        "CUT": str(sources.cut),
        "EXTERNAL": str(sources.external),
        "TRACE": str(sources.trace),
    }
    found = []
    for text in WRITERS[name]:
        for key, value in values.items():
            text = text.replace(key, value)
        found.append(text)
    return found


def left(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_that_is_missing_is_exit_code_1_of_every_tool(
    sources: Sources, tools: Tools, tmp_path: Path, name: str
) -> None:
    done = tools(*arguments(name, sources, tmp_path / "missing"))
    assert (done.code, done.out, len(done.err.splitlines())) == (1, "", 1)
    assert done.err.startswith("FAILED_PRECONDITION: ") and "there is no directory" in done.err
    assert left(tmp_path) == []


def test_a_folder_that_is_missing_is_exit_code_1_of_a_capture(tmp_path: Path) -> None:
    with pytest.raises(CaptureFailed, match="there is no directory .*; create it first") as refused:
        replayfmt.capture(tmp_path / "missing" / "o.opreplay").__enter__()
    assert (refused.value.status, refused.value.exit_code) == ("FAILED_PRECONDITION", 1)


@contextmanager
def files_no_longer_than(length: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WRITERS if name not in ("profile", "per-op")])
def test_where_a_file_finds_no_room_nothing_is_left(sources: Sources, tools: Tools, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert tools(*arguments(name, sources, out)).code == 0
    longest = max(path.stat().st_size for path in out.rglob("*") if path.is_file())
    for length in (0, 100, longest // 3, longest - longest // 8):
        shutil.rmtree(out)
        out.mkdir()
        (tmp_path / "o.opreplay").unlink(missing_ok=True)
        with files_no_longer_than(length):
            done = tools(*arguments(name, sources, out))
        assert (done.code, left(out)) == (1, []), length
        assert "File too large" in done.err and "--recover" not in done.err, "there is nothing to recover"
        assert left(tmp_path) == ["out"]


@pytest.mark.slow
def test_a_profile_that_finds_no_room_is_not_there(sources: Sources, tools: Tools, tmp_path: Path) -> None:
    with files_no_longer_than(1000):
        done = tools(*arguments("profile", sources, tmp_path))
    assert (done.code, left(tmp_path)) == (1, []) and "is the disk full" in done.err


def test_a_capture_that_finds_no_room_is_a_partial_with_something_in_it_or_nothing(tmp_path: Path) -> None:
    """Where not even one op was written, there is nothing to recover; else what can be recovered replays."""
    given = [np.random.default_rng(number).random((64, 64)) for number in range(20)]
    for length in (0, 100, 2000, 60_000):
        folder = tmp_path / str(length)
        folder.mkdir()
        with (
            files_no_longer_than(length),
            pytest.raises(CaptureFailed, match="File too large") as failed,
            replayfmt.capture(folder / "c.opreplay"),
        ):
            for each in given:
                with replayfmt.scope("step"):
                    torch.from_numpy(each).neg()
        names = left(folder)
        assert ("--recover" in str(failed.value)) is bool(names)
        if names:  # the recorder writes twice a second
            assert length > 100 and names == ["c.opreplay.partial"]
            recover_capture(folder / names[0], folder / "r.opreplay")
            with replayfmt.open(folder / "r.opreplay") as capture:
                assert len(capture.ops) > 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid()
        or shutil.which("mount") is None
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)], capture_output=True
        ).returncode
    ):
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trim", "vectors", "import", "recover", "add-digests", "export", "benchmark"])
def test_a_disk_that_is_full_is_named_and_nothing_is_left_on_it(
    sources: Sources, tools: Tools, small_disk: Path, name: str
) -> None:
    (small_disk / "others").write_bytes(bytes(16 << 10))
    done = tools(*arguments(name, sources, small_disk))
    assert (done.code, left(small_disk)) == (1, ["others"])
    assert "No space left on device" in done.err


def test_a_capture_on_a_full_disk_leaves_nothing_on_it(small_disk: Path) -> None:
    (small_disk / "others").write_bytes(bytes(16 << 10))
    with (
        pytest.raises(CaptureFailed, match="disk is full; no record was written by then, and no file is left"),
        replayfmt.capture(small_disk / "c.opreplay"),
    ):
        torch.ones(3)
    assert left(small_disk) == ["others"]
