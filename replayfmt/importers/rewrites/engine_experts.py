"""Mixtures of experts: routing, sorting by expert, grouped products. Compositions for engines.py."""

from __future__ import annotations

import math
from typing import Any

from replayfmt.format.codes import DType

from .rewriting import CannotRewrite, Given, RewrittenCalls, Value, plain, renamed

LARGEST = {DType.float8_e4m3fn: 448.0, DType.float8_e5m2: 57344.0, DType.float8_e4m3fnuz: 240.0, DType.int8: 127.0}


def quantized(data: Value, scale: Value, dtype: DType) -> Value:
    """Data divided by a scale, as a quantized dtype: beyond its range are its limits."""
    most = LARGEST.get(dtype)
    if most is None:
        raise CannotRewrite(f"quantization to {dtype.name}")
    scaled = data.single() / scale
    if dtype is DType.int8:
        scaled = scaled.round()
    return scaled.clamp(-128.0 if dtype is DType.int8 else -most, most).to(dtype)


def dequantized(tensor: Value, scale: Value | None, dtype: DType) -> Value:
    """A tensor times its scales, one for everything, for each row, or for each block."""
    if tensor.dtype not in {*LARGEST, DType.float16, DType.bfloat16, DType.float32}:
        raise CannotRewrite(f"a product with a factor of {tensor.dtype.name}")
    if scale is None:
        return tensor.to(dtype)
    sizes, found = tensor.sizes, list(scale.sizes)
    if math.prod(found) == 1:
        scale = scale.reshape([1] * len(sizes))
    elif len(found) < len(sizes):
        scale = scale.view([*found, *[1] * (len(sizes) - len(found))])
    for dim, (own, all_of_it) in enumerate(zip(scale.sizes, sizes, strict=True)):
        if own not in (1, all_of_it):
            scale = scale.repeat_interleave(-(-all_of_it // own), dim).part(dim, 0, all_of_it)
    return (tensor.single() * scale).to(dtype)


def gated(data: Value, function: str, *, last: bool = False, **options: Any) -> Value:
    """An activation of one half of the last dimension, times the other half."""
    width = data.sizes[-1] // 2
    halves = [data.part(-1, place * width, (place + 1) * width) for place in range(2)]
    active, other = (halves[1], halves[0]) if last else halves
    return getattr(active, function)(**options) * other


def topk(scores: str = "softmax") -> Any:
    """The most probable experts of each token."""

    def rule(calls: RewrittenCalls, given: Given) -> None:
        plain("routing", given, moe_softcapping=(None, 0.0), correction_bias=(None,), bias=(None,))
        plain("routing", given, num_shared_experts=(None, 0), routed_scaling_factor=(None, 1.0), is_padding=(None,))
        gates = given["gating_output"].single()
        likely = gates._softmax(-1, False) if scores == "softmax" else gates.sigmoid()
        best, which = best_of(likely, given["topk_weights"].sizes[-1])
        given["topk_weights"].copy_(_shares(best) if given.get("renormalize") else best)
        given["topk_indices"].copy_(which)
        target = given.get("token_expert_indices")
        if isinstance(target, Value):  # where each choice is among all of them, choice by choice
            tokens, chosen = target.sizes
            target.copy_(calls.count(tokens * chosen).view([chosen, tokens]).transpose(0, 1))

    return rule


def best_of(scores: Value, count: int) -> Any:
    """The largest along the last dimension, in order, and their places."""
    return scores.topk(count, -1, True, True)


def _shares(weights: Value) -> Value:
    return weights / weights.sum([-1], True)


def grouped_topk(calls: RewrittenCalls, given: Given) -> None:
    """DeepSeek's routing: biased sigmoids choose the best groups by their two best experts, and in those the experts;
    weights are without the bias."""
    plain("routing", given, num_fused_shared_experts=(None, 0), apply_routed_scaling_factor_on_output=(None, False))
    plain("routing", given, scoring_func=(None, 1))
    gates, groups, weights = given["gates"].single(), given["groups"], given.get("topk_weights")
    tokens, experts = gates.sizes
    kept, chosen = given["topk_group"], given["topk"] if weights is None else weights.sizes[-1]
    scores = gates.sigmoid()
    by_group = (scores + given["bias"].single()).view([tokens, groups, experts // groups])
    two = best_of(by_group, 2)[0].sum([-1])
    _value, best_groups = best_of(two, kept)
    shut = two.ones_like().scatter(1, best_groups, 0).to(DType.bool).unsqueeze(-1)
    _value, which = best_of(by_group.masked_fill(shut, -math.inf).view([tokens, experts]), chosen)
    best = scores.gather(1, which)
    if given.get("renormalize", True):
        best = _shares(best)
        factor = given.get("routed_scaling_factor", 1.0) if weights is not None or "renormalize" in given else 1.0
        best = best * factor if factor != 1 else best
    if weights is not None:
        weights.copy_(best)
        given["topk_ids"].copy_(which)
    calls.deliver(best, which)


def moe_align(first: int) -> Any:
    """Which tokens each expert has, filled up to whole blocks. `first`: the expert of the first slot is that number;
    SGLang has one slot more, for experts of other ranks (-1)."""

    def rule(calls: RewrittenCalls, given: Given) -> None:
        plain("sorting", given, scatter_idx=(None,))
        block, count, target, experts = (
            given[name] for name in ("block_size", "num_experts", "sorted_token_ids", "experts_ids")
        )
        slots = given["topk_ids"].to(DType.int64).reshape([-1])
        slots = slots - first if first else slots
        order, counts, ends = _by_expert(slots, count)
        filled = (counts + (block - 1)) // block * block
        filled_ends = filled.cumsum(0)
        # A token is as far behind its expert's first place as it is behind the expert's first token.
        ahead = filled_ends - filled - (ends - counts)
        places = ahead.index_select(0, slots.index_select(0, order)) + calls.count(slots.sizes[0])
        target.fill_(slots.sizes[0])
        target.index_put_([places], order.to(target.dtype))
        begins = calls.count(experts.sizes[0]) * block
        whose = filled_ends.searchsorted(begins, right=True).clamp(None, count - 1)
        experts.copy_(whose + first if first else whose)
        total = given["num_tokens_post_pad"]
        total.copy_(filled_ends.part(0, count - 1, count).expand(list(total.sizes)))

    return rule


def _by_expert(slots: Value, count: int) -> tuple[Value, Value, Value]:
    """The order of tokens by expert, how many each expert has, and where its tokens end."""
    order = slots.argsort(stable=True)
    counts = slots.unsqueeze(1).eq(slots.calls.count(count)).sum([0])
    return order, counts, counts.cumsum(0)


def experts(calls: RewrittenCalls, given: Given) -> None:
    """Each token's experts, two grouped products with the activation between them, and their weighted sum."""
    plain("experts", given, expert_map=(None,), expert_mask=(None,), w1_zp=(None,), w2_zp=(None,), gemm1_alpha=(None,))
    plain("experts", given, no_combine=(None, False), use_int4_w4a16=(None, False), use_int8_w8a16=(None, False))
    plain("experts", given, swiglu_limit=(None, 0.0), shared_w1=(None,), gate_mode=(None, "", "separated"))
    plain("experts", given, num_local_tokens=(None,), ep_source_token_map=(None,), beta=(None,), linear_beta=(None,))
    activation = {0: "silu", 1: "gelu"}.get(given.get("activation"), given.get("activation", "silu"))  # type: ignore[arg-type]
    if activation not in ("silu", "gelu"):
        raise CannotRewrite(f"experts with the activation {activation}")
    hidden, ids = given["hidden_states"], given["topk_ids"]
    dtype, (tokens, chosen) = DType.bfloat16, ids.sizes  # the one of grouped products
    if hidden.dtype is not dtype:
        calls.assumed.append(f"products in bfloat16 for {hidden.dtype.name}")
    weights = [dequantized(given[name], given.get(f"{name}_scale"), dtype) for name in ("w1", "w2")]
    if weights[0].sizes[2] != hidden.sizes[1]:
        raise CannotRewrite(f"experts of {list(weights[0].sizes)} for tokens of {list(hidden.sizes)}")
    slots = ids.to(DType.int64).reshape([-1])
    order, _counts, ends = _by_expert(slots, weights[0].sizes[0])
    own = slots.index_select(0, order)
    ends = ends.to(DType.int32)
    share = given["topk_weights"].to(dtype).reshape([-1, 1]).index_select(0, order)
    early = bool(given.get("apply_router_weight_on_input"))

    def product(data: Value, place: int) -> Value:
        made = data._grouped_mm(weights[place].transpose(1, 2), ends)
        bias = given.get(f"w{place + 1}_bias")
        return made if bias is None else made + bias.to(dtype).index_select(0, own)

    made = product(hidden.to(dtype).index_select(0, order // chosen), 0)
    made = made * share if early else made
    made = gated(made, activation) if given.get("is_gated", True) else getattr(made, activation)()
    made = product(made, 1)
    made = made if early else made * share
    total = made.index_select(0, order.argsort(stable=True)).view([tokens, chosen, -1]).sum([1])
    factor = given.get("routed_scaling_factor")
    total = (total * factor if factor not in (None, 1.0) else total).to(hidden.dtype)
    if given.get("inplace"):
        hidden.copy_(total)
    else:
        calls.deliver(total)


def block_products(rows: Value, weight: Value, experts: Value, block: int, valid: Value) -> tuple[Value, Value]:
    """Rows that are sorted by expert times weights [experts, width, columns]. `experts` has the expert of each block of
    so many rows, `valid` is how many rows there are; also the experts of all blocks, as numbers in order."""
    # The experts of blocks beyond the last are not defined: the last expert's keeps them in order. Those of fillers in
    # between are below zero: they stay with the expert before them.
    count = weight.sizes[0]
    used = rows.calls.count(experts.sizes[0]) * block < valid.part(0, 0, 1)
    whose = experts.to(DType.int64)
    whose = used.where(whose, whose.full_like(count - 1)).cummax(0)[0].clamp(0, count - 1)
    _order, _counts, ends = _by_expert(whose, count)
    ends = (ends * block).clamp(0, rows.sizes[0]).to(DType.int32)
    return rows._grouped_mm(weight, ends), whose


def into_slots(made: Value, slot: Value, there: Value, count: int) -> Value:
    """Rows in the places that `slot` says, of `count`. Fillers, which are not `there`, go to a row behind the last."""
    more = made.new_zeros([count + 1, made.sizes[1]])
    more.index_put_([there.where(slot, slot.full_like(count))], made)
    found: Value = more.part(0, 0, count)
    return found


def expert_stage(place: int) -> Any:
    """One of AITER's two stages: tokens sorted by expert, block by block, and their grouped product. An entry has the
    token in its lower 24 bits, and above them which of its experts it is; a token that is not there fills up."""

    def rule(calls: RewrittenCalls, given: Given) -> None:
        activation = {0: "silu", 1: "gelu"}.get(given.get("activation", 0))
        if activation is None:
            raise CannotRewrite(f"experts with the activation {given.get('activation')}")
        data, weight, out, chosen = given["data"], given[f"w{place}"], given["out"], given["topk"]
        dtype, block, tokens = DType.bfloat16, given.get("block_m") or 32, data.sizes[0]
        weight = dequantized(weight, given.get(f"w{place}_scale"), dtype)
        data = dequantized(data, given.get(f"a{place}_scale"), dtype)
        ids = given["sorted_token_ids"].to(DType.int64)
        token = ids.bitwise_and((1 << 24) - 1)
        nth = ids // (1 << 24)
        there = token < tokens
        slot = token * chosen + nth
        row = (token if place == 1 else slot).clamp(0, tokens * chosen ** (place - 1) - 1)
        if place == 2:
            data = data.reshape([tokens * chosen, data.sizes[-1]])
        rows = data.index_select(0, row)
        valid = given["num_valid_ids"]
        made, _whose = block_products(rows, weight.transpose(1, 2), given["sorted_expert_ids"], block, valid)
        if place == 1:
            paired = made.sizes[-1] == 2 * out.sizes[-1]
            made = gated(made, activation) if paired else getattr(made, activation)()
        if given.get("sorted_weights") is not None:
            made = made * given["sorted_weights"].to(dtype).view([-1, 1])
        target = out.view([-1, out.sizes[-1]])
        made = there.unsqueeze(1).where(made, made.zeros_like()).to(out.dtype)
        if place == 1:
            target.copy_(into_slots(made, slot, there, target.sizes[0]))
        else:
            target.index_add_(0, token.clamp(0, tokens - 1), made)

    return rule


def moe_sum(_calls: RewrittenCalls, given: Given) -> None:
    plain("a sum", given, expert_map=(None,))
    total, factor = given["input"].sum([1]), given.get("routed_scaling_factor", 1)
    given["output"].copy_(total * factor if factor != 1 else total)


def shuffled_rows(_calls: RewrittenCalls, given: Given) -> None:
    given["output"].copy_(given["input"].index_select(0, given["map"]))


def permuted(calls: RewrittenCalls, given: Given) -> None:
    """Each token once for each of its experts, sorted by expert; where each comes from and goes to, and where each
    expert's begin."""
    plain("sorting", given, expert_map=(None,))
    if "align_block_size" in given:  # vLLM's older operator
        raise CannotRewrite("sorting with align_block_size, which counts the choices in another order")
    target, begins = given["permuted_input"], given["expert_first_token_offset"]
    if target.sizes[0] != math.prod(given["topk_ids"].sizes):
        raise CannotRewrite("sorting into more rows than there are choices")
    in_order = {"stable": True, "dim": 0, "descending": False}
    experts, order = given["topk_ids"].to(DType.int64).reshape([-1]).sort(**in_order)
    _sorted, place = order.sort(**in_order)
    target.copy_(given["input"].index_select(0, order // given["topk"]))
    begins.copy_(experts.searchsorted(calls.count(begins.sizes[0])))
    for name, rows in (("inv_permuted_idx", place), ("permuted_idx", order)):
        given[name].copy_(rows.like(given[name]))


def unpermuted(_calls: RewrittenCalls, given: Given) -> None:
    """The weighted sum of what each token's experts made, which stand sorted by expert. Rows behind those of the last
    expert are of experts elsewhere, and count nothing. vLLM's older operator names the places choice by choice."""
    weights, begins = given["topk_weights"], given.get("expert_first_token_offset")
    places = given.get("inv_permuted_idx")
    tokens, chosen = weights.sizes
    if places is None:
        places = given["src_row_id2dst_row_id_map"].reshape([chosen, tokens]).transpose(0, 1)
    places = places.reshape([-1])
    rows = given["permuted_hidden_states"].single().index_select(0, places)
    if begins is not None:
        end = begins.part(0, begins.sizes[0] - 1, begins.sizes[0])
        rows = (places < end).unsqueeze(1).where(rows, rows.zeros_like())
    rows = rows.reshape([tokens, chosen, -1])
    given["hidden_states"].copy_((rows * weights.single().unsqueeze(-1)).sum([1]))


def grouped_product(calls: RewrittenCalls, given: Given) -> None:
    """Rows that are sorted by expert times quantized weights [experts, width, columns]; `expert_offsets` has where each
    expert's rows begin."""
    weight, scales = given["b"], given["b_scales"]
    rows = dequantized(given["a"], given["a_scales"], DType.bfloat16)
    count, begins = weight.sizes[0], given["expert_offsets"].to(DType.int32)
    if math.prod(scales.sizes) > count:  # of each column
        scales = scales.reshape([count, 1, weight.sizes[2]])
    weight = dequantized(weight, scales, DType.bfloat16)
    last = calls.filled(1, rows.sizes[0]).to(DType.int32)
    given["out"].copy_(rows._grouped_mm(weight, calls.cat([begins.part(0, 1, count), last], 0)))


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
