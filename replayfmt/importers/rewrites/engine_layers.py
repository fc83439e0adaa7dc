"""Norms, quantization, products, activations and rotary embeddings of engines: compositions for engines.py."""

from __future__ import annotations

import math
from typing import Any

from replayfmt.format.codes import DType

from ..common.synthesis import Tensor
from .engine_experts import LARGEST, dequantized, gated, quantized
from .rewriting import CannotRewrite, Given, Recorded, RewrittenCalls, plain, renamed

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


# --------------------------------------------------------------------------------------------------------------- table

_ROPES = ("", "2c_", "cached_", "cached_2c_", "cached_positions_", "cached_positions_2c_")
RULES: tuple[tuple[Any, str], ...] = (
    (rms_norm(), "_C::rms_norm _C::rms_norm_weightless"),
    (rms_norm("output", "eps"), "sgl_kernel::rmsnorm"),
    (rms_norm("output", "eps", 1), "sgl_kernel::gemma_rmsnorm"),
    (rms_norm("out", "eps"), "flashinfer::rmsnorm"),
    (rms_norm("", "epsilon"), "aiter::rms_norm aiter::rmsnorm2d_fwd"),
    (renamed(rms_norm("", "variance_epsilon"), {"x": "input"}), "vllm::rocm_aiter_rms_norm"),
    (fused_add_norm(), "_C::fused_add_rms_norm _C::fused_add_rms_norm_weightless"),
    (fused_add_norm("eps"), "sgl_kernel::fused_add_rmsnorm flashinfer::fused_add_rmsnorm"),
    (fused_add_norm("eps", 1), "sgl_kernel::gemma_fused_add_rmsnorm"),
    (norm_with_add, "aiter::rmsnorm2d_fwd_with_add"),
    (norm_of_sum, "vllm::rocm_aiter_rmsnorm2d_fwd_with_add"),
    (norm_block_quant, "_C::rms_norm_per_block_quant"),
    (norm_static_quant, "_C::rms_norm_static_fp8_quant"),
    (fused_add_norm_static_quant, "_C::fused_add_rms_norm_static_fp8_quant"),
    (norm_dynamic_quant(), "_C::rms_norm_dynamic_per_token_quant"),
    (
        norm_dynamic_quant("out", "yscale"),
        "aiter::rmsnorm2d_fwd_with_dynamicquant aiter::rmsnorm2d_fwd_with_add_dynamicquant",
    ),
    (norm_dynamic_quant("out", "scale"), "aiter::add_rmsnorm_quant"),
    (static_quant(), "_C::static_scaled_fp8_quant _C::static_scaled_int8_quant"),
    (static_quant("out"), "aiter::static_per_tensor_quant"),
    (dynamic_quant(by_token=False), "_C::dynamic_scaled_fp8_quant"),
    (dynamic_quant(by_token=True), "_C::dynamic_per_token_scaled_fp8_quant _C::dynamic_scaled_int8_quant"),
    (dynamic_quant("out", by_token=False), "aiter::dynamic_per_tensor_quant"),
    (dynamic_quant("out", "scales", by_token=True), "aiter::dynamic_per_token_scaled_quant"),
    (dynamic_quant("output_q", "output_s", by_token=True), "sgl_kernel::sgl_per_token_quant_fp8"),
    (tensor_quant, "sgl_kernel::sgl_per_tensor_quant_fp8"),
    (
        group_quant,
        "_C::per_token_group_fp8_quant _C::per_token_group_quant_int8 sgl_kernel::sgl_per_token_group_quant_fp8 "
        "sgl_kernel::sgl_per_token_group_quant_int8 sgl_kernel::sgl_per_token_group_quant_8bit "
        "sgl_kernel::sgl_per_token_group_quant_8bit_v2",
    ),
    (
        renamed(group_quant, {"out": "output_q", "scales": "output_s"}, fuse_silu_and_mul=True),
        "_C::silu_and_mul_per_block_quant",
    ),
    (product("a", "b", "a_scales", "b_scales", "out"), "_C::cutlass_scaled_mm"),
    (
        product("mat_a", "mat_b", "scales_a", "scales_b"),
        "sgl_kernel::fp8_scaled_mm sgl_kernel::int8_scaled_mm sgl_kernel::fp8_blockwise_scaled_mm",
    ),
    (product("mat_a", "mat_b", out="output", by_rows=True), "sgl_kernel::dsv3_router_gemm"),
    (product("mat_a", "mat_b", out="output"), "sgl_kernel::dsv3_fused_a_gemm"),
    (product("x", "weight", by_rows=True), "vllm::rocm_unquantized_gemm"),
    (product("in_b", "in_a", by_rows=True), "_rocm_C::LLMM1"),
    (renamed(product("in_b", "in_a", by_rows=True), {"in_bias": "bias"}), "_rocm_C::wvSplitK _rocm_C::wvSplitKrc"),
    (
        renamed(product("in_b", "in_a", "scale_b", "scale_a", "out_c", by_rows=True), {"in_bias": "bias"}),
        "_rocm_C::wvSplitKQ",
    ),
    (renamed(product("A", "B", "scale_a", "scale_b", by_rows=True), {"otype": "dtype"}), "aiter::gemm_a16w16"),
    (product("XQ", "WQ", "x_scale", "w_scale", by_rows=True), "aiter::gemm_a8w8_CK aiter::gemm_a8w8_blockscale"),
    (
        renamed(product("A", "B", "As", "Bs", by_rows=True), {"output_dtype": "dtype"}),
        "vllm::rocm_aiter_w8a8_gemm vllm::rocm_aiter_gemm_w8a8 vllm::rocm_aiter_gemm_a8w8 "
        "vllm::rocm_aiter_gemm_w8a8_blockscale vllm::rocm_aiter_gemm_a8w8_blockscale "
        "vllm::rocm_aiter_triton_gemm_a8w8_blockscale",
    ),
    (activation("result", "silu"), "_C::silu_and_mul"),
    (activation("result", "gelu"), "_C::gelu_and_mul"),
    (activation("result", "gelu", approximate="tanh"), "_C::gelu_tanh_and_mul"),
    (activation("out", "silu"), "sgl_kernel::silu_and_mul flashinfer::silu_and_mul aiter::silu_and_mul"),
    (activation("out", "gelu"), "sgl_kernel::gelu_and_mul flashinfer::gelu_and_mul aiter::gelu_and_mul"),
    (
        activation("out", "gelu", approximate="tanh"),
        "sgl_kernel::gelu_tanh_and_mul flashinfer::gelu_tanh_and_mul aiter::gelu_tanh_and_mul",
    ),
    (activation("out", "silu", last=True), "_C::mul_and_silu"),
    (alone(approximate="tanh"), "_C::gelu_new _C::gelu_fast"),
    (alone(), "_C::gelu_quick sgl_kernel::gelu_quick"),
    (swiglu(), "_C::silu_and_mul_with_clamp"),
    (swiglu(pairs=True), "_C::swigluoai_and_mul"),
    (relu_gated, "_C::fatrelu_and_mul"),
    (relu_squared, "_C::relu_squared"),
    (silu_quant, "_C::silu_and_mul_quant"),
    (rotary, "_C::rotary_embedding sgl_kernel::rotary_embedding aiter::rotary_embedding_fwd"),
    (rope, " ".join(f"aiter::rope_{kind}fwd_impl" for kind in _ROPES)),
    (rope_by_positions, "sgl_kernel::apply_rope_pos_ids_cos_sin_cache"),
    (norm_and_rotary, "_C::fused_qk_norm_rope"),
)
