"""Result files: read back as written, in all three layouts, mapped, and refused with the place where they are wrong."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayfmt.errors import CaptureNotFound, InvalidRecording, OutputExists, UsageError
from replayfmt.probes.recordings import (
    BLOCK_SCHED,
    DMAT,
    HEADER,
    LaunchShape,
    ProbeRecording,
    RecordLayout,
    write_recording,
)

from .synthetic import block_records, shape_of, sweep_records, waves


def written(path: Path, threads: int = 64, artifact: bool = False) -> Path:
    blocks = waves(sms=2, slots=1, rounds=2, elapsed=100, gap=5)
    records = block_records(blocks, warps=-(-threads // 32), warp_lag=1)
    write_recording(path, shape_of(4, threads, 48), [records], artifact=artifact, force=True)
    return path


@pytest.mark.parametrize("artifact", [False, True])
@pytest.mark.parametrize("threads", [1, 32, 33, 64, 1024])
def test_records_are_read_back_as_they_were_written(tmp_path: Path, threads: int, artifact: bool) -> None:
    recording = ProbeRecording.open(written(tmp_path / "1.5.bin", threads, artifact))
    assert recording.launch == shape_of(4, threads, 48) and len(recording.sections) == 1
    records = recording.sections[0].records(BLOCK_SCHED)
    assert records.shape == (4, -(-threads // 32), 1)
    assert (records == block_records(waves(2, 1, 2, elapsed=100, gap=5), warps=-(-threads // 32), warp_lag=1)).all()


def test_a_file_has_the_bytes_that_the_format_says(tmp_path: Path) -> None:
    records = block_records([(7, 0x1122334455667788, 300)])
    write_recording(tmp_path / "a.bin", LaunchShape((1, 1, 1), (32, 1, 1), 16), [records])
    head = struct.pack("<8I", 1, 1, 1, 32, 1, 1, 16, 1)
    record = struct.pack("<QII", 0x1122334455667788, 300, 7)
    assert (tmp_path / "a.bin").read_bytes() == head + struct.pack("<IIQ", 16, 32, 48) + record
    write_recording(tmp_path / "b.bin", LaunchShape((1, 1, 1), (32, 1, 1), 16), [records], artifact=True)
    assert (tmp_path / "b.bin").read_bytes() == head + struct.pack("<QQ", 16, 48) + record


def test_several_probes_have_a_section_each_by_warp_and_by_thread(tmp_path: Path) -> None:
    schedule = block_records([(0, 10, 5), (1, 20, 5)], warps=2)
    accesses = np.zeros((2, 40, 3), DMAT.dtype)
    accesses["address"] = np.arange(240).reshape(2, 40, 3)
    for artifact in (False, True):
        write_recording(tmp_path / "two.bin", shape_of(2, 40), [schedule, accesses], artifact=artifact, force=True)
        first, second = ProbeRecording.open(tmp_path / "two.bin").sections
        assert (first.records(BLOCK_SCHED) == schedule).all() and (second.records(DMAT) == accesses).all()
        with pytest.raises(InvalidRecording, match="rows of 48 bytes; these are the records of another probe"):
            second.records(BLOCK_SCHED)
    with pytest.raises(UsageError, match="has 2 sections, from 0; there is no section 2"):
        ProbeRecording.open(tmp_path / "two.bin").section(2)


@pytest.mark.parametrize(("rows", "expected"), [(2, (3, 2, 1)), (64, (3, 64, 1))])
def test_sections_with_their_whole_size_are_those_of_warps_or_threads(
    tmp_path: Path, rows: int, expected: tuple[int, ...]
) -> None:
    head = struct.pack("<8IQQ", 3, 1, 1, 64, 1, 1, 0, 1, 3 * rows * 16, 48)
    (tmp_path / "a.bin").write_bytes(head + bytes(3 * rows * 16))
    (section,) = ProbeRecording.open(tmp_path / "a.bin").sections
    assert section.records(BLOCK_SCHED).shape == expected
    if rows == 64:
        assert section.records(DMAT).shape == (3, 64, 1)
    else:
        with pytest.raises(InvalidRecording, match="block_sched|dmat"):
            section.records(DMAT)


def test_a_blocks_number_has_x_changing_fastest() -> None:
    shape = LaunchShape((3, 4, 5), (1, 1, 1))
    assert [shape.position(number) for number in (0, 2, 3, 12, 59)] == [
        (0, 0, 0), (2, 0, 0), (0, 1, 0), (0, 0, 1), (2, 3, 4),
    ]  # fmt: skip


# Byte, its new 32-bit values, what the error says.
WRONG = {
    "zero blocks": (0, [0], "at byte 0: expected a grid x of at least 1, got 0"),
    "a zero block": (20, [0], "at byte 20: expected a block z of at least 1, got 0"),
    "too many threads": (12, [2048], "at byte 12: expected a block of at most 1024 threads, got 2048"),
    "no probe": (28, [0], "at byte 28: expected a number of probes of at least 1, got 0"),
    "more probes than bytes": (28, [0xFFFFFFFF], "at byte 28: expected at most 9 probes in 176 bytes, got 4294967295"),
    "a grid that overflows": (0, [0xFFFFFFFF] * 3, "at byte 32: expected section 0 to hold"),
    "an unknown divisor": (36, [7], "at byte 36: expected a divisor of 1 (by thread), 32 or 64 (by warp), got 7"),
    "rows of no bytes": (32, [0], "at byte 32: expected section 0 to hold 4 blocks × 2 rows × 0 bytes"),
    "a size that overflows": (32, [0xFFFFFFFF], "at byte 32: expected section 0 to hold"),
    "an offset outside": (40, [0, 1], "at byte 40: expected the offset of section 0 to be 48, got 4294967296"),
    "an offset in the header": (40, [16], "at byte 40: expected the offset of section 0 to be 48, got 16"),
    "another size, as the artifact has it": (32, [15, 0], "at byte 32: expected section 0 to hold 15 bytes for each"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_number_is_one_error_that_says_where(tmp_path: Path, what: str) -> None:
    path = written(tmp_path / "a.bin")
    place, numbers, message = WRONG[what]
    content = bytearray(path.read_bytes())
    struct.pack_into(f"<{len(numbers)}I", content, place, *numbers)
    path.write_bytes(content)
    with pytest.raises(InvalidRecording) as raised:
        ProbeRecording.open(path)
    assert str(raised.value).startswith(f"{path}: {message}") and "\n" not in str(raised.value)


def test_overlapping_and_backward_sections_are_refused(tmp_path: Path) -> None:
    records = block_records([(0, 10, 5)])
    write_recording(tmp_path / "a.bin", shape_of(1), [records, records])
    content = bytearray((tmp_path / "a.bin").read_bytes())
    for offset in (48, 64, 79, 10_000):
        struct.pack_into("<Q", content, 56, offset)
        (tmp_path / "b.bin").write_bytes(content)
        with pytest.raises(InvalidRecording):
            ProbeRecording.open(tmp_path / "b.bin")


@pytest.mark.parametrize("artifact", [False, True])
def test_a_file_cut_anywhere_or_with_bytes_to_spare_is_refused(tmp_path: Path, artifact: bool) -> None:
    content = written(tmp_path / "a.bin", artifact=artifact).read_bytes()
    for length in range(len(content)):
        (tmp_path / "b.bin").write_bytes(content[:length])
        with pytest.raises(InvalidRecording, match=r"b\.bin: at byte \d+: expected .*, got "):
            recording = ProbeRecording.open(tmp_path / "b.bin")
            recording.sections[0].records(BLOCK_SCHED)
    (tmp_path / "b.bin").write_bytes(content + b"\0")
    with pytest.raises(InvalidRecording):
        ProbeRecording.open(tmp_path / "b.bin")


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_a_recording_or_one_error(content: bytes, begins_well: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.bin")
        path.write_bytes((HEADER.pack(2, 1, 1, 32, 1, 1, 0, 1) if begins_well else b"") + content)
        try:
            for section in ProbeRecording.open(path).sections:
                assert section.records(BLOCK_SCHED).nbytes <= len(content)
        except InvalidRecording as error:
            assert "at byte" in str(error)


@pytest.mark.slow
@pytest.mark.guarantee("recording-bounds")
@given(st.data())
def test_a_recording_with_any_bytes_of_its_head_changed_is_a_recording_or_one_error(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder, "a.bin"), artifact=data.draw(st.booleans()))
        content = bytearray(path.read_bytes())
        for place in data.draw(st.lists(st.integers(0, 47), min_size=1, max_size=4)):
            content[place] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
        try:
            records = ProbeRecording.open(path).sections[0].records(BLOCK_SCHED)
            assert records.nbytes == len(content) - 48
            records["sm"].sum()
        except InvalidRecording as error:
            assert "at byte" in str(error)


def test_what_is_no_file_is_not_found(tmp_path: Path) -> None:
    for path in (tmp_path / "none.bin", tmp_path):
        with pytest.raises(CaptureNotFound):
            ProbeRecording.open(path)


@pytest.mark.guarantee("recording-memory")
def test_records_are_mapped_not_read(tmp_path: Path) -> None:
    """A file of 64 GiB that is mostly holes is opened, and its last record read, at once."""
    layout = RecordLayout("wide", np.dtype([("value", "<u8")]), "thread", single=False)
    count = 1 << 26
    with open(tmp_path / "a.bin", "wb") as file:
        file.write(struct.pack("<8IIIQ", 128, 1, 1, 1, 1, 1, 0, 1, 8 * count, 1, 48))
        file.truncate(48 + 128 * 8 * count)
        file.seek(-8, 2)
        file.write(struct.pack("<Q", 77))
    records = ProbeRecording.open(tmp_path / "a.bin").sections[0].records(layout)
    assert records.shape == (128, 1, count) and records["value"][-1, 0, -1] == 77


def test_a_recording_is_written_whole_or_not_at_all_and_replaced_only_with_force(tmp_path: Path) -> None:
    path = written(tmp_path / "a.bin")
    before = path.read_bytes()
    with pytest.raises(OutputExists):
        write_recording(path, shape_of(1), [block_records([(0, 1, 1)])])
    with pytest.raises(UsageError, match=r"section 0: expected the shape \(2, 32 or 1, records of a row\), got"):
        write_recording(tmp_path / "b.bin", shape_of(2), [block_records([(0, 1, 1)])])
    assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["a.bin"]


def test_the_records_of_a_thread_are_as_many_as_fit(tmp_path: Path) -> None:
    records = sweep_records(pages=5, sweeps=2, step=3)
    write_recording(tmp_path / "a.bin", shape_of(1, threads=1), [records], artifact=True)
    assert (ProbeRecording.open(tmp_path / "a.bin").sections[0].records(DMAT) == records).all()
