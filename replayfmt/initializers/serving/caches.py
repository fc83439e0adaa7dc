"""Writes into a paged key-value cache, and positions: which slot each new token goes to, which position it has."""

from __future__ import annotations

import numpy as np
import torch

from ..initializer import Initializer
from ..request import Request, TensorInfo
from .attention import CACHES, cache_shape
from .batches import batch_for, iteration_of, known_batch

_SLOTS = ("slot_mapping", "out_cache_loc", "cache_loc", "kv_cache_loc")


def _slots(request: Request) -> tuple[int, int] | None:
    """How many blocks the cache of a call has, and how many slots a block has."""
    shape = cache_shape(request, CACHES)
    if shape is not None:
        return shape
    flat = next(
        (info for name in CACHES if (info := request.call.tensor(name)) is not None and len(info.sizes) == 2), None
    )
    return None if flat is None else (flat.sizes[0], 1)


def _slot_mapping(request: Request) -> torch.Tensor:
    """Distinct slots: consecutive for the tokens of one sequence, anywhere for the token of a decoding one."""
    info, slots = request.tensor, _slots(request)
    assert slots is not None  # _has_slots was called first
    random = np.random.Generator(np.random.SFC64(np.random.SeedSequence([request.seed])))
    (blocks, block), tokens = slots, info.elements
    order = random.permutation(blocks)
    if tokens <= blocks:
        request.note(f"{request.call.name}: each of {tokens} tokens goes to a block of its own, as in decoding")
        values = order[:tokens] * block + random.integers(block, size=tokens)
    else:
        request.note(f"{request.call.name}: {tokens} tokens fill blocks one after the other, as in prefill")
        used = -(-tokens // block)
        values = (order[:used, None] * block + np.arange(block)).reshape(-1)[:tokens]
    return torch.from_numpy(values).to(info.dtype).reshape(info.sizes)


def _has_slots(request: Request) -> bool:
    info, slots = request.tensor, _slots(request)
    return info.dtype in (torch.int32, torch.int64) and slots is not None and info.elements <= slots[0] * slots[1]


def _positions(request: Request) -> torch.Tensor:
    """Positions of a step's tokens: those of a prefilled sequence count up; that of a decoding one ends its context."""
    info, table = request.tensor, _table(request)
    assert table is not None  # _has_table was called first
    rows, tokens = table.sizes[0], info.sizes[-1]
    batch = known_batch(request, tokens, rows)
    if batch is None:
        batch = batch_for(request, _sequences_by_annotation(request, tokens), tokens, rows)
    if batch is None:
        values = np.arange(tokens, dtype=np.int64) % rows
    else:
        ends = np.repeat(batch.key_lengths, batch.query_lengths)
        begins = np.repeat(np.cumsum(batch.query_lengths) - batch.query_lengths, batch.query_lengths)
        new = np.repeat(batch.query_lengths, batch.query_lengths)
        values = ends - new + np.arange(len(ends)) - begins
        values = np.concatenate((values, np.zeros(tokens - len(values), np.int64)))
    return torch.from_numpy(np.broadcast_to(values, info.sizes).copy()).to(info.dtype)


def _sequences_by_annotation(request: Request, tokens: int) -> int:
    """How many sequences the step's annotation mentions; one if there is no annotation: a prefill."""
    iteration = iteration_of(request)
    if iteration is None:
        return 1
    counted = [group.requests or 0 for group in (iteration.prefill, iteration.decode)]
    return min(max(sum(counted), 1), max(tokens, 1))


def _table(request: Request) -> TensorInfo | None:
    return request.call.tensor("cos_sin_cache") or request.call.tensor("cos_cache")


def _has_table(request: Request) -> bool:
    table = _table(request)
    return (
        request.tensor.dtype in (torch.int32, torch.int64)
        and table is not None
        and len(table.sizes) >= 2
        and table.sizes[0] > 0
        and bool(request.tensor.sizes)
    )


SLOT_MAPPING = Initializer(
    "slot mapping",
    _slot_mapping,
    op="*",
    arguments=_SLOTS,
    accepts=_has_slots,
    description="different slots of the key-value cache",
)
CACHE_INDICES = Initializer(
    "cache indices",
    _slot_mapping,
    op="*store_cache*",
    arguments=("indices",),
    accepts=_has_slots,
    description="different slots of the key-value cache",
)
POSITIONS = tuple(
    Initializer(
        f"positions {number}",
        _positions,
        op=pattern,
        arguments=("positions", "position_ids", "pos_ids"),
        accepts=_has_table,
        description="positions of a step's tokens, within the table of angles",
    )
    for number, pattern in enumerate(("*rotary*", "*rope*"), 1)
)
