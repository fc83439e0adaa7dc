"""Reasons to doubt a measurement are found and said."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import replayfmt
from replayfmt.benchmark import run_report
from replayfmt.benchmark.machine import BackgroundLoad
from replayfmt.benchmark.measure import Measurement, Options, Run, Sample
from replayfmt.benchmark.meters import MeasuredRegion
from replayfmt.benchmark.run_report import measurement_caveats, run_caveats
from replayfmt.format.model import Device
from replayfmt.pytorch.environment import cpu_capability, describe_device
from replayfmt.replay.results import Verification

from .fakes import EXECUTE, FakeReader

WHOLE = MeasuredRegion(None, frozenset(), 1, 1, 1)
CPU = torch.device("cpu")


def of_times(*samples):
    return Measurement(WHOLE, [Sample(np.array(times, dtype=float), np.array(times), None) for times in samples])


def run(**fields):
    measurement = of_times([100] * 10)
    verified = SimpleNamespace(verification=Verification("auto", "bitwise"))
    return replace(Run(Options(), [measurement], measurement, verified, verified, None), **fields)


@pytest.fixture(autouse=True)
def an_idle_machine(monkeypatch):
    monkeypatch.setattr(run_report.os, "getloadavg", lambda: (0.1, 0.1, 0.1))


def test_steady_times_leave_nothing_to_say():
    assert measurement_caveats(of_times([100, 101] * 5)) == []


def test_few_iterations_are_named_with_the_number_that_would_do():
    assert "only 1 iteration: too few" in measurement_caveats(of_times([100]))[0]
    assert "--benchmark-min-time=6x" in measurement_caveats(of_times([100] * 5))[0]


@pytest.mark.parametrize("high, words", [(130, "could be other work"), (300, "strong interference from other work")])
def test_noisy_iterations_are_reported_by_how_much_they_vary(high, words):
    (warning,) = measurement_caveats(of_times([100, high] * 5))
    assert "repetition 1: iterations vary by " in warning and words in warning


def test_repetitions_that_differ_are_reported():
    assert measurement_caveats(of_times([100] * 10, [200] * 10)) == [
        "repetitions vary by 47%: conditions on the machine changed"
    ]


def test_a_busy_machine_is_said_of_single_ops_too(tools, captured, monkeypatch):
    monkeypatch.setattr(BackgroundLoad, "end", lambda _load: 0.75)
    ran = tools("benchmark", "--per-op", "--op-limit=1", "--benchmark-min-time=6x", captured)
    assert "WARNING: the machine was busy: other programs had 75% of the processors' time" in ran.out


def test_a_run_where_the_capture_was_made_leaves_nothing_to_say(tmp_path):
    assert run_caveats(run(), here(), [CPU], tmp_path) == []


def here(**session):
    reader = FakeReader(EXECUTE)
    fields = {"torch_version": torch.__version__, "cpu": describe_device(CPU).name, "cpu_capability": cpu_capability()}
    reader.session = replace(reader.session, **(fields | session))
    return reader


@pytest.mark.parametrize(
    "session, words",
    [
        ({"torch_version": "2.11.0"}, "another torch (2.11.0, here "),
        ({"cpu": "Other 9000"}, "another processor (Other 9000, here "),
        ({"cpu_capability": "NEON"}, "another CPU capability (NEON, here "),
    ],
)
def test_another_origin_is_reported(tmp_path, session, words):
    (warning,) = run_caveats(run(), here(**session), [CPU], tmp_path)
    assert words in warning


def test_what_the_capture_does_not_say_is_not_compared(tmp_path):
    assert run_caveats(run(), here(torch_version=None, cpu=None, cpu_capability=None), [CPU], tmp_path) == []


def test_a_capture_of_a_device_that_is_not_used_here_is_reported(tmp_path):
    reader = here()
    reader.devices = (None, Device("cpu", -1, "x"), Device("cuda", 0, "NVIDIA H200"))
    assert "another accelerator (NVIDIA H200, here none)" in run_caveats(run(), reader, [CPU], tmp_path)[0]


def test_an_unverified_run_says_so(tmp_path):
    assert "nothing was verified (--verify=none)" in run_caveats(run(before=None), here(), [CPU], tmp_path)[0]
    nothing = SimpleNamespace(verification=Verification("auto", "none", ("the capture holds no digests",)))
    assert "(the capture holds no digests)" in run_caveats(run(before=nothing), here(), [CPU], tmp_path)[0]


def test_a_run_that_was_cut_short_says_so(tmp_path):
    assert run_caveats(run(cut_short=2.5), here(), [CPU], tmp_path)[0].startswith("stopped after 2.5 s, 5 times")


def test_frequency_scaling_is_reported(tmp_path):
    governor = tmp_path / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
    governor.parent.mkdir(parents=True)
    governor.write_text("ondemand\n")
    assert "CPU frequency scaling" in run_caveats(run(), here(), [CPU], tmp_path)[0]


def test_a_busy_machine_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(run_report.os, "getloadavg", lambda: (99.0, 1.0, 1.0))
    assert "the machine was busy: load average 99.0" in run_caveats(run(), here(), [CPU], tmp_path)[0]
    assert run_caveats(run(others_share=0.1), here(), [CPU], tmp_path) == []  # it was before, or one's own work
    assert "busy: other programs had 30%" in run_caveats(run(others_share=0.3), here(), [CPU], tmp_path)[0]


def test_a_busy_machine_is_named_as_the_cause_only_of_work_on_several_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(run_report.os, "getloadavg", lambda: (99.0, 1.0, 1.0))
    for threads in (1, 2):
        said = run_caveats(run(), here(settings={"num_threads": threads}), [CPU], tmp_path)[0]
        assert ("an op on 2 threads waits for the slowest; --threads=1 is steadier" in said) == (threads == 2)


@pytest.mark.slow
def test_the_number_of_threads_can_be_chosen_and_the_output_says_so(tools, captured, monkeypatch):
    before, with_capture = torch.get_num_threads(), replayfmt.open(captured).reader.session.settings["num_threads"]
    other = with_capture + 1
    monkeypatch.setenv("OMP_NUM_THREADS", str(other))
    ran = tools("benchmark", "--benchmark-min-time=6x", captured)
    noun = "thread" if with_capture == 1 else "threads"
    assert f", {with_capture} {noun} (as captured; --threads={other} for OMP_NUM_THREADS)" in ran.out
    ran = tools("benchmark", "--benchmark-min-time=6x", f"--threads={other}", "--benchmark-format=json", captured)
    assert ran.code == 0 and json.loads(ran.out)["context"]["torch_num_threads"] == other
    ran = tools("run", f"--threads={other}", captured)
    assert ran.code == 0 and f", {other} threads (--threads)" in ran.out
    assert f"threads {other} here, {with_capture} in the capture" in ran.out, "bits may differ, which is said"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert torch.get_num_threads() == before and "--threads" not in tools("run", captured).out
    assert tools("run", "--threads=0", captured).code == 2


def test_more_threads_than_processors_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(run_report.os, "cpu_count", lambda: 2)
    assert run_caveats(run(), here(settings={"num_threads": 16}), [CPU], tmp_path) == [
        "16 threads share 2 processors here: oversubscription makes times long and unsteady; give --threads=2"
    ]
    assert run_caveats(run(), here(settings={"num_threads": 2}), [CPU], tmp_path) == []


def test_an_incomplete_capture_is_reported(tmp_path):
    reader = here()
    reader.complete, reader.incomplete_reason = False, "it was never closed"
    assert run_caveats(run(), reader, [CPU], tmp_path) == ["the capture is incomplete: it was never closed"]
