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

from ..common.synthesis import Tensor
from .rewriting import CannotRewrite, Given, Recorded, RewrittenCalls, plain, renamed


@dataclass(frozen=True)
class _Sequences:
    """Where the tokens of sequences are. By token: the sequence that it is of, which token of it, and whether it is
    of any that is none of the padding; by sequence: where it begins and ends, and whether it is none of the padding."""

    of: Tensor
    place: Tensor
    real: Tensor
    begins: Tensor
    ends: Tensor
    real_ones: Tensor


def _sequences(calls: RewrittenCalls, given: Given, tokens: int, rows: int) -> _Sequences:
    """Of the arguments that both operators have. `rows`: how many there are, 0 where sequences follow each other."""
    starts, indices = given.get("query_start_loc"), given.get("cache_indices")
    if starts is None:
        starts = calls.one("aten::mul.Scalar", self=calls.count(rows + 1), other=tokens // max(rows, 1))
    starts = calls.cast(starts, DType.int64)
    count = starts.meta.sizes[0] - 1
    begins, ends = calls.slice(starts, 0, 0, count), calls.slice(starts, 0, 1, count + 1)
    numbers = calls.count(tokens)
    of = calls.one("aten::searchsorted.Tensor", sorted_sequence=ends, self=numbers, right=True)
    inside = calls.one("aten::lt.Scalar", self=of, other=count)
    of = calls.one("aten::clamp", self=of, min=0, max=count - 1)
    own = calls.one("aten::index_select", self=begins, dim=0, index=of)
    place = calls.one("aten::sub.Tensor", self=numbers, other=own)
    if indices is None:
        real_ones = calls.one("aten::ge.Scalar", self=begins, other=0)
        return _Sequences(of, place, inside, begins, ends, real_ones)
    if len(indices.meta.sizes) != 1:
        raise CannotRewrite("states of several blocks for each sequence")
    real_ones = calls.one("aten::ne.Scalar", self=indices, other=given["padding"])
    real = calls.one("aten::index_select", self=real_ones, dim=0, index=of)
    real = calls.one("aten::logical_and", self=inside, other=real)
    return _Sequences(of, place, real, begins, ends, real_ones)


def _first_states(calls: RewrittenCalls, given: Given, cache: Tensor, count: int) -> Tensor:
    """The state of each sequence before its first token, in float32: zeros where it has none."""
    indices, has = given.get("cache_indices"), given.get("has_initial_state")
    states = cache if indices is None else calls.one("aten::index.Tensor", self=cache, indices=[indices])
    states = calls.single(calls.slice(states, 0, 0, count))
    nothing = calls.one("aten::zeros_like", self=states)
    if has is None:
        return nothing
    has = calls.one("aten::view", self=has, size=[count, 1, 1])
    return calls.one("aten::where.self", condition=has, self=states, other=nothing)


def _keep(calls: RewrittenCalls, given: Given, cache: Tensor, new: Tensor, real: Tensor) -> None:
    """Write each sequence's state into the cache. What is padding writes what a real one writes, if there is one, or
    what is there: so no two write different states to one place."""
    indices = given.get("cache_indices")
    new = calls.cast(new, cache.meta.dtype)
    if indices is None:
        calls.write(calls.slice(cache, 0, 0, new.meta.sizes[0]), new)
        return
    indices = calls.cast(indices, DType.int64)
    there = calls.one("aten::view", self=real, size=[-1, 1, 1])
    old = calls.one("aten::index.Tensor", self=cache, indices=[indices])
    new = calls.one("aten::where.self", condition=there, self=new, other=old)
    first = calls.one("aten::argmax", self=calls.cast(real, DType.int32), dim=0, keepdim=True)
    places = calls.one(
        "aten::where.self",
        condition=real,
        self=indices,
        other=calls.one("aten::index_select", self=indices, dim=0, index=first),
    )
    content = calls.one(
        "aten::where.self",
        condition=there,
        self=new,
        other=calls.one("aten::index_select", self=new, dim=0, index=first),
    )
    calls.call("aten::index_put_", {"self": cache, "indices": [places], "values": content}, [cache])


def _in_line(calls: RewrittenCalls, tensor: Tensor, rows: int) -> Tensor:
    """[..., tokens] of all sequences in float32, also where each has a row of its own."""
    single = calls.single(tensor)
    if not rows:
        return single
    dims = list(range(1, len(tensor.meta.sizes) - 1))
    turned = calls.one("aten::permute", self=single, dims=[*dims, 0, len(dims) + 1])
    return calls.one("aten::reshape", self=turned, shape=[*(tensor.meta.sizes[dim] for dim in dims), -1])


def _write_back(calls: RewrittenCalls, target: Tensor, content: Tensor, rows: int, real: Tensor) -> None:
    """Channels by tokens to where their input was; what is none of a sequence keeps what it has."""
    kept = _in_line(calls, target, rows)
    content = calls.one("aten::where.self", condition=real, self=content, other=kept)
    if rows:
        channels = content.meta.sizes[0]
        content = calls.one("aten::reshape", self=content, shape=[channels, rows, -1])
        content = calls.one("aten::permute", self=content, dims=[1, 0, 2])
    calls.write(target, content)


# --------------------------------------------------------------------------------------------------------- convolution


def convolution(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    """Of each channel by itself, over the last tokens; those before a sequence's first are its state."""
    data, weight, bias, cache = given["x"], given["weight"], given.get("bias_"), given.get("conv_states")
    channels, width = weight.meta.sizes
    rows = data.meta.sizes[0] if given.get("query_start_loc") is None else 0
    if len(data.meta.sizes) != (3 if rows else 2) or (cache is not None and cache.meta.sizes[2] != width - 1):
        raise CannotRewrite("a convolution whose states are not as long as its weight, less one")
    line = _in_line(calls, data, rows)
    tokens = line.meta.sizes[1]
    found = _sequences(calls, given, tokens, rows)
    count = found.begins.meta.sizes[0]
    if cache is None:
        states = calls.one("aten::new_zeros", self=line, size=[count, channels, width - 1])
    else:
        states = _first_states(calls, given, cache, count)
    flat = calls.one(
        "aten::reshape", self=calls.one("aten::permute", self=states, dims=[1, 0, 2]), shape=[channels, -1]
    )

    def at(sequence: Tensor, place: Tensor) -> Tensor:
        """The input at places in sequences, which are below zero in their states."""
        begin = calls.one("aten::index_select", self=found.begins, dim=0, index=sequence)
        token = calls.one(
            "aten::clamp", self=calls.one("aten::add.Tensor", self=begin, other=place), min=0, max=tokens - 1
        )
        before = calls.one("aten::add.Scalar", self=place, other=width - 1)
        before = calls.one("aten::clamp", self=before, min=0, max=width - 2)
        before = calls.one(
            "aten::add.Tensor", self=before, other=calls.one("aten::mul.Scalar", self=sequence, other=width - 1)
        )
        return calls.one(
            "aten::where.self",
            condition=calls.one("aten::ge.Scalar", self=place, other=0),
            self=calls.one("aten::index_select", self=line, dim=1, index=token),
            other=calls.one("aten::index_select", self=flat, dim=1, index=before),
        )

    parts = []
    for back in range(width):
        place = calls.one("aten::sub.Scalar", self=found.place, other=back) if back else found.place
        factor = calls.single(calls.slice(weight, 1, width - 1 - back, width - back))
        parts.append(calls.times(at(found.of, place), factor))
    total = parts[0]
    for part in parts[1:]:
        total = calls.one("aten::add.Tensor", self=total, other=part)
    if bias is not None:
        column = calls.one("aten::unsqueeze", self=calls.single(bias), dim=1)
        total = calls.one("aten::add.Tensor", self=total, other=column)
    if given["silu_activation"]:
        total = calls.one("aten::silu", self=total)
    if cache is not None:
        numbers, lengths = calls.count(count), calls.one("aten::sub.Tensor", self=found.ends, other=found.begins)
        last = [
            at(numbers, calls.one("aten::add.Scalar", self=lengths, other=back - (width - 1)))
            for back in range(width - 1)
        ]
        new = calls.one("aten::stack", tensors=last, dim=-1)
        _keep(calls, given, cache, calls.one("aten::permute", self=new, dims=[1, 0, 2]), found.real_ones)
    _write_back(calls, data, total, rows, found.real)


def convolution_step(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    """The next tokens of each sequence, [sequences, channels, tokens]. A state may be longer than the weight needs."""
    plain("a convolution", given, cache_seqlens_=(None,))
    data, cache, weight = given["x"], given["conv_states"], given["weight"]
    if len(data.meta.sizes) != 3:
        raise CannotRewrite(f"a convolution over {list(data.meta.sizes)}")
    (count, channels, tokens), length = data.meta.sizes, cache.meta.sizes[2]
    everywhere = calls.one("aten::full_like", self=calls.filled(count), fill_value=1, dtype=DType.bool)
    given = given | {"has_initial_state": everywhere}
    states = _first_states(calls, given, cache, count)
    line = calls.one("aten::cat", tensors=[states, calls.single(data)], dim=-1)
    width = weight.meta.sizes[1]
    seen = calls.slice(line, 2, length + 1 - width, length + tokens)
    bias = given.get("bias_")
    total = calls.one(
        "aten::conv1d",
        input=seen,
        weight=calls.one("aten::unsqueeze", self=calls.single(weight), dim=1),
        bias=None if bias is None else calls.single(bias),
        stride=[1],
        padding=[0],
        dilation=[1],
        groups=channels,
    )
    if given["silu_activation"]:
        total = calls.one("aten::silu", self=total)
    indices, real = given.get("cache_indices"), everywhere
    if indices is not None:
        real = calls.one("aten::ne.Scalar", self=indices, other=given["padding"])
        there = calls.one("aten::view", self=real, size=[-1, 1, 1])
        total = calls.one("aten::where.self", condition=there, self=total, other=calls.single(data))
    _keep(calls, given, cache, calls.slice(line, 2, tokens, tokens + length), real)
    calls.write(data, total)


# ---------------------------------------------------------------------------------------------------------------- scan


def selective_scan(calls: RewrittenCalls, given: Given, _results: Recorded) -> None:
    """h = exp(delta A) h + delta B u of each token, y = C h + D u to where delta was, and y silu(z) to where z was.

    The states of all tokens are found in steps that each combine twice as many tokens as the one before."""
    plain("a scan", given, block_idx_first_scheduled_token=(None,), block_idx_last_scheduled_token=(None,))
    plain("a scan", given, initial_state_idx=(None,), cu_chunk_seqlen=(None,), last_chunk_indices=(None,))
    data, cache, gate = given["u"], given["ssm_states"], given.get("z_")
    rows = data.meta.sizes[0] if given.get("query_start_loc") is None else 0
    if any(len(given[name].meta.sizes) != (4 if rows else 3) for name in ("B", "C")):
        raise CannotRewrite("a scan whose factors B and C are the same for all tokens")
    line, delta = _in_line(calls, data, rows), _in_line(calls, given["delta"], rows)
    channels, tokens = line.meta.sizes
    found = _sequences(calls, given, tokens, rows)
    count = found.begins.meta.sizes[0]
    if given.get("delta_bias_") is not None:
        column = calls.one("aten::unsqueeze", self=calls.single(given["delta_bias_"]), dim=1)
        delta = calls.one("aten::add.Tensor", self=delta, other=column)
    if given["delta_softplus"]:
        delta = calls.one("aten::softplus", self=delta)

    def of_channels(name: str) -> Tensor:
        factor = _in_line(calls, given[name], rows)  # [groups, states, tokens]
        repeats = channels // factor.meta.sizes[0]
        return (
            calls.one("aten::repeat_interleave.self_int", self=factor, repeats=repeats, dim=0)
            if repeats > 1
            else factor
        )

    decay = calls.times(
        calls.one("aten::unsqueeze", self=delta, dim=1),
        calls.one("aten::unsqueeze", self=calls.single(given["A"]), dim=2),
    )
    decay = calls.one("aten::exp", self=decay)
    added = calls.one("aten::unsqueeze", self=calls.times(delta, line), dim=1)
    state = calls.times(added, of_channels("B"))
    # Before its first token a sequence has its first state, which nothing before it in line changes.
    first = calls.one("aten::eq.Scalar", self=found.place, other=0)
    before = calls.one("aten::permute", self=_first_states(calls, given, cache, count), dims=[1, 2, 0])
    before = calls.one("aten::index_select", self=before, dim=2, index=found.of)
    entered = calls.one("aten::add.Tensor", self=state, other=calls.times(decay, before))
    state = calls.one("aten::where.self", condition=first, self=entered, other=state)
    decay = calls.one("aten::masked_fill.Scalar", self=decay, mask=first, value=0)
    apart = 1
    while apart < tokens:
        earlier_state, earlier_decay = (
            calls.one("aten::constant_pad_nd", self=calls.slice(each, 2, 0, tokens - apart), pad=[apart, 0], value=0)
            for each in (state, decay)
        )
        state = calls.one("aten::add.Tensor", self=state, other=calls.times(decay, earlier_state))
        decay = calls.times(decay, earlier_decay)
        apart *= 2
    total = calls.one("aten::sum.dim_IntList", self=calls.times(state, of_channels("C")), dim=[1])
    if given.get("D_") is not None:
        column = calls.one("aten::unsqueeze", self=calls.single(given["D_"]), dim=1)
        total = calls.one("aten::add.Tensor", self=total, other=calls.times(line, column))
    last = calls.one("aten::clamp", self=calls.one("aten::sub.Scalar", self=found.ends, other=1), min=0, max=tokens - 1)
    new = calls.one(
        "aten::permute", self=calls.one("aten::index_select", self=state, dim=2, index=last), dims=[2, 0, 1]
    )
    _keep(calls, given, cache, new, found.real_ones)
    if gate is not None:
        open_ = calls.one("aten::silu", self=_in_line(calls, gate, rows))
        _write_back(calls, gate, calls.times(total, open_), rows, found.real)
    _write_back(calls, given["delta"], total, rows, found.real)


# --------------------------------------------------------------------------------------------------------------- table

_NAMES = {"pad_slot_id": "padding", "null_block_id": "padding", "conv_state_indices": "cache_indices"}
_NAMES |= {"conv_state": "conv_states"}
RULES: tuple[tuple[Any, str], ...] = (
    (renamed(convolution, _NAMES), "_C::causal_conv1d_fwd sgl_kernel::causal_conv1d_fwd"),
    (renamed(convolution_step, _NAMES), "_C::causal_conv1d_update sgl_kernel::causal_conv1d_update"),
    (renamed(selective_scan, _NAMES), "_C::selective_scan_fwd sgl_kernel::selective_scan_fwd"),
)
