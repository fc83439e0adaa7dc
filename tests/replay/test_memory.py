"""A replay takes no more memory than the program did, and drops everything as soon as the program could have."""

from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from replayfmt.errors import ReplayFailed, ReplayRefused
from replayfmt.format.codes import RecordKind
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.devices import MemoryWatch
from replayfmt.replay.planning.scan import WindowSize
from replayfmt.replay.run.execute import Machine

from .conftest import Captured
from .rewriting import rewrite

_MEGABYTE = 1 << 20


def chain(width: int, depth: int) -> Any:
    def program() -> None:
        x = torch.ones(width, 256)
        for _ in range(depth):
            x = (x * 1.5).exp().log() / 1.5
        x.sum().item()

    return program


def allocated_at_most(run: Any) -> int:
    """How many bytes more than at its beginning torch's CPU allocator had given out at most while something ran."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        every = json.loads(trace.read_text())["traceEvents"]
    events = [event["args"] for event in every if event["name"] == "[memory]"]
    assert events, "the profiler saw no allocation"
    before = events[0]["Total Allocated"] - events[0]["Bytes"]
    return max(event["Total Allocated"] for event in events) - before


@pytest.mark.slow
@pytest.mark.parametrize("window", [WindowSize(), WindowSize(1, 3)])
def test_a_chain_of_ops_keeps_only_what_it_needs(captured: Captured, window: WindowSize) -> None:
    program = chain(16 * 1024, 8)  # 16 MiB a tensor
    needed = allocated_at_most(program)
    path = captured(program, digests="live")
    with Plan(path, window=window) as plan:
        for _ in range(2):
            assert allocated_at_most(plan.execute) <= 1.05 * needed
    assert needed >= 32 * _MEGABYTE  # two tensors at once: the measurement means something


@pytest.mark.slow
def test_training_replays_within_the_programs_memory(captured: Captured) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def program() -> None:
        for _ in range(2):
            batch = torch.from_numpy(torch.rand(4096, 512).numpy().copy())
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()

    needed = allocated_at_most(program)
    path = captured(program, digests="live")
    with Plan(path) as plan:
        needed += 4096 * 512 * 4  # a batch, which numpy allocated
        parameters = sum(p.nbytes for p in model.parameters())
        assert allocated_at_most(plan.execute) <= 1.05 * (needed + parameters)  # it brings the parameters along
        plan.execute()  # makes pristine copies of them
        assert allocated_at_most(plan.execute) <= 1.05 * needed


@pytest.mark.slow
def test_everything_is_dropped_after_its_last_use(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    path = captured(chain(8, 5), digests="none")
    alive: list[int] = []
    call = Machine.call

    def counting(self: Machine, window: Any, inputs: list[Any], on_scope: Any) -> list[Any]:
        outputs = call(self, window, inputs, on_scope)
        alive.append(len(outputs) + len(self.values))
        return outputs

    monkeypatch.setattr(Machine, "call", counting)
    with Plan(path, window=WindowSize(1, 1)) as plan:
        plan.execute()
    assert max(alive) == 1  # one tensor hands on to the next
    assert alive[-1] == 0


@pytest.mark.slow
def test_a_tensor_made_without_an_op_does_not_keep_its_memory_longer(captured: Captured) -> None:
    def program() -> None:
        for _ in range(6):
            x = torch.ones(16 * 1024, 256)  # 16 MiB
            x.exp_()
            y = torch.from_numpy(x.numpy().reshape(-1))  # no op: the replay makes it of what it has
            del x
            y.mul_(2)
            del y

    needed = allocated_at_most(program)
    path = captured(program, digests="none")
    with Plan(path) as plan:
        assert len(plan.windows(checks=False)[0]) == 1  # type: ignore[arg-type]
        assert allocated_at_most(plan.execute) <= 1.05 * needed


@pytest.mark.slow
def test_a_batch_that_the_program_freed_enters_only_when_it_is_needed(captured: Captured) -> None:
    def program() -> None:
        for _ in range(6):
            torch.from_numpy(torch.rand(1024, 512).numpy().copy()).sum()

    path = captured(program, digests="none")
    with Plan(path) as plan:
        staged = [len(window.staged) for window in plan.windows(checks=False)[0]]
        assert max(staged) == 1 and sum(staged) == 6
        plan.execute()
        assert allocated_at_most(plan.execute) <= 1.05 * 2 * _MEGABYTE  # one batch of 2 MiB


def test_content_that_is_only_read_is_kept_and_written_content_restored(captured: Captured) -> None:
    read, written = torch.randn(1000), torch.randn(1000)
    path = captured(lambda: written.add_(read).sum().item())
    with Plan(path) as plan:
        for _ in range(4):
            assert plan.execute(verify="bitwise").outcome == "ok"
        assert len(plan._content._kept) == 2
        assert len(plan._content._pristine) == 1
        plan.close()
        assert not plan._content._kept and not plan._content._pristine


def test_without_room_for_a_pristine_copy_content_comes_from_the_file_again(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replayfmt.replay.run.content.free_bytes", lambda device: 0)
    written = torch.randn(1000)
    path = captured(lambda: written.mul_(2).sum().item())
    with Plan(path) as plan:
        for _ in range(3):
            assert plan.execute(verify="bitwise").outcome == "ok"
        assert not plan._content._pristine


def test_peak_memory_is_reported_or_the_reason_why_not(
    captured: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = captured(chain(4096, 2))
    with Plan(path) as plan:
        (peak,) = plan.execute().memory
        assert peak.device == "cpu" and peak.peak_bytes is not None and peak.before_bytes is not None
        assert peak.peak_bytes >= peak.before_bytes > 0
        monkeypatch.setattr("replayfmt.replay.planning.devices._CLEAR", tmp_path / "nowhere" / "clear_refs")
        (peak,) = plan.execute().memory
        assert peak.peak_bytes is None and "cannot be reset" in peak.note


def test_a_peak_is_never_below_what_there_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replayfmt.replay.planning.devices._status_bytes", {"VmRSS": 5000, "VmHWM": 4000}.get)
    watch = MemoryWatch([torch.device("cpu")])
    watch.start()
    (peak,) = watch.read()
    assert peak.peak_bytes in (5000, None)  # None where the mark cannot be reset


def test_a_storage_that_no_machine_could_hold_is_one_clear_error(captured: Captured, tmp_path: Path) -> None:
    x = torch.ones(4)
    source = captured(lambda: x.exp())
    path = rewrite(source, tmp_path / "huge.opreplay", storage_bytes=1 << 55)
    with pytest.raises(ReplayRefused) as caught:
        Plan(path)
    assert "bytes of memory" in caught.value.findings[0]


def test_a_tensor_outside_its_storage_is_one_clear_error(captured: Captured, tmp_path: Path) -> None:
    x = torch.ones(4)
    source = captured(lambda: (x.exp(), x[1:].exp()), digests="none")
    path = rewrite(
        source,
        tmp_path / "outside.opreplay",
        tensor_offset=1 << 40,
        change=lambda record, ints, floats: record.kind is not RecordKind.storage_release,
    )
    with Plan(path) as plan, pytest.raises(ReplayFailed, match="needs .* bytes of a storage that has"):
        plan.execute()
