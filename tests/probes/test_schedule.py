"""`schedule`: slots, costs, sums and shares of schedulers whose gaps are known."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayfmt.errors import InvalidRecording
from replayfmt.probes import recordings, schedule
from replayfmt.probes.recordings import BLOCK_SCHED, LaunchShape, ProbeRecording, write_recording
from replayfmt.probes.schedule import ScheduleResult, SmTimeline, evaluate_schedule, place_in_slots
from replayfmt.probes.tables import as_json

from .synthetic import block_records, shape_of, waves


def evaluated(path: Path, blocks: list[tuple[int, int, int]], warps: int = 1, **options: Any) -> ScheduleResult:
    records = block_records(blocks, warps, **options)
    write_recording(path / "a.bin", shape_of(len(blocks), 32 * warps), [records], force=True)
    return evaluate_schedule(ProbeRecording.open(path / "a.bin").section(0))


def whole(result: ScheduleResult) -> dict[str, Any]:
    (row,) = as_json(result)["tables"]["whole launch"]
    return dict(row)


def by_sm(result: ScheduleResult) -> list[dict[str, Any]]:
    return list(as_json(result)["tables"]["by SM"])


@pytest.mark.parametrize("warps", [1, 4])
def test_every_gap_of_a_simulated_scheduler_is_found(tmp_path: Path, warps: int) -> None:
    """5 SMs × 3 slots × 7 rounds: each of the 5 × 3 × 6 later blocks costs the gap of 17 cycles."""
    result = evaluated(tmp_path, waves(5, 3, 7, elapsed=400, gap=17), warps, warp_lag=9)
    found = whole(result)
    assert found["blocks"] == 105 and found["sms"] == 5 and found["slots_most_on_an_sm"] == 3
    assert found["running_cycles"] == 105 * 400 and found["scheduling_cycles"] == 90 * 17 and found["costs"] == 90
    assert found["scheduling_share"] == pytest.approx(90 * 17 / (105 * 400 + 90 * 17))
    assert found["cost_min_cycles"] == found["cost_median_cycles"] == found["cost_max_cycles"] == 17
    assert found["elapsed_min_cycles"] == found["elapsed_max_cycles"] == 400
    assert found["span_cycles"] == 7 * 400 + 6 * 17
    assert found["cost_outliers"] == 0 and as_json(result)["tables"]["largest costs (outliers)"] == []
    for sm, row in enumerate(by_sm(result)):
        assert (row["sm"], row["blocks"], row["slots"], row["scheduling_cycles"]) == (sm, 21, 3, 18 * 17)
    assert result.occupied.shape[0] == 5 and float(result.occupied.max()) == pytest.approx(3)
    assert float(result.occupied.sum(axis=1)[0]) * found["span_cycles"] / result.occupied.shape[1] == pytest.approx(
        21 * 400
    )


def test_a_block_takes_the_slot_that_ended_last_before_its_start(tmp_path: Path) -> None:
    """Slots end at 100 and 160; a block at 170 follows the second, one at 165 would, too, and the next takes the
    first."""
    blocks = [(0, 1000, 100), (0, 1001, 159), (0, 1170, 10), (0, 1175, 10), (0, 1176, 5)]
    result = evaluated(tmp_path, blocks)
    assert result.costliest.slot.tolist() == [0, 1, 1, 0, 2]
    assert result.costliest.cost.tolist() == [-1, -1, 10, 75, -1]
    assert whole(result)["scheduling_cycles"] == 85


def test_a_block_that_starts_as_another_ends_costs_nothing(tmp_path: Path) -> None:
    found = whole(evaluated(tmp_path, [(3, 500, 50), (3, 550, 50)]))
    assert (found["slots_most_on_an_sm"], found["costs"], found["scheduling_cycles"]) == (1, 1, 0)


def test_a_straggler_is_an_outlier_with_its_place_in_the_grid(tmp_path: Path) -> None:
    blocks = waves(2, 2, 50, elapsed=100, gap=10)
    sm, start, elapsed = blocks[-1]
    blocks[-1] = (sm, start + 5000, elapsed)
    records = block_records(blocks)
    write_recording(tmp_path / "a.bin", LaunchShape((10, 5, 4), (32, 1, 1)), [records])
    result = evaluate_schedule(ProbeRecording.open(tmp_path / "a.bin").section(0))
    (row,) = as_json(result)["tables"]["largest costs (outliers)"]
    assert (row["block"], row["block_x"], row["block_y"], row["block_z"]) == (199, 9, 4, 3)
    assert row["cost_cycles"] == 4900 and row["sm"] == 1 and whole(result)["cost_outliers"] == 1


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("warps", [1, 3])
def test_a_clock_that_begins_again_at_0_changes_nothing(tmp_path: Path, bits: int, warps: int) -> None:
    plain = evaluated(tmp_path, waves(3, 2, 6, elapsed=300, gap=21), warps, warp_lag=50)
    late = (1 << bits) - 700  # the second of the three SMs passes 0 in its third wave
    moved = [
        (sm, start - 1000 - 10_000 * sm + (late if sm == 1 else 5000), elapsed)
        for sm, start, elapsed in waves(3, 2, 6, elapsed=300, gap=21)
    ]
    wrapped = evaluated(tmp_path, moved, warps, warp_lag=50, clock_bits=bits)
    assert whole(wrapped) == whole(plain) and by_sm(wrapped) == by_sm(plain)
    assert any("the clock of 1 SMs began again at 0" in note for note in wrapped.notes)
    assert not any("began again" in note for note in plain.notes)


def test_one_wave_has_no_cost_which_is_not_a_cost_of_0(tmp_path: Path) -> None:
    found = whole(evaluated(tmp_path, waves(4, 2, 1, elapsed=100, gap=0)))
    assert found["scheduling_cycles"] == {"not_measured": "no slot ran a second block"}
    assert found["scheduling_share"] == found["cost_max_cycles"] == found["scheduling_cycles"]
    assert found["running_cycles"] == 800


def test_blocks_and_warps_without_a_record_are_counted_and_in_no_sum(tmp_path: Path) -> None:
    records = block_records(waves(2, 1, 3, elapsed=100, gap=5), warps=2)
    records[4], records[5, 1] = 0, 0
    write_recording(tmp_path / "a.bin", shape_of(6, 64), [records])
    result = evaluate_schedule(ProbeRecording.open(tmp_path / "a.bin").section(0))
    found = whole(result)
    assert (found["blocks"], found["blocks_not_recorded"], found["warps_not_recorded"]) == (6, 1, 1)
    assert found["running_cycles"] == 500 and found["costs"] == 3
    assert any("1 blocks have no record" in note for note in result.notes)


def test_records_of_something_else_are_refused(tmp_path: Path) -> None:
    def refused(records: Any, message: str) -> None:
        write_recording(tmp_path / "a.bin", shape_of(2, 64), [records], force=True)
        with pytest.raises(InvalidRecording, match=message):
            evaluate_schedule(ProbeRecording.open(tmp_path / "a.bin").section(0))

    refused(np.zeros((2, 2, 1), BLOCK_SCHED.dtype), "expected records, got zeros alone: the probe saved nothing")
    records = block_records([(0, 10, 5), (1, 10, 5)], warps=2)
    records[1, 1]["sm"] = 7
    refused(records, "at byte 96: expected warps of block 1 on one SM, 1, got one on SM 7")
    records["sm"][1] = 1 << 31
    refused(records, "at byte 80: expected an SM below 16384, got 2147483647; these are the records of another probe")


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2000), st.integers(0, 300)), min_size=1, max_size=60))
def test_slots_never_overlap_and_no_slot_is_taken_without_need(blocks: list[tuple[int, int, int]]) -> None:
    ordered = sorted((start, elapsed) for _sm, start, elapsed in blocks)
    start, elapsed = np.array(ordered).T
    slots, costs = place_in_slots(SmTimeline(0, np.arange(len(start)), start, start + elapsed))
    ends: dict[int, int] = {}
    for begin, length, slot, cost in zip(start, elapsed, slots, costs, strict=True):
        ended = [end for end in ends.values() if end <= begin]
        if cost < 0:
            assert not ended and slot == len(ends)
        else:
            assert begin - cost == ends[int(slot)] == max(ended)
        ends[int(slot)] = int(begin + length)


@pytest.mark.guarantee("recording-memory")
@pytest.mark.slow
def test_a_large_recording_is_evaluated_in_little_memory_with_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of 64 MiB, in parts of a mebibyte; what is kept of each block lies in files."""
    monkeypatch.setattr(recordings, "_CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(schedule, "_IN_MEMORY_BYTES", 0)
    count, warps, sms = 1 << 17, 32, 128
    number = np.arange(count)
    blocks = np.zeros((count, 1, 1), BLOCK_SCHED.dtype)
    blocks["start"][:, 0, 0] = 1 + (number // sms) * 110
    blocks["elapsed"], blocks["sm"][:, 0, 0] = 100, number % sms
    write_recording(tmp_path / "a.bin", shape_of(count, 1024), [np.broadcast_to(blocks, (count, warps, 1))], force=True)
    assert (tmp_path / "a.bin").stat().st_size == 48 + (1 << 26)
    told: list[tuple[int, int]] = []
    section = ProbeRecording.open(tmp_path / "a.bin").section(0)
    tracemalloc.start()
    try:
        found = whole(evaluate_schedule(section, lambda done, total: told.append((done, total))))
        _now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found["scheduling_cycles"] == (count - sms) * 10 and found["sms"] == sms
    assert peak < 24 << 20
    assert len(told) > 100 and told == sorted(told) and told[-1] == (2 * count, 2 * count)
