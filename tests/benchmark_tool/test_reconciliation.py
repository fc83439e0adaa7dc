"""Isolated ops against the whole replay, the capture and the program: the sums, and what explains the difference."""

import json
import sys
from dataclasses import replace

import pytest
import torch

import replayfmt
from replayfmt.benchmark.per_op.results import IsolatedTotal, ProgramTimes, Reconciliation
from replayfmt.benchmark.statistics import summarize

US = 1e3


def found(hot_us, whole_us, cold_us=None, *, overhead_us=0.0, host_us=None, left_out=0, program=None):
    def isolated(inputs, total):
        return IsolatedTotal(inputs, total * US, None, None, 10, left_out, overhead_us * US)

    return Reconciliation(
        "BM_replay",
        isolated("hot", hot_us),
        isolated("cold", hot_us if cold_us is None else cold_us),
        summarize([whole_us * US] * 6),
        None if host_us is None else host_us * US,
        None,
        "the capture holds no times for it",
        program,
    )


def reasons(reconciliation):
    return [sentence.partition(":")[0] for sentence in reconciliation.explain()]


def test_a_sum_near_the_replay_needs_no_explanation():
    (sentence,) = found(97, 100).explain()
    assert sentence == "the sum of hot isolated times is within 5% of the replay: nothing is left to explain"


def test_what_cold_inputs_cost_more_is_what_caches_may_explain_and_the_rest_is_the_hosts():
    assert list(found(60, 100, 90).explain()) == [
        "cache effects: with cold inputs the sum is 30.00 us more, less than the difference",
        "host time between ops: 10.00 us are in no op's time: memory allocated and released, page faults, the replay's "
        "own loop",
    ]
    assert list(found(60, 100, 130).explain()) == [
        "cache effects: with cold inputs the sum is 70.00 us more, as much as the difference, or more"
    ]


def test_devices_that_wait_for_the_host_have_launch_gaps():
    assert reasons(found(60, 100, host_us=95)) == ["launch gaps", "host time between ops"]
    assert reasons(found(60, 100, host_us=40)) == ["host time between ops"]


def test_a_replay_faster_than_its_ops_overlaps_them_or_saves_the_calls():
    assert reasons(found(150, 100, overhead_us=60)) == ["host time"]
    assert reasons(found(150, 100, overhead_us=1)) == ["overlap"]
    assert reasons(found(150, 100, overhead_us=20)) == ["host time", "overlap"]


def test_calls_without_a_time_are_said_to_be_in_the_replay_alone():
    assert next(found(97, 100, left_out=3).explain()) == "3 calls have no isolated time and are in the replay alone"
    assert reasons(found(1, 0.0)) == ["the clock did not advance during a replay"]


def test_ops_without_a_time_are_no_sum_of_zero_and_not_the_hosts_work():
    nothing = IsolatedTotal("hot", None, None, None, 0, 10, 0.0)
    cold = IsolatedTotal("cold", None, None, None, 0, 10, 0.0)
    found_none = replace(found(60, 100), hot=nothing, cold=cold)
    lines = list(found_none.lines())
    assert lines[1:3] == [
        f"  isolated, hot:  {'not measured':>12}  no call has a time",
        f"  isolated, cold: {'not measured':>12}  no call has a time",
    ]
    assert lines[-1] == "  no op has an isolated time: there is nothing to compare the replay with"
    assert found_none.as_json()["isolated_hot"]["total_ns"] is None
    (*_, rest) = found(60, 100, left_out=3).explain()
    assert "are in no measured op's time: ops without one, memory allocated" in rest
    fewer = replace(found(60, 100, 130), cold=IsolatedTotal("cold", 130 * US, None, None, 7, 3, 0.0))
    assert reasons(fewer) == ["host time between ops"], "sums over other calls are not compared"
    stopped = found(1, 0.0)
    assert f"  whole replay:   {'not measured':>12}  the clock did not advance" in list(stopped.lines())
    assert stopped.as_json()["whole_replay_ns"] is None


def test_all_figures_stand_side_by_side():
    program = ProgramTimes("train.py", "its scope step", (110 * US, 120 * US, 130 * US))
    assert list(found(60, 100, 90, program=program).lines())[:6] == [
        "reconciliation of BM_replay",
        f"  isolated, hot:  {'60.00 us':>12}  sum over 10 calls (60.0% of the replay)",
        f"  isolated, cold: {'90.00 us':>12}  sum over 10 calls (90.0% of the replay)",
        f"  whole replay:   {'100.0 us':>12}  median of 6 replays, between 100.0 us and 100.0 us",
        "  captured:       not measured  the capture holds no times for it",
        f"  program itself: {'120.0 us':>12}  median of 3 runs of its scope step, each in a process of its own, "
        "without a recorder",
    ]


SCRIPT = """
import sys
import torch
import replayfmt

def main():
    weight = torch.ones(8, 8)
    for _ in range(int(sys.argv[1])):
        with replayfmt.scope("step"):
            weight = torch.tanh(weight @ weight)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def program(tmp_path):
    script, capture = tmp_path / "steps.py", tmp_path / "steps.opreplay"
    script.write_text(SCRIPT)
    with replayfmt.capture(capture):
        weight = torch.ones(8, 8)
        for _ in range(3):
            with replayfmt.scope("step"):
                weight = torch.tanh(weight @ weight)
    return capture, script


@pytest.mark.slow
def test_the_tool_measures_all_of_them(tools, program, monkeypatch):
    monkeypatch.setattr("replayfmt.benchmark.measure.largest_cache", lambda _root: 1 << 16)
    capture, script = program
    flags = ["--reconcile", "--benchmark-min-time=6x", "--scope=step", "--program-runs=1"]
    ran = tools("benchmark", capture, *flags, f"--program={script} 2", "--benchmark-format=json")
    assert ran.code == 0
    section = json.loads(ran.out)["reconciliation"]
    assert section["region"] == "BM_replay/scope:step"
    assert section["isolated_hot"]["calls"] == section["isolated_cold"]["calls"] == 6
    assert section["isolated_hot"]["total_ns"] > 0 and section["whole_replay_ns"] > 0 and section["captured_ns"] > 0
    assert section["program"]["what"] == "its scope step" and len(section["program"]["times_ns"]) == 1
    assert section["explanation"]
    ran = tools("benchmark", capture, "--reconcile", "--benchmark-min-time=6x")
    assert ran.code == 0 and "reconciliation of BM_replay\n" in ran.out and "program itself" not in ran.out


@pytest.mark.slow
def test_a_program_that_fails_or_has_no_such_scope_is_one_line(tools, program):
    capture, script = program
    flags = ["--reconcile", "--benchmark-min-time=1x", "--program-runs=1"]
    ran = tools("benchmark", capture, *flags, f"--program={script} none")
    assert ran.code == 1 and "it ended with exit code 1: ValueError: invalid literal for int()" in ran.err
    ran = tools("benchmark", capture, *flags, "--scope=step", f"--program={script} 0")
    assert ran.code == 1 and "it never entered a scope 'step', so its time is not known" in ran.err
    ran = tools("benchmark", capture, *flags, f"--program={sys.executable}.missing")
    assert ran.code == 2 and "expected a Python script" in ran.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--program=x.py"], "--program needs --reconcile, --energy or --energy-windows"),
        (["--program-runs=2"], "--program-runs needs --reconcile"),
        (["--reconcile", "--program-runs=2"], "--program-runs needs --program"),
        (["--reconcile", "--per-op"], "--per-op does not go with --reconcile"),
        (["--reconcile", "--scope=step", "--scope=forward"], "takes one --scope"),
    ],
)
def test_flags_that_do_not_fit_are_refused(tools, captured, flags, words):
    ran = tools("benchmark", captured, *flags)
    assert ran.code == 2 and words in ran.err
