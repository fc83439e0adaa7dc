"""`warps`: active warps, progress and the tail of launches whose course is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replayfmt.errors import InvalidRecording
from replayfmt.probes import schedule as module
from replayfmt.probes.recordings import ProbeRecording, write_recording
from replayfmt.probes.schedule import WarpsResult, evaluate_warps
from replayfmt.probes.tables import as_json

from .synthetic import block_records, shape_of, waves


def evaluated(path: Path, *recordings: tuple[str, list[tuple[int, int, int]]], warps: int = 1) -> WarpsResult:
    sections = []
    for name, blocks in recordings:
        write_recording(
            path / f"{name}.bin", shape_of(len(blocks), 32 * warps), [block_records(blocks, warps)], force=True
        )
        sections.append((name, ProbeRecording.open(path / f"{name}.bin").section(0)))
    return evaluate_warps(sections)


def figures(result: WarpsResult, row: int = 0) -> dict[str, Any]:
    return dict(as_json(result)["tables"]["recordings"][row])


@pytest.mark.parametrize("warps", [1, 4])
def test_full_waves_and_a_last_one_that_is_a_quarter_full(tmp_path: Path, warps: int) -> None:
    """4 SMs × 2 slots run 3 full waves of 100 cycles; then SM 0 alone runs two blocks of 50: the tail."""
    blocks = waves(4, 2, 3, elapsed=100, gap=0) + [(0, 1300, 50), (0, 1300, 50)]
    found = figures(evaluated(tmp_path, ("one", blocks), warps=warps))
    assert found["warps"] == 26 * warps and found["span_cycles"] == 350 and found["sms"] == 4
    assert found["active_peak_warps"] == 8 * warps
    assert found["active_mean_warps"] == pytest.approx((24 * 100 + 2 * 50) * warps / 350)
    assert found["tail_start_cycles"] == 300 and found["tail_share"] == pytest.approx(50 / 350)
    assert found["tail_active_mean_warps"] == 2 * warps and found["resolution_cycles"] == 1
    assert found["half_finished_after_cycles"] == 200 and found["nine_tenths_finished_after_cycles"] == 300
    assert found["throughput_mean_warps_per_kilocycle"] == pytest.approx(26_000 * warps / 350)
    assert (found["elapsed_min_cycles"], found["elapsed_median_cycles"], found["elapsed_max_cycles"]) == (50, 100, 100)


def test_a_launch_that_ends_at_once_has_no_tail(tmp_path: Path) -> None:
    found = figures(evaluated(tmp_path, ("one", waves(4, 2, 3, elapsed=100, gap=0))))
    assert found["tail_start_cycles"] == found["span_cycles"] == 300 and found["tail_share"] == 0
    assert found["tail_active_mean_warps"] == {"not_measured": "there is no tail"}


def test_exclusive_and_shared_are_compared_figure_by_figure(tmp_path: Path) -> None:
    """Shared, every warp takes three times as long."""
    one, other = (waves(3, 2, 4, elapsed=elapsed, gap=0) for elapsed in (100, 300))
    result = evaluated(tmp_path, ("alone", one), ("beside", other))
    rows = {row["figure"]: row for row in as_json(result)["tables"]["beside against alone"]}
    assert rows["span_cycles"] == {"figure": "span_cycles", "alone": 400, "beside": 1200, "ratio": 3}
    assert rows["elapsed_median_cycles"]["ratio"] == 3 and rows["active_peak_warps"]["ratio"] == 1
    assert rows["throughput_mean_warps_per_kilocycle"]["ratio"] == pytest.approx(1 / 3)
    assert rows["tail_share"]["ratio"] == {"not_measured": "the first is 0"}


def test_a_long_launch_is_counted_in_ticks_which_the_table_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_TICKS", 30)
    found = figures(evaluated(tmp_path, ("one", waves(4, 2, 3, elapsed=100, gap=0) + [(0, 1300, 50)])))
    assert found["resolution_cycles"] == 12 and found["warps"] == 25 and found["span_cycles"] == 350
    assert found["active_peak_warps"] == 8 and abs(found["tail_start_cycles"] - 300) <= 12


def test_warps_that_took_no_time_have_no_rates(tmp_path: Path) -> None:
    found = figures(evaluated(tmp_path, ("one", [(0, 5, 0), (1, 9, 0)])))
    assert found["span_cycles"] == 0 and found["tail_share"] == {"not_measured": "the launch took no cycles"}
    assert found["throughput_mean_warps_per_kilocycle"] == found["tail_share"]


@pytest.mark.slow
def test_one_byte_of_a_recordings_head_or_first_record_changed_is_evaluated_or_one_error(tmp_path: Path) -> None:
    """In each of the three forms that a head has."""
    blocks = waves(2, 2, 2, elapsed=100, gap=0)
    path = tmp_path / "one.bin"
    write_recording(path, shape_of(len(blocks), 128), [block_records(blocks, 4)], force=True)
    newer, refused = path.read_bytes(), 0
    for size in (newer[32:40], newer[32:36] + bytes(4), (len(newer) - 48).to_bytes(8, "little")):
        whole = newer[:32] + size + newer[40:]
        for place in range(64):
            for byte in {0, 1, whole[place] + 1 & 255, 128, 255}:
                path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
                try:
                    json.dumps(as_json(evaluate_warps([("one", ProbeRecording.open(path).section(0))])))
                except InvalidRecording as error:
                    assert str(path) in str(error)
                    refused += 1
    assert refused > 300
