"""Functions of PyTorch that write without an operator: what they wrote is in the replay, also where nobody reads it."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

from replayfmt.format.codes import RecordKind

from .conftest import Capture


def _file(x: torch.Tensor) -> None:
    with tempfile.NamedTemporaryFile() as file:
        torch.full((4,), 6.0).untyped_storage()._write_file(file, True, True, 1)
        file.flush()
        file.seek(0)
        x.untyped_storage()._set_from_file(file, 0, True, 1)


def _raising(x: torch.Tensor) -> None:
    """Writes two elements, and fails at the third."""
    values = iter((7.0, 8.0))
    with pytest.raises(StopIteration):
        x.apply_(lambda _value: next(values))


swaps = pytest.mark.skipif(
    not hasattr(torch.UntypedStorage, "_swap_data_ptr_"), reason="this PyTorch swaps no storages"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.apply_(lambda value: value + 5),
        lambda x: x[1:3].apply_(lambda value: value + 5),
        lambda x: x.detach().map_(torch.full((4,), 3.0), lambda a, b: a + b),
        lambda x: x.map2_(torch.full((4,), 3.0), torch.full((4,), 2.0), lambda a, b, c: a + b * c),
        lambda x: x.untyped_storage().byteswap(torch.float32),
        pytest.param(
            lambda x: x.untyped_storage()._swap_data_ptr_(torch.full((4,), 9.0).untyped_storage()), marks=swaps
        ),
        _file,
        _raising,
    ],
    ids=["apply_", "apply_ to a part", "map_", "map2_", "byteswap", "swap", "file", "raises"],
)
@pytest.mark.parametrize("payload", ["full", "none"])
def test_a_write_without_an_operator_is_an_import(
    capture: Capture, write: Callable[[torch.Tensor], Any], payload: str
) -> None:
    def program() -> Any:
        x = torch.ones(4) * 2
        for _ in range(3):
            x + 1  # seen before, so that the hot path is taken
        write(x)
        made = [x + 1 for _ in range(3)]
        del made
        return x.sum()

    captured = capture(program, payload=payload, digests="ops" if payload == "full" else "none")
    imports = [(r.argument("version"), r.argument("reason")) for r in captured.records(RecordKind.storage_import)]
    assert (1, "outside_write") in imports
    if payload == "full":
        captured.replays()


@swaps
def test_both_storages_of_a_swap_enter_again(capture: Capture) -> None:
    def program() -> Any:
        x, y = torch.ones(4) * 2, torch.ones(4) * 3
        x.untyped_storage()._swap_data_ptr_(y.untyped_storage())
        return x + 1, y + 1

    captured = capture(program, digests="ops")
    assert len(captured.records(RecordKind.storage_import)) == 2
    captured.replays()


def test_memory_that_was_allocated_anew_and_not_written_enters_as_it_is(capture: Capture) -> None:
    def program() -> Any:
        x = torch.ones(4) * 2
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(16)
        return x + 1

    captured = capture(program)
    assert captured.unsupported() == {}
    assert [r.argument("reason") for r in captured.records(RecordKind.storage_import)] == ["uninitialized_read"]
    captured.replays()
    assert [r.argument("bytes") for r in captured.records(RecordKind.storage_resize)] == [0, 16]


def test_collectives_that_are_called_directly_enter_again(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.cuda.nccl

    def reduce(inputs: Any, outputs: Any = None) -> None:
        ctypes.memset(inputs[0].data_ptr(), 0, 4)
        ctypes.memset(outputs[0].data_ptr(), 0, 4)

    monkeypatch.setattr(torch.cuda.nccl, "all_reduce", reduce)

    def program() -> Any:
        x, y = torch.ones(4) * 2, torch.ones(4) * 3
        torch.cuda.nccl.all_reduce([x], outputs=[y])
        return x + 1, y + 1

    captured = capture(program, digests="ops")
    assert len(captured.records(RecordKind.storage_import)) == 2
    captured.replays()


def test_everything_is_put_back_and_overrides_see_the_original(capture: Capture) -> None:
    originals = torch.Tensor.apply_, torch.UntypedStorage.resize_
    seen: list[Any] = []

    class Logs(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    def program() -> Any:
        x = torch.ones(4).as_subclass(Logs)
        x.apply_(lambda value: value + 1)
        return torch.ones(2)

    capture(program)
    assert originals[0] in seen and {originals[0]: 1}[next(func for func in seen if func == originals[0])] == 1
    assert (torch.Tensor.apply_, torch.UntypedStorage.resize_) == originals
    assert "resize_" not in vars(torch.UntypedStorage)
