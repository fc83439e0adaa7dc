"""The rows of a report, in Google Benchmark's JSON and CSV and in the console's table."""

import csv
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from replayfmt.benchmark import run_report
from replayfmt.benchmark.measure import Measurement, Options, Run, Sample
from replayfmt.benchmark.meters import MeasuredRegion
from replayfmt.benchmark.run_report import make_report
from replayfmt.benchmark.statistics import MinTime, Precision, duration, rate, share_text
from replayfmt.replay.results import Verification

from .fakes import EXECUTE, FakeReader

WHOLE = MeasuredRegion(None, frozenset(), 1, 300, 5_000_000)
STEP = MeasuredRegion("step 3", frozenset({"execute/step 3"}), 4, 40, None, "the capture holds no times for it")

# What Google Benchmark 1.9.5 itself writes, with repetitions: every field of the three objects.
CONTEXT = {
    "date",
    "host_name",
    "executable",
    "num_cpus",
    "mhz_per_cpu",
    "cpu_scaling_enabled",
    "caches",
    "load_avg",
    "aslr_enabled",
    "library_version",
    "library_build_type",
    "json_schema_version",
}
ITERATION = [
    "name",
    "family_index",
    "per_family_instance_index",
    "run_name",
    "run_type",
    "repetitions",
    "repetition_index",
    "threads",
    "iterations",
    "real_time",
    "cpu_time",
    "time_unit",
]
AGGREGATE = [
    "name",
    "family_index",
    "per_family_instance_index",
    "run_name",
    "run_type",
    "repetitions",
    "threads",
    "aggregate_name",
    "aggregate_unit",
    "iterations",
    "real_time",
    "cpu_time",
    "time_unit",
]
MAY_BE_ABSENT = {"mhz_per_cpu", "cpu_scaling_enabled", "aslr_enabled", "caches", "load_avg"}


def sample(*real, cpu=None, host=None):
    return Sample(
        np.array(real, dtype=float),
        np.array(cpu or real, dtype=float) / 2,
        None if host is None else np.array(host, dtype=float),
    )


@pytest.fixture(autouse=True)
def an_idle_machine(monkeypatch):
    monkeypatch.setattr(run_report.os, "getloadavg", lambda: (0.1, 0.1, 0.1))


def report(*measurements, verification=None, options=None, step_ns=None):
    verification = verification or Verification("auto", "bitwise", digests=3)
    result = SimpleNamespace(verification=verification)
    options = options or Options(min_time=MinTime(iterations=3))
    run = Run(options, list(measurements), measurements[0], result, result, None, "hot: made up", step_ns)
    return make_report(run, SimpleNamespace(reader=FakeReader(EXECUTE), devices=[torch.device("cpu")]))


def shown(made):
    return f"{made}\n"


def test_one_repetition_is_one_row_with_google_benchmarks_fields_in_its_order():
    made = json.loads(report(Measurement(WHOLE, [sample(1000, 2000, 3000)])).json())
    (row,) = made["benchmarks"]
    assert list(row)[: len(ITERATION)] == ITERATION
    assert {name: row[name] for name in ITERATION} == {
        "name": "BM_replay",
        "family_index": 0,
        "per_family_instance_index": 0,
        "run_name": "BM_replay",
        "run_type": "iteration",
        "repetitions": 1,
        "repetition_index": 0,
        "threads": 1,
        "iterations": 3,
        "real_time": 2000.0,
        "cpu_time": 1000.0,
        "time_unit": "ns",
    }
    assert CONTEXT - set(made["context"]) <= MAY_BE_ABSENT and made["context"]["json_schema_version"] == 1


def test_counters_hold_what_is_ours():
    (row,) = report(Measurement(WHOLE, [sample(*range(1000, 1010))])).rows
    assert (row["ops"], row["passes"], row["captured_time"]) == (300, 1, 5_000_000)
    assert row["ops_per_second"] == pytest.approx(300 / 1004.5e-9)
    assert (row["median_real_time"], row["min_real_time"], row["max_real_time"]) == (1004.5, 1000, 1009)
    assert (row["median_real_time_low"], row["median_real_time_high"]) == (1001, 1008)
    assert row["median_confidence"] > 0.95
    assert row["stddev_real_time"] == pytest.approx(np.std(range(10), ddof=1))
    assert row["samples"]["real_time"] == [float(each) for each in range(1000, 1010)]
    assert "host_time" not in row and "host_time" not in row["samples"]


def test_times_of_a_clock_that_stood_still_are_no_measurement():
    made = report(Measurement(STEP, [sample(0.0, 0.0), sample(0.0, 0.0)]))
    for row in made.rows:  # and no aggregates over them
        assert row["run_type"] == "iteration" and row["samples"]["real_time"] == [0.0, 0.0]
        assert row["unmeasurable"] == "resolution: the clock did not advance"
        assert not {"real_time", "cpu_time", "median_real_time", "ops_per_second"} & set(row)
        assert not {"stddev_real_time", "min_real_time", "median_real_time_low", "iqr_real_time"} & set(row)
        assert row["error_occurred"] and row["error_message"].startswith("unmeasurable: resolution")
    assert "WARNING: BM_replay/scope:step 3: unmeasurable: resolution: the clock did not advance" in shown(made)
    assert "unmeasurable: resolution: the clock did not advance" in made.csv()


def test_work_without_an_op_has_no_time_and_not_that_of_the_clock():
    made = report(Measurement(MeasuredRegion("idle", frozenset({"idle"}), 1, 0, 900), [sample(*range(40, 50))]))
    (row,) = made.rows
    assert row["unmeasurable"] == "no op is in it: its times are those of reading the clock"
    assert len(row["samples"]["real_time"]) == 10 and row["error_occurred"]
    assert not [name for name in row if "real_time" in name or name == "ops_per_second"]
    assert "0.000" not in shown(made) and "the median is between" not in shown(made)


def test_a_median_that_is_not_known_to_a_factor_of_ten_is_no_measurement_if_a_precision_was_asked_for():
    noisy = Measurement(WHOLE, [sample(*[1000.0, 13000.0] * 10)])
    (row,) = report(noisy).rows
    assert row["median_real_time"] == 7000 and "unmeasurable" not in row
    (row,) = report(noisy, options=Options(precision=Precision(0.02, 5.0))).rows
    assert row["unmeasurable"].startswith("noise: the median is only known to lie between 1.000 us and 13.00 us")
    assert (row["median_real_time_low"], row["median_real_time_high"]) == (1000, 13000)


def test_a_time_of_a_few_steps_of_its_clock_is_no_measurement():
    (row,) = report(Measurement(WHOLE, [sample(*[300.0] * 10)]), step_ns=100.0).rows
    assert row["unmeasurable"] == "resolution: the median, 300 ns, is less than 4 steps of the clock, of 100 ns each"
    (row,) = report(Measurement(WHOLE, [sample(*[400.0] * 10)]), step_ns=100.0).rows
    assert row["median_real_time"] == 400


def test_the_spread_and_the_outliers_are_in_the_row_and_on_the_console_and_none_is_dropped():
    made = report(Measurement(WHOLE, [sample(*range(1000, 1010), 5000.0)]))
    (row,) = made.rows
    assert (row["first_quartile_real_time"], row["third_quartile_real_time"]) == (1002.5, 1007.5)
    assert (row["iqr_real_time"], row["outliers_low"], row["outliers_high"]) == (5.0, 0, 1)
    assert row["max_real_time"] == 5000 and row["real_time"] > 1300  # it counts
    assert row["median_half_width"] == pytest.approx((1009 - 1001) / 2 / 1005)
    text = shown(made)
    assert "half of the iterations took 1.002 us to 1.008 us (IQR 5.000 ns); 1 outlier (0 low, 1 high)" in text
    assert "with 95% confidence (+-0.4%)" in text


def test_a_precision_that_was_not_reached_is_a_warning():
    wide = Measurement(WHOLE, [sample(*np.random.default_rng(1).permutation(range(1000, 1200, 10)))])
    assert not [text for text in report(wide).rows[0]["warnings"] if "asked for" in text]
    made = report(wide, options=Options(precision=Precision(0.02, 5.0)))
    assert "the median is known to +-0.041 of itself, not to the 0.02 asked for, after 5 s" in shown(made)
    assert made.context["precision"] == 0.02 and made.context["max_time"] == "5s"


def test_what_is_not_known_is_null_with_a_reason():
    (row,) = report(Measurement(STEP, [sample(7.0)])).rows
    for name in ("captured_time", "stddev_real_time", "median_confidence", "iqr_real_time"):
        assert row[name] is None and row[f"{name}_reason"]
    assert json.loads(report(Measurement(STEP, [sample(0.0)])).json())


def test_repetitions_have_aggregates_over_them_as_google_benchmark_makes_them():
    rows = report(Measurement(STEP, [sample(100, 300), sample(500, 500), sample(200, 200)])).rows
    assert [row["name"] for row in rows] == ["BM_replay/scope:step 3"] * 3 + [
        f"BM_replay/scope:step 3_{name}" for name in ("mean", "median", "stddev", "cv")
    ]
    mean, median, stddev, cv = rows[3:]
    assert list(mean)[: len(AGGREGATE)] == AGGREGATE
    assert {row["run_name"] for row in rows} == {"BM_replay/scope:step 3"}
    assert {row["iterations"] for row in rows[3:]} == {row["repetitions"] for row in rows} == {3}
    assert (mean["real_time"], median["real_time"]) == (300, 200)
    assert stddev["real_time"] == pytest.approx(np.std([200, 500, 200], ddof=1))
    assert cv["real_time"] == pytest.approx(stddev["real_time"] / 300)
    assert [row["aggregate_unit"] for row in rows[3:]] == ["time", "time", "time", "percentage"]
    assert mean["cpu_time"] == 150
    assert mean["min_real_time"] == pytest.approx((100 + 500 + 200) / 3)


def test_each_region_is_a_family_of_its_own():
    rows = report(Measurement(WHOLE, [sample(1, 2)] * 2), Measurement(STEP, [sample(1, 1)] * 2)).rows
    assert [row["family_index"] for row in rows] == [0] * 6 + [1] * 6


def test_on_a_device_the_hosts_time_is_beside_the_devices():
    made = report(Measurement(WHOLE, [sample(1000, 3000, host=(400, 600)), sample(1000, 3000, host=(100, 300))]))
    assert [row["host_time"] for row in made.rows] == pytest.approx([500, 200, 350, 350, 212.13203435, 0.6060915267])
    assert made.rows[0]["samples"]["host_time"] == [400, 600]
    assert "Host time" in shown(made) and "Host time" not in shown(report(Measurement(WHOLE, [sample(1)])))


def test_two_reports_can_be_paired_by_name_and_unit():
    """What compare.py does: rows of one name, in the unit of the first, compared one by one."""
    old = json.loads(report(Measurement(WHOLE, [sample(100, 300), sample(200, 200)])).json())
    new = json.loads(report(Measurement(WHOLE, [sample(1e9, 3e9), sample(2e9, 2e9)])).json())
    for name in {row["name"] for row in old["benchmarks"]}:
        pair = [[row for row in made["benchmarks"] if row["name"] == name] for made in (old, new)]
        assert len(pair[0]) == len(pair[1]) and {row["time_unit"] for side in pair for row in side} == {"ns"}
        assert all(
            isinstance(row["real_time"], float) and isinstance(row["cpu_time"], float) for side in pair for row in side
        )


def test_csv_has_google_benchmarks_columns_and_then_the_counters():
    text = report(Measurement(WHOLE, [sample(1000, 3000), sample(1000, 1000)])).csv()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert text.startswith(
        "name,iterations,real_time,cpu_time,time_unit,bytes_per_second,items_per_second,label,"
        "error_occurred,error_message,captured_time,"
    )
    assert [row["name"] for row in rows][:3] == ["BM_replay", "BM_replay", "BM_replay_mean"]
    assert (rows[0]["iterations"], rows[0]["real_time"], rows[0]["time_unit"]) == ("2", "2000.0", "ns")
    assert rows[0]["captured_time"] == "5000000" and rows[0]["label"] == "" and rows[2]["captured_time"] == ""
    assert rows[-1]["name"] == "BM_replay_cv" and rows[-1]["time_unit"] == ""
    assert not {"samples", "warnings"} & set(rows[0])


def test_the_console_shows_every_figure_and_what_the_capture_took():
    text = shown(report(Measurement(WHOLE, [sample(*[1.5e6] * 9, 2e6)])))
    header, row = [line for line in text.splitlines() if line.startswith(("Benchmark", "BM_replay "))]
    for title in ("Real mean", "CPU time", "Iterations", "Median", "Std. dev.", "Minimum", "Ops/s"):
        assert title in header
    assert row.split("  ")[0] == "BM_replay"
    for figure in ("1.550 ms", "775.0 us", " 10 ", "1.500 ms", "158.1 us", "193.5k/s"):
        assert figure in row
    assert "BM_replay: the median is between 1.500 ms and 1.500 ms with 95% confidence" in text
    assert "took 5.000 ms during capture" in text
    assert "verified  before and after timing, bitwise: 3 digests" in text


def test_the_console_says_why_the_capture_tells_no_time_and_how_many_passes_there_were():
    assert "not measured: the capture holds no times for it" in shown(report(Measurement(STEP, [sample(1, 2)])))
    timed = MeasuredRegion("step 3", frozenset(), 4, 40, 2000)
    assert "took 2.000 us in 4 passes during" in shown(report(Measurement(timed, [sample(1, 2)])))


def test_the_console_shows_coefficients_of_variation_as_shares():
    text = shown(report(Measurement(WHOLE, [sample(100), sample(300)])))
    (row,) = [line for line in text.splitlines() if line.startswith("BM_replay_cv")]
    assert "70.71%" in row


def test_warnings_stand_under_the_table_and_in_the_json():
    nothing = Verification("auto", "none", ("the capture holds no digests",))
    made = report(Measurement(WHOLE, [sample(1, 1)]), verification=nothing)
    ((general,), (particular,)) = made.context["warnings"], made.rows[0]["warnings"]
    assert general.startswith("nothing was verified (the capture holds no digests)")
    assert particular.startswith("only 2 iterations")
    assert f"WARNING: {general}\nWARNING: BM_replay: {particular}\n" in shown(made)
    assert "\nnot verified: the capture holds no digests" in shown(made)


def test_nothing_is_cut_off_where_there_is_no_terminal():
    name = "execute/" + "model.layers.0.self_attn/" * 10 + "q_proj"
    made = report(Measurement(MeasuredRegion(name, frozenset(), 1, 1, 10), [sample(1, 2)]))
    assert f"BM_replay/scope:{name} " in shown(made)


def test_names_from_a_capture_cannot_steer_a_terminal_or_be_taken_for_markup():
    made = report(Measurement(MeasuredRegion("[red]a\x1b[2J\nb", frozenset(), 1, 1, 10), [sample(1, 2)]))
    text = shown(made)
    assert "BM_replay/scope:[red]a\\x1b[2J\\nb " in text and "\x1b" not in text
    assert json.loads(made.json())["benchmarks"][0]["name"] == "BM_replay/scope:[red]a\x1b[2J\nb"


@pytest.mark.parametrize(
    "nanoseconds, text",
    [
        (0, "0.000 ns"),
        (12.345, "12.35 ns"),
        (999.9, "999.9 ns"),
        (1000, "1.000 us"),
        (123_456, "123.5 us"),
        (1.5e6, "1.500 ms"),
        (2.5e9, "2.500 s"),
        (123456e9, "123456 s"),
        (None, "-"),
        (-1.5e3, "-1.500 us"),
    ],
)
def test_times_have_four_digits_and_the_unit_that_fits(nanoseconds, text):
    assert duration(nanoseconds) == text


@pytest.mark.parametrize(
    "per_second, text", [(12.5, "12.50/s"), (260_123, "260.1k/s"), (3.2e6, "3.200M/s"), (None, "-")]
)
def test_rates_likewise(per_second, text):
    assert rate(per_second) == text


def test_a_share_that_rounds_to_nothing_is_not_shown_as_none():
    assert [share_text(each) for each in (0.0, 1e-9, 0.000499, 0.0005, 0.1234)] == [
        "0.0%",
        "<0.1%",
        "<0.1%",
        "0.1%",
        "12.3%",
    ]
