"""What holds on an accelerator, tried on the simulated one. Run by test_accelerator.py in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from device import devices_as_they_were, native_alone, recorder, register  # noqa: F401 - fixtures of every test
from in_process import Tools
from replay.rewriting import rewrite

import replayfmt
from replayfmt import Plan
from replayfmt.benchmark.machine import GpuState
from replayfmt.benchmark.meters import DeviceTimer
from replayfmt.benchmark.per_op import roofline
from replayfmt.compare import bisect, isolate
from replayfmt.errors import ReplayRefused, SubstitutionRejected
from replayfmt.format.codes import RecordKind
from replayfmt.format.model import Record
from replayfmt.format.races import find_races
from replayfmt.format.reader import open_capture
from replayfmt.replay.substitution.loading import Substitution

sim = register()


def training(device: str, steps: int = 4) -> list[float]:
    """A few steps of a small model that draws random numbers in each."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ops(path: Path) -> list[tuple[str, Record]]:
    reader = open_capture(path)
    return [
        (reader.kernels[record.signature.kernel].name, record)
        for record in reader.records()
        if record.kind is RecordKind.op
    ]


def test_the_device_computes_what_the_host_does_and_nothing_touches_its_memory_unseen() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    assert torch.equal((x.to("sim:1") @ x.t().to("sim:1")).cpu(), x @ x.t())
    with pytest.raises(TypeError, match="sim:0"):
        x.to("sim:0").numpy()


def test_work_on_another_stream_without_an_event_between_is_found() -> None:
    x = torch.ones(3, device="sim:0") * 2
    other, event = torch.Stream("sim:0"), torch.Event("sim:0")
    with other, pytest.raises(RuntimeError, match="no event lies between them"):
        x + 1
    event.record()
    with other:
        event.wait(other)
        assert (x + 1).tolist() == [3, 3, 3]


def test_a_training_step_replays_bit_for_bit_here_and_on_the_other_device(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    expected = training("sim:1")
    with replayfmt.capture(path):
        assert training("sim:1") == expected
    reader = open_capture(path)
    assert not reader.summary.unsupported
    assert reader.summary.records[RecordKind.generator_state] > 0
    for device, index in ((None, 1), ("sim:0", 0)):
        sim.forget_launches()
        with Plan(path, [device] if device else []) as plan:
            result = plan.execute(verify="bitwise")
        assert result.outcome == "ok", str(result.divergence)
        assert result.verification.scalars > 0
        assert {place for place, _stream in sim.launched()} == {index}


def test_the_backward_pass_is_recorded_with_the_thread_that_runs_it(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        training("sim:0")
    threads: dict[str, set[int]] = {}
    for name, record in ops(path):
        threads.setdefault(name, set()).add(record.thread)
    assert 0 not in threads["aten::gelu_backward"] and len(threads["aten::gelu_backward"]) == 1
    assert threads["aten::gelu"] == {0}


def test_two_devices_and_copies_between_them_and_the_host(tmp_path: Path, tools: Tools) -> None:
    def program() -> list[float]:
        x = torch.arange(4.0)
        one, two = x.to("sim:0") * 2, x.to("sim:1") + 1
        return (one.to("sim:1") * two).cpu().add(x).tolist()

    path = tmp_path / "a.opreplay"
    expected = program()
    with replayfmt.capture(path), replayfmt.scope("execute"):
        assert program() == expected
    for flags in ([], ["--device=sim:1", "--device=sim:0"], ["--device=cpu", "--device=sim:0"]):
        done = tools("run", "--verify=bitwise", *flags, path)
        assert done.code == 0, done.err
        assert "sim:0" in done.out or "--device=sim:1" in flags, done.out


def test_devices_that_are_not_here_are_named_with_those_that_are(tmp_path: Path, tools: Tools) -> None:
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        torch.ones(2, device="sim:1") + 1
    done = tools("run", "--device=sim:7", path)
    assert done.code == 2 and "available: cpu, sim:0, sim:1" in done.err


def test_generators_of_the_program_and_the_devices_draw_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        own = torch.Generator("sim:0").manual_seed(5)
        kept = [
            torch.rand(3, device="sim:0"),
            torch.rand(3, device="sim:1"),
            torch.rand(3, device="sim:0", generator=own),
            torch.nn.functional.dropout(torch.ones(8, device="sim:0")),
            torch.rand(3),
        ]
        assert len(kept) == 5
    assert open_capture(path).summary.records[RecordKind.generator_state] == 4
    with Plan(path) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"


def test_draws_from_a_generator_that_pytorch_does_not_show_are_unsupported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.sim, "default_generators")  # type: ignore[attr-defined]
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        torch.rand(3, device="sim:0")
        torch.ones(3, device="sim:0") + 1
    assert open_capture(path).summary.unsupported == {"unseen_draws": 1}
    with pytest.raises(ReplayRefused) as refused, Plan(path) as plan:
        plan.execute()
    assert "unseen_draws" in refused.value.findings[0]


def test_a_benchmark_measures_the_devices_time_by_events(tmp_path: Path, tools: Tools) -> None:
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path), replayfmt.scope("execute"):
        (torch.ones(64, device="sim:1") + 1).sum().item()
    done = tools("benchmark", "--benchmark-format=json", "--benchmark-min-time=6x", path)
    assert done.code == 0, done.err
    row = json.loads(done.out)["benchmarks"][0]
    assert row["host_time"] > 0, "the events' time is the real time, and the host's stands beside it"


@native_alone
def test_ops_of_the_host_are_timed_by_the_hosts_clock_and_those_of_devices_by_events(
    tmp_path: Path, tools: Tools
) -> None:
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        x = torch.arange(64.0)
        (x.sin().to("sim:1").cos() + 1).to("sim:0").mul_(2).sum().item()
    done = tools("benchmark", "--per-op", "--benchmark-format=json", "--benchmark-min-time=3x", path)
    assert done.code == 0, done.err
    rows = {row["op"]: row for row in json.loads(done.out)["benchmarks"]}
    assert "host_time" not in rows["aten::sin.default"]
    for name in ("cos.default", "add.Tensor", "mul_.Tensor"):
        row = rows[f"aten::{name}"]
        assert row["host_time"] > 0 and row["real_time"] > 0 and "device_waited" not in row, row


def test_a_peak_of_a_device_that_is_slowed_down_is_doubtful_and_not_kept_unless_its_power_limit_did_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roofline, "_COPIED_BYTES", {True: 1000})
    for name in ("_AT_LEAST_NS", "_MOST_SPREAD"):
        monkeypatch.setattr(roofline, name, {"_AT_LEAST_NS": 1, "_MOST_SPREAD": 1e9}[name])
    cap, heat = "software power cap", "hardware thermal slowdown"
    for number, (reasons, doubts) in enumerate((((heat,), 2), ((heat, cap), 2), ((cap,), 0), ((), 1))):
        clocks, kept = iter((1980, 1530)), tmp_path / f"peaks_{number}.json"

        def opened(_device: torch.device, clocks: Any = clocks, reasons: Any = reasons) -> Any:
            return lambda: GpuState(next(clocks), 1200, 40, 300, reasons)

        peak = roofline.Peaks(torch.device("sim:1"), 1, cache=kept, open_gpu=opened).of_bandwidth()
        assert peak is not None and len(peak.doubts) == doubts and kept.exists() != bool(doubts), reasons
        assert "SM clock 1980 MHz before, 1530 MHz after" in peak.conditions
        assert (cap in peak.conditions) is (cap in reasons)


def test_a_replacement_that_leaves_another_stream_current_is_found(tmp_path: Path) -> None:
    def elsewhere(a: Any, b: Any) -> Any:
        result = a.cpu().mul(b.cpu()).to(a.device)
        torch.accelerator.set_stream(torch.Stream("sim:0"))
        return result

    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        x = torch.ones(3, device="sim:0")
        kept = torch.mul(x, x)
        assert kept.tolist() == [1, 1, 1]
    before = torch.accelerator.current_stream()
    with Plan(path, substitutions=[Substitution("aten::mul", elsewhere)]) as plan, pytest.raises(SubstitutionRejected):
        plan.execute()
    assert torch.accelerator.current_stream() == before


# Defined once: PyTorch 2.11 keeps what `torch.ops` has of an operator that is gone, and calls it.
_library = torch.library.Library("simlib", "FRAGMENT")
_library.define("fill(Tensor(a!) x) -> ()")
_library.impl("fill", lambda x: None if x.fill_(3) is x else None, "PrivateUse1")


@torch.library.custom_op("simlib::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_custom_operators_composites_and_autocast_replay(tmp_path: Path) -> None:
    def program() -> list[torch.Tensor]:
        x, y = torch.ones(1, 3, device="sim:1", requires_grad=True), torch.ones(1, 3, device="sim:1")
        torch.ops.simlib.fill(y)
        (x * twice(y)).sum().backward()
        with torch.inference_mode():
            composite = torch.nn.functional.linear(y, torch.ones(2, 3, device="sim:1"))
        with torch.autocast("sim", dtype=torch.bfloat16):
            cast = y @ torch.ones(3, 2, device="sim:1")
        grown = torch.empty(3, device="sim:0").copy_(y[0])
        grown.resize_(5).fill_(2)
        assert x.grad is not None
        return [x.grad, composite, cast, grown]

    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path, digests="ops"):
        results = program()
    assert [each.tolist() for each in results] == [[[6] * 3], [[9] * 2], [[9] * 2], [2] * 5]
    assert results[2].dtype is torch.bfloat16
    assert {"simlib::twice", "simlib::fill"} <= {name for name, _ in ops(path)}
    with Plan(path) as plan:
        result = plan.execute(verify="bitwise")
    assert result.outcome == "ok" and result.verification.digests > 0


# -------------------------------------------------------------------------------------------------- streams and events


def on_two_streams(device: str = "sim:0", *, edge: bool = True, back: bool = True) -> list[float]:
    """A forward pass on a stream of its own, and a backward pass. Without `edge` it does not wait for what it reads,
    without `back` the rest does not wait for it."""
    torch.manual_seed(0)
    main, other = torch.accelerator.current_stream(device), torch.Stream(device)
    x = torch.randn(4, 4).to(device) * 2
    weight = (torch.randn(4, 4).to(device) * 2).requires_grad_()
    if edge:
        other.wait_stream(main)
    with other:
        y = (x @ weight).relu()
        x.record_stream(other)
        loss = y.square().sum()
    if back:
        main.wait_stream(other)
    shown = loss * 1
    loss.backward()
    assert weight.grad is not None
    doubled = weight.grad * 2
    return [shown.item(), doubled.sum().item()]


def of_streams(path: Path) -> list[Record]:
    return [record for record in open_capture(path).records() if record.kind >= RecordKind.event_record]


def streams_of(path: Path) -> dict[str, set[int]]:
    """The streams on which each operator ran."""
    reader, found = open_capture(path), dict[str, set[int]]()
    for name, record in ops(path):
        placement = reader.placements[record.placement] if record.placement else None
        found.setdefault(name, set()).add(placement.streams[0][1] if placement else 0)
    return found


def test_ops_know_their_stream_and_what_orders_streams_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    expected = on_two_streams()
    with replayfmt.capture(path):
        assert on_two_streams() == expected
        torch.Stream("sim:0").synchronize()
        torch.accelerator.synchronize()
    streams = streams_of(path)
    assert streams["aten::_to_copy"] == {0} and streams["aten::relu"] == {1}
    assert streams["aten::threshold_backward"] == {1}, "a backward pass runs on the stream of the forward one"
    kinds = [record.kind for record in of_streams(path)]
    K = RecordKind
    # Into the stream and back by the program, into it and out of it by the backward pass.
    edges = [K.event_record, K.event_wait]
    assert kinds == [*edges, K.stream_use, *edges, *edges, *edges, K.stream_synchronize]
    assert open_capture(path).summary.records[K.synchronize] == 1
    assert not open_capture(path).summary.unsupported


def test_what_waits_inside_an_op_is_the_ops_own(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        assert (torch.ones(3, device="sim:0") * 2).to("sim:1").sum().item() == 6
    assert of_streams(path) == []


def test_a_capture_leaves_pytorchs_trace_as_it_was_and_default_streams_leave_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    trace = torch.sim._gpu_trace  # type: ignore[attr-defined]
    with replayfmt.capture(path):
        training("sim:0", 1)
        assert trace.EventRecordCallbacks.callback_list
    assert not trace.EventRecordCallbacks.callback_list
    trace.EventRecordCallbacks.add_callback(seen := list[Any]().append)
    torch.Event("sim:0").record()
    trace.EventRecordCallbacks.callback_list.remove(seen)
    assert not seen.__self__, "the trace is off"  # type: ignore[attr-defined]
    reader = open_capture(path)
    assert not reader.definitions.counts["placement"]
    assert all(reader.frame(index).placement is None for index in range(len(reader.record_frames)))


def test_a_trace_that_costs_much_begins_with_the_first_work_on_another_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replayfmt.recording.stream.device_streams.tells_of_memory", lambda _kind: True)
    trace = torch.sim._gpu_trace  # type: ignore[attr-defined]
    one, two = tmp_path / "a.opreplay", tmp_path / "b.opreplay"
    with replayfmt.capture(one):
        training("sim:0", 1)
        assert not trace.EventRecordCallbacks.callback_list
    assert not of_streams(one)
    with replayfmt.capture(two):
        on_two_streams()
        assert trace.EventRecordCallbacks.callback_list
    assert not trace.EventRecordCallbacks.callback_list
    reader = open_capture(two)
    K = RecordKind
    assert reader.summary.records[K.synchronize] == 1, "the host waits, in place of what was not seen until then"
    assert reader.summary.records[K.event_wait] == 3
    assert find_races(reader) == []
    with Plan(two) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"
    assert sim.races() == 0


def test_streams_of_two_devices_are_numbered_on_each(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        one, two = torch.Stream("sim:0"), torch.Stream("sim:1")
        with one, two:
            x = torch.ones(3, device="sim:0") + 1
            y = x.to("sim:1") * 2
            assert y.tolist() == [4, 4, 4]
    reader = open_capture(path)
    devices = {str(device): number for number, device in enumerate(reader.devices) if device is not None}
    assert [set(each.streams) for each in reader.placements[1:]][-1] == {(devices["sim:0"], 1), (devices["sim:1"], 1)}


def test_a_device_that_tells_nothing_of_its_streams_is_said_to_tell_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.sim, "_gpu_trace")  # type: ignore[attr-defined]
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        on_two_streams()
    reader = open_capture(path)
    assert "not followed" in reader.session.policies["streams"]
    assert not reader.definitions.counts["placement"] and not of_streams(path)


def without(path: Path, out: Path, kind: RecordKind, which: int) -> Path:
    """A copy of a capture without one of the records of a kind."""
    gone = [record.ordinal for record in open_capture(path).records() if record.kind is kind][which]
    return rewrite(path, out, change=lambda record, _ints, _floats: record.ordinal != gone)


@pytest.mark.parametrize("mode", ["captured", "serial"])
def test_streams_are_replayed_with_the_edges_that_were_captured(tmp_path: Path, tools: Tools, mode: str) -> None:
    path = tmp_path / "a.opreplay"
    expected = on_two_streams()
    with replayfmt.capture(path), replayfmt.scope("execute"):
        assert on_two_streams() == expected
    current = torch.accelerator.current_stream()
    for device in (None, "sim:1"):
        sim.forget_launches()
        sim.forget_races()
        done = tools("run", "--verify=bitwise", f"--streams={mode}", *([f"--device={device}"] if device else []), path)
        assert done.code == 0, done.err
        used = {stream for _device, stream in sim.launched()}
        assert len(used) == (2 if mode == "captured" else 1), used
        assert sim.races() == 0
        assert ("2 streams of sim" in done.out and "as captured" in done.out) == (mode == "captured")
        assert "race" not in done.out
        assert torch.accelerator.current_stream() == current
    assert tools("run", "--verify=bitwise", "--device=cpu", path).code == 0
    assert "race" not in tools("check", path).out


@pytest.mark.parametrize("which", [0, 1])
def test_a_race_of_the_program_is_said_by_check_and_run(tmp_path: Path, tools: Tools, which: int) -> None:
    path = tmp_path / "a.opreplay"
    sim.tolerate_races(True)
    try:
        with replayfmt.capture(path):
            on_two_streams(edge=which != 0, back=which != 1)
        assert sim.races() > 0
        checked, ran = tools("check", path), tools("run", path)
        assert "nothing orders them" in checked.out and checked.code == 0
        assert "race: ordinal" in ran.out
        row = json.loads(tools("run", "--format=jsonl", path).out.splitlines()[0])
        assert row["races"] and row["streams"] == "captured"
    finally:
        sim.tolerate_races(False)
    assert tools("run", "--streams=serial", "--verify=bitwise", path).code == 0, "in capture order nothing races"


def test_an_edge_that_is_taken_out_of_a_capture_is_missed(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        on_two_streams()
    with open_capture(path) as reader:
        assert find_races(reader) == []
    racing = []
    for which in range(4):
        cut = without(path, tmp_path / f"{which}.opreplay", RecordKind.event_wait, which)
        with open_capture(cut) as reader:
            racing.append(bool(find_races(reader)))
        sim.forget_races()
        sim.tolerate_races(True)
        try:
            with Plan(cut) as plan:
                plan.execute()
        finally:
            sim.tolerate_races(False)
        assert (sim.races() > 0) == racing[-1], f"the analysis and the device agree about wait {which}"
    assert racing[:2] == [True, True] and racing[3]


@native_alone
def test_a_benchmark_times_every_stream_by_events_of_its_own(tmp_path: Path, tools: Tools) -> None:
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path), replayfmt.scope("execute"):
        on_two_streams()
    for mode, more in (("captured", "and on 1 more of theirs"), ("serial", "events on the current stream of sim:0")):
        done = tools(
            "benchmark",
            f"--streams={mode}",
            "--benchmark-format=json",
            "--benchmark-min-time=6x",
            "--scope=execute",
            path,
        )
        assert done.code == 0, done.err
        assert more in done.out
        assert (mode == "captured") == ("more of theirs" in done.out)
        assert json.loads(done.out)["benchmarks"][0]["real_time"] > 0
    assert torch.accelerator.current_stream().stream_id == 0


def test_a_time_begins_when_every_stream_has_done_what_came_before() -> None:
    other, more = torch.Stream("sim:0"), torch.Stream("sim:1")
    timer = DeviceTimer(
        [torch.device("sim:0"), torch.device("sim:1")], streams=lambda device: [more if device.index else other]
    )
    x = torch.ones(4, device="sim:0") * 2
    with more:
        y = torch.ones(4, device="sim:1") * 2
    with other, pytest.raises(RuntimeError, match="no event lies between them"):
        x + 1
    for _ in range(2):
        timer.reset()
        timer.start()
        with other:
            assert (x + y.to("sim:0")).sum().item() == 16
        timer.stop()
        assert timer.read() > 0
    assert torch.accelerator.current_stream("sim:0").stream_id == 0


def test_memory_that_another_stream_uses_is_not_reused_before(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        main, other = torch.accelerator.current_stream("sim:0"), torch.Stream("sim:0")
        x = torch.ones(8, device="sim:0") * 2
        other.wait_stream(main)
        with other:
            y = x + 1
        torch.accelerator.synchronize()  # the program needs no record_stream: it waits before it lets go
        del x
        z = torch.ones(8, device="sim:0") * 3  # where x was
        assert (y + z).sum().item() == 48
    with Plan(path) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"
        assert plan.execute().outcome == "ok"


def test_events_between_two_devices_order_them_in_both_modes(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        one, two = torch.Stream("sim:0"), torch.Stream("sim:1")
        with one, two:
            x = torch.ones(4, device="sim:0") * 3
            y = x.to("sim:1")
            event = torch.Event("sim:0")
            event.record(one)
            two.wait_event(event)
            event.synchronize()
            z = y + 1
        two.synchronize()
        assert z.sum().item() == 16
    for streams in ("captured", "serial"):
        with Plan(path, streams=streams) as plan:
            assert plan.execute(verify="bitwise").outcome == "ok"
            assert not find_races(plan.reader)


def test_a_trimmed_capture_keeps_its_streams_and_what_orders_them(tmp_path: Path, tools: Tools) -> None:
    path, out = tmp_path / "a.opreplay", tmp_path / "b.opreplay"
    with replayfmt.capture(path):
        on_two_streams()
    done = tools("trim", "--payload=none", "--kernel=aten::*", path, out)
    assert done.code == 0, done.err
    assert [record.kind for record in of_streams(out)] == [record.kind for record in of_streams(path)]
    assert streams_of(out) == streams_of(path)
    with open_capture(out) as reader:
        assert find_races(reader) == []


@native_alone
def test_a_replay_on_the_device_is_recorded_as_of_the_device_and_compared_with_the_host(tmp_path: Path) -> None:
    host, device = tmp_path / "host.opreplay", tmp_path / "device.opreplay"
    with replayfmt.capture(host, digests="ops"):
        training("cpu", 1)
    replayfmt.record_replay(host, device, devices=["sim:0"])
    with open_capture(device) as reader:
        assert [each.kind for each in reader.devices if each is not None] == ["sim"]
    assert [name for name, _record in ops(device)] == [name for name, _record in ops(host)]
    found = replayfmt.compare(host, device, tolerance="1e-5,1e-6")
    assert found.alignment.share == 1 and found.outcome == "equal", found.text
    assert replayfmt.run(device, devices=["sim:0"], verify="bitwise").outcome == "ok"


@native_alone
def test_ops_run_on_two_devices_on_the_same_inputs_and_an_end_result_is_bisected_between_them(tmp_path: Path) -> None:
    host, device = tmp_path / "host.opreplay", tmp_path / "device.opreplay"
    for path, where in ((host, "cpu"), (device, "sim:1")):
        with replayfmt.capture(path, digests="ops"):
            training(where, 1)
    for path, against in ((host, "sim:1"), (device, "cpu")):
        found = isolate(path, against=against, tolerance="1e-6,1e-7")
        assert found.outcome == "equal" and found.compared > 40, found.text
        assert bisect(path, against=against, tolerance="1e-5,1e-6").outcome == "not off"
