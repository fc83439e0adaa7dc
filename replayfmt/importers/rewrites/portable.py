"""`--rewrite=portable`: replaces operators that only the traced device has with operators that every device has.

Each rewriting computes the same results, including those that only a backward pass reads (saved means, logarithms of
sums), to the accuracy of another implementation; each is reported and noted in the capture. The families: fused
operators as the steps that each fuses, in float32 as the kernels compute (products with another result dtype, recurrent
cells, RMS norm, scaled masks); flash, memory-efficient and cuDNN attention as matrix products, softmax(scale * Q K^T +
bias) V; operators of accelerator libraries that PyTorch's can replace even if the library is not installed (their
schemas are listed because they are not registered); convolutions, batch norm, and grid sampling of single libraries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from replayfmt.format.codes import DType
from replayfmt.format.model import Kernel
from replayfmt.pytorch.traced_names import Iteration

from ..common.results import Trials
from ..common.synthesis import Tensor
from .engines import ENGINES
from .rewriting import Arguments, CannotRewrite, Given, Recorded, Rewritten, RewrittenCalls, tensors_in

_LOW = frozenset({DType.float16, DType.bfloat16, DType.float8_e4m3fn, DType.float8_e5m2})


def _single(calls: RewrittenCalls, tensor: Tensor) -> Tensor:
    """The tensor in float32 if its dtype is less precise."""
    return calls.one("aten::_to_copy", self=tensor, dtype=DType.float32) if tensor.meta.dtype in _LOW else tensor


def _fill(calls: RewrittenCalls, results: Recorded, *contents: Tensor) -> None:
    for recorded, content in zip(results or (), contents, strict=False):
        calls.fill(recorded, content)


def product(name: str) -> Any:
    """A rule for a matrix product that accumulates into another dtype: its factors are cast to that first."""

    def rule(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
        dtype = given["out_dtype"]
        arguments = {
            key: calls.one("aten::_to_copy", self=value, dtype=dtype)
            if isinstance(value, Tensor) and value.meta.dtype is not dtype
            else value
            for key, value in given.items()
            if key != "out_dtype"
        }
        calls.call(name, arguments, results)

    return rule


def masked_scale(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """`_masked_scale`: the backward pass of dropout."""
    masked = calls.one("aten::mul.Tensor", self=given["self"], other=given["mask"])
    calls.call("aten::mul.Scalar", {"self": masked, "other": given["scale"]}, results)


def _part(calls: RewrittenCalls, tensor: Tensor, place: int, width: int) -> Tensor:
    return calls.one("aten::slice.Tensor", self=tensor, dim=1, start=place * width, end=(place + 1) * width)


def _biased(calls: RewrittenCalls, gates: Tensor, bias: Tensor | None) -> Tensor:
    gates = _single(calls, gates)
    return gates if bias is None else calls.one("aten::add.Tensor", self=gates, other=_single(calls, bias))


def lstm_cell(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """`_thnn_fused_lstm_cell`: hidden state, cell state, and the gates for the backward pass."""
    before = _single(calls, given["cx"])
    gates = calls.one(
        "aten::add.Tensor",
        self=_biased(calls, given["input_gates"], given.get("input_bias")),
        other=_biased(calls, given["hidden_gates"], given.get("hidden_bias")),
    )
    takes, keeps, new, shows = (
        calls.one(
            "aten::tanh" if place == 2 else "aten::sigmoid", self=_part(calls, gates, place, before.meta.sizes[1])
        )
        for place in range(4)
    )
    kept = calls.one("aten::mul.Tensor", self=keeps, other=before)
    cell = calls.one("aten::add.Tensor", self=kept, other=calls.one("aten::mul.Tensor", self=takes, other=new))
    hidden = calls.one("aten::mul.Tensor", self=shows, other=calls.one("aten::tanh", self=cell))
    _fill(calls, results, hidden, cell, calls.one("aten::cat", tensors=[takes, keeps, new, shows], dim=1))


def gru_cell(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """`_thnn_fused_gru_cell`: hidden state, and what the backward pass reads."""
    before = _single(calls, given["hx"])
    width = before.meta.sizes[1]
    taken = _biased(calls, given["input_gates"], given.get("input_bias"))
    held = _biased(calls, given["hidden_gates"], given.get("hidden_bias"))
    resets, updates = (
        calls.one(
            "aten::sigmoid",
            self=calls.one(
                "aten::add.Tensor", self=_part(calls, taken, place, width), other=_part(calls, held, place, width)
            ),
        )
        for place in range(2)
    )
    last = _part(calls, held, 2, width)
    new = calls.one(
        "aten::tanh",
        self=calls.one(
            "aten::add.Tensor",
            self=_part(calls, taken, 2, width),
            other=calls.one("aten::mul.Tensor", self=resets, other=last),
        ),
    )
    change = calls.one("aten::mul.Tensor", self=updates, other=calls.one("aten::sub.Tensor", self=before, other=new))
    _fill(
        calls,
        results,
        calls.one("aten::add.Tensor", self=new, other=change),
        calls.one("aten::cat", tensors=[resets, updates, new, before, last], dim=1),
    )


def rms_norm_backward(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """`_fused_rms_norm_backward`."""
    grad, data, scale = (_single(calls, given[name]) for name in ("grad_out", "input", "rstd"))
    wanted = given.get("output_mask") or [True, True]
    axes = len(given["normalized_shape"])
    rank = len(data.meta.sizes)
    normal = calls.one("aten::mul.Tensor", self=data, other=scale)
    weighted = (
        grad
        if given.get("weight") is None
        else calls.one("aten::mul.Tensor", self=grad, other=_single(calls, given["weight"]))
    )
    if wanted[0]:
        along = calls.one(
            "aten::mean.dim",
            self=calls.one("aten::mul.Tensor", self=weighted, other=normal),
            dim=list(range(rank - axes, rank)),
            keepdim=True,
        )
        left = calls.one(
            "aten::sub.Tensor", self=weighted, other=calls.one("aten::mul.Tensor", self=normal, other=along)
        )
        _fill(calls, results, calls.one("aten::mul.Tensor", self=left, other=scale))
    if wanted[1] and given.get("weight") is not None:
        each = calls.one("aten::mul.Tensor", self=grad, other=normal)
        if rank > axes:
            each = calls.one("aten::sum.dim_IntList", self=each, dim=list(range(rank - axes)))
        _fill(calls, (results or [])[1:], each)


FUSED: dict[str, Any] = {
    **{f"aten::{name}.dtype": product(f"aten::{name}") for name in ("mm", "bmm", "addmm", "baddbmm")},
    "aten::_masked_scale": masked_scale,
    "aten::_thnn_fused_lstm_cell": lstm_cell,
    "aten::_thnn_fused_gru_cell": gru_cell,
    "aten::_fused_rms_norm_backward": rms_norm_backward,
}


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

    def __init__(self, calls: RewrittenCalls, given: Given, bias: Tensor | None) -> None:
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


def _forward(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
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


def _backward(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
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

    def checked(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
        if any(given.get(name) is not None for name in _PACKED):
            raise CannotRewrite("attention of sequences that are packed together")
        rule(calls, given, results)

    return checked


def _length_first(rule: Any) -> Any:
    """A rule for [batch, heads, length, width] as one for kernels that have [batch, length, heads, width]; of keys they
    may have fewer heads, and causal ones may be aligned at the last key."""

    def rearranged(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
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


def _deliver(calls: RewrittenCalls, given: Given, recorded: Any, content: Tensor) -> None:
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


def _attention(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    """AITER's as xDiT calls it. What is given beside queries, keys and values (a place for the result, a bias) has no
    equal."""
    if any(value is not None for name, value in given.items() if name.startswith("extra_")):
        raise CannotRewrite("aiter::fmha_v3_fwd with more than queries, keys and values")
    if given["return_dropout_randval"]:
        raise CannotRewrite("aiter::fmha_v3_fwd that returns the random numbers of its dropout")
    ATTENTION["aten::_flash_attention_forward"](
        calls,
        {
            "query": given["q"],
            "key": given["k"],
            "value": given["v"],
            "dropout_p": given["dropout_p"],
            "is_causal": given["is_causal"],
            "scale": given["softmax_scale"],
            "window_size_left": given["window_size_left"],
            "window_size_right": given["window_size_right"],
        },
        results,
    )


def _group_norm(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    calls.call(
        "aten::group_norm",
        {**{name: given[name] for name in ("input", "num_groups", "weight", "bias", "eps")}, "cudnn_enabled": False},
        results,
    )


FOREIGN: dict[str, Any] = {"aiter::fmha_v3_fwd": _attention, "aiter::_groupnorm_run": _group_norm}


Rule = Callable[[RewrittenCalls, Given, Recorded], Any]


class Portable:
    """Rewrites calls, one at a time. Layers make the same calls again: each is tried without data once."""

    def __init__(self) -> None:
        self._trials = Trials()

    def rewrite(
        self, kernel: Kernel, arguments: Arguments, results: Recorded, step: Iteration | None = None
    ) -> Rewritten | str | None:
        """The replacement of a call; None if the operator is on every device; a sentence if it has no replacement.

        `results` are the recorded ones, None if they are unknown; `step` is the serving engine's that it is in.
        """
        given = dict(arguments)
        rule = _RULES.get(kernel.name) or _RULES.get(kernel.qualified_name)
        tensors = tensors_in([value for _name, value in arguments])
        if rule is None:
            pinned = _without_pinning(kernel, arguments, results)
            return _foreign(kernel) if pinned is None else pinned
        if not tensors:
            return f"{kernel.qualified_name}: a call without tensors"
        calls = RewrittenCalls(tensors[0], step, self._trials)
        try:
            rule(calls, given, results)
        except CannotRewrite as error:
            return str(error)
        except KeyError as error:
            return f"{kernel.qualified_name}: the trace does not have its argument {error}"
        instead = " + ".join(dict.fromkeys(made.name for made, _given, _results in calls.made))
        return Rewritten(calls.made, "portable", "; ".join([f"{kernel.name} by {instead}", *calls.assumed]))

    def alone(self, name: str, described: str, tensors: Sequence[Tensor]) -> Rewritten:
        """A collective over one rank changes nothing: it is replaced with an alias of each tensor."""
        calls = RewrittenCalls(tensors[0])
        for tensor in tensors:
            calls.call("aten::alias", {"self": tensor}, [tensor])
        return Rewritten(calls.made, "portable", f"{name} by aten::alias: {described}, which changes nothing")


_EVERYWHERE = (
    "CPU",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "SparseCPU",
    "SparseCsrCPU",
    "QuantizedCPU",
    "NestedTensorCPU",
    "CompositeImplicitAutogradNestedTensor",
)


@lru_cache(maxsize=4096)
def _foreign(kernel: Kernel) -> str | None:
    """That an operator of PyTorch's own stays though this PyTorch has no kernel of it for a CPU, None if it has."""
    name = kernel.name if kernel.overload == "default" else kernel.qualified_name
    if not kernel.name.startswith("aten::"):
        return None
    try:
        known = any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in _EVERYWHERE)
    except RuntimeError:
        return None
    return None if known else f"{kernel.qualified_name}: no replacement is known, and there is no kernel for a CPU"


def _without_pinning(kernel: Kernel, arguments: Arguments, results: Recorded) -> Rewritten | None:
    """Page-locked memory exists only beside an accelerator; what is in it is the same in any memory."""
    if kernel.name in ("aten::pin_memory", "aten::_pin_memory"):
        given = dict(arguments)
        calls = RewrittenCalls(given["self"])
        calls.call("aten::clone", {"self": given["self"]}, results)
        return Rewritten(calls.made, "portable", f"{kernel.name} by aten::clone")
    if any(name == "pin_memory" and value is True for name, value in arguments):
        kept = [(name, False if name == "pin_memory" else value) for name, value in arguments]
        return Rewritten([(kernel, kept, results)], "portable", f"{kernel.name} without pin_memory")
    return None


# -------------------------------------------------------------------------------------------------------- normalization


def _batch_norm(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    calls.call(
        "aten::native_batch_norm",
        {
            **{name: given[name] for name in ("input", "weight", "bias", "running_mean", "running_var", "training")},
            "momentum": given["exponential_average_factor"],
            "eps": given["epsilon"],
        },
        None if results is None else results[:3],
    )
    for reserve in (results or ())[3:]:
        calls.allocate(reserve)  # cuDNN's own notes for its backward pass: the portable one reads none


def _batch_norm_backward(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    calls.call(
        "aten::native_batch_norm_backward",
        {
            "grad_out": given["grad_output"],
            **{name: given.get(name) for name in ("input", "weight", "running_mean", "running_var", "save_mean")},
            "save_invstd": given.get("save_var"),
            "train": True,
            "eps": given["epsilon"],
            "output_mask": [True, True, True],
        },
        results,
    )


# --------------------------------------------------------------------------------------------------------- convolution


def _convolve(calls: RewrittenCalls, given: Given, results: Recorded, **changes: Any) -> list[Any]:
    padding = given["padding"]
    return calls.call(
        "aten::convolution",
        {
            "input": given["self"],
            "weight": given["weight"],
            "bias": given.get("bias"),
            "stride": given["stride"],
            "padding": padding,
            "dilation": given["dilation"],
            "transposed": False,
            "output_padding": [0] * len(padding),
            "groups": given.get("groups"),
            **changes,
        },
        results,
    )


def _convolution_transpose(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    _convolve(calls, given, results, transposed=True, output_padding=given["output_padding"])


def _convolution_depthwise(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    _convolve(calls, given, results, groups=given["self"].meta.sizes[1])


def _convolution_overrideable(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    calls.call("aten::convolution", given, results)


def _convolution_relu(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    (convolved,) = _convolve(calls, given, None)
    calls.call("aten::relu", {"self": convolved}, results)


def _convolution_add_relu(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    (convolved,) = _convolve(calls, given, None)
    alpha = given.get("alpha")
    added = calls.one("aten::add.Tensor", self=convolved, other=given["z"], alpha=1 if alpha is None else alpha)
    calls.call("aten::relu", {"self": added}, results)


# ------------------------------------------------------------------------------------------------------------ sampling


_SAMPLING = {"interpolation_mode": 0, "padding_mode": 0, "align_corners": True}


def _grid_sampler(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    calls.call("aten::grid_sampler_2d", {"input": given["self"], "grid": given["grid"], **_SAMPLING}, results)


def _grid_sampler_backward(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
    tensors = {"grad_output": given["grad_output"], "input": given["self"], "grid": given["grid"]}
    calls.call("aten::grid_sampler_2d_backward", tensors | _SAMPLING | {"output_mask": [True, True]}, results)


def _affine_grid(name: str, data: str) -> Rule:
    """cuDNN's affine grid, or its backward pass."""

    def rule(calls: RewrittenCalls, given: Given, results: Recorded) -> None:
        size = [given[each] for each in "NCHW"]
        calls.call(f"aten::{name}", {data: given[data], "size": size, "align_corners": True}, results)

    return rule


_RULES: dict[str, Rule] = {
    "aten::cudnn_batch_norm": _batch_norm,
    "aten::cudnn_batch_norm_backward": _batch_norm_backward,
    "aten::miopen_batch_norm": _batch_norm,
    "aten::miopen_batch_norm_backward": _batch_norm_backward,
    "aten::cudnn_convolution": _convolve,
    "aten::cudnn_convolution_transpose": _convolution_transpose,
    "aten::cudnn_convolution_relu": _convolution_relu,
    "aten::cudnn_convolution_add_relu": _convolution_add_relu,
    "aten::miopen_convolution": _convolve,
    "aten::miopen_convolution_transpose": _convolution_transpose,
    "aten::miopen_convolution_relu": _convolution_relu,
    "aten::miopen_convolution_add_relu": _convolution_add_relu,
    "aten::miopen_depthwise_convolution": _convolve,
    "aten::mkldnn_convolution": _convolve,
    "aten::_conv_depthwise2d": _convolution_depthwise,
    "aten::conv_depthwise3d": _convolution_depthwise,
    "aten::convolution_overrideable": _convolution_overrideable,
    "aten::cudnn_grid_sampler": _grid_sampler,
    "aten::cudnn_grid_sampler_backward": _grid_sampler_backward,
    "aten::cudnn_affine_grid_generator": _affine_grid("affine_grid_generator", "theta"),
    "aten::cudnn_affine_grid_generator_backward": _affine_grid("affine_grid_generator_backward", "grad"),
    **ATTENTION,
    **FUSED,
    **FOREIGN,
    **ENGINES,
}
