"""Execution traces of memory that was allocated and then filled unseen, as `torch.tensor` does: read, it has content
from outside; never read, or written by an operator first, it is what it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from replayfmt.format.codes import RecordKind, StorageOrigin
from replayfmt.format.reader import open_capture
from replayfmt.importers.execution_trace.importer import import_execution_trace
from replayfmt.replay.plan import Plan

from .observed import observe

UNSEEN = "was written unseen; synthesized at replay"


def imported(tmp_path: Path, run: Callable[[], Any]) -> Path:
    import_execution_trace(observe(tmp_path / "trace.json", run), tmp_path / "out.opreplay")
    return tmp_path / "out.opreplay"


def told(path: Path) -> list[str]:
    """The operators that read content which nothing in the trace wrote."""
    with open_capture(path) as reader:
        return [
            reader.kernels[each.signature.kernel].name
            for each in reader.records()
            if each.kind is RecordKind.op
            if any(UNSEEN in text for text in (each.annotation or {}).get("assumed", ()))
        ]


WEIGHTS, SCORES, ROWS = torch.randn(4, 2), torch.randn(3, 5), torch.randn(6, 3)


@pytest.mark.parametrize(
    ("run", "reader"),
    [
        (lambda: F.embedding(torch.tensor([1, 2]), WEIGHTS), "aten::embedding"),
        (lambda: F.embedding(torch.tensor([[1, 2]]).view(2)[1:], WEIGHTS), "aten::embedding"),
        (lambda: F.nll_loss(SCORES, torch.tensor([0, 4, 2])), "aten::nll_loss_forward"),
        (lambda: ROWS.index_select(0, torch.tensor([5, 1])), "aten::index_select"),
    ],
    ids=["embedding", "a view", "nll_loss", "index_select"],
)
def test_indices_that_were_written_unseen_are_made_up_in_range(
    tmp_path: Path, run: Callable[[], Any], reader: str
) -> None:
    path = imported(tmp_path, run)
    assert told(path) == [reader]
    with Plan(path) as plan:
        plan.execute(verify="none")
        index = [each for each in plan.synthesis.initialized if each.tensor.dtype is torch.int64]
    assert [each.op.partition(".")[0] for each in index] == [reader]


def test_what_an_operator_overwrites_or_nothing_reads_is_not_content(tmp_path: Path) -> None:
    def run() -> None:
        made = torch.empty(2, 3)
        torch.empty_like(made)
        made.fill_(2.0)
        torch.add(made, made, out=torch.empty(2, 3)).exp()

    path = imported(tmp_path, run)
    assert told(path) == []
    with open_capture(path) as reader:
        origins = [reader.storage(number).origin for number in range(1, reader.storage_count + 1)]
    assert StorageOrigin.absent not in origins


def test_what_an_operator_changes_in_place_is_read_by_it(tmp_path: Path) -> None:
    path = imported(tmp_path, lambda: F.embedding(torch.tensor([0, 1]).neg_().abs_(), WEIGHTS))
    assert told(path) == ["aten::neg_"]
