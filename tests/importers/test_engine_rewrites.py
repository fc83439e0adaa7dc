"""Operators of serving engines as compositions: each is run on small cases and compared with its definition."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from replayfmt.format.model import Kernel
from replayfmt.importers.importing import import_trace
from replayfmt.importers.rewrites.engines import ENGINE_SCHEMAS, ENGINES
from replayfmt.importers.rewrites.portable import Portable
from replayfmt.importers.rewrites.rewriting import Rewritten
from replayfmt.pytorch.overloads import parse_schema
from tests.importers.test_portable import Machine

from .traces import kernel, launch, op, scalar, tensor, trace


def run(name: str, **given: Any) -> None:
    """Run what replaces a call on these tensors, which it writes."""
    names = [argument.name for argument in parse_schema(ENGINE_SCHEMAS[name]).arguments]
    assert set(given) <= set(names)
    machine = Machine()
    arguments = [(key, machine.given(given[key])) for key in names if key in given]
    rewritten = Portable().rewrite(Kernel(name, "default", ""), arguments, None)
    assert isinstance(rewritten, Rewritten), rewritten
    machine.run(rewritten)


def refusal(name: str, **given: Any) -> str:
    machine = Machine()
    said = Portable().rewrite(
        Kernel(name, "default", ""), [(key, machine.given(each)) for key, each in given.items()], None
    )
    assert isinstance(said, str)
    return said


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


def _norm(data: torch.Tensor, weight: torch.Tensor, epsilon: float, plus: int = 0) -> torch.Tensor:
    single = data.float()
    normal = single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + epsilon)
    return (normal * (weight.float() + plus)).to(data.dtype)


def _close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-2) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "out", "epsilon", "plus"),
    [
        ("_C::rms_norm", "result", "epsilon", 0),
        ("sgl_kernel::rmsnorm", "output", "eps", 0),
        ("sgl_kernel::gemma_rmsnorm", "output", "eps", 1),
        ("flashinfer::rmsnorm", "out", "eps", 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rms_norm_is_what_it_is_defined_as(name: str, out: str, epsilon: str, plus: int, dtype: torch.dtype) -> None:
    data, weight, result = torch.randn(3, 8, dtype=dtype), torch.randn(8, dtype=dtype), torch.zeros(3, 8, dtype=dtype)
    run(name, **{out: result, "input": data, "weight": weight, epsilon: 1e-5})
    _close(result, _norm(data, weight, 1e-5, plus))


@pytest.mark.parametrize(
    ("name", "epsilon", "plus"),
    [
        ("_C::fused_add_rms_norm", "epsilon", 0),
        ("sgl_kernel::fused_add_rmsnorm", "eps", 0),
        ("sgl_kernel::gemma_fused_add_rmsnorm", "eps", 1),
        ("flashinfer::fused_add_rmsnorm", "eps", 0),
    ],
)
def test_the_fused_sum_is_in_the_residual_and_its_norm_in_the_input(name: str, epsilon: str, plus: int) -> None:
    data, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    total = data + residual
    run(name, **{"input": data, "residual": residual, "weight": weight, epsilon: 1e-6})
    _close(residual, total)
    _close(data, _norm(total, weight, 1e-6, plus))


def test_aiters_norm_with_add_has_results_of_its_own() -> None:
    data, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    out, total = torch.zeros(3, 8), torch.zeros(3, 8)
    run(
        "aiter::rmsnorm2d_fwd_with_add",
        out=out,
        input=data,
        residual_in=residual,
        residual_out=total,
        weight=weight,
        epsilon=1e-6,
    )
    _close(total, data + residual)
    _close(out, _norm(data + residual, weight, 1e-6))


def test_aiters_norm_returns_its_result() -> None:
    machine = Machine()
    data, weight, result = torch.randn(3, 8), torch.randn(8), machine.new((3, 8))
    arguments = [("input", machine.given(data)), ("weight", machine.given(weight)), ("epsilon", 1e-6)]
    rewritten = Portable().rewrite(Kernel("aiter::rms_norm", "default", ""), arguments, [result])
    assert isinstance(rewritten, Rewritten)
    machine.run(rewritten)
    _close(machine.values[id(result)], _norm(data, weight, 1e-6))


@pytest.mark.parametrize("name", sorted(name for name in ENGINES if name.endswith("_and_mul")))
def test_a_gated_activation_is_of_the_first_half_times_the_second(name: str) -> None:
    data, result = torch.randn(3, 8), torch.zeros(3, 4)
    run(name, **{"result" if name.startswith("_C") else "out": result, "input": data})
    functional = torch.nn.functional
    active = {
        "silu_and_mul": functional.silu,
        "gelu_and_mul": functional.gelu,
        "gelu_tanh_and_mul": lambda each: functional.gelu(each, approximate="tanh"),
    }[name.partition("::")[2]]
    _close(result, active(data[:, :4]) * data[:, 4:], 1e-5)


def test_mul_and_silu_is_the_other_way_round() -> None:
    data, result = torch.randn(3, 8), torch.zeros(3, 4)
    run("_C::mul_and_silu", result=result, input=data)
    _close(result, torch.nn.functional.silu(data[:, 4:]) * data[:, :4], 1e-5)


def _fp8(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (data.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def test_quantized_forms_divide_by_the_scale_and_stay_in_range() -> None:
    data, weight, scale = torch.randn(3, 8) * 500, torch.randn(4), torch.tensor([0.5])
    result = torch.zeros(3, 8, dtype=torch.float8_e4m3fn)
    run("_C::static_scaled_fp8_quant", result=result, input=data, scale=scale)
    _close(result, _fp8(data, scale))
    half = torch.zeros(3, 4, dtype=torch.float8_e4m3fn)
    run("_C::silu_and_mul_quant", result=half, input=data, scale=scale)
    _close(half, _fp8(torch.nn.functional.silu(data[:, :4]) * data[:, 4:], scale))
    small, residual = torch.randn(3, 4), torch.randn(3, 4)
    run("_C::rms_norm_static_fp8_quant", result=half, input=small, weight=weight, scale=scale, epsilon=1e-5)
    _close(half, _fp8(_norm(small, weight, 1e-5), scale), 0.1)
    total = small + residual
    run(
        "_C::fused_add_rms_norm_static_fp8_quant",
        result=half,
        input=small,
        residual=residual,
        weight=weight,
        scale=scale,
        epsilon=1e-5,
    )
    _close(residual, total)
    _close(half, _fp8(_norm(total, weight, 1e-5), scale), 0.1)


@pytest.mark.parametrize(
    ("name", "out", "scale", "sizes"),
    [
        ("_C::dynamic_scaled_fp8_quant", "result", "scale", (1,)),
        ("_C::dynamic_per_token_scaled_fp8_quant", "result", "scale", (3, 1)),
        ("sgl_kernel::sgl_per_token_quant_fp8", "output_q", "output_s", (3, 1)),
    ],
)
def test_dynamic_scales_are_the_largest_magnitudes(name: str, out: str, scale: str, sizes: tuple[int, ...]) -> None:
    data, result, scales = torch.randn(3, 8), torch.zeros(3, 8, dtype=torch.float8_e4m3fn), torch.zeros(sizes)
    run(name, **{out: result, "input": data, scale: scales})
    most = data.abs().amax(-1, keepdim=True) if sizes == (3, 1) else data.abs().amax().reshape(1)
    _close(scales, most / 448, 1e-6)
    _close(result, _fp8(data, scales))


def _turned(data: torch.Tensor, table: torch.Tensor, neox: bool) -> torch.Tensor:
    """[tokens, heads, width], turned by the table's angles, pair by pair."""
    result, half = data.clone(), table.shape[1] // 2
    for token in range(data.shape[0]):
        for pair in range(half):
            one, other = (pair, pair + half) if neox else (2 * pair, 2 * pair + 1)
            cosine, sine = table[token, pair], table[token, half + pair]
            result[token, :, one] = data[token, :, one] * cosine - data[token, :, other] * sine
            result[token, :, other] = data[token, :, other] * cosine + data[token, :, one] * sine
    return result


@pytest.mark.parametrize("neox", [True, False])
def test_rotary_embedding_turns_pairs_in_place(neox: bool) -> None:
    positions, cache = torch.tensor([4, 0, 7]), torch.randn(9, 6)
    query, key = torch.randn(3, 2 * 8), torch.randn(3, 8)
    expected = [_turned(each.reshape(3, -1, 8), cache[positions], neox).reshape(3, -1) for each in (query, key)]
    run(
        "_C::rotary_embedding",
        positions=positions,
        query=query,
        key=key,
        head_size=8,
        cos_sin_cache=cache,
        is_neox=neox,
    )
    _close(query, expected[0], 1e-5)
    _close(key, expected[1], 1e-5)


@pytest.mark.parametrize("interleave", [True, False])
def test_flashinfers_rotary_embedding_has_results_of_its_own(interleave: bool) -> None:
    positions, cache = torch.tensor([4, 0, 7]), torch.randn(9, 6)
    query, key = torch.randn(3, 2, 8), torch.randn(3, 1, 8)
    turned = torch.zeros(3, 2, 8), torch.zeros(3, 1, 8)
    run(
        "sgl_kernel::apply_rope_pos_ids_cos_sin_cache",
        q=query,
        k=key,
        q_rope=turned[0],
        k_rope=turned[1],
        cos_sin_cache=cache,
        pos_ids=positions,
        interleave=interleave,
    )
    for found, data in zip(turned, (query, key), strict=True):
        _close(found, _turned(data, cache[positions], not interleave), 1e-5)


def test_new_tokens_are_in_the_caches_slots_and_a_slot_below_zero_is_none() -> None:
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    slots = torch.tensor([5, -1, 2])
    keys, values = torch.randn(4, 4, 2, 8), torch.randn(4, 4, 2, 8)
    expected = keys.clone(), values.clone()
    for cache, new in zip(expected, (key, value), strict=True):
        cache[1, 1], cache[0, 2] = new[0], new[2]
    run(
        "_C_cache_ops::reshape_and_cache_flash",
        key=key,
        value=value,
        key_cache=keys,
        value_cache=values,
        slot_mapping=slots,
    )
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])


def test_paged_attentions_caches_hold_tokens_in_their_own_layout() -> None:
    key, value = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    keys, values = torch.zeros(4, 2, 2, 4, 4), torch.zeros(4, 2, 8, 4)
    run(
        "_C_cache_ops::reshape_and_cache",
        key=key,
        value=value,
        key_cache=keys,
        value_cache=values,
        slot_mapping=torch.tensor([6, 1]),
    )
    assert torch.equal(keys[1, :, :, 2].reshape(2, 8), key[0]) and torch.equal(values[0, :, :, 1], value[1])


def test_a_cache_of_another_dtype_stays_as_it_is() -> None:
    key, cache = torch.randn(2, 2, 8), torch.zeros(4, 4, 2, 8, dtype=torch.uint8)
    said = refusal(
        "_C_cache_ops::reshape_and_cache_flash",
        key=key,
        value=key,
        key_cache=cache,
        value_cache=cache,
        slot_mapping=torch.tensor([6, 1]),
    )
    assert "a cache of uint8 for tokens of float32" in said


def _attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Of queries [n, heads, width], the last of which sees all keys [m, own heads, width]."""
    heads = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(heads, 1), values.repeat_interleave(heads, 1)
    scores = torch.einsum("qhw,khw->hqk", query, keys) * scale
    seen = torch.ones(len(query), len(keys)).tril(len(keys) - len(query)).bool()
    return torch.einsum("hqk,khw->qhw", scores.masked_fill(~seen, -math.inf).softmax(-1), values)


@pytest.mark.parametrize("name", ["_C::paged_attention_v1", "_C::paged_attention_v2"])
def test_decode_attention_reads_the_pages_of_each_sequence_to_its_end(name: str) -> None:
    query, out = torch.randn(2, 4, 8), torch.zeros(2, 4, 8)
    plain = torch.randn(6, 4, 2, 8), torch.randn(6, 4, 2, 8)  # blocks, block, heads, width
    keys = plain[0].reshape(6, 4, 2, 2, 4).permute(0, 2, 3, 1, 4).contiguous()
    values = plain[1].permute(0, 2, 3, 1).contiguous()
    table, lengths = torch.tensor([[3, 1, 0], [5, 4, 2]], dtype=torch.int32), torch.tensor([5, 12], dtype=torch.int32)
    run(
        name,
        out=out,
        query=query,
        key_cache=keys,
        value_cache=values,
        num_kv_heads=2,
        scale=0.3,
        block_tables=table,
        seq_lens=lengths,
        block_size=4,
        max_seq_len=12,
    )
    for each in range(2):
        pages = [cache[table[each].long()].reshape(-1, 2, 8)[: lengths[each]] for cache in plain]
        _close(out[each : each + 1], _attention(query[each : each + 1], *pages, 0.3), 1e-5)


@pytest.mark.parametrize("counts", [(1, 1), (4, 7), (1, 6)], ids=["decode", "prefill", "mixed"])
def test_ragged_attention_is_that_of_each_sequence(counts: tuple[int, int]) -> None:
    query = torch.randn(sum(counts), 4, 8)
    caches = torch.randn(6, 4, 2, 8), torch.randn(6, 4, 2, 8)
    table, lengths = torch.tensor([[3, 1, 0], [5, 4, 2]], dtype=torch.int32), torch.tensor([5, 12], dtype=torch.int32)
    starts = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
    out = torch.zeros_like(query)
    run(
        "_vllm_fa2_C::varlen_fwd",
        q=query,
        k=caches[0],
        v=caches[1],
        out=out,
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        seqused_k=lengths,
        leftpad_k=None,
        block_table=table,
        alibi_slopes=None,
        max_seqlen_q=max(counts),
        max_seqlen_k=12,
        p_dropout=0.0,
        softmax_scale=0.3,
        zero_tensors=False,
        is_causal=True,
        window_size_left=-1,
        window_size_right=0,
        softcap=0.0,
        return_softmax=False,
    )
    for each in range(2):
        pages = [cache[table[each].long()].reshape(-1, 2, 8)[: lengths[each]] for cache in caches]
        own = slice(int(starts[each]), int(starts[each + 1]))
        _close(out[own], _attention(query[own], *pages, 0.3), 1e-5)


@pytest.mark.parametrize("renormalize", [False, True])
def test_routing_takes_the_most_probable_experts(renormalize: bool) -> None:
    gates = torch.randn(3, 6)
    weights, experts = torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int32)
    places = torch.zeros(3, 2, dtype=torch.int32)
    run(
        "_moe_C::topk_softmax",
        topk_weights=weights,
        topk_indices=experts,
        token_expert_indices=places,
        gating_output=gates,
        renormalize=renormalize,
    )
    best, which = gates.softmax(-1).topk(2)
    _close(weights, best / best.sum(-1, keepdim=True) if renormalize else best, 1e-6)
    assert torch.equal(experts.long(), which) and places.tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(("name", "factor"), [("_moe_C::moe_sum", None), ("sgl_kernel::moe_sum_reduce", 2.5)])
def test_the_outputs_of_a_tokens_experts_are_added(name: str, factor: float | None) -> None:
    data, output = torch.randn(3, 2, 8), torch.zeros(3, 8)
    run(name, input=data, output=output, **({} if factor is None else {"routed_scaling_factor": factor}))
    _close(output, data.sum(1) * (factor or 1), 1e-5)


def test_a_traces_engine_operators_become_compositions_that_run_and_the_report_says_their_share(
    tools: Any, tmp_path: Path
) -> None:
    rows = [tensor("c10::BFloat16", 4, 8), tensor("c10::BFloat16", 4, 8), tensor("c10::BFloat16", 8), scalar("1e-05")]
    events = [
        op("_C::rms_norm", 10, 20, rows),
        launch(1, 12),
        kernel(1, 40, 6, "rms_norm_kernel"),
        op("aten::mm", 60, 20, [tensor("float", 4, 8), tensor("float", 8, 3)]),
        launch(2, 62),
        kernel(2, 100, 2),
    ]
    path, out = trace(tmp_path / "trace.json", events), tmp_path / "out.opreplay"
    plain = import_trace(path, out)
    assert plain.calls()["incomplete"] == 1
    report = import_trace(path, out, rewrite="portable", force=True)
    assert report.calls()["incomplete"] == 0
    text = "\n".join(report.lines())
    assert "2.0 us (25.0%) by the traced operators, 6.0 us (75.0%) by replacements" in text
    assert "rewritten: _C::rms_norm by aten::" in text
    code, printed, err = tools("run", "--device=cpu", out)
    assert code == 0, err
    code, printed, _err = tools("dump", out)
    assert "_C::rms_norm by aten::" in printed
