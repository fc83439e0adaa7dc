"""Captures that are cut off or damaged by accident: refused or read as far as they are whole, never misread."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from replayfmt.errors import InvalidCapture, OpReplayError
from replayfmt.format.codes import FrameKind
from replayfmt.format.frames import HEADER_BYTES, PREAMBLE_BYTES, TRAILER_BYTES
from replayfmt.format.maintenance import check_capture, recover_capture
from replayfmt.format.reader import open_capture

from .reading import read_all
from .samples import write_everything, write_small


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "small.opreplay"
    write_small(path, frames=2)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.opreplay"
    write_small(path, frames=1)
    return path


def _cuts(data: bytes, folder: Path) -> Iterator[tuple[int, Path]]:
    """A file that gets shorter byte by byte, and its length."""
    path = folder / "cut.opreplay"
    path.write_bytes(data)
    for length in range(len(data) - 1, -1, -1):
        os.truncate(path, length)
        yield length, path


@pytest.mark.sweep
@pytest.mark.guarantee("damage")
def test_every_truncation_is_refused_or_read_as_an_incomplete_prefix(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    _complete, records, _rest = read_all(small)
    lengths = []
    for length, cut in _cuts(data, tmp_path):
        try:
            complete, some, _rest = read_all(cut)
        except OpReplayError as error:
            assert str(cut) in str(error) and length < 800
            continue
        assert not complete
        assert some == records[: len(some)]
        lengths.append(len(some))
    # Shorter pieces never hold more, and every frame's end is reached.
    assert lengths == sorted(lengths, reverse=True) and set(lengths) == {0, 2, 4}


@pytest.mark.sweep
def test_every_truncation_is_a_finding_of_the_check(tiny: Path, tmp_path: Path) -> None:
    for _length, cut in _cuts(tiny.read_bytes(), tmp_path):
        with pytest.raises(InvalidCapture):
            check_capture(cut)


@pytest.mark.slow
def test_what_truncation_leaves_is_recovered_and_valid(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    _complete, records, _rest = read_all(small)
    cut, out = tmp_path / "cut.opreplay", tmp_path / "out.opreplay"
    recovered = set()
    for length in [*range(0, len(data), 37), len(data) - 1]:
        cut.write_bytes(data[:length])
        try:
            before = read_all(cut)[1]
        except OpReplayError:
            with pytest.raises(OpReplayError):
                recover_capture(cut, out)
            assert not out.exists() and not list(tmp_path.glob("*.partial"))
            continue
        _report, left = recover_capture(cut, out, force=True)
        assert left
        check_capture(out)
        complete, some, rest = read_all(out)
        assert complete and some == before == records[: len(some)] and "recovered=True" in rest["summary"]
        recovered.add(len(some))
    assert recovered == {0, 2, 4}


def _flips(data: bytes, folder: Path, seed: int) -> Iterator[tuple[int, Path]]:
    """A file with one bit of each byte flipped in turn, and which byte."""
    chosen = random.Random(seed)
    path = folder / "flipped.opreplay"
    path.write_bytes(data)
    with path.open("r+b", buffering=0) as file:
        for position, byte in enumerate(data):
            os.pwrite(file.fileno(), bytes([byte ^ 1 << chosen.randrange(8)]), position)
            yield position, path
            os.pwrite(file.fileno(), bytes([byte]), position)


@pytest.mark.sweep
@pytest.mark.guarantee("damage")
def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing(tiny: Path, tmp_path: Path) -> None:
    data = tiny.read_bytes()
    _complete, records, rest = read_all(tiny)
    refused = 0
    for position, path in _flips(data, tmp_path, 1):
        try:
            complete, some, others = read_all(path)
        except OpReplayError:
            refused += 1
            continue
        assert some == records[: len(some)], f"byte {position:#x} was misread"
        if complete:
            assert (some, others) == (records, rest), f"byte {position:#x} was misread"
    assert refused > len(data) // 3


@pytest.mark.sweep
def test_a_flipped_bit_anywhere_is_a_finding_of_the_check(tiny: Path, tmp_path: Path) -> None:
    for position, path in _flips(tiny.read_bytes(), tmp_path, 2):
        try:
            check_capture(path)
        except InvalidCapture:
            continue
        pytest.fail(f"the flipped bit in byte {position:#x} was not found")


def test_a_flipped_version_bit_does_not_look_like_a_newer_file(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "flipped.opreplay"
    for bit in range(32):
        data = bytearray(small.read_bytes())
        data[8 + bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(InvalidCapture, match="the preamble is damaged") as caught:
            open_capture(path)
        assert type(caught.value) is InvalidCapture


@pytest.mark.slow
def test_zeros_and_garbage_after_the_end_are_found_and_read_past(small: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "longer.opreplay", tmp_path / "out.opreplay"
    _complete, records, _rest = read_all(small)
    for tail in (bytes(1), bytes(64), bytes(5000), b"garbage" * 99, small.read_bytes()):
        path.write_bytes(small.read_bytes() + tail)
        complete, some, _others = read_all(path)
        assert not complete and some == records
        assert "follow the end of the capture" in open_capture(path).incomplete_reason
        with pytest.raises(InvalidCapture, match="follow the end of the capture"):
            check_capture(path)
        recover_capture(path, out, force=True)
        assert read_all(out)[1] == records


def test_zeros_or_garbage_for_a_tail_that_was_being_written_are_cut_off(tmp_path: Path) -> None:
    open_path, path = tmp_path / "a.opreplay", tmp_path / "torn.opreplay"
    write_small(open_path, frames=3, close=False).abandon()
    data = (tmp_path / "a.opreplay.partial").read_bytes()
    path.write_bytes(data)
    records = read_all(path)[1]
    assert len(records) == 6
    for tail in (bytes(64), bytes(4096), b"\xff" * 500, data[PREAMBLE_BYTES : PREAMBLE_BYTES + 300]):
        path.write_bytes(data + tail)
        complete, some, _rest = read_all(path)
        assert not complete and some == records
        assert "never closed" in open_capture(path).incomplete_reason
    # A last frame whose blocks never reached the disk: there, and zeros.
    path.write_bytes(data[:-64] + bytes(64))
    assert read_all(path)[1] == records[:4]


def _offsets(path: Path) -> dict[str, int]:
    with open_capture(path) as reader:
        offsets = {FrameKind(int(row["kind"])).name: int(row["offset"]) for row in reader.contents.frames}
        return {**offsets, "index": reader.contents.end, "trailer": reader.length - TRAILER_BYTES}


@pytest.mark.parametrize("part", ["index header", "index body", "trailer magic", "trailer", "both"])
def test_a_damaged_index_falls_back_to_walking_and_says_so(small: Path, tmp_path: Path, part: str) -> None:
    places = _offsets(small)
    data = bytearray(small.read_bytes())
    if part in ("index header", "both"):
        data[places["index"] + 8] ^= 1
    if part == "index body":
        data[places["index"] + HEADER_BYTES + 3] ^= 1
    if part == "trailer magic":
        data[places["trailer"]] ^= 1
    if part in ("trailer", "both"):
        data[places["trailer"] + 9] ^= 1
    path = tmp_path / "damaged.opreplay"
    path.write_bytes(data)
    complete, records, rest = read_all(path)
    assert (records, rest) == read_all(small)[1:]
    reader = open_capture(path)
    if part == "both":
        # Nothing says any more that the file was closed.
        assert not complete and "never closed" in reader.incomplete_reason
    else:
        assert complete and len(reader.warnings) == 1
        assert "were read one by one instead" in reader.warnings[0]
    with pytest.raises(InvalidCapture, match="--recover"):
        check_capture(path)
    out = tmp_path / "out.opreplay"
    recover_capture(path, out)
    assert read_all(out)[1] == records


def test_damage_in_a_frame_is_found_when_it_is_read_and_names_the_place(small: Path, tmp_path: Path) -> None:
    offset = open_capture(small).record_frames[1].offset
    data = bytearray(small.read_bytes())
    data[offset + HEADER_BYTES + 40] ^= 4
    path = tmp_path / "damaged.opreplay"
    path.write_bytes(data)
    reader = open_capture(path)
    assert reader.complete and [r.ordinal for r in reader.records(0, 2)] == [0, 1]
    place = rf"damaged.opreplay: frame \d+ \(records 2\.\.3\) at {offset:#x}: the body is damaged"
    with pytest.raises(InvalidCapture, match=place):
        reader.record(2)


def test_a_damaged_payload_is_refused_by_every_way_to_read_it(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    write_everything(path)
    for number in (1, 3, 4):
        data = bytearray(path.read_bytes())
        info = open_capture(path).payload_info(number)
        data[info.offset + info.stored_bytes // 2] ^= 16
        damaged = tmp_path / "damaged.opreplay"
        damaged.write_bytes(data)
        reader = open_capture(damaged)
        for _again in range(2):
            with pytest.raises(InvalidCapture, match=f"payload {number} at {info.offset:#x}"):
                reader.payload(number)
            with pytest.raises(InvalidCapture, match=f"payload {number} at {info.offset:#x}"):
                reader.read_payload_into(number, bytearray(info.raw_bytes))
        with pytest.raises(InvalidCapture, match=f"payload {number} at {info.offset:#x}"):
            check_capture(damaged)


def test_recovery_keeps_what_comes_before_a_damaged_frame_or_payload(tmp_path: Path) -> None:
    path, damaged, out = (tmp_path / f"{name}.opreplay" for name in ("a", "damaged", "out"))
    write_small(path, frames=3)
    records = read_all(path)[1]
    reader = open_capture(path)
    for place in (reader.record_frames[1].offset + 70, reader.payload_info(2).offset):
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        damaged.write_bytes(data)
        _report, left = recover_capture(damaged, out, force=True)
        assert "damaged" in left
        assert read_all(out)[:2] == (True, records[:2])


def test_padding_that_is_not_zero_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    write_everything(path)
    reader = open_capture(path)
    last = reader.payload_info(5)
    data = bytearray(path.read_bytes())
    data[last.offset + last.stored_bytes] = 1
    (tmp_path / "b.opreplay").write_bytes(data)
    with pytest.raises(InvalidCapture, match="padding after the payload is not zero"):
        check_capture(tmp_path / "b.opreplay")
    info = reader.record_frames[0]
    data = bytearray(path.read_bytes())
    data[info.offset + HEADER_BYTES + info.stored_bytes] = 1
    (tmp_path / "b.opreplay").write_bytes(data)
    with pytest.raises(InvalidCapture, match="padding after the body is not zero"):
        open_capture(tmp_path / "b.opreplay").record(0)


def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    write_everything(path)
    reader = open_capture(path)
    large = reader.payload_info(4)
    with path.open("r+b") as file:
        file.truncate(large.offset + 10)
    with pytest.raises(InvalidCapture, match="truncated"):
        reader.payload(4)
    with pytest.raises(InvalidCapture, match="truncated while it was read"):
        reader.read_payload_into(4, bytearray(large.raw_bytes))
    with pytest.raises(InvalidCapture, match="truncated while it was read"):
        reader.record(0)
