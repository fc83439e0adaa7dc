"""Norms, quantization, products, activations and rotary embeddings of engines: compositions for engines.py."""

from __future__ import annotations

import math
from typing import Any

from replayfmt.format.codes import DType

from ..common.synthesis import Tensor
from .engine_experts import LARGEST, dequantized, gated, quantized
from .rewriting import CannotRewrite, Given, Recorded, RewrittenCalls, plain

# -------------------------------------------------------------------------------------------------------- normalization


def _normalized(calls: RewrittenCalls, data: Tensor, weight: Tensor | None, epsilon: float, plus: int = 0) -> Tensor:
    """RMS norm along the last dimension, in float32; Gemma adds one to the weight, if there is one."""
    dtype, data = data.meta.dtype, calls.single(data)
    square = calls.one("aten::mean.dim", self=calls.times(data, data), dim=[-1], keepdim=True)
    scale = calls.one("aten::rsqrt", self=calls.one("aten::add.Scalar", self=square, other=epsilon))
    normal = calls.times(data, scale)
    if weight is None:
        return calls.cast(normal, dtype)
    if plus:
        weight = calls.one("aten::add.Scalar", self=calls.single(weight), other=plus)
        return calls.cast(calls.times(normal, weight), dtype)
    return calls.times(calls.cast(normal, dtype), weight)


def rms_norm(out: str = "result", epsilon: str = "epsilon", plus: int = 0) -> Any:
    def rule(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
        content = _normalized(calls, given["input"], given.get("weight"), given[epsilon], plus)
        if out:
            calls.write(given[out], content)
        else:
            calls.fill((results or [None])[0], content)

    return rule


def fused_add_norm(epsilon: str = "epsilon", plus: int = 0) -> Any:
    """The sum goes to the residual, its norm to the input."""

    def rule(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
        data, residual = given["input"], given["residual"]
        calls.call("aten::add_.Tensor", {"self": residual, "other": data}, [residual])
        calls.write(data, _normalized(calls, residual, given.get("weight"), given[epsilon], plus))

    return rule


def norm_with_add(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    plus = int(given.get("gemma_norm") or 0)
    total = calls.one("aten::add.Tensor", self=given["input"], other=given["residual_in"])
    calls.write(given["residual_out"], total)
    calls.write(given["out"], _normalized(calls, given["residual_out"], given["weight"], given["epsilon"], plus))


def norm_of_sum(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """The norm of a sum, and the sum."""
    total = calls.one("aten::add.Tensor", self=given["x"], other=given["residual"])
    normal = _normalized(calls, total, given["weight"], given["variance_epsilon"])
    for recorded, content in zip(results or (), (normal, total), strict=False):
        calls.fill(recorded, content)


def norm_dynamic_quant(out: str = "result", scale: str = "scale") -> Any:
    """The norm of a sum, if there is a residual, quantized with a scale for each token."""
    quantize = dynamic_quant(out, scale, by_token=True)

    def rule(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
        plain("a norm", given, group_size=(None, 0), shuffle_scale=(None, False), gemma_norm=(None, False))
        data, before, after = given["input"], given.get("residual_in"), given.get("residual_out")
        if given.get("residual") is not None:
            before = after = given["residual"]
        if before is not None:
            assert after is not None
            calls.write(after, calls.one("aten::add.Tensor", self=data, other=before))
            data = after
        quantize(calls, given | {"input": _normalized(calls, data, given["weight"], given["epsilon"])}, None)

    return rule


def norm_block_quant(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    """The norm of a sum, if there is a residual, quantized with a scale for each group of a token's elements."""
    data, residual = given["input"], given.get("residual")
    if residual is not None:
        calls.call("aten::add_.Tensor", {"self": residual, "other": data}, [residual])
        data = residual
    normal = _normalized(calls, data, given["weight"], given["epsilon"])
    group_quant(calls, given | {"input": normal, "output_q": given["result"], "output_s": given["scale"]}, None)


def norm_static_quant(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    normal = _normalized(calls, given["input"], given["weight"], given["epsilon"])
    calls.write(given["result"], quantized(calls, normal, given["scale"], given["result"].meta.dtype))


def fused_add_norm_static_quant(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    residual = given["residual"]
    calls.call("aten::add_.Tensor", {"self": residual, "other": given["input"]}, [residual])
    norm_static_quant(calls, given | {"input": residual}, None)


# --------------------------------------------------------------------------------------------------------- quantization


def static_quant(out: str = "result", scale: str = "scale") -> Any:
    def rule(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
        plain("quantization", given, azp=(None,))
        if given.get("group_shape") is not None and math.prod(given[scale].meta.sizes) != 1:
            raise CannotRewrite("quantization with scales of groups")
        calls.write(given[out], quantized(calls, given["input"], given[scale], given[out].meta.dtype))

    return rule


def dynamic_quant(out: str = "result", scale: str = "scale", *, by_token: bool) -> Any:
    """The scale is the largest magnitude, of everything or of each token, over the dtype's largest number."""

    def rule(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
        plain("quantization", given, scale_ub=(None,), azp=(None,), num_rows=(None,), shuffle_scale=(None, False))
        target, dtype = given[scale], given[out].meta.dtype
        if dtype not in LARGEST:
            raise CannotRewrite(f"quantization to {dtype.name}")
        size = calls.one("aten::abs", self=calls.single(given["input"]))
        if by_token:
            most = calls.one("aten::amax", self=size, dim=[-1], keepdim=True)
        else:
            most = calls.one("aten::amax", self=size, dim=list(range(len(size.meta.sizes))))
        found = calls.one("aten::div.Scalar", self=most, other=LARGEST[dtype])
        calls.write(target, calls.one("aten::reshape", self=found, shape=list(target.meta.sizes)))
        calls.write(given[out], quantized(calls, given["input"], found, dtype))

    return rule


def group_quant(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    """A scale for each group of elements of a token: the group's largest magnitude over the dtype's largest number."""
    plain("quantization", given, scale_ue8m0=(None, False), masked_m=(None,), scale_ub=(None,))
    plain("quantization", given, is_scale_transposed=(None, False))
    data, width = calls.single(given["input"]), given["group_size"]
    if given.get("fuse_silu_and_mul"):
        data = gated(calls, data, "silu")
    target, scales, sizes = given["output_q"], given["output_s"], list(data.meta.sizes)
    if target.meta.dtype not in LARGEST or sizes[-1] % width:
        raise CannotRewrite(f"quantization to {target.meta.dtype.name} by groups of {width}")
    groups = calls.one("aten::reshape", self=data, shape=[*sizes[:-1], sizes[-1] // width, width])
    most = calls.one("aten::amax", self=calls.one("aten::abs", self=groups), dim=[-1], keepdim=True)
    most = calls.one("aten::clamp", self=most, min=given.get("eps", 1e-10))
    found = calls.one("aten::div.Scalar", self=most, other=LARGEST[target.meta.dtype])
    calls.write(scales, calls.one("aten::reshape", self=found, shape=list(scales.meta.sizes)))
    content = quantized(calls, groups, found, target.meta.dtype)
    calls.write(target, calls.one("aten::reshape", self=content, shape=list(target.meta.sizes)))


def tensor_quant(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    names = ("output_q", "output_s")
    rule = static_quant(*names) if given["is_static"] else dynamic_quant(*names, by_token=False)
    rule(calls, given, None)


def product(a: str, b: str, scale_a: str = "", scale_b: str = "", out: str = "", *, by_rows: bool = False) -> Any:
    """A matrix product, of quantized factors with scales if those are named. By rows: of the second one transposed."""

    def rule(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
        plain("a product", given, scale_c=(None,))
        one, other, bias = given[a], given[b], given.get("bias")
        dtype = given[out].meta.dtype if out else given.get("out_dtype") or given.get("dtype") or one.meta.dtype
        dtype = DType.bfloat16 if dtype in LARGEST else dtype
        one, other = (
            dequantized(calls, each, given.get(scale) if scale else None, dtype)
            for each, scale in ((one, scale_a), (other, scale_b))
        )
        arguments = {"input": one, "weight": other, "bias": bias}
        name = "aten::linear"
        if not by_rows:
            name = "aten::matmul" if bias is None else "aten::addmm"
            arguments = {"self": one, "other": other}
            if bias is not None:
                arguments = {"self": calls.cast(bias, dtype), "mat1": one, "mat2": other}
        if out:
            calls.write(given[out], calls.call(name, arguments)[0])
        else:
            calls.call(name, arguments, results)

    return rule


# ----------------------------------------------------------------------------------------------------------- activation


def activation(out: str, function: str, *, last: bool = False, **options: Any) -> Any:
    def rule(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
        plain("an activation", given, limit=(None, 0.0))
        calls.write(given[out], gated(calls, given["input"], function, last=last, **options))

    return rule


def alone(**options: Any) -> Any:
    """GELU of everything, or its quick form."""

    def rule(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
        data = given["input"]
        if options:
            calls.write(given["out"], calls.one("aten::gelu", self=data, **options))
        else:
            curve = calls.one("aten::sigmoid", self=calls.one("aten::mul.Scalar", self=data, other=1.702))
            calls.write(given["out"], calls.times(data, curve))

    return rule


def swiglu(*, pairs: bool = False) -> Any:
    """A gate and a factor, both limited: halves, or neighbours, of which the factor is one more."""

    def rule(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
        data, limit, width = given["input"], given["limit"], given["input"].meta.sizes[-1]
        parts = [(0, width, 2), (1, width, 2)] if pairs else [(0, width // 2, 1), (width // 2, width, 1)]
        gate, factor = (calls.slice(data, -1, *part) for part in parts)
        gate = calls.one("aten::clamp", self=gate, min=None, max=limit)
        factor = calls.one("aten::clamp", self=factor, min=-limit, max=limit)
        curve = calls.one("aten::sigmoid", self=calls.one("aten::mul.Scalar", self=gate, other=given["alpha"]))
        factor = calls.one("aten::add.Scalar", self=factor, other=given.get("beta", 1))
        calls.write(given["out"], calls.times(factor, calls.times(gate, curve)))

    return rule


def relu_gated(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    """What is above a threshold, of the first half, times the second."""
    data, width = given["input"], given["input"].meta.sizes[-1] // 2
    first, second = (calls.slice(data, -1, place * width, (place + 1) * width) for place in range(2))
    first = calls.one("aten::threshold", self=first, threshold=given["threshold"], value=0)
    calls.write(given["out"], calls.times(first, second))


def relu_squared(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    positive = calls.one("aten::relu", self=given["input"])
    calls.write(given["out"], calls.times(positive, positive))


def silu_quant(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    content = gated(calls, calls.single(given["input"]), "silu")
    calls.write(given["result"], quantized(calls, content, given["scale"], given["result"].meta.dtype))


# --------------------------------------------------------------------------------------------------------------- rotary


def _turn(
    calls: RewrittenCalls, source: Tensor, target: Tensor, table: Tensor, width: int, neox: bool, last: bool = False
) -> None:
    """Turn the first elements of each head, or the last ones, by the angles of its token: pairs are halves, or
    neighbours."""
    tokens, turned = table.meta.sizes[0], table.meta.sizes[1]
    half = turned // 2
    cosine, sine = (
        calls.one("aten::unsqueeze", self=calls.slice(table, 1, place * half, (place + 1) * half), dim=1)
        for place in range(2)
    )
    shape = [tokens, math.prod(source.meta.sizes) // max(tokens * width, 1), width]
    source, target = (calls.one("aten::view", self=each, size=shape) for each in (source, target))
    begin = width - turned if last else 0
    end = begin + turned
    parts = [(begin, begin + half, 1), (begin + half, end, 1)] if neox else [(begin, end, 2), (begin + 1, end, 2)]
    first, second = (calls.slice(source, 2, *part) for part in parts)
    one = calls.one("aten::sub.Tensor", self=calls.times(first, cosine), other=calls.times(second, sine))
    other = calls.one("aten::add.Tensor", self=calls.times(second, cosine), other=calls.times(first, sine))
    for part, content in zip(parts, (one, other), strict=True):
        calls.write(calls.slice(target, 2, *part), content)
    if target is not source and turned < width and target.storage is not source.storage:
        rest = (0, begin) if last else (turned, width)
        calls.write(calls.slice(target, 2, *rest), calls.slice(source, 2, *rest))


def rotary(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    plain("a rotary embedding", given, rope_dim_offset=(None, 0), inverse=(None, False))
    if "cos_cache" in given:
        table = _table(calls, given["cos_cache"], given["sin_cache"], given["positions"])
    else:
        positions = calls.one("aten::reshape", self=given["positions"], shape=[-1])
        table = calls.one("aten::index_select", self=given["cos_sin_cache"], dim=0, index=positions)
    last = bool(given.get("is_nope_first"))
    for name in ("query", "key"):
        if given.get(name) is not None:
            _turn(calls, given[name], given[name], table, given["head_size"], bool(given["is_neox"]), last)


def _table(calls: RewrittenCalls, cosine: Tensor, sine: Tensor, positions: Tensor | None) -> Tensor:
    """Cosines and sines of each position side by side: [tokens, angles]."""
    parts = [calls.one("aten::reshape", self=each, shape=[each.meta.sizes[0], -1]) for each in (cosine, sine)]
    if positions is not None:
        flat = calls.one("aten::reshape", self=positions, shape=[-1])
        parts = [calls.one("aten::index_select", self=each, dim=0, index=flat) for each in parts]
    return calls.one("aten::cat", tensors=parts, dim=-1)


def rope(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    """AITER's: [positions, batch, heads, width], of one or two tensors, by angles or by their cosines and sines."""
    neox, pairs = given["rotate_style"] == 0, [("output", "input"), ("output_x", "input_x"), ("output_y", "input_y")]
    cosine, sine = given.get("cos"), given.get("sin")
    if cosine is None or sine is None:
        cosine, sine = (calls.one(f"aten::{name}", self=calls.single(given["freqs"])) for name in ("cos", "sin"))
    if not given["reuse_freqs_front_part"]:  # each angle stands twice, once for each of its pair
        turned = cosine.meta.sizes[-1]
        part = (0, turned // 2, 1) if neox else (0, turned, 2)
        cosine, sine = (calls.slice(each, -1, *part) for each in (cosine, sine))
    table = _table(calls, cosine, sine, given.get("positions"))
    for target, source in pairs:
        if source not in given:
            continue
        sizes, own = given[source].meta.sizes, table
        if given.get("positions") is None:
            own = calls.one("aten::repeat_interleave.self_int", self=table, repeats=sizes[1], dim=0)
        _turn(calls, given[source], given[target], own, sizes[-1], neox, bool(given["nope_first"]))


def rope_by_positions(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    """FlashInfer's: queries and keys of [tokens, heads, width], with results of their own."""
    plain("a rotary embedding", given, k_buffer=(None,), v_buffer=(None,))
    positions = calls.one("aten::reshape", self=given["pos_ids"], shape=[-1])
    table = calls.one("aten::index_select", self=given["cos_sin_cache"], dim=0, index=positions)
    for name in ("q", "k"):
        source = given[name]
        _turn(calls, source, given[f"{name}_rope"], table, source.meta.sizes[-1], not given["interleave"])


def norm_and_rotary(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    """The heads of queries and of keys, which lie one after the other, normalized one by one and turned."""
    qkv, width = given["qkv"], given["head_dim"]
    positions = calls.one("aten::reshape", self=given["position_ids"], shape=[-1])
    table = calls.one("aten::index_select", self=given["cos_sin_cache"], dim=0, index=positions)
    begin = 0
    for name, count in (("q", given["num_heads_q"]), ("k", given["num_heads_k"])):
        part = calls.slice(qkv, -1, begin, begin + count * width)
        begin += count * width
        heads = calls.one("aten::reshape", self=part, shape=[qkv.meta.sizes[0], count, width])
        normal = _normalized(calls, heads, given[f"{name}_weight"], given["eps"])
        _turn(calls, normal, normal, table, width, bool(given["is_neox"]))
        calls.write(part, calls.one("aten::reshape", self=normal, shape=list(part.meta.sizes)))
