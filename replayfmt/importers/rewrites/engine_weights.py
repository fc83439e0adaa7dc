"""Weights of 4 and 8 bits packed into 32-bit words, as AWQ and GPTQ keep them. Compositions for engines.py.

A weight is (q - z) * s, with a zero point z and a scale s for each column and group of rows. In shuffled words the
elements with even places come first, so that kernels unpack two at a time.
"""

from __future__ import annotations

from replayfmt.format.codes import DType

from ..common.synthesis import Tensor
from .rewriting import CannotRewrite, Given, Recorded, RewrittenCalls

_WORD_BITS = 32


def _unpacked(calls: RewrittenCalls, words: Tensor, dim: int, bits: int, *, shuffled: bool = False) -> Tensor:
    """The elements of a matrix of words, each of which holds some that follow each other along `dim`."""
    if words.meta.dtype is not DType.int32 or len(words.meta.sizes) != 2:
        raise CannotRewrite(f"packed weights of {words.meta.dtype.name} with {len(words.meta.sizes)} dimensions")
    rows, columns = words.meta.sizes
    count = _WORD_BITS // bits
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
    whole, points = (_unpacked(calls, each, 1, 4, shuffled=True) for each in (given["weight"], zeros))
    return _weight(calls, whole, points, scales, None)


def gptq_product(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """Zero points are one less than meant, other than in the second version of the format. Shuffled rows are in the
    order of their groups, for which the columns of the other factor are chosen."""
    bits, data, order = given["bit"], given["a"], given["b_g_idx"]
    if bits not in (4, 8):
        raise CannotRewrite(f"a product with weights of {bits} bits")
    listed = order.meta.sizes[0] > 0
    shuffled = bool(given["shuffled"])
    whole = _unpacked(calls, given["b_q_weight"], 0, bits, shuffled=shuffled and bits == 4)
    points = _unpacked(calls, given["b_gptq_qzeros"], 1, bits)
    if not given.get("use_v2_format"):
        points = calls.one("aten::add.Scalar", self=points, other=1)
    weight = _weight(calls, whole, points, given["b_gptq_scales"], order if listed and not shuffled else None)
    if listed and shuffled:
        data = calls.one("aten::index_select", self=data, dim=1, index=order)
    product = calls.one("aten::mm", self=data, mat2=calls.cast(weight, data.meta.dtype))
    calls.fill((results or [None])[0], product)
