"""The file under a capture: what others do to its descriptor, its names, its disk."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from replayfmt.errors import CaptureFailed, OutputExists
from replayfmt.format.model import CaptureInfo
from replayfmt.format.output import Output
from replayfmt.format.reader import open_capture
from replayfmt.format.writer import CaptureWriter

from .samples import write_small


def session(digit: str) -> CaptureInfo:
    return CaptureInfo(f"{digit * 8}-{digit * 4}-{digit * 4}-{digit * 4}-{digit * 12}", "opreplay", "1")


def descriptor(output: Output) -> int:
    return output._fd


def test_a_descriptor_that_became_another_files_is_left_alone(tmp_path: Path) -> None:
    output = Output(tmp_path / "a.opreplay", False)
    output.write([b"head"])
    output.begun()
    number = descriptor(output)
    os.close(number)
    theirs = os.open(tmp_path / "theirs", os.O_RDWR | os.O_CREAT)
    assert theirs == number
    with pytest.raises(CaptureFailed, match="descriptor was closed by the program.*--recover OUT keeps what is there"):
        output.write([b"more"])
    with pytest.raises(CaptureFailed, match="descriptor was closed by the program"):
        output.finish()
    output.release()
    os.write(number, b"mine")
    assert (tmp_path / "theirs").read_bytes() == b"mine"
    assert (tmp_path / "a.opreplay.partial").read_bytes() == b"head"
    os.close(theirs)


@pytest.mark.parametrize("missing", [(0,), (2,), (0, 2), (1, 2)])
def test_a_file_is_never_open_under_the_number_of_a_missing_standard_stream(
    tmp_path: Path, missing: tuple[int]
) -> None:
    program = """
import os, sys
from replayfmt.format.output import Output
for number in map(int, sys.argv[2:]):
    os.close(number)
free = os.open(os.devnull, os.O_RDONLY)
os.close(free)
output = Output(sys.argv[1], False)
output.write([b"head"])
for number in map(int, sys.argv[2:]):
    try:
        os.write(number, b"stray")
        raise SystemExit(f"{number} can be written")
    except OSError:
        pass
assert os.open(os.devnull, os.O_RDONLY) == free, "the number is left to the program"
output.write([b", tail"])
output.finish()
"""
    path = tmp_path / "a.opreplay"
    subprocess.run([sys.executable, "-c", program, str(path), *map(str, missing)], check=True, timeout=60)
    assert path.read_bytes() == b"head, tail"


@pytest.mark.parametrize("stray", ["write", "cut"])
def test_what_others_did_to_the_file_ends_it_before_more_is_written(tmp_path: Path, stray: str) -> None:
    output = Output(tmp_path / "a.opreplay", False)
    output.write([b"head"])
    output.begun()
    if stray == "write":
        os.write(os.dup(descriptor(output)), b"mine")
    else:
        os.truncate(output.partial, 2)
    left = Path(output.partial).read_bytes()
    with pytest.raises(
        CaptureFailed, match="something else wrote to it or cut it: it has . bytes where 4 were written"
    ):
        output.write([b"more"]) if stray == "write" else output.finish()
    assert Path(output.partial).read_bytes() == left
    assert not (tmp_path / "a.opreplay").exists()


def test_a_descriptor_that_is_closed_while_nothing_is_written_is_not_closed_again(tmp_path: Path) -> None:
    output = Output(tmp_path / "a.opreplay", False)
    number = descriptor(output)
    os.closerange(number, number + 1)
    theirs = os.open(tmp_path / "theirs", os.O_RDWR | os.O_CREAT)
    assert theirs == number
    output.discard()
    assert os.write(theirs, b"mine") == 4
    os.close(theirs)
    assert not (tmp_path / "a.opreplay.partial").exists()


def test_of_two_forced_captures_to_one_path_the_later_one_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    first = CaptureWriter(path, session("0"), force=True)
    second = CaptureWriter(path, session("1"), force=True)
    with pytest.raises(CaptureFailed, match="removed or replaced while it was being written, by another capture"):
        first.close(0)
    first.withdraw()
    second.close(0)
    first.withdraw()
    assert open_capture(path).session.session_id[0] == "1"
    assert list(tmp_path.iterdir()) == [path]


def test_a_capture_that_another_one_replaced_is_not_withdrawn(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    first = CaptureWriter(path, session("0"))
    first.close(0)
    second = CaptureWriter(path, session("1"), force=True)
    second.close(0)
    first.withdraw()
    assert open_capture(path).session.session_id[0] == "1"
    second.withdraw()
    assert not path.exists()


@contextmanager
def _files_no_longer_than(length: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_capture_that_finds_no_room_leaves_nothing_that_blocks_the_next(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    with _files_no_longer_than(10), pytest.raises(CaptureFailed) as refused:
        CaptureWriter(path, session("0"))
    assert "no record was written by then, and no file is left" in str(refused.value)
    assert "--recover" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []
    CaptureWriter(path, session("1")).close(0)
    assert open_capture(path).complete


def test_a_full_disk_is_called_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int, _parts: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        with pytest.raises(CaptureFailed, match="the disk is full; no record was written by then"):
            CaptureWriter(tmp_path / "a.opreplay", session("0"))
    assert list(tmp_path.iterdir()) == []
    writer = CaptureWriter(tmp_path / "a.opreplay", session("0"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        with pytest.raises(CaptureFailed, match="the disk is full; no record was written by then"):
            writer.payload(bytes(1 << 20))
            writer.flush()
    assert list(tmp_path.iterdir()) == []
    writer = write_small(tmp_path / "a.opreplay", close=False)
    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(CaptureFailed, match="the disk is full; the capture ends here.*--recover"):
        writer.payload(bytes(1 << 20))
        writer.flush()
    assert (tmp_path / "a.opreplay.partial").stat().st_size > 0, "what is there can be recovered"


def test_a_read_only_file_system_is_called_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ReadOnly:
        f_flag = os.ST_RDONLY

    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(CaptureFailed, match="permission denied"):
        Output(tmp_path / "a.opreplay", False)
    monkeypatch.setattr(os, "statvfs", lambda _folder: ReadOnly)
    with pytest.raises(CaptureFailed, match="the file system is read-only"):
        Output(tmp_path / "a.opreplay", False)


def test_without_force_a_partial_of_another_capture_is_not_taken(tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path / "a.opreplay", session("0"))
    with pytest.raises(OutputExists):
        CaptureWriter(tmp_path / "a.opreplay", session("1"))
    writer.close(0)
    assert open_capture(tmp_path / "a.opreplay").session.session_id[0] == "0"
