"""Content for the operators of serving engines as each engine lays it out: caches, page lists, packed sequences, pairs
of tokens and experts.
"""

import pytest
import torch

from .serving import replayed


def content(tmp_path, name, schema, *arguments):
    """What one call of an operator is replayed with, by argument."""
    namespace, _, call = name.partition("::")
    seen = {}
    with torch.library._scoped_library(namespace, "FRAGMENT") as library:
        library.define(call + schema)
        operator = getattr(getattr(torch.ops, namespace), call)
        names = [each.name for each in operator.default._schema.arguments]
        library.impl(call, lambda *values: seen.update(zip(names, values, strict=True)), "CPU")
        replayed(tmp_path / "a.opreplay", lambda: operator(*arguments))
    return seen


def ints(*sizes, dtype=torch.int32):
    return torch.zeros(sizes, dtype=dtype)


@pytest.mark.slow
def test_keys_to_append_are_not_taken_for_the_cache(tmp_path):
    cache, new = torch.zeros(100, 16, 2, 8), torch.zeros(4, 1, 2, 8)
    schema = (
        "(Tensor q, Tensor kcache, Tensor vcache, Tensor? k, Tensor? v, Tensor? seqlens_k, Tensor? block_table) -> ()"
    )
    with_new = content(
        tmp_path,
        "engine::fwd_kvcache",
        schema,
        torch.zeros(4, 1, 2, 8),
        cache,
        cache.clone(),
        new,
        new.clone(),
        ints(4),
        ints(4, 6),
    )
    assert with_new["seqlens_k"].max() == 6 * 16 - 1, "the new token fits"
    assert with_new["seqlens_k"].min() >= 40
    without = content(
        tmp_path,
        "engine::fwd_kvcache",
        schema,
        torch.zeros(4, 1, 2, 8),
        cache,
        cache.clone(),
        None,
        None,
        ints(4),
        ints(4, 6),
    )
    assert without["seqlens_k"].max() == 6 * 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "name", "layout", "block"),
    [
        ((40, 2, 8, 16, 8), "key_cache", 0, 16),
        ((40, 16, 2, 64), "key_cache", 0, 16),
        ((40, 2, 16, 64), "paged_k_cache", 1, 16),
        ((40, 16, 576), "kv_cache", 0, 16),
        ((40, 2, 16, 4, 64), "kv_cache", 0, 16),
        ((40, 2, 4, 16, 64), "paged_kv_cache", 1, 16),
        ((2, 40, 16, 4, 64), "kv_cache", 0, 16),
        ((640, 2, 64), "k_buffer", 0, 1),
    ],
)
def test_writes_fill_whole_blocks_of_every_layout_of_a_cache(tmp_path, sizes, name, layout, block):
    schema = f"(Tensor key, Tensor(a!) {name}, Tensor slot_mapping, int layout) -> ()"
    made = content(tmp_path, "engine::write", schema, torch.zeros(100, 2, 64), torch.zeros(sizes), ints(100), layout)
    slots = made["slot_mapping"]
    assert len(set(slots.tolist())) == 100 and int(slots.max()) < 640
    assert len(set((slots // block).tolist())) == -(-100 // block)
    assert int(slots.max()) > 100, "they are spread over the whole cache"


@pytest.mark.slow
def test_page_lists_of_a_cache_with_heads_first_have_its_page_size(tmp_path):
    schema = (
        "(Tensor q, Tensor paged_k_cache, Tensor paged_v_cache, Tensor paged_kv_indptr, Tensor paged_kv_indices, "
        "Tensor paged_kv_last_page_len, int layout) -> ()"
    )
    made = content(
        tmp_path,
        "engine::paged_run",
        schema,
        torch.zeros(4, 8, 64),
        torch.zeros(100, 2, 16, 64),
        torch.zeros(100, 2, 16, 64),
        ints(5),
        ints(60),
        ints(4),
        1,
    )
    assert int(made["paged_kv_last_page_len"].max()) > 2
    assert made["paged_kv_indptr"].diff().min() >= 7 and made["paged_kv_indptr"][-1] <= 60


@pytest.mark.slow
def test_latents_are_read_from_the_blocks_they_are_in(tmp_path):
    schema = "(Tensor q_nope, Tensor q_pe, Tensor kv_c_and_k_pe_cache, Tensor seq_lens, Tensor page_table) -> ()"
    made = content(
        tmp_path,
        "engine::mla_decode",
        schema,
        torch.zeros(4, 8, 512),
        torch.zeros(4, 8, 64),
        torch.zeros(50, 64, 576),
        ints(4),
        ints(4, 10),
    )
    assert 320 <= int(made["seq_lens"].min()) <= int(made["seq_lens"].max()) == 640


@pytest.mark.slow
def test_sequences_of_packed_attention_begin_where_they_must(tmp_path):
    schema = (
        "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
        "SymInt max_seqlen_k) -> ()"
    )
    made = content(
        tmp_path,
        "engine::varlen",
        schema,
        torch.zeros(20, 8, 16),
        torch.zeros(60, 2, 16),
        torch.zeros(60, 2, 16),
        ints(5),
        ints(5),
        10,
        20,
    )
    assert made["cu_seqlens_q"].tolist() == [0, 10, 14, 17, 20] and made["cu_seqlens_k"].tolist() == [0, 20, 34, 47, 60]
    made = content(
        tmp_path,
        "engine::varlen",
        schema,
        torch.zeros(20, 8, 16),
        torch.zeros(20, 8, 16),
        torch.zeros(20, 8, 16),
        ints(5),
        ints(5),
        20,
        20,
    )
    assert made["cu_seqlens_q"].tolist() == made["cu_seqlens_k"].tolist() == [0, 5, 10, 15, 20]
    padded = (
        "(Tensor query, Tensor key, Tensor value, Tensor? seqstart_q, Tensor? seqstart_k, int? max_seqlen_q, "
        "Tensor? seqlen_k) -> ()"
    )
    made = content(
        tmp_path,
        "engine::padded",
        padded,
        torch.zeros(1, 4, 8, 16),
        torch.zeros(1, 128, 8, 16),
        torch.zeros(1, 128, 8, 16),
        ints(5),
        ints(5),
        1,
        ints(4),
    )
    assert made["seqstart_k"].tolist() == [0, 32, 64, 96, 128]
    assert 16 <= int(made["seqlen_k"].min()) <= int(made["seqlen_k"].max()) == 32


def test_pairs_for_aiter_are_packed_as_its_kernels_read_them(tmp_path):
    schema = (
        "(Tensor hidden_states, Tensor w1, Tensor sorted_token_ids, Tensor sorted_expert_ids, "
        "Tensor num_valid_ids, int topk, int block_m) -> ()"
    )
    made = content(
        tmp_path,
        "aiter::moe_stage",
        schema,
        torch.zeros(6, 32),
        torch.zeros(8, 64, 32),
        ints(44),
        ints(11),
        ints(2),
        2,
        4,
    )
    valid = int(made["num_valid_ids"][0])
    pairs = made["sorted_token_ids"][:valid]
    assert int(made["num_valid_ids"][1]) == 6
    real = pairs[pairs != (2 << 24 | 6)]
    read = sorted((each & 0xFFFFFF, each >> 24) for each in real.tolist())
    assert read == [(token, place) for token in range(6) for place in (0, 1)]


def test_rows_of_rows_end_with_the_number_of_rows_below(tmp_path):
    made = content(
        tmp_path,
        "fbgemm::pad_rows",
        "(Tensor values, Tensor[] offsets, int[] max_lengths) -> ()",
        torch.zeros(30, 4),
        [ints(4, dtype=torch.int64), ints(8, dtype=torch.int64)],
        [4, 10],
    )
    outer, inner = made["offsets"]
    assert (int(outer[-1]), int(inner[-1])) == (7, 30)
    assert int(outer.diff().max()) <= 4 and int(inner.diff().max()) <= 10


@pytest.mark.slow
def test_rotary_embeddings_and_experts_are_known_by_sglangs_and_marlins_names(tmp_path):
    made = content(
        tmp_path,
        "engine::apply_rope_pos_ids",
        "(Tensor q, Tensor cos_sin_cache, Tensor pos_ids) -> ()",
        torch.zeros(6, 8, 16),
        torch.zeros(128, 16),
        ints(6, dtype=torch.int64),
    )
    assert made["pos_ids"].tolist() == list(range(122, 128))
    schema = (
        "(Tensor a, Tensor b_q_weight, Tensor sorted_token_ids, Tensor expert_ids, "
        "Tensor num_tokens_past_padded, Tensor topk_weights, int moe_block_size, int top_k) -> ()"
    )
    made = content(
        tmp_path,
        "engine::marlin",
        schema,
        torch.zeros(6, 32),
        torch.zeros(8, 2, 64),
        ints(36),
        ints(9),
        ints(1),
        torch.zeros(6, 2),
        4,
        2,
    )
    assert 12 <= int(made["num_tokens_past_padded"]) <= 36
    made = content(
        tmp_path, "engine::softmax", "(Tensor topk_indices, Tensor gating_output) -> ()", ints(6, 2), torch.zeros(6, 8)
    )
    assert len(set(made["topk_indices"].flatten().tolist())) > 4
