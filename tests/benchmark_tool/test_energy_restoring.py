"""Putting back what a replay writes is measured apart, and no part of the replay's energy."""

from dataclasses import replace

import jsonschema
import pytest
import torch

import replayfmt
from replayfmt.benchmark.energy.energy_report import EnergyReport, make_energy_report
from replayfmt.benchmark.energy.running import WindowOptions, WindowRunner
from replayfmt.replay.plan import Plan

from .test_energy import SCHEMA, WINDOWS, Now, a_file, every, levels, log_of, window


def test_what_a_replay_takes_to_put_back_what_it_writes_is_not_in_its_energy():
    back = window("restore", "whole replay", 10, 22.5, 27.5)  # at 20 W: 10 J a time
    content = make_energy_report(
        a_file([*WINDOWS[:2], back, *WINDOWS[2:]]), log_of(every(0.1, 100, levels)), offset_s=0.0
    ).content
    whole = content["whole_model"]
    jsonschema.validate(content, SCHEMA)
    assert (whole["joules"], whole["restoring_joules_per_run"]) == (pytest.approx(1000), pytest.approx(10))
    assert whole["joules_per_run"] == content["comparison"]["whole_joules_per_run"] == pytest.approx(90)
    assert whole["error_joules_per_run"] > whole["error_joules"] / 10 and "less putting back" in whole["method"]
    assert any(
        "90 J a run (and 10 J of putting back" in line
        for line in EnergyReport(content).lines(1)
        if line.startswith("whole model")
    )
    much = window("restore", "whole replay", 1, 22.5, 27.5)  # as much as a run
    content = make_energy_report(
        a_file([*WINDOWS[:2], much, *WINDOWS[2:]]), log_of(every(0.1, 100, levels)), offset_s=0.0
    ).content
    assert content["whole_model"]["joules_per_run"] is content["comparison"]["ratio"] is None
    assert "putting back what it writes takes as much" in content["comparison"]["reason"]
    (said,) = (line for line in EnergyReport(content).lines(1) if line.startswith("whole model"))
    assert "a run not measured: putting back" in said


def test_windows_in_another_order_of_lines_are_the_same_windows():
    log = log_of(every(0.1, 100, levels))
    found, turned = (make_energy_report(a_file(order), log, offset_s=0.0).content for order in (WINDOWS, WINDOWS[::-1]))
    assert {each["name"]: each for each in found["kernels"]} == {each["name"]: each for each in turned["kernels"]}
    assert found["whole_model"] == turned["whole_model"]


def test_a_window_without_a_run_has_a_reason():
    windows = [replace(each, runs=0) for each in WINDOWS]
    content = make_energy_report(a_file(windows), log_of(every(0.1, 100, levels)), offset_s=0.0).content
    for each in (content["whole_model"], *content["kernels"][:2]):
        assert each["joules_per_run"] is None and each["reason"] == "its window holds no run of it"
    assert content["comparison"]["reason"] == "the whole model was not measured: its window holds no run of it"
    assert content["idle"]["reason"] is None


def test_a_replay_has_a_window_of_putting_back_if_it_writes_what_came_from_outside(tmp_path):
    path = tmp_path / "writes.opreplay"
    x, y = torch.ones(8), torch.ones(8)
    with replayfmt.capture(path), replayfmt.scope("reads"):
        _kept = (x + 1).sum()
        with replayfmt.scope("writes"):
            y.add_(x)
    runner = WindowRunner(WindowOptions(0.001, 0.02, "none"), Now().moments())
    with Plan(path) as plan:
        runner.idle_and_whole(plan)
    assert [each.role for each in runner.windows] == ["idle", "whole", "restore"]
    reads = tmp_path / "reads.opreplay"
    with replayfmt.capture(reads):
        _kept = (x + 1).sum()
    runner = WindowRunner(WindowOptions(0.001, 0.02, "none"), Now().moments())
    with Plan(reads) as plan:
        runner.idle_and_whole(plan)
    assert [each.role for each in runner.windows] == ["idle", "whole"]


def test_putting_back_alone_does_it_and_leaves_the_plan_as_it_was(tmp_path):
    path = tmp_path / "writes.opreplay"
    weight = torch.ones(8)
    with replayfmt.capture(path), replayfmt.scope("step"):
        weight.mul_(2)
    with Plan(path) as plan:
        assert plan.execute(verify="auto").outcome == "ok" and plan.restoring()
        ((storage,),) = ([each.storage] for each in plan._content._kept.values())
        written = torch.empty(0).set_(storage)
        assert written.tolist() == [2.0] * 8
        for _ in range(3):
            plan.restoring()()
        assert written.tolist() == [1.0] * 8
        assert plan.execute(verify="auto").outcome == "ok"
