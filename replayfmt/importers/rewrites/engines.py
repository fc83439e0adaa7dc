"""Operators of serving engines (vLLM, SGLang, FlashInfer, AITER) as compositions of PyTorch's, without the engine.

Each composition has the shapes and dtypes of the original and computes what that is defined as. Lengths of sequences
are content, which no trace has: paged attention reads as many keys as the longest sequence may have, and masks those
beyond a sequence's end. Caches in another dtype than their tokens, and attention with slopes, windows of its own or
sinks, stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from replayfmt.format.codes import DType

from ..common.synthesis import Tensor
from .rewriting import CannotRewrite, RewrittenCalls, tensors_in

Given = dict[str, Any]
_Results = list[Any] | None
_LARGEST = {DType.float8_e4m3fn: 448.0, DType.float8_e5m2: 57344.0, DType.float8_e4m3fnuz: 240.0, DType.int8: 127.0}


def _write(calls: RewrittenCalls, target: Tensor, content: Tensor) -> None:
    calls.call("aten::copy_", {"self": target, "src": content}, [target])


def _single(calls: RewrittenCalls, tensor: Tensor) -> Tensor:
    return calls.one("aten::_to_copy", self=tensor, dtype=DType.float32)


def _as(calls: RewrittenCalls, tensor: Tensor, dtype: DType) -> Tensor:
    return tensor if tensor.meta.dtype is dtype else calls.one("aten::_to_copy", self=tensor, dtype=dtype)


def _range(calls: RewrittenCalls, count: int) -> Tensor:
    """0, 1, 2 and so on, where the call's tensors are."""
    ones = calls.filled(count)
    return calls.one("aten::sub.Scalar", self=calls.one("aten::cumsum", self=ones, dim=0), other=1)


def _slice(calls: RewrittenCalls, tensor: Tensor, dim: int, start: int, end: int, step: int = 1) -> Tensor:
    return calls.one("aten::slice.Tensor", self=tensor, dim=dim, start=start, end=end, step=step)


def _times(calls: RewrittenCalls, one: Tensor, other: Tensor) -> Tensor:
    return calls.one("aten::mul.Tensor", self=one, other=other)


# -------------------------------------------------------------------------------------------------------- normalization


def _normalized(calls: RewrittenCalls, data: Tensor, weight: Tensor, epsilon: float, plus: int = 0) -> Tensor:
    """RMS norm along the last dimension, in float32; Gemma adds one to the weight."""
    dtype, data = data.meta.dtype, _single(calls, data)
    square = calls.one("aten::mean.dim", self=_times(calls, data, data), dim=[-1], keepdim=True)
    scale = calls.one("aten::rsqrt", self=calls.one("aten::add.Scalar", self=square, other=epsilon))
    normal = _times(calls, data, scale)
    if plus:
        weight = calls.one("aten::add.Scalar", self=_single(calls, weight), other=plus)
        return _as(calls, _times(calls, normal, weight), dtype)
    return _times(calls, _as(calls, normal, dtype), weight)


def _rms_norm(out: str = "result", epsilon: str = "epsilon", plus: int = 0) -> Any:
    def rule(calls: RewrittenCalls, given: Given, results: _Results) -> None:
        content = _normalized(calls, given["input"], given["weight"], given[epsilon], plus)
        if out:
            _write(calls, given[out], content)
        else:
            calls.fill((results or [None])[0], content)

    return rule


def _fused_add_norm(epsilon: str = "epsilon", plus: int = 0) -> Any:
    """The sum goes to the residual, its norm to the input."""

    def rule(calls: RewrittenCalls, given: Given, _results: _Results) -> None:
        data, residual = given["input"], given["residual"]
        calls.call("aten::add_.Tensor", {"self": residual, "other": data}, [residual])
        _write(calls, data, _normalized(calls, residual, given["weight"], given[epsilon], plus))

    return rule


def _norm_with_add(calls: RewrittenCalls, given: Given, _results: _Results) -> None:
    total = calls.one("aten::add.Tensor", self=given["input"], other=given["residual_in"])
    _write(calls, given["residual_out"], total)
    _write(calls, given["out"], _normalized(calls, given["residual_out"], given["weight"], given["epsilon"]))


def _norm_static_quant(calls: RewrittenCalls, given: Given, _results: _Results) -> None:
    normal = _normalized(calls, given["input"], given["weight"], given["epsilon"])
    _write(calls, given["result"], _quantized(calls, normal, given["scale"], given["result"].meta.dtype))


def _fused_add_norm_static_quant(calls: RewrittenCalls, given: Given, _results: _Results) -> None:
    residual = given["residual"]
    calls.call("aten::add_.Tensor", {"self": residual, "other": given["input"]}, [residual])
    _norm_static_quant(calls, given | {"input": residual}, None)


# --------------------------------------------------------------------------------------------------------- quantization


def _quantized(calls: RewrittenCalls, data: Tensor, scale: Tensor, dtype: DType) -> Tensor:
    """Data divided by a scale, as a quantized dtype: beyond its range are its limits."""
    most = _LARGEST.get(dtype)
    if most is None:
        raise CannotRewrite(f"quantization to {dtype.name}")
    scaled = calls.one("aten::div.Tensor", self=_single(calls, data), other=scale)
    if dtype is DType.int8:
        scaled = calls.one("aten::round", self=scaled)
    least = -128.0 if dtype is DType.int8 else -most
    return _as(calls, calls.one("aten::clamp", self=scaled, min=least, max=most), dtype)


def _static_quant(out: str = "result", scale: str = "scale") -> Any:
    def rule(calls: RewrittenCalls, given: Given, _results: _Results) -> None:
        _write(calls, given[out], _quantized(calls, given["input"], given[scale], given[out].meta.dtype))

    return rule


def _dynamic_quant(out: str = "result", scale: str = "scale", *, by_token: bool) -> Any:
    """The scale is the largest magnitude, of everything or of each token, over the dtype's largest number."""

    def rule(calls: RewrittenCalls, given: Given, _results: _Results) -> None:
        if given.get("scale_ub") is not None:
            raise CannotRewrite("quantization with a bound for its scales")
        target, dtype = given[scale], given[out].meta.dtype
        if dtype not in _LARGEST:
            raise CannotRewrite(f"quantization to {dtype.name}")
        size = calls.one("aten::abs", self=_single(calls, given["input"]))
        if by_token:
            most = calls.one("aten::amax", self=size, dim=[-1], keepdim=True)
        else:
            most = calls.one("aten::amax", self=size, dim=list(range(len(size.meta.sizes))))
        found = calls.one("aten::div.Scalar", self=most, other=_LARGEST[dtype])
        _write(calls, target, calls.one("aten::reshape", self=found, shape=list(target.meta.sizes)))
        _write(calls, given[out], _quantized(calls, given["input"], found, dtype))

    return rule


# ----------------------------------------------------------------------------------------------------------- activation


def _gated(calls: RewrittenCalls, data: Tensor, function: str, *, last: bool = False, **options: Any) -> Tensor:
    """An activation of one half of the last dimension, times the other half."""
    width = data.meta.sizes[-1] // 2
    halves = [_slice(calls, data, -1, place * width, (place + 1) * width) for place in range(2)]
    active, other = (halves[1], halves[0]) if last else halves
    return _times(calls, calls.one(f"aten::{function}", self=active, **options), other)


def _activation(out: str, function: str, *, last: bool = False, **options: Any) -> Any:
    def rule(calls: RewrittenCalls, given: Given, _results: _Results) -> None:
        _write(calls, given[out], _gated(calls, given["input"], function, last=last, **options))

    return rule


def _silu_quant(calls: RewrittenCalls, given: Given, _results: _Results) -> None:
    content = _gated(calls, _single(calls, given["input"]), "silu")
    _write(calls, given["result"], _quantized(calls, content, given["scale"], given["result"].meta.dtype))


# --------------------------------------------------------------------------------------------------------------- rotary


def _turn(calls: RewrittenCalls, source: Tensor, target: Tensor, table: Tensor, width: int, neox: bool) -> None:
    """Turn the first elements of each head by the angles of its token: pairs are halves, or neighbours."""
    tokens, turned = table.meta.sizes[0], table.meta.sizes[1]
    half = turned // 2
    cosine, sine = (
        calls.one("aten::unsqueeze", self=_slice(calls, table, 1, place * half, (place + 1) * half), dim=1)
        for place in range(2)
    )
    shape = [tokens, math.prod(source.meta.sizes) // max(tokens * width, 1), width]
    source, target = (calls.one("aten::view", self=each, size=shape) for each in (source, target))
    parts = [(0, half, 1), (half, turned, 1)] if neox else [(0, turned, 2), (1, turned, 2)]
    first, second = (_slice(calls, source, 2, *part) for part in parts)
    one = calls.one("aten::sub.Tensor", self=_times(calls, first, cosine), other=_times(calls, second, sine))
    other = calls.one("aten::add.Tensor", self=_times(calls, second, cosine), other=_times(calls, first, sine))
    for part, content in zip(parts, (one, other), strict=True):
        _write(calls, _slice(calls, target, 2, *part), content)
    if target is not source and turned < width and target.storage is not source.storage:
        _write(calls, _slice(calls, target, 2, turned, width), _slice(calls, source, 2, turned, width))


def _rotary(calls: RewrittenCalls, given: Given, _results: _Results) -> None:
    positions = calls.one("aten::reshape", self=given["positions"], shape=[-1])
    table = calls.one("aten::index_select", self=given["cos_sin_cache"], dim=0, index=positions)
    for name in ("query", "key"):
        if given.get(name) is not None:
            _turn(calls, given[name], given[name], table, given["head_size"], bool(given["is_neox"]))


def _rope_by_positions(calls: RewrittenCalls, given: Given, _results: _Results) -> None:
    """FlashInfer's: queries and keys of [tokens, heads, width], with results of their own."""
    positions = calls.one("aten::reshape", self=given["pos_ids"], shape=[-1])
    table = calls.one("aten::index_select", self=given["cos_sin_cache"], dim=0, index=positions)
    for name in ("q", "k"):
        source = given[name]
        _turn(calls, source, given[f"{name}_rope"], table, source.meta.sizes[-1], not given["interleave"])


# ---------------------------------------------------------------------------------------------------------------- cache


def _put(calls: RewrittenCalls, cache: Tensor, slots: Tensor, block: int, new: Tensor) -> None:
    """Put tokens into a cache of [blocks, block, ...]. A slot below zero is none: there the cache keeps what it has."""
    if cache.meta.dtype is not new.meta.dtype:
        raise CannotRewrite(f"a cache of {cache.meta.dtype.name} for tokens of {new.meta.dtype.name}")
    new = _slice(calls, new, 0, 0, slots.meta.sizes[0])
    where = [
        calls.one("aten::floor_divide.Scalar", self=slots, other=block),
        calls.one("aten::remainder.Scalar", self=slots, other=block),
    ]
    kept = calls.one("aten::index.Tensor", self=cache, indices=where)
    shape = [slots.meta.sizes[0]] + [1] * (len(new.meta.sizes) - 1)
    real = calls.one("aten::view", self=calls.one("aten::ge.Scalar", self=slots, other=0), size=shape)
    content = calls.one("aten::where.self", condition=real, self=new, other=kept)
    calls.call("aten::index_put_", {"self": cache, "indices": where, "values": content}, [cache])


def _reshape_and_cache_flash(calls: RewrittenCalls, given: Given, _results: _Results) -> None:
    for name in ("key", "value"):
        cache = given[f"{name}_cache"]
        _put(calls, cache, given["slot_mapping"], cache.meta.sizes[1], given[name])


def _reshape_and_cache(calls: RewrittenCalls, given: Given, _results: _Results) -> None:
    keys, values, slots = given["key_cache"], given["value_cache"], given["slot_mapping"]
    tokens, heads = given["key"].meta.sizes[:2]
    _blocks, _heads, parts, block, vector = keys.meta.sizes
    new = calls.one("aten::reshape", self=given["key"], shape=[tokens, heads, parts, vector])
    _put(calls, calls.one("aten::permute", self=keys, dims=[0, 3, 1, 2, 4]), slots, block, new)
    _put(calls, calls.one("aten::permute", self=values, dims=[0, 3, 1, 2]), slots, block, given["value"])


# ------------------------------------------------------------------------------------------------------------ attention


def _gathered(calls: RewrittenCalls, cache: Tensor, table: Tensor, heads: int) -> Tensor:
    """The blocks of each sequence from a cache of [blocks, block, heads, width]: [sequences, heads, tokens, width]."""
    pages = calls.one("aten::index.Tensor", self=cache, indices=[table])
    sequences, blocks, block, own, width = pages.meta.sizes
    tokens = calls.one("aten::reshape", self=pages, shape=[sequences, blocks * block, own, width])
    tokens = calls.one("aten::permute", self=_single(calls, tokens), dims=[0, 2, 1, 3])
    if own == heads:
        return tokens
    return calls.one("aten::repeat_interleave.self_int", self=tokens, repeats=heads // own, dim=1)


def _paged(
    calls: RewrittenCalls,
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    table: Tensor,
    lengths: Tensor,
    longest: int,
    scale: float,
    own_length: Tensor | None = None,
) -> Tensor:
    """Attention of queries [sequences, queries, heads, width] to the first keys of each sequence's pages. With
    `own_length`, how many of the queries each sequence has, the last of them being at its end (causal)."""
    if query.meta.dtype is not caches[0].meta.dtype:
        raise CannotRewrite(f"a cache of {caches[0].meta.dtype.name} for queries of {query.meta.dtype.name}")
    block, heads = caches[0].meta.sizes[1], query.meta.sizes[2]
    table = _slice(calls, table, 1, 0, min(table.meta.sizes[1], max(1, math.ceil(longest / block))))
    keys, values = (_gathered(calls, cache, table, heads) for cache in caches)
    queries = calls.one("aten::permute", self=_single(calls, query), dims=[0, 2, 1, 3])
    scores = calls.one(
        "aten::matmul", self=queries, other=calls.one("aten::transpose.int", self=keys, dim0=-2, dim1=-1)
    )
    scores = calls.one("aten::mul.Scalar", self=scores, other=scale)
    places = _range(calls, keys.meta.sizes[2])
    ends = calls.one("aten::view", self=lengths, size=[-1, 1, 1, 1])
    if own_length is not None:
        rows = _range(calls, query.meta.sizes[1])
        rows = calls.one("aten::view", self=rows, size=[1, 1, -1, 1])
        first = calls.one(
            "aten::sub.Tensor", self=ends, other=calls.one("aten::view", self=own_length, size=[-1, 1, 1, 1])
        )
        ends = calls.one("aten::add.Scalar", self=calls.one("aten::add.Tensor", self=first, other=rows), other=1)
    beyond = calls.one("aten::ge.Tensor", self=places, other=ends)
    scores = calls.one("aten::masked_fill.Scalar", self=scores, mask=beyond, value=-math.inf)
    weights = calls.one("aten::_softmax", self=scores, dim=-1, half_to_float=False)
    mixed = calls.one("aten::matmul", self=weights, other=values)
    return calls.one("aten::permute", self=mixed, dims=[0, 2, 1, 3])


def _plain(given: Given, **unset: Any) -> None:
    """Refuse what the compositions do not have, by argument and the values that mean nothing."""
    odd = [name for name, values in unset.items() if given.get(name) not in values]
    if odd:
        raise CannotRewrite(f"paged attention with {', '.join(odd)}")


def _paged_attention(calls: RewrittenCalls, given: Given, _results: _Results) -> None:
    """One query for each sequence; keys are [blocks, heads, width / x, block, x], values [blocks, heads, width,
    block]."""
    _plain(given, alibi_slopes=(None,), fp8_out_scale=(None,), blocksparse_vert_stride=(None, 0, 1))
    query, keys, values = given["query"], given["key_cache"], given["value_cache"]
    blocks, heads, parts, block, vector = keys.meta.sizes
    keys = calls.one("aten::permute", self=keys, dims=[0, 3, 1, 2, 4])
    keys = calls.one("aten::reshape", self=keys, shape=[blocks, block, heads, parts * vector])
    values = calls.one("aten::permute", self=values, dims=[0, 3, 1, 2])
    mixed = _paged(
        calls,
        calls.one("aten::unsqueeze", self=query, dim=1),
        (keys, values),
        given["block_tables"],
        given["seq_lens"],
        given["max_seq_len"],
        given["scale"],
    )
    _write(calls, given["out"], calls.one("aten::reshape", self=mixed, shape=list(given["out"].meta.sizes)))


def _varlen(calls: RewrittenCalls, given: Given, results: _Results) -> None:
    """Queries of several sequences one after the other, prefill and decode alike; keys are in pages."""
    if given.get("block_table") is None or given.get("seqused_k") is None:
        raise CannotRewrite("attention of sequences that are packed together without pages")
    _plain(given, alibi_slopes=(None,), leftpad_k=(None,), window_size_left=(None, -1), window_size_right=(None, -1, 0))
    _plain(given, softcap=(None, 0.0), p_dropout=(None, 0.0), is_causal=(True,), s_aux=(None,))
    query, starts, lengths = given["q"], given["cu_seqlens_q"], given["seqused_k"]
    sequences, most = lengths.meta.sizes[0], given["max_seqlen_q"]
    first, end = _slice(calls, starts, 0, 0, sequences), _slice(calls, starts, 0, 1, sequences + 1)
    own = calls.one("aten::sub.Tensor", self=end, other=first)
    # Each sequence's queries in a row of its own, as long as the longest; what is beyond its end is not used.
    rows = _range(calls, most)
    places = calls.one("aten::add.Tensor", self=calls.one("aten::unsqueeze", self=first, dim=1), other=rows)
    places = calls.one("aten::clamp", self=places, min=0, max=query.meta.sizes[0] - 1)
    padded = calls.one("aten::index.Tensor", self=query, indices=[places])
    scale = given["softmax_scale"]
    mixed = _paged(
        calls, padded, (given["k"], given["v"]), given["block_table"], lengths, given["max_seqlen_k"], scale, own
    )
    tokens = _range(calls, query.meta.sizes[0])
    whose = calls.one(
        "aten::searchsorted.Tensor", sorted_sequence=_as(calls, end, DType.int64), self=tokens, right=True
    )
    begun = calls.one("aten::index_select", self=first, dim=0, index=whose)
    nth = calls.one("aten::sub.Tensor", self=tokens, other=begun)
    found = calls.one("aten::index.Tensor", self=mixed, indices=[whose, nth])
    if isinstance(given.get("out"), Tensor):
        _write(calls, given["out"], found)
    for place, recorded in enumerate(tensor for tensor in tensors_in(results or []) if tensor is not given.get("out")):
        if place == 0 and not isinstance(given.get("out"), Tensor):
            calls.fill(recorded, found)
        else:
            calls.allocate(recorded, zeros=True)


# ------------------------------------------------------------------------------------------------------------------ MoE


def _topk_softmax(calls: RewrittenCalls, given: Given, _results: _Results) -> None:
    """The most probable experts of each token."""
    weights, indices = given["topk_weights"], given["topk_indices"]
    likely = calls.one("aten::_softmax", self=_single(calls, given["gating_output"]), dim=-1, half_to_float=False)
    best, which = calls.call(
        "aten::topk", {"self": likely, "k": weights.meta.sizes[-1], "dim": -1, "largest": True, "sorted": True}
    )
    if given.get("renormalize"):
        total = calls.one("aten::sum.dim_IntList", self=best, dim=[-1], keepdim=True)
        best = calls.one("aten::div.Tensor", self=best, other=total)
    _write(calls, weights, best)
    _write(calls, indices, which)
    if isinstance(given.get("token_expert_indices"), Tensor):
        # Where each choice is among all of them, choice by choice.
        target = given["token_expert_indices"]
        tokens, chosen = target.meta.sizes
        row = _range(calls, tokens * chosen)
        row = calls.one("aten::view", self=row, size=[chosen, tokens])
        _write(calls, target, calls.one("aten::transpose.int", self=row, dim0=0, dim1=1))


def _moe_sum(calls: RewrittenCalls, given: Given, _results: _Results) -> None:
    total = calls.one("aten::sum.dim_IntList", self=given["input"], dim=[1])
    factor = given.get("routed_scaling_factor", 1)
    _write(calls, given["output"], calls.one("aten::mul.Scalar", self=total, other=factor) if factor != 1 else total)


def _linear(calls: RewrittenCalls, given: Given, results: _Results) -> None:
    calls.call("aten::linear", {"input": given["x"], "weight": given["weight"], "bias": given.get("bias")}, results)


# --------------------------------------------------------------------------------------------------------------- tables

_CACHING = (
    "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
    'str kv_cache_dtype="auto", Tensor? k_scale=None, Tensor? v_scale=None) -> ()'
)
_DECODING = (
    "Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, float scale, Tensor block_tables, "
    "Tensor seq_lens, int block_size, int max_seq_len, Tensor? alibi_slopes=None, "
    'str kv_cache_dtype="auto", Tensor? k_scale=None, Tensor? v_scale=None, int tp_rank=0, '
    "int blocksparse_local_blocks=0, int blocksparse_vert_stride=0, int blocksparse_block_size=64, "
    "int blocksparse_head_sliding_step=0) -> ()"
)
_VARLEN = (
    "(Tensor q, Tensor k, Tensor v, Tensor(a!)? out, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_k, "
    "Tensor? leftpad_k, Tensor? block_table, Tensor? alibi_slopes, int max_seqlen_q, int max_seqlen_k, "
    "float p_dropout, float softmax_scale, bool zero_tensors, bool is_causal, int window_size_left, "
    "int window_size_right, float softcap, bool return_softmax, Generator? gen=None) -> Tensor[]"
)
_NORM = "Tensor input, Tensor weight, float"
_ADD_NORM = "(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float"
_OUT_IN = "(Tensor(a!) out, Tensor input, bool? enable_pdl=None) -> ()"

_GATED: dict[str, tuple[str, dict[str, Any]]] = {
    "silu_and_mul": ("silu", {}),
    "gelu_and_mul": ("gelu", {}),
    "gelu_tanh_and_mul": ("gelu", {"approximate": "tanh"}),
}
# By operator: its rule, and its schema without the name.
_TABLE: dict[str, tuple[Callable[..., None], str]] = {
    "_C::rms_norm": (_rms_norm(), f"(Tensor(a!) result, {_NORM} epsilon) -> ()"),
    "_C::fused_add_rms_norm": (_fused_add_norm(), f"{_ADD_NORM} epsilon) -> ()"),
    "_C::rms_norm_static_fp8_quant": (
        _norm_static_quant,
        "(Tensor(a!) result, Tensor input, Tensor weight, Tensor scale, float epsilon) -> ()",
    ),
    "_C::fused_add_rms_norm_static_fp8_quant": (
        _fused_add_norm_static_quant,
        "(Tensor(a!) result, Tensor input, Tensor(b!) residual, Tensor weight, Tensor scale, float epsilon) -> ()",
    ),
    "_C::static_scaled_fp8_quant": (_static_quant(), "(Tensor(a!) result, Tensor input, Tensor scale) -> ()"),
    "_C::dynamic_scaled_fp8_quant": (
        _dynamic_quant(by_token=False),
        "(Tensor(a!) result, Tensor input, Tensor(b!) scale) -> ()",
    ),
    "_C::dynamic_per_token_scaled_fp8_quant": (
        _dynamic_quant(by_token=True),
        "(Tensor(a!) result, Tensor input, Tensor(b!) scale, Tensor? scale_ub=None) -> ()",
    ),
    "_C::silu_and_mul": (_activation("result", "silu"), "(Tensor(a!) result, Tensor input) -> ()"),
    "_C::mul_and_silu": (_activation("result", "silu", last=True), "(Tensor(a!) result, Tensor input) -> ()"),
    "_C::gelu_and_mul": (_activation("result", "gelu"), "(Tensor(a!) result, Tensor input) -> ()"),
    "_C::gelu_tanh_and_mul": (
        _activation("result", "gelu", approximate="tanh"),
        "(Tensor(a!) result, Tensor input) -> ()",
    ),
    "_C::silu_and_mul_quant": (_silu_quant, "(Tensor(a!) result, Tensor input, Tensor scale) -> ()"),
    "_C::rotary_embedding": (
        _rotary,
        "(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache, bool is_neox) "
        "-> ()",
    ),
    "_C_cache_ops::reshape_and_cache": (_reshape_and_cache, _CACHING),
    "_C_cache_ops::reshape_and_cache_flash": (_reshape_and_cache_flash, _CACHING),
    "_C::paged_attention_v1": (_paged_attention, f"(Tensor(a!) out, {_DECODING}"),
    "_C::paged_attention_v2": (
        _paged_attention,
        f"(Tensor(a!) out, Tensor(b!) exp_sums, Tensor(c!) max_logits, Tensor(d!) tmp_out, {_DECODING}",
    ),
    "_vllm_fa2_C::varlen_fwd": (_varlen, _VARLEN),
    "_moe_C::topk_softmax": (
        _topk_softmax,
        "(Tensor(a!) topk_weights, Tensor(b!) topk_indices, Tensor(c!) token_expert_indices, Tensor gating_output, "
        "bool renormalize=False) -> ()",
    ),
    "_moe_C::moe_sum": (_moe_sum, "(Tensor input, Tensor(a!) output) -> ()"),
    "vllm::rocm_unquantized_gemm": (_linear, "(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor"),
    "sgl_kernel::rmsnorm": (
        _rms_norm("output", "eps"),
        f"(Tensor(a!) output, {_NORM} eps, bool enable_pdl=False) -> ()",
    ),
    "sgl_kernel::gemma_rmsnorm": (
        _rms_norm("output", "eps", 1),
        f"(Tensor(a!) output, {_NORM} eps, bool enable_pdl=False) -> ()",
    ),
    "sgl_kernel::fused_add_rmsnorm": (_fused_add_norm("eps"), f"{_ADD_NORM} eps, bool enable_pdl=False) -> ()"),
    "sgl_kernel::gemma_fused_add_rmsnorm": (
        _fused_add_norm("eps", 1),
        f"{_ADD_NORM} eps, bool enable_pdl=False) -> ()",
    ),
    "sgl_kernel::apply_rope_pos_ids_cos_sin_cache": (
        _rope_by_positions,
        "(Tensor q, Tensor k, Tensor(a!) q_rope, Tensor(b!) k_rope, Tensor cos_sin_cache, Tensor pos_ids, "
        "bool interleave, int cuda_stream=0) -> ()",
    ),
    "sgl_kernel::sgl_per_token_quant_fp8": (
        _dynamic_quant("output_q", "output_s", by_token=True),
        "(Tensor input, Tensor(a!) output_q, Tensor(b!) output_s) -> ()",
    ),
    "sgl_kernel::topk_softmax": (
        _topk_softmax,
        "(Tensor(a!) topk_weights, Tensor(b!) topk_indices, Tensor gating_output, bool renormalize) -> ()",
    ),
    "sgl_kernel::moe_sum_reduce": (_moe_sum, "(Tensor input, Tensor(a!) output, float routed_scaling_factor) -> ()"),
    "flashinfer::rmsnorm": (_rms_norm("out", "eps"), f"(Tensor(a!) out, {_NORM} eps, bool? enable_pdl=None) -> ()"),
    "flashinfer::fused_add_rmsnorm": (_fused_add_norm("eps"), f"{_ADD_NORM} eps, bool? enable_pdl=None) -> ()"),
    "aiter::rms_norm": (_rms_norm("", "epsilon"), f"({_NORM} epsilon, int use_model_sensitive_rmsnorm=0) -> Tensor"),
    "aiter::rmsnorm2d_fwd": (
        _rms_norm("", "epsilon"),
        f"({_NORM} epsilon, int use_model_sensitive_rmsnorm=0) -> Tensor",
    ),
    "aiter::rmsnorm2d_fwd_with_add": (
        _norm_with_add,
        "(Tensor(a!) out, Tensor input, Tensor residual_in, Tensor(b!) residual_out, Tensor weight, float epsilon, "
        "int use_model_sensitive_rmsnorm=0) -> ()",
    ),
    **{
        f"{library}::{name}": (_activation("out", function, **options), _OUT_IN)
        for library in ("sgl_kernel", "flashinfer", "aiter")
        for name, (function, options) in _GATED.items()
    },
}
ENGINES: dict[str, Any] = {name: rule for name, (rule, _schema) in _TABLE.items()}
ENGINE_SCHEMAS = {name: name + schema for name, (_rule, schema) in _TABLE.items()}
