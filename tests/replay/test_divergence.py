"""What differs is found, named and never passed over: negative controls for every kind of comparison."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import replayfmt
from replayfmt.format.codes import OpStatus, RecordKind, ValueKind
from replayfmt.format.model import Record
from replayfmt.format.reader import open_capture
from replayfmt.replay.plan import Plan
from replayfmt.replay.results import ReplayResult, SampleDistance

from .conftest import Captured
from .rewriting import rewrite


def executed(path: Path, verify: str = "bitwise") -> ReplayResult:
    with Plan(path) as plan:
        return plan.execute(verify=verify)  # type: ignore[arg-type]


def ordinal_of(path: Path, kernel: str, occurrence: int = 0) -> int:
    with open_capture(path) as reader:
        found = [
            record.ordinal
            for record in reader.records()
            if record.kind is RecordKind.op and reader.kernels[record.signature.kernel].name == kernel
        ]  # type: ignore[union-attr]
    return found[occurrence]


def is_op(reader_path: Path, record: Record, kernel: str) -> bool:
    with open_capture(reader_path) as reader:
        return record.kind is RecordKind.op and reader.kernels[record.signature.kernel].name == kernel  # type: ignore[union-attr]


def test_one_flipped_bit_of_content_is_named_at_the_first_op_that_reads_it(captured: Captured, tmp_path: Path) -> None:
    first, second = torch.randn(8), torch.randn(8)

    def program() -> None:
        with replayfmt.scope("execute"):
            first.exp()
            second.mul(3)

    source = captured(program)
    changed = rewrite(
        source,
        tmp_path / "changed.opreplay",
        payload=lambda number, content: bytes([content[0] ^ 1]) + content[1:] if number == 2 else content,
    )
    result = executed(changed)
    assert result.outcome == "mismatched"
    divergence = result.divergence
    assert divergence is not None
    assert (divergence.ordinal, divergence.what) == (ordinal_of(changed, "aten::mul"), "aten::mul.Tensor")
    assert (divergence.result, divergence.scope) == (0, "execute")
    assert "1 of 8 sampled elements differ" in str(divergence)
    assert isinstance(divergence.distance, SampleDistance) and divergence.distance.differing == 1
    assert 0 < (divergence.distance.absolute or 0) < 1e-5 and 0 < (divergence.distance.relative or 0) < 1e-6
    place = f"ordinal {divergence.ordinal} (aten::mul.Tensor), result 0, scope execute: expected 8 elements"
    assert place in str(divergence)
    assert executed(changed, "close").outcome == "ok"  # one bit is within float32's tolerance


def test_what_differs_at_the_end_is_named_with_the_op_that_wrote_it_last(captured: Captured, tmp_path: Path) -> None:
    first, kept = torch.randn(8), []

    def program() -> None:
        with replayfmt.scope("execute"):
            made = first * 2
            made.view(2, 4).add_(1)
            kept.append(made.view(4, 2))  # a view writes nothing
            first.exp()

    source = captured(program, digests="live")
    changed = rewrite(
        source,
        tmp_path / "changed.opreplay",
        payload=lambda _number, content: content[:2] + bytes([content[2] ^ 0x40]) + content[3:],
    )
    divergence = executed(changed).divergence
    assert divergence is not None and divergence.what == "a tensor that is alive here"
    assert divergence.written_by == ordinal_of(changed, "aten::add_")
    assert f"last written by ordinal {divergence.written_by} (aten::add_" in str(divergence)


def test_a_lost_generator_state_is_noticed(captured: Captured, tmp_path: Path) -> None:
    source = captured(lambda: torch.randn(16))
    changed = rewrite(
        source,
        tmp_path / "changed.opreplay",
        change=lambda record, ints, floats: record.kind is not RecordKind.generator_state,
    )
    for verify in ("bitwise", "close"):
        divergence = executed(changed, verify).divergence
        assert divergence is not None and divergence.what == "aten::randn.default"


def test_a_changed_argument_is_noticed(captured: Captured, tmp_path: Path) -> None:
    source = captured(lambda: torch.full((4,), 2.0).mul(3.0))

    def change(record: Record, ints: list[int], floats: list[float]) -> None:
        if is_op(source, record, "aten::mul"):
            floats[0] = 3.1

    changed = rewrite(source, tmp_path / "changed.opreplay", change=change)
    for verify in ("bitwise", "close"):
        divergence = executed(changed, verify).divergence
        assert divergence is not None and divergence.what == "aten::mul.Tensor"
    assert executed(changed, "none").outcome == "ok"  # nobody looked


def test_a_scalar_the_program_read_is_compared_even_without_verification(captured: Captured, tmp_path: Path) -> None:
    source = captured(lambda: torch.full((4,), 2.0).sum().item(), digests="none")

    def change(record: Record, ints: list[int], floats: list[float]) -> None:
        if is_op(source, record, "aten::_local_scalar_dense"):
            floats[0] = 8.5

    changed = rewrite(source, tmp_path / "changed.opreplay", change=change)
    divergence = executed(changed, "none").divergence
    assert divergence is not None
    assert (divergence.what, divergence.expected, divergence.got) == ("aten::_local_scalar_dense.default", "8.5", "8.0")
    assert divergence.distance == SampleDistance(1, 1, 0.5, 0.5 / 8.5)
    assert "; apart by 0.5 (relative 0.0588)" in str(divergence)
    assert (divergence.written_by, divergence.writer) == (ordinal_of(changed, "aten::sum"), "aten::sum.default")


def test_a_result_of_another_shape_is_noticed(captured: Captured, tmp_path: Path) -> None:
    source = captured(lambda: torch.zeros(2, 3).sum(0))

    def change(record: Record, ints: list[int], floats: list[float]) -> None:
        if is_op(source, record, "aten::sum"):
            ints[0] = 1

    changed = rewrite(source, tmp_path / "changed.opreplay", change=change)
    divergence = executed(changed).divergence
    assert divergence is not None and divergence.what == "aten::sum.dim_IntList"
    assert "float32[3]" in divergence.expected and "float32[2]" in divergence.got


def test_an_op_that_aliases_where_the_captured_one_did_not_is_noticed(captured: Captured, tmp_path: Path) -> None:
    def program() -> torch.Tensor:
        return torch.arange(4.0).view(2, 2).clone()

    source = captured(program)
    with open_capture(source) as reader:
        schema = torch.ops.aten.alias.default._schema
        clone = next(kernel for kernel in reader.kernels[1:] if kernel is not None and kernel.name == "aten::clone")

    from dataclasses import replace

    changed = rewrite(
        source,
        tmp_path / "changed.opreplay",
        kernel=lambda kernel: (
            replace(kernel, name="aten::alias", overload="default", schema=str(schema)) if kernel == clone else kernel
        ),
    )
    divergence = executed(changed).divergence
    assert divergence is not None and divergence.what == "aten::alias.default"
    assert divergence.expected == "memory of its own"


def test_an_op_that_no_longer_raises_is_a_divergence(captured: Captured, tmp_path: Path) -> None:
    def program() -> None:
        torch.ones(2).add(1)

    source = captured(program, digests="live")

    from dataclasses import replace

    with open_capture(source) as reader:
        kernels = [None if kernel is None else kernel.name for kernel in reader.kernels]

    def raising(signature):  # type: ignore[no-untyped-def]
        if signature.kernel and kernels[signature.kernel] == "aten::add":
            return replace(signature, results=(), status=OpStatus.raised)
        return signature

    # Its result is gone from the record, so its tensor slot has to go as well: add has one argument tensor.
    changed = tmp_path / "changed.opreplay"
    with open_capture(source) as reader:
        add = next(
            record
            for record in reader.records()
            if record.signature.kernel and kernels[record.signature.kernel] == "aten::add"
        )
        assert [node.kind for node in add.signature.results] == [ValueKind.tensor]
    rewrite(source, changed, signature=raising, drop_results_of=add.ordinal, records=add.ordinal + 1)
    divergence = executed(changed, "auto").divergence
    assert divergence is not None and "now it does not" in divergence.got


def test_ops_that_differ_from_themselves_are_named_beside_a_mismatch(captured: Captured, tmp_path: Path) -> None:
    state = {"calls": 0}

    @torch.library.custom_op("replaytest::unsteady", mutates_args=())
    def unsteady(x: torch.Tensor) -> torch.Tensor:
        state["calls"] += 1
        return x + state["calls"]

    result = executed(captured(lambda: unsteady(torch.zeros(4)).sum()))
    assert result.divergence is not None and result.divergence.what == "replaytest::unsteady.default"
    assert len(result.nondeterministic) == 1
    assert "replaytest::unsteady.default): 4 of 4 elements differ, by at most 1" in result.nondeterministic[0]


def test_a_run_that_differs_does_not_say_verified(
    captured: Captured, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from opreplay_tools import run

    calls = iter(range(100))

    @torch.library.custom_op("replaytest::counting", mutates_args=())
    def counting(x: torch.Tensor) -> torch.Tensor:
        return x + next(calls)

    path = captured(lambda: counting(torch.zeros(4)))
    monkeypatch.setattr("sys.argv", ["opreplay-run", str(path)])
    with pytest.raises(SystemExit) as leaving:
        run.main()
    out, err = capsys.readouterr()
    assert leaving.value.code == 1
    assert "differs: bitwise" in out and "verified" not in out
    first, second = err.splitlines()
    assert first.startswith(f"DATA_LOSS: {path}: the replay differs from the capture: ordinal ")
    assert second.startswith("  results differ between two runs: ordinal ")


def test_close_compares_statistics_and_integers_exactly() -> None:
    from replayfmt.format.codes import DType
    from replayfmt.pytorch.tensors.digests import digest_tensor
    from replayfmt.replay.verification import digests_differ

    base = torch.randn(1000)
    digest = digest_tensor(base)
    assert digests_differ(digest, digest_tensor(base * (1 + 1e-5)), DType.float32) is None
    assert digests_differ(digest, digest_tensor(base * 1.01), DType.float32) is not None
    assert digests_differ(digest, digest_tensor(base.flip(0)), DType.float32) is not None  # the sample tells
    with_nan = base.clone()
    with_nan[500] = float("nan")
    assert digests_differ(digest, digest_tensor(with_nan), DType.float32) == ("nan 0", "nan 1")
    numbers = torch.arange(1000)
    off = numbers.clone()
    off[501] += 1
    assert digests_differ(digest_tensor(numbers), digest_tensor(off), DType.int64) is not None
    half = digest_tensor(base.bfloat16())
    assert digests_differ(half, digest_tensor(base.bfloat16() * 1.01), DType.bfloat16) is None
    mask = torch.arange(1000) % 2 == 0
    masked, other = (
        digest_tensor(values.masked_fill(mask, torch.finfo(torch.float32).min)) for values in (base, base.flip(0))
    )
    assert digests_differ(masked, other, DType.float32) is not None  # what is masked makes nothing else close


@pytest.mark.parametrize(
    ("session", "reason"),
    [
        ({"torch_version": "2.12.0"}, "torch"),
        ({"cpu_capability": "AVX1"}, "CPU capability"),
        ({"cpu": "abacus"}, "CPU"),
        ({"libraries": {"mkl": "0.1"}}, "mkl"),
    ],
)
def test_auto_is_close_elsewhere_and_says_why(
    captured: Captured, tmp_path: Path, session: dict[str, str], reason: str
) -> None:
    path = rewrite(captured(lambda: torch.randn(3)), tmp_path / "elsewhere.opreplay", session=session)
    verification = executed(path, "auto").verification
    assert verification.mode == "close"
    assert any(reason in each for each in verification.reasons)
    assert verification.text.startswith("close (")


def test_the_largest_distance_is_told_where_close_is_close_enough(captured: Captured, tmp_path: Path) -> None:
    numbers = torch.tensor([1.0, 2.0, 4.0])
    source = captured(lambda: numbers.mul(1.0))
    off = bytes(torch.tensor([1.0, 2.0001, 4.0]).view(torch.uint8).tolist())
    changed = rewrite(source, tmp_path / "changed.opreplay", payload=lambda _number, _content: off)
    found = executed(changed, "close")
    assert found.outcome == "ok" and found.verification.inexact
    rms = (21 / 3) ** 0.5
    assert found.verification.largest["float32"] == pytest.approx(0.0001 / rms, rel=0.05)
    assert "within the tolerances, at most by float32 3.8e-05" in found.verification.text
    assert executed(source).verification.largest == {}
