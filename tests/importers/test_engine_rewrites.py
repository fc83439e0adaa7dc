"""Operators of serving engines as compositions: each is run on small cases and compared with its definition."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from replayfmt.format.codes import StorageOrigin
from replayfmt.format.model import Kernel
from replayfmt.importers.importing import import_trace
from replayfmt.importers.rewrites.engines import ENGINES, SCHEMAS
from replayfmt.importers.rewrites.portable import Portable
from replayfmt.importers.rewrites.rewriting import Rewritten, tensors_in
from replayfmt.pytorch.overloads import parse_schema
from replayfmt.pytorch.traced_names import parse_iteration
from tests.importers.test_portable import Machine

from .traces import NONE, annotation, kernel, launch, op, scalar, tensor, trace


def run(name: str, **given: Any) -> None:
    """Run what replaces a call on these tensors, which it writes."""
    machine = Machine()
    machine.run(rewrite(machine, name, given))


def rewrite(machine: Machine, name: str, given: dict[str, Any], *more: Any) -> Rewritten:
    """What replaces a call whose other arguments have their defaults."""
    schemas = [parse_schema(each) for each in SCHEMAS[name]]
    schema = next(each for each in schemas if set(given) <= {argument.name for argument in each.arguments})
    arguments = [
        (each.name, machine.given(given.get(each.name, each.default_value)))
        for each in schema.arguments
        if each.name in given or each.has_default_value()
    ]
    rewritten = Portable().rewrite(Kernel(name, "default", ""), arguments, *(more or (None,)))
    assert isinstance(rewritten, Rewritten), rewritten
    return rewritten


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


def test_vllms_norm_with_aiter_of_a_sum_returns_both() -> None:
    machine = Machine()
    data, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    results = [machine.new((3, 8)), machine.new((3, 8))]
    given = {"x": data, "residual": residual, "weight": weight, "variance_epsilon": 1e-6}
    machine.run(rewrite(machine, "vllm::rocm_aiter_rmsnorm2d_fwd_with_add", given, results))
    _close(machine.values[id(results[0])], _norm(data + residual, weight, 1e-6))
    _close(machine.values[id(results[1])], data + residual)
    single = {"x": data, "weight": weight, "variance_epsilon": 1e-6}
    machine.run(rewrite(machine, "vllm::rocm_aiter_rms_norm", single, [results[0]]))
    _close(machine.values[id(results[0])], _norm(data, weight, 1e-6))


def test_aiters_norm_returns_its_result() -> None:
    machine = Machine()
    data, weight, result = torch.randn(3, 8), torch.randn(8), machine.new((3, 8))
    arguments = [("input", machine.given(data)), ("weight", machine.given(weight)), ("epsilon", 1e-6)]
    rewritten = Portable().rewrite(Kernel("aiter::rms_norm", "default", ""), arguments, [result])
    assert isinstance(rewritten, Rewritten)
    machine.run(rewritten)
    _close(machine.values[id(result)], _norm(data, weight, 1e-6))


@pytest.mark.parametrize(
    "name", sorted(name for name in ENGINES if name.endswith(("silu_and_mul", "gelu_and_mul", "tanh_and_mul")))
)
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
    run("_C::mul_and_silu", out=result, input=data)
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


@pytest.mark.parametrize("bits", [torch.float8_e4m3fn, torch.uint8])
def test_a_quantized_cache_holds_tokens_over_their_scale_and_attention_reads_them_times_it(bits: torch.dtype) -> None:
    keys, values = torch.zeros(2, 4, 2, 8, dtype=bits), torch.zeros(2, 4, 2, 8, dtype=bits)
    new, scales = (torch.randn(5, 2, 8), torch.randn(5, 2, 8)), (torch.tensor([0.5]), torch.tensor([0.25]))
    caches = {"key_cache": keys, "value_cache": values}
    given = {"key": new[0], "value": new[1], **caches, "slot_mapping": torch.arange(5)}
    assert "unscaled" in refusal("_C_cache_ops::reshape_and_cache_flash", **given)
    run("_C_cache_ops::reshape_and_cache_flash", **given, k_scale=scales[0], v_scale=scales[1])
    held = [
        each.view(torch.float8_e4m3fn).float().reshape(8, 2, 8)[:5] * scale
        for each, scale in zip((keys, values), scales, strict=True)
    ]
    for found, token in zip(held, new, strict=True):
        _close(found, token, 0.07)
    query, out = torch.randn(1, 4, 8), torch.zeros(1, 4, 8)
    others = dict.fromkeys(
        ("k_new", "v_new", "q_v", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx", "leftpad_k",
         "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale")
    )  # fmt: skip
    run(
        "sgl_kernel::fwd",
        q=query,
        k=keys,
        v=values,
        out=out,
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        seqused_k=torch.tensor([5], dtype=torch.int32),
        max_seqlen_q=1,
        max_seqlen_k=8,
        page_table=torch.tensor([[0, 1]], dtype=torch.int32),
        k_descale=scales[0].expand(1, 2),
        v_descale=scales[1].expand(1, 2),
        softmax_scale=0.3,
        is_causal=True,
        **others,
    )
    _close(out, _attention(query, held[0], held[1], 0.3), 1e-5)
    assert "a cache of int64" in refusal(
        "_C_cache_ops::reshape_and_cache_flash", **given | {"key_cache": keys.long(), "value_cache": values.long()}
    )


def _attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, left: int = -1
) -> torch.Tensor:
    """Of queries [n, heads, width], the last of which sees all keys [m, own heads, width], or `left` before its."""
    heads = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(heads, 1), values.repeat_interleave(heads, 1)
    scores = torch.einsum("qhw,khw->hqk", query, keys) * scale
    seen = torch.ones(len(query), len(keys)).tril(len(keys) - len(query)).bool()
    if left >= 0:
        seen &= torch.ones(len(query), len(keys)).triu(len(keys) - len(query) - left).bool()
    return torch.einsum("hqk,khw->qhw", scores.masked_fill(~seen, -math.inf).softmax(-1), values)


@pytest.mark.parametrize("name", ["_C::paged_attention_v1", "_C::paged_attention_v2", "_rocm_C::paged_attention"])
def test_decode_attention_reads_the_pages_of_each_sequence_to_its_end(name: str) -> None:
    query, out = torch.randn(2, 4, 8), torch.zeros(2, 4, 8)
    plain = torch.randn(6, 4, 2, 8), torch.randn(6, 4, 2, 8)  # blocks, block, heads, width
    keys = plain[0].reshape(6, 4, 2, 2, 4).permute(0, 2, 3, 1, 4).contiguous()
    values = plain[1].permute(0, 2, 3, 1).contiguous()
    table, lengths = torch.tensor([[3, 1, 0], [5, 4, 2]], dtype=torch.int32), torch.tensor([5, 12], dtype=torch.int32)
    run(
        name,
        **({"query_start_loc": None} if "rocm" in name else {}),
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


_FLASH = {
    "_vllm_fa2_C::varlen_fwd": {
        "leftpad_k": None,
        "alibi_slopes": None,
        "p_dropout": 0.0,
        "zero_tensors": False,
        "softcap": 0.0,
        "return_softmax": False,
    },
    "_vllm_fa3_C::fwd": {},
    "sgl_kernel::fwd": {},
}


@pytest.mark.parametrize("left", [-1, 2], ids=["all", "window"])
@pytest.mark.parametrize("pages", [True, False], ids=["pages", "packed"])
@pytest.mark.parametrize("counts", [(1, 1), (4, 7), (1, 6)], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize("name", sorted(_FLASH))
def test_ragged_attention_is_that_of_each_sequence(name: str, counts: tuple[int, int], pages: bool, left: int) -> None:
    query = torch.randn(sum(counts), 4, 8)
    lengths = torch.tensor([5, 12], dtype=torch.int32)
    starts = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
    out = torch.zeros_like(query)
    if pages:
        caches = torch.randn(6, 4, 2, 8), torch.randn(6, 4, 2, 8)
        table = torch.tensor([[3, 1, 0], [5, 4, 2]], dtype=torch.int32)
        own_keys = [
            [cache[table[each].long()].reshape(-1, 2, 8)[: lengths[each]] for cache in caches] for each in (0, 1)
        ]
        ends = {"seqused_k": lengths, "cu_seqlens_k": starts if "fa2" in name else None}
    else:
        caches = torch.randn(17, 2, 8), torch.randn(17, 2, 8)
        table = None
        own_keys = [[cache[:5] for cache in caches], [cache[5:] for cache in caches]]
        ends = {"seqused_k": None, "cu_seqlens_k": torch.tensor([0, 5, 17], dtype=torch.int32)}
    others = dict.fromkeys(
        ("k_new", "v_new", "q_v", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx", "leftpad_k", "rotary_cos",
         "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale")
    )  # fmt: skip
    run(
        name,
        q=query,
        k=caches[0],
        v=caches[1],
        out=out,
        cu_seqlens_q=starts,
        max_seqlen_q=max(counts),
        max_seqlen_k=12,
        softmax_scale=0.3,
        is_causal=True,
        window_size_left=left,
        window_size_right=0,
        **ends,
        **({"block_table": table} if "fa2" in name else {"page_table": table} | others),
        **_FLASH[name],
    )
    for each in range(2):
        own = slice(int(starts[each]), int(starts[each + 1]))
        _close(out[own], _attention(query[own], *own_keys[each], 0.3, left), 1e-5)


@pytest.mark.parametrize("name", ["aiter::mha_varlen_fwd", "aiter::fmha_v3_varlen_fwd", "aiter::mha_batch_prefill"])
def test_aiters_attention_of_packed_queries_is_that_of_each_sequence(name: str) -> None:
    counts, lengths = (2, 4), (5, 6)
    query, out = torch.randn(6, 4, 8), torch.zeros(6, 4, 8)
    keys, values = torch.randn(11, 2, 8), torch.randn(11, 2, 8)
    ends = torch.tensor([0, 5, 11], dtype=torch.int32)
    own_keys = [[each[:5], each[5:]] for each in (keys, values)]
    where: dict[str, Any] = {"cu_seqlens_k": ends, "min_seqlen_q": 2}
    if "batch" in name:  # pages of one token, in another order
        order = torch.randperm(11)
        own_keys = [[each[order[:5]], each[order[5:]]] for each in (keys, values)]
        where = {"kv_indptr": ends, "kv_page_indices": order.int()}
    if "v3" in name:
        where["how_v3_bf16_cvt"] = 1
    else:
        where["sink_size"] = 0
    run(
        name,
        q=query,
        k=keys,
        v=values,
        cu_seqlens_q=torch.tensor([0, 2, 6], dtype=torch.int32),
        max_seqlen_q=max(counts),
        max_seqlen_k=max(lengths),
        dropout_p=0.0,
        softmax_scale=0.3,
        logits_soft_cap=0.0,
        zero_tensors=False,
        is_causal=True,
        window_size_left=-1,
        window_size_right=0,
        return_softmax_lse=False,
        return_dropout_randval=False,
        out=out,
        **where,
    )
    for each, own in enumerate((slice(0, 2), slice(2, 6))):
        _close(out[own], _attention(query[own], own_keys[0][each], own_keys[1][each], 0.3), 1e-5)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_aiters_decoding_reads_listed_pages_to_the_end_of_each_sequence(layout: str) -> None:
    query, out = torch.randn(2, 4, 8), torch.zeros(2, 4, 8)
    keys, values = torch.randn(6, 4, 2, 8), torch.randn(6, 4, 2, 8)
    listed = torch.tensor([3, 1, 5, 4, 2], dtype=torch.int32)
    caches = [each.transpose(1, 2).contiguous() if layout == "HND" else each for each in (keys, values)]
    run(
        "aiter::paged_attention_ragged",
        out=out,
        workspace_buffer=torch.zeros(8, dtype=torch.uint8),
        query=query,
        key_cache=caches[0],
        value_cache=caches[1],
        scale=0.3,
        kv_indptr=torch.tensor([0, 2, 5], dtype=torch.int32),
        kv_page_indices=listed,
        kv_last_page_lens=torch.tensor([1, 4], dtype=torch.int32),
        block_size=4,
        max_num_partitions=1,
    )
    for each, (own, length) in enumerate((([3, 1], 5), ([5, 4, 2], 12))):
        pages = [cache[own].reshape(-1, 2, 8)[:length] for cache in (keys, values)]
        _close(out[each : each + 1], _attention(query[each : each + 1], *pages, 0.3), 1e-5)


@pytest.mark.parametrize("text", [
    "execute_2_context_0(sq0sk0sqsq0sqsk0)_generation_2(sq2sk14sqsq2sqsk14)",
    "execute_6_context_1(sq5sk9sqsq25sqsk45)_generation_2(sq2sk14sqsq2sqsk14)",
    "execute_5_context_1(sq5sk9sqsq25sqsk45)",
], ids=["decode", "mixed", "prefill"])  # fmt: skip
def test_attention_without_its_cache_has_as_many_keys_as_the_annotation_of_the_step_says(text: str) -> None:
    decodes = 2 if "generation" in text else 0
    prefill = 0 if "context_0" in text else 5
    query, out = torch.randn(decodes + prefill + 1, 4, 8), torch.zeros(decodes + prefill + 1, 4, 8)
    machine = Machine()
    given = {"query": query, "key": query[:, :2].contiguous(), "value": query[:, :2].contiguous(), "output": out}
    step = parse_iteration(text)
    rewritten = rewrite(machine, "vllm::unified_attention_with_output", given | {"layer_name": ""}, None, step)
    caches = []
    known = {each.storage for each in machine.kept}
    for _kernel, arguments, _results in rewritten.calls:
        for each in tensors_in([value for _name, value in arguments]):
            if each.storage is not None and each.storage.origin is StorageOrigin.absent and each.storage not in known:
                known.add(each.storage)
                caches.append(machine.values.setdefault(id(each), torch.randn(each.meta.sizes)))
    machine.run(rewritten)
    if decodes:
        assert [list(each.shape) for each in caches[:2]] == [[2, 7, 2, 8]] * 2
        for each in range(2):
            _close(
                out[each : each + 1],
                _attention(query[each : each + 1], caches[0][each], caches[1][each], 8**-0.5),
                1e-5,
            )
    if prefill:
        keys, values = caches[-2:]
        assert list(keys.shape) == [1, 9, 2, 8]
        _close(out[decodes:-1], _attention(query[decodes:-1], keys[0], values[0], 8**-0.5), 1e-5)
    assert not out[-1].any(), "tokens that fill the batch up have no request"
    assert "each request has as many queries and keys" in rewritten.note
    assert "no annotation says" in refusal("vllm::unified_attention_with_output", **given)
    if text.startswith("execute_5"):
        sglang = {**given, "save_kv_cache": True, "layer_id": 3}
        short = parse_iteration("step[EXTEND bs=1 toks=5]")
        rewritten = rewrite(Machine(), "sglang::unified_attention_with_output", sglang, None, short)
        assert "a prefill has those of its own tokens alone" in rewritten.note


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


@pytest.mark.parametrize(
    ("name", "first"), [("_moe_C::moe_align_block_size", 0), ("sgl_kernel::moe_align_block_size", -1)]
)
def test_tokens_are_sorted_by_expert_into_whole_blocks(name: str, first: int) -> None:
    ids = torch.tensor([[2, 0], [2, 1], [2, 0]], dtype=torch.int32)
    slots, block, count = ids.flatten() - first, 2, 4 - first
    tokens, experts = torch.zeros(14, dtype=torch.int32), torch.zeros(7, dtype=torch.int32)
    total = torch.zeros(1, dtype=torch.int32)
    run(
        name,
        topk_ids=ids,
        num_experts=count,
        block_size=block,
        sorted_token_ids=tokens,
        experts_ids=experts,
        num_tokens_post_pad=total,
    )
    expected: list[int] = []
    owners: list[int] = []
    for expert in range(count):
        own = [place for place, each in enumerate(slots.tolist()) if each == expert]
        own += [ids.numel()] * (-len(own) % block)
        expected += own
        owners += [expert + first] * (len(own) // block)
    assert int(total) == len(expected) and tokens.tolist() == expected + [ids.numel()] * (14 - len(expected))
    assert experts.tolist()[: len(owners)] == owners


def _mixture(
    hidden: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor, active: Any
) -> torch.Tensor:
    total = torch.zeros_like(hidden)
    for token, (own, experts) in enumerate(zip(shares, ids, strict=True)):
        for share, expert in zip(own, experts.long(), strict=True):
            gate, factor = (w1[expert] @ hidden[token]).chunk(2)
            total[token] += share * (w2[expert] @ (active(gate) * factor))
    return total


_EXPERTS = sorted(name for name in ENGINES if "fused_experts" in name or "fused_moe" in name)


@pytest.mark.parametrize("quantized", ["", "row", "block"])
@pytest.mark.parametrize("name", _EXPERTS)
def test_a_mixture_is_the_weighted_sum_of_each_tokens_experts(name: str, quantized: str) -> None:
    hidden, shares = torch.randn(5, 16), torch.rand(5, 2)
    w1, w2 = torch.randn(3, 2 * 8, 16) / 4, torch.randn(3, 16, 8) / 4
    ids = torch.tensor([[0, 2], [2, 0], [1, 2], [2, 1], [0, 1]], dtype=torch.int32)
    scales: dict[str, Any] = {}
    given = {"w1": w1, "w2": w2}
    if quantized:
        scales = {
            f"{key}_scale": torch.rand(
                (3, each.shape[1], 1) if quantized == "row" else (3, each.shape[1] // 8, each.shape[2] // 8)
            )
            for key, each in given.items()
        }
        given = {key: each.to(torch.float8_e4m3fn) for key, each in given.items()}
        w1, w2 = (
            each.float()
            * scales[f"{key}_scale"]
            .repeat_interleave(each.shape[1] // scales[f"{key}_scale"].shape[1], 1)
            .repeat_interleave(each.shape[2] // scales[f"{key}_scale"].shape[2], 2)
            for key, each in given.items()
        )
    activation = {"activation": "gelu"} if name.startswith("vllm::inplace") else {}
    expected = _mixture(
        hidden, w1, w2, shares, ids, torch.nn.functional.gelu if activation else torch.nn.functional.silu
    )
    machine = Machine()
    inplace = "inplace" in name
    result = machine.new((5, 16))
    call = {"hidden_states": hidden, "topk_weights": shares, "topk_ids": ids, **given, **scales, **activation}
    machine.run(rewrite(machine, name, call, None if inplace else [result]))
    _close(hidden if inplace else machine.values[id(result)], expected, 0.05)


def test_experts_that_a_composition_does_not_have_stay_as_they_are() -> None:
    hidden, ids = torch.randn(5, 16), torch.zeros(5, 2, dtype=torch.int32)
    call = {"hidden_states": hidden, "topk_weights": torch.rand(5, 2), "topk_ids": ids, "w2": torch.randn(3, 16, 8)}
    w1 = torch.randn(3, 16, 16)
    assert "a factor of uint8" in refusal("aiter::fused_moe_", **call, w1=w1.to(torch.uint8))
    assert "experts with expert_map" in refusal("vllm::outplace_fused_experts", **call, w1=w1, expert_map=ids)
    assert "the activation relu2" in refusal("vllm::outplace_fused_experts", **call, w1=w1, activation="relu2")


@pytest.mark.parametrize(
    "name", ["_moe_C::grouped_topk", "sgl_kernel::moe_fused_gate", "vllm::rocm_aiter_biased_grouped_topk"]
)
def test_routing_by_groups_takes_experts_of_the_best_groups_and_weights_without_the_bias(name: str) -> None:
    gates, bias = torch.randn(4, 8), torch.randn(8)
    machine = Machine()
    weights, indices = torch.zeros(4, 3), torch.zeros(4, 3, dtype=torch.int32)
    results = [machine.new((4, 3)), machine.new((4, 3), torch.int32)]
    given = {
        "_moe_C::grouped_topk": {
            "scores": gates, "bias": bias, "n_group": 4, "topk_group": 2, "topk": 3, "renormalize": True,
            "routed_scaling_factor": 2.5, "scoring_func": 1,
        },
        "sgl_kernel::moe_fused_gate": {
            "input": gates, "bias": bias, "num_expert_group": 4, "topk_group": 2, "topk": 3,
            "num_fused_shared_experts": 0, "routed_scaling_factor": 2.5,
        },
        "vllm::rocm_aiter_biased_grouped_topk": {
            "gating_output": gates, "correction_bias": bias, "topk_weights": weights, "topk_ids": indices,
            "num_expert_group": 4, "topk_grp": 2, "need_renorm": True, "routed_scaling_factor": 2.5,
        },
    }[name]  # fmt: skip
    machine.run(rewrite(machine, name, given, results))
    if "aiter" not in name:
        weights, indices = (machine.values[id(each)] for each in results)
    for token in range(4):
        scores = gates[token].sigmoid()
        biased = (scores + bias).view(4, 2)
        groups = biased.sum(1).topk(2).indices.tolist()
        left = torch.full((4, 2), -math.inf)
        left[groups] = biased[groups]
        chosen = left.flatten().topk(3).indices
        assert indices[token].tolist() == chosen.tolist()
        factor = 1.0 if "fused_gate" in name else 2.5
        _close(weights[token], scores[chosen] / scores[chosen].sum() * factor, 1e-5)


@pytest.mark.parametrize("bits", [torch.float8_e4m3fn, torch.int8])
def test_groups_of_a_token_have_scales_of_their_own(bits: torch.dtype) -> None:
    data, result, scales = torch.randn(3, 8), torch.zeros(3, 8, dtype=bits), torch.zeros(3, 2)
    run("sgl_kernel::sgl_per_token_group_quant_8bit", input=data, output_q=result, output_s=scales, group_size=4,
        eps=1e-10, fp8_min=-448.0, fp8_max=448.0)  # fmt: skip
    most = 127 if bits is torch.int8 else 448
    expected = data.view(3, 2, 4).abs().amax(-1) / most
    _close(scales, expected, 1e-6)
    _close(result.float(), data / expected.repeat_interleave(4, 1), 0.07 if most == 448 else 0.51)
    both, half = torch.randn(3, 16), torch.zeros(3, 8, dtype=torch.float8_e4m3fn)
    run("_C::silu_and_mul_per_block_quant", out=half, input=both, scales=scales, group_size=4)
    gated = torch.nn.functional.silu(both[:, :8]) * both[:, 8:]
    _close(half.float() * scales.repeat_interleave(4, 1), gated, 0.07)


@pytest.mark.parametrize(
    ("name", "result", "scale"),
    [
        ("_C::rms_norm_dynamic_per_token_quant", "result", "scale"),
        ("aiter::rmsnorm2d_fwd_with_dynamicquant", "out", "yscale"),
        ("aiter::rmsnorm2d_fwd_with_add_dynamicquant", "out", "yscale"),
        ("aiter::add_rmsnorm_quant", "out", "scale"),
    ],
)
def test_a_norm_is_quantized_with_a_scale_for_each_token(name: str, result: str, scale: str) -> None:
    data, weight, residual, total = torch.randn(3, 8), torch.randn(8), torch.randn(3, 8), torch.zeros(3, 8)
    out, scales = torch.zeros(3, 8, dtype=torch.int8), torch.zeros(3, 1)
    added = data + residual
    given: dict[str, Any] = {result: out, "input": data, "weight": weight, scale: scales, "epsilon": 1e-6}
    if "add" in name:
        given |= {"residual_in": residual, "residual_out": total}
    elif name.startswith("_C"):
        given["residual"] = total = residual
    run(name, **given)
    if "residual" in " ".join(given):
        _close(total, added)
    normal = _norm(added if "residual" in " ".join(given) else data, weight, 1e-6)
    _close(scales, normal.abs().amax(-1, keepdim=True) / 127, 1e-5)
    _close(out.float() * scales, normal, 0.02)


@pytest.mark.parametrize("name", ["aiter::gemm_a8w8_blockscale", "vllm::rocm_aiter_gemm_a8w8_blockscale"])
def test_products_of_quantized_factors_have_their_scales(name: str) -> None:
    a, b = torch.randn(4, 16), torch.randn(16, 8)
    quantized = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    rows, columns, bias = torch.rand(4, 1), torch.rand(1, 8), torch.randn(8)
    out = torch.zeros(4, 8)
    expected = (quantized[0].float() * rows) @ (quantized[1].float() * columns) + bias
    run("_C::cutlass_scaled_mm", out=out, a=quantized[0], b=quantized[1], a_scales=rows, b_scales=columns, bias=bias)
    _close(out, expected, 1e-5)
    machine, weight = Machine(), quantized[1].t().contiguous()
    result = machine.new((4, 8), torch.bfloat16)
    blocks = torch.rand(4, 2), torch.rand(1, 2)
    given = {"XQ": quantized[0], "WQ": weight, "x_scale": blocks[0], "w_scale": blocks[1]}
    if name.startswith("vllm"):
        given = dict(zip(("A", "B", "As", "Bs"), given.values(), strict=True))
    machine.run(rewrite(machine, name, given, [result]))
    wide = [each.repeat_interleave(8, 1) for each in blocks]
    expected = (quantized[0].float() * wide[0]) @ (weight.float() * wide[1]).t()
    _close(machine.values[id(result)], expected.bfloat16(), 0.05)
    skinny = torch.zeros(4, 8)
    run("_rocm_C::wvSplitKQ", in_a=weight, in_b=quantized[0], out_c=skinny, scale_a=torch.tensor([0.5]),
        scale_b=torch.tensor([2.0]), CuCount=304)  # fmt: skip
    _close(skinny, quantized[0].float() @ quantized[1].float(), 1e-4)


def test_gates_of_gpt_oss_are_limited_and_quick_gelu_is_a_sigmoid() -> None:
    data, result = torch.randn(3, 8) * 5, torch.zeros(3, 4)
    run("_C::swigluoai_and_mul", out=result, input=data, alpha=1.702, limit=3.0)
    gate, factor = data[:, ::2].clamp(max=3.0), data[:, 1::2].clamp(-3.0, 3.0)
    _close(result, (factor + 1) * gate * torch.sigmoid(gate * 1.702), 1e-5)
    whole = torch.zeros(3, 8)
    run("_C::gelu_quick", out=whole, input=data)
    _close(whole, data * torch.sigmoid(1.702 * data), 1e-5)


def test_the_heads_of_queries_and_keys_are_normalized_and_turned_where_they_are() -> None:
    qkv, table, positions = torch.randn(3, (2 + 1 + 1) * 8), torch.randn(9, 8), torch.tensor([4, 0, 7])
    weights = torch.randn(8), torch.randn(8)
    before = qkv.clone()
    run("_C::fused_qk_norm_rope", qkv=qkv, num_heads_q=2, num_heads_k=1, num_heads_v=1, head_dim=8, eps=1e-6,
        q_weight=weights[0], k_weight=weights[1], cos_sin_cache=table, is_neox=True,
        position_ids=positions)  # fmt: skip
    for weight, part in zip(weights, (slice(0, 16), slice(16, 24)), strict=True):
        heads = _norm(before[:, part].reshape(3, -1, 8), weight, 1e-6)
        _close(qkv[:, part], _turned(heads, table[positions], True).reshape(3, -1), 1e-4)
    assert torch.equal(qkv[:, 24:], before[:, 24:])


def test_compressed_keys_and_their_turned_part_are_side_by_side_in_the_cache() -> None:
    cache, compressed, turned = torch.zeros(3, 4, 6), torch.randn(2, 4), torch.randn(2, 1, 2)
    run("_C_cache_ops::concat_and_cache_mla", kv_c=compressed, k_pe=turned, kv_cache=cache,
        slot_mapping=torch.tensor([6, -1]))  # fmt: skip
    assert torch.equal(cache[1, 2], torch.cat([compressed[0], turned[0, 0]])) and int(cache.count_nonzero()) == 6


@pytest.mark.slow
def test_a_traces_engine_operators_become_compositions_that_run_and_the_report_says_their_share(
    tools: Any, tmp_path: Path
) -> None:
    """A step of decoding as the profiler records it: strings and None have no type, numbers are text."""
    half, whole = "c10::BFloat16", "int"
    yes, no = scalar("True"), scalar("False")
    tokens, cache = tensor(half, 4, 4, 8), tensor(half, 6, 4, 2, 8)
    one, pages = tensor("float", 1), tensor(whole, 4, 3)
    new = tensor(half, 4, 2, 8)
    calls = {
        "_C::rms_norm": [tensor(half, 4, 8), tensor(half, 4, 8), tensor(half, 8), scalar("1e-05")],
        "_C_cache_ops::reshape_and_cache_flash": [new, new, cache, cache, tensor("long int", 4), NONE, one, one],
        "_vllm_fa3_C::fwd": [
            tokens, cache, cache, NONE, NONE, NONE, tokens, tensor(whole, 5), NONE, NONE, NONE, tensor(whole, 4),
            scalar("1"), scalar("12"), pages, NONE, NONE, NONE, NONE, NONE, one, one, one, scalar("0.35"), yes,
            scalar("-1"), scalar("-1"), scalar("0."), yes, NONE, scalar("0"), NONE, scalar("0"), NONE,
        ],
        "vllm::unified_attention_with_output": [tokens, new, new, tokens, NONE, NONE, NONE],
        "_moe_C::topk_softmax": [
            tensor("float", 4, 2), tensor(whole, 4, 2), tensor(whole, 4, 2), tensor("float", 4, 3), yes, NONE,
        ],
        "_moe_C::moe_align_block_size": [
            tensor(whole, 4, 2), scalar("3"), scalar("16"), tensor(whole, 53), tensor(whole, 4), tensor(whole, 1),
        ],
        "vllm::outplace_fused_experts": [
            tensor(half, 4, 16), tensor(half, 3, 16, 16), tensor(half, 3, 16, 8), tensor("float", 4, 2),
            tensor(whole, 4, 2), NONE, no, no, no, no, no, no, scalar("3"), *[NONE] * 10,
        ],
    }  # fmt: skip
    events = [annotation("execute_4_context_0(sq0sk0sqsq0sqsk0)_generation_4(sq4sk40sqsq4sqsk40)", 5, 1000)]
    for place, (name, rows) in enumerate(calls.items(), 1):
        events += [
            op(name, place * 40, 20, rows),
            launch(place, place * 40 + 2),
            kernel(place, place * 40 + 10, 6, name),
        ]
    events += [
        op("aten::mm", 900, 20, [tensor("float", 4, 8), tensor("float", 8, 3)]),
        launch(99, 902),
        kernel(99, 910, 14),
    ]
    path, out = trace(tmp_path / "trace.json", events), tmp_path / "out.opreplay"
    plain = import_trace(path, out)
    assert plain.calls()["incomplete"] == len(calls)
    report = import_trace(path, out, rewrite="portable", force=True)
    text = "\n".join(report.lines())
    assert report.calls()["incomplete"] == 0, text
    assert "14.0 us (25.0%) by the traced operators, 42.0 us (75.0%) by replacements" in text
    assert all(f"rewritten: {name} by aten::" in text for name in calls)
    assert "each request has as many queries and keys" in text
    code, printed, err = tools("run", "--device=cpu", out)
    assert code == 0, err
    rows = [json.loads(line) for line in tools("dump", out, "--jq", ".").out.splitlines()]
    said = {
        row["annotation"]["assumed"][-1].partition(" ")[0] for row in rows if row.get("annotation", {}).get("assumed")
    }
    assert said == set(calls)
    (storages,) = (row for row in rows if row["kind"] == "summary")
    assert storages["records"]["storage_release"] == storages["storages"], "what is in between is released, too"
