"""Mixture of experts: which experts each token goes to, and the sorted form in which kernels want that.

Experts are drawn uniformly, or by Zipf's law (the i-th most popular expert has a weight of 1 / i ** exponent), which is
closer to what routers do; the experts of one token are distinct. In the sorted form the (token, expert) pairs of one
expert are adjacent, padded to whole blocks with a number that is not a pair.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from replayfmt.errors import UsageError

from ..demands import FLOATS, random_of
from ..initializer import Initializer, Request, first_integer, first_tensor

OPTION = "moe-routing"
DEFAULT_EXPONENT = 1.2
_IDS = ("topk_ids", "topk_indices", "expert_indices", "selected_experts")
_SORTED = ("sorted_token_ids", "sorted_ids", "sorted_token_ids_ptr")
_EXPERTS = ("expert_ids", "experts_ids", "sorted_expert_ids", "expert_ids_ptr")
_VALID = (
    "num_tokens_post_pad",
    "num_tokens_post_padded",
    "num_valid_ids",
    "num_tokens_post_pad_ptr",
    "num_tokens_past_padded",
)
_WEIGHTS = ("w1", "w13", "gate", "b_qweight", "b_q_weight", "w13_weight", "B", "w", "b")
_TOKENS = ("hidden_states", "input", "A", "a", "x")
_SHARES = ("topk_weights", "topk_weight", "expert_weights", "routing_weights")  # (tokens, experts of each)
_SORTED_SHARES = ("sorted_weights",)  # of each slot of the sorted form
_AITER_SHIFT = 24
_ROUTING = re.compile(r"uniform|zipf(?::([0-9]*\.?[0-9]+))?\Z")


@dataclass(frozen=True)
class Routing:
    """How experts are drawn: `exponent` of Zipf's law, None for uniformly."""

    exponent: float | None = None

    def __str__(self) -> str:
        return "uniform" if self.exponent is None else f"zipf, exponent {self.exponent:g}"


def parse_routing(text: str) -> Routing:
    """`uniform`, `zipf` or `zipf:EXPONENT`. Raises UsageError."""
    found = _ROUTING.fullmatch(text)
    if found is None:
        raise UsageError(f"--{OPTION}={text}: expected uniform, zipf (exponent {DEFAULT_EXPONENT}) or zipf:EXPONENT")
    if text == "uniform":
        return Routing()
    return Routing(float(found[1]) if found[1] else DEFAULT_EXPONENT)


def draw(tokens: int, experts: int, each: int, routing: Routing, random: np.random.Generator) -> np.ndarray:
    """Expert ids, `each` different ones for every token: (tokens, each). Without replacement by weight: the Gumbel
    maximum trick (W. Kool et al., "Stochastic Beams and Where to Find Them", 2019)."""
    weights = np.ones(experts) if routing.exponent is None else 1.0 / np.arange(1, experts + 1) ** routing.exponent
    popular = random.permutation(experts)  # which expert is the most popular one
    ids = np.empty((tokens, each), np.int64)
    step = max(1, (1 << 22) // max(experts, 1))
    for first in range(0, tokens, step):
        count = min(step, tokens - first)
        keys = np.log(weights) + random.gumbel(size=(count, experts))
        ids[first : first + count] = popular[np.argsort(-keys, axis=1)[:, :each]]
    return ids


def _routing(request: Request) -> Routing:
    return parse_routing(request.options.get(OPTION, "uniform"))


def _experts(request: Request) -> int | None:
    """How many experts there are: as an argument, or the first dimension of their weights."""
    for name in ("num_experts", "num_expert", "n_experts", "n_expert", "global_num_experts", "expert_num"):
        number = request.call.integer(name)
        if number is not None and number > 0:
            return number
    for name in _WEIGHTS:
        info = request.call.tensor(name)
        if info is not None and len(info.sizes) >= 3:
            return info.sizes[0]
    scores = request.call.tensor("gating_output")
    return scores.sizes[1] if scores is not None and len(scores.sizes) == 2 else None


def _fill_ids(request: Request) -> torch.Tensor:
    info, experts = request.tensor, _experts(request)
    assert experts is not None
    routing = _routing(request)
    request.note(f"{request.call.name}: {info.sizes[0]} tokens to {info.sizes[1]} of {experts} experts each, {routing}")
    ids = draw(info.sizes[0], experts, info.sizes[1], routing, random_of(request.seed))
    return torch.from_numpy(ids).to(info.dtype)


def _accepts_ids(request: Request) -> bool:
    info, experts = request.tensor, _experts(request)
    return (
        len(info.sizes) == 2 and not info.dtype.is_floating_point and experts is not None and info.sizes[1] <= experts
    )


@dataclass(frozen=True)
class _Sorting:
    """Sizes of one sorted routing: `slots` and `blocks` are how many the tensors have room for."""

    tokens: int
    each: int
    experts: int
    block: int
    slots: int
    blocks: int


def _sorting(request: Request) -> _Sorting | None:
    call = request.call
    experts = _experts(request)
    sorted_ids = first_tensor(call, _SORTED)
    blocks = first_tensor(call, _EXPERTS)
    if experts is None or sorted_ids is None or blocks is None or not blocks.elements:
        return None
    each = first_integer(call, ("top_k", "topk", "num_experts_per_tok"))
    weights = first_tensor(call, ("topk_weights", "topk_ids"))
    if weights is not None and len(weights.sizes) == 2:
        tokens, each = weights.sizes
    else:
        given = next((info for name in _TOKENS if (info := call.tensor(name)) is not None and info.sizes), None)
        if given is None or each is None:
            return None
        tokens = given.sizes[0]
    block = first_integer(call, ("block_size", "moe_block_size", "BLOCK_SIZE_M", "block_m", "block_size_m"))
    if block is None:
        # Both tensors are as long as the worst case asks: blocks of slots.
        block = -(-sorted_ids.elements // blocks.elements)
    if not 0 < each <= experts or block < 1 or tokens < 1:
        return None
    return _Sorting(tokens, each, experts, block, sorted_ids.elements, blocks.elements)


def _sorted(request: Request, sizes: _Sorting) -> tuple[np.ndarray, np.ndarray] | None:
    """Sorted pair ids padded to whole blocks, and the expert of each block; None if they do not fit.

    A pair's id is its place among the tokens' experts; AITER's kernels want the token, with the place among its experts
    in the upper eight bits.
    """
    ids = draw(sizes.tokens, sizes.experts, sizes.each, _routing(request), random_of(request.seed)).reshape(-1)
    padding = len(ids)  # the number that is not a pair
    order, counts = np.argsort(ids, kind="stable"), np.bincount(ids, minlength=sizes.experts)
    blocks = -(-counts // sizes.block)
    total = int(blocks.sum()) * sizes.block
    if total > sizes.slots or int(blocks.sum()) > sizes.blocks:
        return None
    if request.call.name.startswith("aiter::"):
        padding = sizes.each << _AITER_SHIFT | sizes.tokens
        order = order % sizes.each << _AITER_SHIFT | order // sizes.each
    slots = np.full(sizes.slots, padding, np.int64)
    begins = np.concatenate(([0], np.cumsum(blocks[:-1]))) * sizes.block
    taken = np.concatenate(([0], np.cumsum(counts[:-1])))
    slots[np.repeat(begins - taken, counts) + np.arange(len(ids))] = order
    return slots, np.repeat(np.arange(sizes.experts), blocks)


def _fill_sorted(request: Request) -> Mapping[str, torch.Tensor]:
    sizes = _sorting(request)
    assert sizes is not None
    found = _sorted(request, sizes)
    assert found is not None
    slots, experts = found
    valid = len(experts) * sizes.block
    request.note(
        f"{request.call.name}: {sizes.tokens} tokens to {sizes.each} of {sizes.experts} experts each, "
        f"{_routing(request)}; {valid - sizes.tokens * sizes.each} of {valid} slots are padding to blocks of "
        f"{sizes.block}"
    )
    others = [
        name
        for name in (*_SORTED, *_EXPERTS, *_VALID)
        if name not in request.wanted and request.call.tensor(name) is not None
    ]
    if others:
        request.note(
            f"{request.call.name}: {', '.join(request.wanted)} filled for experts drawn on their own: the "
            f"content of {', '.join(others)} comes from elsewhere"
        )
    made: dict[str, torch.Tensor] = {}
    for label, info in request.wanted.items():
        values = np.zeros(info.elements, np.int64)
        if label in _SORTED:
            values[:] = slots
        elif label in _EXPERTS:
            values[: len(experts)] = experts
        else:
            values[:] = sizes.tokens
            values[:1] = valid
        made[label] = torch.from_numpy(values).to(info.dtype).reshape(info.sizes)
    return made


def _accepts_sorted(request: Request) -> bool:
    sizes = _sorting(request)
    return (
        sizes is not None
        and all(not info.dtype.is_floating_point for info in request.wanted.values())
        and _sorted(request, sizes) is not None
    )


def _shares(request: Request) -> torch.Tensor:
    """What each of a token's experts contributes, as after a softmax over them."""
    info = request.tensor
    if request.label in _SORTED_SHARES:
        sizes = _sorting(request)
        return torch.full(info.sizes, 1.0 if sizes is None else 1.0 / sizes.each, dtype=info.dtype)
    scores = torch.randn(info.sizes, dtype=torch.float64, generator=request.generator)
    return torch.softmax(scores, -1).to(info.dtype)


def _accepts_shares(request: Request) -> bool:
    return request.recipe is None and bool(request.tensor.sizes)


EXPERT_WEIGHTS = Initializer(
    "expert weights",
    _shares,
    op="*",
    arguments=(*_SHARES, *_SORTED_SHARES),
    dtypes=FLOATS,
    accepts=_accepts_shares,
    description="positive, those of a token add up to 1",
)
EXPERT_IDS = Initializer(
    "expert ids",
    _fill_ids,
    op="*",
    arguments=_IDS,
    accepts=_accepts_ids,
    description=f"different experts for each token, uniform or by --{OPTION}",
)
SORTED_EXPERTS = Initializer(
    "sorted experts",
    _fill_sorted,
    op="*",
    arguments=(*_SORTED, *_EXPERTS, *_VALID),
    joint=True,
    accepts=_accepts_sorted,
    description=f"pairs of token and expert sorted by expert and padded to blocks, uniform or by --{OPTION}",
)
