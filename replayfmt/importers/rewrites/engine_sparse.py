"""Sparse latent attention (DeepSeek V3.2): the cache in bytes, the indexer that chooses keys, and DeepGEMM's products.
Compositions for engines.py.

A token of the quantized cache has 656 bytes: 512 numbers as float8, four scales of 128 of them each as float32, and 64
numbers as bfloat16. A page of the indexer's cache has the float8 numbers of all its tokens, and behind them their
scales.
"""

from __future__ import annotations

import math
from typing import Any

from replayfmt.format.codes import DType

from .engine_attention import LATENT_NAMES, by_scores, latent_attention, put
from .engine_experts import LARGEST, best_of, block_products, dequantized
from .engine_weights import unpacked
from .rewriting import CannotRewrite, Given, RewrittenCalls, Value, plain, renamed, tensors_in

_TOKEN_BYTES, _QUANTIZED, _TURNED, _SCALED = 656, 512, 64, 128
_FLOAT8 = DType.float8_e4m3fn


def _bits(tensor: Value, dtype: DType) -> Any:
    return tensor if tensor.dtype is dtype else tensor.bits(dtype)


def _scales(data: Value, least: float, *, powers: bool) -> Any:
    """The largest magnitude along the last dimension over float8's largest number; as a power of two, rounded up."""
    found = data.abs().amax([-1], keepdim=True).clamp(least) / LARGEST[_FLOAT8]
    return found.log2().ceil().exp2() if powers else found


def _float8_bytes(data: Value, scales: Value) -> Any:
    return _bits((data / scales).to(_FLOAT8), DType.uint8)


def concat_and_cache(calls: RewrittenCalls, given: Given) -> None:
    """A token's compressed key and value and the turned part of its key, in a cache of numbers or of bytes."""
    cache, latent, turned, scale = given["kv_cache"], given["kv_c"], given["k_pe"], given.get("scale")
    turned = turned.reshape([turned.sizes[0], turned.sizes[-1]])
    if cache.sizes[-1] == _TOKEN_BYTES and latent.sizes[-1] == _QUANTIZED:
        tokens, groups = latent.sizes[0], _QUANTIZED // _SCALED
        parts = latent.single().reshape([tokens, groups, _SCALED])
        scales = _scales(parts, 1e-30, powers=False)
        numbers = _float8_bytes(parts, scales).reshape([tokens, _QUANTIZED])
        flat = scales.reshape([tokens, groups])
        rest = [_bits(flat, DType.uint8), _bits(turned.to(DType.bfloat16), DType.uint8)]
        both, cache, scale = calls.cat([numbers, *rest], -1), _bits(cache, DType.uint8), None
    else:
        both = calls.cat([latent, turned], -1)
    put(cache, given["slot_mapping"], cache.sizes[1], both, scale)


def _tokens(rows: Value, dtype: DType) -> Value:
    """Tokens of a cache of bytes as numbers."""
    if rows.dtype is dtype:
        return rows
    if rows.sizes[-1] != _TOKEN_BYTES:
        raise CannotRewrite(f"a sparse cache of {rows.sizes[-1]} elements of {rows.dtype.name} for a token")
    ahead = list(rows.sizes[:-1])
    rows = _bits(rows, DType.uint8)
    ends = [0, _QUANTIZED, _TOKEN_BYTES - 2 * _TURNED, _TOKEN_BYTES]
    parts = [rows.part(-1, *part) for part in zip(ends, ends[1:], strict=False)]
    numbers, scales, turned = (
        _bits(part.clone(memory_format=None), kind)
        for part, kind in zip(parts, (_FLOAT8, DType.float32, DType.bfloat16), strict=True)
    )
    groups = numbers.single().reshape([*ahead, _QUANTIZED // _SCALED, _SCALED])
    whole = (groups * scales.unsqueeze(-1)).reshape([*ahead, _QUANTIZED])
    return rows.calls.cat([whole.to(dtype), turned.to(dtype)], -1)


def chosen_attention(calls: RewrittenCalls, given: Given) -> None:
    """MLA's of queries [tokens, heads, width], or [sequences, queries, heads, width], that see only the keys chosen for
    each: their places in the cache, below zero for none."""
    plain("attention", given, extra_kv=(None,), extra_indices=(None,), extra_topk_length=(None,))
    query, cache, chosen, out = given["q"], given["kv"], given["indices"], given.get("out_")
    (*ahead, heads, width), places = query.sizes, chosen.sizes[-1]
    tokens = math.prod(ahead)
    if cache.sizes[-2] != 1:
        raise CannotRewrite("attention to chosen keys of several heads")
    count = math.prod(cache.sizes[:-2])
    cache = cache.reshape([count, 1, cache.sizes[-1]])
    chosen = chosen.reshape([tokens, places])
    real = (chosen >= 0) & (chosen < count)
    lengths = given.get("topk_length")
    if lengths is not None:
        lengths = lengths.repeat_interleave(tokens // lengths.sizes[0], 0).unsqueeze(1)
        real = real & (calls.count(places) < lengths)
    keys = _tokens(cache.index([chosen.clamp(0, count - 1)]), query.dtype)
    rows = query.reshape([tokens, 1, heads, width])
    seen = real.view([tokens, 1, 1, places])
    values = keys.part(-1, 0, given["d_v"])
    heads_first = [each.transpose(1, 2) for each in (rows, keys, values)]
    mixed: Any = by_scores(heads_first, seen, given["sm_scale"], None, given.get("attn_sink"))
    if out is not None:
        out.copy_(mixed.like(out))
    for place, recorded in enumerate(tensors_in(calls.results or [])):
        if place == 0 and (out is None or recorded is not out.tensor):
            calls.fill(recorded, mixed.like(calls.wrapped(recorded)))
        elif place:
            calls.allocate(recorded, zeros=True)
    calls.assumed.append("the largest scores and the logarithms of the sums, which it also returns, are 0")


def latent_decode(calls: RewrittenCalls, given: Given) -> None:
    """FlashMLA's decode, of the keys in a sequence's pages or of chosen ones."""
    if given.get("indices") is None:
        latent_attention(calls, given)
        return
    plain("attention", given, extra_k_cache=(None,), extra_indices_in_kvcache=(None,))
    renamed(chosen_attention, {"cache": "kv", "head_size_v": "d_v", "scale": "sm_scale"})(calls, given)


def _page_parts(cache: Value, width: int) -> tuple[Any, Any]:
    """The numbers [pages, tokens, width] and the bytes of the scales [pages, tokens, bytes] in an indexer's cache."""
    pages, block, whole = cache.sizes[0], cache.sizes[1], cache.sizes[-1]
    flat = _bits(cache, DType.uint8).view([pages, -1])
    numbers, scales = flat.part(1, 0, block * width), flat.part(1, block * width, block * whole)
    return numbers.view([pages, block, width]), scales.view([pages, block, whole - width])


def indexer_cache(_calls: RewrittenCalls, given: Given) -> None:
    """Keys of the indexer as float8, with a scale for each group of numbers."""
    plain("a cache", given, preshuffle=(None, False))
    keys, slots, block = given["k"], given["slot_mapping"], given["kv_cache"].sizes[1]
    tokens, width = keys.sizes
    numbers, scales = _page_parts(given["kv_cache"], width)
    groups = width // given["quant_block_size"]
    parts = keys.single().reshape([tokens, groups, -1])
    found = _scales(parts, 1e-4, powers=given.get("kv_cache_dtype", given.get("scale_fmt")) == "ue8m0")
    put(numbers, slots, block, _float8_bytes(parts, found).reshape([tokens, width]))
    put(scales, slots, block, _bits(found.reshape([tokens, groups]), DType.uint8))


def gather_indexer_cache(calls: RewrittenCalls, given: Given) -> None:
    """The indexer's keys of sequences, one after the other, and their scales."""
    plain("a cache", given, preshuffle=(None, False))
    cache, table, ends = given["kv_cache"], given["block_table"], given["cu_seq_lens"]
    target, scales = (_bits(given[name], DType.uint8) for name in ("dst_k", "dst_scale"))
    tokens, block, sequences = target.sizes[0], cache.sizes[1], table.sizes[0]
    place = calls.count(tokens)
    last = ends.part(0, 1, sequences + 1).to(DType.int64)
    whose = last.searchsorted(place, right=True).clamp(None, sequences - 1)
    nth = (place - ends.index_select(0, whose)).clamp(0, table.sizes[1] * block - 1)
    where = [table.index([whose, nth // block]).to(DType.int64), nth % block]
    for part, out in zip(_page_parts(cache, target.sizes[-1]), (target, scales), strict=True):
        out.copy_(part.index(where))


def best_of_rows(calls: RewrittenCalls, given: Given) -> None:
    """The places of the largest scores of each row between where it starts and ends, from its start; -1 where there are
    no more. Without ends, a row is one of `next_n` queries of a sequence, the last of which sees all of it."""
    logits, target = given["logits"], given["indices"]
    (rows, columns), most = logits.sizes, target.sizes[-1]
    starts, ends = given.get("starts"), given["ends"]
    each = given.get("next_n") or rows // ends.sizes[0]
    if each > 1:
        nth = calls.count(rows) % each
        ends = ends.repeat_interleave(each, 0) + nth - (each - 1)
    places, ends = calls.count(columns), ends.view([rows, 1])
    seen = places < ends
    if starts is not None:
        starts = starts.view([rows, 1])
        seen = seen & (places >= starts)
    hidden = ~seen
    count = min(most, columns)
    best, which = best_of(logits.single().masked_fill(hidden, -math.inf), count)
    if starts is not None:
        which = which - starts
    which = which.masked_fill(best.eq(-math.inf), -1)
    target = target.view([rows, most])
    target.part(1, 0, count).copy_(which)
    if count < most:
        target.part(1, count, most).fill_(-1)


def _scored(query: Value, keys: Value, weights: Value) -> Any:
    """The sum over heads of weight * relu(q * k), for queries [.., heads, width], keys [.., keys, width]."""
    score = query.matmul(keys.transpose(-2, -1)).relu()
    return (score * weights.single().unsqueeze(-1)).sum([-2])


def indexer_logits(calls: RewrittenCalls, given: Given) -> None:
    """Scores of all keys for each query; beyond where the query starts and ends, they are minus infinity."""
    plain("scores", given, q_sf=(None,), max_seqlen_k=(None, 0))
    keys = dequantized(given["kv"], given["kv_sf"], DType.float32)
    found = _scored(given["q"].single(), keys, given["weights"])
    rows, columns = found.sizes
    places = calls.count(columns)
    starts, ends = (given[f"cu_seq_len_k_{name}"].view([rows, 1]) for name in ("start", "end"))
    calls.deliver(found.masked_fill(~((places >= starts) & (places < ends)), -math.inf))


def paged_indexer_logits(calls: RewrittenCalls, given: Given) -> None:
    """Scores of the keys in each sequence's pages, for its queries [sequences, queries, heads, width]."""
    plain("scores", given, q_sf=(None,), indices=(None,))
    query, table, longest = given["q"], given["block_table"], given["max_context_len"]
    sequences, queries, _heads, width = query.sizes
    numbers, scales = _page_parts(given["kv_cache"], width)
    block = numbers.sizes[1]
    table = table.part(1, 0, min(table.sizes[1], max(1, -(-longest // block))))
    numbers, scales = numbers.index([table]), scales.index([table])
    numbers, scales = _bits(numbers, _FLOAT8), _bits(scales, DType.float32)
    count = table.sizes[1] * block
    keys = (numbers.single() * scales).reshape([sequences, 1, count, width])
    weights = given["weights"].reshape([sequences, queries, -1])
    found = _scored(query.single(), keys, weights).reshape([sequences * queries, count])
    found = found.part(1, 0, min(count, longest))
    for recorded in tensors_in(calls.results or []):
        if recorded.meta.sizes != found.sizes:
            raise CannotRewrite(f"scores of {list(recorded.meta.sizes)}, not {list(found.sizes)}")
    calls.deliver(found)


def _factor(data: Value, scales: Any, dtype: DType, *, turned: bool) -> Any:
    """A factor of a product as numbers. Scales of four groups may be in one word: their exponents."""
    if scales is not None and scales.dtype is DType.int32:
        ahead, groups = list(scales.sizes[:-1]), -(-data.sizes[-1] // _SCALED)
        words = scales.reshape([-1, scales.sizes[-1]])
        powers = (unpacked(words, 1, 8).single() - 127).exp2()
        scales = powers.reshape([*ahead, -1]).part(-1, 0, groups)
    data = dequantized(data, scales, dtype)
    return data.transpose(-2, -1) if turned else data


def gemm(layout: str) -> Any:
    """DeepGEMM's product: `t` behind `n` is the second factor transposed, a first `t` the first one. Of groups, rows
    have the expert in `grouped_layout`, or each expert has as many rows as it may have."""

    def rule(calls: RewrittenCalls, given: Given) -> None:
        plain("a product", given, c=(None,), epilogue_kind=(None, 0), alpha=(None, 1.0), use_psum_layout=(None, False))
        one = _factor(given["a"], given.get("sfa"), DType.bfloat16, turned=layout[0] == "t")
        other = _factor(given["b"], given.get("sfb"), DType.bfloat16, turned=layout[1] == "t")
        experts = given.get("grouped_layout")
        if experts is not None:
            made, _whose = block_products(one, other, experts, 1, calls.filled(1, one.sizes[0]))
        else:
            made = one @ other
        given["d"].copy_(made)

    return rule


_LENGTHS = {"lengths": "ends", "output": "indices", "seq_lens": "ends", "rowStarts": "starts", "rowEnds": "ends"}
_LENGTHS |= {"score": "logits", "row_starts": "starts"}
RULES: tuple[tuple[Any, str], ...] = (
    (chosen_attention, "_flashmla_C::sparse_decode_fwd _flashmla_C::sparse_prefill_fwd sgl_kernel::sparse_prefill_fwd"),
    (concat_and_cache, "_C_cache_ops::concat_and_cache_mla"),
    (renamed(latent_decode, LATENT_NAMES), "_flashmla_C::fwd_kvcache_mla sgl_kernel::fwd_kvcache_mla"),
    (indexer_cache, "_C_cache_ops::indexer_k_quant_and_cache aiter::indexer_k_quant_and_cache"),
    (gather_indexer_cache, "_C_cache_ops::cp_gather_indexer_k_quant_cache aiter::cp_gather_indexer_k_quant_cache"),
    (
        renamed(best_of_rows, _LENGTHS),
        "_C::top_k_per_row_prefill _C::top_k_per_row_decode _C::persistent_topk _C::cooperative_topk "
        "sgl_kernel::fast_topk",
    ),
    (indexer_logits, "deep_gemm::fp8_fp4_mqa_logits"),
    (paged_indexer_logits, "deep_gemm::fp8_fp4_paged_mqa_logits"),
    *(
        (
            gemm(layout),
            f"deep_gemm::fp8_fp4_gemm_{layout} deep_gemm::bf16_gemm_{layout}"
            + "".join(
                f" deep_gemm::m_grouped_{numbers}_gemm_{layout}_{rows}"
                for numbers in ("fp8_fp4", "bf16")
                for rows in ("contiguous", "masked")
                if layout[0] == "n"
            ),
        )
        for layout in ("nn", "nt", "tn", "tt")
    ),
)
