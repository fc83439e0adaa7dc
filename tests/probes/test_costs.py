"""`overhead`, `memory` and `latency`: figures of logs whose figures are known, and what is missing from them."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from opreplay_tools.probe import main

from replayfmt.errors import CaptureNotFound, InvalidRecording, UsageError
from replayfmt.probes.costs import (
    PredictedLaunch,
    evaluate_latency,
    evaluate_memory,
    evaluate_overhead,
    predicted_bytes,
)
from replayfmt.probes.recordings import LaunchShape
from replayfmt.probes.tables import as_json


def run_folder(
    folder: Path, times: list[tuple[float, float, int]], registers: tuple[int, int] = (30, 36), kernel: str = "fill"
) -> Path:
    """A run of one kernel: (original, probed, error code) of each launch, registers before and after."""
    events = [f"[jit] rename {kernel} 0_ab", f"[jit] finish 0x10 name {kernel} n_param 2"]
    for original, probed, code in times:
        events += [
            "[exec] funcmap-find 0x10 success",
            "[exec] grid 64 1 1 block 96 1 1 shared 0",
            "[exec] probe-mem 98304 (bytes)",
            f"[benchmark] prologue 0.1 kernel {probed} epilogue 0.2 original {original} impact 1.0 {code}",
        ]
    (folder / "kernel" / "0_ab").mkdir(parents=True)
    (folder / "event.log").write_text("\n".join(events) + "\n")
    (folder / "kernel" / "0_ab" / "process.log").write_text(
        "".join(
            f"ptxas -arch=sm_80 --verbose x/{file}.ptx -o x.bin\n"
            f"ptxas info    : Compiling entry function '{kernel}' for 'sm_80'\n"
            f"    0 bytes stack frame, {spilled} bytes spill stores, {spilled + 4} bytes spill loads\n"
            f"ptxas info    : Used {used} registers\n"
            for file, used, spilled in (("probed", registers[1], 8), ("pruned", registers[0], 0))
        )
    )
    return folder


def row_of(result: Any, table: str, place: int = 0) -> dict[str, Any]:
    return dict(as_json(result)["tables"][table][place])


def test_slowdowns_registers_and_spills_are_those_of_the_logs(tmp_path: Path) -> None:
    times = [(1.0, 2.0, 0), (1.0, 3.0, 0), (2.0, 5.0, 0), (9.0, 9.0, 700), (0.0, 9.0, 0)]
    result = evaluate_overhead([("dmat", str(run_folder(tmp_path / "run", times)))])
    found = row_of(result, "by probe and kernel")
    assert (found["probe"], found["kernel"], found["launches"], found["launches_failed"]) == ("dmat", "fill", 3, 2)
    assert found["slowdown_mean"] == pytest.approx(2.5) and found["slowdown_stdev"] == pytest.approx(0.5)
    assert (found["slowdown_min"], found["slowdown_max"]) == (2.0, 3.0)
    assert found["original_mean_ms"] == pytest.approx(4 / 3) and found["probed_mean_ms"] == pytest.approx(10 / 3)
    assert (found["registers_before"], found["registers_after"], found["registers_added"]) == (30, 36, 6)
    assert (found["spill_stores_before_bytes"], found["spill_stores_after_bytes"]) == (0, 8)
    assert (found["spill_loads_before_bytes"], found["spill_loads_after_bytes"]) == (4, 12)
    whole = row_of(result, "by probe")
    assert whole["slowdown_of_all"] == pytest.approx(10 / 4) and whole["registers_added_mean"] == 6


def test_probes_are_kept_apart_and_repeats_of_one_are_brought_together(tmp_path: Path) -> None:
    files = [
        ("a", run_folder(tmp_path / "1", [(1.0, 2.0, 0)])),
        ("a", run_folder(tmp_path / "2", [(1.0, 8.0, 0)])),
        (None, run_folder(tmp_path / "other", [(1.0, 1.0, 0)], (20, 20))),
    ]
    result = evaluate_overhead([(label, str(path)) for label, path in files])
    one, other = as_json(result)["tables"]["by probe"]
    assert (one["probe"], one["launches"], one["slowdown_geometric_mean"]) == ("a", 2, pytest.approx(5.0))
    assert (other["probe"], other["registers_added_mean"]) == ("other", 0)
    assert one["slowdown_of_all"] == 5.0 == statistics.mean([2, 8])


def test_what_a_log_does_not_say_is_not_0(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", [(1.0, 2.0, 0)])
    alone = row_of(evaluate_overhead([("p", str(run / "event.log"))]), "by probe and kernel")
    assert alone["registers_added"] == {"not_measured": "ptxas does not say both"}
    assert alone["slowdown_stdev"] == {"not_measured": "only one launch"} and alone["slowdown_mean"] == 2
    result = evaluate_overhead([("p", str(run / "kernel" / "0_ab" / "process.log"))])
    figures = row_of(result, "by probe and kernel")
    assert figures["slowdown_mean"] == {"not_measured": "no launch of it was measured"}
    assert figures["registers_added"] == 6 and figures["launches"] == 0
    assert row_of(result, "by probe")["slowdown_of_all"] == {"not_measured": "no launch was measured"}


def test_logs_of_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "event.log").write_text("[pid] 4\n")
    for path in (tmp_path, tmp_path / "event.log"):
        with pytest.raises(InvalidRecording, match=r"expected \[benchmark\] lines or figures of ptxas"):
            evaluate_overhead([(None, str(path))])
    with pytest.raises(CaptureNotFound):
        evaluate_overhead([(None, str(tmp_path / "none"))])


def test_memory_is_the_programs_peak_and_the_most_that_probes_needed(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "resnet" / "train" / "trace", [(1.0, 2.0, 0)]).parent
    with (run / "trace" / "event.log").open("a") as log:
        log.write("[exec] probe-mem 500000 (bytes)\n[exec] probe-mem 7 (bytes)\n")
    (run / "stdout.log").write_text("max memory: 1 MB\nmax memory: 2 MB\n")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "stdout.log").write_text("nothing of it\n")
    result = evaluate_memory([(None, str(run)), ("bert/infer", str(tmp_path / "bare"))])
    one, other = as_json(result)["tables"]["by model and test"]
    assert (one["model"], one["test"], one["program_peak_bytes"]) == ("resnet", "train", 2_000_000)
    assert (one["probe_most_bytes"], one["probe_share_of_peak"], one["launches"]) == (500_000, 0.25, 3)
    assert (other["model"], other["test"]) == ("bert", "infer")
    assert other["program_peak_bytes"] == {"not_measured": "no `max memory:` in stdout.log"}
    assert other["probe_most_bytes"] == {"not_measured": "no `[exec] probe-mem` in event.log"}
    (tmp_path / "nothing").mkdir()
    with pytest.raises(CaptureNotFound, match=r"has no stdout\.log and no event\.log"):
        evaluate_memory([(None, str(tmp_path / "nothing"))])


def test_of_several_runs_of_a_model_and_test_the_most_is_one_row(tmp_path: Path) -> None:
    runs = []
    for number, (peak, probe) in enumerate([(2, 500), (3, 100), (1, 700)]):
        run = run_folder(tmp_path / str(number) / "trace", [(1.0, 2.0, 0)]).parent
        with (run / "trace" / "event.log").open("a") as log:
            log.write(f"[exec] probe-mem {probe} (bytes)\n")
        (run / "stdout.log").write_text(f"max memory: {peak} MB\n")
        runs.append(("bert/infer", str(run)))
    result = evaluate_memory([*runs, ("bert/train", runs[0][1])])
    one, other = as_json(result)["tables"]["by model and test"]
    assert (one["program_peak_bytes"], one["launches"]) == (3_000_000, 6)
    assert one["probe_most_bytes"] >= 700 and other["test"] == "train"
    assert any("several runs" in note for note in result.notes)


def test_without_logs_memory_is_grid_times_threads_times_the_record() -> None:
    """Of the 4096 × 4096 fill: 32,768 blocks of 128 threads."""
    fill = LaunchShape((32768, 1, 1), (128, 1, 1))
    assert predicted_bytes(fill, 16) == 32768 * 128 * 16 and predicted_bytes(fill, 16, "warp") == 32768 * 4 * 16
    assert predicted_bytes(LaunchShape((2, 3, 4), (33, 1, 1)), 8, "warp", records=10) == 24 * 2 * 80
    each = PredictedLaunch.parse("my:fill:32768,1,1:128,1,1:16:warp")
    assert (each.name, each.nbytes) == ("my:fill", 2_097_152)
    assert PredictedLaunch.parse("fill:32768,1,1:128,1,1:16").nbytes == 67_108_864
    for text in ("fill", "f:1,1,1:1,1:4", "f:0,1,1:1,1,1:4", "f:1,1,1:1025,1,1:4", "f:1,1,1:1,1,1:4:block"):
        with pytest.raises(UsageError, match="expected NAME:GX,GY,GZ:BX,BY,BZ:BYTES"):
            PredictedLaunch.parse(text)


CSV = """\
probe, original, ncu, neutrino, prologue, kernel, epilogue, more
block_sched,2,80,5,1,2.5,1.5,x
dmat,4,,24,4,12,8,y
"""


def test_latency_is_the_ratio_of_each_part_to_the_original(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(CSV)
    one, other = as_json(evaluate_latency(tmp_path / "a.csv"))["tables"]["by probe"]
    assert one == {
        "probe": "block_sched", "prologue_ratio": 0.5, "kernel_ratio": 1.25, "epilogue_ratio": 0.75,
        "parts_sum_ratio": 2.5, "neutrino_ratio": 2.5, "ncu_ratio": 40.0, "ncu_over_neutrino_ratio": 16.0,
    }  # fmt: skip
    assert other["parts_sum_ratio"] == 6 and other["ncu_ratio"] == {"not_measured": "the file has no value"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("probe,original\n", "line 1: expected the columns probe, original, .*, got not ncu, neutrino, prologue"),
        (CSV + "x,1,2\n", "line 4: expected 8 fields, got 3"),
        (CSV.replace("80", "many"), "line 2: expected a time as ncu, got 'many'"),
        (CSV.replace("80", "-1"), "line 2: expected a time as ncu, got '-1'"),
        (CSV.replace("dmat,4", "dmat,0"), "line 3: expected a time above 0 as original, got '0'"),
        (CSV.replace("dmat,4", "dmat,"), "line 3: expected a time above 0 as original, got ''"),
        (CSV.splitlines()[0], "line 2: expected a row for each probe, got none"),
        ("", "line 1: expected the columns"),
    ],
)
def test_a_wrong_table_is_one_error_that_says_where(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(InvalidRecording, match=message):
        evaluate_latency(tmp_path / "a.csv")


def ran(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["opreplay-probe", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    assert isinstance(left.value.code, int)
    return left.value.code


def test_predictions_need_no_files(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(monkeypatch, "report", "memory", "--predict=fill:2,2,2:32,1,1:16", "--format=json") == 0
    (row,) = json.loads(capsys.readouterr().out)["tables"]["predicted"]
    assert row["predicted_bytes"] == 8 * 32 * 16 and row["by"] == "thread"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["latency", "a.csv", "--tensors=t"], "--tensors is an option of report dmat; report latency does not use it"),
        (["overhead", "x", "--predict=f:1,1,1:1,1,1:4"], "--predict is an option of report memory"),
        (["latency", "a.csv", "--section=1"], "--section chooses records of a recording; report latency has none"),
        (["memory"], "report memory: expected at least 1: folders of runs, as MODEL/TEST=DIR, or --predict; got 0"),
        (["warps", "a", "b", "c"], "report warps: expected 1 or 2: a recording of block_sched, or two to compare"),
    ],
)
def test_options_of_another_report_are_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(monkeypatch, "report", *arguments) == 2
    assert message in capsys.readouterr().err
