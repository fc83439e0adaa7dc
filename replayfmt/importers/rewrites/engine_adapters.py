"""Low-rank adapters (LoRA) of several requests at once: each token has the adapter that its index names, or none, which
is an index below zero. Compositions for engines.py.

To shrink is to multiply a token with its adapter's first matrix, to expand with its second one. Adapters are [adapters,
rows, columns], some with a dimension of one in between; `slices` are products that share a token, as of queries, keys
and values.
"""

from __future__ import annotations

from typing import Any

from replayfmt.format.codes import DType

from ..common.synthesis import Tensor
from .rewriting import Given, Recorded, RewrittenCalls, renamed


def _product(calls: RewrittenCalls, data: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """Each token times the matrix of its adapter, in float32; any where it has none."""
    rows, columns = weights.meta.sizes[-2:]
    own = calls.one("aten::clamp", self=calls.cast(indices, DType.int64), min=0)
    matrices = calls.one("aten::reshape", self=weights, shape=[weights.meta.sizes[0], rows, columns])
    matrices = calls.single(calls.one("aten::index_select", self=matrices, dim=0, index=own))
    column = calls.one("aten::unsqueeze", self=calls.single(data), dim=2)
    made = calls.one("aten::bmm", self=matrices, mat2=column)
    return calls.one("aten::squeeze.dim", self=made, dim=2)


def _there(calls: RewrittenCalls, indices: Tensor) -> Tensor:
    """Whether each token has an adapter, for its row."""
    return calls.one("aten::unsqueeze", self=calls.one("aten::ge.Scalar", self=indices, other=0), dim=1)


def _by_sequence(calls: RewrittenCalls, given: Given) -> Tensor:
    """The index of each token's adapter, where that of each sequence is given, with the sequence's length."""
    indices, tokens = given["indices"], given["data"].meta.sizes[-2]
    ends = calls.one("aten::cumsum", self=calls.cast(given["lengths"], DType.int64), dim=0)
    of = calls.one("aten::searchsorted.Tensor", sorted_sequence=ends, self=calls.count(tokens), right=True)
    of = calls.one("aten::clamp", self=of, min=0, max=indices.meta.sizes[0] - 1)
    return calls.one("aten::index_select", self=indices, dim=0, index=of)


def shrink(*, zeros: bool) -> Any:
    """Products of all slices, times a factor. A token without an adapter becomes zeros, or stays as it is."""

    def rule(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
        weights, out = given["weights"], given["out"]
        indices = given["indices"] if given.get("lengths") is None else _by_sequence(calls, given)
        several = isinstance(weights, list)
        if not zeros:  # kernels add the parts of a product that they split
            calls.assumed.append("zeros before")
        for place, each in enumerate(weights if several else [weights]):
            target = calls.one("aten::select.int", self=out, dim=0, index=place) if several else out
            target = calls.slice(target, 1, 0, each.meta.sizes[-2])
            made = _product(calls, given["data"], each, indices)
            made = calls.cast(calls.one("aten::mul.Scalar", self=made, other=given.get("scaling", 1.0)), out.meta.dtype)
            other = calls.one("aten::zeros_like", self=made) if zeros else target
            calls.write(target, calls.one("aten::where.self", condition=_there(calls, indices), self=made, other=other))

    return rule


def expand(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    """Products to the columns from an offset on, slice by slice, or added to them."""
    weights, out, begin = given["weights"], given["out"], given.get("offset") or 0
    indices = given["indices"] if given.get("lengths") is None else _by_sequence(calls, given)
    several = isinstance(weights, list)
    for place, each in enumerate(weights if several else [weights]):
        data = calls.one("aten::select.int", self=given["data"], dim=0, index=place) if several else given["data"]
        columns = each.meta.sizes[-2]
        target = calls.slice(out, 1, begin, begin + columns)
        begin += columns
        made = _product(calls, data, each, indices)
        if given.get("add_inputs"):
            made = calls.one("aten::add.Tensor", self=made, other=calls.single(target))
        made = calls.cast(made, out.meta.dtype)
        calls.write(target, calls.one("aten::where.self", condition=_there(calls, indices), self=made, other=target))


_NAMES = {"inputs": "data", "output_tensor": "out", "lora_a_weights": "weights", "lora_b_weights": "weights"}
_NAMES |= {"token_lora_mapping": "indices", "lora_indices_tensor": "indices", "seq_len_tensor": "lengths"}
_NAMES |= {"offset_start": "offset", "slice_offset": "offset"}
RULES: tuple[tuple[Any, str], ...] = (
    (renamed(shrink(zeros=True), _NAMES), "vllm::lora_shrink"),
    (renamed(shrink(zeros=False), _NAMES), "vllm::bgmv_shrink vllm::sgmv_shrink"),
    (renamed(expand, _NAMES), "vllm::lora_expand vllm::bgmv_expand vllm::bgmv_expand_slice vllm::sgmv_expand"),
)
