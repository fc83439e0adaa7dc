"""Captures changed at random behind valid checks: a replay gives a result or one error of ours, nothing else."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failure.table import recorded
from format.reseal import change_records, change_tables

from replayfmt.errors import OpReplayError
from replayfmt.replay.plan import Plan

_SEEDS = 20
_TEXTS = (b"", b"\xff\xfe", b"x" * 100_000, b"aten::exp", b"self", b"__class__")


@pytest.fixture(params=["full", "integers"])
def source(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    weight = torch.arange(16.0)

    def program() -> Any:
        doubled = weight * 2
        part = doubled.view(4, 4).t()[1:]
        filled = torch.empty(4)
        filled.copy_(part[0])
        filled.untyped_storage().resize_(64)
        torch.rand(3)
        joined = torch.cat([doubled, filled])
        joined.add_(1)
        joined.chunk(2)[0].sum().item()
        torch._foreach_mul_([doubled, filled], 2.0)
        filled.tolist()
        doubled.numpy()[0] = 5
        filled.set_(doubled)  # type: ignore[call-overload]
        return doubled, part, joined, torch.native_layer_norm(part, [4], None, None, 1e-5)

    return recorded(tmp_path, program, "source", payload=request.param,
                    digests="ops" if request.param == "full" else "none")


def _mutate(columns: dict[str, Any], chance: random.Random) -> None:
    names = [name for name, values in columns.items() if isinstance(values, np.ndarray) and len(values)]
    for _ in range(chance.randint(1, 3)):
        name = chance.choice(names)
        values = columns[name] = columns[name].copy()
        at = chance.randrange(len(values))
        if values.dtype.kind == "f":
            values[at] = chance.choice([0, -1, 1e300, float("nan"), float("inf"), 3])
            continue
        limits = np.iinfo(values.dtype)
        extreme = chance.choice([0, int(limits.max), int(limits.min), 1, 7])
        near, other = int(values[at]) + chance.choice([-1, 1, 2]), int(values[chance.randrange(len(values))])
        changed = chance.choice([near, other, extreme])
        values[at] = max(int(limits.min), min(int(limits.max), changed))


def _change_records(path: Path, chance: random.Random) -> None:
    change_records(path, lambda columns: _mutate(columns, chance))


def _change_tables(path: Path, chance: random.Random) -> None:
    def edit(tables: Any) -> None:
        strings, columns = tables[0], tables[1]
        if strings and chance.random() < 0.3:
            strings[chance.randrange(len(strings))] = chance.choice([*_TEXTS, chance.choice(strings)])
        _mutate(columns, chance)

    change_tables(path, edit)


@pytest.mark.parametrize("change", [_change_records, _change_tables], ids=["records", "definitions"])
def test_no_mutation_makes_a_replay_end_otherwise_than_by_a_result_or_one_error(
    source: Path, tmp_path: Path, change: Callable[[Path, random.Random], None]
) -> None:
    ended: set[str] = set()
    for seed in range(_SEEDS):
        path = tmp_path / "mutated.opreplay"
        shutil.copyfile(source, path)
        change(path, random.Random(seed))
        for keep_going in (False, True):
            try:
                with Plan(path, keep_going=keep_going) as plan:
                    ended.add(plan.execute(verify="auto", keep_going=keep_going).outcome)
            except OpReplayError as error:
                ended.add(type(error).__name__)
    assert len(ended) >= 2, ended
