"""Results with bytes that nobody defines, or with addresses: found by running an operator twice, never compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Ran, Tools
from torch.nn.attention import SDPBackend, sdpa_kernel

import replayfmt
from replayfmt.errors import InvalidCapture, UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture
from replayfmt.pytorch.operators import OpaqueResults, OpaqueSpec
from replayfmt.pytorch.tensors.memory import TORCH_DTYPE, byte_tensor, make_view, new_storage
from replayfmt.replay.plan import Plan
from replayfmt.replay.results import ReplayResult
from replayfmt.replay.run import run_twice

from .conftest import Captured
from .rewriting import rewrite

LIBRARIES: list[torch.library.Library] = []  # a worker may come back to this module: made anew then


def operator(schema: str, function: Callable[..., Any]) -> None:
    LIBRARIES[-1].define(schema)
    LIBRARIES[-1].impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")


@pytest.fixture(scope="module", autouse=True)
def _operators() -> Iterator[None]:
    LIBRARIES.append(torch.library.Library("opaquetest", "FRAGMENT"))
    operator("half_written(Tensor x) -> (Tensor, Tensor)", half_written)
    operator("addresses(Tensor x) -> Tensor", addresses)
    operator("chance(Tensor x) -> Tensor", lambda x: x + next(CHANCES))
    yield
    LIBRARIES.pop()._destroy()


CHANCES = iter(range(10**6))


def half_written(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Twice its argument, and a table of which it writes the first half. What new memory holds may be the same again by
    chance; here it is what a search asked for, and otherwise never the same."""
    table = torch.empty(2 * x.numel(), dtype=x.dtype)
    rest = table[x.numel() :]
    if FILLS:
        rest.view(torch.uint8).fill_(FILLS[-1])
    else:
        rest.fill_(float(next(CHANCES)))
    table[: x.numel()] = x
    return x * 2, table


FILLS: list[int] = []  # of the searches that are under way


@pytest.fixture(autouse=True)
def _noted_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    fill_new_memory = run_twice._new_memory_filled

    @contextmanager
    def noted(fill: int, *args: Any) -> Iterator[None]:
        FILLS.append(fill)
        try:
            with fill_new_memory(fill, *args):
                yield
        finally:
            FILLS.pop()

    monkeypatch.setattr(run_twice, "_new_memory_filled", noted)


def addresses(x: torch.Tensor) -> torch.Tensor:
    """A record in bytes, as a kernel's scheduler makes it: pointers beside numbers, padding that nobody writes."""
    record = torch.empty(64, dtype=torch.int8)
    record.view(torch.int64)[:4] = torch.tensor([record.data_ptr(), 7, record.data_ptr() + 8, 3])
    return record


def ctc() -> torch.Tensor:
    probabilities, targets = torch.randn(12, 3, 6).log_softmax(2), torch.randint(1, 6, (3, 5))
    loss, table = torch._ctc_loss(probabilities, targets, [12, 9, 7], [5, 2, 3])
    KEPT.append(table)
    return loss


KEPT: list[torch.Tensor] = []


def executed(path: Path, verify: str = "auto", **options: Any) -> ReplayResult:
    with Plan(path, **options) as plan:
        return plan.execute(verify=verify)  # type: ignore[arg-type]


def named(result: ReplayResult) -> list[tuple[str, int]]:
    return [(each.op, each.index) for each in result.opaque_results]


@pytest.mark.parametrize("digests", ["ops", "live"])
@pytest.mark.parametrize(
    ("name", "index", "why"),
    [
        ("half_written", 1, "400 of its 800 bytes are left unwritten"),
        ("addresses", 0, "2 of its 8 words are addresses"),
    ],
)
def test_what_an_operator_leaves_undefined_is_found_and_named_and_all_else_compared(
    captured: Captured, digests: str, name: str, index: int, why: str
) -> None:
    def program() -> None:
        with replayfmt.scope("execute"):
            KEPT.append(getattr(torch.ops.opaquetest, name)(torch.randn(100)))
            KEPT.append(torch.randn(8).sin())

    try:  # no replay gets the memory that the capture had, with the same addresses
        path = captured(program, digests=digests)
        with Plan(path) as plan:
            for _ in range(2):  # what was found once is known from then on
                result = plan.execute(verify="auto")
                assert (result.outcome, result.divergence, result.nondeterministic) == ("ok", None, ())
                assert named(result) == [(f"opaquetest::{name}.default", index)]
                assert result.opaque_results[0].why == f"found by running it twice: {why}"
                assert result.verification.digests > 0
        with Plan(path, keep_going=True) as plan:
            result = plan.execute(verify="auto", keep_going=True)
            assert result.outcome == "ok" and named(result) == [(f"opaquetest::{name}.default", index)]
    finally:
        KEPT.clear()


def test_a_wrong_result_beside_an_undefined_one_is_still_found(captured: Captured, tmp_path: Path) -> None:
    def program() -> None:
        KEPT.append(torch.ops.opaquetest.half_written(torch.full((10,), 2.0)))
        KEPT.append(torch.full((4,), 3.0).sin())

    path = captured(program)
    KEPT.clear()

    def changed(value: float) -> Path:
        def change(_record: Any, _ints: list[int], floats: list[float]) -> None:
            if floats == [value]:
                floats[0] = 9.0

        return rewrite(path, tmp_path / f"{value}.opreplay", change=change)

    for value, what in ((2.0, "aten::full.default"), (3.0, "aten::full.default")):
        result = executed(changed(value))
        assert result.divergence is not None and result.divergence.what == what
        assert result.outcome == "mismatched"


def test_chance_is_no_excuse(captured: Captured) -> None:
    path = captured(lambda: torch.ops.opaquetest.chance(torch.zeros(4)))
    result = executed(path)
    assert result.outcome == "mismatched" and result.opaque_results == ()
    assert "4 of 4 elements differ" in result.nondeterministic[0]


def test_known_results_are_not_digested_and_named_all_the_same(captured: Captured) -> None:
    path = captured(ctc)
    KEPT.clear()
    with open_capture(path) as reader:
        digested = [
            (record.argument("of"), record.argument("result"))
            for record in reader.records()
            if record.kind is RecordKind.digest
        ]
        (loss,) = [
            record.ordinal
            for record in reader.records()
            if record.kind is RecordKind.op and reader.kernels[record.signature.kernel].name == "aten::_ctc_loss"
        ]
    assert (loss, 0) in digested and (loss, 1) not in digested
    result = executed(path, "bitwise")
    assert result.outcome == "ok" and named(result) == [("aten::_ctc_loss.default", 1)]
    assert result.opaque_results[0].why == "the kernel leaves parts of it unwritten"


def test_a_user_names_results_when_capturing_and_the_capture_says_so(captured: Captured) -> None:
    def program() -> None:
        KEPT.append(torch.ops.opaquetest.half_written(torch.ones(10)))

    path = captured(program, opaque_results=["opaquetest::half_written:1"])
    KEPT.clear()
    with open_capture(path) as reader:
        assert reader.session.policies["opaque-results"] == "opaquetest::half_written:1"
        digested = [record.argument("result") for record in reader.records() if record.kind is RecordKind.digest]
    assert digested == [-1, 0] or digested == [0, 0]  # of ones, and of the first result
    result = executed(path)
    assert result.outcome == "ok" and result.opaque_results[0].why == "--opaque-result=opaquetest::half_written:1"


def test_a_user_names_results_when_replaying(captured: Captured, tools: Tools) -> None:

    path = captured(lambda: KEPT.append(torch.ops.opaquetest.chance(torch.zeros(4))))
    KEPT.clear()

    def run(*args: str) -> Ran:
        return tools("run", *args, path)

    assert run()[0] == 1
    for spec in ("opaquetest::chance", "opaquetest::chance:0", "opaquetest::chance.default:0"):
        code, out, err = run(f"--opaque-result={spec}")
        assert (code, err) == (0, "")
        assert f"  not compared: result 0 of opaquetest::chance.default, 1 call: --opaque-result={spec}" in out
    code, out, _err = run("--opaque-result=opaquetest::chance", "--format=jsonl")
    assert json.loads(out)["opaque_results"] == [
        {"op": "opaquetest::chance.default", "result": 0, "calls": 1, "why": "--opaque-result=opaquetest::chance"}
    ]
    for spec, said in (
        ("opaquetest::chance:1", "has 1 results, counted from 0"),
        ("aten::nothing", "no operator aten::nothing is called"),
        ("chance", "expected OPERATOR[:INDEX]"),
        ("a::b:x", "expected OPERATOR[:INDEX]"),
    ):
        code, out, err = run(f"--opaque-result={spec}")
        assert (code, out) == (2, "") and err.startswith("INVALID_ARGUMENT: ") and said in err, err


def test_specs_are_read_and_matched_by_operator_overload_and_index() -> None:
    assert OpaqueSpec.parse("a::b.c:2") == OpaqueSpec("a::b.c", 2)
    known = OpaqueResults(["a::b", "a::c.out:1"])
    assert dict(known.of("a::b", "default", 2)) == {0: "--opaque-result=a::b", 1: "--opaque-result=a::b"}
    assert list(known.of("a::c", "out", 2)) == [1] and not known.of("a::c", "default", 2)
    known.found("a::d", "default", 0, "seen")
    assert known.text == "a::b a::c.out:1 a::d.default:0"
    for wrong in ("", "b", "a::b:", "a::b:-1", "a::b::c", "a::b c::d", "a::b:99999"):
        with pytest.raises(UsageError, match="--opaque-result"):
            OpaqueSpec.parse(wrong)


def test_a_capture_whose_policy_is_no_list_of_results_is_invalid(captured: Captured, tmp_path: Path) -> None:
    source = captured(lambda: torch.ones(3).exp())
    path = rewrite(source, tmp_path / "odd.opreplay", session={"policies": {"opaque-results": "\x1b[31m"}})
    with pytest.raises(InvalidCapture, match="policy opaque-results"):
        Plan(path)


@pytest.mark.parametrize("dtype", list(TORCH_DTYPE.values()), ids=str)
def test_results_of_every_dtype_and_layout_are_compared_and_explained_by_the_bytes_of_their_own_elements(
    dtype: torch.dtype,
) -> None:
    size = dtype.itemsize
    for strides in ((4, 1), (1, 6), (8, 2)):  # the last has gaps, which hold something else each time
        storages = [new_storage(64 * size, torch.device("cpu")) for _ in range(3)]
        for value, storage in enumerate(storages):
            byte_tensor(storage).fill_(value)
        one, same, other = (make_view(each, dtype, (6, 4), strides, 1) for each in storages)
        bits = [run_twice._bits(each) for each in (one, same, other)]
        bits[1].copy_(bits[0])
        bits[2].copy_(bits[0])
        assert run_twice.same_elements(one, same) and run_twice.same_elements(one, other)
        element = byte_tensor(storages[2])[size * (1 + strides[0]) :][:size]
        element.fill_(0x5C)
        assert not run_twice.same_elements(one, other)
        assert run_twice._explained(one, other, []) is None  # of nothing is known what was in new memory
        said = run_twice._explained(one, other, [(other, 0x5C)])
        assert said == f"{size} of its {24 * size} bytes are left unwritten"
        assert run_twice._difference(one, other).startswith("1 of 24 elements differ")


def test_lazily_conjugated_and_negated_results_are_compared_by_what_they_are() -> None:
    x = torch.randn(6, dtype=torch.complex64)
    assert run_twice.same_elements(x.conj(), x.conj_physical())
    assert not run_twice.same_elements(x.conj(), x)
    assert run_twice.same_elements(x.imag, x.conj().imag.neg())
    assert run_twice._difference(x.conj(), x).startswith("6 of 6 elements differ")


def test_what_is_numerically_equal_is_no_difference() -> None:
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert run_twice._difference(torch.tensor([0.0, nan[0]]), torch.tensor([-0.0, nan[1]])) == ""
    close = torch.tensor([2**60, 2**60]), torch.tensor([2**60, 2**60 + 1])  # the same as float64
    assert run_twice._difference(*close).startswith("1 of 2 elements differ")


def test_what_is_left_unwritten_is_found_in_memory_that_was_just_freed(captured: Captured) -> None:
    def recycled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch.empty(1 << 10, dtype=torch.int64).fill_(next(CHANCES))  # freed, and taken again
        return x * 2, torch.empty(1 << 10, dtype=torch.int64)

    operator("recycled(Tensor x) -> (Tensor, Tensor)", recycled)
    path = captured(lambda: KEPT.extend(torch.ops.opaquetest.recycled(torch.ones(4))))
    KEPT.clear()
    with Plan(path) as plan:
        twice = run_twice.RunTwice(plan.generators)
        plan.run_with(twice)
    assert not twice.unsteady
    assert [(each.index, each.why) for each in twice.opaque] == [(1, "8192 of its 8192 bytes are left unwritten")]


def test_each_run_in_a_pool_finds_all_its_free_memory_filled_and_its_results_outlive_it(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    blocks = [{"size": 16, "state": "active_allocated"}, {"size": 48, "state": "inactive"}]
    pools = []

    class Pool:
        def snapshot(self) -> list[dict[str, Any]]:
            return [{"address": memory.data_ptr(), "blocks": blocks}] if pools else []  # empty before its first use

    @contextmanager
    def use(pool: Pool) -> Iterator[None]:
        pools.append(pool)
        yield

    def pooled(x: torch.Tensor) -> torch.Tensor:
        """Its result lies in the pool, and all but its first element is left unwritten."""
        result = memory[16:48] if pools else torch.zeros(32, dtype=torch.uint8)
        result[:1] = x[:1]
        return result

    fill_free = run_twice._fill_free
    monkeypatch.setattr(run_twice, "_fill_free", lambda free, _device, fill: fill_free(free, memory.device, fill))
    for name, fake in (("device", lambda _device: nullcontext()), ("MemPool", Pool), ("use_mem_pool", use)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    operator("pooled(Tensor x) -> Tensor", pooled)
    path = captured(lambda: KEPT.append(torch.ops.opaquetest.pooled(torch.ones(4, dtype=torch.uint8))))
    outcomes = []

    class Looker(run_twice.RunTwice):
        def _search(self, call: Any) -> None:
            if call.site.kernel.schema.name == "opaquetest::pooled":
                outcomes.extend(call.runs((7, 0, 9), {torch.device("cuda", 0): [32]}))

    with Plan(path) as plan:
        looker = Looker(plan.generators)
        plan.run_with(looker)
    assert not looker.left_out
    assert [each.values[0, ""].tolist() for each in outcomes] == [[1, *[fill] * 31] for fill in (7, 0, 9)]
    assert len(pools) == 4 and memory[:16].tolist() == [0] * 16  # a first run lets the pool grow


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("backend", "dtype", "seeds"),
    [
        (SDPBackend.EFFICIENT_ATTENTION, torch.float32, {2, 3}),
        (SDPBackend.FLASH_ATTENTION, torch.bfloat16, {6, 7}),
        (SDPBackend.CUDNN_ATTENTION, torch.bfloat16, {6, 7}),
    ],
    ids=str,
)
def test_seeds_that_attention_on_a_gpu_leaves_unwritten_are_no_nondeterminism(
    captured: Captured, backend: SDPBackend, dtype: torch.dtype, seeds: set[int]
) -> None:
    def program() -> None:
        x = torch.randn(2, 4, 128, 64, device="cuda", dtype=dtype, requires_grad=True)
        with sdpa_kernel(backend):
            KEPT.append(torch.nn.functional.scaled_dot_product_attention(x, x, x))

    path = captured(program, digests="ops")
    KEPT.clear()
    result = executed(path)
    assert (result.outcome, result.nondeterministic) == ("ok", ()), result.divergence
    with Plan(path) as plan:
        for repeats in (1, 3):  # more often: in a pool of its own
            twice = run_twice.RunTwice(plan.generators, repeats=repeats)
            plan.run_with(twice)
            assert (twice.unsteady, twice.left_out) == ({}, "")
        assert {each.index for each in twice.opaque} == seeds
