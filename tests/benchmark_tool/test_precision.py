"""How long to measure: until the median is known well enough, with a floor and a cap; and with what in the caches."""

import json
import math
from itertools import count, cycle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from replayfmt.benchmark import measure as inputs_module
from replayfmt.benchmark.measure import CacheFlush, Options, default_inputs, describe_inputs, flush_bytes, measure
from replayfmt.benchmark.meters import Clock, _step_and_cost
from replayfmt.benchmark.per_op.measuring import measure_ops
from replayfmt.benchmark.per_op.results import OpOptions
from replayfmt.benchmark.statistics import (
    MinTime,
    Precision,
    StoppingRule,
    median_interval,
    op_precision,
    parse_share,
    whole_precision,
)
from replayfmt.errors import UsageError
from replayfmt.replay.plan import Plan

from .fakes import FakePlan, Time

ONE_OP = [("begin", "execute"), ("op", 1000, 500), ("end", "execute")]


class Varying(FakePlan):
    """Replays that take turns in how long they take: nanoseconds, over and over."""

    def __init__(self, time, nanoseconds):
        super().__init__(ONE_OP, time)
        self._taken = cycle(nanoseconds)

    def execute(self, **options):
        self.script = [ONE_OP[0], ("op", next(self._taken), 1), ONE_OP[2]]
        return super().execute(**options)


def iterations(nanoseconds, **options):
    time = Time()
    options = {"min_time": MinTime(seconds=20e-6), "warmup": 0, "verify": "none"} | options
    run = measure(Varying(time, nanoseconds), Options(**options), clock=time.clock())
    return len(run.whole.samples[0].real)


@pytest.mark.slow
def test_steady_times_end_at_the_floor_and_varying_ones_go_on_until_the_median_is_known():
    assert iterations([1000]) == 20
    assert iterations([1000], precision=Precision(0.02, 1.0)) == 20
    rough = iterations([900, 1000, 1000, 1100], precision=Precision(0.05, 1.0))
    fine = iterations([900, 950, 1000, 1000, 1050, 1100], precision=Precision(0.001, 1.0))
    assert 20 <= rough < fine < 1000


def test_what_is_never_narrow_ends_at_the_cap():
    two_sided = [500, 1500]
    assert iterations(two_sided, precision=Precision(0.02, 200e-6)) == 200
    assert iterations(two_sided, precision=Precision(0.02, 400e-6)) == 400


@pytest.mark.slow
def test_a_number_of_replays_is_the_floor_if_a_precision_is_asked_for():
    assert iterations([1000], min_time=MinTime(iterations=3)) == 3
    assert iterations([1000], min_time=MinTime(iterations=3), precision=Precision(0.02, 1.0)) == 6  # an interval
    assert iterations([1000], min_time=MinTime(iterations=30), precision=Precision(0.02, 1.0)) == 30


@pytest.mark.slow
def test_every_scope_has_to_be_narrow_and_not_only_the_whole():
    time = Time()
    plan = FakePlan([("op", 100_000, 1), ("begin", "a"), ("op", 10, 1), ("end", "a")], time)
    lengths = cycle([5, 15])

    def execute(**options):
        plan.script[2] = ("op", next(lengths), 1)
        return FakePlan.execute(plan, **options)

    plan.execute = execute
    asked = Options(MinTime(iterations=6), warmup=0, verify="none", precision=Precision(0.02, 0.01))
    whole = measure(plan, asked, clock=time.clock())
    assert len(whole.whole.samples[0].real) == 6
    plan.execute = execute
    scoped = measure(
        plan,
        Options(MinTime(iterations=6), warmup=0, verify="none", precision=Precision(0.02, 0.01), scopes=("a",)),
        clock=time.clock(),
    )
    assert len(scoped.whole.samples[0].real) == 100  # the cap: 0.01 s of 100 us


def test_looking_costs_little_because_it_happens_less_and_less_often(monkeypatch):
    looks = []
    original = StoppingRule.__call__.__globals__["median_interval"]
    monkeypatch.setitem(
        StoppingRule.__call__.__globals__, "median_interval", lambda v: looks.append(len(v)) or original(v)
    )
    narrow, times = StoppingRule(0.01), []
    for index in range(1000):
        times.append(50.0 + 100 * (index % 2))
        assert not narrow(times)
    assert looks[0] == 6 and len(looks) < 40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "median"),
    [
        (lambda random: random.lognormal(0, 0.05, 600), 1.0),
        (lambda random: 1 + random.exponential(0.1, 600), 1 + 0.1 * math.log(2)),
    ],
)
def test_ending_when_the_interval_is_narrow_leaves_it_nearly_as_certain_as_it_says(draw, median):
    random = np.random.default_rng(11)
    held = []
    for _ in range(1000):
        times, narrow, count = draw(random), StoppingRule(0.02), 6
        while not narrow(times[:count]) and count < len(times):
            count += 1
        interval = median_interval(times[:count])
        held.append(interval.low <= median <= interval.high)
    assert np.mean(held) > 0.93  # 0.95 of a number of times that is given; 0.92 if one narrow interval ends it


@pytest.mark.parametrize("text", ["0.5", "0%", "-1%", "two", "2%%", "1e9%", "nan%", ""])
def test_what_is_no_percentage_is_refused(text):
    with pytest.raises(UsageError, match="a percentage"):
        parse_share("--benchmark-precision", text)


def test_the_flags_are_a_share_and_a_cap():
    assert parse_share("--x", "2.5%") == 0.025
    assert whole_precision(None, None, MinTime(seconds=2)) == Precision(0.02, 20)
    assert whole_precision("1%", None, MinTime(iterations=3)) == Precision(0.01, 5)
    assert whole_precision(None, "7s", MinTime(seconds=2)) == Precision(0.02, 7)
    assert whole_precision("off", None, MinTime(seconds=2)) is None
    assert whole_precision(None, None, MinTime(iterations=3)) is None
    assert op_precision(None, None, MinTime(seconds=0.05)) == Precision(0.02, 0.1)


@pytest.mark.parametrize(
    ("precision", "most", "floor", "words"),
    [
        ("off", "3s", MinTime(seconds=1), "has no effect"),
        (None, "3s", MinTime(iterations=1), "has no effect"),
        (None, "0.5s", MinTime(seconds=1), "less than --benchmark-min-time=1s"),
        (None, "20x", MinTime(seconds=1), "expected <float>s"),
        (None, "soon", MinTime(seconds=1), "expected <float>s"),
    ],
)
def test_a_cap_that_makes_no_sense_is_refused(precision, most, floor, words):
    with pytest.raises(UsageError, match=words):
        whole_precision(precision, most, floor)


@pytest.mark.slow
def test_the_tool_takes_the_flags_and_says_what_it_did(tools, captured):
    flags = ["--benchmark-min-time=3x", "--benchmark-warmup=0", "--benchmark-format=json"]
    context = json.loads(tools("benchmark", captured, *flags).out)["context"]
    assert context["precision"] is None and context["inputs"].startswith("hot: ")
    given = ["--benchmark-precision=900%", "--benchmark-max-time=30s", "--inputs=cold"]
    document = json.loads(tools("benchmark", captured, *flags, *given).out)
    assert (document["context"]["precision"], document["context"]["max_time"]) == (9.0, "30s")
    assert document["context"]["inputs"].startswith("cold: cpu: ")
    assert document["benchmarks"][0]["iterations"] >= 6  # what an interval takes, more on a busy machine
    refused = tools("benchmark", captured, *flags, "--benchmark-max-time=1s")
    assert refused.code == 2 and "has no effect" in refused.err
    few = ["--per-op", "--op-limit=1", "--benchmark-precision=900%", "--inputs=cold"]
    document = json.loads(tools("benchmark", captured, flags[0], flags[2], *few).out)
    assert document["context"]["precision"] == 9.0 and document["context"]["inputs"].startswith("cold: ")
    (row,) = document["benchmarks"]
    assert len(row["samples"]["real_time"]) == row["samples_taken"] == row["iterations"] >= 6


def test_an_op_is_measured_until_its_median_is_known(captured):
    moments = cycle([400_000, 600_000])
    now = [0]

    def real():
        now[0] += next(moments) // 2
        return now[0]

    def calls(precision):
        options = OpOptions(MinTime(iterations=20), verify="none", pattern="aten::tanh", precision=precision)
        with Plan(captured, keep_going=True) as plan:
            clock = Clock(real=real, cpu=lambda: 0)
            return measure_ops(plan, options, clock=clock, progress=lambda *_: None).ops[0].calls

    assert calls(None) == 20 < calls(Precision(0.0001, 0.1)) <= 200


def test_an_op_without_a_measurement_is_listed_as_unmeasurable_and_is_in_no_sum(captured, tools, monkeypatch):
    from replayfmt.benchmark.per_op import measuring

    monkeypatch.setattr(measuring, "why_unmeasurable", lambda times, step, *, noise: "noise: made up")
    ran = tools("benchmark", captured, "--per-op", "--kernel=aten::tanh", "--benchmark-min-time=3x")
    assert ran.code == 0
    assert "unmeasurable" in ran.out and "noise: made up" in ran.out
    assert "sum: not measured: no call has a time (3 unmeasurable)" in ran.out
    flags = ["--per-op", "--kernel=aten::tanh", "--benchmark-min-time=3x", "--benchmark-format=json"]
    document = json.loads(tools("benchmark", captured, *flags).out)
    assert document["context"]["estimated_us"] is None
    (row,) = document["benchmarks"]
    assert row["verdict"] == "unmeasurable" and row["unmeasurable"] == "noise: made up" and "real_time" not in row
    assert len(row["samples"]["real_time"]) >= 6


@pytest.mark.slow
def test_cold_inputs_are_flushed_untimed_before_each_replay_and_each_call(captured, monkeypatch):
    flushed = []

    class Flush(CacheFlush):
        def __call__(self):
            flushed.append(1)
            super().__call__()

    monkeypatch.setattr("replayfmt.benchmark.measure.CacheFlush", Flush)
    monkeypatch.setattr("replayfmt.benchmark.per_op.measuring.CacheFlush", Flush)
    monkeypatch.setattr(inputs_module, "largest_cache", lambda _root: 1 << 20)
    time = Time()
    moved = []

    def slow(self):
        time.real += 1_000_000  # would be seen if it were timed
        moved.append(1)

    monkeypatch.setattr(Flush, "__call__", slow)
    asked = Options(MinTime(iterations=3), warmup=1, verify="none", inputs="cold")
    run = measure(FakePlan(ONE_OP, time), asked, clock=time.clock())
    assert run.whole.samples[0].real.tolist() == [1000] * 3 and len(moved) == 4
    assert run.inputs == "cold: cpu: 2 MiB are rewritten before each; its last-level cache has 1 MiB"
    monkeypatch.undo()
    monkeypatch.setattr("replayfmt.benchmark.per_op.measuring.CacheFlush", Flush)
    with Plan(captured, keep_going=True) as plan:
        options = OpOptions(MinTime(iterations=6), verify="none", pattern="aten::tanh", inputs="cold")
        (op,) = measure_ops(plan, options, progress=lambda *_: None).ops
    assert len(flushed) == len(op.samples) + 1 == op.calls + 1  # and before the call that is looked at first


@pytest.mark.slow
def test_a_flush_is_larger_than_the_cache_or_says_that_its_size_is_not_known(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(inputs_module, "largest_cache", lambda _root: 3 << 20)
    flush = CacheFlush([cpu, torch.device("meta")])
    assert [buffer.nbytes for buffer in flush._buffers] == [6 << 20]
    flush()
    assert flush._buffers[0].unique().tolist() == [1]
    monkeypatch.setattr(inputs_module, "largest_cache", lambda _root: None)
    monkeypatch.setattr(inputs_module, "_UNKNOWN_CACHE_BYTES", 1 << 20)
    flush = CacheFlush([cpu])
    assert describe_inputs("cold", flush, "calls") == (
        "cold: cpu: 1 MiB are rewritten before each; the size of its caches is not known"
    )
    assert default_inputs([cpu]) == "hot" and default_inputs([cpu, torch.device("cuda", 0)]) == "cold"


def test_what_a_kernel_task_rewrites_empties_the_caches_of_its_devices_not_the_hosts(monkeypatch):
    gpu = SimpleNamespace(get_device_properties=lambda _device: SimpleNamespace(L2_cache_size=60 << 20))
    monkeypatch.setattr(inputs_module, "device_module", lambda _kind: gpu)
    monkeypatch.setattr(inputs_module, "largest_cache", lambda _root: 32 << 20)
    host, device = torch.device("cpu"), torch.device("cuda", 0)
    assert [flush_bytes(each) >> 20 for each in ([device], [host], [host, device])] == [120, 64, 120]


def test_the_step_of_a_clock_is_not_what_reading_it_costs():
    now, costs = [0], cycle([1000, 1000, 1000, 1100, 1200])

    def clock_of_100():
        now[0] += next(costs)
        return now[0]

    assert _step_and_cost(clock_of_100) == (100, 1000)


def test_a_clock_that_moves_seldom_has_its_step_and_one_that_stands_still_none():
    """As that of CPU time under `ulimit -t`."""
    ticks = count()
    assert _step_and_cost(lambda: next(ticks) // 5000 * 4_000_000) == (4_000_000, pytest.approx(800, rel=0.01))
    assert _step_and_cost(lambda: 7) == (None, 0)


def test_every_meter_says_where_its_readings_come_from_and_what_they_are_worth(tools, captured):
    flags = ["--benchmark-min-time=1x", "--benchmark-warmup=0", "--benchmark-format=json"]
    host, cpu, device = json.loads(tools("benchmark", captured, *flags).out)["context"]["meters"]
    assert (host["name"], host["unit"], host["source"]) == ("host_time", "ns", "time.perf_counter_ns")
    assert host["resolution"] > 0 and "reading it takes" in host["error"]
    assert cpu["name"] == "cpu_time" and cpu["resolution"] > 0
    assert device == {"name": "device_time", "unit": "ns", "not_measured": "the replay uses no accelerator"}
