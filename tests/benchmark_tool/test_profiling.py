"""The torch.profiler trace of one replay: what each family puts into it, and that it is always written."""

import errno
import gzip
import json
import os
from types import SimpleNamespace

import pytest
import torch
from opreplay_tools.replay_flags import profiled, profiling_request

from replayfmt.benchmark.profiling import check_families, parse_families, profile_replay
from replayfmt.errors import OpReplayError, OutputExists, ReplayFailed, UsageError

from .fakes import FakeReader


class SmallPlan:
    """Replays two scopes of real operators; `fail` makes it raise inside the inner one."""

    def __init__(self, fail=False):
        self.devices, self.fail, self.calls = [torch.device("cpu")], fail, []
        self.reader = FakeReader([])

    def execute(self, *, verify="none", on_scope=None, timer=None):
        self.calls.append(verify)
        torch.zeros(7, 7).cosh()  # restoring state: not part of the replay
        timer.start()
        try:
            on_scope("begin", "execute", "execute", 0)
            torch.mm(torch.ones(16, 16), torch.ones(16, 16))
            on_scope("begin", "step", "execute/step", 2)
            torch.relu(torch.ones(4))
            if self.fail:
                raise ReplayFailed("op 4 failed")
            on_scope("end", "step", "execute/step", 5)
            on_scope("end", "execute", "execute", 6)
        finally:
            timer.stop()
        return SimpleNamespace(outcome="ok")


def trace(tmp_path, families, plan=None):
    path = tmp_path / f"{families.replace(',', '-')}.json"
    profile_replay(plan or SmallPlan(), parse_families(families), path)
    return json.loads(path.read_text())["traceEvents"]


def of(events, category):
    return [event for event in events if event.get("cat") == category]


def annotations(events):
    return {event["name"] for event in of(events, "user_annotation")}


def test_host_ops_puts_the_operators_of_one_replay_into_the_trace(tmp_path):
    plan = SmallPlan()
    names = [event["name"] for event in of(trace(tmp_path, "host-ops", plan), "cpu_op")]
    assert names.count("aten::mm") == 1 and "aten::relu" in names and plan.calls == ["none"]
    assert "aten::cosh" not in names, "restoring state is outside the trace"


def test_the_captures_scopes_are_annotations_under_their_paths(tmp_path):
    for families in ("host-ops", "memory"):
        events = trace(tmp_path, families)
        assert annotations(events) >= {"execute", "execute/step"}
    outer, inner = (next(event for event in events if event["name"] == name) for name in ("execute", "execute/step"))
    assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_memory_puts_allocations_into_the_trace_and_no_operators(tmp_path):
    events = trace(tmp_path, "memory")
    assert {event["name"] for event in of(events, "cpu_instant_event")} == {"[memory]"} and not of(events, "cpu_op")
    assert not of(trace(tmp_path, "host-ops"), "cpu_instant_event")


def test_shapes_puts_input_shapes_on_the_operators(tmp_path):
    (multiplied,) = [event for event in trace(tmp_path, "shapes") if event["name"] == "aten::mm"]
    assert multiplied["args"]["Input Dims"] == [[16, 16], [16, 16]]
    assert not any("Input Dims" in event.get("args", {}) for event in trace(tmp_path, "host-ops"))


def test_stacks_puts_python_functions_into_the_trace(tmp_path):
    events = trace(tmp_path, "stacks")
    assert any("execute" in event["name"] for event in of(events, "python_function")) and not of(events, "cpu_op")
    assert not of(trace(tmp_path, "host-ops"), "python_function")


def test_families_are_combined(tmp_path):
    events = trace(tmp_path, "host-ops,memory,shapes,stacks")
    assert all(of(events, category) for category in ("cpu_op", "cpu_instant_event", "python_function"))


def test_a_name_that_ends_in_gz_is_compressed(tmp_path):
    for families in (("host-ops",), ("memory",)):
        path = tmp_path / f"{families[0]}.json.gz"
        profile_replay(SmallPlan(), families, path)
        assert annotations(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])


def test_the_trace_is_closed_and_written_when_the_replay_fails(tmp_path):
    path = tmp_path / "trace.json"
    with pytest.raises(ReplayFailed, match="op 4 failed"):
        profile_replay(SmallPlan(fail=True), ("host-ops",), path)
    events = json.loads(path.read_text())["traceEvents"]
    assert annotations(events) >= {"execute", "execute/step"} and any(event["name"] == "aten::mm" for event in events)
    profile_replay(SmallPlan(), ("host-ops",), tmp_path / "next.json")  # the profiler was stopped


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_that_torch_could_not_write_whole_is_an_error_and_no_file(tmp_path, monkeypatch, name):
    def export(_profiler, path):  # what torch does on a full disk: it says so on stderr and goes on
        (tmp_path / f"{os.path.basename(path)}.tmp").write_text("left over")
        with gzip.open(path, "wt") if path.endswith(".gz") else open(path, "w") as file:
            file.write('{"traceEvents": [{"na')

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    for families in ("host-ops", "memory"):
        with pytest.raises(OpReplayError, match="could not write the whole trace; is the disk full"):
            profile_replay(SmallPlan(), [families], tmp_path / name)
        assert os.listdir(tmp_path) == []


def test_a_trace_that_cannot_be_written_is_one_error_and_no_file(tmp_path, monkeypatch):
    def export(_profiler, _path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    with pytest.raises(OpReplayError, match="--device-profiling-output=.*: cannot be written: No space left"):
        profile_replay(SmallPlan(), ["host-ops"], tmp_path / "trace.json")
    assert os.listdir(tmp_path) == []


def test_an_existing_trace_is_refused_without_force(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("old")
    plan = SmallPlan()
    with pytest.raises(OutputExists):
        profile_replay(plan, ("host-ops",), path)
    assert path.read_text() == "old" and plan.calls == []
    profile_replay(plan, ("host-ops",), path, force=True)
    assert json.loads(path.read_text())


@pytest.mark.parametrize("mode", ["", "hostops", "host-ops,", "host-ops,kernels", "HOST-OPS"])
def test_an_unknown_family_is_a_usage_error_that_lists_the_known_ones(mode):
    with pytest.raises(UsageError, match="host-ops, device-kernels, memory, shapes, stacks") as raised:
        parse_families(mode)
    assert raised.value.exit_code == 2


def test_families_may_be_given_in_any_order_and_twice():
    assert parse_families("shapes, host-ops,shapes") == ("host-ops", "shapes")


def test_device_kernels_without_a_cuda_device_in_the_replay_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="device-kernels is not available") as raised:
        profile_replay(SmallPlan(), ("device-kernels",), tmp_path / "trace.json")
    assert raised.value.exit_code == 2 and not list(tmp_path.iterdir())
    check_families(("host-ops",), [torch.device("cpu")])


def test_a_mode_needs_an_output_and_an_output_a_mode():
    with pytest.raises(UsageError, match="give --device-profiling-output=FILE with it"):
        profiling_request("host-ops", None, False, "a.opreplay")
    with pytest.raises(UsageError, match="give --device-profiling-mode=LIST with it"):
        profiling_request(None, "trace.json", False, "a.opreplay")
    assert profiling_request(None, None, True, "a.opreplay") is None


def test_a_request_is_checked_before_anything_runs(tmp_path):
    (tmp_path / "old.json").write_text("")
    with pytest.raises(OutputExists):
        profiling_request("host-ops", str(tmp_path / "old.json"), False, "a.opreplay")
    with pytest.raises(UsageError):
        profiling_request("host-opps", str(tmp_path / "new.json"), False, "a.opreplay")
    request = profiling_request("device-kernels", str(tmp_path / "new.json"), False, "a.opreplay")
    with pytest.raises(UsageError, match="not available"), profiled(request, SmallPlan()):
        pytest.fail("the replay began")


@pytest.mark.gpu
def test_device_kernels_puts_kernels_into_the_trace(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")

    class DevicePlan(SmallPlan):
        def execute(self, *, verify="none", on_scope=None, timer=None):
            timer.start()
            on_scope("begin", "execute", "execute", 0)
            torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
            on_scope("end", "execute", "execute", 1)
            timer.stop()

    plan = DevicePlan()
    plan.devices = [torch.device("cuda:0")]
    events = trace(tmp_path, "device-kernels", plan)
    assert of(events, "kernel") and not of(events, "cpu_op") and "execute" in annotations(events)
