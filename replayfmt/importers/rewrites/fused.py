"""Other fused operators that only accelerators have, as the steps that each fuses, in float32 as the kernels compute.

Matrix products with a different result dtype, recurrent cells, the backward pass of RMS norm, scaled masks.
"""

from __future__ import annotations

from typing import Any

from replayfmt.format.codes import DType

from ..common.values import Tensor
from .rewriting import RewrittenCalls

_LOW = frozenset({DType.float16, DType.bfloat16})


def _single(calls: RewrittenCalls, tensor: Tensor) -> Tensor:
    """The tensor in float32 if its dtype is less precise."""
    return calls.one("aten::_to_copy", self=tensor, dtype=DType.float32) if tensor.meta.dtype in _LOW else tensor


def _fill(calls: RewrittenCalls, results: list[Any] | None, *contents: Tensor) -> None:
    for recorded, content in zip(results or (), contents, strict=False):
        calls.fill(recorded, content)


def product(name: str) -> Any:
    """A rule for a matrix product that accumulates into another dtype: its factors are cast to that first."""

    def rule(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
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


def masked_scale(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
    """`_masked_scale`: the backward pass of dropout."""
    masked = calls.one("aten::mul.Tensor", self=given["self"], other=given["mask"])
    calls.call("aten::mul.Scalar", {"self": masked, "other": given["scale"]}, results)


def affine_grid_backward(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
    """cuDNN's backward pass of an affine grid."""
    calls.call(
        "aten::affine_grid_generator_backward",
        {"grad": given["grad"], "size": [given[name] for name in "NCHW"], "align_corners": True},
        results,
    )


def _part(calls: RewrittenCalls, tensor: Tensor, place: int, width: int) -> Tensor:
    return calls.one("aten::slice.Tensor", self=tensor, dim=1, start=place * width, end=(place + 1) * width)


def _biased(calls: RewrittenCalls, gates: Tensor, bias: Tensor | None) -> Tensor:
    gates = _single(calls, gates)
    return gates if bias is None else calls.one("aten::add.Tensor", self=gates, other=_single(calls, bias))


def lstm_cell(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
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


def gru_cell(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
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


def rms_norm_backward(calls: RewrittenCalls, given: dict[str, Any], results: list[Any] | None) -> None:
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
    "aten::cudnn_affine_grid_generator_backward": affine_grid_backward,
    "aten::_thnn_fused_lstm_cell": lstm_cell,
    "aten::_thnn_fused_gru_cell": gru_cell,
    "aten::_fused_rms_norm_backward": rms_norm_backward,
}
