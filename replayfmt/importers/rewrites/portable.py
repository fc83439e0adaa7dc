"""Replaces operators that only the traced device has with operators that every device has: `--rewrite=portable`.

Each rewriting computes the same results, including those that only a backward pass reads (saved means, logarithms of
sums), to the accuracy of another implementation; each is reported and noted in the capture. Operators without an
equivalent (dropout inside an attention kernel), or without a replacement here, stay as they are, with the reason. Fused
attention is in attention.py, other fused operators in fused.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from replayfmt.format.model import Kernel

from ..common.values import Tensor
from .attention import ATTENTION
from .engines import ENGINES
from .foreign import FOREIGN
from .fused import FUSED
from .rewriting import Arguments, CannotRewrite, Rewritten, RewrittenCalls, tensors_in

REWRITES = ("portable",)

Rule = Callable[[RewrittenCalls, dict[str, Any], "list[Any] | None"], None]


class Portable:
    """Rewrites calls, one at a time."""

    def rewrite(self, kernel: Kernel, arguments: Arguments, results: list[Any] | None) -> Rewritten | str | None:
        """The replacement of a call; None if the operator is on every device; a sentence if it has no replacement.

        `results` are the recorded ones, None if they are unknown.
        """
        given = dict(arguments)
        rule = _RULES.get(kernel.name) or _RULES.get(kernel.qualified_name)
        tensors = tensors_in([value for _name, value in arguments])
        if rule is None:
            pinned = _without_pinning(kernel, arguments, results)
            return _foreign(kernel) if pinned is None else pinned
        if not tensors:
            return f"{kernel.qualified_name}: a call without tensors"
        calls = RewrittenCalls(tensors[0])
        try:
            rule(calls, given, results)
        except CannotRewrite as error:
            return str(error)
        except KeyError as error:
            return f"{kernel.qualified_name}: the trace does not have its argument {error}"
        instead = " + ".join(dict.fromkeys(made.name for made, _given, _results in calls.made))
        return Rewritten(calls.made, "portable", f"{kernel.name} by {instead}")

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


def _without_pinning(kernel: Kernel, arguments: Arguments, results: list[Any] | None) -> Rewritten | None:
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


def _batch_norm(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
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


def _batch_norm_backward(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
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


def _convolve(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None, **changes: Any) -> list[Any]:
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


def _convolution(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
    _convolve(calls, given, results)


def _convolution_transpose(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
    _convolve(calls, given, results, transposed=True, output_padding=given["output_padding"])


def _convolution_depthwise(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
    _convolve(calls, given, results, groups=given["self"].meta.sizes[1])


def _convolution_overrideable(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
    calls.call("aten::convolution", given, results)


def _convolution_relu(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
    (convolved,) = _convolve(calls, given, None)
    calls.call("aten::relu", {"self": convolved}, results)


def _convolution_add_relu(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
    (convolved,) = _convolve(calls, given, None)
    alpha = given.get("alpha")
    added = calls.one("aten::add.Tensor", self=convolved, other=given["z"], alpha=1 if alpha is None else alpha)
    calls.call("aten::relu", {"self": added}, results)


# ------------------------------------------------------------------------------------------------------------ sampling


def _grid_sampler(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
    calls.call(
        "aten::grid_sampler_2d",
        {
            "input": given["self"],
            "grid": given["grid"],
            "interpolation_mode": 0,
            "padding_mode": 0,
            "align_corners": True,
        },
        results,
    )


def _grid_sampler_backward(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
    calls.call(
        "aten::grid_sampler_2d_backward",
        {
            "grad_output": given["grad_output"],
            "input": given["self"],
            "grid": given["grid"],
            "interpolation_mode": 0,
            "padding_mode": 0,
            "align_corners": True,
            "output_mask": [True, True],
        },
        results,
    )


def _affine_grid(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
    calls.call(
        "aten::affine_grid_generator",
        {"theta": given["theta"], "size": [given[name] for name in "NCHW"], "align_corners": True},
        results,
    )


_RULES: dict[str, Rule] = {
    "aten::cudnn_batch_norm": _batch_norm,
    "aten::cudnn_batch_norm_backward": _batch_norm_backward,
    "aten::miopen_batch_norm": _batch_norm,
    "aten::miopen_batch_norm_backward": _batch_norm_backward,
    "aten::cudnn_convolution": _convolution,
    "aten::cudnn_convolution_transpose": _convolution_transpose,
    "aten::cudnn_convolution_relu": _convolution_relu,
    "aten::cudnn_convolution_add_relu": _convolution_add_relu,
    "aten::miopen_convolution": _convolution,
    "aten::miopen_convolution_transpose": _convolution_transpose,
    "aten::miopen_convolution_relu": _convolution_relu,
    "aten::miopen_convolution_add_relu": _convolution_add_relu,
    "aten::miopen_depthwise_convolution": _convolution,
    "aten::mkldnn_convolution": _convolution,
    "aten::_conv_depthwise2d": _convolution_depthwise,
    "aten::conv_depthwise3d": _convolution_depthwise,
    "aten::convolution_overrideable": _convolution_overrideable,
    "aten::cudnn_grid_sampler": _grid_sampler,
    "aten::cudnn_grid_sampler_backward": _grid_sampler_backward,
    "aten::cudnn_affine_grid_generator": _affine_grid,
    **ATTENTION,
    **FUSED,
    **FOREIGN,
    **ENGINES,
}
