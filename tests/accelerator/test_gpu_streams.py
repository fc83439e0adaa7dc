"""Streams and events of CUDA: what tests/accelerator/on_device.py tries on the simulated accelerator, on a GPU."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from replay.rewriting import rewrite

import replayfmt
from replayfmt import Plan
from replayfmt.format.codes import RecordKind
from replayfmt.format.races import find_races
from replayfmt.format.reader import open_capture

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_two_streams() -> list[float]:
    """A forward pass on a stream of its own, and a backward pass."""
    torch.manual_seed(0)
    main, other = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.randn(256, 256, device="cuda") * 2
    weight = (torch.randn(256, 256, device="cuda") * 2).requires_grad_()
    other.wait_stream(main)
    with torch.cuda.stream(other):
        loss = (x @ weight).relu().square().mean()
        x.record_stream(other)
    main.wait_stream(other)
    shown = loss * 1
    loss.backward()
    assert weight.grad is not None
    doubled = weight.grad * 2
    return [shown.item(), doubled.sum().item()]


@pytest.fixture(params=["python", "native"])
def capture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("OPREPLAY_RECORDER", request.param)
    path = tmp_path / "a.opreplay"
    expected = on_two_streams()
    with replayfmt.capture(path):
        assert on_two_streams() == expected
    return path


def test_what_a_program_does_on_two_streams_is_recorded_and_orders_all_it_uses(capture: Path) -> None:
    with open_capture(capture) as reader:
        assert not reader.summary.unsupported
        assert [number for placement in reader.placements[1:] for _device, number in placement.streams] == [1]
        # The recorder waits at the stream's first op; then back by the program, into it and out by the backward pass.
        assert reader.summary.records[RecordKind.synchronize] == 1
        assert reader.summary.records[RecordKind.event_wait] >= 3
        assert reader.summary.records[RecordKind.stream_use] == 1
        assert find_races(reader) == []


@pytest.mark.parametrize("streams", ["captured", "serial"])
def test_it_replays_bit_for_bit_on_streams_and_in_capture_order(capture: Path, streams: str) -> None:
    current = torch.cuda.current_stream()
    with Plan(capture, streams=streams) as plan:
        for _ in range(3):
            assert plan.execute(verify="bitwise").outcome == "ok"
    assert torch.cuda.current_stream() == current


def test_an_edge_that_is_taken_out_is_a_race(capture: Path, tmp_path: Path) -> None:
    first = next(record.ordinal for record in open_capture(capture).records() if record.kind is RecordKind.event_wait)
    cut = rewrite(capture, tmp_path / "b.opreplay", change=lambda record, _ints, _floats: record.ordinal != first)
    with open_capture(cut) as reader:
        assert find_races(reader)


def asking_for_losses(side: torch.cuda.Stream | None) -> list[float]:
    """Losses that travel to pinned memory, read when their event says that they are there; or what another stream
    computed, used without an edge but that answer."""
    torch.manual_seed(0)
    weight, first = (torch.randn(2048, 2048, device="cuda") for _ in range(2))
    x, seen = first, []
    torch.cuda.synchronize()
    for _ in range(3):
        event = torch.cuda.Event()
        with torch.cuda.stream(side):
            for _ in range(20):
                product = x @ weight
                x = product / product.norm()
            loss = x.sum()
            host = loss.to("cpu", non_blocking=True)
            event.record()
        while not event.query():
            pass
        seen += [float(host * 1), (loss * 2).item()]
    assert all(map(math.isfinite, seen))
    return seen


@pytest.mark.parametrize("recorder", ["python", "native"])
@pytest.mark.parametrize("on_side", [False, True])
def test_a_program_that_asks_whether_work_is_done_replays_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorder: str, on_side: bool
) -> None:
    monkeypatch.setenv("OPREPLAY_RECORDER", recorder)
    path, side = tmp_path / "a.opreplay", torch.cuda.Stream() if on_side else None
    expected, query = asking_for_losses(side), torch.cuda.Event.query
    with replayfmt.capture(path):
        assert asking_for_losses(side) == expected
    assert torch.cuda.Event.query is query
    with open_capture(path) as reader:
        assert not reader.summary.unsupported
        assert reader.summary.records.get(RecordKind.event_synchronize, 0) == (3 if on_side else 0)
        assert find_races(reader) == []
    for streams in ("captured", "serial"):
        with Plan(path, streams=streams) as plan:
            for _ in range(3):
                result = plan.execute(verify="bitwise")
                assert result.outcome == "ok", str(result.divergence)


def test_the_trace_of_streams_ends_with_the_capture(capture: Path) -> None:
    import torch.cuda._gpu_trace as trace

    assert not trace.EventRecordCallbacks.callback_list
