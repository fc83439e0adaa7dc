"""Programs that once replayed wrongly, or were refused without a reason: each is verified bit for bit, twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F

import replayfmt
from replayfmt.format.codes import RecordKind
from replayfmt.replay.plan import Plan


def reproduces(path: Path, program: Callable[[], Any], **options: Any) -> Any:
    """Capture a program and replay it twice, each time from fresh state; gives what the program returned."""
    with replayfmt.capture(path, digests="ops", **options), replayfmt.scope("execute"):
        returned = program()
    with Plan(path) as plan:
        for _ in range(2):
            result = plan.execute(verify="bitwise")
            assert result.outcome == "ok", str(result.divergence)
            assert result.verification.digests > 0
    return returned


def kinds(path: Path) -> list[RecordKind]:
    with replayfmt.open(path) as capture:
        return [record.kind for record in capture.reader.records()]


@pytest.fixture()
def path(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return tmp_path / "promise.opreplay"


def test_an_interrupted_op_is_no_part_of_the_work_and_what_it_wrote_enters_again(path: Path) -> None:
    library = torch.library.Library("promise", "FRAGMENT")
    library.define("interrupted(Tensor(a!) x) -> ()")

    def interrupted(x: torch.Tensor) -> None:
        x.add_(1)
        raise KeyboardInterrupt

    library.impl("interrupted", interrupted, "CPU")

    def program() -> torch.Tensor:
        x = torch.zeros(3)
        with pytest.raises(KeyboardInterrupt):
            torch.ops.promise.interrupted(x)
        return x * 2

    assert reproduces(path, program).tolist() == [2.0, 2.0, 2.0]
    assert RecordKind.storage_import in kinds(path)


def test_every_execution_starts_afresh_although_a_custom_op_hides_that_it_writes(path: Path) -> None:
    library = torch.library.Library("promise2", "FRAGMENT")
    library.define("hidden(Tensor x) -> Tensor")
    library.impl("hidden", lambda x: (x.add_(1), x.clone())[1], "CompositeExplicitAutograd")
    x = torch.ones(3)
    assert reproduces(path, lambda: torch.ops.promise2.hidden(x)).tolist() == [2.0, 2.0, 2.0]


def _fill(x: torch.Tensor) -> None:
    x.fill_(7)


def test_memory_that_another_process_writes_enters_again(path: Path) -> None:
    x = torch.ones(4).share_memory_()

    def program() -> torch.Tensor:
        before = x * 2
        child = mp.get_context("fork").Process(target=_fill, args=(x,))
        child.start()
        child.join()
        return before + x

    assert reproduces(path, program).tolist() == [9.0] * 4


@pytest.mark.parametrize("activation", [F.silu, F.mish])
def test_a_backward_with_a_kernel_of_its_own_is_not_taken_apart(path: Path, activation: Callable[..., Any]) -> None:
    x = torch.randn(64, 64, requires_grad=True)

    def program() -> torch.Tensor:
        x.grad = None
        activation(x).sum().backward()
        assert x.grad is not None
        return x.grad.clone()

    expected = program()
    assert torch.equal(reproduces(path, program), expected)


def test_flushing_denormals_is_noticed_when_it_changes(path: Path) -> None:
    x = torch.full((4,), 1e-38)

    def program() -> list[float]:
        try:
            kept = [(x * 0.1).sum().item() for _ in range(3)]
            torch.set_flush_denormal(True)
            flushed = [(x * 0.1).sum().item() for _ in range(3)]
        finally:
            torch.set_flush_denormal(False)
        return kept + flushed + [(x * 0.1).sum().item() for _ in range(3)]

    values = reproduces(path, program)
    assert all(values[:3]) and not any(values[3:6]) and all(values[6:])
    assert kinds(path).count(RecordKind.global_state) == 2


def test_memory_of_a_dead_array_is_not_taken_for_new_memory_at_its_address(path: Path) -> None:
    def program() -> float:
        total = 0.0
        for step in range(60):
            batch = torch.from_numpy(np.full((64,), step, dtype=np.float32))
            labels = torch.tensor([float(step)] * 64)
            total += (batch * labels).sum().item()
            del batch, labels
        return total

    assert reproduces(path, program) == sum(64.0 * step * step for step in range(60))


def test_arguments_that_are_results_without_saying_so_are_no_unseen_writes(path: Path) -> None:
    x, model = torch.randn(4, 5), torch.nn.Linear(5, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)

    def program() -> None:
        F.rrelu(x, training=True)
        torch.vmap(lambda row: F.dropout(row, 0.5), randomness="same")(x)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

    reproduces(path, program)


def test_running_statistics_of_a_batch_norm_are_among_what_is_compared(path: Path) -> None:
    norm, x = torch.nn.BatchNorm1d(5), torch.randn(4, 5)
    with replayfmt.capture(path), replayfmt.scope("execute"):
        norm(x)
    norm.eval()
    with replayfmt.open(path) as capture:
        digests = [record for record in capture.reader.records() if record.kind is RecordKind.digest]
        compared = [record.argument("tensor") for record in digests]
    assert sum(tensor.meta.sizes == (5,) for tensor in compared) >= 2  # type: ignore[union-attr]


def test_lazy_bits_on_a_call_that_looks_the_same_are_seen(path: Path) -> None:
    x = torch.randn(3, dtype=torch.complex64)
    y = torch.randn(3)

    def program() -> list[torch.Tensor]:
        given = [x, x, x, x.conj(), x, y, y, y, torch._neg_view(y), y]
        return [value.clone() for value in given]

    assert torch.equal(reproduces(path, program)[8], -y)


def test_scalars_differ_bitwise_by_type_and_by_the_sign_of_zero() -> None:
    from replayfmt.replay.verification import _same_scalar

    assert _same_scalar(math.nan, math.nan) and _same_scalar(-0.0, -0.0) and _same_scalar([1, 2.5], [1, 2.5])
    assert not _same_scalar(0.0, -0.0) and not _same_scalar(True, 1) and not _same_scalar(1, 1.0)
    assert not _same_scalar(0j, complex(0.0, -0.0))


@pytest.mark.parametrize(
    "lengthen",
    [
        lambda view: view.resize_(100),
        lambda view: view.resize_as_(torch.ones(100)),
        lambda view: torch.add(torch.ones(100), 1, out=view.resize_(0)),
    ],
)
def test_memory_that_could_not_be_made_longer_cannot_in_the_replay(
    path: Path, lengthen: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    buffer = np.arange(4, dtype=np.float32)

    def program() -> torch.Tensor:
        base = torch.from_numpy(buffer)
        view = base[:]
        with pytest.raises(RuntimeError, match="not resizable"):
            lengthen(view)
        return base + 1

    assert reproduces(path, program).tolist() == [1.0, 2.0, 3.0, 4.0]
