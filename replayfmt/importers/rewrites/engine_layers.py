"""Norms, quantization, products, activations and rotary embeddings of engines: compositions for engines.py."""

from __future__ import annotations

import math
from typing import Any

from replayfmt.format.codes import DType

from .engine_experts import LARGEST, dequantized, gated, quantized
from .rewriting import CannotRewrite, Given, RewrittenCalls, Value, plain, renamed


def _normalized(data: Value, weight: Value | None, epsilon: float, plus: int = 0) -> Value:
    """RMS norm along the last dimension, in float32; Gemma adds one to the weight, if there is one."""
    single = data.single()
    normal = single * ((single * single).mean([-1], True) + epsilon).rsqrt()
    if weight is None:
        found: Value = normal.to(data.dtype)
    elif plus:
        found = (normal * (weight.single() + plus)).to(data.dtype)
    else:
        found = normal.to(data.dtype) * weight
    return found


def rms_norm(out: str = "result", epsilon: str = "epsilon", plus: int = 0) -> Any:
    def rule(calls: RewrittenCalls, given: Given) -> None:
        content = _normalized(given["input"], given.get("weight"), given[epsilon], plus)
        if out:
            given[out].copy_(content)
        else:
            calls.deliver(content)

    return rule


def fused_add_norm(epsilon: str = "epsilon", plus: int = 0) -> Any:
    """The sum goes to the residual, its norm to the input."""

    def rule(_calls: RewrittenCalls, given: Given) -> None:
        given["residual"].add_(given["input"])
        given["input"].copy_(_normalized(given["residual"], given.get("weight"), given[epsilon], plus))

    return rule


def norm_with_add(_calls: RewrittenCalls, given: Given) -> None:
    given["residual_out"].copy_(given["input"] + given["residual_in"])
    plus = int(given.get("gemma_norm") or 0)
    given["out"].copy_(_normalized(given["residual_out"], given["weight"], given["epsilon"], plus))


def norm_of_sum(calls: RewrittenCalls, given: Given) -> None:
    """The norm of a sum, and the sum."""
    total = given["x"] + given["residual"]
    calls.deliver(_normalized(total, given["weight"], given["variance_epsilon"]), total)


def norm_dynamic_quant(out: str = "result", scale: str = "scale") -> Any:
    """The norm of a sum, if there is a residual, quantized with a scale for each token."""
    quantize = dynamic_quant(out, scale, by_token=True)

    def rule(calls: RewrittenCalls, given: Given) -> None:
        plain("a norm", given, group_size=(None, 0), shuffle_scale=(None, False), gemma_norm=(None, False))
        data, before, after = given["input"], given.get("residual_in"), given.get("residual_out")
        if given.get("residual") is not None:
            before = after = given["residual"]
        if before is not None:
            assert after is not None
            after.copy_(data + before)
            data = after
        quantize(calls, given | {"input": _normalized(data, given["weight"], given["epsilon"])})

    return rule


def norm_block_quant(calls: RewrittenCalls, given: Given) -> None:
    """The norm of a sum, if there is a residual, quantized with a scale for each group of a token's elements."""
    data, residual = given["input"], given.get("residual")
    if residual is not None:
        residual.add_(data)
        data = residual
    normal = _normalized(data, given["weight"], given["epsilon"])
    group_quant(calls, given | {"input": normal, "output_q": given["result"], "output_s": given["scale"]})


def norm_static_quant(_calls: RewrittenCalls, given: Given) -> None:
    normal = _normalized(given["input"], given["weight"], given["epsilon"])
    given["result"].copy_(quantized(normal, given["scale"], given["result"].dtype))


def fused_add_norm_static_quant(calls: RewrittenCalls, given: Given) -> None:
    given["residual"].add_(given["input"])
    norm_static_quant(calls, given | {"input": given["residual"]})


def static_quant(out: str = "result", scale: str = "scale") -> Any:
    def rule(_calls: RewrittenCalls, given: Given) -> None:
        plain("quantization", given, azp=(None,))
        if given.get("group_shape") is not None and math.prod(given[scale].sizes) != 1:
            raise CannotRewrite("quantization with scales of groups")
        given[out].copy_(quantized(given["input"], given[scale], given[out].dtype))

    return rule


def dynamic_quant(out: str = "result", scale: str = "scale", *, by_token: bool) -> Any:
    """The scale is the largest magnitude, of everything or of each token, over the dtype's largest number."""

    def rule(_calls: RewrittenCalls, given: Given) -> None:
        plain("quantization", given, scale_ub=(None,), azp=(None,), num_rows=(None,), shuffle_scale=(None, False))
        target, dtype = given[scale], given[out].dtype
        if dtype not in LARGEST:
            raise CannotRewrite(f"quantization to {dtype.name}")
        size = given["input"].single().abs()
        most = size.amax([-1], keepdim=True) if by_token else size.amax(list(range(len(size.sizes))))
        found = most / LARGEST[dtype]
        target.copy_(found.like(target))
        given[out].copy_(quantized(given["input"], found, dtype))

    return rule


def group_quant(_calls: RewrittenCalls, given: Given) -> None:
    """A scale for each group of elements of a token: the group's largest magnitude over the dtype's largest number."""
    plain("quantization", given, scale_ue8m0=(None, False), masked_m=(None,), scale_ub=(None,))
    plain("quantization", given, is_scale_transposed=(None, False))
    data, width = given["input"].single(), given["group_size"]
    if given.get("fuse_silu_and_mul"):
        data = gated(data, "silu")
    target, scales, sizes = given["output_q"], given["output_s"], list(data.sizes)
    if target.dtype not in LARGEST or sizes[-1] % width:
        raise CannotRewrite(f"quantization to {target.dtype.name} by groups of {width}")
    groups = data.reshape([*sizes[:-1], sizes[-1] // width, width])
    most = groups.abs().amax([-1], keepdim=True).clamp(given.get("eps", 1e-10))
    found = most / LARGEST[target.dtype]
    scales.copy_(found.like(scales))
    target.copy_(quantized(groups, found, target.dtype).like(target))


def tensor_quant(calls: RewrittenCalls, given: Given) -> None:
    names = ("output_q", "output_s")
    (static_quant(*names) if given["is_static"] else dynamic_quant(*names, by_token=False))(calls, given)


def product(a: str, b: str, scale_a: str = "", scale_b: str = "", out: str = "", *, by_rows: bool = False) -> Any:
    """A matrix product, of quantized factors with scales if those are named. By rows: of the second one transposed."""

    def rule(calls: RewrittenCalls, given: Given) -> None:
        plain("a product", given, scale_c=(None,))
        bias = given.get("bias")
        dtype = given[out].dtype if out else given.get("out_dtype") or given.get("dtype") or given[a].dtype
        dtype = DType.bfloat16 if dtype in LARGEST else dtype
        one, other = (
            dequantized(given[name], given.get(scale) if scale else None, dtype)
            for name, scale in ((a, scale_a), (b, scale_b))
        )
        if by_rows:
            name, arguments = "aten::linear", {"input": one, "weight": other, "bias": bias}
        elif bias is None:
            name, arguments = "aten::matmul", {"self": one, "other": other}
        else:
            name, arguments = "aten::addmm", {"self": bias.to(dtype), "mat1": one, "mat2": other}
        if out:
            given[out].copy_(calls.call(name, arguments)[0])
        else:
            calls.call(name, arguments, calls.results)

    return rule


def activation(out: str, function: str, *, last: bool = False, **options: Any) -> Any:
    def rule(_calls: RewrittenCalls, given: Given) -> None:
        plain("an activation", given, limit=(None, 0.0))
        given[out].copy_(gated(given["input"], function, last=last, **options))

    return rule


def gelu(_calls: RewrittenCalls, given: Given) -> None:
    given["out"].copy_(given["input"].gelu(approximate="tanh"))


def quick_gelu(_calls: RewrittenCalls, given: Given) -> None:
    data = given["input"]
    curve = (data * 1.702).sigmoid()
    given["out"].copy_(data * curve)


def swiglu(*, pairs: bool = False) -> Any:
    """A gate and a factor, both limited: halves, or neighbours, of which the factor is one more."""

    def rule(_calls: RewrittenCalls, given: Given) -> None:
        data, limit, width = given["input"], given["limit"], given["input"].sizes[-1]
        parts = [(0, width, 2), (1, width, 2)] if pairs else [(0, width // 2, 1), (width // 2, width, 1)]
        gate, factor = (data.part(-1, *part) for part in parts)
        gate, factor = gate.clamp(None, limit), factor.clamp(-limit, limit)
        curve = (gate * given["alpha"]).sigmoid()
        given["out"].copy_((factor + given.get("beta", 1)) * (gate * curve))

    return rule


def relu_gated(_calls: RewrittenCalls, given: Given) -> None:
    """What is above a threshold, of the first half, times the second."""
    data, width = given["input"], given["input"].sizes[-1] // 2
    first, second = (data.part(-1, place * width, (place + 1) * width) for place in range(2))
    given["out"].copy_(first.threshold(given["threshold"], 0) * second)


def relu_squared(_calls: RewrittenCalls, given: Given) -> None:
    positive = given["input"].relu()
    given["out"].copy_(positive * positive)


def silu_quant(_calls: RewrittenCalls, given: Given) -> None:
    content = gated(given["input"].single(), "silu")
    given["result"].copy_(quantized(content, given["scale"], given["result"].dtype))


def _turn(source: Value, target: Value, table: Value, width: int, neox: bool, last: bool = False) -> None:
    """Turn the first elements of each head, or the last ones, by the angles of its token: pairs are halves, or
    neighbours."""
    tokens, turned = table.sizes
    half = turned // 2
    cosine, sine = (table.part(1, place * half, (place + 1) * half).unsqueeze(1) for place in range(2))
    shape = [tokens, math.prod(source.sizes) // max(tokens * width, 1), width]
    source, target = source.view(shape), target.view(shape)
    begin = width - turned if last else 0
    end = begin + turned
    parts = [(begin, begin + half, 1), (begin + half, end, 1)] if neox else [(begin, end, 2), (begin + 1, end, 2)]
    first, second = (source.part(2, *part) for part in parts)
    one = first * cosine - second * sine
    other = second * cosine + first * sine
    for part, content in zip(parts, (one, other), strict=True):
        target.part(2, *part).copy_(content)
    if turned < width and target.tensor.storage is not source.tensor.storage:
        rest = (0, begin) if last else (turned, width)
        target.part(2, *rest).copy_(source.part(2, *rest))


def _of_positions(table: Value, positions: Value) -> Value:
    found: Value = table.index_select(0, positions.reshape([-1]))
    return found


def rotary(calls: RewrittenCalls, given: Given) -> None:
    plain("a rotary embedding", given, rope_dim_offset=(None, 0), inverse=(None, False))
    if "cos_cache" in given:
        table = _table(given["cos_cache"], given["sin_cache"], given["positions"])
    else:
        table = _of_positions(given["cos_sin_cache"], given["positions"])
    last = bool(given.get("is_nope_first"))
    for name in ("query", "key"):
        if given.get(name) is not None:
            _turn(given[name], given[name], table, given["head_size"], bool(given["is_neox"]), last)


def _table(cosine: Value, sine: Value, positions: Value | None) -> Value:
    """Cosines and sines of each position side by side: [tokens, angles]."""
    parts = [each.reshape([each.sizes[0], -1]) for each in (cosine, sine)]
    if positions is not None:
        flat = positions.reshape([-1])
        parts = [each.index_select(0, flat) for each in parts]
    return cosine.calls.cat(parts, -1)


def rope(_calls: RewrittenCalls, given: Given) -> None:
    """AITER's: [positions, batch, heads, width], of one or two tensors, by angles or by their cosines and sines."""
    neox, pairs = given["rotate_style"] == 0, [("output", "input"), ("output_x", "input_x"), ("output_y", "input_y")]
    cosine, sine = given.get("cos"), given.get("sin")
    if cosine is None or sine is None:
        cosine, sine = given["freqs"].single().cos(), given["freqs"].single().sin()
    if not given["reuse_freqs_front_part"]:  # each angle stands twice, once for each of its pair
        turned = cosine.sizes[-1]
        part = (0, turned // 2, 1) if neox else (0, turned, 2)
        cosine, sine = (each.part(-1, *part) for each in (cosine, sine))
    table = _table(cosine, sine, given.get("positions"))
    for target, source in pairs:
        if source not in given:
            continue
        sizes, own = given[source].sizes, table
        if given.get("positions") is None:
            own = table.repeat_interleave(sizes[1], 0)
        _turn(given[source], given[target], own, sizes[-1], neox, bool(given["nope_first"]))


def rope_by_positions(_calls: RewrittenCalls, given: Given) -> None:
    """FlashInfer's: queries and keys of [tokens, heads, width], with results of their own."""
    plain("a rotary embedding", given, k_buffer=(None,), v_buffer=(None,))
    table = _of_positions(given["cos_sin_cache"], given["pos_ids"])
    for name in ("q", "k"):
        source = given[name]
        _turn(source, given[f"{name}_rope"], table, source.sizes[-1], not given["interleave"])


def norm_and_rotary(_calls: RewrittenCalls, given: Given) -> None:
    """The heads of queries and of keys, which lie one after the other, normalized one by one and turned."""
    qkv, width = given["qkv"], given["head_dim"]
    table = _of_positions(given["cos_sin_cache"], given["position_ids"])
    begin = 0
    for name, count in (("q", given["num_heads_q"]), ("k", given["num_heads_k"])):
        part = qkv.part(-1, begin, begin + count * width)
        begin += count * width
        heads = part.reshape([qkv.sizes[0], count, width])
        normal = _normalized(heads, given[f"{name}_weight"], given["eps"])
        _turn(normal, normal, table, width, bool(given["is_neox"]))
        part.copy_(normal.like(part))


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
    (gelu, "_C::gelu_new _C::gelu_fast"),
    (quick_gelu, "_C::gelu_quick sgl_kernel::gelu_quick"),
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
