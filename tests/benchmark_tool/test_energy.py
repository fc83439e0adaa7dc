"""Energy: logs whose integral is known exactly, windows, and the report that compares kernels with the whole."""

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch

import replayfmt
from replayfmt.benchmark.energy.energy_report import SCHEMA_VERSION, make_energy_report
from replayfmt.benchmark.energy.power_log import PowerLog, Series, resolution_of
from replayfmt.benchmark.energy.running import WindowClock, WindowOptions, WindowRunner
from replayfmt.benchmark.energy.windows import EnergyWindow, WindowsFile, find_clock_offset, integrate, read_windows
from replayfmt.errors import UsageError
from replayfmt.replay.plan import Plan

NOW = 1_700_000_000.0
SCHEMA = json.loads((Path(__file__).parents[2] / "docs/energy.schema.json").read_text())


def log_of(*gpus):
    """A log with a series for each GPU: times after NOW and watts."""
    series = {str(i): Series(NOW + np.array(t), np.array(w), resolution_of(w)) for i, (t, w) in enumerate(gpus)}
    return PowerLog("power.csv", series, 0, {}, 0, "")


def every(seconds, until, watts):
    times = np.arange(0, until + seconds / 2, seconds)
    return times, np.array([watts(each) for each in times])


def over(log, start, end):
    return integrate(log, NOW + start, NOW + end)


def test_constant_power_is_watts_times_seconds_whatever_the_edges_are():
    found = over(log_of(every(0.1, 10, lambda t: 50.0)), 1.234, 8.765)
    assert found.joules == pytest.approx(50 * (8.765 - 1.234)) and found.error == 0
    assert found.watts == pytest.approx(50) and found.samples == 75 and found.gaps == 0


def test_a_ramp_is_integrated_exactly_with_interpolated_edges():
    found = over(log_of(every(0.1, 10, lambda t: 10 * t)), 2.05, 4.15)
    assert found.joules == pytest.approx(5 * (4.15**2 - 2.05**2))
    steps = 10 * (4.15 - 2.05) * 0.1 / 2  # at most: the rise between two samples, for half of their distance
    assert found.error == pytest.approx(steps + 0.5 * (4.15 - 2.05), rel=0.05)  # and half a watt of resolution


def test_a_step_between_two_samples_is_in_the_error():
    log = log_of(every(0.1, 10, lambda t: 10.0 if t < 4.95 else 110.0))
    found = over(log, 0, 10)
    assert found.joules == pytest.approx(10 * 4.95 + 110 * 5.05)
    assert found.error == pytest.approx(100 * 0.1 / 2 + 100 / 2 * 10)  # its only two values are 100 W apart


def test_several_gpus_add_up_even_if_their_samples_are_of_other_moments():
    one, two = every(0.1, 10, lambda t: 50.0), every(0.07, 10.1, lambda t: 20.0)
    found = over(log_of(one, (two[0] - 0.033, two[1])), 1, 9)
    assert found.joules == pytest.approx(70 * 8) and found.samples == 79


def test_a_gap_is_reported_and_bridged():
    times, watts = every(0.1, 10, lambda t: 50.0)
    kept = (times < 4) | (times > 5)
    found = over(log_of((times[kept], watts[kept])), 1, 9)
    assert found.gaps == 1 and found.joules == pytest.approx(400)
    assert over(log_of((times[kept], watts[kept])), 6, 9).gaps == 0


@pytest.mark.parametrize(
    ("start", "end", "words"),
    [
        (-0.5, 5, "begins 0.500 s after the window does"),
        (5, 10.25, "ends 0.250 s before the window does"),
        (5, 5.95, "9 samples in the window; 10 are needed"),
        (5.01, 5.02, "0 samples in the window"),
    ],
)
def test_a_window_that_the_log_does_not_cover_has_no_joules(start, end, words):
    found = over(log_of(every(0.1, 10, lambda t: 50.0)), start, end)
    assert found.joules is None and found.error is None and found.watts is None and words in found.reason


def test_the_offset_of_the_logs_clock_is_found_from_the_rise_from_idle_to_load():
    log = log_of(every(0.1, 20, lambda t: 10.0 if t < 3.95 or 15 < t < 15.95 else 110.0))

    def windows(idle, load):
        return (NOW + idle[0], NOW + idle[1]), (NOW + load[0], NOW + load[1])

    # A quarter of the rise from 3.9 to 4.0 is over at 3.925; the second rise would put the load where there is none.
    assert find_clock_offset(log, *windows((2, 5), (6, 10))) == pytest.approx(1.075)
    assert integrate(log.shifted(1.075), NOW + 6, NOW + 8).joules == pytest.approx(220)
    assert find_clock_offset(log, *windows((14.5, 14.9), (15.5, 18))) == pytest.approx(14.9 - 15.925)
    for flat in (lambda t: 50.0, lambda t: 100.0 if t < 5 else 10.0):
        with pytest.raises(UsageError, match="no rise from idle to load"):
            find_clock_offset(log_of(every(0.1, 10, flat)), *windows((2, 5), (6, 8)))


SECOND = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)  # NOW


def window(role, name, runs, start, end, **told):
    start_ns, end_ns = int((NOW + start) * 1e9), int((NOW + end) * 1e9)
    return EnergyWindow(role, name, runs, start_ns, end_ns, int(start * 1e9), int(end * 1e9), **told)


WINDOWS = [
    window("idle", "idle", 0, 0, 5),
    window("whole", "whole replay", 10, 10, 20),
    window("op", "mm", 1000, 30, 40, count=4, kernel="aten::mm.default", kernel_class="matrix product or convolution"),
    window("op", "add_", 2000, 50, 60, count=10, kernel="aten::add_.Tensor", kernel_class="other operator"),
    window("restore", "add_", 4000, 70, 80, count=10, kernel="aten::add_.Tensor"),
    window("op", "short", 5, 85, 85.5, count=2, kernel="aten::t.default", kernel_class="data movement"),
]
NOT_RUN = [{"name": "bad", "kernel": "aten::bad", "count": 4, "reason": "RuntimeError: no"}]


def a_file(windows=WINDOWS, **context):
    return WindowsFile({"capture": "x.opreplay"} | context, 0, windows, NOT_RUN)


def levels(t):
    for (start, end), watts in {(8, 22): 100.0, (28, 42): 200.0, (48, 62): 80.0, (68, 82): 40.0}.items():
        if start <= t <= end:
            return watts
    return 20.0


def test_the_report_adds_up_what_was_measured_and_keeps_the_rest_apart():
    content = make_energy_report(a_file(), log_of(every(0.1, 100, levels)), offset_s=0.0).content
    assert content["idle"]["joules"] == pytest.approx(100) and content["idle"]["mean_watts"] == pytest.approx(20)
    whole = content["whole_model"]
    assert (whole["runs"], whole["joules"], whole["joules_per_run"]) == (10, pytest.approx(1000), pytest.approx(100))
    by_name = {kernel["name"]: kernel for kernel in content["kernels"]}
    assert by_name["mm"]["joules_per_call"] == pytest.approx(2) and by_name["mm"]["joules_per_run"] == pytest.approx(8)
    # 0.4 J a call with putting back, 0.1 J for putting back alone
    assert by_name["add_"]["joules_per_call"] == pytest.approx(0.4 - 0.1)
    assert by_name["add_"]["seconds_per_call"] == pytest.approx(0.005 - 0.0025)
    assert "less putting back" in by_name["add_"]["method"]
    assert by_name["short"]["joules_per_call"] is None and "10 are needed" in by_name["short"]["reason"]
    assert by_name["bad"]["reason"] == "RuntimeError: no" and by_name["bad"]["seconds_per_call"] is None
    isolated = content["isolated_kernels"]
    assert (isolated["distinct"], isolated["measured"], isolated["unmeasurable"], isolated["not_run"]) == (4, 2, 1, 1)
    assert isolated["predicted_joules_per_run"] == pytest.approx(11)
    watts = 11 / (4 * 0.01 + 10 * 0.0025)
    assert isolated["estimated_joules_of_the_rest"] == pytest.approx(watts * 2 * 0.1)
    assert isolated["share_of_calls"] == pytest.approx(14 / 20) and isolated["without_estimate"] == 4
    comparison = content["comparison"]
    assert comparison["error_joules"] == pytest.approx(11 - 100) and comparison["ratio"] == pytest.approx(0.11)
    assert comparison["error_percent"] == pytest.approx(-89)
    assert content["by_class"]["matrix product or convolution"] == {
        "kernels": 1,
        "calls": 4,
        "joules_per_run": pytest.approx(8),
    }
    jsonschema.validate(content, SCHEMA)


def test_fewer_samples_count_where_that_is_asked_for_and_the_report_is_marked():
    log = log_of(every(0.1, 100, levels))
    plain = make_energy_report(a_file(), log, offset_s=0.0).content
    content = make_energy_report(a_file(), log, offset_s=0.0, least_samples=0).content
    (short,) = [kernel for kernel in content["kernels"] if kernel["name"] == "short"]
    assert short["joules_per_call"] is not None
    assert any("--min-samples=0" in warning for warning in content["warnings"])
    assert not any("--min-samples" in warning for warning in plain["warnings"])
    jsonschema.validate(content, SCHEMA)


def _timing_files(folder, **changes):
    """As kernel_benchmark of the energy system that we follow writes them: 30 W for the whole, 60 W for each kernel."""

    def moment(seconds):
        return f"2026-02-06 18:32:{seconds:06.3f}"

    def kernel(name, count, start, end, runs, tier):
        times = {"start_timestamp": start and moment(start), "end_timestamp": end and moment(end)}
        return {"name": name, "invocation_count": count, "benchmark_runs": runs, "tier": tier, **times}

    whole = {"start_timestamp": moment(1), "end_timestamp": moment(3), "num_runs": 100}
    kernels = [
        kernel("maxwell_sgemm_fp16_128x32_tn", 48, 4, 5, 6000, 2),
        kernel("Memcpy DtoD (Device -> Device)", 7, 5.1, 5.2, 600, 1),
        kernel("void at::native::elementwise", 2, "", "", 10, 3),
    ]
    whole |= {"full_model_inference_us": 20000.0} | changes
    whole = {key: value for key, value in whole.items() if value is not ...}
    (folder / "full_model_timing.json").write_text(json.dumps(whole, indent=2))
    (folder / "isolated_kernels_timing.json").write_text(json.dumps({"kernels": kernels}))
    power = "".join(f"{moment(t / 40)},0,{30 if t < 140 else 60}\n" for t in range(300))
    (folder / "power.csv").write_text("timestamp,gpu,power_w\n" + power)


@pytest.mark.parametrize("which", ["full_model_timing.json", "isolated_kernels_timing.json"])
@pytest.mark.parametrize("zone", [[], ["--zone=Asia/Tokyo"]], ids=["", "zone"])
def test_timings_of_the_whole_and_of_isolated_kernels_are_windows_whose_classes_are_tiers(tools, tmp_path, which, zone):
    _timing_files(tmp_path)
    out = tmp_path / "report.json"
    ran = tools("energy", *zone, "--min-samples=0", tmp_path / which, tmp_path / "power.csv", "-o", out)
    assert ran.code == 0, ran.err
    content = json.loads(out.read_text())
    jsonschema.validate(content, SCHEMA)
    assert content["comparison"]["whole_joules_per_run"] == pytest.approx(30 * 2 / 100)
    assert content["comparison"]["predicted_joules_per_run"] == pytest.approx(48 * 60 / 6000 + 7 * 6 / 600)
    assert {name: part["calls"] for name, part in content["by_class"].items()} == {"gemm": 48, "copy": 7}
    assert any("--min-samples=0" in warning for warning in content["warnings"]), "a window of 0.1 s has 4 samples"
    (left,) = [each for each in content["kernels"] if each["joules_per_run"] is None]
    assert left["count"] == 2 and left["reason"] == "its timing has no times"
    strict = tools("energy", tmp_path / which, tmp_path / "power.csv")
    assert "1 of 3 distinct kernels measured" in strict.out and "10 are needed" in strict.out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_runs": "many"}, "a window of it is damaged"),
        ({"num_runs": -1}, "a window of it is damaged"),
        ({"start_timestamp": "yesterday"}, "is damaged: Invalid isoformat"),
        ({"start_timestamp": None}, "is damaged"),
        ({"num_runs": ...}, "'num_runs' is missing"),
        ({"end_timestamp": "2026-02-06 18:32:00"}, "does not end after it begins"),
        ({"end_timestamp": "2026-02-06 18:32:04.900"}, "begins 0.900 s before"),
    ],
)
def test_damaged_timings_are_one_line(tools, tmp_path, changes, words):
    _timing_files(tmp_path, **changes)
    _refused_timings(tools, tmp_path, words)
    (tmp_path / "full_model_timing.json").unlink()
    _refused_timings(tools, tmp_path, "full_model_timing.json is not beside it")


@pytest.mark.parametrize("name", [7, None, True, [], {"a": 1}, 1.5])
def test_a_kernel_whose_name_is_not_text_is_one_line(tools, tmp_path, name):
    _timing_files(tmp_path)
    path = tmp_path / "isolated_kernels_timing.json"
    timings = json.loads(path.read_text())
    timings["kernels"][1]["name"] = name
    path.write_text(json.dumps(timings))
    _refused_timings(tools, tmp_path, "a kernel without a name or a count")


def _refused_timings(tools, tmp_path, words):
    ran = tools("energy", tmp_path / "isolated_kernels_timing.json", tmp_path / "power.csv")
    assert ran.code == 2 and words in ran.err and "Traceback" not in ran.err


def test_the_report_says_on_the_console_what_is_in_it():
    report = make_energy_report(a_file(distinct_ops=9, selected_ops=4), log_of(every(0.1, 100, levels)), offset_s=0.5)
    text = "\n".join(report.lines())
    assert "whole model 100 J a run, 10 runs, 1 kJ" in text
    assert "clock       +0.500 s added to the log's times, as given" in text
    assert "predicted   11 J a run from the measured kernels" in text
    assert "comparison  whole 100 J, predicted 11 J: -89.0%, ratio 0.110" in text
    assert "unmeasured  bad: RuntimeError: no" in text
    assert "WARNING: only 4 of 9 distinct ops were selected" in text


def test_the_comparison_says_what_errors_and_idle_power_explain():
    def reported(calls, **context):
        windows = WindowsFile(context, 0, [*WINDOWS[:2], replace(WINDOWS[2], count=calls)], [])
        report = make_energy_report(windows, log_of(every(0.1, 100, levels)), offset_s=0.0)
        jsonschema.validate(report.content, SCHEMA)
        return report.content["comparison"], "\n".join(report.lines())

    comparison, said = reported(30)
    assert comparison["ratio"] == pytest.approx(0.6) and "errors explain" not in said
    assert comparison["idle_joules_between_kernels"] == pytest.approx(20 * (1 - 30 * 0.01))
    assert "a run takes 1.000 s, its kernels one by one 300.0 ms: the rest of the time at idle power is 14 J" in said
    comparison, said = reported(46)  # steps of 20 W
    assert comparison["ratio"] == pytest.approx(0.92) and "the errors explain that: +-14.6 J together" in said
    comparison, said = reported(200)
    assert comparison["idle_joules_between_kernels"] is None and "one by one" not in said
    # What was not selected took time as well.
    comparison, said = reported(30, distinct_ops=9, selected_ops=1)
    assert comparison["idle_joules_between_kernels"] is None and "one by one" not in said


def test_without_a_measured_whole_there_is_no_comparison():
    missing = [each for each in WINDOWS if each.role != "whole"]
    content = make_energy_report(a_file(missing), log_of(every(0.1, 100, levels)), offset_s=0.0).content
    assert content["comparison"]["ratio"] is None
    assert content["comparison"]["reason"] == "the whole model was not measured: it has no window"
    jsonschema.validate(content, SCHEMA)


def test_a_source_that_averages_longer_than_windows_and_gaps_are_warnings():
    times, watts = every(0.1, 100, levels)
    kept = (times < 33) | (times > 34)
    report = make_energy_report(a_file(), log_of((times[kept], watts[kept])), offset_s=0.0, averaging_s=1.0)
    assert report.content["warnings"] == [
        "1 window has gaps in the power log, of more than three intervals",
        "the source averages power over 1 s, more than the shortest window, 0.5 s: use longer windows",
    ]


def test_a_clock_that_is_behind_is_found_from_the_windows():
    late = log_of(every(0.1, 120, lambda t: levels(t + 2)))  # its clock is two seconds behind
    windows = a_file([window("idle", "idle", 0, 3, 8), *WINDOWS[1:]])
    content = make_energy_report(windows, late, offset_s=None).content
    assert content["power_log"]["clock_offset_s"] == pytest.approx(2, abs=0.1)
    assert "found from the rise" in content["power_log"]["clock"]
    assert content["whole_model"]["joules"] == pytest.approx(1000)
    with pytest.raises(UsageError, match="hold no rise from idle to load"):
        make_energy_report(a_file(WINDOWS[1:]), late, offset_s=None)


def test_what_no_figure_follows_from_is_not_known_and_not_zero():
    nothing = make_energy_report(WindowsFile({}, 0, WINDOWS[:2], []), log_of(every(0.1, 100, levels)), offset_s=0.0)
    isolated = nothing.content["isolated_kernels"]
    assert isolated["share_of_calls"] is None and isolated["predicted_joules_per_run"] is None
    assert "isolated    0 of 0 distinct kernels measured, 0 unmeasurable, 0 not run" in list(nothing.lines())
    # What is left has no time: nothing can be estimated for it.
    untimed = make_energy_report(a_file(WINDOWS[:3]), log_of(every(0.1, 100, levels)), offset_s=0.0).content
    assert untimed["isolated_kernels"]["estimated_joules_of_the_rest"] is None
    assert untimed["isolated_kernels"]["without_estimate"] == 4
    # A board that says 0 W has told no ratio, and one sample no interval.
    idle = make_energy_report(a_file(), log_of(every(0.1, 100, lambda t: 0.0)), offset_s=0.0)
    assert idle.content["comparison"]["reason"] == "the whole model took 0 J, by the log"
    single = make_energy_report(a_file(), log_of(([12.0], [50.0])), offset_s=0.0)
    assert single.content["power_log"]["interval_s"] is None and "a single sample" in next(single.lines())
    assert single.content["whole_model"]["joules"] is None
    for each in (nothing, idle, single):
        jsonschema.validate(json.loads(each.json()), SCHEMA)


def test_an_op_that_takes_no_longer_than_putting_back_what_it_writes_has_no_joules():
    quick = [window("op", "add_", 4000, 50, 60), window("restore", "add_", 2000, 70, 80)]
    hot = log_of(every(0.1, 100, lambda t: 500.0 if t < 65 else 10.0))
    (kernel,) = make_energy_report(WindowsFile({}, 0, quick, []), hot, offset_s=0.0).content["kernels"]
    assert kernel["joules_per_call"] is None and kernel["seconds_per_call"] is None
    assert "putting back what it writes takes as much" in kernel["reason"]


def test_a_report_of_the_same_schema_version_stays_one():
    """It was made when its version began: a field that is required since has made another version."""
    kept = json.loads((Path(__file__).parents[1] / "golden/energy-report-2.json").read_text())
    assert kept["schema_version"] == SCHEMA_VERSION
    jsonschema.validate(kept, SCHEMA)


def test_a_log_of_another_time_is_refused():
    with pytest.raises(UsageError, match="do not overlap, they are 900.000 s apart"):
        make_energy_report(a_file(), log_of(every(0.1, 100, levels)).shifted(-1000), offset_s=0.0)


def test_windows_are_what_was_written(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_text(a_file().text())
    assert read_windows(path) == a_file()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: lines[:-1], "is cut off"),
        (lambda lines: lines[:-2] + lines[-1:], "is cut off"),
        (lambda lines: lines[1:], "is not a file of windows"),
        (lambda lines: ["{}"], "is not a file of windows"),
        (lambda lines: ["nonsense"], "it begins with 'nonsense', which is not JSON"),
        (lambda lines: [], "it is empty"),
        (lambda lines: ["[1]"], "not of an object"),
        (lambda lines: ["timestamp,gpu,power_w", "1,0,2"], "the columns of a power log .* the second argument"),
        (lambda lines: ['{"name": "k", "count": 3}'] * 2, 'its first line has "name", "count", and no times'),
        (lambda lines: ['{"summary": {},', '"kernels": [{"name": "k"}]}'], 'it has "summary", "kernels", and no times'),
        (lambda lines: [lines[0], "nonsense", *lines[1:]], "not every line of it is JSON"),
        (lambda lines: [lines[0].replace('"version": 1', '"version": 9'), *lines[1:]], "has version 9"),
        (lambda lines: [lines[0], lines[1].replace('"runs": 0', '"runs": "x"'), *lines[2:]], "is damaged"),
        (lambda lines: [lines[0], lines[1].replace('"idle"', '"sleep"'), *lines[2:]], "is damaged"),
        (lambda lines: [lines[0], lines[1].replace('"runs": 0', '"runs": -1'), *lines[2:]], "is damaged"),
        (lambda lines: [lines[0], lines[1].replace('"runs": 0', f'"runs": {10**400}'), *lines[2:]], "is damaged"),
        (
            lambda lines: [lines[0].replace('"capture"', '"x": NaN, "capture"'), *lines[1:]],
            "not every line of it is JSON",
        ),
        (lambda lines: [lines[0].replace('_s": 0', '_s": 86400'), *lines[1:]], "its header is damaged"),
        (lambda lines: [lines[0].replace('"RuntimeError: no"', "null"), *lines[1:]], "the work that was not run"),
        (lambda lines: [lines[0].replace('"count": 4', '"count": "4"'), *lines[1:]], "the work that was not run"),
        (
            lambda lines: [re.sub(r'"not_run": .*]', '"not_run": [1]', lines[0]), *lines[1:]],
            "the work that was not run",
        ),
    ],
)
def test_a_damaged_file_of_windows_is_one_line(tmp_path, change, words):
    path = tmp_path / "windows.jsonl"
    path.write_text("\n".join(change(a_file().text().splitlines())) + "\n")
    with pytest.raises(UsageError, match=words):
        read_windows(path)


def test_a_clock_that_ran_backwards_or_was_set_is_refused(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_text(a_file([EnergyWindow("idle", "idle", 0, 10**18, 10**18 + 10**9, 5, 5)]).text())
    with pytest.raises(UsageError, match="does not end after it begins"):
        read_windows(path)
    path.write_text(a_file([EnergyWindow("idle", "idle", 0, 10**18, 10**18 - 10**9, 0, 10**9)]).text())
    with pytest.raises(UsageError, match="the clock was set during the window of idle"):
        read_windows(path)
    back = [
        window("idle", "idle", 0, 0, 5),
        EnergyWindow("whole", "whole", 1, *(int(NOW + t) * 10**9 for t in (3, 9)), 7 * 10**9, 13 * 10**9),
    ]
    path.write_text(a_file(back).text())
    with pytest.raises(UsageError, match=r"whole begins 1\.950 s before that of idle ends: the clock was set back"):
        read_windows(path)


class Now:
    """Clocks that move by a millisecond each time they are read."""

    def __init__(self):
        self.ns = 0

    def moments(self):
        return WindowClock(lambda: int(NOW * 1e9) + self.ns, self.tick, self.sleep)

    def tick(self):
        self.ns += 1_000_000
        return self.ns

    def sleep(self, seconds):
        self.ns += int(seconds * 1e9)


def test_windows_are_as_long_as_the_source_needs_and_each_op_has_one(captured):
    assert WindowOptions(0.04, 1.0).window_s == 1.0 and WindowOptions(0.5, 1.0).window_s == 6.0
    runner = WindowRunner(WindowOptions(0.001, 0.02, "none"), Now().moments())
    with Plan(captured) as plan:
        runner.idle_and_whole(plan)
    with Plan(captured, keep_going=True) as plan:
        runner.ops(plan)
    roles = [each.role for each in runner.windows]
    assert roles[:2] == ["idle", "whole"] and set(roles[2:]) == {"op", "restore"}
    ops = [each for each in runner.windows if each.role == "op"]
    assert sum(each.count for each in ops) == len(replayfmt.open(captured).ops) and not runner.not_run
    assert len(ops) == runner.distinct_ops == runner.selected_ops
    restored = {each.name for each in runner.windows if each.role == "restore"}
    assert restored and all("_" in name.partition("(")[0].partition("::")[2] for name in restored)
    assert all(each.seconds >= 0.02 and each.runs > 0 for each in runner.windows[1:])
    assert {each.kernel_class for each in ops if "aten::mm" in each.kernel} == {"matrix product or convolution"}


def test_an_op_that_cannot_run_is_listed_with_its_reason(tmp_path, monkeypatch):
    path = tmp_path / "raises.opreplay"
    with replayfmt.capture(path):
        torch.ones(3).sin()
    from replayfmt.benchmark.energy import running

    def fails(_kernel, _call):
        raise ValueError("made up")

    monkeypatch.setattr(running, "work_of", fails)
    runner = WindowRunner(WindowOptions(0.001, 0.001, "none"), Now().moments())
    with Plan(path, keep_going=True) as plan:
        runner.ops(plan)
    assert not runner.windows and {each["reason"] for each in runner.not_run} == {"ValueError: made up"}


@pytest.mark.slow
def test_from_windows_to_the_report_with_the_tools(tools, captured, tmp_path):
    windows, power, out = tmp_path / "windows.jsonl", tmp_path / "power.csv", tmp_path / "gpu_energy_report.json"
    flags = ["--power-interval=0.001", "--power-averaging=0.02", "--kernel=aten::tanh"]
    ran = tools("benchmark", captured, f"--energy-windows={windows}", *flags)
    assert ran.code == 0 and "windows, of 1 op," in ran.out
    measured = read_windows(windows)
    begin = measured.windows[0].start_s - 1
    count = int((measured.windows[-1].end_s + 1 - begin) / 0.001)
    rows = [f"{begin + 0.001 * index:.6f},0,30.0" for index in range(count)]
    power.write_text("timestamp,gpu,power_w\n" + "\n".join(rows) + "\n")
    ran = tools("energy", windows, power, "-o", out)
    assert ran.code == 0 and "whole model " in ran.out and "WARNING: only 1 of " in ran.out
    content = json.loads(out.read_text())
    jsonschema.validate(content, SCHEMA)
    whole = measured.windows[1]
    assert content["whole_model"]["joules"] == pytest.approx(30 * whole.seconds, rel=1e-4)
    (kernel,) = content["kernels"]
    (op,) = (each for each in measured.windows if each.role == "op")
    parts = {each["name"]: each for each in content["scopes"]}
    assert list(parts) == ["init", "execute", "execute/step", "execute/step/forward"]
    for each, after in pairwise(measured.windows):
        if each.role in ("scope", "whole"):
            part = parts[each.name] if each.role == "scope" else content["whole_model"]
            back = after.seconds / after.runs if after.role == "restore" else 0.0
            assert part["joules_per_run"] == pytest.approx(30 * (each.seconds / each.runs - back), rel=1e-4)
            assert part["restoring_joules_per_run"] == (pytest.approx(30 * back, rel=1e-4) if back else None)
            assert each.count == (3 if "step" in each.name else 1)
    assert "execute/step" in {each.name for each in measured.windows if each.role == "restore"}
    assert kernel["joules_per_call"] == pytest.approx(30 * op.seconds / op.runs, rel=1e-4) and kernel["count"] == 3
    assert tools("energy", windows, power, "-o", out).code == 1  # it exists
    assert tools("energy", windows, power, "-o", out, "--force", "--gpu=0", "--clock-offset=0.25").code == 0
    assert tools("energy", windows, power, "--clock-offset=auto").code == 2  # constant power has no rise
    assert json.loads(out.read_text())["power_log"]["clock_offset_s"] == 0.25
    averaged = tools("energy", windows, power, "--power-averaging=50")
    assert "WARNING: the source averages power over 50 s" in averaged.out
    refused = tools("energy", windows, power, "-o", power, "--force")
    assert refused.code == 2
    assert tools("energy", windows, power, f"--capture={captured}").code == 0
    with replayfmt.capture(tmp_path / "other.opreplay"):
        torch.ones(2).add(1)
    other = tools("energy", windows, power, f"--capture={tmp_path / 'other.opreplay'}")
    assert other.code == 2 and "was measured on another capture" in other.err and not other.out
    assert tools("energy", windows, power, f"--capture={windows}").code == 3
    seconds = tmp_path / "seconds.csv"
    seconds.write_text("timestamp,gpu,power_w\n" + "".join(f"{int(begin) + each},0,30\n" for each in range(60)))
    ran = tools("energy", windows, seconds, "-o", out, "--force")
    assert ran.code == 0 and "clock       the log's own, as it is; its times are whole seconds: each" in ran.out
    content = json.loads(out.read_text())
    jsonschema.validate(content, SCHEMA)
    assert content["power_log"]["whole_seconds"] and content["whole_model"]["joules"] is None
    for given, what in ((windows, "the file of windows"), (power, "the power log")):
        ran = tools("energy", windows, power, "-o", given, "--force")
        assert ran.code == 2 and f"is {what}; name another file" in ran.err


def test_windows_during_which_daylight_saving_time_began_say_so(tools, captured, tmp_path, monkeypatch):
    offsets = iter([3600, 7200])
    monkeypatch.setattr("opreplay_tools.energy._utc_offset_s", lambda: next(offsets))
    path = tmp_path / "windows.jsonl"
    flags = ("--power-interval=0.001", "--power-averaging=0.01", "--op-limit=1", "--scope=init")
    assert tools("benchmark", captured, f"--energy-windows={path}", *flags).code == 0
    found = read_windows(path)
    assert found.context["utc_offset_changed"] and found.utc_offset_s == 7200


def test_local_times_are_those_of_the_machine_that_was_measured_unless_a_zone_is_given(tools, tmp_path):
    windows, power = tmp_path / "windows.jsonl", tmp_path / "power.csv"
    windows.write_text(WindowsFile({}, 7200, WINDOWS[:2], []).text())
    local = [SECOND + timedelta(hours=2, seconds=each / 10 - 1) for each in range(400)]
    power.write_text("timestamp,gpu,power_w\n" + "".join(f"{each:%Y-%m-%d %H:%M:%S.%f},0,10\n" for each in local))
    ran = tools("energy", windows, power)
    assert ran.code == 0 and "times without a zone are taken for UTC+02:00" in ran.out
    ran = tools("energy", windows, power, "--zone=UTC")
    assert ran.code == 2 and "do not overlap" in ran.err
    windows.write_text(WindowsFile({"utc_offset_changed": True}, 7200, WINDOWS[:2], []).text())
    ran = tools("energy", windows, power)
    assert ran.code == 2 and "its times have no zone: give --zone=" in ran.err
    assert tools("energy", windows, power, "--zone=+02:00").code == 0
    assert tools("energy", windows, power, "--clock-offset=soon").code == 2
    assert tools("energy", windows, tmp_path / "none.csv").code == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--power-interval=1"], "--power-interval needs --energy or --energy-windows"),
        (["--energy-out=r.json"], "--energy-out needs --energy"),
        (["--energy", "--energy-windows=w.jsonl"], "give one of them"),
        (
            ["--energy", "--energy-out=x", "--power-log-out=./x"],
            "--energy-out and --power-log-out are the same file: x",
        ),
        (["--energy", "--per-op"], "--per-op does not go with --energy"),
        (["--energy-windows=w.jsonl", "--per-op"], "--per-op does not go with --energy-windows"),
        (["--energy-windows=w.jsonl", "--scope=nowhere"], "has no scope of that name or path"),
        (["--energy-windows=w.jsonl", "--program=nowhere.py"], "expected a Python script with its arguments"),
        (["--energy-windows=w.jsonl", "--power-interval=nan"], "'nan' is no number of seconds"),
        (["--energy-windows=w.jsonl", "--power-averaging=nan"], "'nan' is no number of seconds"),
        (["--energy-windows=w.jsonl", "--program-runs=2"], "--program-runs does not go with --energy-windows"),
        (["--energy-windows=w.jsonl", "--energy-source=cpu"], "--energy-source needs --energy"),
    ],
)
def test_flags_that_do_not_fit_are_refused(tools, captured, flags, words):
    ran = tools("benchmark", captured, *flags)
    assert ran.code == 2 and words in ran.err
