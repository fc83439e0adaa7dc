"""Memory from `torch.empty` that is written in part: what is written is compared, and nothing else."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from replayfmt.dump.definitions import summary_row
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import CaptureReader
from replayfmt.recording.content.storage_content import sampled_places
from replayfmt.replay.convenience import as_rows, as_text
from replayfmt.replay.plan import Plan

from .conftest import Capture
from .test_unwritten import leave_behind

INDEX = torch.tensor([1, 4])
MASK = torch.tensor([False, True, False, False, True, False, False, False])


def assigned(new: torch.Tensor, value: torch.Tensor) -> None:
    new[MASK] = value


# What writes places 1 and 4 of 8, with values given from outside.
WRITES: dict[str, Any] = {
    "index_copy_": lambda new, value: new.index_copy_(0, INDEX, value),
    "index_put_": lambda new, value: new.index_put_([INDEX], value),
    "index_fill_": lambda new, value: new.index_fill_(0, INDEX, value[0]),
    "scatter_": lambda new, value: new.scatter_(0, INDEX, value),
    "masked_fill_": lambda new, value: new.masked_fill_(MASK, value[0]),
    "masked_scatter_": lambda new, value: new.masked_scatter_(MASK, value),
    "put_": lambda new, value: new.put_(INDEX, value),
    "x[mask] = ...": assigned,
    "slices": lambda new, value: (new[1:2].copy_(value[:1]), new[4:5].copy_(value[1:])),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "digests"), [*((name, "ops") for name in WRITES), ("index_put_", "live")])
def test_the_written_places_are_compared_and_the_others_are_not(
    capture: Capture, name: str, digests: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, value = WRITES[name], torch.tensor([5.0, 5.0])

    def program() -> torch.Tensor:
        leave_behind(1e30)
        new = torch.empty(8)
        write(new, value)
        return new

    captured = capture(program, digests=digests)
    assert captured.unsupported() == {}
    leave_behind(2.0)
    captured.replays()
    assert one_flipped_element_fails(captured.path, monkeypatch)


def one_flipped_element_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a replay is found wrong whose imported values differ from the captured ones in one bit."""
    real, flipped = CaptureReader.read_payload_into, []

    def read(reader: CaptureReader, number: int, into: Any) -> Any:
        result = real(reader, number, into)
        if bytes(into) == struct.pack("2f", 5, 5):
            into[0] ^= 1
            flipped.append(number)
        return result

    monkeypatch.setattr(CaptureReader, "read_payload_into", read)
    with Plan(path) as plan:
        result = plan.execute(verify="bitwise")
    assert flipped
    return result.outcome != "ok"


def test_a_ring_cache_is_compared_slot_by_slot(capture: Capture) -> None:
    def program() -> Any:
        leave_behind(1e30)
        cache = torch.empty(1, 2, 16, 4)
        for step in range(5):
            cache.index_copy_(2, torch.tensor([step]), torch.ones(1, 2, 1, 4) * step)
        return cache, cache[:, :, :5] * 2

    captured = capture(program)
    assert captured.unsupported() == {}
    compared = [int(str(record.argument("elements"))) for record in captured.records(RecordKind.digest)]
    assert compared.count(20) == 2  # five slots of each of two heads
    leave_behind(2.0)
    captured.replays()


def test_a_replay_buffer_far_larger_than_what_is_written_costs_what_is_written(capture: Capture) -> None:
    def program() -> Any:
        frames = torch.empty(100_000, 100)
        for step in range(3):
            frames[torch.tensor([step, step + 10])] = torch.ones(2, 100) * step
        return frames

    captured = capture(program)
    assert captured.unsupported() == {}
    assert captured.path.stat().st_size < 100_000
    captured.replays()


@pytest.mark.slow
@pytest.mark.parametrize(
    "use",
    [
        lambda half: half * 2,
        lambda half: half.view(2, 32).sum(1),
        lambda half: torch.cat([half, half]),
        lambda half: torch.nn.functional.mse_loss(half, torch.zeros(64), reduction="none"),
        lambda half: half.clone()[:40] + 1,
        lambda half: half.to(torch.float64) + 1,
    ],
)
def test_what_is_computed_from_partly_written_memory_is_compared_whole(capture: Capture, use: Any) -> None:
    def program() -> Any:
        leave_behind(7.5)
        half = torch.empty(64)
        half[:32] = 1
        return half, use(half)

    for digests in ("live", "ops"):
        captured = capture(program, digests=digests)
        assert captured.unsupported() == {}
        leave_behind(2.0)
        captured.replays()


def test_what_was_written_is_compared_before_the_rest_enters(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.tensor([5.0, 5.0])

    def program() -> Any:
        half = torch.empty(64)
        half[3:5] = value
        return half * 2

    assert one_flipped_element_fails(capture(program).path, monkeypatch)


def test_scattered_writes_are_compared_once_the_rest_has_entered(capture: Capture) -> None:
    mask = torch.arange(4096) % 3 == 0

    def program() -> Any:
        leave_behind(1e30)
        new = torch.empty(4096)
        new[mask] = 2.0
        return new

    captured = capture(program)
    assert captured.unsupported() == {}
    leave_behind(2.0)
    captured.replays()


@pytest.mark.parametrize("word", [0, 13, 31])
def test_a_sample_sees_a_write_of_one_word_of_a_large_storage(capture: Capture, word: int) -> None:
    """Where both recorders look: the native one in C++, from the second allocation of a kind on."""

    def program() -> Any:
        given = [torch.empty(5000) for _ in range(3)]
        place = sampled_places(20000)[word][1]
        ctypes.memmove(torch._C.StorageBase.data_ptr(given[2].untyped_storage()) + place, os.urandom(8), 8)
        return [each.sum() for each in given]

    assert capture(program).unsupported() == {"unseen_write": 1}


@pytest.mark.parametrize("kept", [False, True])
def test_a_tensor_whose_memory_was_freed_is_attached_to_other_memory(capture: Capture, kept: bool) -> None:
    """As FSDP frees a flat parameter, and lets it stand for a shard."""

    def program() -> Any:
        results = []
        for source in (torch.arange(6.0), torch.arange(6.0).untyped_storage()):
            flat = torch.randn(8)
            others = flat.split(4) if kept else None
            flat.untyped_storage().resize_(0)
            flat.set_(source)  # type: ignore[call-overload]
            results += [flat * 2, flat.mul_(3), others]
        attached = torch.randn(4)
        attached.untyped_storage().resize_(0)
        attached.data = torch.ones(2)
        return [*results, attached + 1]

    captured = capture(program)
    assert captured.unsupported() == {}
    captured.replays()


def test_what_a_replay_does_not_compare_is_counted_in_its_output_and_in_a_summary(capture: Capture) -> None:
    def program() -> torch.Tensor:
        rows = torch.empty(1100, 70)  # more written ranges than are digested
        for column in range(66):
            rows[:, column].fill_(column)
        return rows

    def looked_at(captured: Any) -> tuple[str, int, int]:
        assert captured.unsupported() == {}
        with Plan(captured.path) as plan:
            result = plan.execute(verify="bitwise")
            text = "\n".join(as_text(plan, result))
            row = as_rows(plan, result)[0]["verification"]
        assert "\nverified: bitwise" in text and ("not compared: " in text) == ("not compared: " in result.verified)
        summary = summary_row(captured.reader)
        assert summary["strict_replay_supported"]
        return text, row["uncompared"], summary["uncompared"]

    text, *counts = looked_at(capture(program))
    assert "\n  not compared: 1 result without a digest" in text and counts == [1, 1]
    text, *counts = looked_at(capture(lambda: torch.ones(1100, 70) * 2))
    assert "not compared" not in text and counts == [0, 0]


def test_memory_that_is_written_through_many_views_is_compared_as_a_whole(capture: Capture) -> None:
    """As the flat buffer of all parameters that an optimizer writes one by one."""
    parameters = torch.zeros(400).split(2)

    def program() -> None:
        for parameter in parameters:
            parameter.add_(1)

    captured = capture(program)
    captured.replays()
    assert [record.argument("elements") for record in captured.records(RecordKind.digest)] == [400]
