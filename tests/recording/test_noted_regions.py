"""Calls of compiled regions that stay compiled: each has its record, and what it may have written is imported again."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.debug
from torch._inductor.output_code import CompiledFxGraph

import replayfmt
from replayfmt.format.codes import RecordKind
from replayfmt.recording.recorder import Recorder

from .conftest import Capture as Capturing
from .conftest import Captured

Work = Callable[[list[Any]], Any]
Capture = Callable[[Callable[[], Any]], Captured]


@pytest.fixture(name="capture")
def keeping(capture: Capturing) -> Capture:
    """Captures, with compiled code kept as it is."""
    return lambda program: capture(program, compiled="keep")


def region(work: Work, writes: tuple[int, ...] = ()) -> CompiledFxGraph:
    """A region as Inductor makes them, which runs a function of the list of arguments; it writes some of these."""
    made = object.__new__(CompiledFxGraph)
    made.current_callable = work
    made.mutated_input_idxs = list(writes)
    made.fx_kwargs = {}
    made.device_types = {"cpu"}
    made.compiled_fn_runner = made._compile_context = None
    return made


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The regions whose calls took the complete path, by the reason of their records."""
    seen: list[str] = []
    unsupported = Recorder.unsupported

    def counted(self: Recorder, reason: str, op: str, detail: str) -> Any:
        seen.append(reason)
        return unsupported(self, reason, op, detail)

    monkeypatch.setattr(Recorder, "unsupported", counted)
    return seen


def reasons(captured: Captured) -> list[Any]:
    return [record.argument("reason") for record in captured.records(RecordKind.storage_import)]


def test_every_call_is_told_and_its_operators_are_not(capture: Capture, told: list[str], recorder: str) -> None:
    """Library calls of a region are the region's own."""
    run, x = region(lambda given: [given[0].sin() @ given[0].t()]), torch.ones(2, 3)
    expected = run([x])

    def program() -> list[Any]:
        x.mul(2)
        return [run([x])[0] for _ in range(5)]

    captured = capture(program)
    assert captured.unsupported() == {"compiled_region": 5}
    assert captured.ops() == ["aten::mul.Tensor"]
    assert len({record.signature for record in captured.records(RecordKind.unsupported)}) == 1
    assert all(torch.equal(each, expected[0]) for each in captured.returned)
    assert len(told) == (1 if recorder == "native" else 5)


def test_what_it_writes_is_imported_again_at_each_use_between(capture: Capture) -> None:
    def work(given: list[Any]) -> list[Any]:
        given[1].add_(given[0])
        return []

    run, x, total = region(work, (1,)), torch.ones(3), torch.zeros(3)

    def program() -> list[torch.Tensor]:
        found = [total * 2]
        for number in range(5):
            for _ in range(1 + number % 2):  # also twice with no use between
                run([x, total])
            found.append(total * 2)
        return found

    captured = capture(program)
    assert [float(each[0]) for each in captured.returned] == [0, 2, 6, 8, 12, 14]
    assert reasons(captured) == ["first_use"] + ["outside_write"] * 5
    assert captured.unsupported() == {"compiled_region": 7}


def test_where_it_is_not_known_what_is_written_all_of_it_counts(capture: Capture) -> None:
    def work(given: list[Any]) -> list[Any]:
        given[0].add_(1)
        return []

    run, x, y = region(work), torch.zeros(3), torch.zeros(3)
    run.mutated_input_idxs = None

    def program() -> list[torch.Tensor]:
        return [each for _ in range(4) for each in (x + y, run([x, y]))]

    captured = capture(program)
    assert [float(each[0]) for each in captured.returned[::2]] == [0, 1, 2, 3]
    assert reasons(captured) == ["first_use"] * 2 + ["outside_write"] * 6


def test_results_in_known_memory_are_imported_again_and_what_is_handed_through_is_not(capture: Capture) -> None:
    kept = torch.zeros(3)

    def reuses(given: list[Any]) -> list[Any]:
        taken = given[0]
        given.clear()
        return [kept.add_(1), taken]

    run, x = region(reuses), torch.ones(3)

    def program() -> list[torch.Tensor]:
        found = [x + kept]
        for _ in range(4):
            one, other = run([x])
            found.append(one + other)
        return found

    captured = capture(program)
    assert [float(each[0]) for each in captured.returned] == [1, 2, 3, 4, 5]
    assert reasons(captured) == ["first_use"] * 2 + ["outside_write"] * 4


def test_memory_that_others_may_write_is_compared_as_before(capture: Capture) -> None:
    import numpy as np

    def work(given: list[Any]) -> list[Any]:
        given[0].add_(1)
        return []

    shared = torch.from_numpy(np.zeros(3, np.float32))
    run = region(work, (0,))

    def program() -> list[torch.Tensor]:
        return [each for _ in range(4) for each in (shared * 2, run([shared]))]

    captured = capture(program)
    assert [float(each[0]) for each in captured.returned[::2]] == [0, 2, 4, 6]
    assert reasons(captured)[1:] == ["outside_write"] * 3


def test_two_tensors_on_the_same_foreign_memory_are_one_storage(capture: Capture) -> None:
    """The mark of one is the other's: it does not stay where it was made."""
    import numpy as np

    def work(given: list[Any]) -> list[Any]:
        given[0].add_(1)
        return []

    array = np.zeros(4, np.float32)
    whole, part = torch.from_numpy(array), torch.from_numpy(array[:2])
    run = region(work, (0,))

    def program() -> list[torch.Tensor]:
        found = []
        for _ in range(4):
            found += [whole * 2, part * 2]
            run([part])
        return found

    captured = capture(program)
    assert [float(each[0]) for each in captured.returned[1::2]] == [0, 2, 4, 6]
    assert [float(each[0]) for each in captured.returned[::2]] == [0, 2, 4, 6]


def test_an_exception_passes_without_frames_of_the_recorder(capture: Capture) -> None:
    def work(given: list[Any]) -> list[Any]:
        raise KeyError(str(len(given)))

    run = region(work)

    def program() -> list[str]:
        places = []
        for _ in range(3):
            with pytest.raises(KeyError) as caught:
                run([torch.ones(1)])
            places.append([frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)])
        return places

    outside = program()
    captured = capture(program)
    assert captured.returned == outside
    assert captured.unsupported() == {"compiled_region": 3}


def test_a_region_that_is_gone_is_not_taken_for_the_next(capture: Capture) -> None:
    def program() -> None:
        torch.ones(1)
        for number in range(6):
            run = region(lambda given: [given[0] + 1])
            run.compile_region_name = f"number {number}"
            run([torch.ones(1)])
            run([torch.ones(1)])
            del run

    records = capture(program).records(RecordKind.unsupported)
    names = [record.argument("op") for record in records]
    assert names == [f"torch.compile number {number} (forward)" for number in range(6) for _ in range(2)]


def test_calls_of_other_threads_in_scopes_and_after_the_capture_are_told_where_they_belong(capture: Capture) -> None:
    run = region(lambda given: [given[0] + 1])

    def program() -> None:
        for name in ("one", "other"):
            with replayfmt.scope(name):
                torch.ones(1)
                run([torch.ones(1)])
                run([torch.ones(1)])
        thread = threading.Thread(target=lambda: [run([torch.ones(1)]) for _ in range(3)])
        thread.start()
        thread.join()

    captured = capture(program)
    run([torch.ones(1)])
    again = capture(lambda: [torch.ones(1), run([torch.ones(1)]), run([torch.ones(1)])])
    assert captured.unsupported() == {"compiled_region": 7}
    assert again.unsupported() == {"compiled_region": 2}
    open_scopes: list[Any] = []
    found = []
    for record in captured.records():
        if record.kind is RecordKind.scope_begin:
            open_scopes.append(record.argument("name"))
        elif record.kind is RecordKind.scope_end:
            open_scopes.pop()
        elif record.kind is RecordKind.unsupported:
            found.append((*open_scopes[-1:], record.thread))
    assert [each[0] for each in found[:4]] == ["one", "one", "other", "other"]
    assert len({each[-1] for each in found[4:]} - {each[-1] for each in found[:4]}) == 1
