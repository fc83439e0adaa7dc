"""opreplay-check --add-digests: the same capture with digests, or nothing at all and the reason."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from in_process import Tool

from replayfmt.format.codes import DType, Layout, RecordKind, StorageOrigin
from replayfmt.format.external_files import digest_file, validate
from replayfmt.format.model import Device, ExternalFile, FileIdentity, FileRange, TensorMeta
from replayfmt.format.reader import open_capture
from replayfmt.format.writer import CaptureWriter

from .reading import read_all
from .reseal import change, split
from .samples import IMPORT, IMPORT_RANGE, SESSION, Records, marker, write_small

CONTENT = np.random.default_rng(3).random(3000).tobytes()


def _identity(path: Path) -> FileIdentity:
    status = path.stat()
    return FileIdentity(status.st_dev, status.st_ino, status.st_mtime_ns)


def _write(path: Path, *files: ExternalFile, embedded: ExternalFile | None = None) -> None:
    """A capture with a storage for each file, in a frame of its own, and payloads between them."""
    writer = CaptureWriter(path, SESSION)
    cpu = writer.device(Device("cpu"))
    writer.meta(TensorMeta(DType.float32, Layout.strided, cpu, (2, 3), (3, 1)))
    records = Records(writer)
    if embedded is not None:
        number = writer.payload(CONTENT)
        files = (*files, ExternalFile(embedded.path, len(CONTENT), embedded.identity, payload=number))
    for place, file in enumerate(files):
        payload = writer.payload(CONTENT[place:])  # large: it lies in a frame of its own
        small = writer.payload(bytes([place] * 40))
        number = writer.range(FileRange(writer.file(file), place, 100))
        storage = records.storage(100, cpu, StorageOrigin.external_file, number)
        inside = records.storage(len(CONTENT) - place, cpu, StorageOrigin.payload, payload)
        records.add(marker(RecordKind.scope_begin, f"file {place}"), scope=writer.scope(0, f"file {place}"))
        records.add(IMPORT_RANGE, ints=(storage, number, 0))
        records.add(IMPORT, ints=(inside, payload, 0))
        records.add(IMPORT, ints=(inside, small, 1))
        records.write()
    writer.close(1)


@pytest.fixture()
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture()
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.bin"
    path.write_bytes(CONTENT[::-1])
    return path


def _file(path: Path, digest: bool = False) -> ExternalFile:
    return ExternalFile(str(path), path.stat().st_size, _identity(path), digest_file(path) if digest else None)


def test_every_file_gets_its_digest_and_nothing_else_changes(
    run: Tool, tmp_path: Path, weights: Path, tokens: Path
) -> None:
    path, out = tmp_path / "in.opreplay", tmp_path / "out.opreplay"
    _write(path, _file(weights), _file(tokens, digest=True), embedded=_file(tokens))
    ran = run("--add-digests", path, out)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines()[-1] == "valid; digests of 2 external files added, 1 had one"
    with open_capture(out) as reader:
        assert [file.digest for file in reader.files[1:]] == [
            digest_file(weights),
            digest_file(tokens),
            digest_file(weights),
        ]
        assert [file.identity for file in reader.files[1:]] == [
            _identity(weights),
            _identity(tokens),
            _identity(tokens),
        ]
        for info in reader.payloads:
            assert info.offset % 64 == 0 and len(reader.payload(info.id)) == info.raw_bytes
    before, after = read_all(path), read_all(out)
    before[2].pop("files"), after[2].pop("files")
    assert after == before
    assert run(out).code == 0


def test_afterwards_a_copy_of_the_file_is_accepted(run: Tool, tmp_path: Path, weights: Path) -> None:
    path, out, copy = tmp_path / "in.opreplay", tmp_path / "out.opreplay", tmp_path / "copy.bin"
    _write(path, _file(weights))
    shutil.copy(weights, copy)
    with open_capture(path) as reader:
        assert "add them where the captured file still is" in str(validate(reader.files[1], str(copy), True))
    assert run("--add-digests", path, out).code == 0
    with open_capture(out) as reader:
        assert validate(reader.files[1], str(copy), True) is None


def test_files_are_looked_for_where_a_remap_says(run: Tool, tmp_path: Path, weights: Path) -> None:
    path, out, place = tmp_path / "in.opreplay", tmp_path / "out.opreplay", tmp_path / "elsewhere"
    place.mkdir()
    _write(path, _file(weights))
    weights.rename(place / "weights.bin")
    ran = run("--add-digests", path, out)
    assert ran.code == 1 and "does not exist" in ran.err and "--replay-file-remap" in ran.err
    assert run("--add-digests", f"--replay-file-remap={tmp_path}={place}", path, out).code == 0
    ran = run("--add-digests", f"--replay-file-remap={tmp_path}={place}", "--replay-file-remap=/x=/y", path, out)
    assert ran.code == 2 and "matches no external file" in ran.err


@pytest.mark.guarantee("dump-files")
def test_nothing_is_written_where_a_file_is_not_the_captured_one(
    run: Tool, tmp_path: Path, weights: Path, tokens: Path
) -> None:
    path, out = tmp_path / "in.opreplay", tmp_path / "out.opreplay"
    _write(path, _file(weights), _file(tokens), ExternalFile("unknown.bin", 3000))
    os.utime(weights, ns=(0, 0))
    tokens.unlink()
    before = sorted(tmp_path.iterdir())
    ran = run("--add-digests", path, out)
    assert ran.code == 1 and ran.err.startswith("FAILED_PRECONDITION: ") and len(ran.err.splitlines()) == 1
    for part in (
        "no digests were added",
        "weights.bin is not known to be the captured one",
        "tokens.bin does not exist",
        "unknown.bin does not exist",
    ):
        assert part in ran.err
    assert sorted(tmp_path.iterdir()) == before


def test_a_digest_that_does_not_match_any_more_is_refused(run: Tool, tmp_path: Path, weights: Path) -> None:
    path = tmp_path / "in.opreplay"
    _write(path, _file(weights, digest=True))
    weights.write_bytes(CONTENT[::-1])
    ran = run("--add-digests", path, tmp_path / "out.opreplay")
    assert ran.code == 1 and "has other content than the captured one" in ran.err


def test_an_output_that_is_there_is_kept_without_force(run: Tool, tmp_path: Path, weights: Path) -> None:
    path, out = tmp_path / "in.opreplay", tmp_path / "out.opreplay"
    _write(path, _file(weights))
    out.write_bytes(b"mine")
    ran = run("--add-digests", path, out)
    assert ran.code == 1 and "--force" in ran.err and out.read_bytes() == b"mine"
    assert run("--add-digests", "--force", path, out).code == 0
    ran = run("--add-digests", "--force", path, path)
    assert ran.code == 2 and "onto itself" in ran.err and run(path).code == 0


def test_what_cannot_be_given_digests_is_refused(run: Tool, tmp_path: Path, weights: Path) -> None:
    out, small = tmp_path / "out.opreplay", tmp_path / "small.opreplay"
    write_small(small)
    ran = run("--add-digests", small, out)
    assert ran.code == 1 and "names no external file" in ran.err
    assert run("--add-digests", tmp_path / "missing", out).code == 3
    damaged = tmp_path / "damaged.opreplay"
    _write(damaged, _file(weights))
    data = bytearray(damaged.read_bytes())
    data[open_capture(damaged).payload_info(1).offset + 9] ^= 1
    damaged.write_bytes(data)
    ran = run("--add-digests", damaged, out)
    assert ran.code == 3 and "content is damaged" in ran.err
    assert not out.exists()


def test_an_incomplete_capture_is_recovered_first(run: Tool, tmp_path: Path, weights: Path) -> None:
    path, out = tmp_path / "in.opreplay", tmp_path / "out.opreplay"
    _write(path, _file(weights))
    path.write_bytes(path.read_bytes()[:-100])
    ran = run("--add-digests", path, out)
    assert ran.code == 3 and "--recover" in ran.err and not out.exists()


def test_a_capture_without_a_summary_is_copied_without_one(run: Tool, tmp_path: Path, weights: Path) -> None:
    path, out = tmp_path / "in.opreplay", tmp_path / "out.opreplay"
    _write(path, _file(weights))
    change(path, 5, lambda frame: None)
    assert run("--add-digests", path, out).code == 0
    assert [frame.header.kind for frame in split(out.read_bytes())[1]] == [
        frame.header.kind for frame in split(path.read_bytes())[1]
    ]


def test_paths_in_a_capture_cannot_steer_the_terminal(run: Tool, tmp_path: Path) -> None:
    path = tmp_path / "in.opreplay"
    _write(path, ExternalFile("/x\x1b[31m\nvalid", 3000))
    ran = run("--add-digests", path, tmp_path / "out.opreplay")
    assert ran.code == 1 and "\x1b" not in ran.err and len(ran.err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--add-digests", "a"],
        ["a", "b"],
        ["--replay-file-remap=/a=/b", "a"],
        ["--add-digests", "a", "b", "--recover", "c"],
    ],
)
def test_wrong_combinations_exit_with_2(run: Tool, arguments: list[str]) -> None:
    ran = run(*arguments)
    assert (ran.code, ran.out) == (2, "")
