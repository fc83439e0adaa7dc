"""Meters beside the clocks: one more in the list is measured with the others and reported everywhere."""

import csv
import io
import json

import pytest
from rich.console import Console

from replayfmt.benchmark.measure import Options, measure
from replayfmt.benchmark.meters import CLOCKS, METERS, AbsentMeter, Description, NotMeasured, Quantity, stopwatch_for
from replayfmt.benchmark.per_op.measuring import measure_ops
from replayfmt.benchmark.per_op.op_report import make_op_report, table_lines
from replayfmt.benchmark.per_op.results import OpOptions
from replayfmt.benchmark.run_report import make_report, print_report
from replayfmt.benchmark.statistics import MinTime
from replayfmt.replay.plan import Plan

from .fakes import Time

ENERGY = Quantity("energy", "J")
PUSHES = Quantity("pushes", "1")


class Starts:
    """A meter that counts how often it was started, and notes when."""

    quantities = (PUSHES,)

    def __init__(self, log=None):
        self.count, self.log = 0, [] if log is None else log

    def describe(self):
        return (Description(PUSHES, "counted here", 1.0, "none"),)

    def reset(self):
        self.count = 0

    def start(self):
        self.count += 1
        self.log.append("start")

    def stop(self):
        self.log.append("stop")

    def read(self):
        return (self.count,)


def no_energy(_devices, _clock):
    return AbsentMeter((ENERGY,), "no counter here")


def starts(_devices, _clock):
    return Starts()


def console_text(report):
    text = io.StringIO()
    print_report(report, Console(file=text, width=400))
    return text.getvalue()


def test_a_further_meter_is_in_every_row_of_a_benchmark_with_its_unit_or_why_it_is_not_measured(captured):
    with Plan(captured) as plan:
        options = Options(MinTime(iterations=3), repetitions=2, warmup=0, verify="none", scopes=("step",))
        run = measure(plan, options, meters=(no_energy, starts, *METERS))
        report = make_report(run, plan)
    iterations = [row for row in report.rows if row["run_type"] == "iteration"]
    assert [row["pushes"] for row in iterations] == [3, 3]  # the scope is passed three times
    assert [row["samples"]["pushes"] for row in iterations] == [[3] * 3] * 2
    assert {(row["pushes_unit"], row["energy"], row["energy_unit"], row["energy_reason"]) for row in iterations} == {
        ("1", None, "J", "no counter here")
    }
    assert {row["aggregate_name"]: row["pushes"] for row in report.rows if "aggregate_name" in row} == {
        "mean": 3,
        "median": 3,
        "stddev": 0,
        "cv": 0,
    }
    assert json.loads(report.json())["benchmarks"][0]["pushes"] == 3
    table = list(csv.DictReader(io.StringIO(report.csv())))
    assert (table[0]["pushes"], table[0]["energy"]) == ("3.0", "")
    lines = console_text(report).splitlines()
    head = next(line for line in lines if line.startswith("Benchmark"))
    assert head.endswith("Energy (J)  Pushes (1)")
    assert lines[lines.index(head) + 1].endswith("not measured           3")
    assert "energy: not measured: no counter here" in lines


def test_a_further_meter_is_in_every_row_of_single_ops(captured):
    with Plan(captured, keep_going=True) as plan:
        options = OpOptions(MinTime(iterations=1), verify="none", pattern="aten::tanh")
        run = measure_ops(plan, options, progress=lambda *_: None, meters=(no_energy, starts, *METERS))
        report = make_op_report(run, plan)
    (row,) = report.rows
    assert 0 < row["pushes"] <= 1, "of one call: a sample is one start and one or more calls"
    assert (row["energy"], row["energy_reason"]) == (None, "no counter here")
    head, cells = list(table_lines(report))[:2]
    assert "Energy (J)  Pushes (1)" in head and "not measured" in cells


def test_without_further_meters_reports_hold_times_alone(captured):
    with Plan(captured) as plan:
        report = make_report(measure(plan, Options(MinTime(iterations=1), verify="none")), plan)
    assert report.further == () and not [name for row in report.rows for name in row if name.endswith("_unit")][1:]
    assert "device_time" not in report.rows[0] and "host_time" not in report.rows[0]


def test_clocks_start_last_and_stop_first_so_that_other_meters_take_none_of_the_time():
    time, log = Time(), []

    class Slow(Starts):
        def start(self):
            time.real += 1000
            super().start()

        def stop(self):
            time.real += 1000
            super().stop()

    watch = stopwatch_for((), time.clock(), (lambda *_: Slow(log), *CLOCKS))
    for took in (5, 7):
        watch.start()
        time.real += took
        watch.stop()
    assert watch.read().real_ns == 12 and log == ["start", "stop"] * 2


@pytest.mark.parametrize("missed", [0, 2])
def test_a_meter_that_misses_an_iteration_says_so_in_place_of_a_mean_of_the_others(captured, missed):
    class Failing(Starts):
        reads = 0

        def read(self):
            self.reads += 1
            return (NotMeasured("the counter was reset") if self.reads == missed + 1 else 4.0,)

    with Plan(captured) as plan:
        options = Options(MinTime(iterations=3), warmup=0, verify="none")
        report = make_report(measure(plan, options, meters=(lambda *_: Failing(), *METERS)), plan)
    assert (report.rows[0]["pushes"], report.rows[0]["pushes_reason"]) == (None, "the counter was reset")
    assert "pushes" not in report.rows[0]["samples"]
