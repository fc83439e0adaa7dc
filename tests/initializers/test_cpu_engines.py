"""vLLM's operators for CPUs: schedules and handles that hold addresses are made by the library itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import replayfmt
from replayfmt.errors import ReplayRefused

WORK: dict[str, Any] = {}
WEIGHTS: dict[int, torch.Tensor] = {}

SCHEMAS = (
    "get_scheduler_metadata(int num_req, int num_heads_q, int num_heads_kv, int head_dim, Tensor seq_lens, "
    "ScalarType dtype, Tensor query_start_loc, bool casual, int window_size, str isa_hint, bool enable_kv_split, "
    'Tensor? dynamic_causal, str kv_cache_dtype="auto") -> Tensor',
    "cpu_attention_with_kv_cache(Tensor query, Tensor key_cache, Tensor value_cache, Tensor(a!) output, "
    "Tensor query_start_loc, Tensor seq_lens, float scale, bool causal, int sliding_window_size, Tensor block_table, "
    'Tensor scheduler_metadata, str kv_cache_dtype="auto") -> ()',
    "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table, "
    "Tensor(a!) slot_mapping, SymInt block_size) -> ()",
    "create_onednn_mm_handler(Tensor b, int primitive_cache_size) -> int",
    "onednn_mm(Tensor(a!) c, Tensor a, Tensor? bias, Tensor handler_tensor) -> ()",
)


def _metadata(
    num_req,
    num_heads_q,
    num_heads_kv,
    head_dim,
    seq_lens,
    dtype,
    query_start_loc,
    casual,
    window_size,
    isa_hint,
    enable_kv_split,
    dynamic_causal,
    kv_cache_dtype="auto",
):
    """Where the schedule itself lies, and what it is for."""
    made = torch.zeros(8, dtype=torch.int64)
    made[0] = made.data_ptr()
    made[1:6] = torch.tensor([num_req, num_heads_q, num_heads_kv, head_dim, int(seq_lens.sum())])
    made[6] = int(isa_hint == "vec")
    WORK.update(metadata=made)
    return made.view(torch.int8)


def _attention(
    query,
    key_cache,
    value_cache,
    output,
    query_start_loc,
    seq_lens,
    scale,
    causal,
    sliding_window_size,
    block_table,
    scheduler_metadata,
    kv_cache_dtype="auto",
):
    """Caches are (blocks, heads, block, size)."""
    if "metadata" not in WORK:  # while it is captured: the content of a trace is not known either
        return
    address, *plan = scheduler_metadata.view(torch.int64).tolist()
    assert address == WORK["metadata"].data_ptr(), "what the schedule points to is alive"
    assert plan[:5] == [len(seq_lens), query.shape[1], key_cache.shape[1], query.shape[2], int(seq_lens.sum())]
    block = key_cache.shape[2]
    for row, length in enumerate(seq_lens.tolist()):
        assert length <= block_table.shape[1] * block
        output[query_start_loc[row] : query_start_loc[row + 1]] = key_cache[
            block_table[row, : -(-length // block)]
        ].sum()
    WORK.update(context=int(seq_lens.sum()), isa=plan[5])


def _slots(query_start_loc, positions, block_table, slot_mapping, block_size):
    starts = query_start_loc.tolist()
    for row in range(len(starts) - 1):
        for token in range(starts[row], starts[row + 1]):
            place = int(positions[token])
            slot_mapping[token] = int(block_table[row, place // block_size]) * block_size + place % block_size
    WORK.update(slots=slot_mapping[: starts[-1]].tolist(), positions=positions.tolist())


def _create(b, primitive_cache_size):
    address = b.data_ptr()
    WEIGHTS[address] = b
    return address


def _multiply(c, a, bias, handler_tensor):
    torch.mm(a, WEIGHTS[int(handler_tensor)], out=c)
    WORK.update(multiplied=c.abs().sum().item())


@pytest.fixture(autouse=True)
def library() -> Iterator[None]:
    WORK.clear()
    with torch.library._scoped_library("_C", "FRAGMENT") as lib:
        for schema, function in zip(SCHEMAS, (_metadata, _attention, _slots, _create, _multiply), strict=True):
            lib.define(schema)
            lib.impl(schema.partition("(")[0], function, "CPU")
        yield
    WEIGHTS.clear()


def replayed(path: Path, program: Any) -> str:
    """Capture a program without content and replay it; the notes of the plan."""
    with replayfmt.capture(path, payload="none", whole=["_C::*"]), replayfmt.scope("execute"):
        program()
    WORK.clear()
    WEIGHTS.clear()
    with replayfmt.Plan(path) as plan:
        assert plan.execute().outcome == "ok"
        return " | ".join(plan.notes)


def attention(metadata_bytes: int = 64) -> Any:
    query, output = torch.randn(3, 4, 32), torch.zeros(3, 4, 32)
    keys, values = torch.randn(16, 2, 32, 32), torch.randn(16, 2, 32, 32)
    starts, lengths = torch.arange(4, dtype=torch.int32), torch.full((3,), 40, dtype=torch.int32)
    table = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    metadata = torch.zeros(metadata_bytes, dtype=torch.int8)
    return lambda: torch.ops._C.cpu_attention_with_kv_cache(
        query, keys, values, output, starts, lengths, 0.2, True, -1, table, metadata
    )


def test_attention_gets_a_schedule_that_the_library_makes_for_its_batch(tmp_path: Path) -> None:
    notes = replayed(tmp_path / "a.opreplay", attention())
    assert "decode, 3 sequences" in notes
    assert WORK["context"] > 3 * 32, "blocks of 32 tokens, because heads come first in the cache"
    assert WORK["isa"] == 1


def test_a_schedule_of_another_size_is_refused(tmp_path: Path) -> None:
    path, program = tmp_path / "a.opreplay", attention(metadata_bytes=128)
    with replayfmt.capture(path, payload="none", whole=["_C::*"]), replayfmt.scope("execute"):
        program()
    with pytest.raises(ReplayRefused) as refused:
        replayfmt.Plan(path)
    assert "captured schedule has 128 bytes, and here one has 64" in refused.value.findings[0]


def test_new_tokens_get_slots_of_their_sequences_blocks(tmp_path: Path) -> None:
    starts, positions = torch.tensor([0, 4, 8], dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    table, slots = torch.zeros(4, 6, dtype=torch.int32), torch.zeros(16, dtype=torch.int64)
    replayed(
        tmp_path / "a.opreplay",
        lambda: torch.ops._C.compute_slot_mapping_kernel_impl(starts, positions, table, slots, 16),
    )
    assert len(set(WORK["slots"])) == 8
    one, other = WORK["positions"][:4], WORK["positions"][4:]
    assert one == list(range(one[0], one[0] + 4)) and other == list(range(other[0], other[0] + 4))


def test_a_product_gets_a_handle_with_a_weight_of_its_size(tmp_path: Path) -> None:
    a, c = torch.randn(2, 16), torch.zeros(2, 24)
    handle = torch.zeros(1, dtype=torch.int64)
    WEIGHTS[0] = torch.randn(16, 24)  # while it is captured
    replayed(tmp_path / "a.opreplay", lambda: torch.ops._C.onednn_mm(c, a, None, handle))
    (weight,) = WEIGHTS.values()
    assert weight.shape == (16, 24) and weight.stride() == (1, 16)
    assert WORK["multiplied"] > 0
