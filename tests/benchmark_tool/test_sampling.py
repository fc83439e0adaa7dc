"""Samples of ops on an accelerator: the device is kept busy while the host issues them, on one that is made up."""

import json
from functools import partial

import pytest
import torch

import replayfmt
from replayfmt.benchmark.meters import Clock, DeviceTimer, HostTimer, Stopwatch
from replayfmt.benchmark.per_op.measuring import Sampler, Shape, measure_ops
from replayfmt.benchmark.per_op.op_report import make_op_report
from replayfmt.benchmark.per_op.results import OpOptions
from replayfmt.benchmark.statistics import MinTime
from replayfmt.replay.plan import Plan
from replayfmt.replay.run.steps import IsolatedOp

EVENT_NS = 1_000  # what an event takes on the device


class Device:
    """Works off what the host has issued, in order; both their times are made up."""

    def __init__(self):
        self.now = self.free = 0
        self.covers = []

    def issue(self, host_ns, device_ns):
        self.now += host_ns
        self.free = max(self.free, self.now) + device_ns

    def wait(self):
        self.now = max(self.now, self.free)

    def cover(self, ns):
        self.covers.append(ns)
        self.issue(3_000, ns)

    def sampler(self, covers=None, flush=None):
        covers = [self.cover] if covers is None else covers
        return Sampler([torch.device("cpu")], self.clock(), flush, covers, self.watch())

    def clock(self):
        return Clock(real=lambda: self.now, cpu=lambda: self.now)

    def watch(self):
        return Stopwatch(HostTimer(self.clock()), DeviceTimer([torch.device("cpu")], event=lambda _: Event(self)))


class Event:
    def __init__(self, device):
        self.device, self.at = device, 0

    def record(self):
        self.device.issue(500, EVENT_NS)
        self.at = self.device.free

    def query(self):
        return self.device.now >= self.at

    def synchronize(self):
        self.device.now = max(self.device.now, self.at)

    def elapsed_time(self, end):
        return (end.at - self.at) / 1e6


class Op:
    """Takes the host `host_ns` to issue, and the device `device_ns`; `waits` for the device, as `.item()` does."""

    def __init__(self, device, host_ns, device_ns, *, writes=False, waits=False):
        self.device, self.host_ns, self.device_ns, self.writes, self.waits = device, host_ns, device_ns, writes, waits

    def restore(self):
        if self.writes:
            self.device.issue(4_000, 9_000)

    def calls(self, count):
        for _ in range(count):
            self.device.issue(self.host_ns, self.device_ns)
            if self.waits:
                self.device.wait()


def sampled(sampler, op):
    """What the sampler finds for a call, as per-op measuring asks for it."""
    sampler.begin(on_host=False)
    first, _spent = sampler.sample(op, Shape())
    return sampler.sample(op, sampler.shape(op, first, 200_000))[0]


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize(("host_ns", "device_ns"), [(20_000, 2_000), (5_000, 80_000), (90_000, 4_000)])
def test_the_time_of_an_op_is_the_devices_however_long_the_host_takes(host_ns, device_ns, writes, flushed):
    device = Device()
    sampler = device.sampler(flush=partial(device.issue, 5_000, 40_000) if flushed else None)
    op = Op(device, host_ns, device_ns, writes=writes)
    readings = sampled(sampler, op)
    assert readings.real_ns == pytest.approx(device_ns, rel=0.01) and not sampler.why_exposed
    assert readings.host_ns == pytest.approx(host_ns, abs=1_000), "restoring and covers are not in the host's time"
    assert sampler.works_on_device(readings.real_ns)


def test_without_a_cover_the_time_of_a_short_op_is_the_hosts():
    device = Device()
    readings = sampled(device.sampler(covers=[]), Op(device, 20_000, 2_000))
    assert readings.real_ns > 19_000


def test_a_cover_that_is_too_short_is_lengthened_and_what_was_taken_behind_it_does_not_count():
    device = Device()
    sampler = device.sampler()
    op = Op(device, 300_000, 2_000)
    assert sampled(sampler, op).real_ns == pytest.approx(2_000)
    tried = list(dict.fromkeys(device.covers))
    assert len(tried) > 3 and tried == sorted(tried) and tried[-1] > 300_000


def test_an_op_that_waits_for_the_device_says_so_and_the_next_one_is_covered_again():
    device = Device()
    sampler = device.sampler()
    sampled(sampler, Op(device, 10_000, 2_000, waits=True))
    assert "the device waited for the host" in sampler.why_exposed
    assert sampled(sampler, Op(device, 10_000, 2_000)).real_ns == pytest.approx(2_000) and not sampler.why_exposed


def test_a_call_that_launches_nothing_is_told_from_the_shortest_kernel():
    device = Device()
    sampler = device.sampler()
    assert sampler.pair_ns == EVENT_NS
    assert not sampler.works_on_device(sampled(sampler, Op(device, 2_000, 0)).real_ns)
    assert sampler.works_on_device(sampled(sampler, Op(device, 2_000, 900)).real_ns)


def test_a_graph_is_launched_behind_a_cover_too():
    device = Device()
    sampler = device.sampler()
    assert sampler.launch(lambda: device.issue(15_000, 500_000)) == pytest.approx(500_000)
    assert not sampler.why_exposed
    assert sampler.launch(lambda: [device.issue(15_000, 500_000), device.wait()]) and sampler.why_exposed


def test_isolated_times_add_up_to_the_devices_time_of_the_whole():
    device = Device()
    ops = [Op(device, 15_000, ns) for ns in (1_500, 40_000, 3_000, 0, 700_000)] + [
        Op(device, 9_000, 2_500, writes=True)
    ]
    isolated = sum(sampled(device.sampler(), op).real_ns for op in ops)
    assert isolated == pytest.approx(sum(op.device_ns for op in ops), rel=0.1)


# ------------------------------------------------------------------------------------------------------------- reports


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """The rows of a view, a sine and a read by the host, whose calls take the times of a device that is made up."""
    path, device = tmp_path / "calls.opreplay", Device()
    with replayfmt.capture(path, digests="none"):
        torch.sin(torch.ones(8)).view(2, 4).sum().item()
    calls = IsolatedOp.calls
    with Plan(path, keep_going=True) as plan:

        def timed(op, count):
            calls(op, count)
            kernel = plan.reader.kernels[plan.reader.record(op.ordinal).signature.kernel].name
            for _ in range(count):
                device.issue(6_000, 0 if kernel == "aten::view" else 2_000)
                if kernel == "aten::_local_scalar_dense":
                    device.wait()

        monkeypatch.setattr(IsolatedOp, "calls", timed)
        run = measure_ops(
            plan,
            OpOptions(MinTime(seconds=0.001), "none"),
            clock=device.clock(),
            progress=lambda *_: None,
            make_sampler=partial(Sampler, covers=[device.cover], watch=device.watch()),
        )
        report = make_op_report(run, plan)
    return {row["op"]: row for row in json.loads(report.json())["benchmarks"]}, report


def test_rows_have_the_devices_time_and_say_where_it_waited_for_the_host(rows):
    by_op, report = rows
    sine, view, read = (
        by_op[f"aten::{name}"] for name in ("sin.default", "view.default", "_local_scalar_dense.default")
    )
    assert sine["median_real_time"] == pytest.approx(2_000) and sine["host_time"] == pytest.approx(6_000, abs=1_000)
    assert "device_waited" not in sine and "launches" not in sine
    assert view["launches"] is False and view["estimated_us"] == 0 and "error_occurred" not in view
    assert "the device waited for the host" in read["device_waited"]
    assert report.context["event_pair_ns"] == EVENT_NS
    (warning,) = (each for each in report.context["warnings"] if "waited for the host" in each)
    assert "while 1 op ran" in warning and "_local_scalar_dense" in warning


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("inputs", ["hot", "cold"])
def test_a_gpu_is_busy_while_ops_are_issued_unless_they_wait_for_it(tools, tmp_path, inputs):
    path, out = tmp_path / "gpu.opreplay", tmp_path / "results.json"
    with replayfmt.capture(path, digests="none"):
        x = torch.ones(64, device="cuda")
        x.mul_(2)
        torch.sin(x).view(8, 8).sum().item()
    assert tools("benchmark", "--per-op", f"--inputs={inputs}", f"--benchmark-out={out}", path).code == 0
    rows = {row["op"]: row for row in json.loads(out.read_text())["benchmarks"]}
    waited = {name for name, row in rows.items() if "device_waited" in row}
    assert waited == {"aten::_local_scalar_dense.default"}
    assert rows["aten::view.default"]["launches"] is False
    assert not any("launches" in rows[f"aten::{name}"] for name in ("mul_.Tensor", "sin.default", "sum.default"))
