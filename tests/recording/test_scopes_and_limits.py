"""Scopes, and captures of a part of the program."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

import replayfmt
from replayfmt.errors import NothingCaptured, UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.recording.options import CaptureOptions

from .conftest import Capture, Captured


def outline(captured: Captured) -> list[str]:
    """Scopes and ops, in order."""
    reader = captured.reader
    lines = []
    for record in reader.records():
        if record.kind is RecordKind.op:
            lines.append(f"{reader.scope_path(record.scope)}: {reader.kernels[record.signature.kernel].name}")
        elif record.kind in (RecordKind.scope_begin, RecordKind.scope_end):
            lines.append(f"{'>' if record.kind is RecordKind.scope_begin else '<'}{reader.scope_path(record.scope)}")
    return lines


def steps(count: int) -> None:
    for step in range(count):
        with replayfmt.scope(f"step {step}"):
            torch.ones(1)
            torch.zeros(1)


def test_operators_after_the_last_one_that_is_recorded_may_be_given_numbers_for_tensors(capture: Capture) -> None:
    def program() -> None:
        torch.ones(2)
        assert (torch._efficientzerotensor(3) + 1).tolist() == [1.0, 1.0, 1.0]

    assert capture(program, stop_op=1).ops() == ["aten::ones.default"]


def test_scopes_nest_and_repeat(capture: Capture) -> None:
    def program() -> None:
        for _ in range(2):
            with replayfmt.scope("outer"):
                torch.ones(1)
                with replayfmt.scope("inner"):
                    torch.zeros(1)

    once = [">outer", "outer: aten::ones", ">outer/inner", "outer/inner: aten::zeros", "<outer/inner", "<outer"]
    assert outline(capture(program)) == once * 2


def test_ending_a_scope_that_is_not_open_is_an_error(tmp_path) -> None:
    with (
        replayfmt.capture(tmp_path / "x.opreplay") as recorder,
        pytest.raises(UsageError, match="'nothing' is not open"),
    ):
        torch.ones(1)
        recorder.scope_end("nothing")


def test_ending_an_outer_scope_ends_what_is_inside(capture: Capture, tmp_path) -> None:
    path = tmp_path / "x.opreplay"
    with replayfmt.capture(path) as recorder:
        recorder.scope_begin("a")
        recorder.scope_begin("b")
        recorder.scope_end("a")
        torch.ones(1)
    assert outline(Captured(path, None)) == [">a", ">a/b", "<a/b", "<a", ": aten::ones"]


def test_record_function_becomes_a_scope_without_digests(capture: Capture) -> None:
    def program() -> torch.Tensor:
        with torch.autograd.profiler.record_function("named"):
            return torch.ones(1)

    captured = capture(program)
    assert outline(captured) == [">named", "named: aten::ones", "<named"]
    order = [r.kind for r in captured.records(RecordKind.digest, RecordKind.scope_end)]
    assert order == [RecordKind.scope_end, RecordKind.digest], "only the capture's end digests"


def test_live_digests_come_at_the_end_of_the_programs_scopes(capture: Capture) -> None:
    def program() -> Any:
        kept = torch.zeros(3)
        for step in range(3):
            with replayfmt.scope(f"step {step}"):
                torch.ones(3) * 2  # dies
                kept.add_(1)
        unchanged = torch.ones(1)
        return kept, unchanged

    captured = capture(program)
    digests = captured.records(RecordKind.digest)
    assert [r.argument("sample") for r in digests] == [[1.0] * 3, [2.0] * 3, [3.0] * 3, [1.0]]
    captured.replays()


def test_recording_can_be_limited_to_some_ops(capture: Capture) -> None:
    captured = capture(lambda: steps(3), start_op=1, stop_op=4)
    assert outline(captured) == [
        ">step 0",
        "step 0: aten::zeros",
        "<step 0",
        ">step 1",
        "step 1: aten::ones",
        "step 1: aten::zeros",
        "<step 1",
        ">step 2",
        "<step 2",
    ]


def test_recording_can_be_limited_to_some_scopes(capture: Capture) -> None:
    captured = capture(lambda: steps(4), start_scope="step 1", stop_scope="step 2")
    assert outline(captured) == [
        ">step 1",
        "step 1: aten::ones",
        "step 1: aten::zeros",
        "<step 1",
        ">step 2",
        "step 2: aten::ones",
        "step 2: aten::zeros",
        "<step 2",
    ]


def named_alike(count: int) -> None:
    """Scopes of one name, with another one around it that ends with it."""
    for number in range(count):
        with replayfmt.scope("round"), replayfmt.scope("step"):
            torch.full((number + 1,), 0.0)


def sizes(captured: Captured) -> list[int]:
    """The lengths of what `full` made."""
    return [record.results[0].meta.sizes[0] for record in captured.records(RecordKind.op)]


def test_the_nth_scope_of_a_name_starts_and_stops_recording(capture: Capture) -> None:
    captured = capture(lambda: named_alike(6), start_scope="step#2", stop_scope="step#3", digests="ops")
    assert sizes(captured) == [3, 4]
    assert outline(captured)[0] == ">round" and outline(captured)[-1] == "<round"
    assert captured.reader.session.policies["start_scope"] == "step#2"
    assert sizes(capture(lambda: named_alike(6), start_scope="step#4")) == [5, 6]
    assert sizes(capture(lambda: named_alike(6), stop_scope="round#1")) == [1, 2]
    assert sizes(capture(lambda: named_alike(6), start_scope="step#2", stop_scope="step")) == [3]
    assert sizes(capture(lambda: named_alike(4), start_scope="step#1", start_op=2)) == [3, 4]
    captured.replays()


def test_a_scope_whose_name_ends_in_a_number_is_still_named_by_it(capture: Capture) -> None:
    def program() -> None:
        for number in range(2):
            with replayfmt.scope("block#1"):
                torch.full((number + 1,), 0.0)

    assert sizes(capture(program, start_scope="block#1#1")) == [2]
    with pytest.raises(NothingCaptured):
        capture(program, start_scope="block#1")  # the second scope called `block`


def train(steps: int) -> None:
    weight = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for number in range(steps):
        optimizer.zero_grad()
        (weight * torch.full((3,), float(number))).sum().backward()
        optimizer.step()


def fills(captured: Captured) -> list[float]:
    """Which steps of `train` were recorded."""
    return [
        record.argument("fill_value")
        for record in captured.records(RecordKind.op)
        if captured.reader.kernels[record.signature.kernel].name == "aten::full"
    ]


def test_the_steps_of_a_training_loop_are_counted_by_its_optimizer(capture: Capture) -> None:
    captured = capture(lambda: train(6), steps="2:4", digests="ops")
    assert fills(captured) == [2.0, 3.0]
    assert captured.reader.session.policies["steps"] == "2:4"
    captured.replays()
    assert fills(capture(lambda: train(3), steps="1:")) == [1.0, 2.0]
    assert fills(capture(lambda: train(3), steps=":1")) == [0.0]
    assert not _global_optimizer_post_hooks, "the hook is gone with the capture"


def test_a_step_that_does_not_come_leaves_no_capture(capture: Capture) -> None:
    with pytest.raises(NothingCaptured, match="within the limits of what is to be recorded"):
        capture(lambda: train(2), steps="5:6")


@pytest.mark.parametrize(
    "options",
    [
        {"steps": "3"},
        {"steps": ":"},
        {"steps": "4:4"},
        {"steps": "a:b"},
        {"steps": 3},
        {"steps": "1:2", "start_op": 1},
        {"steps": "1:2", "stop_scope": "x"},
        {"start_scope": ""},
    ],
)
def test_wrong_limits_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="steps|start_scope"):
        CaptureOptions(**options)


def test_what_was_made_before_the_start_enters_as_content(capture: Capture) -> None:
    def program() -> Any:
        x = torch.ones(3)
        x.add_(1)
        with replayfmt.scope("late"):
            return x * 2

    captured = capture(program, start_scope="late", digests="ops")
    assert len(captured.records(RecordKind.storage_import)) == 1
    captured.replays()


def test_threads_are_recorded_with_their_own_scopes(capture: Capture) -> None:
    def program() -> Any:
        made = []
        together = threading.Barrier(3)  # idents of threads that have ended are given again

        def work(number: int) -> None:
            with replayfmt.scope(f"thread {number}"):
                together.wait(600)
                made.append(torch.full((3,), float(number)) * 2)

        with replayfmt.scope("main"):
            threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            with ThreadPoolExecutor(2) as pool:
                made += pool.map(lambda n: torch.ones(n + 1) + 1, range(6))
        return made

    captured = capture(program, digests="ops")
    records = captured.records(RecordKind.op)
    reader = captured.reader
    paths = {reader.scope_path(r.scope) for r in records}
    assert paths == {"main", "main/thread 0", "main/thread 1", "main/thread 2"}
    assert len({r.thread for r in records}) >= 3
    captured.replays()


def test_threads_that_draw_at_once_replay(capture: Capture) -> None:
    def program() -> Any:
        made: list[torch.Tensor] = []

        def work() -> None:
            for _ in range(50):
                made.append(torch.rand(2) + 1)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return made

    captured = capture(program, digests="ops")
    assert len(captured.ops()) == 400
    captured.replays()


@pytest.mark.slow
def test_threads_do_not_mix_their_records(capture: Capture) -> None:
    def program() -> Any:
        made: list[torch.Tensor] = []

        def work(size: int) -> None:
            x = torch.ones(size)
            for step in range(300):
                with torch.set_grad_enabled(step % 2 == 0):
                    x = (x + 1).view(size, 1).view(size) * 0.5
            made.append(x)

        threads = [threading.Thread(target=work, args=(n + 2,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return made

    captured = capture(program, chunk_records=100)
    assert len(captured.ops()) == 4 * (1 + 300 * 4)
    captured.replays()


def test_backward_in_another_thread_is_recorded(capture: Capture) -> None:
    def program() -> Any:
        w = torch.ones(3, requires_grad=True)
        loss = (w * 2).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return w.grad

    captured = capture(program, digests="ops")
    assert "aten::mul.Tensor" in captured.ops()[3:]
    captured.replays()


def test_scopes_end_inside_functions_that_are_transformed(capture: Capture) -> None:
    """Digests are taken there: with the recorder's own calls, which are not to be transformed."""
    from torch.func import functionalize, grad, jvp, vmap

    def energy(x: torch.Tensor) -> torch.Tensor:
        with replayfmt.scope("inner"):
            y = (x * 2 + torch.rand(3)).sin().sum()
        return y * 2

    x, batch = torch.randn(3), torch.randn(2, 3)
    captured = capture(
        lambda: [
            grad(energy)(x),
            vmap(energy, randomness="different")(batch),
            jvp(energy, (x,), (x,)),
            functionalize(energy)(x),
        ]
    )
    assert len(captured.records(RecordKind.scope_end)) == 4
    captured.replays()


def test_a_capture_inside_a_transformed_function_is_complete(capture: Capture) -> None:
    captured = []

    def energy(x: torch.Tensor) -> torch.Tensor:
        captured.append(capture(lambda: (x * 2).sin().sum()))
        return captured[-1].returned

    torch.func.grad(energy)(torch.randn(3))
    assert captured[0].ops() == ["aten::mul.Tensor", "aten::sin.default", "aten::sum.default"]
    captured[0].replays()
