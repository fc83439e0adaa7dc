"""Weights of 4 and 8 bits packed into words, as AWQ, GPTQ, Marlin and Machete keep them, and numbers of NVFP4.
Compositions for engines.py.

A weight is (q - z) * s, with a zero point z and a scale s for each column and group of rows. In shuffled words the
elements with even places come first, so that kernels unpack two at a time. Marlin's words hold tiles in the order in
which threads multiply them (`get_weight_perm` and `get_scale_perms` of vLLM's marlin_utils).

NVFP4 are numbers of four bits, two in a byte, of which each 16 along a row share a scale as float8. Scales are in the
order in which products read them: tiles of 128 rows and 4 groups, and in a tile the rows 0, 32, 64, 96, 1, 33 and so
on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from replayfmt.format.codes import DType

from ..common.synthesis import Tensor
from .engine_experts import block_products, into_slots
from .rewriting import CannotRewrite, Given, Recorded, RewrittenCalls, plain, renamed

_WORD_BITS = {DType.int32: 32, DType.uint8: 8}
_TILE_ROWS, _TILE_COLUMNS = 16, 64


def unpacked(calls: RewrittenCalls, words: Tensor, dim: int, bits: int, *, shuffled: bool = False) -> Tensor:
    """The elements of a matrix of words, each of which holds some that follow each other along `dim`."""
    if words.meta.dtype not in _WORD_BITS or len(words.meta.sizes) != 2:
        raise CannotRewrite(f"packed weights of {words.meta.dtype.name} with {len(words.meta.sizes)} dimensions")
    rows, columns = words.meta.sizes
    count = _WORD_BITS[words.meta.dtype] // bits
    words = calls.cast(words, DType.int32)
    places = calls.one("aten::mul.Scalar", self=calls.count(count), other=bits)
    places = calls.one("aten::view", self=places, size=[count, 1] if dim == 0 else [count])
    wide = calls.one("aten::unsqueeze", self=words, dim=dim + 1)
    parts = calls.one("aten::bitwise_right_shift.Tensor", self=wide, other=places)
    parts = calls.one("aten::bitwise_and.Scalar", self=parts, other=(1 << bits) - 1)
    if shuffled:
        sizes = [rows, 2, count // 2, columns] if dim == 0 else [rows, columns, 2, count // 2]
        halves = calls.one("aten::view", self=parts, size=sizes)
        parts = calls.one("aten::transpose.int", self=halves, dim0=dim + 1, dim1=dim + 2)
    sizes = [rows * count, columns] if dim == 0 else [rows, columns * count]
    return calls.one("aten::reshape", self=parts, shape=sizes)


def _weight(calls: RewrittenCalls, whole: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None) -> Tensor:
    """The weight with the dtype of its scales. `groups` has the group of each row; without it they follow each
    other."""
    rows, columns = whole.meta.sizes
    spread = []
    for each in (zeros, scales):
        if groups is not None:
            spread.append(calls.one("aten::index_select", self=each, dim=0, index=groups))
            continue
        count = each.meta.sizes[0]
        if not count or rows % count:
            raise CannotRewrite(f"{count} groups of {rows} rows")
        lines = calls.one("aten::unsqueeze", self=each, dim=1)
        lines = calls.one("aten::expand", self=lines, size=[count, rows // count, columns])
        spread.append(calls.one("aten::reshape", self=lines, shape=[rows, columns]))
    apart = calls.one("aten::sub.Tensor", self=whole, other=spread[0])
    return calls.times(calls.cast(apart, scales.meta.dtype), spread[1])


def awq_dequantize(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """The whole weight. Of `scales` and `zeros`, whichever is packed are the zero points: callers swap them."""
    calls.fill((results or [None])[0], _awq(calls, given))


def awq_product(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    data = given["data"]
    product = calls.one("aten::mm", self=data, mat2=calls.cast(_awq(calls, given), data.meta.dtype))
    calls.fill((results or [None])[0], product)


def _awq(calls: RewrittenCalls, given: Given) -> Tensor:
    scales, zeros = given["scales"], given["zeros"]
    if scales.meta.dtype is DType.int32:
        scales, zeros = zeros, scales
    whole, points = (unpacked(calls, each, 1, 4, shuffled=True) for each in (given["weight"], zeros))
    return _weight(calls, whole, points, scales, None)


def gptq_product(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """Zero points are one less than meant, other than in the second version of the format. Shuffled rows are in the
    order of their groups, for which the columns of the other factor are chosen."""
    bits, data, order = given["bit"], given["a"], given.get("b_g_idx")
    if bits not in (4, 8):
        raise CannotRewrite(f"a product with weights of {bits} bits")
    listed = order is not None and order.meta.sizes[0] > 0
    shuffled = bool(given["shuffled"])
    whole = unpacked(calls, given["b_q_weight"], 0, bits, shuffled=shuffled and bits == 4)
    points = unpacked(calls, given["b_gptq_qzeros"], 1, bits)
    if not given.get("use_v2_format"):
        points = calls.one("aten::add.Scalar", self=points, other=1)
    weight = _weight(calls, whole, points, given["b_gptq_scales"], order if listed and not shuffled else None)
    if listed and shuffled:
        data = calls.one("aten::index_select", self=data, dim=1, index=order)
    product = calls.one("aten::mm", self=data, mat2=calls.cast(weight, data.meta.dtype))
    calls.fill((results or [None])[0], product)


# -------------------------------------------------------------------------------------------------- Marlin and Machete


@dataclass(frozen=True)
class _Kind:
    """A type of weights as vLLM numbers it: bits of its exponent and mantissa, and what is added to integers."""

    exponent: int
    mantissa: int
    bits: int
    bias: int


def _kind(number: int) -> _Kind:
    exponent, mantissa, signed = number & 0xFF, number >> 8 & 0xFF, number >> 16 & 1
    found = _Kind(exponent, mantissa, exponent + mantissa + signed, number >> 17 & 0xFFFFFFFF)
    if found.bits not in (4, 8) or (exponent, mantissa) not in ((0, 4), (0, 8), (4, 3), (2, 1)):
        raise CannotRewrite(f"a product with weights of the type {number}")
    return found


def _ordered(calls: RewrittenCalls, tensor: Tensor, parts: list[int], dims: list[int], sizes: list[int]) -> Tensor:
    """The elements in another order: as `parts` with its dimensions permuted."""
    whole = calls.one("aten::reshape", self=tensor, shape=parts)
    return calls.one("aten::reshape", self=calls.one("aten::permute", self=whole, dims=dims), shape=sizes)


def _float4(calls: RewrittenCalls, codes: Tensor) -> Tensor:
    """The numbers of codes of float4_e2m1: as float16, their bits are 2**14 times too small."""
    small = calls.one("aten::mul.Scalar", self=calls.one("aten::bitwise_and.Scalar", self=codes, other=7), other=512)
    half = calls.one("aten::view.dtype", self=calls.cast(small, DType.int16), dtype=DType.float16)
    size = calls.one("aten::mul.Scalar", self=calls.single(half), other=16384)
    negative = calls.one("aten::ge.Scalar", self=codes, other=8)
    return calls.one("aten::where.self", condition=negative, self=calls.one("aten::neg", self=size), other=size)


def _marlin_columns(calls: RewrittenCalls, lines: Tensor, *, single: bool) -> Tensor:
    """Scales, zero points or a bias in the order of their columns: 64 or, of a single group, 32 were mixed."""
    sizes = list(lines.meta.sizes)
    if single:
        return _ordered(calls, lines, [-1, 4, 4, 2], [0, 2, 1, 3], sizes)
    return _ordered(calls, lines, [-1, 8, 8], [0, 2, 1], sizes)


def _marlin(calls: RewrittenCalls, given: Given, dtype: DType) -> Tensor:
    """The whole weight [rows, columns], or that of each expert."""
    plain("a product", given, a_scales=(None,), is_zp_float=(None, False), global_scale=(None,))
    kind, words, scales = _kind(given["b_type_id"]), given["b_q_weight"], given["b_scales"]
    groups, columns = scales.meta.sizes[-2:]
    rows, ahead = given["size_k"], list(words.meta.sizes[:-2])
    lines = words.meta.sizes[-2] * (ahead[0] if ahead else 1)
    words = calls.one("aten::reshape", self=words, shape=[lines, words.meta.sizes[-1]])
    narrow = kind.bits == 4
    parts = [lines, columns // _TILE_COLUMNS, 8, 4, 4, 2, 2, 2]
    dims = [0, 7, 3, 5, 1, 4, 6, 2] if narrow else [0, 7, 3, 6, 1, 4, 5, 2]
    whole = _ordered(calls, unpacked(calls, words, 1, kind.bits), parts, dims, [lines * _TILE_ROWS, columns])
    flat = calls.one("aten::reshape", self=scales, shape=[-1, columns])
    points, single = given.get("b_zeros"), groups == 1
    factor = 1.0
    if kind.exponent == 2:
        flat = _ordered(calls, flat, [-1, 2, 2], [0, 2, 1], list(flat.meta.sizes))
        if flat.meta.dtype is DType.float8_e4m3fn:
            raise CannotRewrite("a product with NVFP4's scales")
    flat = calls.single(_marlin_columns(calls, flat, single=single))
    order = given.get("g_idx") if (given.get("g_idx") is not None and given["g_idx"].meta.sizes[-1]) else None
    if order is not None and ahead:
        raise CannotRewrite("experts with rows in the order of their groups")
    if kind.exponent == 0 and points is not None and 0 not in points.meta.sizes:
        points = calls.one("aten::reshape", self=points, shape=[-1, points.meta.sizes[-1]])
        points = unpacked(calls, points, 1, kind.bits)
        mixed = [-1, 2, 4] if narrow else [-1, 2, 2]
        points = _ordered(calls, points, mixed, [0, 2, 1], list(points.meta.sizes))
        points = _marlin_columns(calls, points, single=False)
    elif kind.exponent == 0:
        points = calls.one("aten::full_like", self=flat, fill_value=kind.bias)
    else:
        points = calls.one("aten::zeros_like", self=flat)
        if kind.exponent == 2:
            whole = _float4(calls, whole)
        else:
            whole = calls.one("aten::view.dtype", self=calls.cast(whole, DType.uint8), dtype=DType.float8_e4m3fn)
            factor = 2.0 ** -(8 if dtype is DType.float16 else 120)
    weight = _weight(calls, calls.single(whole), points, flat, order)
    if factor != 1.0:
        weight = calls.one("aten::mul.Scalar", self=weight, other=factor)
    sizes = [*ahead, rows, columns]
    return calls.cast(calls.one("aten::reshape", self=weight, shape=sizes), dtype)


def _marlin_bias(calls: RewrittenCalls, bias: Tensor) -> Tensor:
    return _marlin_columns(calls, bias, single=True)


def marlin_product(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """Rows of the weight may be in the order of their groups, for which the columns of the other factor are chosen."""
    data, order, bias = given["a"], given.get("perm"), given.get("b_bias")
    weight = _marlin(calls, given, data.meta.dtype)
    if order is not None and order.meta.sizes[-1]:
        data = calls.one("aten::index_select", self=data, dim=1, index=order)
    product = calls.one("aten::mm", self=data, mat2=weight)
    if bias is not None:
        product = calls.one("aten::add.Tensor", self=product, other=_marlin_bias(calls, bias))
    _deliver(calls, given.get("c"), results, product)


def _deliver(calls: RewrittenCalls, target: Tensor | None, results: Recorded, content: Tensor) -> None:
    """To the memory that the call was given, if it was, and to its result, if that is another tensor."""
    if target is not None:
        calls.write(target, calls.one("aten::reshape", self=content, shape=list(target.meta.sizes)))
    recorded = (results or [None])[0]
    if recorded is not target:
        calls.fill(recorded, content)


def _sorted_product(calls: RewrittenCalls, given: Given, data: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Products of tokens that are sorted by expert, block by block; each in the place of its token and choice."""
    slot, chosen = calls.cast(given["sorted_token_ids"], DType.int64), given["top_k"]
    count = data.meta.sizes[0] * chosen
    inside = calls.one("aten::clamp", self=slot, min=0, max=max(count - 1, 0))
    row = calls.one("aten::floor_divide.Scalar", self=inside, other=chosen)
    rows = calls.one("aten::index_select", self=calls.cast(data, DType.bfloat16), dim=0, index=row)
    made, whose = block_products(calls, rows, weight, given["expert_ids"], given["block"], given["valid"])
    if bias is not None:
        own = calls.one("aten::repeat_interleave.self_int", self=whose, repeats=given["block"], dim=0)
        own = calls.slice(own, 0, 0, rows.meta.sizes[0])
        made = calls.one(
            "aten::add.Tensor", self=made, other=calls.one("aten::index_select", self=bias, dim=0, index=own)
        )
    if given.get("topk_weights") is not None:
        share = calls.one("aten::reshape", self=calls.cast(given["topk_weights"], DType.bfloat16), shape=[-1])
        share = calls.one("aten::index_select", self=share, dim=0, index=inside)
        made = calls.times(made, calls.one("aten::unsqueeze", self=share, dim=1))
    there = calls.one("aten::lt.Scalar", self=slot, other=count)
    return into_slots(calls, made, slot, there, count)


def marlin_experts(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    data, bias = given["a"], given.get("b_bias")
    weight = _marlin(calls, given, DType.bfloat16)
    bias = None if bias is None else calls.cast(_marlin_bias(calls, bias), DType.bfloat16)
    if not given["mul_topk_weights"]:
        given = given | {"topk_weights": None}
    found = _sorted_product(calls, given, data, weight, bias)
    _deliver(calls, given.get("c"), results, calls.cast(found, data.meta.dtype))


def byte_experts(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """vLLM's: weights [experts, columns, rows] of 4 or 8 bits, packed along rows into bytes, with scales [experts,
    columns, groups]; zero points are packed along columns."""
    data, words, scales, bits = given["input"], given["b_qweight"], given["b_scales"], given["bit"]
    if bits not in (4, 8):
        raise CannotRewrite(f"a product with weights of {bits} bits")
    experts, columns, groups = scales.meta.sizes
    width, points = words.meta.sizes[-1] * 8 // bits, given.get("b_qzeros")
    whole = unpacked(calls, calls.one("aten::reshape", self=words, shape=[-1, words.meta.sizes[-1]]), 1, bits)
    if points is None:
        points = calls.one("aten::full_like", self=scales, fill_value=1 << (bits - 1))
    else:
        points = calls.one("aten::reshape", self=points, shape=[-1, groups])
        points = unpacked(calls, points, 0, bits)
    turned = calls.one("aten::transpose.int", self=whole, dim0=0, dim1=1)
    points, scales = (
        calls.one("aten::transpose.int", self=calls.one("aten::reshape", self=each, shape=[-1, groups]), dim0=0, dim1=1)
        for each in (points, scales)
    )
    weight = _weight(calls, turned, points, scales, None)
    weight = calls.one("aten::reshape", self=weight, shape=[width, experts, columns])
    weight = calls.cast(calls.one("aten::permute", self=weight, dims=[1, 0, 2]), DType.bfloat16)
    found = _sorted_product(calls, given, data, weight, None)
    _deliver(calls, given["output"], results, calls.cast(found, data.meta.dtype))


def machete_product(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """Machete's packing is its own: the elements of a word are taken to follow each other along the rows."""
    data, scales, points = given["A"], given.get("group_scales"), given.get("group_zeros")
    kind = _kind(given["b_type"])
    if kind.exponent:
        raise CannotRewrite("a product with weights of floating point in Machete's order")
    calls.assumed.append("the elements of the weight follow each other")
    weight = unpacked(calls, given["B"], 0, kind.bits)
    weight = calls.single(calls.one("aten::sub.Scalar", self=weight, other=kind.bias))
    for name, each in (("mul", scales), ("add", points)):
        if each is not None:
            lines = calls.one(
                "aten::repeat_interleave.self_int", self=each, repeats=weight.meta.sizes[0] // each.meta.sizes[0], dim=0
            )
            weight = calls.one(f"aten::{name}.Tensor", self=weight, other=lines)
    dtype = given.get("out_type") or (data.meta.dtype if data.meta.dtype.name.endswith("float16") else DType.bfloat16)
    product = calls.one("aten::mm", self=calls.cast(data, dtype), mat2=calls.cast(weight, dtype))
    for name, size in (("channel_scales", [1, -1]), ("token_scales", [-1, 1])):
        if given.get(name) is not None:
            product = calls.times(product, calls.one("aten::reshape", self=given[name], shape=size))
    calls.fill((results or [None])[0], calls.cast(product, dtype))


# -------------------------------------------------------------------------------------------------------------- NVFP4

_GROUP, _SCALE_ROWS, _SCALE_GROUPS = 16, 128, 4
_LARGEST_FLOAT4 = 6.0
# Above which a magnitude has the next code, and whether already there: rounding is to the nearest, ties to even.
_STEPS = ((0.25, "gt"), (0.75, "ge"), (1.25, "gt"), (1.75, "ge"), (2.5, "gt"), (3.5, "ge"), (5.0, "gt"))


def _float4_bytes(calls: RewrittenCalls, data: Tensor) -> Tensor:
    """The codes of numbers [rows, columns], two in a byte, the first in its lower half."""
    rows, columns = data.meta.sizes
    size = calls.one("aten::abs", self=data)
    steps = [calls.one(f"aten::{how}.Scalar", self=size, other=least) for least, how in _STEPS]
    codes = calls.one("aten::sum.dim_IntList", self=calls.one("aten::stack", tensors=steps, dim=0), dim=[0])
    sign = calls.one("aten::mul.Scalar", self=calls.one("aten::lt.Scalar", self=data, other=0), other=8)
    codes = calls.one("aten::view", self=calls.one("aten::add.Tensor", self=codes, other=sign), size=[rows, -1, 2])
    halves = [calls.one("aten::select.int", self=codes, dim=2, index=place) for place in range(2)]
    upper = calls.one("aten::mul.Scalar", self=halves[1], other=16)
    return calls.cast(calls.one("aten::add.Tensor", self=halves[0], other=upper), DType.uint8)


def float4_quantize(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """A group's scale is its largest magnitude over that of the format, times the global scale, as float8."""
    data, factor = calls.single(given["input"]), given["input_scale"]
    rows, columns = data.meta.sizes
    groups = calls.one("aten::view", self=data, size=[rows, columns // _GROUP, _GROUP])
    most = calls.one("aten::amax", self=calls.one("aten::abs", self=groups), dim=[-1])
    scales = calls.times(calls.one("aten::mul.Scalar", self=most, other=1 / _LARGEST_FLOAT4), factor)
    scales = calls.cast(calls.one("aten::clamp", self=scales, min=None, max=448.0), DType.float8_e4m3fn)
    back = calls.one("aten::div.Tensor", self=factor, other=calls.single(scales))
    some = calls.one("aten::gt.Scalar", self=calls.single(scales), other=0)
    back = calls.one("aten::where.self", condition=some, self=back, other=calls.one("aten::zeros_like", self=back))
    scaled = calls.times(groups, calls.one("aten::unsqueeze", self=back, dim=-1))
    codes = _float4_bytes(calls, calls.one("aten::view", self=scaled, size=[rows, columns]))
    order = calls.one("aten::view.dtype", self=scales, dtype=DType.uint8)
    if given.get("is_sf_swizzled_layout", True):
        below, right = -rows % _SCALE_ROWS, -(columns // _GROUP) % _SCALE_GROUPS
        order = calls.one("aten::constant_pad_nd", self=order, pad=[0, right, 0, below], value=0)
        tall, wide = order.meta.sizes
        parts = [tall // _SCALE_ROWS, 4, 32, wide // _SCALE_GROUPS, _SCALE_GROUPS]
        order = _ordered(calls, order, parts, [0, 3, 2, 1, 4], [tall, wide])
    targets = [given.get("output"), given.get("output_scale")]
    for place, content in enumerate((codes, order)):
        target = targets[place] if targets[place] is not None else (results or [None, None])[place]
        if not isinstance(target, Tensor):
            continue
        content = calls.one("aten::view.dtype", self=content, dtype=target.meta.dtype)
        content = calls.one("aten::reshape", self=content, shape=list(target.meta.sizes))
        if targets[place] is not None:
            calls.write(target, content)
        else:
            calls.fill(target, content)


def _float4_numbers(calls: RewrittenCalls, codes: Tensor, scales: Tensor) -> Tensor:
    """Numbers [rows, columns] times their scales, which are in the order of products, in float32."""
    rows, columns = codes.meta.sizes[0], codes.meta.sizes[1] * 2
    tall, wide = (-(-rows // _SCALE_ROWS) * _SCALE_ROWS, -(-columns // (_GROUP * _SCALE_GROUPS)) * _SCALE_GROUPS)
    order = calls.one("aten::view.dtype", self=scales, dtype=DType.float8_e4m3fn)
    if columns % _GROUP or tall * wide != math.prod(order.meta.sizes):
        raise CannotRewrite(f"scales of {list(scales.meta.sizes)} for {rows} rows of {columns} numbers")
    parts = [tall // _SCALE_ROWS, wide // _SCALE_GROUPS, 32, 4, _SCALE_GROUPS]
    order = _ordered(calls, calls.single(order), parts, [0, 3, 2, 1, 4], [tall, wide])
    order = calls.slice(calls.slice(order, 0, 0, rows), 1, 0, columns // _GROUP)
    order = calls.one("aten::repeat_interleave.self_int", self=order, repeats=_GROUP, dim=1)
    return calls.times(_float4(calls, unpacked(calls, codes, 1, 4)), order)


def float4_product(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    one, other = (_float4_numbers(calls, given[name], given[f"block_scale_{name}"]) for name in ("a", "b"))
    product = calls.times(calls.one("aten::linear", input=one, weight=other), given["alpha"])
    calls.write(given["out"], product)


# -------------------------------------------------------------------------------------------------------------- table

_AWQ_NAMES = {"_in_feats": "data", "_kernel": "weight", "_scaling_factors": "scales", "_zeros": "zeros"}
_AWQ_NAMES |= {"qweight": "weight", "qzeros": "zeros"}
_SHUFFLED = {"use_exllama": "shuffled", "use_shuffle": "shuffled"}
RULES: tuple[tuple[Any, str], ...] = (
    (float4_quantize, "_C::scaled_fp4_quant sgl_kernel::scaled_fp4_quant"),
    (float4_product, "_C::cutlass_scaled_fp4_mm sgl_kernel::cutlass_scaled_fp4_mm"),
    (renamed(awq_dequantize, _AWQ_NAMES), "_C::awq_dequantize sgl_kernel::awq_dequantize"),
    (renamed(awq_product, _AWQ_NAMES), "_C::awq_gemm"),
    (renamed(gptq_product, _SHUFFLED), "_C::gptq_gemm sgl_kernel::gptq_gemm"),
    (marlin_product, "_C::gptq_marlin_gemm _C::marlin_gemm sgl_kernel::gptq_marlin_gemm"),
    (marlin_experts, "_moe_C::moe_wna16_marlin_gemm sgl_kernel::moe_wna16_marlin_gemm"),
    (renamed(byte_experts, {"num_tokens_post_pad": "valid", "BLOCK_SIZE_M": "block"}), "_moe_C::moe_wna16_gemm"),
    (machete_product, "_C::machete_mm"),
)
