"""Access maps: read back as written, a part at a time, and refused with the place where they are wrong."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayfmt.errors import InvalidRecording
from replayfmt.probes import recordings
from replayfmt.probes.recordings import AccessMap

from .synthetic import write_access_map

PAGE = 1 << 16
CLOCKS = [(900, [(0, 3), (2 * PAGE, 1)]), (5, [(PAGE, 7)]), (1 << 40, []), (6, [(2 * PAGE, 1), (0, 1), (PAGE, 9)])]


def rows(path: Path) -> list[tuple[int, int, int]]:
    return [tuple(map(int, row)) for part in AccessMap.open(path).accesses() for row in part]  # type: ignore[misc]


@pytest.mark.parametrize("at_once", [1, 2, 1 << 18])
def test_accesses_are_read_back_in_order_however_many_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(recordings, "_PAIRS_AT_ONCE", at_once)
    write_access_map(tmp_path / "a.dmat", CLOCKS)
    assert rows(tmp_path / "a.dmat") == [(clock, page, count) for clock, pairs in CLOCKS for page, count in pairs]
    assert AccessMap.open(tmp_path / "a.dmat").pages.tolist() == [0, PAGE, 2 * PAGE]


def test_a_map_has_the_bytes_that_the_format_says(tmp_path: Path) -> None:
    write_access_map(tmp_path / "a.dmat", [(9, [(PAGE, 4)])])
    assert (tmp_path / "a.dmat").read_bytes() == struct.pack("<QQQQQQI", 1, 1, PAGE, 9, 1, PAGE, 4)


def test_progress_ends_at_the_end_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "_PAIRS_AT_ONCE", 1)
    write_access_map(tmp_path / "a.dmat", CLOCKS)
    told: list[int] = []
    assert sum(len(part) for part in AccessMap.open(tmp_path / "a.dmat").accesses(told.append)) == 6
    assert told == sorted(told) and told[-1] == AccessMap.open(tmp_path / "a.dmat").nbytes


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 0, "at byte 0: expected from 1 to 20 pages in 176 bytes, got 0"),
        (0, 1 << 63, "at byte 0: expected from 1 to 20 pages in 176 bytes, got 9223372036854775808"),
        (8, 0, "at byte 8: expected from 1 to 8 clocks after 3 pages, got 0"),
        (8, 1 << 62, "at byte 8: expected from 1 to 8 clocks after 3 pages"),
        (8, 3, "expected the end of the file after 3 clocks, got 52 bytes"),
        (8, 5, "at byte 176: expected clock 4 of 5, got the end of the file"),
        (24, 0, "at byte 16: expected different pages, got 0x0 twice"),
        (24, 3 * PAGE, "expected a page of the file's list, got 0x10000"),
        (48, 1 << 61, "at byte 48: expected at most 10 pages at clock 900, got"),
        (48, 1, "expected"),
    ],
)
def test_a_wrong_number_is_one_error_that_says_where(tmp_path: Path, place: int, value: int, message: str) -> None:
    write_access_map(tmp_path / "a.dmat", CLOCKS)
    content = bytearray((tmp_path / "a.dmat").read_bytes())
    struct.pack_into("<Q", content, place, value)
    (tmp_path / "a.dmat").write_bytes(content)
    with pytest.raises(InvalidRecording) as raised:
        rows(tmp_path / "a.dmat")
    assert message in str(raised.value)


def test_a_map_cut_anywhere_is_refused(tmp_path: Path) -> None:
    write_access_map(tmp_path / "a.dmat", CLOCKS)
    content = (tmp_path / "a.dmat").read_bytes()
    for length in range(len(content)):
        (tmp_path / "b.dmat").write_bytes(content[:length])
        with pytest.raises(InvalidRecording):
            rows(tmp_path / "b.dmat")


@pytest.mark.slow
@pytest.mark.guarantee("recording-bounds")
@given(st.data())
def test_a_map_with_any_bytes_changed_is_a_map_or_one_error(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.dmat")
        write_access_map(path, CLOCKS)
        content = bytearray(path.read_bytes())
        for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
            content[place] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
        try:
            assert len(rows(path)) <= len(content) // 12
        except InvalidRecording as error:
            assert "at byte" in str(error)


def test_a_clock_of_many_pages_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "_PAIRS_AT_ONCE", 64)
    pairs = [(page * PAGE, page + 1) for page in range(1000)]
    write_access_map(tmp_path / "a.dmat", [(3, pairs)])
    parts = list(AccessMap.open(tmp_path / "a.dmat").accesses())
    assert max(map(len, parts)) <= 64 and np.concatenate(parts)["count"].tolist() == list(range(1, 1001))
