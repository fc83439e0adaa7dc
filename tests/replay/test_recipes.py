"""Captures made with payload=integers: floats come back with the statistics they had, integers as they were."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from in_process import Tools
from torch.nn import functional as F

from replayfmt.errors import ReplayRefused
from replayfmt.format.model import Recipe, Statistics
from replayfmt.format.reader import open_capture
from replayfmt.replay.plan import Plan

from .conftest import Captured
from .rewriting import rewrite


def contents(path: Path) -> list[torch.Tensor]:
    made = []
    with Plan(path) as plan:
        for each in plan.synthesis.initialized:
            storage = torch.empty(each.bytes, dtype=torch.uint8).untyped_storage()
            plan.synthesis.fill(each.storage, each.version, storage)
            made.append(torch.empty(0, dtype=each.tensor.dtype).set_(storage))
    return made


@pytest.fixture
def capture(captured: Captured) -> Path:
    weight, ids = torch.randn(50, 8).relu() * 3, torch.tensor([1, 7, 49])
    weight[3, 2], weight[4, 4] = float("nan"), float("inf")
    return captured(lambda: F.embedding(ids, weight).nan_to_num().sum(), payload="integers", digests="live")


def test_floats_have_the_statistics_of_those_that_were_captured(capture: Path) -> None:
    (made,) = contents(capture)
    with open_capture(capture) as reader:
        recipe = reader.recipes[1]
    assert recipe is not None and recipe.statistics is not None
    known, finite = recipe.statistics, made[made.isfinite()].double()
    assert made.numel() == recipe.elements == 400
    assert int((made == 0).sum()) == known.zeros > 100
    assert (int(made.isnan().sum()), int(made.isinf().sum())) == (known.nans, known.positive_infinities) == (1, 1)
    assert (float(finite.min()), float(finite.max())) == (known.min, known.max)
    assert float(finite.mean()) == pytest.approx(known.mean, rel=0.3)


def test_the_replay_runs_and_says_that_it_is_not_verified(capture: Path) -> None:
    with Plan(capture) as plan:
        first, again = plan.execute(verify="auto"), plan.execute()
        assert first.outcome == again.outcome == "ok"
        assert first.verification.reasons == ("the content of 1 storage was synthesized",)
        assert first.verification.structures == first.ops


def test_the_tool_says_what_was_filled_by_what(capture: Path, tools: Tools) -> None:
    run = partial(tools, "run")
    code, out, _err = run(str(capture))
    assert code == 0 and "not verified: the content of 1 storage was synthesized" in out
    assert "not captured: content of 1 storage, 1.562 KiB, filled by\n  recipe: 1 x weight of aten::embedding" in out
    code, out, _err = run("--format=jsonl", str(capture))
    replay, filled = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and replay["verification"]["mode"] == "none"
    assert filled == {
        "kind": "initialized",
        "storage": filled["storage"],
        "version": 0,
        "bytes": 1600,
        "dtype": "float32",
        "sizes": [400],
        "initializer": "recipe",
        "op": "aten::embedding",
        "argument": "weight",
        "ordinal": filled["ordinal"],
        "why": "a number for aten::embedding",
    }
    code, out, err = run("--verify=bitwise", str(capture))
    assert (code, out) == (1, "") and "was synthesized" in err


def test_a_recipe_that_contradicts_itself_is_refused(capture: Path, tmp_path: Path) -> None:
    path = rewrite(
        capture,
        tmp_path / "odd.opreplay",
        recipe=lambda recipe: Recipe(
            recipe.dtype, recipe.elements, recipe.seed, Statistics(0.0, 1.0, 2.0, -2.0, 0, 0, 0, 0)
        ),
    )
    with pytest.raises(ReplayRefused) as caught:
        Plan(path)
    assert "contradicts itself" in caught.value.findings[0]
