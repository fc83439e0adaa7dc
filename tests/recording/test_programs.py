"""Small programs of every hard kind are captured whole, replay bit for bit, and run as they do without a capture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .conftest import Capture
from .programs import PLAIN, Program


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [tensor for item in value for tensor in tensors(item)]
    return []


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.numel() == 0:
        return one.shape == other.shape
    return torch.equal(
        torch.view_as_real(one) if one.is_complex() else one.nan_to_num(),
        torch.view_as_real(other) if other.is_complex() else other.nan_to_num(),
    )


def thrice(program: Program) -> Program:
    """Often enough that the native recorder takes its hot path."""
    return lambda: [program() for _ in range(3)]


@pytest.mark.recorder("python", "native")
@pytest.mark.slow
@pytest.mark.parametrize("program", PLAIN, ids=lambda p: p.__name__)
def test_every_result_replays_bit_for_bit(capture: Capture, program: Program) -> None:
    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    captured.replays()


@pytest.mark.recorder("python", "native")
@pytest.mark.slow
@pytest.mark.parametrize("program", PLAIN, ids=lambda p: p.__name__)
def test_calls_that_repeat_are_recorded_so_that_they_replay_bit_for_bit(capture: Capture, program: Program) -> None:
    captured = capture(thrice(program))
    assert captured.unsupported() == {}
    captured.replays()


@pytest.mark.recorder("python", "native")
@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [p for p in PLAIN if p.__name__ != "partly_written_memory"], ids=lambda p: p.__name__
)
def test_a_program_computes_the_same_with_and_without_a_capture(capture: Capture, program: Program) -> None:
    torch.manual_seed(0)
    expected = tensors(thrice(program)())
    torch.manual_seed(0)
    got = tensors(capture(thrice(program)).returned)
    assert len(got) == len(expected)
    assert all(map(same, got, expected))


class Plain(TorchDispatchMode):
    """Notes the ops that any mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func.name() if func._schema.overload_name else f"{func.name()}.default")
        return func(*args, **(kwargs or {}))


@pytest.mark.recorder("python")
@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        p
        for p in PLAIN
        if p.__name__
        not in (
            "inference_mode",  # its composites are recorded in parts
            "transforms",  # functionalization asks the modes beneath differently
        )
    ],
    ids=lambda p: p.__name__,
)
def test_recording_adds_no_op_and_loses_none(capture: Capture, program: Program) -> None:
    program()
    torch.manual_seed(0)
    with Plain() as plain:
        thrice(program)()
    torch.manual_seed(0)
    assert capture(thrice(program)).ops() == plain.ops


def test_equal_numbers_of_other_types_in_a_list_are_not_taken_for_each_other(capture: Capture) -> None:
    integers = [torch.arange(3, dtype=torch.int32)]

    def run() -> list[torch.Tensor]:
        return [torch._foreach_mul(integers, [number])[0] for number in (1, 1, 1, 1.0, 1, 1.0, True, 0, 0, 0, -0.0)]

    captured = capture(run)
    assert [result.dtype for result in captured.returned].count(torch.float32) == 3
    captured.replays()
