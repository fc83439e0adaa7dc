"""Ops that differ from themselves on the same inputs: named, and what depends on them is compared within tolerances,
while everything else stays bit for bit.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Tools
from in_process import tools as tools

import replayfmt
from replayfmt.format.codes import RecordKind
from replayfmt.format.model import Record
from replayfmt.format.reader import open_capture
from replayfmt.replay.plan import Plan
from replayfmt.replay.results import ReplayResult
from replayfmt.replay.run import run_twice

from .conftest import Captured
from .rewriting import rewrite

CHANCE = random.Random()
KEPT: list[torch.Tensor] = []


def noise(x: torch.Tensor) -> torch.Tensor:
    """`x` with its first element off by some units in the last place, others at each call."""
    noisy = x.clone()
    noisy.view(-1)[:1].view(torch.int32).add_(CHANCE.randrange(256))
    return noisy


def noise_(x: torch.Tensor) -> torch.Tensor:
    return x.copy_(noise(x))


def seldom(x: torch.Tensor) -> torch.Tensor:
    """Differs from itself in a third of its calls."""
    return noise(x) if CHANCE.random() < 1 / 3 else x.clone()


def wild(x: torch.Tensor) -> torch.Tensor:
    """Differs from itself by more than rounding."""
    return x + CHANCE.randrange(10, 1000)


def mends(x: torch.Tensor) -> torch.Tensor:
    """Deterministic if that is asked for, like many of CUDA's kernels."""
    return x.clone() if torch.are_deterministic_algorithms_enabled() else noise(x)


def refuses(x: torch.Tensor) -> torch.Tensor:
    """Has no deterministic kernel, and says so."""
    if torch.are_deterministic_algorithms_enabled():
        raise RuntimeError("refuses does not have a deterministic implementation")
    return noise(x)


CAPTURED_ON: list[bool] = []  # whether `pivots` finds zeros, instead of looking


def pivots(x: torch.Tensor) -> torch.Tensor:
    """Asks scratch memory that it never writes whether it is zero, as LAPACK's gelsy does its pivots."""
    # New pages: the C library's heap keeps at most 64 MB that it could give out again.
    zero = CAPTURED_ON[0] if CAPTURED_ON else not torch.empty(1 << 26, dtype=torch.int32)[1 << 25]
    return x.clone() if zero else x * (1 + 2**-20)


@pytest.fixture(scope="module", autouse=True)
def _operators() -> Iterator[None]:
    operators = torch.library.Library("chancetest", "FRAGMENT")  # a worker may come back to this module: made anew then

    def define(schema: str, function: Callable[..., Any]) -> None:
        operators.define(schema)
        operators.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")

    for function in (noise, seldom, wild, mends, refuses, pivots):
        define(f"{function.__name__}(Tensor x) -> Tensor", function)
    define("noise_(Tensor(a!) x) -> Tensor(a!)", noise_)
    yield
    operators._destroy()


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    CHANCE.seed(7)
    yield
    KEPT.clear()


ops = torch.ops.chancetest


def executed(path: Path, verify: str = "auto", **options: Any) -> ReplayResult:
    with Plan(path, **options) as plan:
        return plan.execute(verify=verify, keep_going=options.get("keep_going", False))  # type: ignore[arg-type]


def in_a_scope(program: Callable[[], Any]) -> Callable[[], None]:
    """The program in a scope, at whose end all it leaves is alive."""

    def scoped() -> None:
        with replayfmt.scope("step"):
            KEPT.append(program())

    return scoped


def changed(path: Path, out: Path, kernel: str, value: float) -> Path:
    """A capture whose call of a kernel has another number among its arguments."""
    with open_capture(path) as reader:
        names = [None if each is None else each.name for each in reader.kernels]

    def change(record: Record, _ints: list[int], floats: list[float]) -> None:
        if record.kind is RecordKind.op and names[record.signature.kernel] == kernel:
            floats[-1] = value

    return rewrite(path, out, change=change)


@pytest.mark.slow
@pytest.mark.parametrize("digests", ["live", "ops"])
@pytest.mark.parametrize("name", ["noise", "noise_", "seldom", "mends"])
def test_an_op_that_differs_from_itself_is_named_and_what_follows_from_it_is_compared_within_tolerances(
    captured: Captured, digests: str, name: str
) -> None:
    def program() -> torch.Tensor:
        hidden = getattr(ops, name)(torch.rand(100) + 1)
        for _ in range(5):
            hidden = hidden * 1.5 + 1
        return hidden

    path = captured(in_a_scope(program), digests=digests)
    outcomes = [executed(path) for _ in range(8)]
    for result in outcomes:
        assert (result.outcome, result.divergence) == ("ok", None)
        if result.verification.mode == "close":
            assert f"chancetest::{name}.default): 1 of 100 elements differ" in result.nondeterministic[0]
            assert "nondeterministic" in result.verified and result.verification.inexact > 0
            assert result.verification.tolerances == {"float32": 1e-3}
    assert "close" in [result.verification.mode for result in outcomes]


@pytest.mark.slow
def test_an_op_whose_kernel_reads_memory_that_nothing_wrote_is_named(captured: Captured) -> None:
    CAPTURED_ON.append(False)
    path = captured(in_a_scope(lambda: ops.pivots(torch.ones(100)) * 2))
    CAPTURED_ON.clear()
    result = executed(path)
    assert result.outcome == "ok" and result.verification.mode == "close"
    assert "chancetest::pivots.default): its kernel reads memory that nothing wrote: 100" in result.nondeterministic[0]


def test_what_was_found_is_known_to_the_next_execution(captured: Captured) -> None:
    path = captured(lambda: ops.noise(torch.rand(8) + 1))
    with Plan(path) as plan:
        results = [plan.execute(verify="auto") for _ in range(6)]
        assert all(result.outcome == "ok" for result in results)
        assert all(result.nondeterministic for result in results[results.index(find(results)) :])
        strict = [plan.execute(verify="bitwise") for _ in range(5)]
    assert any(result.outcome == "mismatched" and result.nondeterministic for result in strict)


def find(results: list[ReplayResult]) -> ReplayResult:
    return next(result for result in results if result.nondeterministic)


@pytest.mark.slow
def test_a_real_difference_that_follows_from_no_such_op_is_found(captured: Captured, tmp_path: Path) -> None:
    def program() -> tuple[torch.Tensor, torch.Tensor]:
        noisy = ops.noise(torch.rand(8) + 1)
        return noisy * 2.0, torch.full((8,), 3.0).sin()

    path = captured(in_a_scope(lambda: KEPT.extend(program())), digests="live")
    wrong = changed(path, tmp_path / "wrong.opreplay", "aten::full", 3.0000002)
    for result in [executed(wrong) for _ in range(4)]:
        assert result.outcome == "mismatched"
        assert result.divergence is not None and result.divergence.expected.startswith("8 elements")
    assert all(executed(path).outcome == "ok" for _ in range(4))


def test_a_real_difference_behind_such_an_op_is_found_if_it_is_larger_than_rounding(
    captured: Captured, tmp_path: Path
) -> None:
    def program() -> torch.Tensor:
        return torch.full((8,), 3.0).add(ops.noise(torch.rand(8) + 1))

    path = captured(in_a_scope(program), digests="live")
    wrong = changed(path, tmp_path / "wrong.opreplay", "aten::full", 3.1)
    assert all(executed(wrong).outcome == "mismatched" for _ in range(4))


def test_a_kernel_that_is_wrong_and_nondeterministic_is_wrong(captured: Captured) -> None:
    path = captured(lambda: ops.wild(torch.rand(8)))
    result = executed(path)
    assert result.outcome == "mismatched"
    assert "chancetest::wild.default): 8 of 8 elements differ" in result.nondeterministic[0]


@pytest.mark.slow
def test_memory_that_is_overwritten_depends_on_what_it_held_no_longer(captured: Captured, tmp_path: Path) -> None:
    def program() -> torch.Tensor:
        buffer = torch.rand(8) + 1
        ops.noise_(buffer)
        buffer.zero_().add_(torch.full((8,), 3.0))
        return buffer

    path = captured(lambda: KEPT.append(program()))
    wrong = changed(path, tmp_path / "wrong.opreplay", "aten::full", 3.0000002)
    # The wrong value is made before the scope's end, where its own digest is left out.
    with open_capture(wrong) as reader:
        full = next(
            record.ordinal
            for record in reader.records()
            if record.kind is RecordKind.op and reader.kernels[record.signature.kernel].name == "aten::full"  # type: ignore[union-attr]
        )
    lenient = rewrite(
        wrong,
        tmp_path / "undigested.opreplay",
        change=lambda record, _ints, _floats: (
            False if record.kind is RecordKind.digest and record.argument("of") == full else None
        ),
    )
    for result in [executed(lenient) for _ in range(4)]:
        assert result.divergence is not None and result.divergence.what == "aten::add_.Tensor"


@pytest.mark.slow
def test_what_the_program_reads_of_such_results_is_compared_within_tolerances(
    captured: Captured, tmp_path: Path
) -> None:
    def program() -> None:
        noisy = ops.noise(torch.rand(8) + 1)
        noisy.sum().item()
        noisy[0].item()
        noisy.tolist()

    path = captured(program, digests="live")
    for verify in ("auto", "none"):
        results = [executed(path, verify) for _ in range(6)]
        assert all(result.outcome == "ok" for result in results)
        assert any(result.nondeterministic for result in results)
    read = next(result for result in (executed(path) for _ in range(8)) if result.verification.inexact)
    assert "scalars 0.001" in read.verification.tolerance


@pytest.mark.slow
def test_integers_that_depend_on_such_an_op_must_be_equal(captured: Captured) -> None:
    path = captured(lambda: KEPT.append(ops.noise(torch.rand(8) + 1).view(torch.int32) + 1))
    assert "mismatched" in [executed(path).outcome for _ in range(8)]


@pytest.mark.slow
def test_many_independent_ones_are_found_at_once_and_named_by_operator(captured: Captured) -> None:
    def program() -> None:
        for _ in range(30):
            KEPT.append(ops.noise(torch.rand(8) + 1) * 2)
            KEPT.append(ops.refuses(torch.rand(8) + 1) * 2)

    path = captured(in_a_scope(program))
    result = executed(path)
    assert (result.outcome, result.verification.mode, len(result.nondeterministic)) == ("ok", "close", 2)
    assert "more of its calls, up to ordinal" in result.nondeterministic[0]


def test_an_op_that_could_not_be_run_twice_is_no_silent_gap(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = captured(lambda: KEPT.extend(ops.noise(torch.rand(8) + 1) for _ in range(8)))

    def no_memory(_clones: Any, _value: Any) -> None:
        raise torch.OutOfMemoryError("no memory is left for a copy")

    monkeypatch.setattr(run_twice.Clones, "of", no_memory)
    result = executed(path)
    assert result.outcome == "mismatched"
    assert "could not be run twice: no memory is left for a copy" in result.nondeterministic[-1]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("noise", "torch.use_deterministic_algorithms(True) does not make it deterministic"),
        ("mends", "torch.use_deterministic_algorithms(True) makes it deterministic"),
        ("refuses", "PyTorch has no deterministic kernel for it"),
    ],
)
def test_bitwise_if_asked_for_stays_strict_and_says_what_would_make_the_op_deterministic(
    captured: Captured, tools: Tools, name: str, remedy: str
) -> None:
    path = captured(lambda: KEPT.extend(getattr(ops, name)(torch.rand(8) + 1) for _ in range(8)))
    ran = tools("run", "--verify=bitwise", path)
    assert ran.code == 1
    assert "differs: bitwise" in ran.out
    assert f"chancetest::{name}.default)" in ran.err and remedy in ran.err
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_command_says_so_and_exits_with_0_as_text_and_as_a_row(captured: Captured, tools: Tools) -> None:
    path = captured(lambda: KEPT.extend(ops.noise(torch.rand(8) + 1) for _ in range(8)))
    ran = tools("run", path)
    assert ran.code == 0, ran.err
    assert "verified: close\n  why: " in ran.out and "nondeterministic op" in ran.out
    assert "  nondeterministic: ordinal " in ran.out and "of these differ within the tolerances" in ran.out
    ran = tools("run", "--format=jsonl", path)
    row = json.loads(ran.out.splitlines()[0])
    assert (ran.code, row["outcome"], row["verification"]["mode"], row["divergence"]) == (0, "ok", "close", None)
    assert row["verification"]["inexact"] > 0 and "chancetest::noise" in row["nondeterministic"][0]


def test_the_library_says_so(captured: Captured) -> None:
    path = captured(lambda: KEPT.extend(ops.noise(torch.rand(8) + 1) for _ in range(8)))
    replayed = replayfmt.run(path)
    assert replayed.outcome == "ok" and replayed.result.nondeterministic
    assert replayed.verified.startswith("close (") and "nondeterministic op" in replayed.verified


@pytest.mark.slow
def test_a_benchmark_and_verdicts_on_every_op_take_them_for_what_they_are(captured: Captured, tools: Tools) -> None:
    def program() -> None:
        KEPT.extend(ops.noise(torch.rand(8) + 1) for _ in range(8))
        ops.noise(torch.rand(8) + 1).sum().item()

    path = captured(in_a_scope(program))
    ran = tools("benchmark", "--benchmark-min-time=3x", "--benchmark-repetitions=2", path)
    assert ran.code == 0, ran.err
    result = executed(path, keep_going=True)
    assert result.outcome == "ok" and {each.verdict for each in result.verdicts or ()} == {"ok"}
    assert result.nondeterministic


@pytest.mark.slow
def test_a_part_that_follows_from_such_an_op_can_be_taken_out(
    captured: Captured, tools: Tools, trim_here: None, tmp_path: Path
) -> None:
    def program() -> None:
        with replayfmt.scope("before"):
            noisy = ops.noise(torch.rand(8) + 1)
        with replayfmt.scope("part"):
            KEPT.append(noisy * 2)

    path, out = captured(program), tmp_path / "part.opreplay"
    for _ in range(4):
        ran = tools("trim", "--scope=part", "--force", path, out)
        assert ran.code == 0, ran.err
        assert executed(out).verification.mode in ("bitwise", "close")
