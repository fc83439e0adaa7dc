"""Low-rank adapters (LoRA) of several requests at once: each token has the adapter that its index names, or none, which
is an index below zero. Compositions for engines.py.

To shrink is to multiply a token with its adapter's first matrix, to expand with its second one. Adapters are [adapters,
rows, columns], some with a dimension of one in between; `slices` are products that share a token, as of queries, keys
and values.
"""

from __future__ import annotations

from typing import Any

from replayfmt.format.codes import DType

from .rewriting import Given, RewrittenCalls, Value, renamed


def _product(data: Value, weights: Value, indices: Value) -> Any:
    """Each token times the matrix of its adapter, in float32; any where it has none."""
    own = indices.to(DType.int64).clamp(0)
    matrices = weights.reshape([weights.sizes[0], *weights.sizes[-2:]]).index_select(0, own).single()
    return matrices.bmm(data.single().unsqueeze(2)).squeeze(2)


def _there(indices: Value) -> Any:
    """Whether each token has an adapter, for its row."""
    return (indices >= 0).unsqueeze(1)


def _indices(calls: RewrittenCalls, given: Given) -> Any:
    """The index of each token's adapter; where that of each sequence is given, with the sequence's length."""
    indices = given["indices"]
    if given.get("lengths") is None:
        return indices
    ends = given["lengths"].to(DType.int64).cumsum(0)
    of = ends.searchsorted(calls.count(given["data"].sizes[-2]), right=True).clamp(0, indices.sizes[0] - 1)
    return indices.index_select(0, of)


def shrink(*, zeros: bool) -> Any:
    """Products of all slices, times a factor. A token without an adapter becomes zeros, or stays as it is."""

    def rule(calls: RewrittenCalls, given: Given) -> None:
        weights, out = given["weights"], given["out"]
        indices, several = _indices(calls, given), isinstance(weights, list)
        if not zeros:  # kernels add the parts of a product that they split
            calls.assumed.append("zeros before")
        for place, each in enumerate(weights if several else [weights]):
            target = (out.select(0, place) if several else out).part(1, 0, each.sizes[-2])
            made = (_product(given["data"], each, indices) * given.get("scaling", 1.0)).to(out.dtype)
            other = made.zeros_like() if zeros else target
            target.copy_(_there(indices).where(made, other))

    return rule


def expand(calls: RewrittenCalls, given: Given) -> None:
    """Products to the columns from an offset on, slice by slice, or added to them."""
    weights, out, begin = given["weights"], given["out"], given.get("offset") or 0
    indices, several = _indices(calls, given), isinstance(weights, list)
    for place, each in enumerate(weights if several else [weights]):
        data, columns = given["data"].select(0, place) if several else given["data"], each.sizes[-2]
        target = out.part(1, begin, begin + columns)
        begin += columns
        made = _product(data, each, indices)
        if given.get("add_inputs"):
            made = made + target.single()
        made = made.to(out.dtype)
        target.copy_(_there(indices).where(made, target))


_NAMES = {"inputs": "data", "output_tensor": "out", "lora_a_weights": "weights", "lora_b_weights": "weights"}
_NAMES |= {"token_lora_mapping": "indices", "lora_indices_tensor": "indices", "seq_len_tensor": "lengths"}
_NAMES |= {"offset_start": "offset", "slice_offset": "offset"}
RULES: tuple[tuple[Any, str], ...] = (
    (renamed(shrink(zeros=True), _NAMES), "vllm::lora_shrink"),
    (renamed(shrink(zeros=False), _NAMES), "vllm::bgmv_shrink vllm::sgmv_shrink"),
    (renamed(expand, _NAMES), "vllm::lora_expand vllm::bgmv_expand vllm::bgmv_expand_slice vllm::sgmv_expand"),
)
