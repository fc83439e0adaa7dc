"""Operators of accelerator libraries that PyTorch's own operators can replace, even if the library is not installed.
Their schemas are listed here because they are not registered; a trace's recorded arguments must fit.
"""

from __future__ import annotations

from typing import Any

from .attention import ATTENTION
from .engines import ENGINE_SCHEMAS
from .rewriting import CannotRewrite, RewrittenCalls

# By operator name. AITER's attention as xDiT calls it: [batch, length, heads, width], and its group norm.
SCHEMAS = ENGINE_SCHEMAS | {
    "aiter::fmha_v3_fwd": (
        "aiter::fmha_v3_fwd(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool is_causal, "
        "int window_size_left, int window_size_right, bool return_softmax_lse, bool return_dropout_randval, "
        "int how_v3_bf16_cvt, Tensor? extra_0=None, Tensor? extra_1=None, Tensor? extra_2=None, Tensor? extra_3=None, "
        "Tensor? extra_4=None, Tensor? extra_5=None, Tensor? extra_6=None) -> Tensor[]"
    ),
    "aiter::_groupnorm_run": (
        "aiter::_groupnorm_run(Tensor input, int num_groups, Tensor? weight, Tensor? bias, float eps) -> Tensor"
    ),
}


def _attention(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
    """What is given beside queries, keys and values (a place for the result, a bias) has no equal."""
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


def _group_norm(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
    calls.call(
        "aten::group_norm",
        {**{name: given[name] for name in ("input", "num_groups", "weight", "bias", "eps")}, "cudnn_enabled": False},
        results,
    )


FOREIGN: dict[str, Any] = {"aiter::fmha_v3_fwd": _attention, "aiter::_groupnorm_run": _group_norm}
