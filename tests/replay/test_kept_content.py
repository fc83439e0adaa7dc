"""What nothing writes is prepared once for a plan. Every execution still starts from fresh state, and a write that
nobody declared is found: see replayfmt/replay/run/content.py for what is looked at, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replayfmt.errors import ReplayFailed
from replayfmt.pytorch.operators import operator_named
from replayfmt.pytorch.tensors.memory import hash_storage
from replayfmt.replay.operations import View
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.scan import WindowSize
from replayfmt.replay.run.content import Content
from replayfmt.replay.substitution.loading import Substitution

from .conftest import Captured
from .externals import content_file, externalize


class Counted:
    """How often content was put in place, and a view made, since the last time it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._staged = self._views = 0
        stage, view = Content.stage, View.__call__

        def counting_stage(content: Content, staged: Any) -> Any:
            self._staged += 1
            return stage(content, staged)

        def counting_view(made: View, base: Any) -> torch.Tensor:
            self._views += 1
            return view(made, base)

        monkeypatch.setattr(Content, "stage", counting_stage)
        monkeypatch.setattr(View, "__call__", counting_view)

    def taken(self) -> tuple[int, int]:
        counts = self._staged, self._views
        self._staged = self._views = 0
        return counts


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def storage(plan: Plan, of: torch.Tensor) -> torch.UntypedStorage:
    """The kept storage that has the length of a tensor's."""
    (found,) = [kept.storage for kept in plan._content._kept.values() if kept.storage.nbytes() == of.nbytes]
    return found


# ---------------------------------------------------------------------------------------------------- prepared once


@pytest.mark.parametrize("window", [WindowSize(), WindowSize(1, 2)], ids=["one window", "many"])
def test_content_that_nothing_writes_and_the_views_on_it_are_prepared_once(
    captured: Captured, counted: Counted, window: WindowSize
) -> None:
    layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    batch = torch.randn(8, 8)
    path = captured(lambda: layers(batch[2:]).sum().item())
    with Plan(path, window=window) as plan:
        counted.taken()
        for verify in ("bitwise", "none"):  # each has windows of its own
            first = plan.execute(verify=verify)  # type: ignore[arg-type]
            assert min(counted.taken()) >= 9, "four weights, four biases and a batch"
            for _ in range(2):
                again = plan.execute(verify=verify)  # type: ignore[arg-type]
                assert counted.taken() == (0, 0)
                assert first.outcome == again.outcome == "ok"
                assert first.verification.digests == again.verification.digests
        windows = [*plan.windows(checks=False)[0]]
        assert all(plan._content.ready(each) for each in windows)
        plan.close()
        assert not any(plan._content.ready(each) for each in windows), "closing lets go of everything"


def test_what_is_written_enters_afresh_beside_what_is_not(captured: Captured, counted: Counted) -> None:
    read, written = torch.randn(64), torch.randn(128)
    path = captured(lambda: written[:64].add_(read).sum().item())
    with Plan(path) as plan:
        for _ in range(4):
            assert plan.execute(verify="bitwise").outcome == "ok"
            staged, views = counted.taken()
        assert (staged, views) == (1, 1)
        address = storage(plan, read).data_ptr()
        plan.execute(verify="bitwise")
        assert storage(plan, read).data_ptr() == address


def steps_with_batches(count: int) -> Callable[[], None]:
    """A program that makes a small batch for each step, and frees it."""
    weight = torch.randn(256, 1024)  # 1 MiB

    def program() -> None:
        for step in range(count):
            rows = torch.from_numpy(np.full(8, step))
            weight[rows].sum().item()

    return program


def test_small_content_that_the_program_freed_is_prepared_once_too(captured: Captured, counted: Counted) -> None:
    with Plan(captured(steps_with_batches(5))) as plan:
        plan.execute(verify="bitwise")
        assert counted.taken()[0] == 6
        for _ in range(2):
            assert plan.execute(verify="bitwise").outcome == "ok"
            assert counted.taken() == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("why", ["more than its share", "no memory"])
def test_content_that_the_program_freed_and_that_has_no_room_enters_in_each_execution(
    captured: Captured, counted: Counted, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    count = 60
    if why == "no memory":
        monkeypatch.setattr("replayfmt.replay.run.content.free_bytes", lambda device: 0)
    with Plan(captured(steps_with_batches(count))) as plan:
        # A batch is 64 bytes, the objects for it count as 1 KiB.
        kept = 0 if why == "no memory" else plan.preparation.scan(checks=False).known_peak_bytes // 64 // (64 + 1024)
        assert kept < count
        for _ in range(3):
            assert plan.execute(verify="bitwise").outcome == "ok"
            entered = counted.taken()
        freed = [each for each in plan._content._kept.values() if each.storage.nbytes() == 64]
        assert len(freed) == kept
        assert entered[0] == count - len(freed)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: x.t_(),
        lambda x, y: x.unsqueeze_(0),
        lambda x, y: x.resize_(1, 3),
        lambda x, y: x.set_(y),
        lambda x, y: x.set_(y.untyped_storage(), 2, (4,), (2,)),
        lambda x, y: x.as_strided_((3,), (2,), 1),
        lambda x, y: x.swapaxes_(0, 1),
        lambda x, y: torch.add(y, 1, out=x.resize_(0)),
    ],
    ids=["t_", "unsqueeze_", "resize_", "set_ to a tensor", "set_ to memory", "as_strided_", "swapaxes_", "out"],
)
def test_a_tensor_that_an_op_changes_in_place_is_made_anew(
    captured: Captured, change: Callable[[torch.Tensor, torch.Tensor], Any]
) -> None:
    inputs: list[torch.Tensor] = []

    def program() -> None:
        x, y = inputs
        x.sum().item()
        change(x, y)
        (x * 2).sum().item()
        y.sum().item()

    inputs += [torch.randn(2, 3), torch.randn(4, 4)]
    with Plan(captured(program)) as plan:
        for verify in ("bitwise", "none", "none", "bitwise"):
            result = plan.execute(verify=verify)  # type: ignore[arg-type]
            assert result.outcome == "ok", str(result.divergence)
            assert not result.notes


def test_a_run_that_failed_leaves_what_is_kept_as_it_was(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, total = torch.randn(16), torch.zeros(8)

    def program() -> None:
        total.add_(weight[:8])
        torch.special.i1(weight).sum().item()

    with Plan(captured(program)) as plan:
        plan.execute()
        with monkeypatch.context() as broken:
            (window,) = plan.windows(checks=False)[0]
            place = next(
                place
                for place, each in enumerate(window.function.__defaults__)
                if "i1" in str(each)  # type: ignore[attr-defined]
            )
            constants = list(window.function.__defaults__)  # type: ignore[attr-defined]
            constants[place] = lambda x: torch.zeros(2) @ torch.zeros(3)
            broken.setattr(window.function, "__defaults__", tuple(constants))
            with pytest.raises(ReplayFailed, match="special_i1"):
                plan.execute()
        for verify in ("none", "bitwise", "bitwise"):
            assert plan.execute(verify=verify).outcome == "ok"  # type: ignore[arg-type]


def test_a_capture_too_long_to_keep_uses_kept_content_with_new_views(
    captured: Captured, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replayfmt.replay.plan._KEPT_RECORDS", 1)
    weight = torch.randn(16)
    with Plan(captured(lambda: (weight[1:] * 2).sum().item())) as plan:
        for _ in range(3):
            assert plan.execute(verify="bitwise").outcome == "ok"
            assert counted.taken() == (1, 1)
        assert len(plan._content._kept) == 1


def test_runs_of_every_kind_take_turns_on_what_is_kept(captured: Captured) -> None:
    weight, total = torch.randn(4, 4), torch.zeros(4)

    def program() -> None:
        total.add_((weight @ weight).sum(0))
        total.sum().item()

    with Plan(captured(program), keep_going=True) as plan:
        ordinals = [verdict.ordinal for verdict in plan.execute(keep_going=True).verdicts or ()]
        for _ in range(2):
            assert plan.execute(verify="bitwise").outcome == "ok"
            assert plan.execute(verify="bitwise", keep_going=True).outcome == "ok"
            assert plan.execute().outcome == "ok"
            plan.examine(lambda op: op.calls(2))
            sliced = plan.execute(verify="auto", keep_going=True, only=plan.preparation.slice(ordinals[:1]))
            assert sliced.divergence is None
            plan.run_single(ordinals[-1])
        result = plan.execute(verify="bitwise")
        assert (result.outcome, result.notes) == ("ok", ())


# ----------------------------------------------------------------------------------------------- writes nobody declared


@pytest.fixture
def undeclared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The replay does not know that batch_norm writes its running statistics, which no schema says."""

    def forgetful(name: str, overload: str = "default") -> Any:
        return replace(operator_named(name, overload), quiet_writes=())

    monkeypatch.setattr("replayfmt.replay.planning.kernels.operator_named", forgetful)
    yield


class Norm:
    """A program whose op writes its statistics, 3 numbers each, and an undisturbed neighbour of them."""

    def __init__(self) -> None:
        self.layer = torch.nn.BatchNorm1d(3, affine=False)
        self.layer.num_batches_tracked = None
        self.batch = torch.randn(8, 3)

    def __call__(self) -> None:
        self.layer(self.batch).sum().item()


@pytest.fixture(params=["embedded", "in a file", "unaligned in a file", "synthesized"])
def hidden(request: pytest.FixtureRequest, captured: Captured, tmp_path: Path) -> Path:
    """A capture of such an op, with content from everywhere content comes from."""
    if request.param == "synthesized":
        return captured(Norm(), payload="none")
    source = captured(Norm())
    if request.param == "embedded":
        return source
    file = tmp_path / "models" / "statistics.bin"
    offsets = content_file(source, file, gap=64 if request.param == "in a file" else 7)
    return externalize(source, tmp_path / "external.opreplay", {file: offsets})


@pytest.mark.usefixtures("undeclared")
def test_a_write_that_nobody_declared_does_not_reach_the_next_execution(hidden: Path) -> None:
    # At the latest before the second execution, although nothing verifies.
    with Plan(hidden) as plan:
        states, said = [], []
        for _ in range(4):
            result = plan.execute()
            states.append(
                sorted(bytes(kept.storage) for kept in plan._content._kept.values() if kept.storage.nbytes() == 12)
            )
            said.append(sum("no op is known to write it" in note for note in result.notes))
        assert all(state == states[0] for state in states), "each began with the same statistics"
    # The mean and the variance. Synthesized content has its first run in the first execution, for its shapes.
    assert said[0] in (0, 2) and said[1:] == [2, 2, 2]


@pytest.mark.usefixtures("undeclared")
def test_a_verified_execution_fails_where_an_op_writes_what_nobody_declared(captured: Captured) -> None:
    with Plan(captured(Norm())) as plan:
        for verify in ("bitwise", "none", "auto", "close"):
            result = plan.execute(verify=verify)  # type: ignore[arg-type]
            if verify == "none":
                assert result.outcome == "ok"
                continue
            assert result.outcome == "mismatched"
            assert "as it entered, because no op up to here is known to write it" in str(result.divergence)
            assert result.verified.startswith("differs")


@pytest.mark.usefixtures("undeclared")
def test_an_unverified_execution_is_looked_at_by_the_next_that_verifies(captured: Captured) -> None:
    norm = Norm()
    norm.layer.eval()
    with Plan(captured(norm)) as plan:
        for verify in ("bitwise", "none"):
            assert plan.execute(verify=verify).outcome == "ok"  # type: ignore[arg-type]
        next(kept.storage for kept in plan._content._kept.values() if kept.storage.nbytes() == 12)[5] ^= 1
        result = plan.execute(verify="bitwise")
        assert result.outcome == "mismatched" and "no op up to here is known to write it" in str(result.divergence)
        assert sum("no op is known to write it" in note for note in result.notes) == 1
        again = plan.execute(verify="bitwise")
        assert (again.outcome, again.notes) == ("ok", result.notes)


@pytest.mark.usefixtures("undeclared")
def test_keeping_going_finds_it_too(captured: Captured) -> None:
    with Plan(captured(Norm()), keep_going=True) as plan:
        result = plan.execute(verify="bitwise", keep_going=True)
    assert result.outcome == "mismatched" and result.divergence is not None


@pytest.mark.usefixtures("undeclared")
def test_without_room_for_copies_it_is_restored_from_where_it_came(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replayfmt.replay.run.content.free_bytes", lambda device: 0)
    with Plan(captured(Norm(), digests="live")) as plan:
        states = []
        for _ in range(4):
            plan.execute()
            states.append(
                sorted(bytes(kept.storage) for kept in plan._content._kept.values() if kept.storage.nbytes() == 12)
            )
        assert not plan._content._pristine
    assert all(state == states[0] for state in states)


@pytest.mark.slow
def test_a_map_of_a_file_is_not_read_to_know_that_nothing_wrote_it(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(64, 64)
    source, file = captured(lambda: weight.exp().sum().item()), tmp_path / "models" / "weight.bin"
    path = externalize(source, tmp_path / "external.opreplay", {file: content_file(source, file)})
    hashed: list[int] = []

    def counting(storage: torch.UntypedStorage) -> int:
        hashed.append(storage.nbytes())
        return hash_storage(storage)

    monkeypatch.setattr("replayfmt.replay.run.content.hash_storage", counting)
    with Plan(path) as plan:
        for _ in range(2):
            result = plan.execute(verify="bitwise")
            assert (result.outcome, hashed) == ("ok", [])
        plan.execute()
        memory = storage(plan, weight)
        memory[5] = memory[5]  # the same bytes, in a page of the process's own: only reading can tell
        result = plan.execute(verify="bitwise")
        assert (result.outcome, result.notes, set(hashed)) == ("ok", (), {weight.nbytes})
        plan.execute()
        memory[5] = memory[5] ^ 1
        result = plan.execute(verify="bitwise")
        assert result.outcome == "mismatched" and "no op is known to write it" in result.notes[0]
    monkeypatch.setattr("replayfmt.replay.run.content._SMAPS", tmp_path / "nowhere")
    with Plan(path) as plan:
        hashed.clear()
        assert plan.execute(verify="bitwise").outcome == "ok"
        assert hashed == [weight.nbytes], "where the system does not tell, everything is read"


@pytest.mark.parametrize("harm", ["metadata", "length", "memory", "bytes"])
def test_a_kept_tensor_that_became_another_is_found_by_the_next_that_verifies(captured: Captured, harm: str) -> None:
    weight = torch.randn(4, 4)
    with Plan(captured(lambda: weight.exp().sum().item())) as plan:
        for verify in ("bitwise", "none"):
            plan.execute(verify=verify)  # type: ignore[arg-type]
        (window,) = plan.windows(checks=False)[0]
        ready = plan._content.ready(window)
        assert ready is not None
        (tensor,) = [value for value in ready.values.values() if isinstance(value, torch.Tensor)]
        if harm == "metadata":
            tensor.t_()
        elif harm == "length":
            tensor.untyped_storage().resize_(32)
        elif harm == "memory":
            tensor.set_(torch.zeros(4, 4))
        else:
            tensor[3, 3] = 0
        result = plan.execute(verify="bitwise")
        assert result.outcome == "mismatched" and "as it entered" in str(result.divergence)
        assert sum("no op is known to write it" in note for note in result.notes) == 1
        for verify in ("none", "bitwise"):
            again = plan.execute(verify=verify)  # type: ignore[arg-type]
            assert (again.outcome, again.notes) == ("ok", result.notes)


# ------------------------------------------------------------------------------------ functions in the place of kernels


def test_a_replacement_that_changes_the_tensors_it_is_given_has_new_ones_in_each_execution(captured: Captured) -> None:
    weight = torch.randn(4, 8)
    seen: list[tuple[int, ...]] = []

    def exp(self: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(self.shape))
        result = torch.ops.aten.exp.default(self)
        if len(seen) > 2:  # judged by then
            self.t_()
        return result

    with Plan(captured(lambda: weight.exp().sum().item()), substitutions=[Substitution("aten::exp", exp)]) as plan:
        for _ in range(4):
            assert plan.execute().outcome == "ok"
    assert len(seen) >= 5 and set(seen) == {(4, 8)}


def test_a_replacement_that_later_writes_what_it_reads_is_found_and_does_not_spread(captured: Captured) -> None:
    weight = torch.randn(4, 8)
    seen: list[float] = []

    def exp(self: torch.Tensor) -> torch.Tensor:
        seen.append(float(self[0, 0]))
        result = torch.ops.aten.exp.default(self)
        if len(seen) > 2:
            self.zero_()
        return result

    path = captured(lambda: weight.exp().sum().item())
    with Plan(path, substitutions=[Substitution("aten::exp", exp)]) as plan:
        result = plan.execute(verify="auto")
        assert result.outcome == "mismatched"
        assert "no op up to here is known to write it" in str(result.divergence)
        for _ in range(3):
            plan.execute()
    assert len(seen) >= 5 and set(seen) == {float(weight[0, 0])}
