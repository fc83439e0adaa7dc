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
from .rewriting import Arguments, CannotRewrite, Given, Recorded, Rewritten, RewrittenCalls, Value, tensors_in

Rule = Callable[[RewrittenCalls, Given], Any]
_LOW = frozenset({DType.float16, DType.bfloat16, DType.float8_e4m3fn, DType.float8_e5m2})


def _single(tensor: Value) -> Any:
    """The tensor in float32 if its dtype is less precise."""
    return tensor.single() if tensor.dtype in _LOW else tensor


def product(name: str) -> Rule:
    """A rule for a matrix product that accumulates into another dtype: its factors are cast to that first."""

    def rule(calls: RewrittenCalls, given: Given) -> None:
        dtype = given.pop("out_dtype")
        cast = {key: each.to(dtype) if isinstance(each, Value) else each for key, each in given.items()}
        calls.call(name, cast, calls.results)

    return rule


def masked_scale(calls: RewrittenCalls, given: Given) -> None:
    """`_masked_scale`: the backward pass of dropout."""
    masked = given["self"] * given["mask"]
    calls.call("aten::mul.Scalar", {"self": masked, "other": given["scale"]}, calls.results)


def _part(tensor: Value, place: int, width: int) -> Any:
    return tensor.slice(dim=1, start=place * width, end=(place + 1) * width)


def _biased(given: Given, name: str) -> Any:
    gates, bias = _single(given[f"{name}_gates"]), given.get(f"{name}_bias")
    return gates if bias is None else gates + _single(bias)


def lstm_cell(calls: RewrittenCalls, given: Given) -> None:
    """`_thnn_fused_lstm_cell`: hidden state, cell state, and the gates for the backward pass."""
    before = _single(given["cx"])
    gates, width = _biased(given, "input") + _biased(given, "hidden"), before.sizes[1]
    takes, keeps = (_part(gates, place, width).sigmoid() for place in range(2))
    new, shows = _part(gates, 2, width).tanh(), _part(gates, 3, width).sigmoid()
    cell = keeps * before + takes * new
    calls.deliver(shows * cell.tanh(), cell, calls.cat([takes, keeps, new, shows], 1))


def gru_cell(calls: RewrittenCalls, given: Given) -> None:
    """`_thnn_fused_gru_cell`: hidden state, and what the backward pass reads."""
    before = _single(given["hx"])
    width = before.sizes[1]
    taken, held = _biased(given, "input"), _biased(given, "hidden")
    resets, updates = ((_part(taken, place, width) + _part(held, place, width)).sigmoid() for place in range(2))
    last = _part(held, 2, width)
    new = (_part(taken, 2, width) + resets * last).tanh()
    change = updates * (before - new)
    calls.deliver(new + change, calls.cat([resets, updates, new, before, last], 1))


def rms_norm_backward(calls: RewrittenCalls, given: Given) -> None:
    """`_fused_rms_norm_backward`."""
    grad, data, scale = (_single(given[name]) for name in ("grad_out", "input", "rstd"))
    wanted, weight = given.get("output_mask") or [True, True], given.get("weight")
    rank = len(data.sizes)
    outer = rank - len(given["normalized_shape"])
    normal = data * scale
    weighted = grad if weight is None else grad * _single(weight)
    if wanted[0]:
        along = (weighted * normal).mean(list(range(outer, rank)), True)
        calls.deliver((weighted - normal * along) * scale)
    if wanted[1] and weight is not None:
        each = grad * normal
        calls.fill((calls.results or [None, None])[1], each.sum(list(range(outer))) if outer else each)


FUSED: dict[str, Rule] = {
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
    """One call's tensors and numbers, and the scores computed from them, which are the input of the softmax."""

    def __init__(self, given: Given, bias: Value | None) -> None:
        others = [name for name, unset in _OTHERS.items() if given.get(name) not in unset]
        if others:
            raise CannotRewrite(f"attention with {', '.join(others)}")
        if given.get("dropout_p"):
            raise CannotRewrite("attention with dropout draws its random numbers inside of the fused kernel")
        query, key, value = given["query"], given["key"], given["value"]
        if any(len(each.sizes) != 4 for each in (query, key, value)):
            raise CannotRewrite("attention of tensors that are not [batch, heads, length, width]")
        if query.sizes[1] != key.sizes[1]:
            raise CannotRewrite("attention with fewer heads of keys than of queries")
        queries, keys = query.sizes[2], key.sizes[2]
        # The diagonal that queries see up to: by the first key, or by the last one.
        diagonal = int(given.get("diagonal", 0 if queries == keys else -1))
        if given.get("is_causal") and diagonal < 0:
            raise CannotRewrite("causal attention of queries and keys of different lengths")
        scale = given.get("scale")
        self.scale = 1 / math.sqrt(query.sizes[3]) if scale is None else float(scale)
        self.query, self.key, self.value = (_single(each) for each in (query, key, value))
        self.scores = self.query @ _transposed(self.key) * self.scale
        if bias is not None:
            self.scores = self.scores + _single(bias)
        if given.get("is_causal"):
            later = self.scores.new_ones([queries, keys], dtype=DType.bool).triu(1 + diagonal)
            self.scores = self.scores.masked_fill(later, -math.inf)


def _transposed(tensor: Any) -> Any:
    return tensor.transpose(-2, -1)


def _logarithms(calls: RewrittenCalls, recorded: Any, scores: Any) -> None:
    """Produce the logarithms of the softmax's denominators; some kernels pad them, or leave them out."""
    if not isinstance(recorded, Tensor) or 0 in recorded.meta.sizes:
        calls.allocate(recorded)
        return
    sums = scores.logsumexp([-1])
    calls.allocate(recorded, zeros=True)
    target, sizes = calls.wrapped(recorded), recorded.meta.sizes
    if len(sizes) == 4 and sizes[-1] == 1:
        sums = sums.unsqueeze(-1)
    elif sizes[-1] != sums.sizes[-1]:
        target = target.slice(-1, 0, sums.sizes[-1])
    if target.sizes != sums.sizes:
        raise CannotRewrite(f"logarithms of sums with the sizes {list(sizes)}")
    target.copy_(sums)


def _forward(calls: RewrittenCalls, given: Given) -> None:
    attention = _Attention(given, given.get("attn_bias", given.get("bias")))
    output = attention.scores._softmax(-1, False) @ attention.value
    if calls.results is None:
        return
    _deliver(calls, given, calls.results[0], output)
    if len(calls.results) > 1:
        _logarithms(calls, calls.results[1], attention.scores)
    for other in calls.results[2:]:
        calls.allocate(other, zeros=True)  # states of random generators that nothing was drawn from


def _backward(calls: RewrittenCalls, given: Given) -> None:
    grad = given.get("grad_out", given.get("grad_out_"))
    assert grad is not None
    wanted = given.get("grad_input_mask") or [True, True, True, False]
    bias = given.get("attn_bias", given.get("bias"))
    if bias is not None and (given.get("bias_requires_grad") or (len(wanted) > 3 and wanted[3])):
        raise CannotRewrite("the gradient of attention's bias")
    attention = _Attention(given, bias)
    sums = given["logsumexp"]
    if sums.sizes[-1] == 1 and len(sums.sizes) == 4:
        sums = sums.squeeze(-1)
    if sums.sizes[-1] != attention.query.sizes[2]:
        sums = sums.slice(-1, 0, attention.query.sizes[2])
    sums = sums.unsqueeze(-1)
    weights = (attention.scores - sums).exp()
    grad, output = _single(grad), _single(given["out"])
    grad_value = _transposed(weights) @ grad
    grad_weights = grad @ _transposed(attention.value)
    correction = (grad * output).sum([-1], True)
    scaled = weights * (grad_weights - correction) * attention.scale
    grad_query = scaled @ attention.key
    grad_key = _transposed(scaled) @ attention.query
    for recorded, content in zip(calls.results or (), (grad_query, grad_key, grad_value), strict=False):
        _deliver(calls, given, recorded, content)
    for recorded in (calls.results or ())[3:]:
        calls.allocate(recorded, zeros=True)


def _unpacked(rule: Rule) -> Rule:
    """Refuses packed sequences: their lengths are content."""

    def checked(calls: RewrittenCalls, given: Given) -> None:
        if any(given.get(name) is not None for name in _PACKED):
            raise CannotRewrite("attention of sequences that are packed together")
        rule(calls, given)

    return checked


def _length_first(rule: Rule) -> Rule:
    """A rule for [batch, heads, length, width] as one for kernels that have [batch, length, heads, width]; of keys they
    may have fewer heads, and causal ones may be aligned at the last key."""

    def rearranged(calls: RewrittenCalls, given: Given) -> None:
        turned = dict(given)
        for name, each in given.items():
            if name in ("query", "key", "value", "out", "grad_out", "grad_out_") and isinstance(each, Value):
                turned[name] = each.transpose(1, 2) if len(each.sizes) == 4 else each
        query, key, value = (given[name].sizes for name in ("query", "key", "value"))
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
                turned[name] = turned[name].repeat_interleave(shared, 1)
        rule(calls, turned | {"length_first": True})

    return rearranged


def _deliver(calls: RewrittenCalls, given: Given, recorded: Any, content: Any) -> None:
    """Produce a recorded result from content that was computed with the heads first."""
    calls.fill(recorded, content.transpose(1, 2) if given.get("length_first") else content)


ATTENTION: dict[str, Rule] = {
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


def _attention(calls: RewrittenCalls, given: Given) -> None:
    """AITER's as xDiT calls it. What is given beside queries, keys and values (a place for the result, a bias) has no
    equal."""
    if any(value is not None for name, value in given.items() if name.startswith("extra_")):
        raise CannotRewrite("aiter::fmha_v3_fwd with more than queries, keys and values")
    if given["return_dropout_randval"]:
        raise CannotRewrite("aiter::fmha_v3_fwd that returns the random numbers of its dropout")
    names = {"q": "query", "k": "key", "v": "value", "softmax_scale": "scale"}
    same = ("dropout_p", "is_causal", "window_size_left", "window_size_right")
    arguments = {names.get(name, name): given[name] for name in (*names, *same)}
    ATTENTION["aten::_flash_attention_forward"](calls, arguments)


def _group_norm(calls: RewrittenCalls, given: Given) -> None:
    same = {name: given[name] for name in ("input", "num_groups", "weight", "bias", "eps")}
    calls.call("aten::group_norm", same | {"cudnn_enabled": False}, calls.results)


FOREIGN: dict[str, Rule] = {"aiter::fmha_v3_fwd": _attention, "aiter::_groupnorm_run": _group_norm}


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
        rule = _RULES.get(kernel.name) or _RULES.get(kernel.qualified_name)
        tensors = tensors_in([value for _name, value in arguments])
        if rule is None:
            pinned = _without_pinning(kernel, arguments, results)
            return _foreign(kernel) if pinned is None else pinned
        if not tensors:
            return f"{kernel.qualified_name}: a call without tensors"
        calls = RewrittenCalls(tensors[0], results, step, self._trials)
        try:
            rule(calls, {name: calls.wrapped(value) for name, value in arguments})
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


def _batch_norm(calls: RewrittenCalls, given: Given) -> None:
    same = {name: given[name] for name in ("input", "weight", "bias", "running_mean", "running_var", "training")}
    numbers = {"momentum": given["exponential_average_factor"], "eps": given["epsilon"]}
    results = None if calls.results is None else calls.results[:3]
    calls.call("aten::native_batch_norm", same | numbers, results)
    for reserve in (calls.results or ())[3:]:
        calls.allocate(reserve)  # cuDNN's own notes for its backward pass: the portable one reads none


def _batch_norm_backward(calls: RewrittenCalls, given: Given) -> None:
    same = {name: given.get(name) for name in ("input", "weight", "running_mean", "running_var", "save_mean")}
    arguments = {"grad_out": given["grad_output"], **same, "save_invstd": given.get("save_var"), "train": True}
    arguments |= {"eps": given["epsilon"], "output_mask": [True, True, True]}
    calls.call("aten::native_batch_norm_backward", arguments, calls.results)


def _convolve(calls: RewrittenCalls, given: Given, results: Recorded, **changes: Any) -> list[Any]:
    arguments = {
        "input": given["self"],
        "weight": given["weight"],
        "bias": given.get("bias"),
        "stride": given["stride"],
        "padding": given["padding"],
        "dilation": given["dilation"],
        "transposed": False,
        "output_padding": [0] * len(given["padding"]),
        "groups": given.get("groups"),
    }
    return calls.call("aten::convolution", arguments | changes, results)


def _convolution(calls: RewrittenCalls, given: Given) -> None:
    _convolve(calls, given, calls.results)


def _convolution_transpose(calls: RewrittenCalls, given: Given) -> None:
    _convolve(calls, given, calls.results, transposed=True, output_padding=given["output_padding"])


def _convolution_depthwise(calls: RewrittenCalls, given: Given) -> None:
    _convolve(calls, given, calls.results, groups=given["self"].sizes[1])


def _convolution_overrideable(calls: RewrittenCalls, given: Given) -> None:
    calls.call("aten::convolution", given, calls.results)


def _convolution_relu(calls: RewrittenCalls, given: Given) -> None:
    """Also of the sum with `z`."""
    (convolved,) = _convolve(calls, given, None)
    if "z" in given:
        alpha = 1 if given.get("alpha") is None else given["alpha"]
        convolved = calls.one("aten::add.Tensor", self=convolved, other=given["z"], alpha=alpha)
    calls.call("aten::relu", {"self": convolved}, calls.results)


_SAMPLING = {"interpolation_mode": 0, "padding_mode": 0, "align_corners": True}


def _grid_sampler(calls: RewrittenCalls, given: Given) -> None:
    calls.call("aten::grid_sampler_2d", {"input": given["self"], "grid": given["grid"], **_SAMPLING}, calls.results)


def _grid_sampler_backward(calls: RewrittenCalls, given: Given) -> None:
    tensors = {"grad_output": given["grad_output"], "input": given["self"], "grid": given["grid"]}
    calls.call("aten::grid_sampler_2d_backward", tensors | _SAMPLING | {"output_mask": [True, True]}, calls.results)


def _affine_grid(name: str, data: str) -> Rule:
    """cuDNN's affine grid, or its backward pass."""

    def rule(calls: RewrittenCalls, given: Given) -> None:
        size = [given[each] for each in "NCHW"]
        calls.call(f"aten::{name}", {data: given[data], "size": size, "align_corners": True}, calls.results)

    return rule


_RULES: dict[str, Rule] = {
    "aten::cudnn_batch_norm": _batch_norm,
    "aten::cudnn_batch_norm_backward": _batch_norm_backward,
    "aten::miopen_batch_norm": _batch_norm,
    "aten::miopen_batch_norm_backward": _batch_norm_backward,
    "aten::cudnn_convolution": _convolution,
    "aten::cudnn_convolution_transpose": _convolution_transpose,
    "aten::cudnn_convolution_relu": _convolution_relu,
    "aten::cudnn_convolution_add_relu": _convolution_relu,
    "aten::miopen_convolution": _convolution,
    "aten::miopen_convolution_transpose": _convolution_transpose,
    "aten::miopen_convolution_relu": _convolution_relu,
    "aten::miopen_convolution_add_relu": _convolution_relu,
    "aten::miopen_depthwise_convolution": _convolution,
    "aten::mkldnn_convolution": _convolution,
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
