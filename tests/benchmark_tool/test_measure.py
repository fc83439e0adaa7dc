"""How replays are repeated and timed, against a plan and clocks that are made up."""

import gc

import numpy as np
import pytest
import torch

from replayfmt.benchmark.measure import Options, measure
from replayfmt.benchmark.meters import (
    DeviceTimer,
    HostTimer,
    MeasuredRegion,
    ReplayTimer,
    ScopeWatch,
    Stopwatch,
    stopwatch_for,
)
from replayfmt.benchmark.statistics import MinTime
from replayfmt.errors import ReplayFailed, ReplayMismatch, UsageError

from .fakes import EXECUTE, FakePlan, Time


def run(script=EXECUTE, *, time=None, plan=None, progress=None, **options):
    time = time or Time()
    plan = plan or FakePlan(script, time)
    options.setdefault("min_time", MinTime(iterations=3))
    options.setdefault("warmup", 0)
    return measure(plan, Options(**options), clock=time.clock(), progress=progress), plan


def test_each_iterations_real_and_cpu_time_is_kept():
    time = Time()
    result, _ = run(time=time, plan=FakePlan(EXECUTE, time, slower=5))
    (sample,) = result.measurements[0].samples
    assert sample.real.tolist() == [120, 130, 140]  # two ops, each 5 ns slower every time
    assert sample.cpu.tolist() == [60, 60, 60] and sample.host is None


def test_iterations_asked_for_by_number_are_exactly_that_many():
    result, plan = run(min_time=MinTime(iterations=7))
    assert len(result.whole.samples[0].real) == 7 and plan.timed == 7


def test_iterations_go_on_until_the_seconds_asked_for_have_been_timed():
    result, _ = run(min_time=MinTime(seconds=1000e-9))
    assert len(result.whole.samples[0].real) == 9  # 8 * 120 < 1000 <= 9 * 120
    assert result.cut_short is None


def test_at_least_one_iteration_is_timed():
    result, _ = run(min_time=MinTime(seconds=1e-9))
    assert len(result.whole.samples[0].real) == 1


def test_untimed_restoring_cannot_keep_a_benchmark_going_for_ever():
    time = Time()
    result, _ = run(time=time, plan=FakePlan(EXECUTE, time, restore=5000), min_time=MinTime(seconds=10_000e-9))
    assert len(result.whole.samples[0].real) == 6  # 50,000 ns of patience, at 10,120 each but for the first
    assert result.cut_short == pytest.approx(50_720e-9)


@pytest.mark.slow
def test_every_repetition_has_the_iterations_that_the_first_one_found():
    result, plan = run(min_time=MinTime(seconds=1000e-9), repetitions=3)
    assert [len(sample.real) for sample in result.whole.samples] == [9, 9, 9] and plan.timed == 27


@pytest.mark.slow
def test_warm_up_replays_are_not_in_the_sample():
    time = Time()
    result, plan = run(time=time, plan=FakePlan(EXECUTE, time, slower=5), warmup=2, repetitions=2)
    assert plan.timed == 10  # the stopwatch runs, nobody reads it
    assert [sample.real.tolist() for sample in result.whole.samples] == [[140, 150, 160], [190, 200, 210]]


@pytest.mark.slow
def test_verification_runs_before_and_after_timing_and_never_inside():
    _, plan = run(verify="bitwise", repetitions=2, warmup=1)
    assert plan.calls == ["bitwise"] + ["none"] * 8 + ["bitwise"]
    _, plan = run(verify="none")
    assert plan.calls == ["none"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("call, when", [(1, "before timing"), (5, "after timing"), (3, "while it was timed")])
def test_a_replay_that_does_not_match_leaves_no_results(call, when):
    time = Time()
    plan = FakePlan(EXECUTE, time)
    plan.mismatch_at = call
    with pytest.raises(ReplayMismatch, match=f"{when}, so there are no times to report: op 3") as raised:
        run(time=time, plan=plan)
    assert raised.value.exit_code == 1
    assert call != 1 or plan.timed == 0


def test_only_the_time_inside_the_scope_is_reported_and_the_whole_replay_runs():
    script = [("op", 1000, 1000), *EXECUTE, ("op", 500, 500), *EXECUTE, ("op", 7, 7)]
    result, plan = run(script, scopes=("execute",))
    (measurement,) = result.measurements
    assert measurement.region.row == "BM_replay/scope:execute"
    assert measurement.samples[0].real.tolist() == [240] * 3 and measurement.samples[0].cpu.tolist() == [120] * 3
    assert result.whole.samples[0].real.tolist() == [1747] * 3
    assert plan.timed == 3


def test_a_scope_inside_itself_is_counted_once():
    script = [("begin", "f"), ("op", 10, 1), ("begin", "f/f"), ("op", 5, 1), ("end", "f/f"), ("end", "f")]
    result, _ = run(script, scopes=("f",))
    assert result.measurements[0].samples[0].real.tolist() == [15] * 3


def test_content_that_enters_on_the_way_is_not_timed():
    script = [
        ("op", 10, 1),
        ("import", 9999),
        ("begin", "a"),
        ("op", 5, 1),
        ("import", 7777),
        ("op", 6, 1),
        ("end", "a"),
    ]
    result, _ = run(script, scopes=("a",))
    assert result.measurements[0].samples[0].real.tolist() == [11] * 3
    assert result.whole.samples[0].real.tolist() == [21] * 3


def test_a_timer_that_is_stopped_while_paused_has_stopped_already():
    time = Time()
    timer = ReplayTimer(stopwatch_for((), time.clock()))
    timer.start()
    time.real += 5
    timer.pause()
    time.real += 100
    timer.stop()
    assert timer.stopwatch.read().real_ns == 5


def test_several_scopes_are_measured_in_the_same_replays():
    script = [("begin", "a"), ("op", 10, 1), ("begin", "a/b"), ("op", 5, 1), ("end", "a/b"), ("end", "a")]
    result, plan = run(script, scopes=("a", "b"))
    assert [each.samples[0].real.tolist() for each in result.measurements] == [[15] * 3, [5] * 3] and plan.timed == 3


def test_scopes_that_cannot_be_measured_are_refused_before_anything_runs():
    time = Time()
    plan = FakePlan(EXECUTE, time)
    with pytest.raises(UsageError):
        run(time=time, plan=plan, scopes=("missing",))
    assert plan.calls == []


@pytest.mark.parametrize(
    "events, message",
    [
        (["end"], "ended before it began"),
        (["begin"], "did not end"),
        (["begin", "end", "begin", "end"], "2 times"),
        ([], "0 times"),
    ],
)
def test_a_replay_that_leaves_its_scopes_otherwise_than_captured_fails(events, message):
    watch = ScopeWatch(MeasuredRegion("step", frozenset({"step"}), 1, 1, None), stopwatch_for((), Time().clock()))
    with pytest.raises(ReplayFailed, match=message):
        for event in events:
            watch(event, "step", "step", 4)
        watch.end_replay()


@pytest.mark.slow
def test_the_garbage_collector_is_off_while_timing_and_as_before_afterwards():
    seen = []
    run(progress=lambda what, _done, _of: seen.append((what.startswith("verifying"), gc.isenabled())))
    assert set(seen) == {(True, True), (False, False)} and gc.isenabled()
    gc.disable()
    try:
        run()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_is_back_on_when_a_replay_fails():
    time = Time()
    plan = FakePlan(EXECUTE, time)
    plan.script = [("end", "execute"), *EXECUTE]  # not what its capture holds
    with pytest.raises(ReplayFailed):
        measure(plan, Options(scopes=("execute",), verify="none"), clock=time.clock())
    assert gc.isenabled()


def test_progress_is_told_of_every_iteration():
    seen = []
    run(progress=lambda *step: seen.append(step), warmup=1)
    assert seen == [
        ("verifying before timing", 0, None),
        ("repetition 1 of 1: warming up", 0, 1),
        *(("repetition 1 of 1", done, 3) for done in range(4)),
        ("verifying after timing", 0, None),
    ]


@pytest.mark.parametrize("options", [{"repetitions": 0}, {"repetitions": -1}, {"warmup": -1}])
def test_options_that_measure_nothing_are_usage_errors(options):
    with pytest.raises(UsageError, match="--benchmark-"):
        Options(**options)


class FakeEvent:
    """A CUDA event on a device whose work takes four times what the host needs to issue it."""

    def __init__(self, time, log):
        self.time, self.log, self.at, self.waited = time, log, None, False

    def record(self):
        self.at, self.waited = 4 * self.time.real / 1e6, False

    def synchronize(self):
        self.waited = True

    def elapsed_time(self, end):
        assert end.waited, "the event was read before the device had reached it"
        return end.at - self.at


def test_on_a_device_real_time_comes_from_events_and_the_hosts_is_kept_beside_it():
    time, made = Time(), []
    devices = [torch.device("cuda:0"), torch.device("cuda:1")]
    timer = DeviceTimer(devices, event=lambda device: made.append(device) or FakeEvent(time, made))
    watch = Stopwatch(HostTimer(time.clock()), timer)
    for _ in range(3):
        watch.reset()
        for took in (100, 50):
            watch.start()
            time.real += took
            time.cpu += 7
            watch.stop()
            time.real += 1000
        times = watch.read()
        assert (times.real_ns, times.cpu_ns, times.host_ns) == (pytest.approx(600), 14, 150)
    assert len(made) == 8  # two passes, two devices, begin and end: made once and used again


def test_each_time_is_the_longest_of_the_devices_and_the_sum_is_of_these():
    class Event:
        def __init__(self, milliseconds):
            self.milliseconds = milliseconds

        record = synchronize = lambda self: None

        def elapsed_time(self, end):
            return end.milliseconds

    took = iter([0, 1, 0, 5, 0, 4, 0, 2])  # begin and end of either device, twice
    timer = DeviceTimer(["cuda:0", "cuda:1"], event=lambda _device: Event(next(took)))
    for _ in range(2):
        timer.start()
        timer.stop()
    assert timer.read() == 9e6


@pytest.mark.gpu
def test_events_on_a_real_device_measure_its_work():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    watch = stopwatch_for([torch.device("cuda", torch.cuda.current_device())])
    watch.reset()
    watch.start()
    torch.cuda._sleep(100_000_000)  # cycles: no device is so fast that they take less than 10 ms
    watch.stop()
    assert watch.read().real_ns > 10_000_000


def test_samples_hold_plain_arrays():
    result, _ = run()
    assert isinstance(result.whole.samples[0].real, np.ndarray)
