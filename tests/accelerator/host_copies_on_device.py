"""Copies between a device and pinned memory that nobody waits for, and programs that ask whether work is done. Run by
test_accelerator.py in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device import devices_as_they_were, recorder, register  # noqa: F401 - fixtures of every test

import replayfmt
from replayfmt import Plan
from replayfmt.format.codes import RecordKind
from replayfmt.format.races import find_races
from replayfmt.format.reader import open_capture

sim = register()
DEVICE = "sim:0"


def copied_to_host() -> torch.Tensor:
    host = torch.empty(8, pin_memory=True)
    return host.copy_(torch.arange(8.0, device=DEVICE) * 2, non_blocking=True)


def waiting_for_the_device() -> Any:
    host = copied_to_host()
    torch.accelerator.synchronize()
    return (host + 1).tolist()


def waiting_for_an_event() -> Any:
    host, event = (torch.arange(8.0, device=DEVICE) * 2).to("cpu", non_blocking=True), torch.Event(DEVICE)
    event.record()
    event.synchronize()
    return (host + 1).tolist()


def asking_an_event() -> Any:
    host, event = copied_to_host(), torch.Event(DEVICE)
    event.record()
    while not event.query():
        pass
    return (host + 1).tolist()


def asking_a_stream() -> Any:
    host = copied_to_host()
    while not torch.accelerator.current_stream(DEVICE).query():
        pass
    return (host + 1).tolist()


def waiting_after_a_scope() -> Any:
    with replayfmt.scope("execute"):
        host = copied_to_host()
    torch.accelerator.synchronize()
    return (host + 1).tolist()


def filling_one_buffer_again_and_again() -> Any:
    buffer, event, batches = torch.empty(8, pin_memory=True), torch.Event(DEVICE), []
    for number in range(4):
        event.synchronize()
        buffer.copy_(torch.arange(8.0) + number)
        batches.append(torch.empty(8, device=DEVICE).copy_(buffer, non_blocking=True))
        event.record()
    return [batch.sum().item() for batch in batches]


def filling_one_buffer_without_operators() -> Any:
    buffer, event, batches = torch.empty(8, pin_memory=True), torch.Event(DEVICE), []
    for number in range(4):
        event.synchronize()
        buffer.numpy()[:] = number + 1
        batches.append(torch.empty(8, device=DEVICE).copy_(buffer, non_blocking=True))
        event.record()
    return [batch.sum().item() for batch in batches]


def reading_losses_as_they_come() -> Any:
    torch.manual_seed(0)
    model, under_way, seen = torch.nn.Linear(4, 1).to(DEVICE), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(4):
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), float(number), device=DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        event = torch.Event(DEVICE)
        under_way.append((loss.detach().to("cpu", non_blocking=True), event))
        event.record()
        while under_way and under_way[0][1].query():
            seen.append(float(under_way.pop(0)[0] * 1))
    for host, event in under_way:
        event.synchronize()
        seen.append(float(host * 1))
    return seen


@pytest.mark.parametrize("begins_late", [False, True])
@pytest.mark.parametrize(
    "program",
    [
        waiting_for_the_device,
        waiting_for_an_event,
        asking_an_event,
        asking_a_stream,
        waiting_after_a_scope,
        filling_one_buffer_again_and_again,
        filling_one_buffer_without_operators,
        reading_losses_as_they_come,
    ],
)
def test_the_host_waits_for_copies_as_the_program_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Callable[[], Any], begins_late: bool
) -> None:
    """Also where the trace has not begun, because there are only default streams: then the capture has no waits."""
    monkeypatch.setattr("replayfmt.recording.stream.device_streams.tells_of_memory", lambda _kind: begins_late)
    expected = program()
    for number, options in enumerate(({}, {"digests": "ops"})):
        path = tmp_path / f"{number}.opreplay"
        with replayfmt.capture(path, **options):  # type: ignore[arg-type]
            assert program() == expected
        assert not open_capture(path).summary.unsupported
        with Plan(path) as plan:
            for _ in range(2):
                result = plan.execute(verify="bitwise")
                assert result.outcome == "ok", str(result.divergence)


def test_copies_that_land_late_are_no_writes_from_outside(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path, audit=True):
        waiting_for_the_device()
    records = open_capture(path).summary.records
    assert not records.get(RecordKind.storage_import), "what the device writes is not taken for content of the program"


def asking(what: Callable[[torch.Stream, torch.Event], Any]) -> list[float]:
    """Uses what another stream computed, without an edge but the answer that it is done."""
    other, event = torch.Stream(DEVICE), torch.Event(DEVICE)
    with other:
        y = torch.arange(8.0, device=DEVICE) * 3
        event.record(other)
    asked = what(other, event)
    answers = [asked.query()]
    while not answers[-1]:
        answers.append(asked.query())
    assert answers == [False, True]
    return (y + 1).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        (lambda _stream, event: event, RecordKind.event_synchronize),
        (lambda stream, _event: stream, RecordKind.stream_synchronize),
    ],
)
def test_an_answer_that_work_is_done_is_a_wait_and_one_that_it_is_not_is_nothing(
    tmp_path: Path, what: Callable[[torch.Stream, torch.Event], Any], kind: RecordKind
) -> None:
    path = tmp_path / "a.opreplay"
    before = (torch.Event.query, torch.Stream.query)
    expected = asking(what)
    with replayfmt.capture(path):
        assert asking(what) == expected
    assert (torch.Event.query, torch.Stream.query) == before
    assert type(torch.Event.query) is type(torch.Event.record), "what replaced it is gone"
    with open_capture(path) as reader:
        assert reader.summary.records[kind] == 1
        assert find_races(reader) == []
    for streams in ("captured", "serial"):
        with Plan(path, streams=streams) as plan:
            assert plan.execute(verify="bitwise").outcome == "ok"


def test_queries_of_a_devices_own_classes_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        """As the module of a device may have it, with a handle that nobody knows."""

        def __init__(self) -> None:
            self._event = torch.Event(DEVICE)

        def query(self) -> bool:
            return bool(torch.Event.query(self._event))

        def record(self, stream: torch.Stream) -> None:
            self._event.record(stream)

    monkeypatch.setattr(torch.sim, "Event", Event, raising=False)  # type: ignore[attr-defined]
    original, path = Event.query, tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        event, other = Event(), torch.Stream(DEVICE)
        with other:
            y = torch.ones(4, device=DEVICE) * 3
            event.record(other)
        while not event.query():
            pass
        assert y.sum().item() == 12
    assert Event.query is original
    assert open_capture(path).summary.records[RecordKind.synchronize] == 1, "all that the device had to do"


def test_pinned_memory_that_changes_too_early_is_found_on_the_device() -> None:
    host = torch.ones(4).pin_memory()
    copied = host.to(DEVICE, non_blocking=True)
    host.fill_(2)
    with pytest.raises(RuntimeError, match="pinned memory has changed"):
        torch.accelerator.synchronize()
    assert copied.tolist() == [2] * 4
