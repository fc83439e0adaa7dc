"""Captures made with payload=none, replayed: content that is safe for every use, and honesty about what it is not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import replayfmt
from replayfmt.errors import ReplayRefused
from replayfmt.format.codes import RecordKind, StorageOrigin, ValueKind
from replayfmt.format.model import Node, Record, Signature
from replayfmt.initializers import Initializer, Request
from replayfmt.replay.plan import Plan
from replayfmt.replay.results import ReplayResult

from .conftest import Captured, unknown_use
from .rewriting import rewrite


def replayed(path: Path, **options: Any) -> tuple[ReplayResult, Counter[str]]:
    """The result of a replay that ran, and how often each initializer was used."""
    with Plan(path, **options) as plan:
        result = plan.execute(verify="auto")
        assert plan.execute().outcome == result.outcome
        return result, Counter(each.initializer for each in plan.synthesis.initialized)


def content_of(path: Path, **options: Any) -> dict[int, torch.Tensor]:
    """What was put into each storage that was not captured, as one row of elements."""
    made = {}
    with Plan(path, **options) as plan:
        for each in plan.synthesis.initialized:
            storage = torch.empty(each.bytes, dtype=torch.uint8).untyped_storage()
            plan.synthesis.fill(each.storage, each.version, storage)
            made[each.storage] = torch.empty(0, dtype=each.tensor.dtype).set_(storage)
    return made


def _embedding() -> Callable[[], Any]:
    table, ids = torch.randn(11, 4), torch.tensor([[1, 10], [3, 4]])
    return lambda: F.embedding(ids.clone().view(4).to(torch.int32), table)


def _offset_positions() -> Callable[[], Any]:
    table, mask = torch.randn(12, 4), torch.ones(2, 8, dtype=torch.long)
    return lambda: F.embedding(mask.cumsum(1) - 1 + 2, table)


def _indexing() -> Callable[[], Any]:
    x, rows, columns = torch.randn(10, 7), torch.tensor([1, 2]), torch.tensor([3, 4, 6, 5])
    counts = torch.tensor([1, 0, 3])

    def run() -> None:
        x[rows], x[:, columns], x.index_select(0, rows), x.gather(1, columns.view(2, 2)), torch.take(x, rows + 5)
        F.one_hot(rows, 5), x[rows + 7], x[rows * 2], x.scatter_add(1, columns.view(1, 4) // 2, x)
        torch.repeat_interleave(x[:3], counts, dim=0)
        y = x.clone()
        y[rows] = 1.0
        y.index_add_(0, rows, x[:2]).index_copy_(0, rows, x[:2]).index_fill_(0, rows, 2.0)

    return run


def _bag() -> Callable[[], Any]:
    bag = torch.nn.EmbeddingBag(10, 4, mode="sum")
    ids, offsets = torch.tensor([1, 2, 4, 5, 4, 3]), torch.tensor([0, 2, 4])
    return lambda: bag(ids, offsets).sum().backward()


def _packed() -> Callable[[], Any]:
    lstm, x, lengths = torch.nn.LSTM(4, 5, batch_first=True), torch.randn(3, 6, 4), torch.tensor([2, 6, 4])
    return lambda: lstm(torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))


def _masks() -> Callable[[], Any]:
    x, mask = torch.randn(4, 5), torch.rand(4, 5) > 0.4
    return lambda: (
        x[mask],
        x.masked_fill(mask, 0),
        torch.nonzero(mask),
        torch.masked_select(x, mask),
        torch.where(mask, x, -x),
    )


def _training() -> Callable[[], Any]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    optimizer, x, y = torch.optim.AdamW(model.parameters()), torch.randn(4, 8), torch.tensor([0, 1, 2, 1])

    def step() -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return lambda: (step(), step())


def _drawing() -> Callable[[], Any]:
    x = torch.randn(4, 4)
    return lambda: (F.dropout(x, 0.5), torch.bernoulli(torch.sigmoid(x)), torch.multinomial(torch.softmax(x, -1), 2))


def _reading() -> Callable[[], Any]:
    x, index = torch.randn(4), torch.tensor([2])
    return lambda: (x.sum().item(), x[index], bool((x > 0).any()), x.tolist())


def _written_from_outside() -> Callable[[], Any]:
    array = np.arange(6)
    ids, table = torch.from_numpy(array), torch.randn(9, 4)

    def run() -> None:
        for _ in range(3):
            F.embedding(ids, table)
            array[:] = (array + 1) % 9

    return run


def _into_a_buffer() -> Callable[[], Any]:
    ids, table = torch.tensor([1, 2, 3]), torch.randn(5, 2)

    def run() -> None:
        buffer = torch.zeros(8, dtype=torch.long)
        buffer[2:5] = ids
        buffer[:5].add_(1)
        F.embedding(torch.cat([buffer, ids]), table)

    return run


PROGRAMS: dict[str, tuple[Callable[[], Callable[[], Any]], dict[str, int]]] = {
    "embedding": (_embedding, {"float": 1, "index": 1}),
    "positions": (_offset_positions, {"float": 1, "bounded": 1}),
    "indexing": (_indexing, {"index": 2, "lengths": 1}),
    "bag": (_bag, {"index": 1, "offsets": 1}),
    "packed": (_packed, {"lengths": 1}),
    "masks": (_masks, {"float": 1, "mask": 1}),
    "training": (_training, {"index": 1, "bounded float": 7}),
    "drawing": (_drawing, {"float": 1}),
    "reading": (_reading, {"float": 1, "index": 1}),
    "into a buffer": (_into_a_buffer, {"float": 1, "index": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_capture_without_content_replays_with_safe_content(captured: Captured, name: str) -> None:
    make, expected = PROGRAMS[name]
    result, used = replayed(captured(make(), payload="none"))
    assert result.outcome == "ok", result.divergence
    assert {initializer: used[initializer] for initializer in expected} == expected
    assert result.verification.mode == "none" and "synthesized" in result.verification.reasons[0]
    assert result.verification.structures == result.ops


def test_values_are_in_range_for_every_use(captured: Captured) -> None:
    small, large, ids = torch.randn(3, 2), torch.randn(100, 2), torch.zeros(200, dtype=torch.long)
    path = captured(lambda: (F.embedding(ids, large), F.embedding(ids + 1, small)), payload="none")
    made = [each for each in content_of(path).values() if each.dtype is torch.int64]
    assert len(made) == 1 and set(made[0].tolist()) == {0, 1}


def test_the_same_capture_gives_the_same_bytes_every_time(captured: Captured) -> None:
    path = captured(_training(), payload="none")
    one, other = content_of(path), content_of(path)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key].view(torch.uint8), other[key].view(torch.uint8)) for key in one)


def test_results_cannot_be_verified_and_bitwise_is_refused(captured: Captured) -> None:
    x = torch.randn(4)
    with Plan(captured(lambda: x.exp(), payload="none")) as plan:
        assert plan.execute(verify="auto").verification.mode == "none"
        for mode in ("bitwise", "close"):
            with pytest.raises(ReplayRefused, match="synthesized"):
                plan.execute(verify=mode)  # type: ignore[arg-type]
        assert any("captured ones" in note for note in plan.notes)


@pytest.mark.parametrize("payload", ["integers", "none"])
def test_shapes_and_scales_of_results_that_are_made_of_tensors_are_metadata(captured: Captured, payload: str) -> None:
    """Without content the numbers that ops return are left out; those that tell how a sparse or quantized tensor is
    made are no content, and a replay gives them again."""
    path = captured(
        lambda: (
            torch.ones(2, 3).to_sparse() * 2,
            torch.ones(2, 3).to_sparse_csr(),
            torch.quantize_per_tensor(torch.arange(4.0), 0.5, 3, torch.qint8).dequantize(),
        ),
        payload=payload,
        digests="none",
    )
    with Plan(path) as plan:
        for verify in ("auto", "none"):
            assert plan.execute(verify=verify).outcome == "ok"  # type: ignore[arg-type]


def _selecting(captured: Captured, tmp_path: Path) -> Path:
    """Selects as many elements as its content decides: 3 when it was captured."""
    x = torch.tensor([1.0, -1.0, 2.0, 3.0, -2.0])
    return captured(lambda: (x.exp(), x[x > 0].sum()), payload="none")


def test_a_result_of_another_size_fails_loudly_with_its_ordinal(captured: Captured, tmp_path: Path) -> None:
    path = _selecting(captured, tmp_path)
    three = Initializer("all positive", lambda request: torch.ones(request.tensor.sizes), op="aten::exp")
    with Plan(path, initializers=[three]) as plan:
        for verify in ("auto", "none"):
            result = plan.execute(verify=verify)  # type: ignore[arg-type]
            assert result.outcome == "mismatched" and result.divergence is not None
            assert result.divergence.what in ("aten::index.Tensor", "aten::nonzero.default")
            assert "[3" in result.divergence.expected and "[5" in result.divergence.got


def test_what_is_not_understood_is_refused_with_an_example(captured: Captured) -> None:
    rows = torch.arange(3)
    with pytest.raises(ReplayRefused) as caught:
        Plan(captured(lambda: unknown_use(rows), payload="none"))
    (finding,) = caught.value.findings
    assert "int64[3]" in finding and "self of aten::_convert_indices_from_coo_to_csr" in finding
    assert "--replay-initializer=FILE.py" in finding and "@register('aten::_convert_indices_from_coo_to_csr'" in finding


def test_a_computation_that_is_not_followed_is_refused_where_it_indexes(captured: Captured) -> None:
    table, ids, salt = torch.randn(50, 2), torch.tensor([1, 2]), torch.tensor([3, 4])
    with pytest.raises(ReplayRefused) as caught:
        Plan(captured(lambda: F.embedding((ids * salt) ^ 5, table), payload="none"))
    assert len(caught.value.findings) == 2 and "computed from it" in caught.value.findings[0]


def test_uses_that_ask_for_different_things_are_refused(captured: Captured) -> None:
    x, counts = torch.randn(3), torch.tensor([1, 0, 3])
    with pytest.raises(ReplayRefused) as caught:
        Plan(captured(lambda: (torch.nonzero(counts), torch.repeat_interleave(x, counts)), payload="none"))
    assert "selects 2 elements by and counts that add up to 4" in caught.value.findings[0]


# ------------------------------------------------------------------------------------------------------ the user's own


def _bad(_request: Request) -> torch.Tensor:
    return torch.full((2,), 99)


def test_the_users_initializers_come_first_and_are_checked_against_every_use(captured: Captured) -> None:
    table, ids = torch.randn(5, 2), torch.tensor([1, 2])
    path = captured(lambda: F.embedding(ids, table), payload="none")
    chosen = Initializer("mine", lambda request: torch.tensor([4, 3]), op="aten::embedding", arguments=("indices",))
    other = Initializer("other", lambda request: torch.tensor([0, 0]), op="aten::*", arguments=("ind*",))
    made = content_of(path, initializers=[chosen, other])
    assert [each.tolist() for each in made.values() if each.dtype is torch.int64] == [[4, 3]]
    made = content_of(path, initializers=[other, chosen])
    assert [each.tolist() for each in made.values() if each.dtype is torch.int64] == [[0, 0]]
    with pytest.raises(ReplayRefused) as caught:
        Plan(path, initializers=[Initializer("bad", _bad, op="aten::embedding", arguments=("indices",))])
    assert "values from 99 to 99" in caught.value.findings[0] and "expected 0 to 4" in caught.value.findings[0]


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        (lambda request: torch.zeros(3, dtype=torch.int64), r"expected torch.int64\[2\]"),
        (lambda request: torch.zeros(2), "gave torch.float32"),
        (lambda request: None, "expected a tensor"),
        (lambda request: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_an_initializer_that_gives_something_else_is_refused(captured: Captured, gives: Any, said: str) -> None:
    table, ids = torch.randn(5, 2), torch.tensor([1, 2])
    path = captured(lambda: F.embedding(ids, table), payload="none")
    with pytest.raises(ReplayRefused) as caught:
        Plan(path, initializers=[Initializer("odd", gives, op="aten::embedding", arguments=("indices",))])
    assert re.search(said, caught.value.findings[0])


def test_an_initializer_is_told_about_the_op_and_its_other_arguments(captured: Captured) -> None:
    table, ids = torch.randn(5, 2), torch.tensor([[1, 2]])
    seen: list[Request] = []

    def look(request: Request) -> torch.Tensor:
        seen.append(request)
        request.note("phase: prefill")
        return torch.randint(5, request.tensor.sizes)  # from PyTorch's generator: the same every time all the same

    def program() -> None:
        with replayfmt.scope("execute"), replayfmt.scope("step 3"):
            F.embedding(ids.to(torch.int32), table, padding_idx=1)

    path = captured(program, payload="none")
    mine = Initializer("look", look, op="aten::embedding", arguments=("indices",))
    with Plan(path, initializers=[mine]) as plan:
        first = plan.synthesis.initialized
        assert "phase: prefill" in plan.notes
    (request, *_rest) = seen
    assert request.call.name == "aten::embedding" and request.call.scope == "execute/step 3"
    assert request.label == "indices" and request.call.integer("padding_idx") == 1
    weight = request.call.tensor("weight")
    assert weight is not None and weight.sizes == (5, 2) and request.known("weight") is None
    assert request.tensor.sizes == (1, 2)
    assert request.tensor.dtype is torch.int64  # the program's own tensor is filled, not the op's copy of it
    assert content_of(path, initializers=[mine]).keys() == {each.storage for each in first}


def test_a_joint_initializer_fills_the_arguments_of_a_call_together(captured: Captured) -> None:
    x, rows, columns = torch.randn(6, 6), torch.tensor([1, 2]), torch.tensor([3, 4])
    calls: list[list[str]] = []

    def both(request: Request) -> dict[str, torch.Tensor]:
        calls.append(sorted(request.wanted))
        return {
            label: torch.full(info.sizes, position, dtype=info.dtype)
            for position, (label, info) in enumerate(sorted(request.wanted.items()))
        }

    path = captured(lambda: (x[rows, columns], x[rows, columns]), payload="none")
    made = content_of(
        path, initializers=[Initializer("both", both, op="aten::index", arguments=("indices",), joint=True)]
    )
    assert calls == [["indices[0]", "indices[1]"]]
    assert sorted(each.tolist() for each in made.values() if each.dtype is torch.int64) == [[0, 0], [1, 1]]


def test_an_initializer_by_dtype_fills_whole_storages(captured: Captured) -> None:
    x = torch.randn(3, 4)
    path = captured(lambda: x[:, 1:].exp(), payload="none")
    twos = Initializer("twos", lambda request: torch.full(request.tensor.sizes, 2.0), dtypes=frozenset({torch.float32}))
    (made,) = content_of(path, initializers=[twos]).values()
    assert made.tolist() == [2.0] * 12


# ------------------------------------------------------------------------------------------------------ the rest of it


def _without_content(signature: Signature) -> Signature:
    """Imports that had a payload have none."""
    if signature.kind is not RecordKind.storage_import:
        return signature
    return Signature(
        signature.kind,
        tuple(Node(ValueKind.none, node.name) if node.name == "payload" else node for node in signature.args),
    )


def _drop_payload(record: Record, ints: list[int], _floats: list[float]) -> None:
    if record.kind is RecordKind.storage_import:
        del ints[1]


def _absent(origins: np.ndarray, contents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    gone = origins == StorageOrigin.payload
    return np.where(gone, np.uint8(StorageOrigin.absent), origins), np.where(gone, 0, contents)


def test_content_that_came_again_from_outside_is_made_again_for_each_time(captured: Captured, tmp_path: Path) -> None:
    source = captured(_written_from_outside(), audit=True, digests="none")
    path = rewrite(
        source, tmp_path / "stripped.opreplay", signature=_without_content, change=_drop_payload, births=_absent
    )
    result, used = replayed(path)
    assert result.outcome == "ok" and used == {"float": 1, "index": 3}
    with Plan(path) as plan:
        versions = [each for each in plan.synthesis.initialized if each.initializer == "index"]
        made = []
        for each in versions:
            storage = torch.empty(each.bytes, dtype=torch.uint8).untyped_storage()
            plan.synthesis.fill(each.storage, each.version, storage)
            made.append(torch.empty(0, dtype=torch.int64).set_(storage).tolist())
    assert [each.version for each in versions] == [0, 1, 2] and len({tuple(each) for each in made}) == 3
    assert all(0 <= value < 9 for row in made for value in row)


def test_generator_states_that_are_missing_are_seeded_and_said(captured: Captured, tmp_path: Path) -> None:
    def without_states(signature: Signature) -> Signature:
        if signature.kind is not RecordKind.generator_state:
            return signature
        return Signature(
            signature.kind,
            tuple(Node(ValueKind.none, node.name) if node.name == "payload" else node for node in signature.args),
        )

    def change(record: Record, ints: list[int], _floats: list[float]) -> None:
        if record.kind is RecordKind.generator_state and len(ints) > 1:
            del ints[1]

    source = captured(lambda: torch.rand(3).sum(), digests="none")
    path = rewrite(source, tmp_path / "seeded.opreplay", signature=without_states, change=change)
    with Plan(path) as plan:
        result = plan.execute(verify="auto")
        assert result.outcome == "ok" and "random generator" in result.verification.reasons[0]


def test_empty_contents_and_contents_nobody_reads_need_no_initializer(captured: Captured) -> None:
    empty, target = torch.zeros(0, dtype=torch.long), torch.zeros(3, dtype=torch.long)
    result, used = replayed(
        captured(lambda: (empty.clone(), torch.add(torch.ones(3).long(), 1, out=target)), payload="none")
    )
    assert result.outcome == "ok" and used.keys() <= {"unread"}


def test_one_op_alone_takes_its_content_from_initializers(captured: Captured) -> None:
    x = torch.randn(3)
    path = captured(lambda: x.exp(), payload="none")
    ones = Initializer("ones", lambda request: torch.zeros(request.tensor.sizes), op="aten::exp")
    with replayfmt.open(path) as opened:
        (op,) = opened.ops
        assert op.replay(initializers=[ones]).tolist() == [1.0, 1.0, 1.0]
        assert torch.equal(op.replay(), op.replay())


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_ranges_of_unsigned_integers_are_checked(captured: Captured, dtype: torch.dtype) -> None:
    rows = torch.tensor([1, 2, 3]).to(dtype)
    path = captured(lambda: torch.arange(6.0)[rows.to(torch.int64)], payload="none")
    replayed(path)
    made = content_of(path)
    assert [(each.dtype, max(each.tolist()) < 6) for each in made.values()] == [(dtype, True)]
