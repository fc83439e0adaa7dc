"""Windows: where they are cut, that repeated work shares code, what runs between them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import replayfmt
from replayfmt.errors import ReplayFailed
from replayfmt.format.codes import RecordKind
from replayfmt.format.model import Record
from replayfmt.replay.operations import DrawOnHost
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.scan import CutFinder, WindowSize

from .conftest import Captured
from .rewriting import rewrite


def cuts(signatures: list[int], kinds: list[int], window: WindowSize, chunk: int = 50) -> list[int]:
    finder = CutFinder(window)
    for start in range(0, len(kinds), chunk):
        finder.feed(np.array(signatures[start : start + chunk]), np.array(kinds[start : start + chunk], np.uint8))
    return finder.finish()


def test_a_repeated_sequence_is_cut_at_the_same_places_every_time() -> None:
    step = list(np.random.default_rng(0).integers(1, 40, 137))
    found = cuts(step * 100, [RecordKind.op] * 13700, WindowSize(200, 800))
    lengths = set(np.diff(found[1:]).tolist())
    assert lengths == {274}  # the least multiple of the step that is at least 200
    assert found == cuts(step * 100, [RecordKind.op] * 13700, WindowSize(200, 800), chunk=13700)


def test_scope_boundaries_come_first_and_outer_ones_before_inner_ones() -> None:
    op, begin, end = RecordKind.op, RecordKind.scope_begin, RecordKind.scope_end
    inner = [begin, *[op] * 10, end]
    step = [begin, *inner * 5, end]  # 62 records
    found = cuts([kind + 1 for kind in step * 20], step * 20, WindowSize(50, 200))
    assert found == [62 * count for count in range(1, len(found) + 1)]


def test_windows_stay_within_their_bounds() -> None:
    random = np.random.default_rng(1)
    signatures = random.integers(1, 1000, 5000).tolist()
    found = cuts(signatures, [RecordKind.op] * 5000, WindowSize(100, 300))
    lengths = np.diff([0, *found])
    assert lengths.min() >= 100 and lengths.max() <= 300 and 5000 - found[-1] <= 300


def steps(count: int) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def program() -> None:
        for step in range(count):
            with replayfmt.scope(f"step {step}"):
                optimizer.zero_grad()
                model(torch.randn(3, 4)).sum().backward()
                optimizer.step()

    return program


@pytest.mark.slow
def test_steps_of_a_loop_share_their_code_although_their_numbers_differ(captured: Captured) -> None:
    path = captured(steps(30), digests="live")
    with Plan(path, window=WindowSize(60, 400)) as plan:
        windows = list(plan.windows(checks=False)[0])
        assert plan.execute().outcome == "ok"
        assert len(windows) >= 25
        assert plan.context.cache.compiled <= 6
        assert plan.execute(verify="bitwise").outcome == "ok"


@pytest.mark.slow
def test_a_capture_too_long_to_keep_is_prepared_window_by_window(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replayfmt.replay.plan._KEPT_RECORDS", 10)
    with Plan(captured(steps(5)), window=WindowSize(20, 40)) as plan:
        for verify in ("bitwise", "none", "bitwise"):
            assert plan.execute(verify=verify).outcome == "ok"  # type: ignore[arg-type]
        assert not plan._kept


def test_scopes_are_reported_in_order_and_timed(captured: Captured) -> None:
    def program() -> None:
        with replayfmt.scope("outer"):
            for _ in range(2):
                with replayfmt.scope("inner"):
                    torch.ones(3).exp()

    path = captured(program)
    events: list[tuple[str, str, str]] = []
    with Plan(path, window=WindowSize(1, 2)) as plan:
        result = plan.execute(
            on_scope=lambda event, name, path, ordinal: events.append((event, name, path)), scope_times=True
        )
    inner = [("begin", "inner", "outer/inner"), ("end", "inner", "outer/inner")]
    assert events == [("begin", "outer", "outer"), *inner, *inner, ("end", "outer", "outer")]
    assert set(result.scope_ns) == {"outer", "outer/inner"}
    assert 0 < result.scope_ns["outer/inner"] <= result.scope_ns["outer"] <= result.elapsed_ns


def test_progress_is_told_between_windows_up_to_the_last_record(captured: Captured) -> None:
    done: list[int] = []
    with Plan(captured(steps(3)), window=WindowSize(20, 40)) as plan:
        result = plan.execute(on_progress=done.append)
        assert done == sorted(set(done)) and len(done) > 3
        assert done[-1] == plan.reader.record_count
        assert result.outcome == "ok"


def test_work_of_several_threads_is_replayed_in_capture_order_and_said_so(captured: Captured) -> None:
    def program() -> None:
        together = threading.Barrier(3)  # a thread that ended gives its number to the next

        def work(start: float) -> None:
            together.wait()
            x = torch.full((4,), start)
            for _ in range(10):
                x = x * 1.01 + torch.rand(4)
            x.sum().item()
            together.wait()

        threads = [threading.Thread(target=work, args=(float(number),)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with Plan(captured(program)) as plan:
        result = plan.execute(verify="bitwise")
        assert result.outcome == "ok"
        assert result.notes == ("the work of 3 threads is replayed by one, in capture order",)


class CountingTimer:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda: self.calls.append(name)


def test_a_timer_is_started_once_and_stopped_also_when_an_op_fails(captured: Captured, tmp_path: Path) -> None:
    kept: list[torch.Tensor] = []
    source = captured(lambda: kept.append(torch.ones(6).view(2, 3)), digests="live")
    timer = CountingTimer()
    with Plan(source) as plan:
        plan.execute(timer=timer)
        assert (timer.calls[0], timer.calls[-1]) == ("start", "stop")
        assert timer.calls.count("start") == timer.calls.count("stop") == 1
        plan.execute(timer=timer, verify="bitwise")
        assert timer.calls.count("pause") >= 1  # digests are not the replay's time

    def change(record: Record, ints: list[int], floats: list[float]) -> None:
        if ints[:2] == [2, 3]:
            ints[0] = 5

    failing = CountingTimer()
    with Plan(rewrite(source, tmp_path / "fails.opreplay", change=change)) as plan:
        with pytest.raises(ReplayFailed, match=r"\(aten::view\.default\) failed"):
            plan.execute(timer=failing)
        assert failing.calls.count("start") == failing.calls.count("stop") == 1


def test_settings_and_generators_are_put_back_also_when_an_op_fails(captured: Captured, tmp_path: Path) -> None:
    from replayfmt.pytorch.environment import read_settings

    def program() -> None:
        torch.set_default_dtype(torch.float64)
        torch.rand(2)
        torch.ones(6).view(2, 3)
        torch.set_default_dtype(torch.float32)

    def change(record: Record, ints: list[int], floats: list[float]) -> None:
        if ints[:2] == [2, 3]:
            ints[0] = 5

    path = rewrite(captured(program), tmp_path / "fails.opreplay", change=change)
    before, state = read_settings(), torch.get_rng_state()
    with Plan(path) as plan, pytest.raises(ReplayFailed):
        plan.execute()
    assert read_settings() == before and torch.equal(torch.get_rng_state(), state)


def test_an_error_of_the_scope_callback_is_its_own(captured: Captured) -> None:
    def program() -> None:
        with replayfmt.scope("only"):
            torch.ones(2)

    def callback(*_event: Any) -> None:
        raise LookupError("mine")

    with Plan(captured(program)) as plan, pytest.raises(LookupError, match="mine"):
        plan.execute(on_scope=callback)


def test_random_ops_of_a_cpu_capture_are_drawn_on_the_host() -> None:
    normal = torch.ops.aten.normal_.default
    drawn = DrawOnHost(normal._op, normal._schema, torch.device("cpu"))
    torch.manual_seed(3)
    expected = torch.randn(8)
    target = torch.zeros(8)
    torch.manual_seed(3)
    assert drawn(target, 0.0, 1.0) is target
    assert torch.equal(target, expected)
    dropout = torch.ops.aten.native_dropout.default
    torch.manual_seed(4)
    wanted = dropout(target, 0.5, True)
    torch.manual_seed(4)
    got = DrawOnHost(dropout._op, dropout._schema, torch.device("cpu"))(target, 0.5, True)
    assert all(map(torch.equal, got, wanted))


@pytest.mark.gpu
def test_a_cpu_capture_replays_on_a_gpu_with_its_own_random_numbers(captured: Captured) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    path = captured(steps(2))
    with Plan(path, ["cuda:0"]) as plan:
        for verify in ("auto", "none", "close"):
            result = plan.execute(verify=verify)  # type: ignore[arg-type]
            assert result.outcome == "ok", str(result.divergence)
        assert result.verification.mode == "close"
        assert any(each.device == "cuda:0" and each.peak_bytes for each in result.memory)
