"""Opening what is no capture, or not there: one clear error with status NOT_FOUND or DATA_LOSS."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from replayfmt.errors import CaptureNotFound, InvalidCapture
from replayfmt.format.codes import RecordKind
from replayfmt.format.maintenance import check_capture, recover_capture
from replayfmt.format.reader import open_capture
from replayfmt.format.writer import CaptureWriter

from .reading import read_all
from .samples import SESSION, Records, marker, write_small


def _all_refuse(path: str | Path, error: type[Exception], match: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for read in (open_capture, check_capture, lambda p: recover_capture(p, f"{folder}/out")):
            with pytest.raises(error, match=match):
                read(path)
        assert os.listdir(folder) == []


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    _all_refuse(tmp_path / "missing.opreplay", CaptureNotFound, "missing.opreplay: no such file or directory")


def test_a_missing_file_with_a_partial_beside_it_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    write_small(path, close=False).abandon()
    with pytest.raises(CaptureNotFound) as caught:
        open_capture(path)
    message = str(caught.value)
    assert f"{path}.partial is there" in message and "never closed" in message
    assert f"opreplay-check {path}.partial --recover {path}" in message


def test_a_directory_a_pipe_and_a_socket_are_not_found_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _all_refuse(tmp_path, CaptureNotFound, "is a directory; expected a capture file")
    os.mkfifo(tmp_path / "pipe")
    _all_refuse(tmp_path / "pipe", CaptureNotFound, "is not a regular file")
    _all_refuse("/dev/null", CaptureNotFound, "is not a regular file")
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir(tmp_path)
        listening.bind("socket")  # a socket's address has room for short paths only
        _all_refuse(tmp_path / "socket", CaptureNotFound, "socket: ")


def test_a_file_below_a_file_and_names_that_cannot_be_are_not_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    _all_refuse(tmp_path / "file" / "a.opreplay", CaptureNotFound, "not a directory")
    _all_refuse("a\0b", CaptureNotFound, "null")
    _all_refuse("x" * 5000, CaptureNotFound, "too long")


@pytest.mark.slow
def test_an_unreadable_file_is_not_found(tmp_path: Path) -> None:
    path = tmp_path / "secret.opreplay"
    write_small(path)
    path.chmod(0)
    tmp_path.chmod(0o755)
    code = (
        "import os, errno\nfrom replayfmt.format.reader import open_capture\n"
        "from replayfmt.errors import CaptureNotFound\nos.getuid() or os.setuid(65534)\n"
        f"try: open_capture({str(path)!r})\nexcept CaptureNotFound as e: print(e)"
    )
    for parent in tmp_path.parents:
        if parent.stat().st_mode & 0o005 != 0o005 and os.getuid() == 0 and parent != parent.parent:
            parent.chmod(parent.stat().st_mode | 0o005)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert "secret.opreplay: permission denied; expected a capture file" in result.stdout, result.stderr


def test_an_empty_file_is_no_capture(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    _all_refuse(tmp_path / "empty", InvalidCapture, "empty: the file is empty")


@pytest.mark.parametrize(
    "content",
    [
        b"PK\x03\x04 a zip file" * 20,
        b'{"json": true}',
        b"\x89",
        b"OPREPLAX" + bytes(300),
        bytes(10_000),
        b"OPREPLAY" * 50,
    ],
)
def test_other_files_are_no_captures(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other").write_bytes(content)
    _all_refuse(tmp_path / "other", InvalidCapture, "other: (not an OpReplay capture|the preamble is damaged)")


def test_a_preamble_alone_has_nothing_to_read(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    write_small(path)
    path.write_bytes(path.read_bytes()[:64])
    _all_refuse(path, InvalidCapture, "no whole frame follows the preamble, so nothing can be read")


def test_reserved_bytes_of_the_preamble_must_be_zero(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    write_small(path)
    for place, value in ((12, 128), (16, 128), (40, 1), (55, 1)):
        data = bytearray(path.read_bytes())
        data[place] = value
        data[56:64] = xxh3_64_intdigest(bytes(data[:56])).to_bytes(8, "little")
        (tmp_path / "b.opreplay").write_bytes(data)
        _all_refuse(tmp_path / "b.opreplay", InvalidCapture, "the preamble is not one of version 1")


def test_a_capture_that_is_still_being_written_can_be_read_up_to_the_last_whole_frame(tmp_path: Path) -> None:

    path = tmp_path / "a.opreplay"
    writer = CaptureWriter(path, SESSION)
    records = Records(writer)
    scope = writer.scope(0, "execute")
    for frame in range(3):
        records.add(marker(RecordKind.scope_begin, "execute"), scope=scope, start=frame)
        records.write()
        with open_capture(f"{path}.partial") as reader:
            assert not reader.complete and reader.record_count == frame + 1
            assert "never closed, or is still being written" in reader.incomplete_reason
            assert f"its {frame + 1} records" in reader.incomplete_reason
            assert reader.summary.records == {RecordKind.scope_begin: frame + 1} and reader.summary.ended_ns is None
        with pytest.raises(InvalidCapture, match="still being written"):
            check_capture(f"{path}.partial")
    with open_capture(f"{path}.partial") as early:
        writer.close(1)
        assert len(list(early.records())) == 3  # what was opened stays readable under the new name
    assert read_all(path)[0]


@pytest.mark.slow
def test_opening_reads_only_a_little_of_a_large_capture(tmp_path: Path) -> None:
    """Not timed: the bytes that opening and one record touch are counted instead."""
    path = tmp_path / "a.opreplay"
    write_small(path, frames=300)
    read = []
    original = os.pread

    def counting(fd: int, length: int, offset: int) -> bytes:
        read.append(length)
        return original(fd, length, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", counting)
        reader = open_capture(path)
        opened = len(read)
        assert opened <= 10 and sum(read) < path.stat().st_size / 3
        reader.record(301)
        assert len(read) == opened + 2  # a header and a body
        reader.record(300)
        assert len(read) == opened + 2
