"""Cases of their own: hidden writes, content that is made up, interrupts, what belongs to another thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import replayfmt
from replayfmt.dump.selection import OpSelection
from replayfmt.errors import ReplayRefused
from replayfmt.format.codes import RecordKind, StorageOrigin
from replayfmt.format.model import Kernel
from replayfmt.format.reader import open_capture
from replayfmt.format.signature_layout import SlotLayout
from replayfmt.replay import preparation
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.kernels import Effects, ResolvedKernel
from replayfmt.replay.resolution.kernel_lookup import resolve
from replayfmt.trim.materializing import DefinedBytes, region_of
from replayfmt.trim.schedule import OpenScopes
from replayfmt.trim.trimming import checked_here, trim_capture

from .conftest import Captured
from .trimmed import compare, ops, trim


def test_what_a_custom_op_writes_unannounced_is_seen_by_the_ops_that_are_kept(
    captured: Captured, tmp_path: Path
) -> None:
    library = torch.library.Library("trimtest", "DEF")
    library.define("sneak(Tensor x) -> Tensor")

    def sneak(x: torch.Tensor) -> torch.Tensor:
        x.data.add_(10)
        return x + 1

    library.impl("sneak", sneak, "CPU")

    def program() -> None:
        x = torch.ones(3)
        for _ in range(3):
            x.mul(2)
            torch.ops.trimtest.sneak(x)

    path, out = captured(program), tmp_path / "out.opreplay"
    trim(path, out, kernel="aten::mul")
    assert compare(path, out) == 3
    with open_capture(out) as reader:
        assert reader.summary.records[RecordKind.storage_import] == 3


@pytest.mark.parametrize("payload", ["integers", "none"])
def test_made_up_content_is_said_to_be_and_nothing_is_left_to_verify(
    payload: str, captured: Captured, tmp_path: Path
) -> None:
    table, index = torch.randn(10, 4), torch.tensor([1, 3, 5])

    def program() -> None:
        y = torch.nn.functional.embedding(index, table)
        with replayfmt.scope("kept"):
            (y * 2 + table[0]).sum().item()

    path, out = captured(program, payload=payload), tmp_path / "out.opreplay"
    result = trim(path, out, scope="kept")
    assert result.digests == 0 and result.verified.startswith("not verified")
    assert any("synthesized" in note for note in result.notes)
    with open_capture(out) as reader:
        assert "trimmed-synthesized" in reader.session.policies and reader.session.policies["digests"] == "none"
        assert RecordKind.digest not in {record.kind for record in reader.records()}
        assert [record.results for record in ops(reader)][-1] == (None,), "the program read another number"
    with Plan(out) as plan:
        result_of_replay = plan.execute(verify="auto")
        assert result_of_replay.outcome == "ok" and result_of_replay.verification.mode == "none"
        with pytest.raises(replayfmt.ReplayRefused):
            plan.execute(verify="bitwise")


def test_recipes_stay_recipes_while_nothing_wrote_them(captured: Captured, tmp_path: Path) -> None:
    table = torch.randn(50, 40)

    def program() -> None:
        table.mul(2)
        with replayfmt.scope("kept"):
            table.add(1)

    path, out = captured(program, payload="integers"), tmp_path / "out.opreplay"
    result = trim(path, out, scope="kept")
    assert result.embedded_bytes == 0
    with open_capture(out) as reader, open_capture(path) as original:
        storages = [reader.storage(number) for number in range(1, reader.storage_count + 1)]
        recipe = next(each for each in storages if each.origin is StorageOrigin.initializer)
        assert reader.recipes[recipe.payload] == original.recipes[1]


def test_an_interrupt_leaves_nothing_behind(captured: Captured, tmp_path: Path) -> None:
    path, out = captured(lambda: torch.ones(3).add(1).mul(2)), tmp_path / "out.opreplay"

    def interrupted(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with Plan(path, keep_going=True) as plan, pytest.raises(KeyboardInterrupt):
        trim_capture(plan, str(out), OpSelection(ops="1:3"), checked_here(Plan), on_progress=interrupted)
    assert [each.name for each in tmp_path.iterdir()] == ["capture.opreplay"]


def test_an_op_that_differs_from_itself_is_named_and_nothing_is_written(captured: Captured, tmp_path: Path) -> None:
    library = torch.library.Library("trimrandom", "DEF")
    library.define("noise(Tensor x) -> Tensor")
    calls = []

    def noise(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.full_like(x, float(len(calls)))

    library.impl("noise", noise, "CPU")
    path = captured(lambda: torch.ops.trimrandom.noise(torch.ones(3)).add(1), digests="none")
    out = tmp_path / "out.opreplay"
    with open_capture(path) as reader:
        last = ops(reader)[-2].ordinal
    with pytest.raises(replayfmt.ReplayMismatch, match="was not written.*trimrandom::noise.*--verify=none"):
        trim(path, out, ops=f"{last}:")
    assert [each.name for each in tmp_path.iterdir()] == ["capture.opreplay"]
    trim(path, out, ops=f"{last}:", verify="none")
    with open_capture(out) as reader:
        assert RecordKind.digest not in {record.kind for record in reader.records()}


def test_open_scopes_tell_passes_apart() -> None:
    from replayfmt.format.model import Scope

    scopes = OpenScopes([None, Scope(0, "a"), Scope(1, "b")])
    scopes.begin(1, 0, kept=False)
    scopes.begin(2, 1, kept=False)
    assert scopes.restate(2) == ([], [1, 2])
    assert scopes.restate(2) == ([], [])
    scopes.end(2, kept=False)
    scopes.begin(2, 5, kept=False)
    assert scopes.restate(2) == ([2], [2]), "left and entered again: another pass"
    scopes.end(2, kept=True)
    assert scopes.restate(1) == ([], [])
    assert scopes.close() == [1]


def test_only_bytes_that_every_replay_gives_are_digested() -> None:
    whole = torch.zeros(8)
    defined = DefinedBytes()
    defined.born(1, 32, written=False, opaque=False)
    assert not defined.covers(1, whole)
    defined.wrote(1, whole[:4], everything=True)
    assert defined.covers(1, whole[1:3]) and not defined.covers(1, whole[2:6])
    defined.wrote(1, whole[4:], everything=False)
    assert not defined.covers(1, whole)
    defined.wrote(1, whole[4:], everything=True)
    assert defined.covers(1, whole)
    defined.measure(1, 64)
    assert defined.covers(1, whole) and not defined.covers(1, torch.zeros(16))
    defined.entered(1, 64)
    assert defined.covers(1, torch.zeros(16))
    defined.born(2, 32, written=True, opaque=True)
    assert not defined.covers(2, whole)
    assert region_of(whole[2:].view(2, 3).t()).strides == (4, 12)


def test_progress_counts_up_to_the_end_of_what_is_kept(captured: Captured, tmp_path: Path) -> None:
    path, seen = captured(lambda: [torch.ones(3).add(1) for _ in range(20)]), []
    with Plan(path, keep_going=True) as plan:
        trim_capture(
            plan,
            str(tmp_path / "out.opreplay"),
            OpSelection(ops="5:21"),
            checked_here(Plan),
            on_progress=lambda done, total: seen.append((done, total)),
        )
    assert seen == sorted(seen) and seen[-1] == (21, 21)


class Foreign(ResolvedKernel):
    """A kernel that is no operator of the dispatcher, and does what one does."""

    own, draws = True, False

    def __init__(self, kernel: ResolvedKernel) -> None:
        self._kernel = kernel

    @property
    def schema(self) -> torch.FunctionSchema:
        return self._kernel.schema

    @property
    def call(self) -> Callable[..., Any]:
        return self._kernel.call

    def effects(self, layout: SlotLayout) -> Effects:
        return self._kernel.effects(layout)

    content_decides_sizes = makes_unchecked_views = False

    def runs_on(self, device_type: str) -> bool:
        return self._kernel.runs_on(device_type)


def test_a_kernel_that_is_no_operator_replays_and_is_refused_by_name(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def foreign(kernel: Kernel, *given: Any) -> ResolvedKernel | str:
        resolved = resolve(kernel, *given)
        assert isinstance(resolved, ResolvedKernel)
        return Foreign(resolved) if kernel.name == "aten::mul" else resolved

    path, out = captured(lambda: torch.ones(3).mul(2).add(1).sum().item()), tmp_path / "out.opreplay"
    monkeypatch.setattr(preparation, "resolve", foreign)
    with Plan(path, keep_going=True) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"
        with pytest.raises(ReplayRefused, match=r"ordinal \d+: aten::mul.Tensor cannot be kept: expected an operator"):
            trim_capture(plan, str(out), OpSelection(kernel=("aten::mul",)), checked_here)
    assert not list(tmp_path.glob("out.*")), "nothing half written"
