"""Calls that the native recorder records without Python, and what leaves that path and comes back to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import replayfmt
from replayfmt.errors import CaptureFailed
from replayfmt.format.codes import OpStatus, RecordKind
from replayfmt.format.model import TensorValue
from replayfmt.pytorch.accelerators import followed_kind
from replayfmt.recording import recorder
from replayfmt.recording.dispatch.native_mode import NativeMode

from . import programs
from .conftest import Capture, Captured

pytestmark = pytest.mark.recorder("native")

WATCHED_IN_PYTHON = bool(followed_kind())  # what others may write, where a device could do so meanwhile
PROGRAMS = [
    value
    for name, value in vars(programs).items()
    if callable(value) and getattr(value, "__module__", "") == programs.__name__ and not name.startswith("_")
]


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators whose calls took the complete path."""
    seen: list[str] = []
    before, late = NativeMode.before, NativeMode.late

    def counted(self: NativeMode, func: Any, *arguments: Any) -> Any:
        seen.append(str(func))
        return before(self, func, *arguments)

    def counted_late(self: NativeMode, func: Any, *arguments: Any) -> Any:
        seen.append(f"late {func}")
        return late(self, func, *arguments)

    monkeypatch.setattr(NativeMode, "before", counted)
    monkeypatch.setattr(NativeMode, "late", counted_late)
    return seen


def repeated(program: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> list[Any]:
        torch.manual_seed(0)
        return [program() for _ in range(4)]

    return run


def told(captured: Captured) -> list[tuple[Any, ...]]:
    """What the records of ops say, apart from times; storages by the order in which they come."""
    reader, storages = captured.reader, {}

    def plain(value: Any) -> Any:
        if isinstance(value, TensorValue):
            return value.meta, value.offset, storages.setdefault(value.storage, len(storages))
        if isinstance(value, (tuple, list)):
            return [plain(item) for item in value]
        return repr(value)

    return [
        (
            reader.kernels[record.signature.kernel].qualified_name,
            record.signature.status,
            plain(record.args),
            plain(record.results),
        )
        for record in captured.records(RecordKind.op)
    ]


def reasons(captured: Captured) -> list[Any]:
    return [record.argument("reason") for record in captured.records(RecordKind.storage_import)]


@pytest.mark.slow
@pytest.mark.recorder("python", "native")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_that_repeats_itself_replays(capture: Capture, program: Callable[[], Any]) -> None:
    captured = capture(repeated(program))
    if not captured.unsupported():
        captured.replays()
    with_digests = capture(repeated(program), digests="ops")  # never on the hot path
    assert told(captured) == told(with_digests)
    assert captured.unsupported() == with_digests.unsupported()


def test_what_was_seen_takes_it(capture: Capture, cold: list[str]) -> None:
    layer = torch.nn.Linear(3, 3)
    x = torch.randn(2, 3)

    def program() -> Any:
        for number in range(6):
            if number == 4:
                cold.clear()
            with torch.no_grad():
                y = torch.nn.functional.gelu(layer(x)) * 2
                y.add_(1)
                y = torch.cat([y, y[:1]]).softmax(-1).view(-1)
        return y

    captured = capture(program)
    assert cold == []
    assert len(captured.ops()) >= 6 * 7
    captured.replays()


def test_an_operator_takes_it_where_it_is_one_kernel_and_a_composite_elsewhere(
    capture: Capture, cold: list[str]
) -> None:
    """As silu's backward on the host, and the fused norm of a GPU."""
    x, grad = torch.randn(8), torch.ones(8)

    def program() -> Any:
        kept = [torch.ops.aten.silu_backward(grad, x) * 2 for _ in range(2)]
        cold.clear()
        return [*kept, torch.ops.aten.silu_backward(grad, x) * 2]

    captured = capture(program)
    assert cold == []
    assert captured.ops().count("aten::silu_backward.default") == 3
    captured.replays()


def test_shapes_that_are_new_take_it(capture: Capture, cold: list[str]) -> None:
    """Batches of every length, as in graphs and sentences, two threads' among them."""

    cold_calls: list[list[str]] = []

    def program() -> list[torch.Tensor]:
        x, made = torch.arange(64.0), []

        def work(lengths: range) -> None:
            for length in lengths:
                y = x[:length] * 2
                y.add_(1)
                made.append(torch.cat([y, y.view(1, -1)[0]]).unsqueeze(-1).expand(-1, 3))

        work(range(5, 7))  # what is new otherwise
        cold.clear()
        work(range(7, 40))
        cold_calls.append(list(cold))
        thread = threading.Thread(target=work, args=(range(3, 50),))
        thread.start()
        work(range(3, 60))
        thread.join()
        conjugate = torch.ones(3, dtype=torch.complex64).conj()  # looks like what it is of, but for a lazy bit
        return [*made, conjugate * conjugate.conj()]

    captured = capture(program)
    assert cold_calls == [[]]
    captured.replays()
    defined = [meta for meta in captured.reader.metas if meta is not None]
    assert len(set(defined)) == len(defined)
    with_digests = capture(program, digests="ops")
    assert {each for each in defined if each.sizes} <= set(with_digests.reader.metas)


def test_a_storage_that_is_new_to_the_capture_enters_it_and_the_call_takes_it_all_the_same(
    capture: Capture, cold: list[str]
) -> None:
    weights = [torch.full((4, 4), float(number)) for number in range(4)]
    watched = torch.from_numpy(np.ones((4, 4), np.float32))
    took_complete_path = []

    def program() -> list[torch.Tensor]:
        x = torch.ones(4, 4)
        x.mm(weights[0]).add_(weights[0].add_(1))
        cold.clear()
        for weight in weights[1:]:
            x = x.mm(weight).add_(weight.add_(1))
        took_complete_path.append(list(cold))
        return [x, x.mm(watched)]

    captured = capture(program)
    assert took_complete_path == [[]]
    assert cold == (["aten.mm.default"] if WATCHED_IN_PYTHON else [])
    calls = captured.records(RecordKind.storage_import, RecordKind.op)
    entered = [number for number, record in enumerate(calls) if record.kind is RecordKind.storage_import]
    first_uses = [calls[number + 1].signature.kernel for number in entered]
    assert [captured.reader.kernels[kernel].name for kernel in first_uses] == ["aten::mm"] * 5
    captured.replays()
    assert told(captured) == told(capture(program, digests="ops"))  # never on the hot path


@pytest.mark.parametrize("payload", ["full", "none"])
def test_numbers_that_are_read_take_it_unless_they_may_be_addresses(
    capture: Capture, cold: list[str], payload: str
) -> None:
    def program() -> list[Any]:
        told = []
        for number in range(6):
            if number == 3:
                cold.clear()
            told += [torch.full((), value).item() for value in (number, number / 2, True, False)]
        told.append(torch.full((), 1 << 40).item())
        return told

    captured = capture(program, payload=payload, digests="none")
    assert [name for name in cold if "scalar" in name] == ["late aten._local_scalar_dense.default"]
    results = [record.results[0] for record in captured.records(RecordKind.op)]
    read = [value for value in results if not isinstance(value, TensorValue)]
    assert read == (captured.returned if payload == "full" else [None] * len(captured.returned))


def test_a_write_is_compared(capture: Capture, cold: list[str]) -> None:
    def program() -> torch.Tensor:
        x = torch.zeros(4)
        for _ in range(5):
            x.add_(1)
            x[:2].mul_(2)
        cold.clear()
        x[:2].mul_(2)
        return x

    captured = capture(program)
    assert cold == []
    captured.replays()
    assert captured.records(RecordKind.digest)


def test_many_views_of_one_storage_are_each_one_tensor_and_those_written_are_compared(
    capture: Capture, cold: list[str]
) -> None:
    def program() -> torch.Tensor:
        x = torch.zeros(300)
        for turn in range(3):
            cold.clear()
            for begin in range(100):
                x[begin : begin + 1 + begin % 5].add_(begin)
                if turn and begin % 10 == 0:
                    x[begin : begin + 1 + begin % 5].numpy()  # Python meets the storage
        return x

    captured = capture(program)
    records = zip(captured.ops(), captured.records(RecordKind.op), strict=True)
    writes = [record.args[0] for name, record in records if name == "aten::add_.Tensor"]
    assert len(writes) == 300
    assert len(set(writes)) == 100
    captured.replays()


def test_what_dies_is_released(capture: Capture) -> None:
    x = torch.ones(3)

    def program() -> torch.Tensor:
        y = x
        for _ in range(1000):
            y = y + 1
        return y

    captured = capture(program)
    born = {record.results[0].storage for record in captured.records(RecordKind.op)}
    released = len(captured.records(RecordKind.storage_release))
    assert len(born) == 1000 and released >= 999
    captured.replays()


def test_an_op_that_raises_there_is_recorded_as_it_is(capture: Capture) -> None:
    x, y = torch.ones(3), torch.ones(4)

    def program() -> torch.Tensor:
        total = x + 0
        for _ in range(4):
            total = total + x
            with pytest.raises(RuntimeError):
                torch.add(x, y)
            total.add_(y[:3])
        return total

    captured = capture(program)
    statuses = [record.signature.status for record in captured.records(RecordKind.op)]
    assert statuses.count(OpStatus.raised) == 4
    captured.replays()


def test_a_setting_that_changes_is_stated_before_the_next_op_that_it_concerns(
    capture: Capture, cold: list[str]
) -> None:
    x = torch.randn(4, 4)

    def program() -> torch.Tensor:
        total = x
        for number in range(12):
            torch.use_deterministic_algorithms(number % 4 == 3)
            total = (total @ x) + x
        cold.clear()
        torch._C._set_mkldnn_enabled(False)
        total = total + x  # does not depend on it
        assert cold == []
        return total @ x

    before = torch.backends.mkldnn.enabled
    try:
        captured = capture(program)
    finally:
        torch._C._set_mkldnn_enabled(before)
        torch.use_deterministic_algorithms(False)
    kinds = [record.kind for record in captured.records(RecordKind.op, RecordKind.global_state)]
    assert kinds[-2:] == [RecordKind.global_state, RecordKind.op]
    captured.replays()


def test_draws_take_it_while_the_generator_is_where_a_replay_will_be(capture: Capture, cold: list[str]) -> None:
    x = torch.ones(64)
    took_complete_path = []

    def program() -> Any:
        torch.manual_seed(0)
        drawn = []
        for number in range(12):
            if number == 2:
                cold.clear()
            if number == 4:
                took_complete_path.append(list(cold))
                drawn.append(torch.rand(3))  # new: on the complete path
            if number == 6:
                torch.rand(1, generator=torch.default_generator)
            if number == 8:
                torch.manual_seed(3)
            if number == 10:
                torch.set_rng_state(torch.get_rng_state())
            drawn.append(torch.nn.functional.dropout(x) + torch.empty_like(x).normal_())
        return drawn

    captured = capture(program)
    assert took_complete_path == [[]]  # empty_like, bernoulli_ and div_ of dropout included
    states = captured.records(RecordKind.generator_state)
    assert len(states) == 2  # at the first draw, and after the second seed
    assert not captured.unsupported()
    captured.replays()
    with_digests = capture(program, digests="ops")  # never on the hot path
    assert told(captured) == told(with_digests)
    assert len(with_digests.records(RecordKind.generator_state)) == 2


def test_all_draws_from_the_default_generator_take_it_in_any_grad_mode(capture: Capture, cold: list[str]) -> None:
    x, took_complete_path = torch.full((8,), 0.5), []

    def program() -> Any:
        torch.manual_seed(0)
        made = []
        for number in range(8):
            if number == 4:
                cold.clear()
            with torch.set_grad_enabled(number % 2 == 0):
                made += [torch.rand(3), torch.randn(2, 2), torch.randint(9, (4,)), torch.randperm(5)]
            made += [torch.bernoulli(x), torch.multinomial(x, 2), torch.normal(0.0, 1.0, (3,)), torch.rand_like(x)]
            with torch.no_grad():
                made += [torch.poisson(x), torch.normal(x, 2.0), x.exp()]
            made.append(x * 2)
        took_complete_path.append(list(cold))
        return made

    captured = capture(program)
    assert took_complete_path == [[]]
    assert len(captured.records(RecordKind.generator_state)) == 1
    with_digests = capture(program, digests="ops")  # never on the hot path
    assert told(captured) == told(with_digests)
    captured.replays()
    with_digests.replays()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_state_that_draws_have_left_is_stated_where_the_program_goes_back_to_it(
    capture: Capture, reentrant: bool
) -> None:
    """A checkpoint draws again from where its forward pass drew: the state that its last backward pass left."""

    def program() -> list[torch.Tensor]:
        torch.manual_seed(0)
        gradients = []
        for _ in range(4):
            x = torch.ones(16, requires_grad=True)
            drops = torch.nn.functional.dropout
            checkpoint(lambda x: drops(x * x, 0.5).exp(), x, use_reentrant=reentrant).sum().backward()  # noqa: B023
            gradients.append(x.grad)
        return gradients

    captured = capture(program)
    states = len(captured.records(RecordKind.generator_state))
    assert states == len(capture(program, digests="ops").records(RecordKind.generator_state)) == 5
    captured.replays()


def test_a_draw_that_the_capture_does_not_see_is_made_up_for(capture: Capture) -> None:
    x = torch.empty(8)

    def program() -> list[torch.Tensor]:
        drawn = []
        for number in range(6):
            if number > 3:
                assert recorder._active is not None
                with recorder._active.paused():
                    torch.rand(2)
            drawn.append(x.uniform_().clone())
        return drawn

    captured = capture(program)
    assert len(captured.records(RecordKind.generator_state)) == 3
    captured.replays()


def test_unwritten_memory_stays_on_it_only_while_it_is_filled(capture: Capture, cold: list[str]) -> None:
    x = torch.ones(4, 4)
    took_complete_path = []

    def program() -> list[torch.Tensor]:
        made = []
        for number in range(10):
            if number == 4:
                cold.clear()
            if number == 7:
                took_complete_path.append(list(cold))
            y = torch.empty_like(x)
            if number == 7:
                y[:2].fill_(1)  # a part of it
                y[2:].fill_(2)
            elif number == 8:
                torch.add(x, 1, out=y)
            elif number == 9:
                y = y + 0  # read before anything was written
            else:
                y.fill_(number)
            made.append(y * 2)
        return made

    captured = capture(program)
    assert took_complete_path == [[]]
    with_digests = capture(program, digests="ops")  # never on the hot path
    assert told(captured) == told(with_digests)
    assert captured.unsupported() == with_digests.unsupported() == {}
    captured.replays()


def test_a_storage_of_its_own_is_adopted_where_python_meets_it(capture: Capture) -> None:
    x = torch.ones(4)

    def program() -> Any:
        kept = []
        for number in range(5):
            y = x * 2
            z = y + 1
            if number == 4:
                window = z.numpy()  # watched from here on
                window[0] = 7
                kept += [z * 3, np.array(window)]
            z.resize_(8) if number == 3 else None
            kept.append(z[:2] + 1)
        return kept

    captured = capture(program)
    assert "outside_write" in reasons(captured)
    captured.replays()


def test_a_second_thread_takes_part(capture: Capture) -> None:
    x = torch.ones(4)
    results = []

    def work() -> None:
        y = x
        for _ in range(20):
            y = y + 1
        results.append(y)

    def program() -> Any:
        work()
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()
        return results

    captured = capture(program)
    assert captured.ops() == ["aten::add.Tensor"] * 80
    captured.replays()


def test_content_that_was_left_out_is_asked_for_where_it_is_seen_as_integers(capture: Capture) -> None:
    weight = torch.randn(4)

    def program() -> Any:
        for _ in range(4):
            y = weight + 1
        return y, weight.view(torch.int32) + 1

    captured = capture(program, payload="integers")
    assert reasons(captured) == ["first_use", "integer_use"]


@pytest.mark.parametrize("limit", [{"start_op": 3, "stop_op": 20}, {"audit": True}, {"payload": "none"}])
def test_other_ways_to_record_are_as_they_were(capture: Capture, limit: dict[str, Any]) -> None:
    x = torch.ones(4)

    def program() -> torch.Tensor:
        y = x
        for _ in range(30):
            y = y + 1
        return y

    captured = capture(program, **limit)
    assert len(captured.ops()) == (17 if limit.get("stop_op") else 30)
    if limit.get("payload") != "none":
        captured.replays()


def test_a_capture_that_fails_lets_the_program_go_on(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4)

    def program() -> list[torch.Tensor]:
        results = [x + number for number in range(4)]
        monkeypatch.setattr(NativeMode.describe, "__wrapped__", None)  # at the next operator that is new
        return [*results, x * 2, x - 1, x + 5]

    expected = [x + number for number in range(4)] + [x * 2, x - 1, x + 5]
    with pytest.raises(CaptureFailed):
        capture(lambda: expected.append(program()))
    assert all(map(torch.equal, expected[-1], expected[:-1]))


def test_a_capture_does_not_take_the_scopes_of_the_one_before_it(capture: Capture) -> None:
    x = torch.ones(2)

    def program() -> None:
        with replayfmt.scope("inside"):
            for _ in range(4):
                x + 1

    def without() -> None:
        for _ in range(4):
            x + 1

    for _ in range(6):
        scopes = {record.scope for record in capture(program, digests="none").records(RecordKind.op)}
        assert scopes == {1}
        assert {record.scope for record in capture(without, digests="none").records(RecordKind.op)} == {0}


def test_a_storage_that_is_forgotten_enters_as_another(capture: Capture) -> None:
    x = torch.ones(2)

    def program() -> torch.Tensor:
        for _ in range(4):
            y = x + 1
        recorder = replayfmt.recording.recorder._active
        assert recorder is not None and recorder._core is not None
        recorder._core.storages.forget(y.untyped_storage())
        return y + 1

    captured = capture(program)
    assert reasons(captured) == ["first_use", "first_use"]
    captured.replays()


def test_arrays_on_memory_that_an_op_returned_are_found_among_many_storages(capture: Capture) -> None:
    kept: list[torch.Tensor] = []

    def program() -> list[torch.Tensor]:
        x = torch.ones(3)
        for turn in range(200):
            kept.extend(x + turn for _ in range(8))
            if turn % 20 == 0:
                shared = torch.from_numpy(kept[-3].numpy()[1:])
                shared.add_(1)
                kept[-3].mul_(2)
                del kept[::2]
        return kept

    captured = capture(program)
    writes = [record.args[0] for record in captured.records(RecordKind.op) if len(record.args) == 2]
    shared = [value for value in writes if value.offset == 1]
    assert len(shared) == 10
    captured.replays()


def test_memory_that_others_may_write_takes_it_until_they_do(capture: Capture, cold: list[str]) -> None:
    array = np.zeros(40, np.float32)
    taken: list[list[str]] = []

    def program() -> list[torch.Tensor]:
        x, results = torch.from_numpy(array), []
        exported = torch.ones(3) + 1
        window = exported.numpy()
        for turn in range(12):
            if turn % 4 == 0:
                array[turn], window[1] = turn, -turn
            cold.clear()
            results.append(x[:20].sum() + exported)
            x[20:].add_(1)
            exported.mul_(2)
            taken.append(list(cold))
        return results

    captured = capture(program)
    captured.replays()
    assert [bool(each) for each in taken[2:]] == [WATCHED_IN_PYTHON or turn % 4 == 0 for turn in range(2, 12)]
    imported = captured.records(RecordKind.storage_import)
    assert [record.args[-1] for record in imported].count("outside_write") == 5


@pytest.mark.skipif(WATCHED_IN_PYTHON, reason="watched memory takes the complete path there")
def test_the_first_use_of_memory_that_was_read_as_an_array_takes_it(capture: Capture, cold: list[str]) -> None:
    taken: list[list[str]] = []

    def program() -> list[Any]:
        kept = []
        for _ in range(4):
            x = torch.ones(16) + 1
            window = x.numpy()
            cold.clear()
            kept.append((x.detach() * 2, window))
            taken.append(list(cold))
        return kept

    capture(program).replays()
    assert taken[-1] == []


def test_a_write_from_outside_between_two_ops_of_which_one_wrote_is_seen(capture: Capture) -> None:
    def program() -> torch.Tensor:
        x = torch.zeros(1000) + 0
        window = x.numpy()
        for turn in range(8):
            x.add_(1)
            window[turn * 100] += 7
            if turn % 2:
                x[:500].numpy()  # Python compares it, in between
            x.mul_(2)
        return x

    captured = capture(program)
    captured.replays()
    assert len([each for each in captured.records(RecordKind.storage_import) if "outside_write" in each.args]) == 8
