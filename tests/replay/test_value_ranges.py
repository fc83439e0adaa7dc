"""Constants that are safe because going forward with them shows it, and those that are refused because it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from replayfmt.errors import ReplayRefused
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture
from replayfmt.initializers import TensorInfo
from replayfmt.initializers.operator_rules import is_integral
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.content_uses import CapturedCalls, ValueRange, result_range

from .conftest import Captured

TABLE = torch.randn(20, 2)


def _counted_positions(mask: torch.Tensor) -> torch.Tensor:
    return F.embedding((mask.cumsum(1) * mask - 1).long() + 2, TABLE)


def _kept_or_padded(pad: torch.Tensor) -> torch.Tensor:
    unfinished = torch.ones(3, dtype=torch.long)
    tokens = torch.randn(3, 20).argmax(-1)
    for _ in range(2):
        tokens = tokens * unfinished + pad * (1 - unfinished)
        F.embedding(tokens, TABLE)
        unfinished = unfinished & (~(tokens == 4)).long()
    return tokens


def _in_place(mask: torch.Tensor) -> torch.Tensor:
    places = mask.cumsum(-1).mul_(mask)
    places.clamp_(max=5).add_(3)
    return F.embedding(torch.cat([places, places.flip(0)]), TABLE)


def _found_and_bounded(ends: torch.Tensor) -> torch.Tensor:
    sums = ends * ends
    bounded = (sums * torch.randint(-(2**40), 2**40, (3,)).bitwise_xor(sums)).clamp(0, 19)
    return F.embedding(torch.searchsorted(sums, torch.arange(19)), TABLE) + F.embedding(bounded, TABLE).sum()


@pytest.mark.parametrize(
    ("program", "content", "expected"),
    [
        (_found_and_bounded, torch.tensor([2, 3, 4]), 1),
        (_counted_positions, torch.ones(2, 8, dtype=torch.long), 1),
        (_kept_or_padded, torch.tensor(5), 0),
        (_in_place, torch.ones(2, 8, dtype=torch.long), 1),
    ],
)
def test_a_constant_is_found_where_it_is_shown_to_be_safe(
    captured: Captured, program: Callable[[torch.Tensor], Any], content: torch.Tensor, expected: int
) -> None:
    with Plan(captured(lambda: program(content), payload="none")) as plan:
        (filled,) = [each for each in plan.synthesis.initialized if each.initializer == "bounded"]
        assert filled.why == f"used in arithmetic, and {expected} is valid for every use"
        storage = torch.empty(filled.bytes, dtype=torch.uint8).untyped_storage()
        plan.synthesis.fill(filled.storage, 0, storage)
        assert set(torch.empty(0, dtype=torch.int64).set_(storage).tolist()) == {expected}
        assert plan.execute(verify="auto").outcome == "ok"


def _too_far(mask: torch.Tensor) -> torch.Tensor:
    return F.embedding(mask * mask - 40, TABLE)  # 41 when it was captured


def _wrapped(mask: torch.Tensor) -> torch.Tensor:
    return F.embedding((mask * mask + 300).to(torch.int8).long(), TABLE)  # 13 when it was captured


def _written_elsewhere(mask: torch.Tensor) -> torch.Tensor:
    other = torch.zeros_like(mask)
    torch.mul(mask, mask, out=other)
    other.bitwise_xor_(mask)
    return F.embedding(other, TABLE)


def _added_up(mask: torch.Tensor) -> torch.Tensor:
    places = torch.zeros(2, dtype=torch.long).index_put((torch.tensor([0]),), (mask * mask)[:1], accumulate=True)
    return F.embedding(places, TABLE)


@pytest.mark.parametrize(
    ("program", "content"),
    [
        (_too_far, torch.full((3,), 7)),
        (_wrapped, torch.full((3,), 15)),
        (_written_elsewhere, torch.ones(3, dtype=torch.long)),
        (_added_up, torch.ones(3, dtype=torch.long)),
    ],
)
def test_what_is_not_shown_to_be_safe_is_refused(
    captured: Captured, program: Callable[[torch.Tensor], Any], content: torch.Tensor
) -> None:
    with pytest.raises(ReplayRefused) as caught:
        Plan(captured(lambda: program(content), payload="none"))
    assert "computed from it is an argument of aten::embedding" in caught.value.findings[0]


def _many_integer_ops(x: torch.Tensor, y: torch.Tensor, table: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every kind of op whose results have a range, by name."""
    return {
        "add": x + y,
        "add alpha": torch.add(x, y, alpha=-2),
        "sub": x - y,
        "sub alpha": torch.sub(x, y, alpha=3),
        "rsub": 7 - x,
        "mul": x * y,
        "neg": -x,
        "and": x.abs() & 3,
        "remainder": x % 5,
        "cumsum": x.cumsum(1),
        "sum": x.sum(),
        "sum dim": x.sum(0),
        "sum of none": x[:0].sum(0),
        "clamp": x.clamp(-2, 2),
        "clamp min": x.clamp(min=1),
        "clamp odd": torch.clamp(x, 3, 1),
        "where": torch.where(x > 0, x, y),
        "masked_fill": x.masked_fill(x > 0, 9),
        "cat": torch.cat([x, y]),
        "maximum": torch.maximum(x, y),
        "max": x.max(),
        "max dim": x.max(1).values,
        "max place": x.max(1).indices,
        "argmax": x.argmax(),
        "argmin": x.argmin(0),
        "sort": x.sort(0).values,
        "sort place": x.sort().indices,
        "topk": x.topk(2).indices,
        "arange": torch.arange(2, 11, 3),
        "full": torch.full((3,), -4),
        "full_like": torch.full_like(x, 6),
        "ones": torch.ones(2, dtype=torch.long),
        "zeros": torch.zeros_like(x),
        "randint": torch.randint(3, 9, (50,)),
        "multinomial": torch.multinomial(table.softmax(-1), 2),
        "scatter": x.scatter(1, x.argsort(1), 77),
        "or": (x > 0).long() | (y > 0).long(),
        "to": (x > 1).to(torch.int32),
        "clone": x.clone(),
        "index": x[torch.tensor([0, 2])],
        "repeat": x.repeat(2, 1),
        "roll": x.roll(1),
        "small": (x + 1).to(torch.int8),
    }


def test_ranges_hold_for_what_ops_really_give(captured: Captured) -> None:
    x, y, table = torch.randint(-9, 10, (4, 5)), torch.randint(-3, 4, (4, 5)), torch.randn(4, 6)
    results: dict[str, torch.Tensor] = {}
    path = captured(lambda: results.update(_many_integer_ops(x, y, table)), payload="full", digests="ops")
    ranges: dict[int, ValueRange] = {}
    checked = 0
    with open_capture(path) as reader, Plan(reader) as plan:
        calls = CapturedCalls(reader, plan.kernels)
        digests = {
            record.argument("of"): record
            for record in reader.records()
            if record.kind is RecordKind.digest and record.argument("result") == 0
        }

        def known(value: Any) -> ValueRange | None:
            if isinstance(value, TensorInfo):
                return ValueRange(0, 1) if value.dtype is torch.bool else ranges.get(value.storage, ValueRange(-9, 9))
            return ValueRange(value, value) if isinstance(value, int | float) else None

        for record in list(reader.records()):
            if record.kind is not RecordKind.op:
                continue
            call = calls.call(record.ordinal)
            for index, result in enumerate(call.results):
                if not isinstance(result, TensorInfo) or not is_integral(result.dtype) or result.dtype is torch.bool:
                    continue
                found = result_range(call, known, index)
                if found is None:
                    continue
                ranges.setdefault(result.storage, found)
                digest = digests.get(record.ordinal)
                if index == 0 and digest is not None and result.elements:
                    assert found.low <= digest.argument("min") and digest.argument("max") <= found.high, call.name
                    checked += 1
    assert checked > 30
