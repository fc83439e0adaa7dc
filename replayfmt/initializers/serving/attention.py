"""Paged attention: block tables, sequence lengths and query starts that belong together.

Recognized by the names of arguments, because every engine has its own operator for the same work: vLLM's paged
attention and varlen forward, its ROCm and AITER counterparts, SGLang's, and FlashInfer's with its ragged page lists. A
block table is a permutation of the cache's blocks: each sequence reads blocks of its own, as many as its context fills.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch

from ..initializer import Initializer
from ..request import Request, first_integer, first_name, first_tensor
from .batches import Batch, GivenLengths, batch_for

TABLES = ("block_tables", "block_table", "page_table", "block_table_tensor")
LENGTHS = ("seq_lens", "context_lens", "seqused_k", "cache_seqlens", "seqlens_k", "seq_lens_k", "kv_seq_lens")
QUERY_STARTS = ("query_start_loc", "cu_seqlens_q", "cu_query_lens", "cu_seqlen_q", "qo_indptr", "cum_seq_q")
KEY_STARTS = ("cu_seqlens_k", "cu_seqlen_k", "cum_seq_k", "cu_seq_lens", "cu_seqlens_k_new")
PAGE_STARTS = ("paged_kv_indptr", "kv_indptr")
PAGES = ("paged_kv_indices", "kv_indices", "kv_page_indices")
LAST_PAGES = ("paged_kv_last_page_len", "kv_last_page_len", "kv_last_page_lens")
QUERIES = ("query", "q", "q_nope")
_KEY_CACHES = ("key_cache", "k_cache", "kcache", "paged_k_cache", "k_buffer")
_JOINT_CACHES = ("kv_cache", "paged_kv_cache", "kv_c_and_k_pe_cache", "ckv_cache")  # of keys and values
CACHES = (*_KEY_CACHES, *_JOINT_CACHES)
_KEYS = ("k", "key")  # the cache where there is no other, else the new tokens
_NEW_KEYS = ("k", "k_new")
_LONGEST = ("max_seq_len", "max_context_len", "max_seqlen_k", "max_seq_len_k", "max_kv_len")
_BLOCK_SIZES = ("block_size", "page_size")
_LAYOUTS = ("layout", "kv_layout", "kv_layout_code")
_HEADS_FIRST = ("_C::cpu_attention", "_C::cpu_attn")  # operators whose caches always have heads before tokens
_ALL = (*TABLES, *LENGTHS, *QUERY_STARTS, *KEY_STARTS, *PAGE_STARTS, *PAGES, *LAST_PAGES)


def cache_shape(request: Request, names: Iterable[str] = (*CACHES, *_KEYS)) -> tuple[int, int] | None:
    """How many blocks the cache of a call has, and how many tokens per block; None if it is not a paged cache.

    Layouts: (blocks, block, heads, size) of flash attention; (slots, heads, size) of single tokens; (blocks, heads,
    size / x, block, x) of paged attention's keys; (blocks, block, size) of latents; with 2 for keys and values first or
    second where one tensor holds both. Heads come before tokens where the call says so (HND). Where it gives the block
    size, that counts.
    """
    name = first_name(request.call, names)
    cache = None if name is None else request.call.tensor(name)
    if cache is None or len(cache.sizes) < 3 or not cache.elements:
        return None
    given, sizes, joint = first_integer(request.call, _BLOCK_SIZES), cache.sizes, name in _JOINT_CACHES
    if joint and len(sizes) == 5 and sizes[0] == 2 != sizes[1]:
        sizes = sizes[1:]
    if given is not None:
        return (sizes[0], given) if given > 0 else None
    if len(sizes) == 3:
        return sizes[0], sizes[1] if joint else 1
    if len(sizes) == 5 and not joint:
        return sizes[0], sizes[3]
    heads_first = request.call.name.startswith(_HEADS_FIRST) or any(
        request.call.arguments.get(each) in (1, "HND") for each in _LAYOUTS
    )
    return sizes[0], sizes[len(sizes) - (2 if heads_first else 3)]


def _sequences(request: Request) -> int | None:
    """How many sequences there are, by whichever tensor shows it; None if the tensors contradict each other."""
    counts: set[int] = set()
    for names, extra in (
        (TABLES, 0),
        (LENGTHS, 0),
        (LAST_PAGES, 0),
        (QUERY_STARTS, 1),
        (KEY_STARTS, 1),
        (PAGE_STARTS, 1),
    ):
        info = first_tensor(request.call, names)
        if info is not None and info.sizes:
            counts.add(info.sizes[0] - extra)
    return counts.pop() if len(counts) == 1 else None


def _pages_room(request: Request) -> int | None:
    """How many blocks the page list has room for."""
    pages = first_tensor(request.call, PAGES)
    return None if pages is None else pages.elements


def plan_batch(request: Request) -> tuple[Batch, int, int] | None:
    """The batch of an attention call, with blocks and block size of its cache; None if the call does not show it."""
    query, shape, sequences = first_tensor(request.call, QUERIES), cache_shape(request), _sequences(request)
    table = first_tensor(request.call, TABLES)
    if query is None or not query.sizes or shape is None or sequences is None or sequences < 1:
        return None
    blocks, block = shape
    limits = [blocks * block]
    if table is not None:
        if len(table.sizes) != 2:
            return None
        limits.append(table.sizes[1] * block)
    longest = first_integer(request.call, _LONGEST)
    if longest is not None and longest > 0:
        limits.append(longest)
    # (batch, tokens, heads, size) in decode kernels, (tokens, heads, size) otherwise.
    tokens = query.sizes[0] * query.sizes[1] if len(query.sizes) == 4 else query.sizes[0]
    own = blocks // sequences
    listed = _pages_room(request)
    if listed is not None:
        own = min(own, listed // sequences)
    batch = batch_for(
        request,
        sequences,
        tokens,
        min(limits),
        room=max(own, 1) * block * sequences,
        given=_given(request, block, tokens // sequences if _appends(request) else 0),
    )
    return None if batch is None else (batch, blocks, block)


def _appends(request: Request) -> bool:
    """Whether the kernel appends the new tokens itself, and receives the context lengths before them."""
    before = first_tensor(request.call, CACHES if request.call.tensor("k_new") is None else _KEYS) is not None
    return before and first_tensor(request.call, _NEW_KEYS) is not None


def _content_of(request: Request, names: Iterable[str]) -> tuple[np.ndarray, str] | None:
    """The first of these arguments whose content is already available: captured, or made by an earlier initializer."""
    for name in names:
        content = None if name in request.wanted else request.known(name)
        if content is not None:
            return content.numpy().astype(np.int64).reshape(-1), name
    return None


def _given(request: Request, block: int, appended: int) -> GivenLengths:
    """The lengths that the call's content already determines. `appended`: new tokens that contexts do not count yet."""
    given = GivenLengths()
    if (starts := _content_of(request, QUERY_STARTS)) is not None:
        given.queries, given.queries_by = np.diff(starts[0]), starts[1]
    if (lengths := _content_of(request, LENGTHS)) is not None:
        given.keys, given.keys_by = lengths[0] + appended, lengths[1]
    elif (starts := _content_of(request, KEY_STARTS)) is not None:
        given.keys, given.keys_by = np.diff(starts[0]), starts[1]
    elif (pages := _content_of(request, PAGE_STARTS)) is not None:
        last, counts = _content_of(request, LAST_PAGES), np.diff(pages[0])
        given.keys = np.where(counts > 0, (counts - 1) * block + (block if last is None else last[0]), 0)
        given.keys_by = pages[1]
    return given


def _fill(request: Request) -> Mapping[str, torch.Tensor]:
    planned = plan_batch(request)
    assert planned is not None  # _accepts was called first
    batch, blocks, block = planned
    needed = -(-batch.key_lengths // block)
    order = np.random.Generator(np.random.SFC64(np.random.SeedSequence([request.seed]))).permutation(blocks)
    if int(needed.sum()) > blocks:
        request.note(
            f"{request.call.name}: the sequences need {int(needed.sum())} blocks and the cache has {blocks}, "
            "so some blocks are read by several sequences"
        )
    starts = np.concatenate(([0], np.cumsum(needed)))
    appended = batch.query_lengths if _appends(request) else 0
    made: dict[str, torch.Tensor] = {}
    for label, info in request.wanted.items():
        values = np.zeros(info.sizes, np.int64)
        if label in TABLES:
            for row, count in enumerate(needed):
                values[row, :count] = order[(starts[row] + np.arange(count)) % blocks]
        elif label in LENGTHS:
            values[:] = batch.key_lengths - appended
        elif label in QUERY_STARTS:
            values[1:] = np.cumsum(batch.query_lengths)
        elif label in KEY_STARTS:
            values[1:] = np.cumsum(batch.key_lengths)
        elif label in PAGE_STARTS:
            values[1:] = np.cumsum(needed)
        elif label in LAST_PAGES:
            values[:] = np.where(batch.key_lengths > 0, (batch.key_lengths - 1) % block + 1, 0)
        else:
            used = min(len(values), int(starts[-1]))
            values[:used] = order[np.arange(used) % blocks]
        made[label] = torch.from_numpy(values).to(info.dtype)
    return made


def _accepts(request: Request) -> bool:
    """Whether the call is a paged attention whose tensors determine enough; notes are made when it is filled."""
    integral = all(not info.dtype.is_floating_point for info in request.wanted.values())
    paged = first_tensor(request.call, (*TABLES, *PAGES)) is not None
    planned = plan_batch(replace(request, notes=[])) if integral and paged else None
    if planned is None:
        return False
    batch, _blocks, block = planned
    listed = _pages_room(request)
    return listed is None or int((-(-batch.key_lengths // block)).sum()) <= listed


PAGED_ATTENTION = Initializer(
    "paged attention",
    _fill,
    op="*",
    arguments=_ALL,
    joint=True,
    accepts=_accepts,
    description="block tables a permutation of the cache's blocks, lengths and query starts of one batch; prefill and "
    "decode as the step's annotation says, else guessed and said so",
)
