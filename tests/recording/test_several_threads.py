"""Several threads record at once: each op in its thread and scope, in an order in which they can be replayed."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue
from random import Random
from typing import Any

import pytest
import torch

import replayfmt
from replayfmt.format.codes import OpStatus, RecordKind
from replayfmt.format.model import TensorValue
from replayfmt.recording.dispatch.native_mode import NativeMode

from .conftest import Capture, Captured

_WAIT_S = 60
_Work = Callable[[], Any]


def in_threads(*works: _Work) -> list[Any]:
    """What they return. All begin at once."""
    gate = threading.Barrier(len(works))
    results: list[Any] = [None] * len(works)
    problems: list[BaseException] = []

    def run(number: int, work: _Work) -> None:
        gate.wait(_WAIT_S)
        try:
            results[number] = work()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=item) for item in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_WAIT_S)
        assert not thread.is_alive()
    if problems:
        raise problems[0]
    return results


@contextmanager
def beside(work: _Work) -> Iterator[None]:
    """Another thread does it again and again meanwhile."""
    stopping = threading.Event()
    problems: list[BaseException] = []
    begun = threading.Event()

    def run() -> None:
        try:
            while not stopping.is_set():
                work()
                begun.set()
        except BaseException as error:
            problems.append(error)
            begun.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert begun.wait(_WAIT_S)
        yield
    finally:
        stopping.set()
        thread.join(_WAIT_S)
    assert not problems, problems


def by_thread(captured: Captured) -> list[list[Any]]:
    """What the ops of each thread say, in its order, apart from times. Which thread has which number differs."""
    reader = captured.reader

    def path(number: int) -> str:
        return f"{path(reader.scopes[number].parent)}/{reader.scopes[number].name}" if number else ""

    found: dict[Any, list[Any]] = defaultdict(list)
    storages: dict[int, dict[int, int]] = defaultdict(dict)

    def plain(value: Any, thread: int) -> Any:
        if isinstance(value, TensorValue):
            numbers = storages[thread]
            return value.meta, value.offset, numbers.setdefault(value.storage, len(numbers))
        if isinstance(value, (tuple, list)):
            return [plain(item, thread) for item in value]
        return repr(value)

    for record in captured.records(RecordKind.op):
        found[record.thread].append(
            (
                reader.kernels[record.signature.kernel].qualified_name,
                record.signature.status,
                path(record.scope),
                plain(record.args, record.thread),
                plain(record.results, record.thread),
            )
        )
    return sorted(found.values(), key=repr)


# ------------------------------------------------------------------------------------------------------ random programs


class Program:
    """A random program for several threads: each has tensors of its own, reads what all share, and hands tensors on to
    the next one, which writes them. What it computes is the same each time."""

    def __init__(self, seed: int, threads: int = 3, steps: int = 40) -> None:
        self._seed, self._threads, self._steps = seed, threads, steps

    def __call__(self) -> Any:
        self._shared = torch.arange(16.0).view(4, 4) + 1
        self._handed: list[SimpleQueue[torch.Tensor]] = [SimpleQueue() for _ in range(self._threads)]
        return in_threads(*[lambda number=number: self._work(number) for number in range(self._threads)])

    def _work(self, number: int) -> Any:
        random = Random(f"{self._seed}.{number}")
        kinds = Random(self._seed)  # all hand on, and take, at the same steps
        mine = [torch.ones(4, 4) * number, torch.zeros(4)]
        with replayfmt.scope(f"thread {number}"):
            for step in range(self._steps):
                with (
                    replayfmt.scope(f"step {step % 3}") if random.random() < 0.3 else nullcontext(),
                    torch.set_grad_enabled(random.random() < 0.8),
                ):
                    self._step(random, mine)
                if kinds.random() < 0.2:
                    self._handed[(number + 1) % self._threads].put(mine.pop(random.randrange(len(mine))))
                    taken = self._handed[number].get(timeout=_WAIT_S)
                    taken.mul_(0.5)
                    mine.append(taken)
        return mine

    def _step(self, random: Random, mine: list[torch.Tensor]) -> None:
        x = random.choice(mine)
        choice = random.randrange(9)
        if choice == 0:
            mine.append((self._shared @ x).tanh() if x.shape == (4, 4) else self._shared @ x)
        elif choice == 1:
            x[random.randrange(4)].fill_(random.randrange(5))
        elif choice == 2:
            x.add_(self._shared[0])
        elif choice == 3:
            mine.append(torch.cat([x.flatten()[:4], x.flatten()[-4:]])[2:6])
        elif choice == 4:
            mine.append(torch.empty(4).fill_(2.0))
        elif choice == 5:
            with pytest.raises(RuntimeError):
                x + torch.ones(3)
        elif choice == 6:
            mine.append(torch.full((4,), float(x.sum() > 3)))
        elif choice == 7:
            weight = x.detach().clone().requires_grad_()
            if torch.is_grad_enabled():
                (gradient,) = torch.autograd.grad(weight.sin().sum(), weight)
                mine.append(gradient)
        if len(mine) > 6:
            del mine[random.randrange(1, len(mine))]


@pytest.mark.parametrize("seed", range(8))
def test_programs_of_several_threads_are_recorded_as_each_thread_runs_them(
    capture: Capture, monkeypatch: pytest.MonkeyPatch, seed: int, recorder: str
) -> None:
    program = Program(seed)
    expected = program()
    captured = capture(program)
    for mine, others in zip(expected, captured.returned, strict=True):
        assert all(map(torch.equal, mine, others))
    assert captured.unsupported() == {}
    captured.replays()
    if recorder == "native":
        monkeypatch.setenv("OPREPLAY_RECORDER", "python")
        in_python = capture(program)
        assert in_python.unsupported() == {}
        assert by_thread(captured) == by_thread(in_python)


# --------------------------------------------------------------------------------------------------------- the hot path


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators whose calls took the complete path."""
    seen: list[str] = []
    for name in ("before", "late"):
        original = getattr(NativeMode, name)

        def counted(self: NativeMode, func: Any, *arguments: Any, original: Any = original) -> Any:
            seen.append(str(func))
            return original(self, func, *arguments)

        monkeypatch.setattr(NativeMode, name, counted)
    return seen


@pytest.mark.recorder("native")
def test_what_was_seen_in_one_thread_takes_it_in_all(capture: Capture, cold: list[str]) -> None:
    x = torch.ones(4, 4)

    def work() -> torch.Tensor:
        y = x
        for _ in range(50):
            y = (y @ x).relu_().add_(1)
        return y

    def program() -> Any:
        work()
        cold.clear()
        return in_threads(work, work, work)

    captured = capture(program)
    assert cold == []
    assert len({record.thread for record in captured.records(RecordKind.op)}) == 4
    captured.replays()


def test_each_thread_is_recorded_under_its_own_settings(capture: Capture) -> None:
    """Whether denormals are flushed to zero is a setting of each thread, and is seen in results."""
    x = torch.full((8,), 1e-38)

    def work(flushes: bool) -> list[torch.Tensor]:
        torch.set_flush_denormal(flushes)
        return [x * 0.1 for _ in range(100)]

    def program() -> Any:
        return in_threads(lambda: work(True), lambda: work(False))

    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush them")
    torch.set_flush_denormal(False)
    captured = capture(program)
    flushed, kept = captured.returned
    assert not any(each.any() for each in flushed) and all(each.all() for each in kept)
    captured.replays()


def test_draws_of_several_threads_are_repeated(capture: Capture) -> None:
    def work() -> list[torch.Tensor]:
        drawn = [torch.rand(3) for _ in range(5)]  # among others, on the complete path
        for number in range(100):
            drawn.append(torch.empty(64).normal_())
            if number % 20 == 0:
                drawn.append(torch.randperm(5))
        return drawn

    captured = capture(lambda: in_threads(work, work, work))
    assert captured.unsupported() == {}
    captured.replays()


# ------------------------------------------------------------------------------------------------ scopes and digests


def test_ops_of_other_threads_lie_between_begin_and_end_of_the_scope_that_they_are_in(capture: Capture) -> None:
    x = torch.ones(3)
    turned = threading.Event()

    def work() -> None:
        for _ in range(20):
            x + 1
        turned.set()

    def program() -> None:
        with beside(work):
            for number in range(60):
                with replayfmt.scope(f"{number}"):
                    x + 2
                    for _ in range(2 if number % 10 == 0 else 0):  # what is left of a turn, and a whole one
                        turned.clear()
                        assert turned.wait(_WAIT_S)

    captured = capture(program)
    reader = captured.reader
    open_scopes = set()
    others = 0
    for record in captured.records():
        if record.kind is RecordKind.scope_begin:
            open_scopes.add(record.scope)
        elif record.kind is RecordKind.scope_end:
            open_scopes.discard(record.scope)
        elif record.kind is RecordKind.op:
            assert record.scope == 0 or record.scope in open_scopes, reader.scopes[record.scope]
            others += record.thread != 0 and record.scope != 0
    assert others, "they are in the main thread's scopes"


@pytest.mark.parametrize("elements", [16, 30_000])
def test_what_other_threads_are_writing_is_not_compared_where_a_scope_ends(capture: Capture, elements: int) -> None:
    def work() -> None:
        x = torch.zeros(elements)
        for _ in range(30):
            x.add_(1)
            x.mul_(0.5)

    def program() -> Any:
        with beside(work), beside(work):
            for number in range(20):
                with replayfmt.scope("step"):
                    kept = torch.ones(3) + number
        return kept

    captured = capture(program)
    assert captured.unsupported() == {}
    captured.replays()


def test_memory_that_a_thread_fills_while_another_one_looks_at_all_of_it_counts_as_written(capture: Capture) -> None:
    def work() -> None:
        for _ in range(20):
            torch.empty(20_000).fill_(1).sum()

    def program() -> Any:
        with beside(work), beside(work):
            for number in range(40):
                with replayfmt.scope("step"):  # all storages are looked at where it ends
                    kept = torch.ones(3) + number
        return kept

    captured = capture(program)
    assert captured.unsupported() == {}
    captured.replays()


def test_memory_that_an_op_fills_while_another_thread_leaves_a_scope_counts_as_written(capture: Capture) -> None:
    """All storages are looked at where a scope ends, in the middle of the op. The op's result is not another one."""

    def program() -> Any:
        made = []
        for number in range(12):
            memory, begins = torch.empty(8_000_000), threading.Event()

            def work(memory: torch.Tensor = memory, begins: threading.Event = begins) -> None:
                begins.set()
                memory.fill_(3.0)

            thread = threading.Thread(target=work)
            with replayfmt.scope("look"):
                thread.start()
                assert begins.wait(_WAIT_S)
            thread.join(_WAIT_S)
            made.append(memory[:4] * number)
            made.append(torch.quantize_per_tensor(memory[:4], 0.1, 0, torch.quint8))  # on the complete path
        return made

    captured = capture(program)
    assert captured.unsupported() == {}
    captured.replays()


# --------------------------------------------------------------------------------------------------- ends and failures


def test_what_dies_in_another_thread_is_released_after_its_last_use(capture: Capture) -> None:
    handed: SimpleQueue[Any] = SimpleQueue()

    def make() -> None:
        for _ in range(200):
            handed.put(torch.ones(4) * 2)
        handed.put(None)

    def use() -> torch.Tensor:
        total = torch.zeros(4)
        while (x := handed.get(timeout=_WAIT_S)) is not None:
            total += x
        return total

    captured = capture(lambda: in_threads(make, use)[1])
    assert torch.equal(captured.returned, torch.full((4,), 400.0))
    released = set()
    for record in captured.records(RecordKind.op, RecordKind.storage_release):
        if record.kind is RecordKind.storage_release:
            released.add(record.argument("storage"))
        else:
            values = [value for value in (*record.args, *record.results) if isinstance(value, TensorValue)]
            assert not released.intersection(value.storage for value in values)
    assert len(released) > 100
    captured.replays()


def test_a_capture_ends_while_other_threads_compute(capture: Capture) -> None:
    stopping, begun = threading.Event(), threading.Event()
    x = torch.ones(100, 100)

    def work() -> None:
        y = x
        while not stopping.is_set():
            y = (y @ x).clamp_(-1, 1)
            begun.set()

    def program() -> Any:
        thread.start()
        assert begun.wait(_WAIT_S)
        return x + 1

    thread = threading.Thread(target=work)
    try:
        captured = capture(program)
    finally:
        stopping.set()
        thread.join(_WAIT_S)
    assert captured.unsupported() == {}
    captured.replays()


def test_an_op_that_raises_is_recorded_in_its_thread(capture: Capture) -> None:
    def work() -> None:
        for _ in range(10):
            with pytest.raises(RuntimeError, match="must match"):
                torch.ones(2) + torch.ones(3)

    captured = capture(lambda: in_threads(work, work))
    raised = [r for r in captured.records(RecordKind.op) if r.signature.status is OpStatus.raised]
    assert len(raised) == 20 and len({record.thread for record in raised}) == 2
