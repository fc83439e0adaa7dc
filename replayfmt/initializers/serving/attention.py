"""Attention of serving engines: block tables, sequence lengths, slots and positions that belong together.

A batch decides which sequences there are, how many tokens each has and how long its context is. From it follow the
tables of paged attention, where each new token is written into a paged cache, and where each sequence begins among the
tokens of all in kernels without a cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from replayfmt.errors import UsageError
from replayfmt.pytorch.traced_names import Iteration, Requests, iteration_in

from ..demands import random_of
from ..initializer import Initializer, Request, TensorInfo, first_integer, first_name, first_tensor

_STEPS = "batches of steps"


@dataclass(frozen=True)
class Batch:
    """One step's sequences: `query_lengths` are the new tokens of each, `key_lengths` its whole context with them.

    `source` says what the split into prefill and decode is based on.
    """

    query_lengths: np.ndarray
    key_lengths: np.ndarray
    phase: str
    source: str


@dataclass
class GivenLengths:
    """What the call's content already says about each sequence (None if nothing), and which arguments say it."""

    queries: np.ndarray | None = None
    queries_by: str = ""
    keys: np.ndarray | None = None
    keys_by: str = ""


def iteration_of(request: Request) -> Iteration | None:
    """What the call's scopes say about a serving engine's step."""
    return iteration_in(request.call.scope)


def batch_for(
    request: Request,
    sequences: int,
    tokens: int,
    longest: int,
    *,
    room: int | None = None,
    given: GivenLengths | None = None,
) -> Batch | None:
    """The batch of `sequences` with `tokens` new tokens together and contexts of up to `longest` tokens.

    `room` is how many tokens of context the cache holds for all of them, None if there is no such limit. None if
    no batch fits. The annotation is taken where its counts are those of the tensors (padding sequences of a graph
    apart); otherwise each sequence decodes one token if there are as many tokens as sequences, and else the tokens are
    prefilled in equal shares. What is `given` comes before all that; UsageError where it cannot be.
    """
    iteration = iteration_of(request)
    given = given or GivenLengths()
    if sequences < 1 or longest < 1 or tokens < 0:
        return None
    _check(given, sequences, tokens, longest)
    if given.queries is not None or given.keys is not None:
        return _as_given(request, given, sequences, tokens, longest, room)
    split = None if iteration is None else _annotated(iteration, sequences, tokens)
    if split is not None:
        assert iteration is not None
        query, source = split, f"the annotation {iteration.text}"
        phase = str(iteration.phase)
    else:
        query = _shares(tokens, sequences)
        phase = "decode" if tokens <= sequences else "prefill"
        source = f"a guess: {tokens} new tokens for {sequences} sequences"
        if iteration is not None:
            source += f", which is not what the annotation {iteration.text} says"
    if len(query) and query.max() > longest:
        return None
    key = _contexts(request, iteration if split is not None else None, query, longest, room)
    request.note(
        f"{request.call.name}: {phase}, {sequences} sequences, {tokens} new tokens, contexts of {key.min()} "
        f"to {key.max()} tokens; from {source}"
    )
    return _remembered(request, tokens, Batch(query, key, phase, source))


def known_batch(request: Request, tokens: int, longest: int) -> Batch | None:
    """The batch that was made for the first call of the same step with as many new tokens, where its contexts are no
    longer than that: attention and positions of a step speak of the same sequences."""
    known = request.shared.get((_STEPS, request.call.scope, tokens))
    return known if isinstance(known, Batch) and known.key_lengths.max() <= longest else None


def _remembered(request: Request, tokens: int, batch: Batch) -> Batch:
    request.shared.setdefault((_STEPS, request.call.scope, tokens), batch)
    return batch


def _check(given: GivenLengths, sequences: int, tokens: int, longest: int) -> None:
    """Raises UsageError if the given lengths are impossible for the call's tensors."""
    for lengths, name in ((given.queries, given.queries_by), (given.keys, given.keys_by)):
        if lengths is not None and (len(lengths) != sequences or lengths.min() < 0 or lengths.max() > longest):
            raise UsageError(
                f"{name} says {len(lengths)} lengths from {lengths.min()} to {lengths.max()}; the call's "
                f"other arguments have place for {sequences} of up to {longest} tokens"
            )
    if given.queries is not None and int(given.queries.sum()) > tokens:
        raise UsageError(f"{given.queries_by} says {given.queries.sum()} new tokens; the call has {tokens}")
    if given.queries is not None and given.keys is not None and np.any(given.keys < given.queries):
        raise UsageError(f"{given.keys_by} says contexts that are shorter than the new tokens of {given.queries_by}")


def _as_given(
    request: Request, given: GivenLengths, sequences: int, tokens: int, longest: int, room: int | None
) -> Batch | None:
    """A batch whose new tokens, contexts, or both are given; the others fit them."""
    query, key = given.queries, given.keys
    if query is None:
        assert key is not None
        iteration = iteration_of(request)
        split = None if iteration is None else _annotated(iteration, sequences, tokens)
        query = split if split is not None and np.all(split <= key) else _within(key, tokens)
    if query.max() > longest:
        return None
    if key is None:
        key = _contexts(request, None, query, longest, room)
    phase = "decode" if query.max() <= 1 else "prefill" if query[query > 0].min() > 1 else "mixed"
    source = " and ".join(name for name in (given.queries_by, given.keys_by) if name)
    request.note(
        f"{request.call.name}: {phase}, {sequences} sequences, {query.sum()} new tokens, contexts of "
        f"{key.min()} to {key.max()} tokens; from the content of {source}"
    )
    return _remembered(request, tokens, Batch(query, key, phase, source))


def _within(key: np.ndarray, tokens: int) -> np.ndarray:
    """New tokens of each sequence: equal shares where contexts are that long, else as many as fit, in order."""
    query = np.minimum(_shares(tokens, len(key)), key)
    room = key - query
    return query + np.clip(tokens - int(query.sum()) - (np.cumsum(room) - room), 0, room)


def _annotated(iteration: Iteration, sequences: int, tokens: int) -> np.ndarray | None:
    """New tokens of each sequence as the annotation has them: decoding first, then prefill, then padding.

    None if it does not say, or contradicts the tensors.
    """
    decode, prefill = _phase_size(iteration.decode, decodes=True), _phase_size(iteration.prefill, decodes=False)
    if decode is None or prefill is None:
        return None
    count = decode[0] + prefill[0]
    if not 0 < count <= sequences or decode[1] + prefill[1] > tokens:
        return None
    if count == sequences and decode[1] + prefill[1] != tokens:
        return None
    padding = np.zeros(sequences - count, np.int64)
    return np.concatenate((_shares(decode[1], decode[0]), _shares(prefill[1], prefill[0]), padding))


def _phase_size(group: Requests, *, decodes: bool) -> tuple[int, int] | None:
    """Requests and new tokens of a phase. By default a decoding request has one new token."""
    if group.requests is None:
        return None
    if group.query_tokens is None:
        return (group.requests, group.requests) if decodes or not group.requests else None
    return group.requests, group.query_tokens


def _contexts(
    request: Request, iteration: Iteration | None, query: np.ndarray, longest: int, room: int | None
) -> np.ndarray:
    """Context lengths: as the annotation sums them up, else one of the greatest length and the others spread evenly
    between half of it and all, less where the cache has no room."""
    active = query > 0
    lengths = np.zeros(len(query), np.int64)
    if iteration is not None:
        first = iteration.decode.requests or 0
        second = first + (iteration.prefill.requests or 0)
        sums = (iteration.decode.key_tokens, iteration.prefill.key_tokens)
        if all(
            total is not None or start == stop
            for total, start, stop in zip(sums, (0, first), (first, second), strict=True)
        ):
            for total, start, stop in zip(sums, (0, first), (first, second), strict=True):
                if start < stop:
                    lengths[start:stop] = _shares(int(total or 0), stop - start)
            if np.all(lengths[active] >= query[active]) and lengths.max() <= longest:
                return lengths
            request.note(
                f"{request.call.name}: the context lengths of {iteration.text} do not fit its tensors; "
                "others were chosen"
            )
    count = int(active.sum())
    if not count:
        return lengths
    most = longest
    if room is not None:
        most = min(longest, max(1, room // count))
        if most < longest:
            request.note(
                f"{request.call.name}: the cache has room for {room} tokens, so contexts are at most {most} "
                f"instead of {longest}"
            )
    spread = np.linspace(most, max(1, most // 2), count).astype(np.int64)
    lengths[active] = np.maximum(spread, query[active])
    return lengths


def _shares(total: int, count: int) -> np.ndarray:
    """`total` split into `count` whole shares that differ by at most one."""
    if not count:
        return np.zeros(0, np.int64)
    shares = np.full(count, total // count, np.int64)
    shares[: total % count] += 1
    return shares


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


def _fill_paged(request: Request) -> Mapping[str, torch.Tensor]:
    planned = plan_batch(request)
    assert planned is not None  # _accepts was called first
    batch, blocks, block = planned
    needed = -(-batch.key_lengths // block)
    order = random_of(request.seed).permutation(blocks)
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


def _accepts_paged(request: Request) -> bool:
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
    _fill_paged,
    op="*",
    arguments=_ALL,
    joint=True,
    accepts=_accepts_paged,
    description="block tables a permutation of the cache's blocks, lengths and query starts of one batch; prefill and "
    "decode as the step's annotation says, else guessed and said so",
)


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
    random = random_of(request.seed)
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


_PACKED_QUERIES = (*QUERY_STARTS, "seqstart_q")
_PACKED_KEYS = (*KEY_STARTS, "seqstart_k")
_HELD = "seqlen_k"  # how much of each place holds keys
_OTHERS = (*TABLES, *LENGTHS, *PAGE_STARTS, *PAGES, *LAST_PAGES, "seqused_q", "leftpad_k")


def _packed_tokens(info: TensorInfo | None) -> int | None:
    """Packed as (tokens, heads, size), or as a batch of one such."""
    if info is None or len(info.sizes) not in (3, 4) or (len(info.sizes) == 4 and info.sizes[0] != 1):
        return None
    return info.sizes[-3]


def _packed_lengths(request: Request, starts: str, tokens: int, longest: int | None) -> np.ndarray | None:
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
    first, second = first_name(call, _PACKED_QUERIES), first_name(call, _PACKED_KEYS)
    queries = _packed_tokens(first_tensor(call, QUERIES))
    keys = _packed_tokens(first_tensor(call, ("k", "key")))
    if first is None or second is None or queries is None or keys is None or first_name(call, _OTHERS) is not None:
        return None
    longest_query = call.integer("max_seqlen_q", call.integer("max_q"))
    longest_key = call.integer("max_seqlen_k", call.integer("max_k"))
    query = _packed_lengths(request, first, queries, longest_query)
    held = call.tensor(_HELD)
    if held is not None:
        key = None if query is None or keys % len(query) else np.full(len(query), keys // len(query))
    else:
        key = (
            query
            if keys == queries and second in request.wanted
            else _packed_lengths(request, second, keys, longest_key)
        )
    if query is None or key is None or len(query) != len(key):
        return None
    made = {first: np.concatenate(([0], np.cumsum(query))), second: np.concatenate(([0], np.cumsum(key)))}
    if held is not None:
        most = int(key[0]) if longest_key is None else min(int(key[0]), longest_key)
        made[_HELD] = np.maximum(np.linspace(most, most // 2, len(key)).astype(np.int64), np.minimum(query, most))
    fits = all(label in made and info.sizes == made[label].shape for label, info in request.wanted.items())
    return made if fits else None


def _fill_packed(request: Request) -> Mapping[str, torch.Tensor]:
    made = _made(request)
    assert made is not None  # _accepts was called first
    for label, values in made.items():
        lengths = values if label == _HELD else np.diff(values)
        request.note(
            f"{request.call.name}: {label} of {len(lengths)} sequences of {lengths.min()} to {lengths.max()} "
            f"tokens, {lengths.sum()} together; a guess"
        )
    return {label: torch.from_numpy(made[label]).to(info.dtype) for label, info in request.wanted.items()}


def _accepts_packed(request: Request) -> bool:
    integral = all(info.dtype in (torch.int32, torch.int64) for info in request.wanted.values())
    return integral and _made(request) is not None


PACKED_ATTENTION = Initializer(
    "packed attention",
    _fill_packed,
    op="*",
    arguments=(*_PACKED_QUERIES, *_PACKED_KEYS, _HELD),
    joint=True,
    accepts=_accepts_packed,
    description="where the sequences of a batch begin: the longest as captured, the others share the other tokens",
)
