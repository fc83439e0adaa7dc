"""Fused attention as matrix products: the portable replacements of flash, memory-efficient and cuDNN attention.

All of them compute softmax(scale * Q K^T + bias) V for Q, K, V of [batch, heads, length, width], keep the logarithm of
the softmax's denominators for the backward pass, and accumulate in float32. So do the replacements, with one operator
for each step. Operators that launch the kernels themselves (`aten::_flash_attention_forward`) have the length before
the heads, in their results too. Dropout draws its numbers inside the fused kernel and has no equivalent; neither do
packed sequences.
"""

from __future__ import annotations

import math
from typing import Any

from replayfmt.format.codes import DType

from ..common.values import Tensor
from .rewriting import CannotRewrite, RewrittenCalls

_LOW = frozenset({DType.float16, DType.bfloat16, DType.float8_e4m3fn, DType.float8_e5m2})


def _single(calls: RewrittenCalls, tensor: Tensor) -> Tensor:
    """The tensor in float32 if its dtype is less precise."""
    if tensor.meta.dtype not in _LOW:
        return tensor
    return calls.one("aten::_to_copy", self=tensor, dtype=DType.float32)


# Other parameters of these kernels that the replacements do not support, with the values that mean they are unused.
_OTHERS = {
    "window_size": (None, 0),
    "window_size_left": (None, -1),
    "window_size_right": (None, -1),
    "seqused_k": (None,),
    "seqlen_k": (None,),
    "alibi_slopes": (None,),
    "block_table": (None,),
    "shared_storage_dqdkdv": (None, False),
    "q_descale": (None,),
    "k_descale": (None,),
    "v_descale": (None,),
}
_PACKED = ("cum_seq_q", "cum_seq_k", "cu_seqlens_q", "cu_seqlens_k")


class _Attention:
    """One call's tensors and numbers, and the scores computed from them."""

    def __init__(self, calls: RewrittenCalls, given: dict[str, Any], bias: Tensor | None) -> None:
        others = [name for name, unset in _OTHERS.items() if given.get(name) not in unset]
        if others:
            raise CannotRewrite(f"attention with {', '.join(others)}")
        if given.get("dropout_p"):
            raise CannotRewrite("attention with dropout draws its random numbers inside of the fused kernel")
        query, key, value = given["query"], given["key"], given["value"]
        if any(len(each.meta.sizes) != 4 for each in (query, key, value)):
            raise CannotRewrite("attention of tensors that are not [batch, heads, length, width]")
        if query.meta.sizes[1] != key.meta.sizes[1]:
            raise CannotRewrite("attention with fewer heads of keys than of queries")
        self.calls = calls
        self.queries, self.keys = query.meta.sizes[2], key.meta.sizes[2]
        self.causal = bool(given.get("is_causal"))
        # The diagonal that queries see up to: by the first key, or by the last one.
        self.diagonal = int(given.get("diagonal", 0 if self.queries == self.keys else -1))
        if self.causal and self.diagonal < 0:
            raise CannotRewrite("causal attention of queries and keys of different lengths")
        scale = given.get("scale")
        self.scale = 1 / math.sqrt(query.meta.sizes[3]) if scale is None else float(scale)
        self.query, self.key, self.value = (_single(calls, each) for each in (query, key, value))
        self.bias = bias

    def transposed(self, tensor: Tensor) -> Tensor:
        return self.calls.one("aten::transpose.int", self=tensor, dim0=-2, dim1=-1)

    def scores(self) -> Tensor:
        """The input of the softmax."""
        calls = self.calls
        product = calls.one("aten::matmul", self=self.query, other=self.transposed(self.key))
        scores = calls.one("aten::mul.Scalar", self=product, other=self.scale)
        if self.bias is not None:
            scores = calls.one("aten::add.Tensor", self=scores, other=_single(calls, self.bias))
        if self.causal:
            ones = calls.one("aten::new_ones", self=scores, size=[self.queries, self.keys], dtype=DType.bool)
            later = calls.one("aten::triu", self=ones, diagonal=1 + self.diagonal)
            scores = calls.one("aten::masked_fill.Scalar", self=scores, mask=later, value=-math.inf)
        return scores


def _logarithms(calls: RewrittenCalls, recorded: Any, scores: Tensor) -> None:
    """Produce the logarithms of the softmax's denominators; some kernels pad them, or leave them out."""
    if not isinstance(recorded, Tensor) or 0 in recorded.meta.sizes:
        calls.allocate(recorded)
        return
    sums = calls.one("aten::logsumexp", self=scores, dim=[-1])
    calls.allocate(recorded, zeros=True)
    target = recorded
    sizes = recorded.meta.sizes
    if len(sizes) == 4 and sizes[-1] == 1:
        sums = calls.one("aten::unsqueeze", self=sums, dim=-1)
    elif sizes[-1] != sums.meta.sizes[-1]:
        target = calls.one("aten::slice.Tensor", self=recorded, dim=-1, start=0, end=sums.meta.sizes[-1])
    if target.meta.sizes != sums.meta.sizes:
        raise CannotRewrite(f"logarithms of sums with the sizes {list(sizes)}")
    calls.call("aten::copy_", {"self": target, "src": sums}, [target])


def _forward(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
    attention = _Attention(calls, given, given.get("attn_bias", given.get("bias")))
    scores = attention.scores()
    weights = calls.one("aten::_softmax", self=scores, dim=-1, half_to_float=False)
    output = calls.one("aten::matmul", self=weights, other=attention.value)
    if results is None:
        return
    _deliver(calls, given, results[0], output)
    if len(results) > 1:
        _logarithms(calls, results[1], scores)
    for other in results[2:]:
        calls.allocate(other, zeros=True)  # states of random generators that nothing was drawn from


def _backward(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
    grad = given.get("grad_out", given.get("grad_out_"))
    assert grad is not None
    wanted = given.get("grad_input_mask") or [True, True, True, False]
    bias = given.get("attn_bias", given.get("bias"))
    if bias is not None and (given.get("bias_requires_grad") or (len(wanted) > 3 and wanted[3])):
        raise CannotRewrite("the gradient of attention's bias")
    attention = _Attention(calls, given, bias)
    scores = attention.scores()
    sums = given["logsumexp"]
    if sums.meta.sizes[-1] == 1 and len(sums.meta.sizes) == 4:
        sums = calls.one("aten::squeeze.dim", self=sums, dim=-1)
    if sums.meta.sizes[-1] != attention.queries:
        sums = calls.one("aten::slice.Tensor", self=sums, dim=-1, start=0, end=attention.queries)
    sums = calls.one("aten::unsqueeze", self=sums, dim=-1)
    weights = calls.one("aten::exp", self=calls.one("aten::sub.Tensor", self=scores, other=sums))
    grad, output = _single(calls, grad), _single(calls, given["out"])
    grad_value = calls.one("aten::matmul", self=attention.transposed(weights), other=grad)
    grad_weights = calls.one("aten::matmul", self=grad, other=attention.transposed(attention.value))
    product = calls.one("aten::mul.Tensor", self=grad, other=output)
    correction = calls.one("aten::sum.dim_IntList", self=product, dim=[-1], keepdim=True)
    grad_scores = calls.one(
        "aten::mul.Tensor", self=weights, other=calls.one("aten::sub.Tensor", self=grad_weights, other=correction)
    )
    scaled = calls.one("aten::mul.Scalar", self=grad_scores, other=attention.scale)
    grad_query = calls.one("aten::matmul", self=scaled, other=attention.key)
    grad_key = calls.one("aten::matmul", self=attention.transposed(scaled), other=attention.query)
    for recorded, content in zip(results or (), (grad_query, grad_key, grad_value), strict=False):
        _deliver(calls, given, recorded, content)
    for recorded in (results or ())[3:]:
        calls.allocate(recorded, zeros=True)


def _unpacked(rule: Any) -> Any:
    """Refuses packed sequences: their lengths are content."""

    def checked(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
        if any(given.get(name) is not None for name in _PACKED):
            raise CannotRewrite("attention of sequences that are packed together")
        rule(calls, given, results)

    return checked


def _length_first(rule: Any) -> Any:
    """A rule for [batch, heads, length, width] as one for kernels that have [batch, length, heads, width]; of keys they
    may have fewer heads, and causal ones may be aligned at the last key."""

    def rearranged(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
        def heads_first(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor) or len(tensor.meta.sizes) != 4:
                return tensor
            return calls.one("aten::transpose.int", self=tensor, dim0=1, dim1=2)

        names = ("query", "key", "value", "out", "grad_out", "grad_out_")
        turned = {name: heads_first(value) if name in names else value for name, value in given.items()}
        query, key, value = (given[name].meta.sizes for name in names[:3])
        if not len(query) == len(key) == len(value) == 4:
            raise CannotRewrite("attention of tensors that are not [batch, length, heads, width]")
        mask = given.get("custom_mask_type")
        if mask is not None:  # 0: none, 1: causal from the first key, 2: causal to the last one
            turned |= {"is_causal": mask != 0, "diagonal": 0 if mask == 1 else key[1] - query[1]}
        else:
            turned["diagonal"] = key[1] - query[1]
        shared = query[2] // max(key[2], 1)
        if shared > 1 and key[2] * shared == query[2] and key[:3] == value[:3] and "out" not in given:
            for name in ("key", "value"):
                turned[name] = calls.one("aten::repeat_interleave.self_int", self=turned[name], repeats=shared, dim=1)
        turned["length_first"] = True
        rule(calls, turned, results)

    return rearranged


def _deliver(calls: RewrittenCalls, given: dict[str, Any], recorded: Any, content: Tensor) -> None:
    """Produce a recorded result from content that was computed with the heads first."""
    if given.get("length_first"):
        content = calls.one("aten::transpose.int", self=content, dim0=1, dim1=2)
    calls.fill(recorded, content)


ATTENTION: dict[str, Any] = {
    "aten::_flash_attention_forward": _unpacked(_length_first(_forward)),
    "aten::_flash_attention_backward": _unpacked(_length_first(_backward)),
    "aten::_efficient_attention_forward": _unpacked(_length_first(_forward)),
    "aten::_efficient_attention_backward": _unpacked(_length_first(_backward)),
    "aten::_cudnn_attention_forward": _unpacked(_forward),
    "aten::_cudnn_attention_backward": _unpacked(_backward),
    "aten::_scaled_dot_product_flash_attention": _forward,
    "aten::_scaled_dot_product_flash_attention_backward": _unpacked(_backward),
    "aten::_scaled_dot_product_efficient_attention": _forward,
    "aten::_scaled_dot_product_efficient_attention_backward": _backward,
    "aten::_scaled_dot_product_cudnn_attention": _forward,
    "aten::_scaled_dot_product_cudnn_attention_backward": _unpacked(_backward),
    "aten::_scaled_dot_product_fused_attention_overrideable": _forward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _forward,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _backward,
}
