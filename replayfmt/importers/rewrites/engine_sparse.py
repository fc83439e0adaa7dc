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

from ..common.synthesis import Tensor
from .engine_attention import LATENT_NAMES, by_scores, latent_attention, put
from .engine_experts import LARGEST, block_products, dequantized
from .engine_weights import unpacked
from .rewriting import CannotRewrite, Given, Recorded, RewrittenCalls, plain, renamed, tensors_in

_TOKEN_BYTES, _QUANTIZED, _TURNED, _SCALED = 656, 512, 64, 128
_FLOAT8 = DType.float8_e4m3fn


def _bits(calls: RewrittenCalls, tensor: Tensor, dtype: DType) -> Tensor:
    return tensor if tensor.meta.dtype is dtype else calls.one("aten::view.dtype", self=tensor, dtype=dtype)


def _scales(calls: RewrittenCalls, data: Tensor, least: float, *, powers: bool) -> Tensor:
    """The largest magnitude along the last dimension over float8's largest number; as a power of two, rounded up."""
    most = calls.one("aten::amax", self=calls.one("aten::abs", self=data), dim=[-1], keepdim=True)
    found = calls.one("aten::div.Scalar", self=calls.one("aten::clamp", self=most, min=least), other=LARGEST[_FLOAT8])
    if not powers:
        return found
    whole = calls.one("aten::ceil", self=calls.one("aten::log2", self=found))
    return calls.one("aten::exp2", self=whole)


def _float8_bytes(calls: RewrittenCalls, data: Tensor, scales: Tensor) -> Tensor:
    return _bits(calls, calls.cast(calls.one("aten::div.Tensor", self=data, other=scales), _FLOAT8), DType.uint8)


# ---------------------------------------------------------------------------------------------------------- attention


def token_bytes(calls: RewrittenCalls, latent: Tensor, turned: Tensor) -> Tensor:
    """The bytes of tokens in the quantized cache."""
    tokens = latent.meta.sizes[0]
    parts = calls.one("aten::reshape", self=calls.single(latent), shape=[tokens, _QUANTIZED // _SCALED, _SCALED])
    scales = _scales(calls, parts, 1e-30, powers=False)
    numbers = calls.one("aten::reshape", self=_float8_bytes(calls, parts, scales), shape=[tokens, _QUANTIZED])
    flat = calls.one("aten::reshape", self=scales, shape=[tokens, _QUANTIZED // _SCALED])
    rest = [_bits(calls, each, DType.uint8) for each in (flat, calls.cast(turned, DType.bfloat16))]
    return calls.one("aten::cat", tensors=[numbers, *rest], dim=-1)


def concat_and_cache(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """A token's compressed key and value and the turned part of its key, in a cache of numbers or of bytes."""
    cache, latent, turned = given["kv_cache"], given["kv_c"], given["k_pe"]
    turned = calls.one("aten::reshape", self=turned, shape=[turned.meta.sizes[0], turned.meta.sizes[-1]])
    scale = given.get("scale")
    if cache.meta.sizes[-1] == _TOKEN_BYTES and latent.meta.sizes[-1] == _QUANTIZED:
        both, cache, scale = token_bytes(calls, latent, turned), _bits(calls, cache, DType.uint8), None
    else:
        both = calls.one("aten::cat", tensors=[latent, turned], dim=-1)
    put(calls, cache, given["slot_mapping"], cache.meta.sizes[1], both, scale)


def _tokens(calls: RewrittenCalls, rows: Tensor, dtype: DType) -> Tensor:
    """Tokens of a cache of bytes as numbers."""
    if rows.meta.dtype is dtype:
        return rows
    if rows.meta.sizes[-1] != _TOKEN_BYTES:
        raise CannotRewrite(f"a sparse cache of {rows.meta.sizes[-1]} elements of {rows.meta.dtype.name} for a token")
    ahead = list(rows.meta.sizes[:-1])
    rows = _bits(calls, rows, DType.uint8)
    ends = [0, _QUANTIZED, _TOKEN_BYTES - 2 * _TURNED, _TOKEN_BYTES]
    parts = [calls.slice(rows, -1, *part) for part in zip(ends, ends[1:], strict=False)]
    kinds = (_FLOAT8, DType.float32, DType.bfloat16)
    numbers, scales, turned = (
        _bits(calls, calls.one("aten::clone", self=part, memory_format=None), kind)
        for part, kind in zip(parts, kinds, strict=True)
    )
    groups = calls.one("aten::reshape", self=calls.single(numbers), shape=[*ahead, _QUANTIZED // _SCALED, _SCALED])
    whole = calls.times(groups, calls.one("aten::unsqueeze", self=scales, dim=-1))
    whole = calls.one("aten::reshape", self=whole, shape=[*ahead, _QUANTIZED])
    return calls.one("aten::cat", tensors=[calls.cast(whole, dtype), calls.cast(turned, dtype)], dim=-1)


def chosen_attention(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """MLA's of queries [tokens, heads, width], or [sequences, queries, heads, width], that see only the keys chosen for
    each: their places in the cache, below zero for none."""
    plain("attention", given, extra_kv=(None,), extra_indices=(None,), extra_topk_length=(None,))
    query, cache, chosen = given["q"], given["kv"], given["indices"]
    (*ahead, heads, width), places = query.meta.sizes, chosen.meta.sizes[-1]
    tokens = math.prod(ahead)
    if cache.meta.sizes[-2] != 1:
        raise CannotRewrite("attention to chosen keys of several heads")
    count = math.prod(cache.meta.sizes[:-2])
    cache = calls.one("aten::reshape", self=cache, shape=[count, 1, cache.meta.sizes[-1]])
    chosen = calls.one("aten::reshape", self=chosen, shape=[tokens, places])
    real = calls.one(
        "aten::logical_and",
        self=calls.one("aten::ge.Scalar", self=chosen, other=0),
        other=calls.one("aten::lt.Scalar", self=chosen, other=count),
    )
    if given.get("topk_length") is not None:
        lengths = given["topk_length"]
        lengths = calls.one(
            "aten::repeat_interleave.self_int", self=lengths, repeats=tokens // lengths.meta.sizes[0], dim=0
        )
        lengths = calls.one("aten::unsqueeze", self=lengths, dim=1)
        near = calls.one("aten::lt.Tensor", self=calls.count(places), other=lengths)
        real = calls.one("aten::logical_and", self=real, other=near)
    inside = calls.one("aten::clamp", self=chosen, min=0, max=count - 1)
    keys = _tokens(calls, calls.one("aten::index.Tensor", self=cache, indices=[inside]), query.meta.dtype)
    rows = calls.one("aten::reshape", self=query, shape=[tokens, 1, heads, width])
    seen = calls.one("aten::view", self=real, size=[tokens, 1, 1, places])
    heads_first = [
        calls.one("aten::transpose.int", self=each, dim0=1, dim1=2)
        for each in (rows, keys, calls.slice(keys, -1, 0, given["d_v"]))
    ]
    mixed = by_scores(calls, heads_first, seen, given["sm_scale"], None, given.get("attn_sink"))
    if given.get("out_") is not None:
        calls.write(given["out_"], calls.one("aten::reshape", self=mixed, shape=list(given["out_"].meta.sizes)))
    for place, recorded in enumerate(tensors_in(results or [])):
        if place == 0 and recorded is not given.get("out_"):
            calls.fill(recorded, calls.one("aten::reshape", self=mixed, shape=list(recorded.meta.sizes)))
        elif place:
            calls.allocate(recorded, zeros=True)
    calls.assumed.append("the largest scores and the logarithms of the sums, which it also returns, are 0")


def latent_decode(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """FlashMLA's decode, of the keys in a sequence's pages or of chosen ones."""
    if given.get("indices") is None:
        latent_attention(calls, given, results)
        return
    plain("attention", given, extra_k_cache=(None,), extra_indices_in_kvcache=(None,))
    names = {"cache": "kv", "head_size_v": "d_v", "scale": "sm_scale"}
    chosen_attention(calls, {names.get(name, name): value for name, value in given.items()}, results)


# ------------------------------------------------------------------------------------------------------------ indexer


def _page_parts(calls: RewrittenCalls, cache: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The numbers [pages, tokens, width] and the bytes of the scales [pages, tokens, bytes] in an indexer's cache."""
    pages, block, whole = cache.meta.sizes[0], cache.meta.sizes[1], cache.meta.sizes[-1]
    flat = calls.one("aten::view", self=_bits(calls, cache, DType.uint8), size=[pages, -1])
    ends = (0, block * width, block * whole)
    numbers, scales = (calls.slice(flat, 1, *part) for part in zip(ends, ends[1:], strict=False))
    return (
        calls.one("aten::view", self=numbers, size=[pages, block, width]),
        calls.one("aten::view", self=scales, size=[pages, block, whole - width]),
    )


def indexer_cache(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    """Keys of the indexer as float8, with a scale for each group of numbers."""
    plain("a cache", given, preshuffle=(None, False))
    keys, slots, block = given["k"], given["slot_mapping"], given["kv_cache"].meta.sizes[1]
    tokens, width = keys.meta.sizes
    numbers, scales = _page_parts(calls, given["kv_cache"], width)
    groups = width // given["quant_block_size"]
    parts = calls.one("aten::reshape", self=calls.single(keys), shape=[tokens, groups, -1])
    found = _scales(calls, parts, 1e-4, powers=given.get("kv_cache_dtype", given.get("scale_fmt")) == "ue8m0")
    new = calls.one("aten::reshape", self=_float8_bytes(calls, parts, found), shape=[tokens, width])
    put(calls, numbers, slots, block, new)
    flat = calls.one("aten::reshape", self=found, shape=[tokens, groups])
    put(calls, scales, slots, block, _bits(calls, flat, DType.uint8))


def gather_indexer_cache(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    """The indexer's keys of sequences, one after the other, and their scales."""
    plain("a cache", given, preshuffle=(None, False))
    cache, table, ends = given["kv_cache"], given["block_table"], given["cu_seq_lens"]
    target, scales = (_bits(calls, given[name], DType.uint8) for name in ("dst_k", "dst_scale"))
    tokens, block, sequences = target.meta.sizes[0], cache.meta.sizes[1], table.meta.sizes[0]
    place = calls.count(tokens)
    last = calls.cast(calls.slice(ends, 0, 1, sequences + 1), DType.int64)
    whose = calls.one("aten::searchsorted.Tensor", sorted_sequence=last, self=place, right=True)
    whose = calls.one("aten::clamp", self=whose, min=None, max=sequences - 1)
    nth = calls.one(
        "aten::sub.Tensor", self=place, other=calls.one("aten::index_select", self=ends, dim=0, index=whose)
    )
    nth = calls.one("aten::clamp", self=nth, min=0, max=table.meta.sizes[1] * block - 1)
    of_table = calls.one("aten::floor_divide.Scalar", self=nth, other=block)
    page = calls.one("aten::index.Tensor", self=table, indices=[whose, of_table])
    where = [calls.cast(page, DType.int64), calls.one("aten::remainder.Scalar", self=nth, other=block)]
    for part, out in zip(_page_parts(calls, cache, target.meta.sizes[-1]), (target, scales), strict=True):
        calls.write(out, calls.one("aten::index.Tensor", self=part, indices=where))


def best_of_rows(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    """The places of the largest scores of each row between where it starts and ends, from its start; -1 where there are
    no more. Without ends, a row is one of `next_n` queries of a sequence, the last of which sees all of it."""
    logits, target = given["logits"], given["indices"]
    (rows, columns), most = logits.meta.sizes, target.meta.sizes[-1]
    starts, ends = given.get("starts"), given["ends"]
    each = given.get("next_n") or rows // ends.meta.sizes[0]
    if each > 1:
        nth = calls.one("aten::remainder.Scalar", self=calls.count(rows), other=each)
        of_all = calls.one("aten::repeat_interleave.self_int", self=ends, repeats=each, dim=0)
        ends = calls.one("aten::sub.Scalar", self=calls.one("aten::add.Tensor", self=of_all, other=nth), other=each - 1)
    places, ends = calls.count(columns), calls.one("aten::view", self=ends, size=[rows, 1])
    seen = calls.one("aten::lt.Tensor", self=places, other=ends)
    if starts is not None:
        starts = calls.one("aten::view", self=starts, size=[rows, 1])
        later = calls.one("aten::ge.Tensor", self=places, other=starts)
        seen = calls.one("aten::logical_and", self=seen, other=later)
    hidden = calls.one("aten::logical_not", self=seen)
    scores = calls.one("aten::masked_fill.Scalar", self=calls.single(logits), mask=hidden, value=-math.inf)
    count = min(most, columns)
    best, which = calls.call("aten::topk", {"self": scores, "k": count, "dim": -1, "largest": True, "sorted": True})
    if starts is not None:
        which = calls.one("aten::sub.Tensor", self=which, other=starts)
    none = calls.one("aten::eq.Scalar", self=best, other=-math.inf)
    which = calls.one("aten::masked_fill.Scalar", self=which, mask=none, value=-1)
    target = calls.one("aten::view", self=target, size=[rows, most])
    calls.write(calls.slice(target, 1, 0, count), which)
    if count < most:
        rest = calls.slice(target, 1, count, most)
        calls.call("aten::fill_.Scalar", {"self": rest, "value": -1}, [rest])


def _scored(calls: RewrittenCalls, query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """The sum over heads of weight * relu(q * k), for queries [.., heads, width], keys [.., keys, width]."""
    turned = calls.one("aten::transpose.int", self=keys, dim0=-2, dim1=-1)
    score = calls.one("aten::relu", self=calls.one("aten::matmul", self=query, other=turned))
    share = calls.one("aten::unsqueeze", self=calls.single(weights), dim=-1)
    return calls.one("aten::sum.dim_IntList", self=calls.times(score, share), dim=[-2])


def indexer_logits(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """Scores of all keys for each query; beyond where the query starts and ends, they are minus infinity."""
    plain("scores", given, q_sf=(None,), max_seqlen_k=(None, 0))
    keys = dequantized(calls, given["kv"], given["kv_sf"], DType.float32)
    found = _scored(calls, calls.single(given["q"]), keys, given["weights"])
    rows, columns = found.meta.sizes
    places = calls.count(columns)
    starts, ends = (
        calls.one("aten::view", self=given[f"cu_seq_len_k_{name}"], size=[rows, 1]) for name in ("start", "end")
    )
    seen = calls.one(
        "aten::logical_and",
        self=calls.one("aten::ge.Tensor", self=places, other=starts),
        other=calls.one("aten::lt.Tensor", self=places, other=ends),
    )
    hidden = calls.one("aten::logical_not", self=seen)
    calls.fill((results or [None])[0], calls.one("aten::masked_fill.Scalar", self=found, mask=hidden, value=-math.inf))


def paged_indexer_logits(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """Scores of the keys in each sequence's pages, for its queries [sequences, queries, heads, width]."""
    plain("scores", given, q_sf=(None,), indices=(None,))
    query, table, longest = given["q"], given["block_table"], given["max_context_len"]
    sequences, queries, _heads, width = query.meta.sizes
    numbers, scales = _page_parts(calls, given["kv_cache"], width)
    block = numbers.meta.sizes[1]
    table = calls.slice(table, 1, 0, min(table.meta.sizes[1], max(1, -(-longest // block))))
    pages = [calls.one("aten::index.Tensor", self=each, indices=[table]) for each in (numbers, scales)]
    numbers, scales = (_bits(calls, each, kind) for each, kind in zip(pages, (_FLOAT8, DType.float32), strict=True))
    keys = calls.times(calls.single(numbers), scales)
    count = table.meta.sizes[1] * block
    keys = calls.one("aten::reshape", self=keys, shape=[sequences, 1, count, width])
    weights = calls.one("aten::reshape", self=given["weights"], shape=[sequences, queries, -1])
    found = _scored(calls, calls.single(query), keys, weights)
    found = calls.one("aten::reshape", self=found, shape=[sequences * queries, count])
    found = calls.slice(found, 1, 0, min(count, longest))
    recorded = (results or [None])[0]
    if isinstance(recorded, Tensor) and recorded.meta.sizes != found.meta.sizes:
        raise CannotRewrite(f"scores of {list(recorded.meta.sizes)}, not {list(found.meta.sizes)}")
    calls.fill(recorded, found)


# ----------------------------------------------------------------------------------------------------------- products


def _factor(calls: RewrittenCalls, data: Tensor, scales: Tensor | None, dtype: DType, *, turned: bool) -> Tensor:
    """A factor of a product as numbers. Scales of four groups may be in one word: their exponents."""
    if scales is not None and scales.meta.dtype is DType.int32:
        ahead, groups = list(scales.meta.sizes[:-1]), -(-data.meta.sizes[-1] // _SCALED)
        words = calls.one("aten::reshape", self=scales, shape=[-1, scales.meta.sizes[-1]])
        powers = calls.single(unpacked(calls, words, 1, 8))
        powers = calls.one("aten::exp2", self=calls.one("aten::sub.Scalar", self=powers, other=127))
        scales = calls.slice(calls.one("aten::reshape", self=powers, shape=[*ahead, -1]), -1, 0, groups)
    data = dequantized(calls, data, scales, dtype)
    return calls.one("aten::transpose.int", self=data, dim0=-2, dim1=-1) if turned else data


def gemm(layout: str) -> Any:
    """DeepGEMM's product: `t` behind `n` is the second factor transposed, a first `t` the first one. Of groups, rows
    have the expert in `grouped_layout`, or each expert has as many rows as it may have."""

    def rule(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
        plain("a product", given, c=(None,), epilogue_kind=(None, 0), alpha=(None, 1.0), use_psum_layout=(None, False))
        target, one, other = given["d"], given["a"], given["b"]
        dtype = DType.bfloat16
        one = _factor(calls, one, given.get("sfa"), dtype, turned=layout[0] == "t")
        other = _factor(calls, other, given.get("sfb"), dtype, turned=layout[1] == "t")
        experts = given.get("grouped_layout")
        if experts is not None:
            rows = calls.filled(1, one.meta.sizes[0])
            made, _whose = block_products(calls, one, other, experts, 1, rows)
        else:
            made = calls.one("aten::matmul", self=one, other=other)
        calls.write(target, made)

    return rule


# -------------------------------------------------------------------------------------------------------------- table

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
