"""Caches of keys and values, and attention to them, as engines call it: compositions for engines.py."""

from __future__ import annotations

import math
from typing import Any

from replayfmt.format.codes import DType
from replayfmt.pytorch.traced_names import Requests

from ..common.synthesis import Tensor
from .engine_experts import LARGEST, dequantized, quantized
from .rewriting import CannotRewrite, Given, Recorded, RewrittenCalls, plain, renamed, tensors_in


def _float8(calls: RewrittenCalls, cache: Tensor, dtype: DType) -> Tensor:
    """A quantized cache for tokens of another dtype; bytes are taken for the most frequent one."""
    if cache.meta.dtype is DType.uint8:
        calls.assumed.append("the bytes of the cache are float8_e4m3fn")
        return calls.one("aten::view.dtype", self=cache, dtype=DType.float8_e4m3fn)
    if cache.meta.dtype not in LARGEST:
        raise CannotRewrite(f"a cache of {cache.meta.dtype.name} for tokens of {dtype.name}")
    return cache


def put(
    calls: RewrittenCalls, cache: Tensor, slots: Tensor, block: int, new: Tensor, scale: Tensor | None = None
) -> None:
    """Put tokens into a cache of [blocks, block, ...]. A slot below zero is none: there the cache keeps what it has."""
    if cache.meta.dtype is not new.meta.dtype:
        cache = _float8(calls, cache, new.meta.dtype)
        if scale is None:
            raise CannotRewrite(f"a cache of {cache.meta.dtype.name} for tokens of {new.meta.dtype.name}, unscaled")
        new = quantized(calls, new, scale, cache.meta.dtype)
    new = calls.slice(new, 0, 0, slots.meta.sizes[0])
    where = [
        calls.one("aten::floor_divide.Scalar", self=slots, other=block),
        calls.one("aten::remainder.Scalar", self=slots, other=block),
    ]
    kept = calls.one("aten::index.Tensor", self=cache, indices=where)
    shape = [slots.meta.sizes[0]] + [1] * (len(new.meta.sizes) - 1)
    real = calls.one("aten::view", self=calls.one("aten::ge.Scalar", self=slots, other=0), size=shape)
    content = calls.one("aten::where.self", condition=real, self=new, other=kept)
    calls.call("aten::index_put_", {"self": cache, "indices": where, "values": content}, [cache])


def reshape_and_cache_flash(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    for name in ("key", "value"):
        cache = given[f"{name}_cache"]
        put(calls, cache, given["slot_mapping"], cache.meta.sizes[1], given[name], given.get(f"{name[0]}_scale"))


def reshape_and_cache(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    plain("a cache", given, interleaved_v=(None, False))
    keys, values, slots = given["key_cache"], given["value_cache"], given["slot_mapping"]
    tokens, heads = given["key"].meta.sizes[:2]
    _blocks, _heads, parts, block, vector = keys.meta.sizes
    new = calls.one("aten::reshape", self=given["key"], shape=[tokens, heads, parts, vector])
    put(calls, calls.one("aten::permute", self=keys, dims=[0, 3, 1, 2, 4]), slots, block, new, given.get("k_scale"))
    put(
        calls,
        calls.one("aten::permute", self=values, dims=[0, 3, 1, 2]),
        slots,
        block,
        given["value"],
        given.get("v_scale"),
    )


def merged_states(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    """One attention of two, each to a part of the keys, by the logarithms of their sums: [heads, tokens] or the other
    way round."""
    plain("attention", given, output_scale=(None,), prefill_tokens_with_context=(None,))
    outputs, sums = ([given[f"{place}_{what}"] for place in ("prefix", "suffix")] for what in ("output", "lse"))
    both = calls.one("aten::logaddexp", self=sums[0], other=sums[1])
    parts = []
    for output, own in zip(outputs, sums, strict=True):
        share = calls.one("aten::exp", self=calls.one("aten::sub.Tensor", self=own, other=both))
        if share.meta.sizes != output.meta.sizes[:2]:
            share = calls.one("aten::transpose.int", self=share, dim0=0, dim1=1)
        parts.append(calls.times(calls.single(output), calls.one("aten::unsqueeze", self=share, dim=-1)))
    calls.write(given["output"], calls.one("aten::add.Tensor", self=parts[0], other=parts[1]))
    if given.get("output_lse") is not None:
        calls.write(given["output_lse"], both)


def cache_of_a_step(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    """vLLM's own: the cache is no argument, so the tokens go to other memory, as many bytes."""
    for name in ("key", "value"):
        calls.one("aten::clone", self=given[name])


def _attend(
    calls: RewrittenCalls,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    scale: float | None,
    *,
    causal: bool = False,
    own: Tensor | None = None,
    left: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of queries [sequences, queries, heads, width] to as many of the keys [sequences, keys, heads, width] as
    each sequence has. Causal: the last query is at the end; `own` is how many each sequence has, if not all of them.
    `left`: how many keys before its own a query sees. `cap` bounds the scores smoothly; `sinks` is one more score for
    each head, of a key without a value."""
    if query.meta.dtype is not keys.meta.dtype:
        raise CannotRewrite(f"a cache of {keys.meta.dtype.name} for queries of {query.meta.dtype.name}")
    places = calls.count(keys.meta.sizes[1])
    ends = calls.one("aten::view", self=lengths, size=[-1, 1, 1, 1])
    if causal:
        count = query.meta.sizes[1]
        rows = calls.one("aten::view", self=calls.count(count), size=[1, 1, -1, 1])
        if own is None:
            first = calls.one("aten::sub.Scalar", self=ends, other=count)
        else:
            first = calls.one(
                "aten::sub.Tensor", self=ends, other=calls.one("aten::view", self=own, size=[-1, 1, 1, 1])
            )
        ends = calls.one("aten::add.Scalar", self=calls.one("aten::add.Tensor", self=first, other=rows), other=1)
    seen = calls.one("aten::lt.Tensor", self=places, other=ends)
    if left is not None and left >= 0:
        begin = calls.one("aten::sub.Scalar", self=ends, other=left + 1)
        seen = calls.one("aten::logical_and", self=seen, other=calls.one("aten::ge.Tensor", self=places, other=begin))
    heads_first = [calls.one("aten::permute", self=each, dims=[0, 2, 1, 3]) for each in (query, keys, values)]
    if cap or sinks is not None:
        mixed = by_scores(calls, heads_first, seen, scale, cap, sinks)
    else:
        mixed = calls.one(
            "aten::scaled_dot_product_attention",
            query=heads_first[0],
            key=heads_first[1],
            value=heads_first[2],
            attn_mask=seen,
            scale=scale,
            enable_gqa=query.meta.sizes[2] != keys.meta.sizes[2],
        )
    return calls.one("aten::permute", self=mixed, dims=[0, 2, 1, 3])


def by_scores(
    calls: RewrittenCalls,
    heads_first: list[Tensor],
    seen: Tensor,
    scale: float | None,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention step by step, in float32, for what PyTorch's own does not have."""
    dtype, (count, heads, queries, width) = heads_first[0].meta.dtype, heads_first[0].meta.sizes
    query, keys, values = (calls.single(each) for each in heads_first)
    if heads != keys.meta.sizes[1]:
        keys, values = (
            calls.one("aten::repeat_interleave.self_int", self=each, repeats=heads // each.meta.sizes[1], dim=1)
            for each in (keys, values)
        )
    turned = calls.one("aten::transpose.int", self=keys, dim0=2, dim1=3)
    scores = calls.one("aten::matmul", self=query, other=turned)
    scores = calls.one("aten::mul.Scalar", self=scores, other=width**-0.5 if scale is None else scale)
    if cap:
        scores = calls.one("aten::tanh", self=calls.one("aten::div.Scalar", self=scores, other=cap))
        scores = calls.one("aten::mul.Scalar", self=scores, other=cap)
    hidden = calls.one("aten::logical_not", self=seen)
    scores = calls.one("aten::masked_fill.Scalar", self=scores, mask=hidden, value=-math.inf)
    if sinks is not None:
        more = calls.one("aten::view", self=calls.single(sinks), size=[1, heads, 1, 1])
        more = calls.one("aten::expand", self=more, size=[count, heads, queries, 1])
        scores = calls.one("aten::cat", tensors=[scores, more], dim=-1)
    shares = calls.one("aten::_safe_softmax", self=scores, dim=-1)
    if sinks is not None:
        shares = calls.slice(shares, -1, 0, keys.meta.sizes[2])
    return calls.cast(calls.one("aten::matmul", self=shares, other=values), dtype)


def _pages(
    calls: RewrittenCalls, cache: Tensor, table: Tensor, longest: int | None, dtype: DType, scale: Tensor | None = None
) -> Tensor:
    """The blocks of each sequence from a cache of [blocks, block, heads, width]: [sequences, tokens, heads, width]. Of
    a quantized cache times their scale, which there is for everything, or for each sequence and head."""
    _blocks, block, heads, width = cache.meta.sizes
    if longest is not None:
        table = calls.slice(table, 1, 0, min(table.meta.sizes[1], max(1, math.ceil(longest / block))))
    pages = calls.one("aten::index.Tensor", self=cache, indices=[table])
    sequences, count = table.meta.sizes
    found = calls.one("aten::reshape", self=pages, shape=[sequences, count * block, heads, width])
    if found.meta.dtype is dtype:
        return found
    if scale is not None and scale.meta.sizes == (sequences, heads):
        scale = calls.one("aten::reshape", self=scale, shape=[sequences, 1, heads, 1])
    return dequantized(calls, _float8(calls, found, dtype), scale, dtype)


def paged_attention(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    """One query for each sequence; keys are [blocks, heads, width / x, block, x], values [blocks, heads, width,
    block]."""
    plain("paged attention", given, alibi_slopes=(None,), fp8_out_scale=(None,), query_start_loc=(None,))
    plain("paged attention", given, blocksparse_vert_stride=(None, 0, 1))
    query, keys, values = given["query"], given["key_cache"], given["value_cache"]
    blocks, heads, parts, block, vector = keys.meta.sizes
    keys = calls.one("aten::permute", self=keys, dims=[0, 3, 1, 2, 4])
    keys = calls.one("aten::reshape", self=keys, shape=[blocks, block, heads, parts * vector])
    values = calls.one("aten::permute", self=values, dims=[0, 3, 1, 2])
    table, longest = given["block_tables"], given["max_seq_len"]
    mixed = _attend(
        calls,
        calls.one("aten::unsqueeze", self=query, dim=1),
        _pages(calls, keys, table, longest, query.meta.dtype, given.get("k_scale")),
        _pages(calls, values, table, longest, query.meta.dtype, given.get("v_scale")),
        given["seq_lens"],
        given["scale"],
    )
    calls.write(given["out"], calls.one("aten::reshape", self=mixed, shape=list(given["out"].meta.sizes)))


class _Packed:
    """Sequences one after the other, of which `starts` says where each begins, and where the last one ends."""

    def __init__(self, calls: RewrittenCalls, starts: Tensor, most: int | None) -> None:
        if most is None:
            raise CannotRewrite("attention of sequences that are packed together, of unknown length")
        self._calls, self._most, count = calls, most, starts.meta.sizes[0] - 1
        self._first, self._end = calls.slice(starts, 0, 0, count), calls.slice(starts, 0, 1, count + 1)
        self.lengths = calls.one("aten::sub.Tensor", self=self._end, other=self._first)

    def rows(self, tensor: Tensor) -> Tensor:
        """Each sequence in a row of its own, as long as the longest; what is beyond its end is not used."""
        calls = self._calls
        first = calls.one("aten::unsqueeze", self=self._first, dim=1)
        places = calls.one("aten::add.Tensor", self=first, other=calls.count(self._most))
        places = calls.one("aten::clamp", self=places, min=0, max=tensor.meta.sizes[0] - 1)
        return calls.one("aten::index.Tensor", self=tensor, indices=[places])

    def packed(self, rows: Tensor, count: int) -> Tensor:
        """The other way round: `count` tokens."""
        calls = self._calls
        tokens = calls.count(count)
        whose = calls.one(
            "aten::searchsorted.Tensor", sorted_sequence=calls.cast(self._end, DType.int64), self=tokens, right=True
        )
        # Tokens beyond the last sequence fill a batch up.
        whose = calls.one("aten::clamp", self=whose, min=None, max=rows.meta.sizes[0] - 1)
        begun = calls.one("aten::index_select", self=self._first, dim=0, index=whose)
        nth = calls.one("aten::sub.Tensor", self=tokens, other=begun)
        nth = calls.one("aten::clamp", self=nth, min=None, max=self._most - 1)
        return calls.one("aten::index.Tensor", self=rows, indices=[whose, nth])


def flash(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """FlashAttention as engines call it, prefill and decode alike: queries are packed or of one length, keys are in
    pages, packed, or of one length."""
    plain("attention", given, alibi_slopes=(None,), leftpad_k=(None,), p_dropout=(None, 0.0), bias=(None,))
    plain("attention", given, k_new=(None,), v_new=(None,), rotary_cos=(None,), sink_size=(None, 0))
    plain("attention", given, kv_batch_idx=(None,), attention_chunk=(None, 0), seqused_q=(None,))
    plain("attention", given, window_size_right=(None, -1, 0))
    sinks = next((given[name] for name in ("sinks", "s_aux", "sink_ptr") if given.get(name) is not None), None)
    query, keys, values = given["q"], given["k"], given["v"]
    table, lengths = given.get("block_table", given.get("page_table")), given.get("seqused_k")
    longest, starts, own = given.get("max_seqlen_k"), given.get("cu_seqlens_q"), None
    rows, packed = query, None
    if starts is not None:
        packed = _Packed(calls, starts, given.get("max_seqlen_q"))
        rows, own = packed.rows(query), packed.lengths
    latent = given.get("q_v")
    if table is not None:
        if lengths is None:
            raise CannotRewrite("attention to pages, without the lengths of the sequences")
        keys, values = (
            _pages(calls, each, table, longest, query.meta.dtype, given.get(f"{name}_descale"))
            for name, each in (("k", keys), ("v", values))
        )
    elif given.get("cu_seqlens_k") is not None:
        others = _Packed(calls, given["cu_seqlens_k"], longest)
        keys, values = others.rows(keys), others.rows(values)
        lengths = others.lengths if lengths is None else lengths
    elif lengths is None:
        lengths = calls.filled(keys.meta.sizes[0], keys.meta.sizes[1])
    causal, left = bool(given["is_causal"] or given.get("window_size_right") == 0), given.get("window_size_left")
    if left is not None and left >= 0 and not causal:
        raise CannotRewrite("attention with a window that is not causal")
    if latent is not None:  # MLA: what is compressed is compared beside what is turned
        latent = latent if packed is None else packed.rows(latent)
        rows, keys = (calls.one("aten::cat", tensors=[*each], dim=-1) for each in ((rows, latent), (keys, values)))
    scale, cap = given.get("softmax_scale"), given.get("softcap")
    found = _attend(calls, rows, keys, values, lengths, scale, causal=causal, own=own, left=left, cap=cap, sinks=sinks)
    if packed is not None:
        found = packed.packed(found, query.meta.sizes[0])
    if isinstance(given.get("out"), Tensor):
        calls.write(given["out"], found)
    for place, recorded in enumerate(tensor for tensor in tensors_in(results or []) if tensor is not given.get("out")):
        if place == 0 and not isinstance(given.get("out"), Tensor):
            calls.fill(recorded, found)
        else:
            calls.allocate(recorded, zeros=True)


def _lengths_in_pages(calls: RewrittenCalls, pages: Tensor, block: int, last: Tensor | None) -> Tensor:
    """How many tokens sequences of so many pages have."""
    if block == 1:
        return pages
    if last is None:
        raise CannotRewrite("attention to pages, without how full the last ones are")
    whole = calls.one("aten::mul.Scalar", self=calls.one("aten::sub.Scalar", self=pages, other=1), other=block)
    return calls.one("aten::add.Tensor", self=whole, other=last)


def listed_pages(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """AITER's attention of packed queries to pages that are listed one sequence after the other."""
    plain("attention", given, block_table=(None,))
    keys, values = given["k"], given["v"]
    if len(keys.meta.sizes) == 3:
        keys, values = (calls.one("aten::unsqueeze", self=each, dim=1) for each in (keys, values))
    block = keys.meta.sizes[1]
    pages = _Packed(calls, given["kv_indptr"], -(-given["max_seqlen_k"] // block))
    listed = {"block_table": pages.rows(given["kv_page_indices"]), "k": keys, "v": values}
    lengths = _lengths_in_pages(calls, pages.lengths, block, given.get("kv_last_page_lens"))
    flash(calls, given | listed | {"seqused_k": lengths}, results)


def prefill(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    """FlashInfer's attention of packed queries, or those of one sequence, to keys in listed pages, packed, or of one
    sequence."""
    unset = "maybe_packed_custom_mask maybe_custom_mask maybe_mask_indptr maybe_prefix_len_ptr scale_q"
    plain("attention", given, mask_mode=(0, 1), **dict.fromkeys(unset.split(), (None,)))
    query, keys, values, out = (given[name] for name in ("q", "k", "v", "out"))
    pages, starts = given.get("kv_indptr"), given.get("cu_seqlens_q")
    if given["layout"]:  # heads before tokens
        places = len(keys.meta.sizes) - 3, len(keys.meta.sizes) - 2
        keys, values = (
            calls.one("aten::transpose.int", self=each, dim0=places[0], dim1=places[1]) for each in (keys, values)
        )
    given = given | {"is_causal": given["mask_mode"] == 1, "k": keys, "v": values}
    if starts is None:
        one = {name: calls.one("aten::unsqueeze", self=given[name], dim=0) for name in ("q", "k", "v", "out")}
        flash(calls, given | one, [one["out"]])
    else:
        step, count = None if calls.step is None else calls.step.prefill, starts.meta.sizes[0] - 1
        known = step is not None and step.requests == count
        tokens = query.meta.sizes[0] if pages is None else given["kv_page_indices"].meta.sizes[0] * keys.meta.sizes[1]
        tokens = keys.meta.sizes[0] if pages is None else tokens
        tokens = min(tokens, step.key_tokens) if known and step and step.key_tokens else tokens
        most = {"max_seqlen_q": -(-query.meta.sizes[0] // count), "max_seqlen_k": -(-tokens // count)}
        calls.assumed.append("each sequence has as many queries and keys as the others")
        (flash if pages is None else listed_pages)(calls, given | most, [out])
    _no_sums(calls, given.get("lse"))


def decode_of_listed_pages(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    """AITER's and FlashInfer's attention of one query for each sequence. How long a sequence may be says the step, if
    any does."""
    plain("paged attention", given, alibi_slopes=(None,), fp8_out_scale=(None,), mtp=(None, 1), window_left=(None, -1))
    keys, values, heads_first = given["key_cache"], given["value_cache"], given.get("kv_layout_code")
    block = given.get("block_size") or keys.meta.sizes[2 if heads_first else 1]
    if len(keys.meta.sizes) != 4 or block not in keys.meta.sizes[1:3]:
        raise CannotRewrite(f"paged attention to caches of {list(keys.meta.sizes)}")
    if keys.meta.sizes[1] != block if heads_first is None else heads_first:
        keys, values = (calls.one("aten::transpose.int", self=each, dim0=1, dim1=2) for each in (keys, values))
    listed = given["kv_page_indices"]
    longest = listed.meta.sizes[0] * block
    if "max_num_partitions" in given:
        longest = min(longest, given["max_num_partitions"] * (given.get("partition_size") or 256))
    step = None if calls.step is None else calls.step.decode
    if step is not None and step.requests and step.key_tokens:
        longest = min(longest, -(-step.key_tokens // step.requests))
        calls.assumed.append("each request has at most as many keys as those of its step have on average")
    pages = _Packed(calls, given["kv_indptr"], -(-longest // block))
    table = pages.rows(listed)
    lengths = _lengths_in_pages(calls, pages.lengths, block, given["kv_last_page_lens"])
    rows = calls.one("aten::unsqueeze", self=given["query"], dim=1)
    caches = [
        _pages(calls, each, table, None, rows.meta.dtype, given.get(f"{name}_scale"))
        for name, each in (("k", keys), ("v", values))
    ]
    cap = given.get("logits_soft_cap")
    mixed = _attend(calls, rows, caches[0], caches[1], lengths, given["scale"], cap=cap)
    calls.write(given["out"], calls.one("aten::reshape", self=mixed, shape=list(given["out"].meta.sizes)))
    _no_sums(calls, given.get("lse"))


def _no_sums(calls: RewrittenCalls, target: Tensor | None) -> None:
    if target is not None:
        calls.call("aten::zero_", {"self": target}, [target])
        calls.assumed.append("the logarithms of the sums, which it also returns, are 0")


def latent_attention(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """MLA's, of queries in the space of the compressed keys: a page has what is compressed, which is keys and values at
    once, and behind it the part of the keys that is turned."""
    plain("attention", given, is_fp8=(None, False), indices=(None,))
    plain("attention", given, vcache=(None,), extra_k_cache=(None,), extra_indices_in_kvcache=(None,))
    plain("attention", given, topk_length=(None,), extra_topk_length=(None,))
    cache, width = given["cache"], int(given.get("head_size_v", 0))
    if "q_nope" in given:
        width = given["q_nope"].meta.sizes[-1]
        query = calls.one("aten::cat", tensors=[given["q_nope"], given["q_pe"]], dim=-1)
        query = calls.one("aten::unsqueeze", self=query, dim=1)
    else:
        query = given["q"]
    if len(cache.meta.sizes) == 3:
        cache = calls.one("aten::unsqueeze", self=cache, dim=2)
    if query.meta.dtype in LARGEST:
        query = dequantized(calls, query, given.get("descale_q"), DType.bfloat16)
    keys = _pages(calls, cache, given["page_table"], None, query.meta.dtype, given.get("descale_k"))
    values = calls.slice(keys, -1, 0, width)
    causal = bool(given.get("is_causal"))
    mixed = _attend(
        calls, query, keys, values, given["seq_lens"], given["scale"], causal=causal, sinks=given.get("attn_sink")
    )
    if isinstance(given.get("out"), Tensor):
        shape = list(given["out"].meta.sizes)
        calls.write(given["out"], calls.one("aten::reshape", self=mixed, shape=shape))
    for place, recorded in enumerate(tensors_in(results or [])):
        if place == 0:
            calls.fill(recorded, mixed)
        else:
            calls.allocate(recorded, zeros=True)
    _no_sums(calls, given.get("lse"))


def _einsum(calls: RewrittenCalls, equation: str, one: Tensor, other: Tensor) -> Tensor:
    return calls.one("aten::einsum", equation=equation, tensors=[one, other])


def latent_attention_of_a_step(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """vLLM's own MLA: neither the cache nor the weights that compress and expand keys and values are arguments. What
    decodes attends in the space of the compressed keys; what prefills expands them first."""
    plain("attention", given, output_scale=(None,), output_block_scale=(None,), q_dcp_replicated=(None,))
    query, latent, turned = given["q"], given["kv_c_normed"], given["k_pe"]
    target = given["output"] if given.get("output") is not None else (results or [None])[0]
    if calls.step is None or not isinstance(target, Tensor) or len(query.meta.sizes) != 3:
        raise CannotRewrite(
            "latent attention whose cache is no argument, where no annotation says how many keys it has"
        )
    (tokens, heads, width), rank, dtype = query.meta.sizes, latent.meta.sizes[-1], query.meta.dtype
    turned_width = turned.meta.sizes[-1]
    own, value = width - turned_width, math.prod(target.meta.sizes) // (tokens * heads)
    up_keys = calls.memory((heads, own, rank), dtype)
    up_values = calls.memory((heads, rank, value), dtype)
    parts, begin = [], 0
    for group, decodes in ((calls.step.decode, True), (calls.step.prefill, False)):
        if not group.requests:
            continue
        count, queries, keys = _lengths(group, tokens - begin, decodes)
        end = begin + count * queries
        rows = calls.slice(query, 0, begin, end)
        cache = calls.memory((count, keys, 1, rank + turned_width), dtype)
        compressed = calls.slice(cache, -1, 0, rank)
        if decodes:
            inner = _einsum(calls, "tho,hor->thr", calls.slice(rows, -1, 0, own), up_keys)
            rows = calls.one("aten::cat", tensors=[inner, calls.slice(rows, -1, own, width)], dim=-1)
            seen, values = cache, compressed
        else:
            seen, values = (
                _einsum(calls, equation, compressed, up)
                for equation, up in (("ckxr,hor->ckho", up_keys), ("ckxr,hrv->ckhv", up_values))
            )
            both = calls.slice(cache, -1, rank, rank + turned_width)
            both = calls.one("aten::expand", self=both, size=[count, keys, heads, turned_width])
            seen = calls.one("aten::cat", tensors=[seen, both], dim=-1)
        rows = calls.one("aten::reshape", self=rows, shape=[count, queries, heads, -1])
        mixed = _attend(calls, rows, seen, values, calls.filled(count, keys), width**-0.5, causal=queries > 1)
        mixed = calls.one("aten::reshape", self=mixed, shape=[end - begin, heads, -1])
        parts.append(_einsum(calls, "thr,hrv->thv", mixed, up_values) if decodes else mixed)
        begin = end
    found = calls.one("aten::cat", tensors=parts, dim=0)
    calls.assumed.append("each request has as many queries and keys as the others of its step, whose sums are noted")
    if given.get("output") is None:
        calls.fill(target, calls.one("aten::reshape", self=found, shape=list(target.meta.sizes)))
    else:
        flat = calls.one("aten::view", self=target, size=[tokens, heads, value])
        calls.write(calls.slice(flat, 0, 0, begin), found)


def attention_of_a_step(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """vLLM's and SGLang's own: the cache is no argument. The step's annotation says how many requests decode (they come
    first) and prefill, and how many keys they have together: each gets as many as the others."""
    plain("attention", given, output_scale=(None,), output_block_scale=(None,))
    plain("attention", given, q_rope=(None,), k_rope=(None,))
    query, key, sinks = given["query"], given["key"], given.get("sinks")
    if len(query.meta.sizes) != 3 or len(key.meta.sizes) != 3:
        raise CannotRewrite("attention of tensors that are not [tokens, heads, width]")
    if calls.step is None:
        raise CannotRewrite("attention whose cache is no argument, where no annotation says how many keys it has")
    target = given.get("output")
    if target is None:
        target = calls.one("aten::zeros_like", self=query)
    (tokens, heads, width), (_tokens, own, own_width) = query.meta.sizes, key.meta.sizes
    target = calls.one("aten::view", self=target, size=[tokens, heads, width])
    begin = 0
    for group, decodes in ((calls.step.decode, True), (calls.step.prefill, False)):
        if not group.requests:
            continue
        count, queries, keys = _lengths(group, tokens - begin, decodes)
        if group.key_tokens is None:
            calls.assumed.append("the annotation does not say the keys: a prefill has those of its own tokens alone")
        end = begin + count * queries
        rows = calls.one("aten::reshape", self=calls.slice(query, 0, begin, end), shape=[count, queries, heads, width])
        caches = [calls.memory((count, keys, own, own_width), key.meta.dtype) for _each in "kv"]
        mixed = _attend(
            calls, rows, caches[0], caches[1], calls.filled(count, keys), None, causal=queries > 1, sinks=sinks
        )
        part = calls.one("aten::reshape", self=mixed, shape=[end - begin, heads, width])
        calls.write(calls.slice(target, 0, begin, end), part)
        begin = end
    calls.assumed.append("each request has as many queries and keys as the others of its step, whose sums are noted")
    if given.get("output") is None:
        calls.fill((results or [None])[0], target)


def _lengths(group: Requests, room: int, decodes: bool) -> tuple[int, int, int]:
    """Requests, and the queries and keys of each. Without a word on them, keys of a prefill are its own tokens."""
    count = group.requests or 1
    queries = group.query_tokens or (count if decodes else room)
    keys = group.key_tokens or (None if decodes else queries)
    each = min(-(-queries // count), room // count)
    if keys is None or each < 1:
        raise CannotRewrite("attention whose cache is no argument, in a step whose annotation does not say the keys")
    return count, each, max(-(-keys // count), each)


# --------------------------------------------------------------------------------------------------------------- table

_MERGED = {"v_a": "prefix_output", "s_a": "prefix_lse", "v_b": "suffix_output", "s_b": "suffix_lse"}
_MERGED |= {"v_merged": "output", "s_merged": "output_lse"}
_AITER_NAMES = {"dropout_p": "p_dropout", "logits_soft_cap": "softcap"}
LATENT_NAMES = {"kv_c_and_k_pe_cache": "cache", "sm_scale": "scale", "softmax_scale": "scale", "kv_cache": "cache"}
LATENT_NAMES |= {"kcache": "cache", "k_cache": "cache", "seqlens_k": "seq_lens", "block_table": "page_table"}
_FLASHINFER_NAMES = {"q": "query", "paged_k_cache": "key_cache", "paged_v_cache": "value_cache", "o": "out"}
_FLASHINFER_NAMES |= {"paged_kv_indptr": "kv_indptr", "paged_kv_indices": "kv_page_indices", "sm_scale": "scale"}
_FLASHINFER_NAMES |= {"paged_kv_last_page_len": "kv_last_page_lens", "maybe_lse": "lse", "alibi_slopes": "unused"}
_PREFILL_NAMES = {"paged_k_cache": "k", "paged_v_cache": "v", "o": "out", "qo_indptr": "cu_seqlens_q"}
_PREFILL_NAMES |= {"paged_kv_indptr": "kv_indptr", "paged_kv_indices": "kv_page_indices", "maybe_lse": "lse"}
_PREFILL_NAMES |= {"paged_kv_last_page_len": "kv_last_page_lens", "sm_scale": "softmax_scale"}
_PREFILL_NAMES |= {"window_left": "window_size_left", "logits_soft_cap": "softcap"}
_PREFILL_NAMES |= {"scale_k": "k_descale", "scale_v": "v_descale"}
RULES: tuple[tuple[Any, str], ...] = (
    (reshape_and_cache, "_C_cache_ops::reshape_and_cache aiter::reshape_and_cache"),
    (reshape_and_cache_flash, "_C_cache_ops::reshape_and_cache_flash aiter::reshape_and_cache_flash"),
    (cache_of_a_step, "vllm::unified_kv_cache_update"),
    (merged_states, "_C::merge_attn_states"),
    (renamed(merged_states, _MERGED), "sgl_kernel::merge_state sgl_kernel::merge_state_v2"),
    (paged_attention, "_C::paged_attention_v1 _C::paged_attention_v2 _rocm_C::paged_attention"),
    (flash, "_vllm_fa2_C::varlen_fwd _vllm_fa3_C::fwd sgl_kernel::fwd"),
    (renamed(flash, _AITER_NAMES), "aiter::mha_varlen_fwd aiter::fmha_v3_varlen_fwd"),
    (renamed(listed_pages, _AITER_NAMES), "aiter::mha_batch_prefill"),
    (decode_of_listed_pages, "aiter::paged_attention_ragged"),
    (renamed(decode_of_listed_pages, _FLASHINFER_NAMES), "flashinfer::batch_decode"),
    (renamed(prefill, _PREFILL_NAMES), "flashinfer::batch_prefill_paged flashinfer::single_prefill"),
    (renamed(prefill, _PREFILL_NAMES | {"kv_indptr": "cu_seqlens_k"}), "flashinfer::batch_prefill_ragged"),
    (
        renamed(latent_attention, LATENT_NAMES),
        "_C::cutlass_mla_decode _C::sm100_cutlass_mla_decode sgl_kernel::cutlass_mla_decode",
    ),
    (latent_attention_of_a_step, "vllm::unified_mla_attention vllm::unified_mla_attention_with_output"),
    (
        attention_of_a_step,
        "vllm::unified_attention vllm::unified_attention_with_output sglang::unified_attention_with_output",
    ),
)
