"""Caches of keys and values, and attention to them, as engines call it: compositions for engines.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from replayfmt.format.codes import DType

from .engine_experts import LARGEST, dequantized, quantized
from .rewriting import CannotRewrite, Given, RewrittenCalls, Value, plain, renamed, tensors_in


def _float8(cache: Value, dtype: DType) -> Value:
    """A quantized cache for tokens of another dtype; bytes are taken for the most frequent one."""
    if cache.dtype is DType.uint8:
        cache.calls.assumed.append("the bytes of the cache are float8_e4m3fn")
        return cache.calls.one("aten::view.dtype", self=cache, dtype=DType.float8_e4m3fn)
    if cache.dtype not in LARGEST:
        raise CannotRewrite(f"a cache of {cache.dtype.name} for tokens of {dtype.name}")
    return cache


def put(cache: Value, slots: Value, block: int, new: Value, scale: Value | None = None) -> None:
    """Put tokens into a cache of [blocks, block, ...]. A slot below zero is none: there the cache keeps what it has."""
    if cache.dtype is not new.dtype:
        cache = _float8(cache, new.dtype)
        if scale is None:
            raise CannotRewrite(f"a cache of {cache.dtype.name} for tokens of {new.dtype.name}, unscaled")
        new = quantized(new, scale, cache.dtype)
    new = new.part(0, 0, slots.sizes[0])
    where = [slots // block, slots % block]
    kept = cache.index(where)
    real = slots >= 0
    real = real.view([slots.sizes[0]] + [1] * (len(new.sizes) - 1))
    cache.index_put_(where, real.where(new, kept))


def reshape_and_cache_flash(_calls: RewrittenCalls, given: Given) -> None:
    for name in ("key", "value"):
        cache = given[f"{name}_cache"]
        put(cache, given["slot_mapping"], cache.sizes[1], given[name], given.get(f"{name[0]}_scale"))


def reshape_and_cache(_calls: RewrittenCalls, given: Given) -> None:
    plain("a cache", given, interleaved_v=(None, False))
    keys, values, slots = given["key_cache"], given["value_cache"], given["slot_mapping"]
    tokens, heads = given["key"].sizes[:2]
    _blocks, _heads, parts, block, vector = keys.sizes
    new = given["key"].reshape([tokens, heads, parts, vector])
    put(keys.permute([0, 3, 1, 2, 4]), slots, block, new, given.get("k_scale"))
    put(values.permute([0, 3, 1, 2]), slots, block, given["value"], given.get("v_scale"))


def merged_states(_calls: RewrittenCalls, given: Given) -> None:
    """One attention of two, each to a part of the keys, by the logarithms of their sums: [heads, tokens] or the other
    way round."""
    plain("attention", given, output_scale=(None,), prefill_tokens_with_context=(None,))
    outputs, sums = ([given[f"{place}_{what}"] for place in ("prefix", "suffix")] for what in ("output", "lse"))
    both = sums[0].logaddexp(sums[1])
    parts = []
    for output, own in zip(outputs, sums, strict=True):
        share = (own - both).exp()
        if share.sizes != output.sizes[:2]:
            share = share.transpose(0, 1)
        parts.append(output.single() * share.unsqueeze(-1))
    given["output"].copy_(parts[0] + parts[1])
    if given.get("output_lse") is not None:
        given["output_lse"].copy_(both)


def cache_of_a_step(_calls: RewrittenCalls, given: Given) -> None:
    """vLLM's own: the cache is no argument, so the tokens go to other memory, as many bytes."""
    for name in ("key", "value"):
        given[name].clone()


def _attend(
    query: Value,
    keys: Value,
    values: Value,
    lengths: Value,
    scale: float | None,
    *,
    causal: bool = False,
    own: Value | None = None,
    left: int | None = None,
    cap: float | None = None,
    sinks: Value | None = None,
) -> Any:
    """Attention of queries [sequences, queries, heads, width] to as many of the keys [sequences, keys, heads, width] as
    each sequence has. Causal: the last query is at the end; `own` is how many each sequence has, if not all of them.
    `left`: how many keys before its own a query sees. `cap` bounds the scores smoothly; `sinks` is one more score for
    each head, of a key without a value."""
    if query.dtype is not keys.dtype:
        raise CannotRewrite(f"a cache of {keys.dtype.name} for queries of {query.dtype.name}")
    places = query.calls.count(keys.sizes[1])
    ends = lengths.view([-1, 1, 1, 1])
    if causal:
        rows = query.calls.count(query.sizes[1]).view([1, 1, -1, 1])
        first = ends - query.sizes[1] if own is None else ends - own.view([-1, 1, 1, 1])
        ends = first + rows + 1
    seen = places < ends
    if left is not None and left >= 0:
        begin = ends - (left + 1)
        seen = seen & (places >= begin)
    heads_first = [each.permute([0, 2, 1, 3]) for each in (query, keys, values)]
    if cap or sinks is not None:
        mixed = by_scores(heads_first, seen, scale, cap, sinks)
    else:
        grouped = query.sizes[2] != keys.sizes[2]
        query, keys, values = heads_first
        mixed = query.scaled_dot_product_attention(keys, values, seen, scale=scale, enable_gqa=grouped)
    return mixed.permute([0, 2, 1, 3])


def by_scores(
    heads_first: list[Any], seen: Value, scale: float | None, cap: float | None, sinks: Value | None
) -> Value:
    """Attention step by step, in float32, for what PyTorch's own does not have."""
    dtype, (count, heads, queries, width) = heads_first[0].dtype, heads_first[0].sizes
    query, keys, values = (each.single() for each in heads_first)
    if heads != keys.sizes[1]:
        keys, values = (each.repeat_interleave(heads // each.sizes[1], 1) for each in (keys, values))
    scores = query.matmul(keys.transpose(2, 3)) * (width**-0.5 if scale is None else scale)
    if cap:
        scores = (scores / cap).tanh() * cap
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        more = sinks.single().view([1, heads, 1, 1]).expand([count, heads, queries, 1])
        scores = seen.calls.cat([scores, more], -1)
    shares = scores._safe_softmax(-1)
    if sinks is not None:
        shares = shares.part(-1, 0, keys.sizes[2])
    found: Value = (shares @ values).to(dtype)
    return found


def _pages(cache: Value, table: Value, longest: int | None, dtype: DType, scale: Value | None = None) -> Value:
    """The blocks of each sequence from a cache of [blocks, block, heads, width]: [sequences, tokens, heads, width]. Of
    a quantized cache times their scale, which there is for everything, or for each sequence and head."""
    _blocks, block, heads, width = cache.sizes
    if longest is not None:
        table = table.part(1, 0, min(table.sizes[1], max(1, math.ceil(longest / block))))
    sequences, count = table.sizes
    found: Value = cache.index([table]).reshape([sequences, count * block, heads, width])
    if found.dtype is dtype:
        return found
    if scale is not None and scale.sizes == (sequences, heads):
        scale = scale.reshape([sequences, 1, heads, 1])
    return dequantized(_float8(found, dtype), scale, dtype)


def paged_attention(_calls: RewrittenCalls, given: Given) -> None:
    """One query for each sequence; keys are [blocks, heads, width / x, block, x], values [blocks, heads, width,
    block]."""
    plain("paged attention", given, alibi_slopes=(None,), fp8_out_scale=(None,), query_start_loc=(None,))
    plain("paged attention", given, blocksparse_vert_stride=(None, 0, 1))
    query, keys = given["query"], given["key_cache"]
    blocks, heads, parts, block, vector = keys.sizes
    keys = keys.permute([0, 3, 1, 2, 4]).reshape([blocks, block, heads, parts * vector])
    values = given["value_cache"].permute([0, 3, 1, 2])
    pages = given["block_tables"], given["max_seq_len"], query.dtype
    rows = query.unsqueeze(1)
    keys, values = _pages(keys, *pages, given.get("k_scale")), _pages(values, *pages, given.get("v_scale"))
    given["out"].copy_(_attend(rows, keys, values, given["seq_lens"], given["scale"]).like(given["out"]))


class _Packed:
    """Sequences one after the other, of which `starts` says where each begins, and where the last one ends."""

    def __init__(self, starts: Value, most: int | None) -> None:
        if most is None:
            raise CannotRewrite("attention of sequences that are packed together, of unknown length")
        self._most, count = most, starts.sizes[0] - 1
        self._first, self._end = starts.part(0, 0, count), starts.part(0, 1, count + 1)
        self.lengths = self._end - self._first

    def rows(self, tensor: Value) -> Value:
        """Each sequence in a row of its own, as long as the longest; what is beyond its end is not used."""
        places = self._first.unsqueeze(1) + tensor.calls.count(self._most)
        found: Value = tensor.index([places.clamp(0, tensor.sizes[0] - 1)])
        return found

    def packed(self, rows: Value, count: int) -> Value:
        """The other way round: `count` tokens."""
        tokens = rows.calls.count(count)
        # Tokens beyond the last sequence fill a batch up.
        whose = self._end.to(DType.int64).searchsorted(tokens, right=True).clamp(None, rows.sizes[0] - 1)
        nth = tokens - self._first.index_select(0, whose)
        found: Value = rows.index([whose, nth.clamp(None, self._most - 1)])
        return found


def flash(calls: RewrittenCalls, given: Given) -> None:
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
        packed = _Packed(starts, given.get("max_seqlen_q"))
        rows, own = packed.rows(query), packed.lengths
    latent, out = given.get("q_v"), given.get("out")
    if table is not None:
        if lengths is None:
            raise CannotRewrite("attention to pages, without the lengths of the sequences")
        keys, values = (
            _pages(each, table, longest, query.dtype, given.get(f"{name}_descale"))
            for name, each in (("k", keys), ("v", values))
        )
    elif given.get("cu_seqlens_k") is not None:
        others = _Packed(given["cu_seqlens_k"], longest)
        keys, values = others.rows(keys), others.rows(values)
        lengths = others.lengths if lengths is None else lengths
    elif lengths is None:
        lengths = calls.filled(keys.sizes[0], keys.sizes[1])
    causal, left = bool(given["is_causal"] or given.get("window_size_right") == 0), given.get("window_size_left")
    if left is not None and left >= 0 and not causal:
        raise CannotRewrite("attention with a window that is not causal")
    if latent is not None:  # MLA: what is compressed is compared beside what is turned
        latent = latent if packed is None else packed.rows(latent)
        rows, keys = (calls.cat(each, -1) for each in ((rows, latent), (keys, values)))
    scale, cap = given.get("softmax_scale"), given.get("softcap")
    found = _attend(rows, keys, values, lengths, scale, causal=causal, own=own, left=left, cap=cap, sinks=sinks)
    if packed is not None:
        found = packed.packed(found, query.sizes[0])
    recorded = tensors_in(calls.results or [])
    if out is not None:
        out.copy_(found)
        recorded = [each for each in recorded if each is not out.tensor]
    elif recorded:
        calls.fill(recorded.pop(0), found)
    for each in recorded:
        calls.allocate(each, zeros=True)


def _lengths_in_pages(pages: Value, block: int, last: Value | None) -> Value:
    """How many tokens sequences of so many pages have."""
    if block == 1:
        return pages
    if last is None:
        raise CannotRewrite("attention to pages, without how full the last ones are")
    found: Value = (pages - 1) * block + last
    return found


def listed_pages(calls: RewrittenCalls, given: Given) -> None:
    """AITER's attention of packed queries to pages that are listed one sequence after the other."""
    plain("attention", given, block_table=(None,))
    keys, values = given["k"], given["v"]
    if len(keys.sizes) == 3:
        keys, values = keys.unsqueeze(1), values.unsqueeze(1)
    block = keys.sizes[1]
    pages = _Packed(given["kv_indptr"], -(-given["max_seqlen_k"] // block))
    listed = {"block_table": pages.rows(given["kv_page_indices"]), "k": keys, "v": values}
    lengths = _lengths_in_pages(pages.lengths, block, given.get("kv_last_page_lens"))
    flash(calls, given | listed | {"seqused_k": lengths})


def prefill(calls: RewrittenCalls, given: Given) -> None:
    """FlashInfer's attention of packed queries, or those of one sequence, to keys in listed pages, packed, or of one
    sequence."""
    unset = "maybe_packed_custom_mask maybe_custom_mask maybe_mask_indptr maybe_prefix_len_ptr scale_q"
    plain("attention", given, mask_mode=(0, 1), **dict.fromkeys(unset.split(), (None,)))
    query, keys, values = given["q"], given["k"], given["v"]
    pages, starts = given.get("kv_indptr"), given.get("cu_seqlens_q")
    if given["layout"]:  # heads before tokens
        rank = len(keys.sizes)
        keys, values = (each.transpose(rank - 3, rank - 2) for each in (keys, values))
    given = given | {"is_causal": given["mask_mode"] == 1, "k": keys, "v": values}
    if starts is None:
        flash(calls, given | {name: given[name].unsqueeze(0) for name in ("q", "k", "v", "out")})
    else:
        step, count = None if calls.step is None else calls.step.prefill, starts.sizes[0] - 1
        known = step is not None and step.requests == count
        tokens = query.sizes[0] if pages is None else given["kv_page_indices"].sizes[0] * keys.sizes[1]
        tokens = keys.sizes[0] if pages is None else tokens
        tokens = min(tokens, step.key_tokens) if known and step and step.key_tokens else tokens
        most = {"max_seqlen_q": -(-query.sizes[0] // count), "max_seqlen_k": -(-tokens // count)}
        calls.assumed.append("each sequence has as many queries and keys as the others")
        (flash if pages is None else listed_pages)(calls, given | most)
    _no_sums(calls, given.get("lse"))


def decode_of_listed_pages(calls: RewrittenCalls, given: Given) -> None:
    """AITER's and FlashInfer's attention of one query for each sequence. How long a sequence may be says the step, if
    any does."""
    plain("paged attention", given, alibi_slopes=(None,), fp8_out_scale=(None,), mtp=(None, 1), window_left=(None, -1))
    keys, values, heads_first = given["key_cache"], given["value_cache"], given.get("kv_layout_code")
    block = given.get("block_size") or keys.sizes[2 if heads_first else 1]
    if len(keys.sizes) != 4 or block not in keys.sizes[1:3]:
        raise CannotRewrite(f"paged attention to caches of {list(keys.sizes)}")
    if keys.sizes[1] != block if heads_first is None else heads_first:
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    listed = given["kv_page_indices"]
    longest = listed.sizes[0] * block
    if "max_num_partitions" in given:
        longest = min(longest, given["max_num_partitions"] * (given.get("partition_size") or 256))
    step = None if calls.step is None else calls.step.decode
    if step is not None and step.requests and step.key_tokens:
        longest = min(longest, -(-step.key_tokens // step.requests))
        calls.assumed.append("each request has at most as many keys as those of its step have on average")
    pages = _Packed(given["kv_indptr"], -(-longest // block))
    table = pages.rows(listed)
    lengths = _lengths_in_pages(pages.lengths, block, given["kv_last_page_lens"])
    rows = given["query"].unsqueeze(1)
    keys, values = (
        _pages(each, table, None, rows.dtype, given.get(f"{name}_scale")) for name, each in (("k", keys), ("v", values))
    )
    mixed = _attend(rows, keys, values, lengths, given["scale"], cap=given.get("logits_soft_cap"))
    given["out"].copy_(mixed.like(given["out"]))
    _no_sums(calls, given.get("lse"))


def _no_sums(calls: RewrittenCalls, target: Value | None) -> None:
    if target is not None:
        target.zero_()
        calls.assumed.append("the logarithms of the sums, which it also returns, are 0")


def latent_attention(calls: RewrittenCalls, given: Given) -> None:
    """MLA's, of queries in the space of the compressed keys: a page has what is compressed, which is keys and values at
    once, and behind it the part of the keys that is turned."""
    plain("attention", given, is_fp8=(None, False), indices=(None,))
    plain("attention", given, vcache=(None,), extra_k_cache=(None,), extra_indices_in_kvcache=(None,))
    plain("attention", given, topk_length=(None,), extra_topk_length=(None,))
    cache, width, out = given["cache"], int(given.get("head_size_v", 0)), given.get("out")
    if "q_nope" in given:
        width = given["q_nope"].sizes[-1]
        query: Any = calls.cat([given["q_nope"], given["q_pe"]], -1).unsqueeze(1)
    else:
        query = given["q"]
    if len(cache.sizes) == 3:
        cache = cache.unsqueeze(2)
    if query.dtype in LARGEST:
        query = dequantized(query, given.get("descale_q"), DType.bfloat16)
    keys = _pages(cache, given["page_table"], None, query.dtype, given.get("descale_k"))
    values, causal, sinks = keys.part(-1, 0, width), bool(given.get("is_causal")), given.get("attn_sink")
    mixed = _attend(query, keys, values, given["seq_lens"], given["scale"], causal=causal, sinks=sinks)
    if out is not None:
        out.copy_(mixed.like(out))
    for place, recorded in enumerate(tensors_in(calls.results or [])):
        if place == 0:
            calls.fill(recorded, mixed)
        else:
            calls.allocate(recorded, zeros=True)
    _no_sums(calls, given.get("lse"))


def latent_attention_of_a_step(calls: RewrittenCalls, given: Given) -> None:
    """vLLM's own MLA: neither the cache nor the weights that compress and expand keys and values are arguments. What
    decodes attends in the space of the compressed keys; what prefills expands them first."""
    plain("attention", given, output_scale=(None,), output_block_scale=(None,), q_dcp_replicated=(None,))
    query, latent, turned, output = given["q"], given["kv_c_normed"], given["k_pe"], given.get("output")
    target = calls.wrapped((calls.results or [None])[0]) if output is None else output
    if calls.step is None or not isinstance(target, Value) or len(query.sizes) != 3:
        raise CannotRewrite(
            "latent attention whose cache is no argument, where no annotation says how many keys it has"
        )
    (tokens, heads, width), rank, dtype = query.sizes, latent.sizes[-1], query.dtype
    turned_width = turned.sizes[-1]
    own, value = width - turned_width, math.prod(target.sizes) // (tokens * heads)
    up_keys = calls.memory((heads, own, rank), dtype)
    up_values = calls.memory((heads, rank, value), dtype)
    parts, begin = [], 0

    def einsum(equation: str, one: Value, other: Value) -> Value:
        return calls.one("aten::einsum", equation=equation, tensors=[one, other])

    for count, queries, keys, decodes, _known in _requests(calls, tokens):
        end = begin + count * queries
        rows = query.part(0, begin, end)
        cache = calls.memory((count, keys, 1, rank + turned_width), dtype)
        compressed = cache.part(-1, 0, rank)
        if decodes:
            inner = einsum("tho,hor->thr", rows.part(-1, 0, own), up_keys)
            rows = calls.cat([inner, rows.part(-1, own, width)], -1)
            seen, values = cache, compressed
        else:
            seen, values = (
                einsum(equation, compressed, up)
                for equation, up in (("ckxr,hor->ckho", up_keys), ("ckxr,hrv->ckhv", up_values))
            )
            both = cache.part(-1, rank, rank + turned_width).expand([count, keys, heads, turned_width])
            seen = calls.cat([seen, both], -1)
        rows = rows.reshape([count, queries, heads, -1])
        mixed = _attend(rows, seen, values, calls.filled(count, keys), width**-0.5, causal=queries > 1)
        mixed = mixed.reshape([end - begin, heads, -1])
        parts.append(einsum("thr,hrv->thv", mixed, up_values) if decodes else mixed)
        begin = end
    found: Any = calls.cat(parts, 0)
    calls.assumed.append("each request has as many queries and keys as the others of its step, whose sums are noted")
    if output is None:
        calls.fill(target.tensor, found.like(target))
    else:
        target.view([tokens, heads, value]).part(0, 0, begin).copy_(found)


def attention_of_a_step(calls: RewrittenCalls, given: Given) -> None:
    """vLLM's and SGLang's own: the cache is no argument. The step's annotation says how many requests decode (they come
    first) and prefill, and how many keys they have together: each gets as many as the others."""
    plain("attention", given, output_scale=(None,), output_block_scale=(None,))
    plain("attention", given, q_rope=(None,), k_rope=(None,))
    query, key, output = given["query"], given["key"], given.get("output")
    if len(query.sizes) != 3 or len(key.sizes) != 3:
        raise CannotRewrite("attention of tensors that are not [tokens, heads, width]")
    if calls.step is None:
        raise CannotRewrite("attention whose cache is no argument, where no annotation says how many keys it has")
    (tokens, heads, width), (_tokens, own, own_width) = query.sizes, key.sizes
    target = (query.zeros_like() if output is None else output).view([tokens, heads, width])
    begin = 0
    for count, queries, keys, _decodes, known in _requests(calls, tokens):
        if not known:
            calls.assumed.append("the annotation does not say the keys: a prefill has those of its own tokens alone")
        end = begin + count * queries
        rows = query.part(0, begin, end).reshape([count, queries, heads, width])
        seen, values = (calls.memory((count, keys, own, own_width), key.dtype) for _each in "kv")
        lengths = calls.filled(count, keys)
        mixed = _attend(rows, seen, values, lengths, None, causal=queries > 1, sinks=given.get("sinks"))
        part = mixed.reshape([end - begin, heads, width])
        target.part(0, begin, end).copy_(part)
        begin = end
    calls.assumed.append("each request has as many queries and keys as the others of its step, whose sums are noted")
    if output is None:
        calls.deliver(target)


def _requests(calls: RewrittenCalls, tokens: int) -> Iterator[tuple[int, int, int, bool, bool]]:
    """Of the requests of a step that decode, then of those that prefill: how many there are, the queries and keys of
    each, whether they decode, and whether the annotation says the keys. Without a word on them, keys of a prefill are
    its own tokens."""
    assert calls.step is not None
    for group, decodes in ((calls.step.decode, True), (calls.step.prefill, False)):
        if not group.requests:
            continue
        count = group.requests
        queries = group.query_tokens or (count if decodes else tokens)
        keys = group.key_tokens or (None if decodes else queries)
        each = min(-(-queries // count), tokens // count)
        if keys is None or each < 1:
            raise CannotRewrite(
                "attention whose cache is no argument, in a step whose annotation does not say the keys"
            )
        tokens -= count * each
        yield count, each, max(-(-keys // count), each), decodes, group.key_tokens is not None


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
