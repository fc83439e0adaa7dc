"""Layers with a state that goes from token to token: Mamba's causal convolution and its selective scan. Compositions
for engines.py.

Several sequences lie one after the other, `query_start_loc` says where each begins and the last one ends; or each has
a row of its own. A cache has the states of many sequences, of which `cache_indices` names each one's; a sequence
whose index is that of the padding is none: neither its tokens nor a state change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from replayfmt.format.codes import DType

from .rewriting import CannotRewrite, Given, RewrittenCalls, Value, plain, renamed


@dataclass(frozen=True)
class _Sequences:
    """Where the tokens of sequences are. By token: the sequence that it is of, which token of it, and whether it is
    of any that is none of the padding; by sequence: where it begins and ends, and whether it is none of the padding."""

    of: Any
    place: Any
    real: Any
    begins: Any
    ends: Any
    real_ones: Any


def _sequences(calls: RewrittenCalls, given: Given, tokens: int, rows: int) -> _Sequences:
    """Of the arguments that both operators have. `rows`: how many there are, 0 where sequences follow each other."""
    starts, indices = given.get("query_start_loc"), given.get("cache_indices")
    if starts is None:
        starts = calls.count(rows + 1) * (tokens // max(rows, 1))
    starts = starts.to(DType.int64)
    count = starts.sizes[0] - 1
    begins, ends = starts.part(0, 0, count), starts.part(0, 1, count + 1)
    numbers = calls.count(tokens)
    of = ends.searchsorted(numbers, right=True)
    inside, of = of < count, of.clamp(0, count - 1)
    place = numbers - begins.index_select(0, of)
    if indices is None:
        return _Sequences(of, place, inside, begins, ends, begins >= 0)
    if len(indices.sizes) != 1:
        raise CannotRewrite("states of several blocks for each sequence")
    real_ones = indices.ne(given["padding"])
    return _Sequences(of, place, inside & real_ones.index_select(0, of), begins, ends, real_ones)


def _first_states(given: Given, cache: Value, count: int) -> Any:
    """The state of each sequence before its first token, in float32: zeros where it has none."""
    indices, has = given.get("cache_indices"), given.get("has_initial_state")
    states = (cache if indices is None else cache.index([indices])).part(0, 0, count).single()
    nothing = states.zeros_like()
    return nothing if has is None else has.view([count, 1, 1]).where(states, nothing)


def _keep(given: Given, cache: Value, new: Value, real: Value) -> None:
    """Write each sequence's state into the cache. What is padding writes what a real one writes, if there is one, or
    what is there: so no two write different states to one place."""
    indices = given.get("cache_indices")
    new = new.to(cache.dtype)
    if indices is None:
        cache.part(0, 0, new.sizes[0]).copy_(new)
        return
    indices = indices.to(DType.int64)
    there = real.view([-1, 1, 1])
    new = there.where(new, cache.index([indices]))
    first = real.to(DType.int32).argmax(0, True)
    places = real.where(indices, indices.index_select(0, first))
    cache.index_put_([places], there.where(new, new.index_select(0, first)))


def _in_line(tensor: Value, rows: int) -> Any:
    """[..., tokens] of all sequences in float32, also where each has a row of its own."""
    single = tensor.single()
    if not rows:
        return single
    dims = list(range(1, len(tensor.sizes) - 1))
    return single.permute([*dims, 0, len(dims) + 1]).reshape([*(tensor.sizes[dim] for dim in dims), -1])


def _write_back(target: Value, content: Value, rows: int, real: Value) -> None:
    """Channels by tokens to where their input was; what is none of a sequence keeps what it has."""
    kept = _in_line(target, rows)
    content = real.where(content, kept)
    if rows:
        content = content.reshape([content.sizes[0], rows, -1]).permute([1, 0, 2])
    target.copy_(content)


def convolution(calls: RewrittenCalls, given: Given) -> None:
    """Of each channel by itself, over the last tokens; those before a sequence's first are its state."""
    data, weight, bias, cache = given["x"], given["weight"], given.get("bias_"), given.get("conv_states")
    channels, width = weight.sizes
    rows = data.sizes[0] if given.get("query_start_loc") is None else 0
    if len(data.sizes) != (3 if rows else 2) or (cache is not None and cache.sizes[2] != width - 1):
        raise CannotRewrite("a convolution whose states are not as long as its weight, less one")
    line = _in_line(data, rows)
    tokens = line.sizes[1]
    found = _sequences(calls, given, tokens, rows)
    count = found.begins.sizes[0]
    if cache is None:
        states = line.new_zeros([count, channels, width - 1])
    else:
        states = _first_states(given, cache, count)
    flat = states.permute([1, 0, 2]).reshape([channels, -1])

    def at(sequence: Any, place: Any) -> Any:
        """The input at places in sequences, which are below zero in their states."""
        token = (found.begins.index_select(0, sequence) + place).clamp(0, tokens - 1)
        before = (place + (width - 1)).clamp(0, width - 2) + sequence * (width - 1)
        return (place >= 0).where(line.index_select(1, token), flat.index_select(1, before))

    parts = []
    for back in range(width):
        place = found.place - back if back else found.place
        factor = weight.part(1, width - 1 - back, width - back).single()
        parts.append(at(found.of, place) * factor)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    if bias is not None:
        total = total + bias.single().unsqueeze(1)
    if given["silu_activation"]:
        total = total.silu()
    if cache is not None:
        numbers, lengths = calls.count(count), found.ends - found.begins
        last = [at(numbers, lengths + (back - (width - 1))) for back in range(width - 1)]
        new: Any = calls.one("aten::stack", tensors=last, dim=-1)
        _keep(given, cache, new.permute([1, 0, 2]), found.real_ones)
    _write_back(data, total, rows, found.real)


def convolution_step(calls: RewrittenCalls, given: Given) -> None:
    """The next tokens of each sequence, [sequences, channels, tokens]. A state may be longer than the weight needs."""
    plain("a convolution", given, cache_seqlens_=(None,))
    data, cache, weight, bias = given["x"], given["conv_states"], given["weight"], given.get("bias_")
    if len(data.sizes) != 3:
        raise CannotRewrite(f"a convolution over {list(data.sizes)}")
    (count, channels, tokens), length = data.sizes, cache.sizes[2]
    everywhere = calls.filled(count).full_like(1, dtype=DType.bool)
    states = _first_states(given | {"has_initial_state": everywhere}, cache, count)
    line: Any = calls.cat([states, data.single()], -1)
    seen = line.part(2, length + 1 - weight.sizes[1], length + tokens)
    column = weight.single().unsqueeze(1)
    total = seen.conv1d(column, None if bias is None else bias.single(), [1], [0], [1], channels)
    if given["silu_activation"]:
        total = total.silu()
    indices, real = given.get("cache_indices"), everywhere
    if indices is not None:
        real = indices.ne(given["padding"])
        total = real.view([-1, 1, 1]).where(total, data.single())
    _keep(given, cache, line.part(2, tokens, tokens + length), real)
    data.copy_(total)


def selective_scan(calls: RewrittenCalls, given: Given) -> None:
    """h = exp(delta A) h + delta B u of each token, y = C h + D u to where delta was, and y silu(z) to where z was.

    The states of all tokens are found in steps that each combine twice as many tokens as the one before."""
    plain("a scan", given, block_idx_first_scheduled_token=(None,), block_idx_last_scheduled_token=(None,))
    plain("a scan", given, initial_state_idx=(None,), cu_chunk_seqlen=(None,), last_chunk_indices=(None,))
    data, cache, gate = given["u"], given["ssm_states"], given.get("z_")
    rows = data.sizes[0] if given.get("query_start_loc") is None else 0
    if any(len(given[name].sizes) != (4 if rows else 3) for name in ("B", "C")):
        raise CannotRewrite("a scan whose factors B and C are the same for all tokens")
    line, delta = _in_line(data, rows), _in_line(given["delta"], rows)
    channels, tokens = line.sizes
    found = _sequences(calls, given, tokens, rows)
    if given.get("delta_bias_") is not None:
        delta = delta + given["delta_bias_"].single().unsqueeze(1)
    if given["delta_softplus"]:
        delta = delta.softplus()

    def of_channels(name: str) -> Any:
        factor = _in_line(given[name], rows)  # [groups, states, tokens]
        repeats = channels // factor.sizes[0]
        return factor.repeat_interleave(repeats, 0) if repeats > 1 else factor

    decay = (delta.unsqueeze(1) * given["A"].single().unsqueeze(2)).exp()
    state = (delta * line).unsqueeze(1) * of_channels("B")
    # Before its first token a sequence has its first state, which nothing before it in line changes.
    first = found.place.eq(0)
    before = _first_states(given, cache, found.begins.sizes[0]).permute([1, 2, 0]).index_select(2, found.of)
    state = first.where(state + decay * before, state)
    decay = decay.masked_fill(first, 0)
    apart = 1
    while apart < tokens:
        earlier_state, earlier_decay = (
            each.part(2, 0, tokens - apart).constant_pad_nd([apart, 0], 0) for each in (state, decay)
        )
        state = state + decay * earlier_state
        decay = decay * earlier_decay
        apart *= 2
    total = (state * of_channels("C")).sum([1])
    if given.get("D_") is not None:
        column = given["D_"].single().unsqueeze(1)
        total = total + line * column
    last = (found.ends - 1).clamp(0, tokens - 1)
    _keep(given, cache, state.index_select(2, last).permute([2, 0, 1]), found.real_ones)
    if gate is not None:
        open_ = _in_line(gate, rows).silu()
        _write_back(gate, total * open_, rows, found.real)
    _write_back(given["delta"], total, rows, found.real)


_NAMES = {"pad_slot_id": "padding", "null_block_id": "padding", "conv_state_indices": "cache_indices"}
_NAMES |= {"conv_state": "conv_states"}
RULES: tuple[tuple[Any, str], ...] = (
    (renamed(convolution, _NAMES), "_C::causal_conv1d_fwd sgl_kernel::causal_conv1d_fwd"),
    (renamed(convolution_step, _NAMES), "_C::causal_conv1d_update sgl_kernel::causal_conv1d_update"),
    (renamed(selective_scan, _NAMES), "_C::selective_scan_fwd sgl_kernel::selective_scan_fwd"),
)
