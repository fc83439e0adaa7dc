"""Mixtures of experts: routing, sorting by expert, grouped products. Compositions for engines.py."""

from __future__ import annotations

import math
from typing import Any

from replayfmt.format.codes import DType

from ..common.synthesis import Tensor
from .rewriting import CannotRewrite, Given, Recorded, RewrittenCalls, plain, renamed, tensors_in

LARGEST = {DType.float8_e4m3fn: 448.0, DType.float8_e5m2: 57344.0, DType.float8_e4m3fnuz: 240.0, DType.int8: 127.0}


def quantized(calls: RewrittenCalls, data: Tensor, scale: Tensor, dtype: DType) -> Tensor:
    """Data divided by a scale, as a quantized dtype: beyond its range are its limits."""
    most = LARGEST.get(dtype)
    if most is None:
        raise CannotRewrite(f"quantization to {dtype.name}")
    scaled = calls.one("aten::div.Tensor", self=calls.single(data), other=scale)
    if dtype is DType.int8:
        scaled = calls.one("aten::round", self=scaled)
    least = -128.0 if dtype is DType.int8 else -most
    return calls.cast(calls.one("aten::clamp", self=scaled, min=least, max=most), dtype)


def dequantized(calls: RewrittenCalls, tensor: Tensor, scale: Tensor | None, dtype: DType) -> Tensor:
    """A tensor times its scales, one for everything, for each row, or for each block."""
    if tensor.meta.dtype not in {*LARGEST, DType.float16, DType.bfloat16, DType.float32}:
        raise CannotRewrite(f"a product with a factor of {tensor.meta.dtype.name}")
    if scale is None:
        return calls.cast(tensor, dtype)
    sizes, found = tensor.meta.sizes, list(scale.meta.sizes)
    if math.prod(found) == 1:
        scale = calls.one("aten::reshape", self=scale, shape=[1] * len(sizes))
    elif len(found) < len(sizes):
        scale = calls.one("aten::view", self=scale, size=[*found, *[1] * (len(sizes) - len(found))])
    for dim, (own, all_of_it) in enumerate(zip(scale.meta.sizes, sizes, strict=True)):
        if own not in (1, all_of_it):
            scale = calls.one("aten::repeat_interleave.self_int", self=scale, repeats=-(-all_of_it // own), dim=dim)
            scale = calls.slice(scale, dim, 0, all_of_it)
    return calls.cast(calls.times(calls.single(tensor), scale), dtype)


def gated(calls: RewrittenCalls, data: Tensor, function: str, *, last: bool = False, **options: Any) -> Tensor:
    """An activation of one half of the last dimension, times the other half."""
    width = data.meta.sizes[-1] // 2
    halves = [calls.slice(data, -1, place * width, (place + 1) * width) for place in range(2)]
    active, other = (halves[1], halves[0]) if last else halves
    return calls.times(calls.one(f"aten::{function}", self=active, **options), other)


def topk(scores: str = "softmax") -> Any:
    """The most probable experts of each token."""

    def rule(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
        plain("routing", given, moe_softcapping=(None, 0.0), correction_bias=(None,), bias=(None,))
        plain("routing", given, num_shared_experts=(None, 0), routed_scaling_factor=(None, 1.0), is_padding=(None,))
        weights, indices = given["topk_weights"], given["topk_indices"]
        gates = calls.single(given["gating_output"])
        if scores == "softmax":
            likely = calls.one("aten::_softmax", self=gates, dim=-1, half_to_float=False)
        else:
            likely = calls.one("aten::sigmoid", self=gates)
        best, which = _best(calls, likely, weights.meta.sizes[-1])
        if given.get("renormalize"):
            best = _shares(calls, best)
        calls.write(weights, best)
        calls.write(indices, which)
        if isinstance(given.get("token_expert_indices"), Tensor):
            # Where each choice is among all of them, choice by choice.
            target = given["token_expert_indices"]
            tokens, chosen = target.meta.sizes
            row = calls.one("aten::view", self=calls.count(tokens * chosen), size=[chosen, tokens])
            calls.write(target, calls.one("aten::transpose.int", self=row, dim0=0, dim1=1))

    return rule


def _best(calls: RewrittenCalls, scores: Tensor, count: int) -> list[Tensor]:
    return calls.call("aten::topk", {"self": scores, "k": count, "dim": -1, "largest": True, "sorted": True})


def _shares(calls: RewrittenCalls, weights: Tensor) -> Tensor:
    total = calls.one("aten::sum.dim_IntList", self=weights, dim=[-1], keepdim=True)
    return calls.one("aten::div.Tensor", self=weights, other=total)


def grouped_topk(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """DeepSeek's routing: biased sigmoids choose the best groups by their two best experts, and in those the experts;
    weights are without the bias."""
    plain("routing", given, num_fused_shared_experts=(None, 0), apply_routed_scaling_factor_on_output=(None, False))
    plain("routing", given, scoring_func=(None, 1))
    gates = calls.single(given["gates"])
    groups, kept, (tokens, experts) = given["groups"], given["topk_group"], gates.meta.sizes
    weights: Tensor | None = given.get("topk_weights")
    chosen = given["topk"] if weights is None else weights.meta.sizes[-1]
    scores = calls.one("aten::sigmoid", self=gates)
    biased = calls.one("aten::add.Tensor", self=scores, other=calls.single(given["bias"]))
    by_group = calls.one("aten::view", self=biased, size=[tokens, groups, experts // groups])
    two = calls.one("aten::sum.dim_IntList", self=_best(calls, by_group, 2)[0], dim=[-1])
    _value, best_groups = _best(calls, two, kept)
    shut = calls.one(
        "aten::scatter.value", self=calls.one("aten::ones_like", self=two), dim=1, index=best_groups, value=0
    )
    shut = calls.one("aten::unsqueeze", self=calls.cast(shut, DType.bool), dim=-1)
    left = calls.one("aten::masked_fill.Scalar", self=by_group, mask=shut, value=-math.inf)
    _value, which = _best(calls, calls.one("aten::view", self=left, size=[tokens, experts]), chosen)
    best = calls.one("aten::gather", self=scores, dim=1, index=which)
    if given.get("renormalize", True):
        best = _shares(calls, best)
        factor = given.get("routed_scaling_factor", 1.0) if weights is not None or "renormalize" in given else 1.0
        best = calls.one("aten::mul.Scalar", self=best, other=factor) if factor != 1 else best
    if weights is not None:
        calls.write(weights, best)
        calls.write(given["topk_ids"], which)
    for recorded, content in zip(tensors_in(results or []), (best, which), strict=False):
        calls.fill(recorded, content)


def moe_align(first: int) -> Any:
    """Which tokens each expert has, filled up to whole blocks. `first`: the expert of the first slot is that number;
    SGLang has one slot more, for experts of other ranks (-1)."""

    def rule(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
        plain("sorting", given, scatter_idx=(None,))
        ids, block, count = given["topk_ids"], given["block_size"], given["num_experts"]
        target, experts = given["sorted_token_ids"], given["experts_ids"]
        slots = calls.one("aten::reshape", self=calls.cast(ids, DType.int64), shape=[-1])
        slots = calls.one("aten::sub.Scalar", self=slots, other=first) if first else slots
        order, counts, ends = _by_expert(calls, slots, count)
        whole = calls.one(
            "aten::floor_divide.Scalar", self=calls.one("aten::add.Scalar", self=counts, other=block - 1), other=block
        )
        filled = calls.one("aten::mul.Scalar", self=whole, other=block)
        filled_ends = calls.one("aten::cumsum", self=filled, dim=0)
        # A token is as far behind its expert's first place as it is behind the expert's first token.
        begun = calls.one("aten::sub.Tensor", self=filled_ends, other=filled)
        ahead = calls.one("aten::sub.Tensor", self=begun, other=calls.one("aten::sub.Tensor", self=ends, other=counts))
        own = calls.one(
            "aten::index_select",
            self=ahead,
            dim=0,
            index=calls.one("aten::index_select", self=slots, dim=0, index=order),
        )
        places = calls.one("aten::add.Tensor", self=own, other=calls.count(slots.meta.sizes[0]))
        calls.call("aten::fill_.Scalar", {"self": target, "value": slots.meta.sizes[0]}, [target])
        calls.call(
            "aten::index_put_",
            {"self": target, "indices": [places], "values": calls.cast(order, target.meta.dtype)},
            [target],
        )
        begins = calls.one("aten::mul.Scalar", self=calls.count(experts.meta.sizes[0]), other=block)
        whose = calls.one("aten::searchsorted.Tensor", sorted_sequence=filled_ends, self=begins, right=True)
        whose = calls.one("aten::clamp", self=whose, min=None, max=count - 1)
        calls.write(experts, calls.one("aten::add.Scalar", self=whose, other=first) if first else whose)
        total = given["num_tokens_post_pad"]
        last = calls.slice(filled_ends, 0, count - 1, count)
        calls.write(total, calls.one("aten::expand", self=last, size=list(total.meta.sizes)))

    return rule


def _by_expert(calls: RewrittenCalls, slots: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The order of tokens by expert, how many each expert has, and where its tokens end."""
    order = calls.one("aten::argsort.stable", self=slots, stable=True)
    is_own = calls.one(
        "aten::eq.Tensor", self=calls.one("aten::unsqueeze", self=slots, dim=1), other=calls.count(count)
    )
    counts = calls.one("aten::sum.dim_IntList", self=is_own, dim=[0])
    return order, counts, calls.one("aten::cumsum", self=counts, dim=0)


def experts(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """Each token's experts, two grouped products with the activation between them, and their weighted sum."""
    plain("experts", given, expert_map=(None,), expert_mask=(None,), w1_zp=(None,), w2_zp=(None,), gemm1_alpha=(None,))
    plain("experts", given, no_combine=(None, False), use_int4_w4a16=(None, False), use_int8_w8a16=(None, False))
    plain("experts", given, swiglu_limit=(None, 0.0), shared_w1=(None,), gate_mode=(None, "", "separated"))
    plain("experts", given, num_local_tokens=(None,), ep_source_token_map=(None,), beta=(None,), linear_beta=(None,))
    activation = {0: "silu", 1: "gelu"}.get(given.get("activation"), given.get("activation", "silu"))  # type: ignore[arg-type]
    if activation not in ("silu", "gelu"):
        raise CannotRewrite(f"experts with the activation {activation}")
    hidden, ids = given["hidden_states"], given["topk_ids"]
    dtype, (tokens, chosen) = DType.bfloat16, ids.meta.sizes  # the one of grouped products
    if hidden.meta.dtype is not dtype:
        calls.assumed.append(f"products in bfloat16 for {hidden.meta.dtype.name}")
    weights = [dequantized(calls, given[name], given.get(f"{name}_scale"), dtype) for name in ("w1", "w2")]
    if weights[0].meta.sizes[2] != hidden.meta.sizes[1]:
        raise CannotRewrite(f"experts of {list(weights[0].meta.sizes)} for tokens of {list(hidden.meta.sizes)}")
    slots = calls.one("aten::reshape", self=calls.cast(ids, DType.int64), shape=[-1])
    order, _counts, ends = _by_expert(calls, slots, weights[0].meta.sizes[0])
    own = calls.one("aten::index_select", self=slots, dim=0, index=order)
    ends = calls.cast(ends, DType.int32)
    share = calls.one("aten::reshape", self=calls.cast(given["topk_weights"], dtype), shape=[-1, 1])
    share = calls.one("aten::index_select", self=share, dim=0, index=order)
    early = bool(given.get("apply_router_weight_on_input"))

    def product(data: Tensor, place: int) -> Tensor:
        turned = calls.one("aten::transpose.int", self=weights[place], dim0=1, dim1=2)
        made = calls.one("aten::_grouped_mm", self=data, mat2=turned, offs=ends)
        bias = given.get(f"w{place + 1}_bias")
        if bias is not None:
            of_each = calls.one("aten::index_select", self=calls.cast(bias, dtype), dim=0, index=own)
            made = calls.one("aten::add.Tensor", self=made, other=of_each)
        return made

    rows = calls.one(
        "aten::index_select",
        self=calls.cast(hidden, dtype),
        dim=0,
        index=calls.one("aten::floor_divide.Scalar", self=order, other=chosen),
    )
    made = product(rows, 0)
    made = calls.times(made, share) if early else made
    if given.get("is_gated", True):
        made = gated(calls, made, activation)
    else:
        made = calls.one(f"aten::{activation}", self=made)
    made = product(made, 1)
    made = made if early else calls.times(made, share)
    back = calls.one(
        "aten::index_select", self=made, dim=0, index=calls.one("aten::argsort.stable", self=order, stable=True)
    )
    back = calls.one("aten::view", self=back, size=[tokens, chosen, -1])
    total = calls.one("aten::sum.dim_IntList", self=back, dim=[1])
    factor = given.get("routed_scaling_factor")
    total = calls.one("aten::mul.Scalar", self=total, other=factor) if factor not in (None, 1.0) else total
    total = calls.cast(total, hidden.meta.dtype)
    if given.get("inplace"):
        calls.write(hidden, total)
    else:
        calls.fill((results or [None])[0], total)


def block_products(
    calls: RewrittenCalls, rows: Tensor, weight: Tensor, experts: Tensor, block: int, valid: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows that are sorted by expert times weights [experts, width, columns]. `experts` has the expert of each block of
    so many rows, `valid` is how many rows there are; also the experts of all blocks, as numbers in order."""
    # The experts of blocks beyond the last are not defined: the last expert's keeps them in order. Those of fillers in
    # between are below zero: they stay with the expert before them.
    count, blocks = weight.meta.sizes[0], calls.count(experts.meta.sizes[0])
    begins = calls.one("aten::mul.Scalar", self=blocks, other=block)
    used = calls.one("aten::lt.Tensor", self=begins, other=calls.slice(valid, 0, 0, 1))
    whose = calls.cast(experts, DType.int64)
    last = calls.one("aten::full_like", self=whose, fill_value=count - 1)
    whose = calls.one("aten::where.self", condition=used, self=whose, other=last)
    whose = calls.one(
        "aten::clamp", self=calls.call("aten::cummax", {"self": whose, "dim": 0})[0], min=0, max=count - 1
    )
    _order, _counts, ends = _by_expert(calls, whose, count)
    ends = calls.one("aten::mul.Scalar", self=ends, other=block)
    ends = calls.cast(calls.one("aten::clamp", self=ends, min=0, max=rows.meta.sizes[0]), DType.int32)
    return calls.one("aten::_grouped_mm", self=rows, mat2=weight, offs=ends), whose


def into_slots(calls: RewrittenCalls, made: Tensor, slot: Tensor, there: Tensor, count: int) -> Tensor:
    """Rows in the places that `slot` says, of `count`. Fillers, which are not `there`, go to a row behind the last."""
    more = calls.one("aten::new_zeros", self=made, size=[count + 1, made.meta.sizes[1]])
    slot = calls.one(
        "aten::where.self", condition=there, self=slot, other=calls.one("aten::full_like", self=slot, fill_value=count)
    )
    calls.call("aten::index_put_", {"self": more, "indices": [slot], "values": made}, [more])
    return calls.slice(more, 0, 0, count)


def expert_stage(place: int) -> Any:
    """One of AITER's two stages: tokens sorted by expert, block by block, and their grouped product. An entry has the
    token in its lower 24 bits, and above them which of its experts it is; a token that is not there fills up."""

    def rule(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
        activation = {0: "silu", 1: "gelu"}.get(given.get("activation", 0))
        if activation is None:
            raise CannotRewrite(f"experts with the activation {given.get('activation')}")
        data, weight, out, chosen = given["data"], given[f"w{place}"], given["out"], given["topk"]
        dtype, block, tokens = DType.bfloat16, given.get("block_m") or 32, data.meta.sizes[0]
        weight = dequantized(calls, weight, given.get(f"w{place}_scale"), dtype)
        data = dequantized(calls, data, given.get(f"a{place}_scale"), dtype)
        ids = calls.cast(given["sorted_token_ids"], DType.int64)
        token = calls.one("aten::bitwise_and.Scalar", self=ids, other=(1 << 24) - 1)
        nth = calls.one("aten::floor_divide.Scalar", self=ids, other=1 << 24)
        there = calls.one("aten::lt.Scalar", self=token, other=tokens)
        slot = calls.one("aten::add.Tensor", self=calls.one("aten::mul.Scalar", self=token, other=chosen), other=nth)
        row = calls.one(
            "aten::clamp", self=token if place == 1 else slot, min=0, max=tokens * chosen ** (place - 1) - 1
        )
        if place == 2:
            data = calls.one("aten::reshape", self=data, shape=[tokens * chosen, data.meta.sizes[-1]])
        rows = calls.one("aten::index_select", self=data, dim=0, index=row)
        turned = calls.one("aten::transpose.int", self=weight, dim0=1, dim1=2)
        made, _whose = block_products(calls, rows, turned, given["sorted_expert_ids"], block, given["num_valid_ids"])
        if place == 1 and made.meta.sizes[-1] == 2 * out.meta.sizes[-1]:
            made = gated(calls, made, activation)
        elif place == 1:
            made = calls.one(f"aten::{activation}", self=made)
        if given.get("sorted_weights") is not None:
            share = calls.one("aten::view", self=calls.cast(given["sorted_weights"], dtype), size=[-1, 1])
            made = calls.times(made, share)
        target = calls.one("aten::view", self=out, size=[-1, out.meta.sizes[-1]])
        shown = calls.one("aten::unsqueeze", self=there, dim=1)
        nothing = calls.one("aten::zeros_like", self=made)
        made = calls.cast(calls.one("aten::where.self", condition=shown, self=made, other=nothing), out.meta.dtype)
        if place == 1:
            calls.write(target, into_slots(calls, made, slot, there, target.meta.sizes[0]))
        else:
            row = calls.one("aten::clamp", self=token, min=0, max=tokens - 1)
            calls.call("aten::index_add_", {"self": target, "dim": 0, "index": row, "source": made}, [target])

    return rule


def moe_sum(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    plain("a sum", given, expert_map=(None,))
    total = calls.one("aten::sum.dim_IntList", self=given["input"], dim=[1])
    factor = given.get("routed_scaling_factor", 1)
    calls.write(given["output"], calls.one("aten::mul.Scalar", self=total, other=factor) if factor != 1 else total)


def shuffled_rows(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    calls.write(given["output"], calls.one("aten::index_select", self=given["input"], dim=0, index=given["map"]))


def permuted(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    """Each token once for each of its experts, sorted by expert; where each comes from and goes to, and where each
    expert's begin."""
    plain("sorting", given, expert_map=(None,))
    if "align_block_size" in given:  # vLLM's older operator
        raise CannotRewrite("sorting with align_block_size, which counts the choices in another order")
    data, target, begins = given["input"], given["permuted_input"], given["expert_first_token_offset"]
    if target.meta.sizes[0] != math.prod(given["topk_ids"].meta.sizes):
        raise CannotRewrite("sorting into more rows than there are choices")
    ids = calls.one("aten::reshape", self=calls.cast(given["topk_ids"], DType.int64), shape=[-1])
    experts, order = calls.call("aten::sort.stable", {"self": ids, "stable": True, "dim": 0, "descending": False})
    _sorted, place = calls.call("aten::sort.stable", {"self": order, "stable": True, "dim": 0, "descending": False})
    token = calls.one("aten::floor_divide.Scalar", self=order, other=given["topk"])
    calls.write(target, calls.one("aten::index_select", self=data, dim=0, index=token))
    numbers = calls.count(begins.meta.sizes[0])
    calls.write(begins, calls.one("aten::searchsorted.Tensor", sorted_sequence=experts, self=numbers))
    for name, rows in (("inv_permuted_idx", place), ("permuted_idx", order)):
        where = given[name]
        calls.write(where, calls.one("aten::reshape", self=rows, shape=list(where.meta.sizes)))


def unpermuted(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    """The weighted sum of what each token's experts made, which stand sorted by expert. Rows behind those of the last
    expert are of experts elsewhere, and count nothing. vLLM's older operator names the places choice by choice."""
    weights, target = given["topk_weights"], given["hidden_states"]
    tokens, chosen = weights.meta.sizes
    begins, places = given.get("expert_first_token_offset"), given.get("inv_permuted_idx")
    if places is None:
        places = calls.one("aten::reshape", self=given["src_row_id2dst_row_id_map"], shape=[chosen, tokens])
        places = calls.one("aten::transpose.int", self=places, dim0=0, dim1=1)
    places = calls.one("aten::reshape", self=places, shape=[-1])
    rows = calls.one("aten::index_select", self=calls.single(given["permuted_hidden_states"]), dim=0, index=places)
    if begins is not None:
        end = calls.slice(begins, 0, begins.meta.sizes[0] - 1, begins.meta.sizes[0])
        here = calls.one("aten::unsqueeze", self=calls.one("aten::lt.Tensor", self=places, other=end), dim=1)
        nothing = calls.one("aten::zeros_like", self=rows)
        rows = calls.one("aten::where.self", condition=here, self=rows, other=nothing)
    rows = calls.one("aten::reshape", self=rows, shape=[tokens, chosen, -1])
    rows = calls.times(rows, calls.one("aten::unsqueeze", self=calls.single(weights), dim=-1))
    calls.write(target, calls.one("aten::sum.dim_IntList", self=rows, dim=[1]))


def grouped_product(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    """Rows that are sorted by expert times quantized weights [experts, width, columns]; `expert_offsets` has where each
    expert's rows begin."""
    target, weight = given["out"], given["b"]
    rows = dequantized(calls, given["a"], given["a_scales"], DType.bfloat16)
    count, begins = weight.meta.sizes[0], calls.cast(given["expert_offsets"], DType.int32)
    scales = given["b_scales"]
    if math.prod(scales.meta.sizes) > count:  # of each column
        scales = calls.one("aten::reshape", self=scales, shape=[count, 1, weight.meta.sizes[2]])
    weight = dequantized(calls, weight, scales, DType.bfloat16)
    last = calls.cast(calls.filled(1, rows.meta.sizes[0]), DType.int32)
    ends = calls.one("aten::cat", tensors=[calls.slice(begins, 0, 1, count), last], dim=0)
    calls.write(target, calls.one("aten::_grouped_mm", self=rows, mat2=weight, offs=ends))


# --------------------------------------------------------------------------------------------------------------- table

_GROUPED = {"input": "gates", "gating_output": "gates", "scores": "gates", "correction_bias": "bias"}
_GROUPED |= {"num_expert_group": "groups", "n_group": "groups", "topk_grp": "topk_group"}
_GROUPED |= {"need_renorm": "renormalize", "n_share_experts_fusion": "num_fused_shared_experts"}
RULES: tuple[tuple[Any, str], ...] = (
    (topk(), "_moe_C::topk_softmax aiter::topk_softmax vllm::rocm_aiter_topk_softmax sgl_kernel::topk_softmax"),
    (
        topk("sigmoid"),
        "_moe_C::topk_sigmoid aiter::topk_sigmoid vllm::rocm_aiter_topk_sigmoid sgl_kernel::topk_sigmoid",
    ),
    (
        renamed(grouped_topk, _GROUPED),
        "_moe_C::grouped_topk sgl_kernel::moe_fused_gate aiter::biased_grouped_topk_hip aiter::biased_grouped_topk "
        "vllm::rocm_aiter_biased_grouped_topk",
    ),
    (moe_align(0), "_moe_C::moe_align_block_size _moe_C::sgl_moe_align_block_size"),
    (moe_align(-1), "sgl_kernel::moe_align_block_size"),
    (moe_sum, "_moe_C::moe_sum sgl_kernel::moe_sum aiter::moe_sum sgl_kernel::moe_sum_reduce"),
    (permuted, "_moe_C::moe_permute _moe_C::moe_permute_with_scratch"),
    (unpermuted, "_moe_C::moe_unpermute"),
    (shuffled_rows, "_moe_C::shuffle_rows sgl_kernel::shuffle_rows"),
    (grouped_product, "_C::cutlass_moe_mm"),
    (renamed(experts, inplace=True), "vllm::inplace_fused_experts sglang::inplace_fused_experts"),
    (renamed(experts, inplace=False), "vllm::outplace_fused_experts sglang::outplace_fused_experts"),
    (experts, "aiter::fused_moe_ vllm::rocm_aiter_fused_moe"),
    (renamed(expert_stage(1), {"hidden_states": "data"}), "aiter::ck_moe_stage1"),
    (renamed(expert_stage(2), {"inter_states": "data"}), "aiter::ck_moe_stage2"),
)
