"""Sparse latent attention, its indexer and DeepGEMM as compositions: each is compared with its definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.importers.test_portable import Machine

from .test_engine_rewrites import _close, refusal, rewrite, run

FLOAT8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def result(name: str, sizes: tuple[int, ...], dtype: torch.dtype = torch.float32, **given: Any) -> torch.Tensor:
    machine = Machine()
    recorded = machine.new(sizes, dtype)
    machine.run(rewrite(machine, name, given, [recorded]))
    return machine.values[id(recorded)]


def _whole(cache: torch.Tensor) -> torch.Tensor:
    """Tokens of the quantized cache, byte by byte as FlashMLA says."""
    numbers = cache[..., :512].contiguous().view(FLOAT8).float()
    scales = cache[..., 512:528].contiguous().view(torch.float32)
    turned = cache[..., 528:].contiguous().view(torch.bfloat16).float()
    return torch.cat([numbers * scales.repeat_interleave(128, -1), turned], -1)


@pytest.mark.slow
def test_the_quantized_cache_is_written_and_decoded() -> None:
    latent, turned = torch.randn(5, 512, dtype=torch.bfloat16), torch.randn(5, 1, 64, dtype=torch.bfloat16)
    cache, slots = torch.zeros(3, 4, 656, dtype=torch.uint8), torch.tensor([9, 0, -1, 5, 6])
    given = {"kv_c": latent, "k_pe": turned, "kv_cache": cache, "slot_mapping": slots}
    run("_C_cache_ops::concat_and_cache_mla", **given, kv_cache_dtype="fp8_ds_mla", scale=torch.ones(1))
    written = _whole(cache).flatten(0, 1)
    both = torch.cat([latent, turned[:, 0]], -1).float()
    _close(written[[9, 0, 5, 6]], both[[0, 1, 3, 4]], 7e-2)
    assert not cache.flatten(0, 1)[[1, 2, 3, 4, 7, 8, 10, 11]].any()

    query = torch.randn(2, 1, 3, 576, dtype=torch.bfloat16)
    chosen = torch.tensor([[[9, 5, -1, 0]], [[6, 0, 9, 5]]], dtype=torch.int32)
    sinks, lengths = torch.randn(3), torch.tensor([4, 2], dtype=torch.int32)
    expected = torch.zeros(2, 1, 3, 512)
    for each, places in enumerate(([9, 5, 0], [6, 0])):
        scores = torch.einsum("hw,kw->hk", query[each, 0].float(), written[places]) * 0.05
        weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks.exp()[:, None])
        expected[each, 0] = weights @ written[places][:, :512]
    fixed: dict[str, Any] = {"tile_scheduler_metadata": None, "num_splits": None, "extra_indices": None}
    fixed |= {"extra_kv": None, "extra_topk_length": None, "topk_length": lengths, "attn_sink": sinks}
    fixed |= {"q": query, "kv": cache.unsqueeze(2), "indices": chosen, "d_v": 512, "sm_scale": 0.05}
    found = result("_flashmla_C::sparse_decode_fwd", (2, 1, 3, 512), torch.bfloat16, **fixed)
    _close(found.float(), expected, 3e-2)
    older: dict[str, Any] = {"q": query, "kv_cache": cache.view(FLOAT8).unsqueeze(2), "head_size_v": 512}
    older |= {"seqlens_k": lengths, "block_table": torch.zeros(2, 3).int(), "softmax_scale": 0.05, "is_causal": False}
    older |= {"tile_scheduler_metadata": None, "num_splits": None, "is_fp8": True, "indices": chosen[..., :2]}
    found = result("_flashmla_C::fwd_kvcache_mla", (2, 1, 3, 512), torch.bfloat16, **older)
    scores = torch.einsum("hw,kw->hk", query[1, 0].float(), written[[6, 0]]) * 0.05
    _close(found[1, 0].float(), scores.softmax(-1) @ written[[6, 0]][:, :512], 3e-2)
    assert "sparse cache of 584 elements" in refusal(
        "_flashmla_C::sparse_decode_fwd", **fixed | {"kv": torch.zeros(3, 4, 1, 584, dtype=torch.uint8)}
    )


@pytest.mark.parametrize("kind", ["ue8m0", "auto"])
def test_the_indexers_keys_are_cached_with_their_scales_behind_the_page_and_gathered(kind: str) -> None:
    keys, cache, slots = (
        torch.randn(6, 128),
        torch.zeros(3, 4, 132, dtype=torch.uint8),
        torch.tensor([8, 9, 0, 1, 2, -1]),
    )
    given = {"k": keys, "kv_cache": cache, "slot_mapping": slots, "quant_block_size": 128}
    run("_C_cache_ops::indexer_k_quant_and_cache", **given, kv_cache_dtype=kind)
    assert "preshuffle" in refusal("aiter::indexer_k_quant_and_cache", **given, kv_cache_dtype=kind, preshuffle=True)
    pages = cache.flatten(1)
    numbers = pages[:, : 4 * 128].reshape(3, 4, 128).view(FLOAT8).float()
    scales = pages[:, 4 * 128 :].reshape(3, 4, 4).contiguous().view(torch.float32)
    whole = (numbers * scales).flatten(0, 1)
    _close(whole[[8, 9, 0, 1, 2]], keys[:5], 0.2)
    assert not whole[[3, 4, 5, 6, 7, 10, 11]].any()
    if kind == "ue8m0":
        assert all(math.log2(each).is_integer() for each in scales.flatten().tolist() if each)
    table = torch.tensor([[2, 1], [0, 1]], dtype=torch.int32)
    out, of_out = torch.zeros(5, 128, dtype=torch.uint8), torch.zeros(5, 4, dtype=torch.uint8)
    run(
        "_C_cache_ops::cp_gather_indexer_k_quant_cache",
        kv_cache=cache,
        dst_k=out,
        dst_scale=of_out,
        block_table=table,
        cu_seq_lens=torch.tensor([0, 2, 5], dtype=torch.int32),
    )
    torch.testing.assert_close(out.view(FLOAT8).float() * of_out.view(torch.float32), whole[[8, 9, 0, 1, 2]])

    query, weights = torch.randn(2, 1, 3, 128).to(FLOAT8), torch.randn(2, 3)
    found = result(
        "deep_gemm::fp8_fp4_paged_mqa_logits",
        (2, 4),
        q=query,
        q_sf=None,
        kv_cache=cache.unsqueeze(2),
        weights=weights,
        context_lens=torch.tensor([2, 3]),
        block_table=table,
        schedule_meta=torch.zeros(1),
        max_context_len=4,
    )
    for each, page in enumerate((2, 0)):
        expected = ((query[each, 0].float() @ whole.view(3, 4, 128)[page].T).relu() * weights[each][:, None]).sum(0)
        _close(found[each], expected)
    starts, ends = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([2, 5], dtype=torch.int32)
    found = result(
        "deep_gemm::fp8_fp4_mqa_logits",
        (2, 5),
        q=query[:, 0],
        q_sf=None,
        kv=out.view(FLOAT8),
        kv_sf=of_out.view(torch.float32)[:, 0],
        weights=weights,
        cu_seq_len_k_start=starts,
        cu_seq_len_k_end=ends,
        max_seqlen_k=0,
    )
    expected = torch.einsum("qhw,kw->qhk", query[:, 0].float(), whole[[8, 9, 0, 1, 2]]).relu()
    expected = (expected * weights[:, :, None]).sum(1)
    assert found.isneginf().tolist() == [[False, False, True, True, True], [True, False, False, False, False]]
    _close(found[0, :2], expected[0, :2])
    _close(found[1, 1:], expected[1, 1:])


def test_the_best_places_of_a_row_count_from_where_it_starts() -> None:
    logits = torch.tensor([[5.0, 1.0, 7.0, 3.0], [9.0, 2.0, 4.0, 8.0]])
    out, rest = torch.zeros(2, 3, dtype=torch.int32), {"numRows": 2, "stride0": 4, "stride1": 1, "topK": 3}
    starts, ends = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([4, 2], dtype=torch.int32)
    run("_C::top_k_per_row_prefill", logits=logits, rowStarts=starts, rowEnds=ends, indices=out, **rest)
    assert out.tolist() == [[1, 2, 0], [0, 1, -1]]
    run("_C::top_k_per_row_decode", logits=logits, next_n=2, seq_lens=torch.tensor([4]).int(), indices=out, **rest)
    assert out.tolist() == [[2, 0, 1], [0, 3, 2]]
    wide = torch.zeros(2, 6, dtype=torch.int32)
    run("sgl_kernel::fast_topk", score=logits, indices=wide, lengths=ends, row_starts=None)
    assert wide.tolist() == [[2, 0, 3, 1, -1, -1], [0, 1, -1, -1, -1, -1]]


@pytest.mark.slow
@pytest.mark.parametrize("words", [False, True])
def test_deepgemms_products_have_scales_of_blocks_and_groups_of_rows(words: bool) -> None:
    one, other = torch.randn(6, 256).to(FLOAT8), torch.randn(2, 128, 256).to(FLOAT8)
    exponents, of_other = torch.randint(125, 130, (6, 2)), torch.rand(2, 1, 2)
    scales = torch.exp2(exponents - 127.0)
    given: dict[str, Any] = {"a": one, "sfa": scales, "d": torch.zeros(6, 128, dtype=torch.bfloat16)}
    if words:  # four exponents in one
        given["sfa"] = (exponents[:, 0] | exponents[:, 1] << 8).int().unsqueeze(1)
    left = one.float() * scales.repeat_interleave(128, 1)
    right = other.float() * of_other.repeat_interleave(128, 1).repeat_interleave(128, 2)
    run("deep_gemm::fp8_fp4_gemm_nt", **given, b=other[0], sfb=of_other[0])
    _close(given["d"].float(), left @ right[0].T, 0.4)
    layout = torch.tensor([0, 0, -1, 1, 1, 1], dtype=torch.int32)
    given |= {"b": other, "sfb": of_other, "grouped_layout": layout}
    run("deep_gemm::m_grouped_fp8_fp4_gemm_nt_contiguous", **given)
    _close(given["d"][[0, 1]].float(), left[:2] @ right[0].T, 0.4)
    _close(given["d"][3:].float(), left[3:] @ right[1].T, 0.4)
    plain = {"a": torch.randn(2, 3, 8), "b": torch.randn(2, 4, 8), "d": torch.zeros(2, 3, 4)}
    run("deep_gemm::m_grouped_bf16_gemm_nt_masked", **plain, masked_m=torch.tensor([3, 1]).int(), expected_m=2)
    _close(plain["d"], plain["a"] @ plain["b"].transpose(1, 2), 0.1)
    assert "c" in refusal("deep_gemm::bf16_gemm_nt", a=torch.ones(2, 2), b=torch.ones(2, 2), d=torch.ones(2, 2), c=1)


def test_two_states_of_attention_become_one() -> None:
    scores, values = torch.randn(3, 2, 9), torch.randn(9, 2, 4)  # tokens, heads, keys
    parts = [(scores[..., :5], values[:5]), (scores[..., 5:], values[5:])]
    outputs = [torch.einsum("thk,khw->thw", score.softmax(-1), value) for score, value in parts]
    sums = [score.logsumexp(-1) for score, _value in parts]
    expected = torch.einsum("thk,khw->thw", scores.softmax(-1), values)
    out, total = torch.zeros(3, 2, 4), torch.zeros(2, 3)
    given = {"prefix_output": outputs[0], "suffix_output": outputs[1], "output": out, "output_lse": total}
    run("_C::merge_attn_states", **given, prefix_lse=sums[0].T, suffix_lse=sums[1].T)
    _close(out, expected)
    _close(total, scores.logsumexp(-1).T)
    merged = torch.zeros(3, 2)
    given = {"v_a": outputs[0], "s_a": sums[0], "v_b": outputs[1], "s_b": sums[1], "v_merged": out.zero_()}
    run("sgl_kernel::merge_state_v2", **given, s_merged=merged)
    _close(out, expected)


def test_rows_of_experts_are_multiplied_shuffled_and_summed() -> None:
    rows, weight = torch.randn(5, 16).to(FLOAT8), torch.randn(2, 16, 8).to(FLOAT8)
    scales, of_weight = torch.rand(5, 1), torch.rand(2, 8, 1)
    out = torch.zeros(5, 8, dtype=torch.bfloat16)
    fixed: dict[str, Any] = dict.fromkeys(("problem_sizes", "a_strides", "b_strides", "c_strides"), torch.zeros(1))
    fixed |= {"per_act_token": True, "per_out_ch": True, "expert_offsets": torch.tensor([0, 2], dtype=torch.int32)}
    run("_C::cutlass_moe_mm", out=out, a=rows, b=weight, a_scales=scales, b_scales=of_weight, **fixed)
    whole = weight.float() * of_weight.transpose(1, 2)
    expected = torch.cat([(rows.float() * scales)[:2] @ whole[0], (rows.float() * scales)[2:] @ whole[1]])
    _close(out.float(), expected, 0.1)
    places, share = torch.tensor([[3, 0], [1, 4]], dtype=torch.int32), torch.rand(2, 2)
    moved, total = torch.zeros(4, 8), torch.zeros(2, 8)
    run("_moe_C::shuffle_rows", input=expected, map=places.flatten(), output=moved)
    _close(moved, expected[places.flatten().long()])
    given = {"permuted_hidden_states": expected, "topk_weights": share, "inv_permuted_idx": places, "topk": 2}
    run("_moe_C::moe_unpermute", **given, expert_first_token_offset=None, hidden_states=total)
    _close(total, (expected[places.long()] * share.unsqueeze(2)).sum(1))


@pytest.mark.parametrize("name", ["moe_permute", "moe_permute_with_scratch"])
def test_tokens_are_sorted_by_expert_and_summed_again(name: str) -> None:
    data, share = torch.randn(3, 8), torch.rand(3, 2)
    chosen = torch.tensor([[2, 0], [3, 2], [0, 2]], dtype=torch.int32)
    rows, begins = torch.zeros(6, 8), torch.zeros(5, dtype=torch.int64)
    place, order = torch.zeros(6, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    given: dict[str, Any] = {"input": data, "topk_ids": chosen, "token_expert_indices": torch.zeros_like(chosen)}
    given |= {"expert_map": None, "n_expert": 4, "n_local_expert": 4, "topk": 2, "permuted_input": rows}
    given |= {"expert_first_token_offset": begins, "inv_permuted_idx": place, "permuted_idx": order}
    if name.endswith("scratch"):
        scratch = ("sort_workspace", "permuted_experts_id", "sorted_row_idx", "topk_ids_for_sort")
        given |= {each: torch.zeros(6) for each in scratch}
    run(f"_moe_C::{name}", **given)
    assert begins.tolist() == [0, 2, 2, 5, 6]  # experts 0, 0, 2, 2, 2, 3
    assert order.tolist() == [1, 4, 0, 3, 5, 2]
    assert place[order.long()].tolist() == [*range(6)]
    _close(rows, data[order.long() // 2])
    total = torch.zeros(3, 8)
    given = {"permuted_hidden_states": rows, "topk_weights": share, "inv_permuted_idx": place, "topk": 2}
    run("_moe_C::moe_unpermute", **given, expert_first_token_offset=begins, hidden_states=total)
    _close(total, data * share.sum(1, keepdim=True))


def test_tokens_that_are_sorted_for_some_experts_or_in_blocks_are_refused() -> None:
    chosen = torch.zeros(3, 2, dtype=torch.int32)
    given: dict[str, Any] = {"input": torch.zeros(3, 8), "topk_ids": chosen, "token_expert_indices": chosen}
    given |= {"n_expert": 4, "n_local_expert": 2, "topk": 2, "permuted_input": torch.zeros(6, 8)}
    given |= {"expert_first_token_offset": torch.zeros(3), "inv_permuted_idx": chosen, "permuted_idx": chosen}
    assert "expert_map" in refusal("_moe_C::moe_permute", **given, expert_map=torch.zeros(4))
    blocks = {"align_block_size": None, "m_indices": torch.zeros(128)}
    assert "align_block_size" in refusal("_moe_C::moe_permute", **given, expert_map=None, **blocks)


def test_norms_and_activations_of_newer_versions() -> None:
    data, weight, residual = torch.randn(3, 16), torch.randn(16), torch.randn(3, 16)
    normal = (data + residual) * torch.rsqrt((data + residual).pow(2).mean(-1, keepdim=True) + 1e-6)
    out, scale, left = torch.zeros(3, 16, dtype=torch.int8), torch.zeros(3, 2), residual.clone()
    fixed = {"scale_ub": None, "group_size": 8, "is_scale_transposed": False, "epsilon": 1e-6}
    run("_C::rms_norm_per_block_quant", result=out, input=data, weight=weight, scale=scale, residual=left, **fixed)
    _close(left, data + residual)
    _close(out.float() * scale.repeat_interleave(8, 1), normal * weight, 5e-2)
    given, left = data.clone(), residual.clone()
    run("_C::fused_add_rms_norm_weightless", input=given, residual=left, epsilon=1e-6)
    _close(given, normal)
    gate, factor = data[:, :8].clamp(max=0.5), data[:, 8:].clamp(-0.5, 0.5)
    out = torch.zeros(3, 8)
    run("_C::silu_and_mul_with_clamp", out=out, input=data, limit=0.5, alpha=2.0, beta=0.25)
    _close(out, gate * (2 * gate).sigmoid() * (factor + 0.25))
    run("_C::fatrelu_and_mul", out=out, input=data, threshold=0.3)
    _close(out, torch.where(data[:, :8] > 0.3, data[:, :8], 0) * data[:, 8:])
    whole = torch.zeros(3, 16)
    run("_C::relu_squared", out=whole, input=data)
    _close(whole, data.relu().square())
