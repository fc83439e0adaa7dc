"""Mamba's convolutions and scans, low-rank adapters and NVFP4 as compositions, each against its definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import silu, softplus

from replayfmt.importers.importing import import_trace
from tests.importers.test_portable import Machine

from .test_engine_rewrites import _close, refusal, rewrite, run
from .traces import NONE, kernel, launch, op, scalar, tensor, trace


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


_LENGTHS = [4, 1, 6]
_STARTS = torch.tensor([0, 4, 5, 11], dtype=torch.int32)
_PLACES = torch.tensor([4, 0, 2], dtype=torch.int32)
_PADDED = torch.tensor([4, -1, 2], dtype=torch.int32)
_HAS = torch.tensor([True, True, False])


def in_rows(line: torch.Tensor, rows: int) -> torch.Tensor:
    """[..., tokens] as [rows, ..., tokens]."""
    return torch.stack(line.tensor_split(rows, -1))


# --------------------------------------------------------------------------------------------------------- convolution


def convolved(data: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Of one sequence, [channels, tokens], token by token."""
    width, line = weight.shape[1], torch.cat([state, data], 1)
    tokens = [(line[:, place : place + width] * weight).sum(1) + bias for place in range(data.shape[1])]
    return silu(torch.stack(tokens, 1))


@pytest.mark.parametrize("library", ["_C", "sgl_kernel"])
@pytest.mark.parametrize("indices", [_PLACES, _PADDED])
def test_a_convolution_begins_with_each_sequences_state(library: str, indices: torch.Tensor) -> None:
    data, weight, bias, states = torch.randn(3, 11), torch.randn(3, 4), torch.randn(3), torch.randn(6, 3, 3)
    x, kept = data.clone(), states.clone()
    given = {"x": x, "weight": weight, "bias_": bias, "conv_states": kept, "query_start_loc": _STARTS}
    given |= {"cache_indices": indices, "has_initial_state": _HAS, "silu_activation": True, "pad_slot_id": -1}
    run(f"{library}::causal_conv1d_fwd", **given)
    expected, left = data.clone(), states.clone()
    for number, place in enumerate(indices.tolist()):
        if place < 0:
            continue
        part = slice(int(_STARTS[number]), int(_STARTS[number + 1]))
        before = states[place] if _HAS[number] else torch.zeros(3, 3)
        expected[:, part] = convolved(data[:, part], before, weight, bias)
        left[place] = torch.cat([before, data[:, part]], 1)[:, -3:]
    _close(x, expected, 1e-5)
    _close(kept, left, 1e-6)


def test_a_convolution_of_rows_needs_no_states() -> None:
    data, weight = torch.randn(2, 3, 5), torch.randn(3, 4)
    x = data.clone()
    given = dict.fromkeys(("bias_", "conv_states", "query_start_loc", "cache_indices", "has_initial_state"))
    run("_C::causal_conv1d_fwd", **given, x=x, weight=weight, silu_activation=True, pad_slot_id=-1)
    nothing = torch.zeros(3, 3)
    _close(x, torch.stack([convolved(each, nothing, weight, torch.zeros(3)) for each in data]), 1e-5)


@pytest.mark.parametrize("length", [3, 5])
@pytest.mark.parametrize("indices", [None, _PLACES, _PADDED, torch.tensor([-1, -1, -1], dtype=torch.int32)])
def test_the_next_tokens_of_a_convolution_move_its_states_on(length: int, indices: torch.Tensor | None) -> None:
    data, weight, bias, states = torch.randn(3, 2, 2), torch.randn(2, 4), torch.randn(2), torch.randn(6, 2, length)
    states = states[:3] if indices is None else states
    x, kept = data.clone(), states.clone()
    given = {"x": x, "conv_state": kept, "weight": weight, "bias_": bias, "silu_activation": True}
    run("_C::causal_conv1d_update", **given, cache_seqlens_=None, conv_state_indices=indices, pad_slot_id=-1)
    expected, left = data.clone(), states.clone()
    for number, place in enumerate(range(3) if indices is None else indices.tolist()):
        if place >= 0:
            expected[number] = convolved(data[number], states[place][:, -3:], weight, bias)
            left[place] = torch.cat([states[place], data[number]], 1)[:, -length:]
    _close(x, expected, 1e-5)
    _close(kept, left, 1e-6)


def test_a_convolution_with_a_state_in_a_ring_is_refused() -> None:
    data, states = torch.zeros(1, 2, 1), torch.zeros(1, 2, 3)
    given = {"x": data, "conv_state": states, "weight": torch.zeros(2, 4), "cache_seqlens_": torch.zeros(1)}
    assert "cache_seqlens_" in refusal("_C::causal_conv1d_update", **given)


# ---------------------------------------------------------------------------------------------------------------- scan


def scanned(given: dict[str, Any], part: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """y of one sequence, [channels, tokens], token by token, and the state after it."""
    channels = given["u"].shape[0]
    groups = given["B"].shape[0]
    delta = softplus(given["delta"] + given["delta_bias_"].unsqueeze(1))
    found = []
    for token in range(part.start, part.stop):
        step = delta[:, token].unsqueeze(1)
        one, other = (given[name][:, :, token].repeat_interleave(channels // groups, 0) for name in ("B", "C"))
        state = (step * given["A"]).exp() * state + step * one * given["u"][:, token].unsqueeze(1)
        found.append((state * other).sum(1) + given["D_"] * given["u"][:, token])
    return torch.stack(found, 1), state


def factors() -> dict[str, Any]:
    given = {"u": torch.randn(4, 11), "delta": torch.randn(4, 11), "A": -torch.rand(4, 5), "D_": torch.randn(4)}
    return given | {"B": torch.randn(2, 5, 11), "C": torch.randn(2, 5, 11), "delta_bias_": torch.randn(4)}


@pytest.mark.parametrize("library", ["_C", "sgl_kernel"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("indices", [_PLACES, _PADDED])
def test_a_scan_carries_each_sequences_state_from_token_to_token(
    library: str, gated: bool, indices: torch.Tensor
) -> None:
    given, states, gate = factors(), torch.randn(6, 4, 5), torch.randn(4, 11)
    kept, z, delta = states.clone(), gate.clone() if gated else None, given["delta"].clone()
    fixed = {"query_start_loc": _STARTS, "cache_indices": indices, "has_initial_state": _HAS, "delta_softplus": True}
    run(f"{library}::selective_scan_fwd", **given | fixed | {"delta": delta}, z_=z, ssm_states=kept, pad_slot_id=-1)
    expected, opened, left = given["delta"].clone(), gate.clone(), states.clone()
    for number, place in enumerate(indices.tolist()):
        if place < 0:
            continue
        part = slice(int(_STARTS[number]), int(_STARTS[number + 1]))
        before = states[place] if _HAS[number] else torch.zeros(4, 5)
        expected[:, part], left[place] = scanned(given, part, before)
        opened[:, part] = expected[:, part] * silu(gate[:, part])
    _close(delta, expected, 1e-5)
    _close(kept, left, 1e-5)
    if z is not None:
        _close(z, opened, 1e-5)


def test_a_scan_of_rows_scans_each_by_itself() -> None:
    given = {name: each[..., :10] if each.shape[-1] == 11 else each for name, each in factors().items()}
    states = torch.randn(2, 4, 5)
    rows = {name: in_rows(given[name], 2) for name in ("u", "delta", "B", "C")}
    fixed = {"query_start_loc": None, "cache_indices": None, "has_initial_state": torch.tensor([True, True])}
    kept = states.clone()
    more = {"z_": None, "delta_softplus": True, "ssm_states": kept, "pad_slot_id": -1}
    run("_C::selective_scan_fwd", **given | rows | fixed | more)
    found = [scanned(given, slice(5 * row, 5 * row + 5), states[row]) for row in range(2)]
    _close(rows["delta"], torch.stack([each for each, _state in found]), 1e-5)
    _close(kept, torch.stack([state for _each, state in found]), 1e-5)


def test_a_scan_of_blocks_of_states_is_refused() -> None:
    given = factors() | {"z_": None, "ssm_states": torch.zeros(6, 4, 5), "query_start_loc": _STARTS}
    given |= {"cache_indices": _PLACES, "has_initial_state": _HAS, "delta_softplus": True, "pad_slot_id": -1}
    assert "initial_state_idx" in refusal("_C::selective_scan_fwd", **given, initial_state_idx=_PLACES)


# ------------------------------------------------------------------------------------------------------------ adapters

_ADAPTERS = torch.tensor([1, -1, 0, 1, 1])
_SORTED = ("token_indices_sorted_by_lora_ids", "num_tokens_per_lora", "lora_token_start_loc", "lora_ids")


def multiplied(data: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Each token times its adapter's matrix; `kept` where it has none."""
    weights = weights.reshape(weights.shape[0], *weights.shape[-2:])
    rows = [
        weights[index] @ each if index >= 0 else old for index, each, old in zip(_ADAPTERS, data, kept, strict=True)
    ]
    return torch.stack(rows)


def test_tokens_shrink_and_expand_by_their_own_adapters() -> None:
    data = torch.randn(5, 8)
    first, second = [torch.randn(2, 1, 3, 8) for _ in range(2)], [torch.randn(2, 1, 4, 3), torch.randn(2, 1, 2, 3)]
    told: dict[str, Any] = {"token_lora_mapping": _ADAPTERS, "no_lora_flag_cpu": torch.tensor([False])}
    told |= dict.fromkeys(_SORTED, torch.zeros(5))
    small = torch.ones(2, 5, 3)
    machine = Machine()
    lists = {"lora_a_weights": [machine.given(each) for each in first]}
    machine.run(
        rewrite(machine, "vllm::lora_shrink", told | lists | {"inputs": data, "output_tensor": small, "scaling": 0.5})
    )
    nothing = torch.zeros(5, 3)
    expected = torch.stack([multiplied(data * 0.5, each, nothing) for each in first])
    _close(small, expected, 1e-5)
    for added in (True, False):
        wide = torch.randn(5, 9)
        before, machine = wide.clone(), Machine()
        lists = {"lora_b_weights": [machine.given(each) for each in second]}
        given = told | lists | {"inputs": small, "output_tensor": wide, "offset_start": 1, "add_inputs": added}
        machine.run(rewrite(machine, "vllm::lora_expand", given))
        found = before.clone()
        for part, weights, columns in ((small[0], second[0], slice(1, 5)), (small[1], second[1], slice(5, 7))):
            own = before[:, columns]
            made = multiplied(part, weights, own)
            found[:, columns] = torch.where((_ADAPTERS >= 0).unsqueeze(1) & added, made + own, made)
        _close(wide, found, 1e-5)


def test_adapters_by_token_and_by_sequence() -> None:
    data, weights, out = torch.randn(5, 8), torch.randn(2, 3, 8), torch.zeros(5, 4)
    given = {"inputs": data, "lora_indices_tensor": _ADAPTERS}
    run("vllm::bgmv_shrink", **given, lora_a_weights=weights, output_tensor=out, scaling=2.0)
    _close(out[:, :3], multiplied(data * 2, weights, torch.zeros(5, 3)), 1e-5)
    assert not out[:, 3].any()
    wide = torch.ones(5, 6)
    run("vllm::bgmv_expand_slice", **given, lora_b_weights=weights, output_tensor=wide, slice_offset=2, slice_size=3)
    _close(
        wide[:, 2:5], torch.where((_ADAPTERS >= 0).unsqueeze(1), 1.0, 0.0) + multiplied(data, weights, torch.ones(5, 3))
    )
    assert (wide[:, [0, 1, 5]] == 1).all()

    lengths = {"b_seq_start_loc": torch.tensor([0, 1, 2, 3]), "seq_len_tensor": torch.tensor([1, 1, 1, 2])}
    fixed = {"batches": 4, "max_seq_length": 2, "token_nums": 5, "lora_indices_tensor": torch.tensor([1, -1, 0, 1])}
    small, machine = torch.zeros(1, 5, 3), Machine()
    lists = {"lora_a_weights": [machine.given(weights)], "inputs": data, "output_tensor": small, "scaling": 1.0}
    machine.run(rewrite(machine, "vllm::sgmv_shrink", lengths | fixed | lists))
    _close(small[0], multiplied(data, weights, torch.zeros(5, 3)), 1e-5)


# --------------------------------------------------------------------------------------------------------------- NVFP4

_NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nearest(data: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of float4; of two as near, the one with an even code."""
    away = (data.abs().unsqueeze(-1) - _NUMBERS).abs()
    even = away + torch.tensor([0.0, 1e-7] * 4)
    return _NUMBERS[even.argmin(-1)] * data.sign()


def quantized(data: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers before their scales, and the scales."""
    groups = data.float().reshape(len(data), -1, 16)
    scales = (groups.abs().amax(-1) * (1 / 6) * factor).clamp(max=448).to(torch.float8_e4m3fn).float()
    back = torch.where(scales > 0, factor / scales, 0.0)
    return nearest((groups * back.unsqueeze(-1)).clamp(-6, 6)).reshape(data.shape), scales


def in_order(scales: torch.Tensor) -> torch.Tensor:
    """Where the kernel stores each scale, as bytes."""
    rows, groups = scales.shape
    tall, wide = -(-rows // 128) * 128, -(-groups // 4) * 4
    places = torch.zeros(tall * wide, dtype=torch.uint8)
    flat = scales.to(torch.float8_e4m3fn).view(torch.uint8)
    for row in range(rows):
        for group in range(groups):
            tile = (row // 128 * (wide // 4) + group // 4) * 512
            places[tile + row % 32 * 16 + row % 128 // 32 * 4 + group % 4] = flat[row, group]
    return places.reshape(tall, wide)


def numbers(codes: torch.Tensor) -> torch.Tensor:
    pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()
    return torch.where(pairs >= 8, -_NUMBERS[pairs & 7], _NUMBERS[pairs & 7])


@pytest.mark.parametrize("library", ["_C", "sgl_kernel"])
def test_numbers_of_four_bits_share_scales_in_the_order_of_products(library: str) -> None:
    data, factor = torch.randn(130, 96, dtype=torch.bfloat16), torch.tensor([3.0])
    data[1, :16] = 0
    codes, scales = torch.zeros(130, 48, dtype=torch.uint8), torch.zeros(256, 2, dtype=torch.int32)
    given = {"output": codes, "input": data, "output_scale": scales, "input_scale": factor}
    run(f"{library}::scaled_fp4_quant", **given)
    expected, own = quantized(data, 3.0)
    assert torch.equal(scales.view(torch.uint8), in_order(own))
    assert (numbers(codes) == expected).float().mean() > 0.999  # of two as near, a rounding error decides
    _close(numbers(codes), expected, 1.0)


def test_rounding_to_four_bits_is_to_the_nearest_and_to_even_codes() -> None:
    ties = torch.tensor(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0]
    )
    codes, scales = torch.zeros(1, 8, dtype=torch.uint8), torch.zeros(128, 1, dtype=torch.int32)
    given = {"output": codes, "input": ties.unsqueeze(0), "output_scale": scales, "input_scale": torch.tensor([1.0])}
    run("_C::scaled_fp4_quant", **given)
    half = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert numbers(codes).abs().tolist() == [half * 2]
    assert numbers(codes)[0, 8:].max() <= 0


def test_results_of_quantization_may_be_plain_rows_of_scales() -> None:
    data, machine = torch.randn(3, 32), Machine()
    results = [machine.new((3, 16), torch.uint8), machine.new((3, 2), torch.uint8)]
    given = {"input": data, "input_scale": torch.tensor([2.0]), "is_sf_swizzled_layout": False}
    machine.run(rewrite(machine, "_C::scaled_fp4_quant", given, results))
    expected, own = quantized(data, 2.0)
    assert torch.equal(machine.values[id(results[1])].view(torch.float8_e4m3fn).float(), own)
    _close(numbers(machine.values[id(results[0])]), expected, 1e-6)


def test_a_product_of_four_bits_is_that_of_numbers_times_scales() -> None:
    codes = [torch.randint(0, 256, (rows, 48), dtype=torch.uint8) for rows in (5, 130)]
    scales = [torch.rand(rows, 6).to(torch.float8_e4m3fn).float() for rows in (5, 130)]
    out = torch.zeros(5, 130)
    ordered = [in_order(each).view(torch.float8_e4m3fn) for each in scales]
    given = {"a": codes[0], "b": codes[1], "block_scale_a": ordered[0], "block_scale_b": ordered[1]}
    run("_C::cutlass_scaled_fp4_mm", **given, out=out, alpha=torch.tensor([0.25]))
    one, other = (numbers(code) * scale.repeat_interleave(16, 1) for code, scale in zip(codes, scales, strict=True))
    _close(out, one @ other.t() * 0.25, 1e-4)


# ------------------------------------------------------------------------------------------------------------- experts


def test_the_older_way_back_from_experts_counts_choice_by_choice() -> None:
    rows, weights, total = torch.randn(6, 8), torch.rand(3, 2), torch.zeros(3, 8)
    rows[5] = torch.nan  # of an expert elsewhere
    places = torch.tensor([[0, 5, 3], [4, 1, 2]], dtype=torch.int32)  # [choices, tokens]
    given = {"permuted_hidden_states": rows, "topk_weights": weights, "topk_ids": torch.zeros(3, 2)}
    given |= {"src_row_id2dst_row_id_map": places, "expert_first_token_offset": torch.tensor([0, 2, 5])}
    run("_moe_C::moe_unpermute", **given, n_expert=4, n_local_expert=2, topk=2, hidden_states=total)
    expected = [
        sum(weights[token, choice] * rows[place] for choice in range(2) if (place := int(places[choice, token])) < 5)
        for token in range(3)
    ]
    _close(total, torch.stack([torch.as_tensor(each) for each in expected]), 1e-5)


@pytest.mark.slow
def test_a_traces_mamba_adapters_and_four_bits_become_compositions_that_run(tools: Any, tmp_path: Path) -> None:
    half, whole, yes = "c10::BFloat16", "int", scalar("True")
    inputs, states, three = tensor(half, 8, 11), tensor(half, 6, 8, 3), tensor(whole, 3)
    factor, weight, pad = tensor(half, 2, 5, 11), tensor(half, 8, 4), scalar("-1")
    column, codes, scales = tensor("float", 8), tensor("unsigned char", 4, 16), tensor("c10::Float8_e4m3fn", 128, 4)
    starts, has = tensor(whole, 4), tensor("bool", 3)
    calls = {
        "_C::causal_conv1d_fwd": [inputs, weight, tensor(half, 8), states, starts, three, has, yes, pad],
        "_C::causal_conv1d_update": [tensor(half, 3, 8, 1), states, weight, tensor(half, 8), yes, NONE, three, pad],
        "_C::selective_scan_fwd": [
            inputs, inputs, tensor("float", 8, 5), factor, factor, column, inputs, column, yes, starts, three, has,
            tensor(half, 6, 8, 5), pad,
        ],
        "vllm::bgmv_shrink": [
            tensor(half, 4, 16), tensor(half, 2, 8, 16), tensor("float", 4, 8), tensor("long int", 4), scalar("1."),
        ],
        "_C::scaled_fp4_quant": [codes, tensor(half, 4, 32), tensor(whole, 128, 1), tensor("float", 1), yes],
        "_C::cutlass_scaled_fp4_mm": [tensor(half, 4, 4), codes, codes, scales, scales, tensor("float", 1)],
    }  # fmt: skip
    events = []
    for place, (name, rows) in enumerate(calls.items(), 1):
        events += [
            op(name, place * 40, 20, rows),
            launch(place, place * 40 + 2),
            kernel(place, place * 40 + 10, 6, name),
        ]
    path, out = trace(tmp_path / "trace.json", events), tmp_path / "out.opreplay"
    report = import_trace(path, out, rewrite="portable")
    text = "\n".join(report.lines())
    assert report.calls()["incomplete"] == 0, text
    assert all(f"rewritten: {name} by aten::" in text for name in calls)
    code, _printed, err = tools("run", "--device=cpu", out)
    assert code == 0, err
