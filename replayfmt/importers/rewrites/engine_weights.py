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

from .engine_experts import block_products, into_slots
from .rewriting import CannotRewrite, Given, RewrittenCalls, Value, plain, renamed

_WORD_BITS = {DType.int32: 32, DType.uint8: 8}
_TILE_ROWS, _TILE_COLUMNS = 16, 64


def unpacked(words: Any, dim: int, bits: int, *, shuffled: bool = False) -> Any:
    """The elements of a matrix of words, each of which holds some that follow each other along `dim`."""
    if words.dtype not in _WORD_BITS or len(words.sizes) != 2:
        raise CannotRewrite(f"packed weights of {words.dtype.name} with {len(words.sizes)} dimensions")
    rows, columns = words.sizes
    count = _WORD_BITS[words.dtype] // bits
    words = words.to(DType.int32)
    places = (words.calls.count(count) * bits).view([count, 1] if dim == 0 else [count])
    parts = words.unsqueeze(dim + 1).bitwise_right_shift(places).bitwise_and((1 << bits) - 1)
    if shuffled:
        sizes = [rows, 2, count // 2, columns] if dim == 0 else [rows, columns, 2, count // 2]
        parts = parts.view(sizes).transpose(dim + 1, dim + 2)
    return parts.reshape([rows * count, columns] if dim == 0 else [rows, columns * count])


def _weight(whole: Value, zeros: Value, scales: Value, groups: Value | None) -> Any:
    """The weight with the dtype of its scales. `groups` has the group of each row; without it they follow each
    other."""
    rows, columns = whole.sizes
    spread = []
    for each in (zeros, scales):
        if groups is not None:
            spread.append(each.index_select(0, groups))
            continue
        count = each.sizes[0]
        if not count or rows % count:
            raise CannotRewrite(f"{count} groups of {rows} rows")
        spread.append(each.unsqueeze(1).expand([count, rows // count, columns]).reshape([rows, columns]))
    return (whole - spread[0]).to(scales.dtype) * spread[1]


def awq_dequantize(calls: RewrittenCalls, given: Given) -> None:
    """The whole weight. Of `scales` and `zeros`, whichever is packed are the zero points: callers swap them."""
    calls.deliver(_awq(given))


def awq_product(calls: RewrittenCalls, given: Given) -> None:
    calls.deliver(given["data"].mm(_awq(given).to(given["data"].dtype)))


def _awq(given: Given) -> Any:
    scales, zeros = given["scales"], given["zeros"]
    if scales.dtype is DType.int32:
        scales, zeros = zeros, scales
    whole, points = (unpacked(each, 1, 4, shuffled=True) for each in (given["weight"], zeros))
    return _weight(whole, points, scales, None)


def gptq_product(calls: RewrittenCalls, given: Given) -> None:
    """Zero points are one less than meant, other than in the second version of the format. Shuffled rows are in the
    order of their groups, for which the columns of the other factor are chosen."""
    bits, data, order = given["bit"], given["a"], given.get("b_g_idx")
    if bits not in (4, 8):
        raise CannotRewrite(f"a product with weights of {bits} bits")
    listed = order is not None and order.sizes[0] > 0
    shuffled = bool(given["shuffled"])
    whole = unpacked(given["b_q_weight"], 0, bits, shuffled=shuffled and bits == 4)
    points = unpacked(given["b_gptq_qzeros"], 1, bits)
    if not given.get("use_v2_format"):
        points = points + 1
    weight = _weight(whole, points, given["b_gptq_scales"], order if listed and not shuffled else None)
    if listed and shuffled:
        data = data.index_select(1, order)
    calls.deliver(data.mm(weight.to(data.dtype)))


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


def _ordered(tensor: Value, parts: list[int], dims: list[int], sizes: list[int]) -> Any:
    """The elements in another order: as `parts` with its dimensions permuted."""
    return tensor.reshape(parts).permute(dims).reshape(sizes)


def _float4(codes: Value) -> Any:
    """The numbers of codes of float4_e2m1: as float16, their bits are 2**14 times too small."""
    small = codes.bitwise_and(7) * 512
    size = small.to(DType.int16).bits(DType.float16).single() * 16384
    return (codes >= 8).where(-size, size)


def _marlin_columns(lines: Value, *, single: bool) -> Any:
    """Scales, zero points or a bias in the order of their columns: 64 or, of a single group, 32 were mixed."""
    sizes = list(lines.sizes)
    return (
        _ordered(lines, [-1, 4, 4, 2], [0, 2, 1, 3], sizes) if single else _ordered(lines, [-1, 8, 8], [0, 2, 1], sizes)
    )


def _marlin(given: Given, dtype: DType) -> Any:
    """The whole weight [rows, columns], or that of each expert."""
    plain("a product", given, a_scales=(None,), is_zp_float=(None, False), global_scale=(None,))
    kind, words, scales = _kind(given["b_type_id"]), given["b_q_weight"], given["b_scales"]
    groups, columns = scales.sizes[-2:]
    rows, ahead = given["size_k"], list(words.sizes[:-2])
    lines = words.sizes[-2] * (ahead[0] if ahead else 1)
    words = words.reshape([lines, words.sizes[-1]])
    narrow = kind.bits == 4
    parts = [lines, columns // _TILE_COLUMNS, 8, 4, 4, 2, 2, 2]
    dims = [0, 7, 3, 5, 1, 4, 6, 2] if narrow else [0, 7, 3, 6, 1, 4, 5, 2]
    whole = _ordered(unpacked(words, 1, kind.bits), parts, dims, [lines * _TILE_ROWS, columns])
    flat = scales.reshape([-1, columns])
    points, factor = given.get("b_zeros"), 1.0
    if kind.exponent == 2:
        flat = _ordered(flat, [-1, 2, 2], [0, 2, 1], list(flat.sizes))
        if flat.dtype is DType.float8_e4m3fn:
            raise CannotRewrite("a product with NVFP4's scales")
    flat = _marlin_columns(flat, single=groups == 1).single()
    order = given.get("g_idx") if (given.get("g_idx") is not None and given["g_idx"].sizes[-1]) else None
    if order is not None and ahead:
        raise CannotRewrite("experts with rows in the order of their groups")
    if kind.exponent == 0 and points is not None and 0 not in points.sizes:
        points = unpacked(points.reshape([-1, points.sizes[-1]]), 1, kind.bits)
        points = _ordered(points, [-1, 2, 4] if narrow else [-1, 2, 2], [0, 2, 1], list(points.sizes))
        points = _marlin_columns(points, single=False)
    elif kind.exponent == 0:
        points = flat.full_like(kind.bias)
    else:
        points = flat.zeros_like()
        if kind.exponent == 2:
            whole = _float4(whole)
        else:
            whole = whole.to(DType.uint8).bits(DType.float8_e4m3fn)
            factor = 2.0 ** -(8 if dtype is DType.float16 else 120)
    weight = _weight(whole.single(), points, flat, order)
    if factor != 1.0:
        weight = weight * factor
    return weight.reshape([*ahead, rows, columns]).to(dtype)


def marlin_product(calls: RewrittenCalls, given: Given) -> None:
    """Rows of the weight may be in the order of their groups, for which the columns of the other factor are chosen."""
    data, order, bias = given["a"], given.get("perm"), given.get("b_bias")
    weight = _marlin(given, data.dtype)
    if order is not None and order.sizes[-1]:
        data = data.index_select(1, order)
    product = data.mm(weight)
    if bias is not None:
        product = product + _marlin_columns(bias, single=True)
    _deliver(calls, given.get("c"), product)


def _deliver(calls: RewrittenCalls, target: Any, content: Any) -> None:
    """To the memory that the call was given, if it was, and to its result, if that is another tensor."""
    if target is not None:
        target.copy_(content.like(target))
    if target is None or (calls.results or [None])[0] is not target.tensor:
        calls.deliver(content)


def _sorted_product(calls: RewrittenCalls, given: Given, data: Value, weight: Value, bias: Value | None) -> Value:
    """Products of tokens that are sorted by expert, block by block; each in the place of its token and choice."""
    slot, chosen = given["sorted_token_ids"].to(DType.int64), given["top_k"]
    count = data.sizes[0] * chosen
    inside = slot.clamp(0, max(count - 1, 0))
    row = inside // chosen
    rows = data.to(DType.bfloat16).index_select(0, row)
    made: Any
    made, whose = block_products(rows, weight, given["expert_ids"], given["block"], given["valid"])
    if bias is not None:
        own = whose.repeat_interleave(given["block"], 0).part(0, 0, rows.sizes[0])
        made = made + bias.index_select(0, own)
    if given.get("topk_weights") is not None:
        share = given["topk_weights"].to(DType.bfloat16).reshape([-1]).index_select(0, inside)
        made = made * share.unsqueeze(1)
    return into_slots(made, slot, slot < count, count)


def marlin_experts(calls: RewrittenCalls, given: Given) -> None:
    data, bias = given["a"], given.get("b_bias")
    weight = _marlin(given, DType.bfloat16)
    bias = None if bias is None else _marlin_columns(bias, single=True).to(DType.bfloat16)
    if not given["mul_topk_weights"]:
        given = given | {"topk_weights": None}
    found = _sorted_product(calls, given, data, weight, bias)
    _deliver(calls, given.get("c"), found.to(data.dtype))


def byte_experts(calls: RewrittenCalls, given: Given) -> None:
    """vLLM's: weights [experts, columns, rows] of 4 or 8 bits, packed along rows into bytes, with scales [experts,
    columns, groups]; zero points are packed along columns."""
    data, words, scales, bits = given["input"], given["b_qweight"], given["b_scales"], given["bit"]
    if bits not in (4, 8):
        raise CannotRewrite(f"a product with weights of {bits} bits")
    experts, columns, groups = scales.sizes
    width, points = words.sizes[-1] * 8 // bits, given.get("b_qzeros")
    whole = unpacked(words.reshape([-1, words.sizes[-1]]), 1, bits)
    if points is None:
        points = scales.full_like(1 << (bits - 1))
    else:
        points = unpacked(points.reshape([-1, groups]), 0, bits)
    turned = whole.transpose(0, 1)
    points, scales = (each.reshape([-1, groups]).transpose(0, 1) for each in (points, scales))
    weight = _weight(turned, points, scales, None).reshape([width, experts, columns])
    weight = weight.permute([1, 0, 2]).to(DType.bfloat16)
    found = _sorted_product(calls, given, data, weight, None)
    _deliver(calls, given["output"], found.to(data.dtype))


def machete_product(calls: RewrittenCalls, given: Given) -> None:
    """Machete's packing is its own: the elements of a word are taken to follow each other along the rows."""
    data, scales, points = given["A"], given.get("group_scales"), given.get("group_zeros")
    kind = _kind(given["b_type"])
    if kind.exponent:
        raise CannotRewrite("a product with weights of floating point in Machete's order")
    calls.assumed.append("the elements of the weight follow each other")
    weight = (unpacked(given["B"], 0, kind.bits) - kind.bias).single()
    if scales is not None:
        weight = weight * scales.repeat_interleave(weight.sizes[0] // scales.sizes[0], 0)
    if points is not None:
        weight = weight + points.repeat_interleave(weight.sizes[0] // points.sizes[0], 0)
    dtype = given.get("out_type") or (data.dtype if data.dtype.name.endswith("float16") else DType.bfloat16)
    product = data.to(dtype).mm(weight.to(dtype))
    for name, size in (("channel_scales", [1, -1]), ("token_scales", [-1, 1])):
        if given.get(name) is not None:
            product = product * given[name].reshape(size)
    calls.deliver(product.to(dtype))


_GROUP, _SCALE_ROWS, _SCALE_GROUPS = 16, 128, 4
_LARGEST_FLOAT4 = 6.0
# Above which a magnitude has the next code, and whether already there: rounding is to the nearest, ties to even.
_STEPS = ((0.25, "gt"), (0.75, "ge"), (1.25, "gt"), (1.75, "ge"), (2.5, "gt"), (3.5, "ge"), (5.0, "gt"))


def _float4_bytes(data: Value) -> Any:
    """The codes of numbers [rows, columns], two in a byte, the first in its lower half."""
    size = data.abs()
    steps = [getattr(size, how)(least) for least, how in _STEPS]
    codes: Any = data.calls.one("aten::stack", tensors=steps, dim=0)
    codes = codes.sum([0])
    codes = (codes + (data < 0) * 8).view([data.sizes[0], -1, 2])
    lower, upper = codes.select(2, 0), codes.select(2, 1)
    return (lower + upper * 16).to(DType.uint8)


def float4_quantize(calls: RewrittenCalls, given: Given) -> None:
    """A group's scale is its largest magnitude over that of the format, times the global scale, as float8."""
    data, factor = given["input"].single(), given["input_scale"]
    rows, columns = data.sizes
    groups = data.view([rows, columns // _GROUP, _GROUP])
    scales = groups.abs().amax([-1]) * (1 / _LARGEST_FLOAT4) * factor
    scales = scales.clamp(None, 448.0).to(DType.float8_e4m3fn)
    back = factor / scales.single()
    some = scales.single() > 0
    back = some.where(back, back.zeros_like())
    codes = _float4_bytes((groups * back.unsqueeze(-1)).view([rows, columns]))
    order = scales.bits(DType.uint8)
    if given.get("is_sf_swizzled_layout", True):
        below, right = -rows % _SCALE_ROWS, -(columns // _GROUP) % _SCALE_GROUPS
        order = order.constant_pad_nd([0, right, 0, below], 0)
        tall, wide = order.sizes
        parts = [tall // _SCALE_ROWS, 4, 32, wide // _SCALE_GROUPS, _SCALE_GROUPS]
        order = _ordered(order, parts, [0, 3, 2, 1, 4], [tall, wide])
    for name, content, recorded in zip(
        ("output", "output_scale"), (codes, order), calls.results or (None, None), strict=False
    ):
        target = given[name] if given.get(name) is not None else calls.wrapped(recorded)
        if isinstance(target, Value):
            content = content.bits(target.dtype).like(target)
            if given.get(name) is not None:
                target.copy_(content)
            else:
                calls.fill(recorded, content)


def _float4_numbers(codes: Value, scales: Value) -> Any:
    """Numbers [rows, columns] times their scales, which are in the order of products, in float32."""
    rows, columns = codes.sizes[0], codes.sizes[1] * 2
    tall, wide = (-(-rows // _SCALE_ROWS) * _SCALE_ROWS, -(-columns // (_GROUP * _SCALE_GROUPS)) * _SCALE_GROUPS)
    order = scales.bits(DType.float8_e4m3fn)
    if columns % _GROUP or tall * wide != math.prod(order.sizes):
        raise CannotRewrite(f"scales of {list(scales.sizes)} for {rows} rows of {columns} numbers")
    parts = [tall // _SCALE_ROWS, wide // _SCALE_GROUPS, 32, 4, _SCALE_GROUPS]
    order = _ordered(order.single(), parts, [0, 3, 2, 1, 4], [tall, wide])
    order = order.part(0, 0, rows).part(1, 0, columns // _GROUP).repeat_interleave(_GROUP, 1)
    return _float4(unpacked(codes, 1, 4)) * order


def float4_product(_calls: RewrittenCalls, given: Given) -> None:
    one, other = (_float4_numbers(given[name], given[f"block_scale_{name}"]) for name in ("a", "b"))
    given["out"].copy_(one.linear(other) * given["alpha"])


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
