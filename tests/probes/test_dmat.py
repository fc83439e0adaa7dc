"""`dmat`: pages, reuse and working sets of access patterns of known stride and reuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayfmt.errors import InvalidRecording
from replayfmt.probes import dmat as module
from replayfmt.probes.dmat import OTHER, UNKNOWN, WINDOWS, DmatResult, _distances, _previous, evaluate_dmat
from replayfmt.probes.pictures import LEVELS, colours_of, shades
from replayfmt.probes.recordings import DMAT, AccessMap, ProbeRecording, Structured, TensorAddresses, write_recording
from replayfmt.probes.tables import as_json

from .synthetic import shape_of, sweep_records, write_access_map

PAGE = 1 << 16
BASE = 0x7F00_0000_0000


def evaluated(path: Path, records: Structured, tensors: list[TensorAddresses] | None = None) -> DmatResult:
    write_recording(path / "a.bin", shape_of(*records.shape[:2]), [records], force=True)
    return evaluate_dmat(ProbeRecording.open(path / "a.bin").section(0), tensors)


def whole(result: DmatResult) -> dict[str, Any]:
    (row,) = as_json(result)["tables"]["whole launch"]
    return dict(row)


def test_sweeps_over_the_same_pages_come_back_after_all_the_others(tmp_path: Path) -> None:
    """40 pages, 5 times, an access every 7 cycles: 39 other pages and 280 cycles between two accesses to one."""
    found = whole(evaluated(tmp_path, sweep_records(pages=40, sweeps=5, step=7)))
    assert (found["accesses"], found["touched_pages"], found["revisited_pages"]) == (200, 40, 40)
    assert found["touched_bytes"] == 40 * PAGE and found["reuses"] == 160 and found["clock_step_cycles"] == 1
    assert found["reuse_distance_min_pages"] == found["reuse_distance_max_pages"] == 39
    assert found["reuse_min_cycles"] == found["reuse_max_cycles"] == 280
    assert found["span_cycles"] == 199 * 7 + 1


def test_a_single_sweep_reuses_nothing_which_is_not_a_distance_of_0(tmp_path: Path) -> None:
    found = whole(evaluated(tmp_path, sweep_records(pages=30, sweeps=1, step=2)))
    assert found["revisited_pages"] == found["reuses"] == 0
    assert found["reuse_distance_mean_pages"] == {"not_measured": "no page was accessed at two clocks"}


def test_a_map_and_the_records_it_was_made_of_say_the_same(tmp_path: Path) -> None:
    records = sweep_records(pages=12, sweeps=3, step=10)
    clocks = [
        (int(clock), [(int(address) & ~(PAGE - 1), 1)])
        for clock, address in records.ravel()
    ]  # fmt: skip
    write_access_map(tmp_path / "a.dmat", clocks[::-1])
    one, other = evaluate_dmat(AccessMap.open(tmp_path / "a.dmat")), evaluated(tmp_path, records)
    assert as_json(one)["tables"] == as_json(other)["tables"] and (one.density == other.density).all()


def test_the_working_set_is_the_pages_of_each_window(tmp_path: Path) -> None:
    """Pages 0 to 59, one in each sixtieth of the time, twenty accesses each."""
    records = np.zeros((1, 1, 1200), DMAT.dtype)
    records["clock"], records["address"] = 5 + np.arange(1200), BASE + (np.arange(1200) // 20) * PAGE
    result = evaluated(tmp_path, records)
    rows = as_json(result)["tables"]["working set over time"]
    assert len(rows) == WINDOWS == 60
    assert {(row["pages"], row["new_pages"], row["accesses"]) for row in rows} == {(1, 1, 20)}
    assert [row["start_cycles"] for row in rows[:3]] == [0, 20, 40]
    assert whole(result)["working_set_max_pages"] == 1 and whole(result)["window_cycles"] == 20


def test_accesses_to_one_page_at_one_clock_are_one_with_a_count(tmp_path: Path) -> None:
    records = np.zeros((2, 4, 1), DMAT.dtype)
    records["clock"], records["address"] = 9, BASE + 4 * np.arange(8).reshape(2, 4, 1)
    found = whole(evaluated(tmp_path, records))
    assert (found["accesses"], found["touched_pages"], found["reuses"], found["span_cycles"]) == (8, 1, 0, 1)


def test_records_that_were_never_written_are_no_accesses(tmp_path: Path) -> None:
    records = np.zeros((1, 2, 3), DMAT.dtype)
    records[0, 0, :2] = [(5, BASE), (6, BASE + PAGE)]
    records[0, 1] = np.array([(2**64 - 1, 7)], DMAT.dtype)
    assert whole(evaluated(tmp_path, records))["accesses"] == 2
    with pytest.raises(InvalidRecording, match="expected accesses to memory, got none: the probe saved nothing"):
        evaluated(tmp_path, np.zeros((1, 2, 3), DMAT.dtype))


def test_entries_of_a_map_that_were_never_written_are_no_accesses(tmp_path: Path) -> None:
    write_access_map(tmp_path / "a.dmat", [(0, [(0, 4921)]), (5, [(BASE, 2)]), (6, [(BASE + PAGE, 1)])])
    result = evaluate_dmat(AccessMap.open(tmp_path / "a.dmat"))
    assert whole(result)["accesses"] == 3 and whole(result)["touched_pages"] == 2
    write_access_map(tmp_path / "b.dmat", [(0, [(0, 7)])])
    with pytest.raises(InvalidRecording, match="got none: the probe saved nothing"):
        evaluate_dmat(AccessMap.open(tmp_path / "b.dmat"))


def test_clocks_that_are_none_are_refused(tmp_path: Path) -> None:
    records = np.zeros((1, 1, 2), DMAT.dtype)
    records[0, 0] = np.array([(5, BASE), (1 << 60, BASE)], DMAT.dtype)
    with pytest.raises(InvalidRecording, match="expected clocks within .* cycles of each other, got .*; these are no"):
        evaluated(tmp_path, records)


def test_pages_are_those_of_tensors_and_what_no_tensor_owns(tmp_path: Path) -> None:
    """q has the first 10 pages and most of the eleventh, k the rest of that and one more; two belong to nobody."""
    tensors = [
        TensorAddresses("q", "[10]", BASE, 10 * PAGE + 40_000),
        TensorAddresses("k", "[2]", BASE + 10 * PAGE + 40_000, 2 * PAGE - 40_000),
        TensorAddresses("empty", "[0]", BASE, 0),
    ]
    result = evaluated(tmp_path, sweep_records(pages=14, sweeps=2, step=3), tensors)
    rows = {row["tensor"]: row for row in as_json(result)["tables"]["by tensor"]}
    assert {name: (row["touched_pages"], row["accesses"]) for name, row in rows.items()} == {
        "q": (11, 22), "k": (1, 2), UNKNOWN: (2, 4),
    }  # fmt: skip
    assert rows["q"]["size_bytes"] == 10 * PAGE + 40_000 and rows["q"]["access_share"] == pytest.approx(22 / 28)
    assert rows[UNKNOWN]["shape"] == {"not_measured": "not in the list of tensors"}
    assert result.owners == ("q", "k", UNKNOWN)
    assert result.density.sum(axis=(1, 2)).tolist() == [22, 2, 4] and result.density.shape[1:] == (14, 82)
    assert not any("no list of tensors" in note for note in result.notes)


def test_of_many_tensors_the_least_accessed_share_a_colour(tmp_path: Path) -> None:
    tensors = [TensorAddresses(f"t{number}", "", BASE + number * PAGE, PAGE) for number in range(9)]
    result = evaluated(tmp_path, sweep_records(pages=9, sweeps=1, step=1), tensors)
    assert result.owners == ("t0", "t1", "t2", "t3", "t4", OTHER)
    assert result.density.sum(axis=(1, 2)).tolist() == [1, 1, 1, 1, 1, 4]
    assert len(set(colours_of(result.owners))) == 6


def test_the_depth_of_a_cell_is_its_fifth_among_the_cells_of_its_tensor() -> None:
    density = np.array([[[0, 1, 2, 3, 4, 5]], [[0, 0, 7, 7, 7, 7]]])
    depth = shades(density)
    assert depth[0, 0].tolist() == [0, 1, 2, 3, 4, LEVELS] and depth[1, 0].tolist() == [0, 0, 1, 1, 1, 1]


@pytest.mark.slow
@given(st.lists(st.integers(0, 6), max_size=40))
def test_reuse_distances_are_those_of_counting_by_hand(pages: list[int]) -> None:
    before = _previous(np.array(pages, np.int64))
    found = _distances(before)
    for place, page in enumerate(pages):
        earlier = [other for other in range(place) if pages[other] == page]
        assert before[place] == (earlier[-1] if earlier else -1)
        if earlier:
            assert found[place] == len(set(pages[earlier[-1] + 1 : place]))


def test_more_accesses_than_fit_are_rounded_to_coarser_clocks_which_the_table_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_PAIRS", 100)
    monkeypatch.setattr(module, "_AT_ONCE", 64)
    result = evaluated(tmp_path, sweep_records(pages=4, sweeps=256, step=1))
    found = whole(result)
    assert found["clock_step_cycles"] > 4 and found["accesses"] == 1024 and found["touched_pages"] == 4
    assert found["reuse_max_cycles"] == found["clock_step_cycles"] and found["reuse_distance_max_pages"] == 3
    assert any("rounded down" in note for note in result.notes)
