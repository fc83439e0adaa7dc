"""The batch behind an operator of a serving engine: which sequences, how many tokens each, how long their context is.

An attention kernel's work depends on these numbers, which are in integer tensors that a trace does not hold. What the
step's annotation says is kept exactly; what it leaves open is decided by the heuristics below, and a note says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from replayfmt.errors import UsageError
from replayfmt.pytorch.iterations import Iteration, Requests, iteration_in

from ..request import Request

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
