"""Packed attention: where each sequence of a batch begins among the tokens of all, for kernels without a cache.

As in the varlen forms of flash attention and xformers. The longest sequence is as long as the call says, and the
others share the remaining tokens; all have the same length if that would leave nothing for the others. Where keys are
padded to equal places, each place holds a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ..initializer import Initializer
from ..request import Request, TensorInfo, first_name, first_tensor
from .attention import KEY_STARTS, LAST_PAGES, LENGTHS, PAGE_STARTS, PAGES, QUERIES, QUERY_STARTS, TABLES

_QUERIES = (*QUERY_STARTS, "seqstart_q")
_KEYS = (*KEY_STARTS, "seqstart_k")
_HELD = "seqlen_k"  # how much of each place holds keys
_OTHERS = (*TABLES, *LENGTHS, *PAGE_STARTS, *PAGES, *LAST_PAGES, "seqused_q", "leftpad_k")


def _tokens(info: TensorInfo | None) -> int | None:
    """Packed as (tokens, heads, size), or as a batch of one such."""
    if info is None or len(info.sizes) not in (3, 4) or (len(info.sizes) == 4 and info.sizes[0] != 1):
        return None
    return info.sizes[-3]


def _lengths(request: Request, starts: str, tokens: int, longest: int | None) -> np.ndarray | None:
    """How long the sequences are; None if that many do not fit."""
    known = None if starts in request.wanted else request.known(starts)
    if known is not None:
        return known.diff().numpy().astype(np.int64)
    info = request.call.tensor(starts)
    count = 0 if info is None or len(info.sizes) != 1 else info.elements - 1
    if count < 1 or (longest is not None and not 0 <= tokens <= count * longest):
        return None
    first = -(-tokens // count) if longest is None or longest > tokens - count + 1 else longest
    shares = np.full(count, first, np.int64)
    if count > 1:
        shares[1:] = (tokens - first) // (count - 1)
        shares[1 : 1 + (tokens - first) % (count - 1)] += 1
    return shares


def _made(request: Request) -> dict[str, np.ndarray] | None:
    """Starts and lengths by argument; None if the call does not determine them."""
    call = request.call
    first, second = first_name(call, _QUERIES), first_name(call, _KEYS)
    queries = _tokens(first_tensor(call, QUERIES))
    keys = _tokens(first_tensor(call, ("k", "key")))
    if first is None or second is None or queries is None or keys is None or first_name(call, _OTHERS) is not None:
        return None
    longest_query = call.integer("max_seqlen_q", call.integer("max_q"))
    longest_key = call.integer("max_seqlen_k", call.integer("max_k"))
    query = _lengths(request, first, queries, longest_query)
    held = call.tensor(_HELD)
    if held is not None:
        key = None if query is None or keys % len(query) else np.full(len(query), keys // len(query))
    else:
        key = query if keys == queries and second in request.wanted else _lengths(request, second, keys, longest_key)
    if query is None or key is None or len(query) != len(key):
        return None
    made = {first: np.concatenate(([0], np.cumsum(query))), second: np.concatenate(([0], np.cumsum(key)))}
    if held is not None:
        most = int(key[0]) if longest_key is None else min(int(key[0]), longest_key)
        made[_HELD] = np.maximum(np.linspace(most, most // 2, len(key)).astype(np.int64), np.minimum(query, most))
    fits = all(label in made and info.sizes == made[label].shape for label, info in request.wanted.items())
    return made if fits else None


def _fill(request: Request) -> Mapping[str, torch.Tensor]:
    made = _made(request)
    assert made is not None  # _accepts was called first
    for label, values in made.items():
        lengths = values if label == _HELD else np.diff(values)
        request.note(
            f"{request.call.name}: {label} of {len(lengths)} sequences of {lengths.min()} to {lengths.max()} "
            f"tokens, {lengths.sum()} together; a guess"
        )
    return {label: torch.from_numpy(made[label]).to(info.dtype) for label, info in request.wanted.items()}


def _accepts(request: Request) -> bool:
    integral = all(info.dtype in (torch.int32, torch.int64) for info in request.wanted.values())
    return integral and _made(request) is not None


PACKED_ATTENTION = Initializer(
    "packed attention",
    _fill,
    op="*",
    arguments=(*_QUERIES, *_KEYS, _HELD),
    joint=True,
    accepts=_accepts,
    description="where the sequences of a batch begin: the longest as captured, the others share the other tokens",
)
