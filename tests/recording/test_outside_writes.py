"""Memory that is written past PyTorch's operators: seen where it can be, and then content enters again."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import replayfmt
from replayfmt.format.codes import RecordKind
from replayfmt.pytorch.tensors.memory import address_of
from replayfmt.recording.content import first_content
from replayfmt.recording.storages import digesting
from replayfmt.replay.plan import Plan

from .conftest import Capture, Captured


def imports(captured: Captured) -> list[tuple[Any, Any]]:
    return [(r.argument("version"), r.argument("reason")) for r in captured.records(RecordKind.storage_import)]


def test_writes_through_an_array_that_a_tensor_was_made_from_are_seen(capture: Capture) -> None:
    def program() -> Any:
        array = np.ones(4, np.float32)
        x = torch.from_numpy(array)
        first = x + 1
        array[0] = 5
        return first, x * 2, x + 3

    captured = capture(program, digests="ops")
    assert imports(captured) == [(0, "first_use"), (1, "outside_write")]
    captured.replays()


def test_writes_through_numpy_of_an_ops_result_are_seen(capture: Capture) -> None:
    def program() -> Any:
        x = torch.ones(3)
        view = x.numpy()
        first = x + 1
        view[:] = 7
        x.add_(1)  # a captured write between two outside ones
        view[0] = 0
        return first, x + 2

    captured = capture(program, digests="ops")
    assert imports(captured) == [(1, "outside_write"), (2, "outside_write")]
    captured.replays()


def test_writes_through_an_interface_that_a_library_took_are_seen(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of Numba's and CuPy's kernels, with a stand-in for what only tensors on a GPU have."""
    monkeypatch.setattr(torch.Tensor, "__cuda_array_interface__", property(lambda x: {"data": (x.data_ptr(), False)}))

    def program() -> Any:
        x = torch.ones(3)
        first = x + 1
        address, _read_only = x.__cuda_array_interface__["data"]
        ctypes.memset(address, 0, 4)
        return first, x + 1

    captured = capture(program, digests="ops")
    assert imports(captured) == [(1, "outside_write")]
    captured.replays()


def test_writes_to_a_buffer_under_a_tensor_are_seen(capture: Capture) -> None:
    def program() -> Any:
        memory = bytearray(16)
        x = torch.frombuffer(memory, dtype=torch.float32)
        first = x + 1
        memory[0:4] = b"\0\0\x80\x3f"
        return first, x + 1

    captured = capture(program, digests="ops")
    assert imports(captured) == [(0, "first_use"), (1, "outside_write")]
    captured.replays()


def test_audit_sees_every_write_from_outside(capture: Capture) -> None:
    def program() -> Any:
        x = torch.ones(3)
        first = x + 1
        ctypes.memset(address_of(x.untyped_storage()), 0, 4)
        return first, x + 1

    captured = capture(program, digests="ops", audit=True)
    assert imports(captured) == [(1, "outside_write")]
    assert captured.reader.session.policies["audit"] is True
    captured.replays()


def test_audit_takes_tensors_without_memory(capture: Capture) -> None:
    captured = capture(lambda: torch.ones(3) + torch._efficientzerotensor(3), audit=True)
    assert captured.unsupported() == {}
    captured.replays()


def test_what_a_hook_marks_as_written_enters_again(capture: Capture, tmp_path) -> None:
    path = tmp_path / "marked.opreplay"
    with replayfmt.capture(path, digests="ops") as recorder:
        x = torch.ones(3)
        with recorder.paused():
            assert not recorder.recording()
            x.mul_(5)
        recorder.mark_outside_write(x)
        assert recorder.recording()
        x + 1
    captured = Captured(path, None)
    assert imports(captured) == [(1, "outside_write")]
    assert captured.ops() == ["aten::ones.default", "aten::add.Tensor"]
    captured.replays()


def test_an_allocation_resized_without_an_op_is_recorded(capture: Capture) -> None:
    def program() -> Any:
        x = torch.ones(4)
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(16)
        return x.copy_(torch.arange(4.0)) + 1

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    captured.replays()


def test_storages_of_one_memory_are_one_storage(capture: Capture) -> None:
    def program() -> Any:
        x = torch.arange(6.0)
        whole = torch.from_dlpack(x)
        part = torch.from_dlpack(x[2:])
        part.add_(10)
        whole.mul_(2)
        return x, x + whole, part + 1

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    captured.replays()


def test_shared_memory_whose_owner_died_stands_for_itself(capture: Capture) -> None:
    def program() -> Any:
        array = np.arange(6, dtype=np.float32)
        first = torch.from_numpy(array)
        second = torch.from_numpy(array[1:])
        first.add_(1)
        second.add_(1)
        del first
        return second + 1, second * 2

    captured = capture(program, digests="ops")
    captured.replays()


def test_memory_that_begins_before_what_is_known_is_a_storage_beside_it(capture: Capture) -> None:
    def program() -> Any:
        array = np.arange(6, dtype=np.float32)
        tail = torch.from_numpy(array[2:])
        tail.add_(1)
        whole = torch.from_numpy(array)
        first = whole + 1
        whole.mul_(2)
        return first, tail + 1, whole + 1

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    assert imports(captured) == [(0, "first_use"), (0, "first_use"), (1, "outside_write")]
    captured.replays()


def test_sliding_windows_over_one_array_replay_with_what_is_written_to_any_of_them(capture: Capture) -> None:
    def program() -> Any:
        series = np.arange(10, dtype=np.float32)
        windows = [torch.from_numpy(series[i : i + 4]) for i in range(7)]
        first = torch.stack(windows)
        windows[2].add_(100)
        series[9] = -1
        return first, torch.stack(windows), windows[3] * 2

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    captured.replays()


def test_torchs_own_memory_is_watched_where_a_part_of_it_came_first(capture: Capture) -> None:
    x = torch.arange(6.0)
    part = torch.from_numpy(x.numpy()[1:3])

    def program() -> Any:
        part.add_(1)
        first = x + 1
        part.mul_(3)
        return first, x + 1

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    captured.replays()


def test_elements_that_begin_between_those_of_another_storage_have_one_of_their_own(capture: Capture) -> None:
    def program() -> Any:
        array = np.arange(16, dtype=np.uint8)
        whole = torch.from_numpy(array)
        first = whole + 1
        between = torch.from_numpy(array[2:10].view(np.float32))
        between.mul_(2)
        return first, whole + 1, between + 1

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    captured.replays()


def test_what_others_write_around_digests_and_imports_is_no_difference(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread writes through an array while the recorder reads the same memory."""
    arrays: list[Any] = []

    def meanwhile(read: Callable[..., Any]) -> Callable[..., Any]:
        def reads(*args: Any) -> Any:
            for array in arrays:
                array += 1
            found = read(*args)
            for array in arrays:
                array += 1
            return found

        return reads

    monkeypatch.setattr(digesting, "digest_view", meanwhile(digesting.digest_view))
    monkeypatch.setattr(first_content, "embed", meanwhile(first_content.embed))

    def program() -> Any:
        given = np.ones(4, np.float32)
        x, y = torch.ones(3), torch.from_numpy(given)
        arrays.append(given[2:])
        kept = [y[:1] + 1]
        arrays.append(x.numpy()[2:])
        with replayfmt.scope("digests"):
            x[:2].mul_(2)
        kept.append(x[:2] + 1)
        x.numpy()
        arrays.clear()
        kept += [x + 1, y + 1]
        with replayfmt.scope("digests"):
            x.mul_(2)
        x.numpy()[:] = 9
        return x, kept

    captured = capture(program)
    assert [9.0] * 3 not in [r.argument("sample") for r in captured.records(RecordKind.digest)]
    captured.replays()


_shared = np.zeros((2, 3), np.float32)


@torch.library.custom_op("beside::add_one", mutates_args={"part"})
def add_one(part: torch.Tensor, row: int, column: int) -> None:
    """Meanwhile another thread writes beside the part, as it were."""
    part += 1
    _shared[row, column] += 5


@torch.library.custom_op("beside::add_to_both", mutates_args={"part", "other"})
def add_to_both(part: torch.Tensor, other: torch.Tensor, row: int, column: int) -> None:
    add_one(part, row, column)
    other += 2


def test_what_others_write_beside_the_elements_that_an_op_writes_enters_again(capture: Capture) -> None:
    def program() -> Any:
        x = torch.from_numpy(_shared)
        kept = []
        for part, row, column in ((x[0], 1, 2), (x[:, 0], 0, 1), (x.view(-1)[4:], 0, 2)):
            torch.ops.beside.add_one(part, row, column)
            kept.append(x.clone())
            kept.append(x[0])  # a view writes nothing
        return kept

    captured = capture(program, digests="ops", whole=("beside::*",))
    assert imports(captured) == [(0, "first_use"), *((version, "outside_write") for version in (1, 2, 3))]
    captured.replays()


def test_what_others_write_beside_all_the_tensors_that_an_op_writes_enters_again(capture: Capture) -> None:
    def program() -> Any:
        x = torch.from_numpy(_shared)
        kept = []
        for row, column in ((1, 2), (1, 1)):
            torch.ops.beside.add_to_both(x[0, :2], x[:, 0], row, column)
            kept.append(x.clone())
        return kept

    captured = capture(program, digests="ops", whole=("beside::*",))
    assert imports(captured) == [(0, "first_use"), (1, "outside_write"), (2, "outside_write")]
    captured.replays()


@pytest.mark.parametrize("parts", [1, 2])
def test_what_another_thread_writes_once_beside_an_operator_of_pytorchs_own_enters_again(
    capture: Capture, parts: int
) -> None:
    array, turns = np.full(4 + (1 << 22), 3, np.float32), threading.Barrier(2)

    def others() -> None:
        for _ in range(3):
            before = array[4]
            turns.wait()
            while array[4] == before:  # until the operator has begun
                pass
            array[:4] += 1
            turns.wait()

    def program() -> Any:
        x = torch.from_numpy(array)
        thread = threading.Thread(target=others)
        thread.start()
        kept = []
        for _ in range(3):
            turns.wait()
            torch._foreach_lgamma_(x[4:].chunk(parts)) if parts > 1 else x[4:].lgamma_()
            turns.wait()
            kept.append(x[:8] + 1)
        thread.join()
        return kept

    capture(program).replays()


def test_elements_that_an_op_and_another_thread_write_at_a_time_both_count(capture: Capture) -> None:
    array, done = np.zeros(1 << 20, np.float32), threading.Event()

    def others() -> None:
        while not done.is_set():
            array[:4] += 1

    def program() -> Any:
        x = torch.from_numpy(array)
        thread = threading.Thread(target=others)
        thread.start()
        for _ in range(5):
            x[64:].add_(2)
        done.set()
        thread.join()
        return x + 1

    capture(program).replays()


def test_an_array_that_is_wrapped_again_shows_what_was_written_between(capture: Capture) -> None:
    def program() -> Any:
        array = np.zeros(4, np.float32)
        kept = []
        for i in range(4):
            array += i
            x = torch.from_numpy(array)  # the last one lives until here
            kept.append(x * 2)
            x.add_(1)
        return kept

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    captured.replays()


def test_unwritten_memory_that_the_program_fills_through_an_array_enters(capture: Capture) -> None:
    def program() -> Any:
        x = torch.empty(4)
        x.numpy()[:] = 0  # what fresh memory may hold anyway
        y = torch.empty(2, 3)
        y[0] = 1
        np.asarray(y)[1] = 2
        return x * 2, y + 1

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    assert (1, "outside_write") in imports(captured)
    captured.replays()


def test_unwritten_memory_that_is_wrapped_again_enters_where_it_is_read(capture: Capture) -> None:
    def program() -> Any:
        array = torch.empty(4).numpy()
        array[:] = 3
        return torch.from_numpy(array) * 2

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    captured.replays()


@pytest.mark.parametrize("payload", ["full", "integers", "none"])
def test_writes_through_arrays_leave_the_same_marks_whatever_is_kept_of_content(capture: Capture, payload: str) -> None:
    def program() -> Any:
        array = np.ones(4, np.float32)
        x, rows, places = torch.from_numpy(array), torch.rand(5, 2), torch.arange(3)
        result, view = x + 1, places.numpy()
        array[0] = 5
        view[:] = [4, 3, 1]
        return result, x * 2, rows[places]

    captured = capture(program, payload=payload)
    assert imports(captured) == [(0, "first_use"), (1, "outside_write"), (1, "outside_write")]
    with Plan(captured.path) as plan:
        filled = [each.initializer for each in plan.synthesis.initialized]
        assert plan.execute(verify="none" if payload != "full" else "bitwise").outcome == "ok"
    assert ("index" in filled) is (payload == "none"), "what is looked up is no zeros, and no arange"


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    "take",
    [
        lambda x: x.data_ptr(),
        lambda x: x.__dlpack__(),
        lambda x: x.untyped_storage().data_ptr(),
        lambda x: x.storage().data_ptr(),
    ],
    ids=["tensor", "dlpack", "storage", "typed storage"],
)
def test_what_others_write_through_an_address_or_dlpack_enters_again(
    capture: Capture, take: Callable[[torch.Tensor], Any], known: bool
) -> None:
    """Every time, and from the first use on, whether the capture knew the memory before or not."""
    x = torch.arange(1.0, 4.0)

    def program() -> Any:
        results = [x + 1] if known else []
        taken = take(x)
        for value in (1, 2):
            results.append(x * 2)
            ctypes.memset(address_of(x.untyped_storage()), value, 4)
        return results, x * 3, taken and None

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    assert imports(captured) == [(0, "first_use"), (1, "outside_write"), (2, "outside_write")]
    captured.replays()


@pytest.mark.parametrize("owner", [lambda x: x, lambda x: x.untyped_storage()], ids=["tensor", "storage"])
@pytest.mark.parametrize("written", [0, 4], ids=["nothing", "a part"])
def test_what_others_write_through_an_address_into_new_memory_enters(
    capture: Capture, written: int, owner: Callable[[torch.Tensor], Any]
) -> None:
    """Work that nobody saw is what no one asked an address for."""

    def program() -> Any:
        x = torch.empty(8)
        x[:written] = 1
        there = owner(x).data_ptr() + 16
        ctypes.memmove(there, bytes(byte ^ 255 for byte in ctypes.string_at(there, 16)), 16)
        return x * 2

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    assert imports(captured)[-1][1] == "outside_write"
    captured.replays()


@pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this PyTorch has no such interface")
@pytest.mark.parametrize("looked_up", ["before", "under"])
def test_what_others_write_that_took_memory_by_dlpacks_c_interface_enters_again(
    capture: Capture, looked_up: str
) -> None:
    """As kernels of tvm_ffi do: they look the interface up once for the class, under the capture or before it."""
    address_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )

    def look_up() -> Any:
        interface = address_of(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")  # type: ignore[attr-defined]
        return (ctypes.c_void_p * 5).from_address(interface + 16)

    early = look_up() if looked_up == "before" else None
    functions_before = list(look_up())

    def program() -> Any:
        mask, logits = torch.full((4,), -1, dtype=torch.int32), torch.randn(4) * 2
        functions = early or look_up()
        describe = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(functions[3] or 0)
        results: list[Any] = []
        for value in (3, 5):
            for tensor in (mask, logits):
                described = (ctypes.c_void_p * 8)()
                assert describe(tensor, described) == 0
                ctypes.memset(described[0] or 0, value, 8)
            results += [mask + 1, logits.softmax(0)]
        try:
            assert describe(torch.eye(2).to_sparse(), (ctypes.c_void_p * 8)()) == -1
            assert os.environ["OPREPLAY_RECORDER"] == "python"
        except (RuntimeError, TypeError, BufferError):
            pass
        return results

    captured = capture(program)
    assert list(look_up()) == functions_before
    assert captured.unsupported() == {}
    assert [reason for _, reason in imports(captured)].count("outside_write") == 4
    captured.replays()
