"""The file digest: what FORMAT.md defines, whatever the number of threads, and never of a file that changes."""

from __future__ import annotations

import os
import threading
import tracemalloc
from pathlib import Path

import pytest
from xxhash import xxh3_128, xxh3_128_digest

from replayfmt.errors import ExternalFileProblem
from replayfmt.format import external_files
from replayfmt.format.external_files import CHUNK_BYTES, digest_file


def _defined(data: bytes, chunk_bytes: int) -> str:
    """The definition, word for word."""
    chunks = [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]
    return xxh3_128(b"".join(xxh3_128_digest(chunk) for chunk in chunks)).hexdigest()


@pytest.mark.parametrize("length", [0, 1, 999, 1000, 1001, 5000, 5321])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_digest_is_that_of_the_chunks_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, threads: int
) -> None:
    monkeypatch.setattr(external_files, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(external_files, "_BUFFER_BYTES", 300)
    monkeypatch.setattr(external_files, "_MOST_THREADS", threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    data = os.urandom(length)
    (tmp_path / "file").write_bytes(data)
    seen: list[int] = []
    assert digest_file(tmp_path / "file", seen.append) == _defined(data, 1000)
    assert sum(seen) == length


def test_a_known_file_has_the_digest_it_always_had(tmp_path: Path) -> None:
    """Digests are stored in captures: they must never change."""
    (tmp_path / "file").write_bytes(b"OpReplay" * 1000)
    assert digest_file(tmp_path / "file") == "55ebd34cda138238d585f82d11679e8f"


def test_a_file_of_several_chunks_is_read_with_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(2 * CHUNK_BYTES + 5)
    tracemalloc.start()
    try:
        digest = digest_file(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    zeros = xxh3_128_digest(bytes(CHUNK_BYTES))
    assert digest == xxh3_128(zeros + zeros + xxh3_128_digest(bytes(5))).hexdigest()
    assert peak < CHUNK_BYTES


def test_a_descriptor_stays_open_and_keeps_its_position(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abcdef")
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        assert os.read(fd, 2) == b"ab"
        assert digest_file(fd) == digest_file(tmp_path / "file")
        assert os.read(fd, 2) == b"cd"
    finally:
        os.close(fd)


def test_what_is_no_readable_file_has_no_digest(tmp_path: Path) -> None:
    for path, match in ((tmp_path / "missing", "No such file"), (tmp_path, "not a regular file"), ("a\0b", "null")):
        with pytest.raises(ExternalFileProblem, match=match):
            digest_file(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ExternalFileProblem, match="not a regular file"):
        digest_file(tmp_path / "pipe")


def test_a_file_that_changes_while_it_is_read_has_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_files, "_BUFFER_BYTES", 10)
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    with pytest.raises(ExternalFileProblem, match="changed while it was read"):
        digest_file(path, lambda _count: os.utime(path, ns=(0, 5)))
    with pytest.raises(ExternalFileProblem, match="became shorter while it was read: it ends at 0xa"):
        digest_file(path, lambda _count: os.truncate(path, 10))


def test_a_failure_in_one_chunk_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_files, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(external_files, "_BUFFER_BYTES", 10)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2)), raising=False)
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))

    def fail(_count: int) -> None:
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        digest_file(path, fail)
    assert set(threading.enumerate()) <= before
