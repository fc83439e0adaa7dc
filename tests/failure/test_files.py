"""Files that are no valid captures: every tool says so in one line with the place, and exits with 3."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from format.reseal import change_header
from in_process import Tools

from replayfmt.format.codes import Codec, FrameKind
from replayfmt.format.frames import PREAMBLE_BYTES, PREAMBLE_MAGIC

from .table import recorded

_TOOLS: tuple[tuple[str, ...], ...] = (
    ("run",),
    ("benchmark", "--benchmark-min-time=1x"),
    ("dump",),
    ("dump", "--summary"),
    ("check",),
    ("run", "--keep-going"),
    ("run", "--allow-incomplete"),
)


def _all_fail(tools: Tools, path: Path, status: str, said: str, only: tuple[tuple[str, ...], ...] = _TOOLS) -> None:
    for name, *flags in only:
        done = tools(name, *flags, path)
        assert done.code == 3, (name, done)
        lines = done.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith(f"{status}: {path}"), (name, done.err)
        assert re.search(said, lines[0]), (name, lines[0])


def test_a_capture_that_is_not_there(tools: Tools, tmp_path: Path) -> None:
    _all_fail(tools, tmp_path / "nowhere.opreplay", "NOT_FOUND", "no such file or directory")


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04" + bytes(100), b"OPREPLA", PREAMBLE_MAGIC[:4] + bytes(500)],
    ids=["empty", "a zip", "a few bytes", "half a magic"],
)
def test_a_file_of_another_kind(tools: Tools, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.opreplay"
    path.write_bytes(content)
    _all_fail(tools, path, "DATA_LOSS", "not an OpReplay capture|the file is empty|inside the preamble")


def _payload(path: Path) -> int:
    """Where the content of the one payload is."""
    return path.read_bytes().index(torch.arange(64.0).numpy().tobytes())


def _changed(path: Path, change: Callable[[bytearray], bytes | bytearray | None]) -> Path:
    content = bytearray(path.read_bytes())
    path.write_bytes(change(content) or content)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    weight = torch.arange(64.0)
    return recorded(tmp_path, lambda: weight.exp())


def test_a_flipped_bit_in_content_is_found_by_whoever_reads_it(tools: Tools, path: Path) -> None:
    at = _payload(path) + 7

    def flip(content: bytearray) -> None:
        content[at] ^= 4

    _changed(path, flip)
    _all_fail(
        tools, path, "DATA_LOSS", "payload 1", only=(("run",), ("benchmark", "--benchmark-min-time=1x"), ("check",))
    )


@pytest.mark.slow
@pytest.mark.guarantee("one-error")
def test_a_flipped_bit_anywhere_is_found_with_its_offset(tools: Tools, path: Path) -> None:
    content = path.read_bytes()
    for place in range(PREAMBLE_BYTES, len(content), max(1, len(content) // 40)):
        broken = bytearray(content)
        broken[place] ^= 0x10
        path.write_bytes(broken)
        done = tools("check", path)
        assert done.code == 3 or "warning" in done.out, place
        if done.code == 3:
            assert len(done.err.splitlines()) <= 1 and re.search(r"0x[0-9a-f]+|payload \d+", done.err + done.out), done


def test_a_truncated_capture_is_incomplete_or_damaged_but_never_complete(tools: Tools, path: Path) -> None:
    content = path.read_bytes()
    for length in (len(content) - 1, len(content) // 2, PREAMBLE_BYTES + 3, PREAMBLE_BYTES, 5):
        path.write_bytes(content[:length])
        assert tools("check", path).code == 3
        for name, *flags in (("run",), ("benchmark", "--benchmark-min-time=1x")):
            done = tools(name, *flags, path)
            assert done.code in (1, 3) and done.out == "", done
            assert len(done.err.splitlines()) == (2 if done.code == 1 else 1)


def test_a_newer_major_version_is_named(tools: Tools, path: Path) -> None:
    from replayfmt.format.codes import MAJOR_VERSION
    from replayfmt.format.frames import pack_preamble

    content = path.read_bytes()
    reader_id = "11111111-2222-3333-4444-555555555555"
    import replayfmt.format.frames as frames_module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames_module, "MAJOR_VERSION", MAJOR_VERSION + 1)
        newer = pack_preamble(reader_id)
    path.write_bytes(newer + content[PREAMBLE_BYTES:])
    _all_fail(tools, path, "UNIMPLEMENTED", rf"format version {MAJOR_VERSION + 1}\.\d+; this reader knows")


@pytest.mark.guarantee("one-error")
def test_a_hostile_capture_behind_valid_checks_is_one_error(tools: Tools, path: Path) -> None:
    change_header(path, lambda header: replace(header, raw_bytes=2**40, codec=Codec.zstd), FrameKind.records)
    _all_fail(tools, path, "DATA_LOSS", r"0x[0-9a-f]+", only=(("run",), ("benchmark",), ("dump",), ("check",)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_capture_that_may_not_be_read(tools: Tools, path: Path) -> None:
    path.chmod(0)
    _all_fail(tools, path, "NOT_FOUND", "permission denied")


def test_a_directory_in_its_place(tools: Tools, tmp_path: Path) -> None:
    done = tools("run", tmp_path)
    assert done.code == 3 and "directory" in done.err and len(done.err.splitlines()) == 1
