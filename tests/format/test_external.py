"""External files: each way in which a file can be another one than the captured, provoked with real files."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from replayfmt.errors import ExternalFileProblem
from replayfmt.format import external_files as external
from replayfmt.format.external_files import OpenedFile, digest_file, validate
from replayfmt.format.model import ExternalFile, FileIdentity

CONTENT = bytes(range(256)) * 64


@pytest.fixture()
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(CONTENT)
    return path


def _captured(path: Path, identity: bool = True, digest: bool = False) -> ExternalFile:
    status = path.stat()
    return ExternalFile(
        str(path),
        status.st_size,
        FileIdentity(status.st_dev, status.st_ino, status.st_mtime_ns) if identity else None,
        digest_file(path) if digest else None,
    )


def _both(path: Path) -> tuple[ExternalFile, ExternalFile]:
    return _captured(path), _captured(path, digest=True)


def test_the_captured_file_is_accepted(path: Path) -> None:
    for file in (*_both(path), _captured(path, identity=False, digest=True)):
        assert validate(file, str(path), False) is None


def test_a_missing_file_names_the_flag(path: Path) -> None:
    file = _captured(path)
    path.unlink()
    assert validate(file, str(path), False) == (
        f"external file {path} does not exist; --replay-file-remap=CAPTURED=REPLAY says where it is now"
    )
    assert "does not exist (captured as " in str(validate(file, str(path) + "2", True))
    assert "a part of the path is not a directory" in str(validate(file, __file__ + "/x", True))


def test_a_moved_file_is_the_same_one(path: Path) -> None:
    files = _both(path)
    moved = path.with_name("moved")
    path.rename(moved)
    for file in files:
        assert validate(file, str(moved), True) is None


def test_a_copy_fails_identity_and_passes_digest(path: Path) -> None:
    by_identity, by_digest = _both(path)
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    problem = str(validate(by_identity, str(copy), True))
    assert f"{copy} (captured as {path}) is not known to be the captured one: its inode differs" in problem
    assert "recapture with digests" in problem and "opreplay-check --add-digests" in problem
    assert validate(by_digest, str(copy), True) is None


def test_a_touched_file_fails_identity_and_passes_digest(path: Path) -> None:
    by_identity, by_digest = _both(path)
    os.utime(path, ns=(0, 7))
    assert "its time of last modification differs" in str(validate(by_identity, str(path), False))
    assert validate(by_digest, str(path), False) is None


def test_one_changed_byte_of_the_same_length_fails_both(path: Path) -> None:
    by_identity, by_digest = _both(path)
    data = bytearray(CONTENT)
    data[777] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(0, 7))  # where the clock of the file system has not ticked meanwhile, too
    assert "its time of last modification differs" in str(validate(by_identity, str(path), False))
    problem = str(validate(by_digest, str(path), False))
    assert f"has other content than the captured one: its digest is {digest_file(path)}, expected" in problem


@pytest.fixture()
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are remembered although the files of a test are as young as they are."""
    monkeypatch.setattr(external, "_TICK_NS", -(1 << 62))


def _until_the_clock_ticks(path: Path, since: os.stat_result) -> None:
    """Touch the file until its change time is another one than before, with the time of modification it had."""
    while path.stat().st_ctime_ns == since.st_ctime_ns:
        os.utime(path, ns=(since.st_atime_ns, since.st_mtime_ns))


@pytest.mark.usefixtures("remembered")
def test_one_changed_byte_is_found_by_digest_though_the_time_was_set_back(path: Path) -> None:
    _by_identity, by_digest = _both(path)
    assert validate(by_digest, str(path), False) is None  # its digest is remembered now
    status = path.stat()
    with path.open("r+b") as file:
        file.write(b"\xff")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    _until_the_clock_ticks(path, status)
    assert "has other content" in str(validate(by_digest, str(path), False))


def test_one_changed_byte_is_found_by_digest_though_no_time_shows_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the file system stands still."""
    by_digest, status, now = _captured(path, digest=True), external._status, time.time_ns()
    monkeypatch.setattr(external, "_status", lambda fd: (*status(fd)[:3], now, now))
    assert validate(by_digest, str(path), False) is None
    with path.open("r+b") as file:
        file.write(b"\xff")
    assert "has other content" in str(validate(by_digest, str(path), False))


def test_a_truncated_file_says_both_lengths(path: Path) -> None:
    files = _both(path)
    os.truncate(path, 100)
    for file in files:
        assert "has 100 bytes, the captured one had 16384" in str(validate(file, str(path), False))


def test_a_file_without_anything_to_tell_it_by_is_refused(path: Path) -> None:
    problem = str(validate(_captured(path, identity=False), str(path), False))
    assert "neither its identity nor its digest" in problem and "--file-validation=digest" in problem


def test_symbolic_links_are_followed_and_circles_refused(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    for file in _both(path):
        assert validate(file, str(link), True) is None
    link.unlink()
    link.symlink_to(link)
    assert "symbolic links lead in a circle" in str(validate(_captured(path), str(link), True))


def test_relative_paths_are_relative_to_the_working_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    assert validate(_captured(path), path.name, False) is None
    monkeypatch.chdir("/")
    assert "does not exist" in str(validate(_captured(path), path.name, False))


def test_what_is_no_regular_file_is_refused(path: Path, tmp_path: Path) -> None:
    file = _captured(path)
    os.mkfifo(tmp_path / "pipe")
    assert "is a directory; expected a file" in str(validate(file, str(tmp_path), True))
    assert "is not a regular file" in str(validate(file, str(tmp_path / "pipe"), True))
    assert "is not a regular file" in str(validate(file, "/dev/null", True))
    assert "cannot be opened" in str(validate(file, "a\0b", True))


def test_what_is_no_regular_file_is_not_even_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening some devices does something."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(external.os, "open", None)
    for path in ("/dev/null", tmp_path, tmp_path / "pipe"):
        with pytest.raises(ExternalFileProblem, match="expected a file"):
            OpenedFile(str(path))


def test_permission_denied_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _captured(path)
    path.chmod(0)
    if os.access(path, os.R_OK):  # root may read anything, so the system's refusal is made up

        def refuse(name: object, *_flags: object) -> int:
            raise PermissionError(13, "Permission denied", name)

        monkeypatch.setattr(external.os, "open", refuse)
    assert "cannot be read: permission denied" in str(validate(file, str(path), False))


@pytest.mark.usefixtures("remembered")
def test_a_digest_is_read_once_for_a_file_that_stays_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _captured(path, digest=True)
    read: list[int] = []
    assert validate(file, str(path), False, read.append) is None
    assert sum(read) == len(CONTENT)
    monkeypatch.setattr(external, "digest_file", None)
    assert validate(file, str(path), False) is None
    status, link = path.stat(), path.with_name("hard link")
    os.link(path, link)  # which changes the inode's change time: read again, to be sure
    _until_the_clock_ticks(link, status)
    with pytest.raises(TypeError):
        validate(file, str(link), False)


@pytest.mark.guarantee("file-identity")
def test_a_file_replaced_after_it_was_opened_is_noticed_and_not_mapped(path: Path) -> None:
    with OpenedFile(str(path)) as opened:
        assert opened.changed() is None
        other = path.with_name("other")
        other.write_bytes(bytes(len(CONTENT)))
        os.replace(other, path)
        assert "was replaced by another one after it was validated" in str(opened.changed())
        assert bytes(opened.map(0, len(CONTENT))) == CONTENT
        path.unlink()
        assert "does not exist; it was there when it was validated" in str(opened.changed())


def test_a_file_changed_in_place_after_it_was_opened_is_noticed(path: Path) -> None:
    with OpenedFile(str(path)) as opened:
        with path.open("r+b") as file:
            file.write(b"new")
        os.utime(path, ns=(1, 1))
        assert "was changed after it was validated" in str(opened.changed())


@pytest.mark.parametrize(("offset", "length"), [(0, 10), (4095, 2), (5000, 6000), (16383, 1), (0, 16384), (16384, 0)])
def test_maps_are_exactly_the_bytes_asked_for(path: Path, offset: int, length: int) -> None:
    with OpenedFile(str(path)) as opened:
        read, private = opened.map(offset, length), opened.map(offset, length, copy_on_write=True)
        buffer = bytearray(length)
        opened.read_into(offset, buffer)
    assert bytes(read) == bytes(private) == bytes(buffer) == CONTENT[offset : offset + length]  # after it was closed
    if length:
        assert read.readonly and not private.readonly
        private[0] ^= 0xFF
    assert path.read_bytes() == CONTENT


def test_bytes_that_the_file_does_not_have_are_refused(path: Path) -> None:
    with OpenedFile(str(path)) as opened:
        for offset, length in ((0, 16385), (16384, 1), (1 << 60, 1), (-1, 5), (5, -1)):
            with pytest.raises(ExternalFileProblem, match="has no"):
                opened.map(offset, length)
        with pytest.raises(ExternalFileProblem, match="ends at 16384; expected 20 bytes at 16380"):
            opened.read_into(16380, bytearray(20))


def test_a_file_that_is_edited_after_it_was_validated_is_noticed_though_its_time_was_set_back(path: Path) -> None:
    with OpenedFile(str(path)) as opened:
        assert opened.problem(_captured(path, identity=True), False) is None and opened.changed() is None
        status = path.stat()
        with path.open("r+b") as file:
            file.write(b"\xff")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        _until_the_clock_ticks(path, status)
        assert "was changed after it was validated" in str(opened.changed())
