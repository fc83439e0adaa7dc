"""More operators of serving engines as compositions: latent attention, sinks and soft caps, AITER's rope and stages."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import replayfmt
from replayfmt.format.codes import StorageOrigin
from replayfmt.importers.importing import import_trace
from replayfmt.importers.rewrites.engines import engine_name
from replayfmt.importers.rewrites.rewriting import tensors_in
from replayfmt.pytorch.traced_names import parse_iteration
from tests.importers.test_portable import Machine

from .test_engine_rewrites import _close, _turned, refusal, rewrite, run
from .traces import NONE, annotation, kernel, launch, numbers, op, scalar, tensor, trace


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Of queries [n, heads, width], the last of which sees all keys."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = torch.einsum("qhw,khw->hqk", query, keys) * scale
    scores = cap * (scores / cap).tanh() if cap else scores
    seen = torch.ones(len(query), len(keys)).tril(len(keys) - len(query)).bool()
    weights = scores.masked_fill(~seen, -math.inf).exp()
    total = weights.sum(-1, keepdim=True)
    total = total + sinks.exp().view(-1, 1, 1) if sinks is not None else total
    return torch.einsum("hqk,khw->qhw", weights / total, values)


_PAGES = torch.tensor([[3, 1, 0], [5, 4, 2]], dtype=torch.int32)
_LENGTHS = torch.tensor([5, 12], dtype=torch.int32)
_STARTS = torch.tensor([0, 2, 5], dtype=torch.int32)


def of_pages(cache: torch.Tensor, each: int) -> torch.Tensor:
    return cache[_PAGES[each].long()].flatten(0, 1)[: _LENGTHS[each]]


def flash(name: str, query: torch.Tensor, out: torch.Tensor, caches: list[torch.Tensor], **more: Any) -> None:
    fixed: dict[str, Any] = {"window_size_left": -1, "window_size_right": 0, "cu_seqlens_k": None}
    if "fa2" in name:
        fixed |= {"block_table": _PAGES, "leftpad_k": None, "alibi_slopes": None, "p_dropout": 0.0}
        fixed |= {"zero_tensors": False, "return_softmax": False, "cu_seqlens_k": _STARTS}
    else:
        missing = "k_new v_new q_v cu_seqlens_k_new seqused_q kv_batch_idx leftpad_k rotary_cos rotary_sin"
        fixed |= dict.fromkeys((missing + " seqlens_rotary q_descale k_descale v_descale").split())
        fixed["page_table"] = _PAGES
    given = {"q": query, "k": caches[0], "v": caches[1], "out": out, "cu_seqlens_q": _STARTS, "seqused_k": _LENGTHS}
    given |= {"max_seqlen_q": 3, "max_seqlen_k": 12, "softmax_scale": 0.3, "is_causal": True}
    run(name, **given | fixed | more)


@pytest.mark.parametrize(("name", "cap", "sinks"), [
    ("_vllm_fa2_C::varlen_fwd", 1.5, ""),
    ("_vllm_fa3_C::fwd", 1.5, ""),
    ("_vllm_fa3_C::fwd", 0.0, "s_aux"),
    ("sgl_kernel::fwd", 1.5, "sinks"),
])  # fmt: skip
def test_soft_caps_bound_scores_and_a_sink_takes_its_share(name: str, cap: float, sinks: str) -> None:
    query, out = torch.randn(5, 4, 8), torch.zeros(5, 4, 8)
    caches, sink = [torch.randn(6, 4, 2, 8), torch.randn(6, 4, 2, 8)], torch.randn(4)
    flash(name, query, out, caches, softcap=cap, **({sinks: sink} if sinks else {}))
    for each in range(2):
        own = slice(int(_STARTS[each]), int(_STARTS[each + 1]))
        pages = [of_pages(cache, each) for cache in caches]
        _close(out[own], attention(query[own], pages[0], pages[1], 0.3, cap, sink if sinks else None), 1e-5)


def test_latent_attention_of_flash_attention_compares_both_parts_of_a_key() -> None:
    turned, latent, out = torch.randn(5, 4, 8), torch.randn(5, 4, 16), torch.zeros(5, 4, 16)
    caches = [torch.randn(6, 4, 1, 8), torch.randn(6, 4, 1, 16)]
    flash("sgl_kernel::fwd", turned, out, caches, q_v=latent)
    for each in range(2):
        own = slice(int(_STARTS[each]), int(_STARTS[each + 1]))
        keys, values = (of_pages(cache, each) for cache in caches)
        query = torch.cat([turned[own], latent[own]], -1)
        _close(out[own], attention(query, torch.cat([keys, values], -1), values, 0.3), 1e-5)


@pytest.mark.parametrize(
    "name", ["_C::cutlass_mla_decode", "_C::sm100_cutlass_mla_decode", "sgl_kernel::cutlass_mla_decode"]
)
def test_latent_decoding_reads_compressed_pages_as_keys_and_values(name: str) -> None:
    latent, turned, out = torch.randn(2, 4, 16), torch.randn(2, 4, 8), torch.zeros(2, 4, 16)
    cache, space = torch.randn(6, 4, 24), torch.zeros(8, dtype=torch.uint8)
    more: dict[str, Any] = {} if name == "_C::cutlass_mla_decode" else {"workspace": space, "num_kv_splits": 1}
    if "sm100" in name:
        more["lse"] = torch.ones(2, 4)
    scale = {"sm_scale" if "sgl" in name else "scale": 0.3}
    given = {"out": out, "q_nope": latent, "q_pe": turned, "kv_c_and_k_pe_cache": cache}
    run(name, **given, seq_lens=_LENGTHS, page_table=_PAGES, **scale, **more)
    for each in range(2):
        pages = of_pages(cache, each).unsqueeze(1)
        query = torch.cat([latent[each : each + 1], turned[each : each + 1]], -1)
        _close(out[each : each + 1], attention(query, pages, pages[..., :16], 0.3), 1e-5)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("library", ["_flashmla_C", "sgl_kernel"])
def test_flash_mla_returns_the_attention_of_each_query(library: str, sinks: bool) -> None:
    machine = Machine()
    query, cache, sink = torch.randn(2, 3, 4, 24), torch.randn(6, 4, 1, 24), torch.randn(4)
    results = [machine.new((2, 3, 4, 16)), machine.new((2, 4, 3))]
    names = ("attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length")
    more = dict.fromkeys(names) | {"attn_sink": sink} if sinks else {}
    planned = {"tile_scheduler_metadata": torch.zeros(1), "num_splits": torch.zeros(1)}
    given = {"q": query, "kv_cache": cache, "head_size_v": 16, "seqlens_k": _LENGTHS, "block_table": _PAGES}
    given |= {"softmax_scale": 0.3, "is_causal": True, "is_fp8": False, "indices": None}
    machine.run(rewrite(machine, f"{library}::fwd_kvcache_mla", given | planned | more, [results]))
    found = machine.values[id(results[0])]
    for each in range(2):
        pages = of_pages(cache, each)
        _close(found[each], attention(query[each], pages, pages[..., :16], 0.3, 0.0, sink if sinks else None), 1e-5)


def decode(cache: torch.Tensor, layout: int, out: torch.Tensor, query: torch.Tensor) -> dict[str, Any]:
    keys, values = (each.transpose(1, 2).contiguous() if layout else each for each in cache.unbind(0))
    space = torch.zeros(8, dtype=torch.uint8)
    return {
        "float_workspace_buffer": space, "int_workspace_buffer": space, "plan_info_vec": [0], "q": query,
        "paged_k_cache": keys, "paged_v_cache": values,
        "paged_kv_indptr": torch.tensor([0, 2, 5], dtype=torch.int32),
        "paged_kv_indices": torch.tensor([3, 1, 5, 4, 2], dtype=torch.int32),
        "paged_kv_last_page_len": torch.tensor([1, 4], dtype=torch.int32), "o": out, "maybe_lse": None,
        "kv_layout_code": layout, "window_left": -1, "enable_pdl": False, "alibi_slopes": torch.zeros(4),
        "logits_soft_cap": 1.5, "sm_scale": 0.3, "rope_scale": 1.0, "rope_theta": 1e4,
    }  # fmt: skip


@pytest.mark.parametrize("layout", [0, 1], ids=["NHD", "HND"])
def test_flashinfers_decoding_reads_listed_pages(layout: int) -> None:
    query, out, cache = torch.randn(2, 4, 8), torch.zeros(2, 4, 8), torch.randn(2, 6, 4, 2, 8)
    run("flashinfer::batch_decode", **decode(cache, layout, out, query))
    for each in range(2):
        keys, values = (of_pages(part, each) for part in cache)
        _close(out[each : each + 1], attention(query[each : each + 1], keys, values, 0.3, 1.5), 1e-5)


def test_an_operator_that_flashinfer_compiled_for_its_dtypes_is_known_in_a_trace(tmp_path: Path) -> None:
    name = "flashinfer::batch_decode_with_kv_cache_dtype_q_f16_head_dim_qk_8_posenc_{}_use_swa_False_run"
    assert engine_name(name.format(0)) == "flashinfer::batch_decode"
    assert engine_name(name.format(1)) == name.format(1), "it embeds positions"
    compiled = "flashinfer::{}_prefill_with_kv_cache_dtype_q_bf16_posenc_0_use_swa_False_f16qk_False{}_run"
    for kind, end, known in (("batch", "_paged", "_paged"), ("batch", "_sm90_ragged", "_ragged"), ("single", "", "")):
        assert engine_name(compiled.format(kind, end)) == f"flashinfer::{kind}_prefill{known}"
    space, ints = tensor("unsigned char", 8), tensor("int", 3)
    given = [space, space, numbers("[0, 1]"), tensor("float", 2, 4, 8), *[tensor("float", 6, 4, 2, 8)] * 2, ints]
    given += [tensor("int", 5), tensor("int", 2), tensor("float", 2, 4, 8), NONE, scalar("0"), scalar("-1")]
    given += [scalar("False"), NONE, *(scalar(each) for each in ("0.", "0.3", "1.", "10000."))]
    events = [op(name.format(0), 10, 10, given), launch(1, 12), kernel(1, 20, 5)]
    path, out = trace(tmp_path / "trace.json", events), tmp_path / "out.opreplay"
    report = import_trace(path, out, rewrite="portable")
    text = "\n".join(report.lines())
    assert "(100.0%) by replacements" in text and "aten::scaled_dot_product_attention" in text
    assert replayfmt.run(out, devices=["cpu"]).outcome == "ok"


@pytest.mark.parametrize("nope_first", [False, True])
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("style", [0, 1], ids=["halves", "neighbours"])
@pytest.mark.parametrize("kind", ["", "2c_", "cached_", "cached_2c_", "cached_positions_", "cached_positions_2c_"])
def test_aiters_rope_turns_a_part_of_each_head(kind: str, style: int, reuse: bool, nope_first: bool) -> None:
    positions, batch, turned, width = 3, 2, 6, 8
    half = torch.randn(9 if "positions" in kind else positions, turned // 2)
    whole = half if reuse else torch.cat([half, half], -1) if style == 0 else half.repeat_interleave(2, -1)
    angles = whole[:, None, None]
    where = torch.tensor([[4, 0], [7, 1], [2, 2]])
    data = [torch.randn(positions, batch, 2, width), torch.randn(positions, batch, 1, width)]
    names = ["_x", "_y"] if "2c" in kind else [""]
    given: dict[str, Any] = {"rotate_style": style, "reuse_freqs_front_part": reuse, "nope_first": nope_first}
    given |= {"cos": angles.cos(), "sin": angles.sin()} if "cached" in kind else {"freqs": angles}
    given |= {"positions": where} if "positions" in kind else {}
    outs = [torch.zeros_like(each) for each in data]
    for name, each, out in zip(names, data, outs, strict=False):
        given |= {f"input{name}": each, f"output{name}": out}
    run(f"aiter::rope_{kind}fwd_impl", **given)
    own = half[where.flatten()] if "positions" in kind else half.repeat_interleave(batch, 0)
    table = torch.cat([own.cos(), own.sin()], -1)
    for _name, each, out in zip(names, data, outs, strict=False):
        flat = each.flatten(0, 1)
        if nope_first:
            expected = torch.cat([flat[..., :2], _turned(flat[..., 2:], table, style == 0)], -1)
        else:
            expected = _turned(flat, table, style == 0)
        _close(out.flatten(0, 1), expected, 1e-5)


def test_aiters_rotary_embedding_has_cosines_and_sines_apart() -> None:
    positions, half = torch.tensor([4, 0, 7]), torch.randn(9, 3)
    query, key = torch.randn(3, 2 * 8), torch.randn(3, 8)
    table = torch.cat([half.cos(), half.sin()], -1)[positions]
    expected = [_turned(each.reshape(3, -1, 8), table, True).reshape(3, -1) for each in (query, key)]
    caches = {"cos_cache": half.cos()[:, None, None], "sin_cache": half.sin()[:, None, None]}
    given = {"positions": positions, "query": query, "key": key, "head_size": 8}
    run("aiter::rotary_embedding_fwd", **given, **caches, is_neox=True, is_nope_first=False)
    _close(query, expected[0], 1e-5)
    _close(key, expected[1], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [1, 2], ids=["weights in the first", "weights in the second"])
def test_aiters_two_stages_are_the_weighted_sum_of_each_tokens_experts(weighted: int) -> None:
    tokens, chosen, experts, width, inner, block = 5, 2, 3, 16, 8, 4
    hidden = torch.randn(tokens, width).bfloat16()
    w1, w2 = torch.randn(experts, 2 * inner, width).bfloat16(), torch.randn(experts, width, inner).bfloat16()
    ids, weights = torch.rand(tokens, experts).topk(chosen).indices, torch.rand(tokens, chosen)
    entries, shares, blocks = [], [], []
    for expert in range(experts):
        own = [(token, nth) for token in range(tokens) for nth in range(chosen) if ids[token, nth] == expert]
        own += [(tokens, chosen)] * (-len(own) % block)
        entries += [token | nth << 24 for token, nth in own]
        shares += [float(weights[token, nth]) if token < tokens else 0.0 for token, nth in own]
        blocks += [expert] * (len(own) // block)
    valid, more = len(entries), 2  # what is behind the last block is not defined
    ordered: dict[str, Any] = {
        "sorted_token_ids": torch.tensor(entries + [tokens | chosen << 24] * more * block, dtype=torch.int32),
        "sorted_expert_ids": torch.tensor(blocks + [0] * more, dtype=torch.int32),
        "num_valid_ids": torch.tensor([valid], dtype=torch.int32),
        "topk": chosen,
        "block_m": block,
    }
    share = torch.tensor(shares + [0.0] * more * block)
    between, out = torch.zeros(tokens, chosen, inner).bfloat16(), torch.zeros(tokens, width).bfloat16()
    sides = {"w1": w1, "w2": w2, **ordered}
    own_share = [{"sorted_weights": share} if weighted == place else {} for place in (1, 2)]
    run("aiter::ck_moe_stage1", hidden_states=hidden, out=between, **sides, **own_share[0])
    run("aiter::ck_moe_stage2", inter_states=between, out=out, **sides, **own_share[1])
    first = torch.einsum("tw,tkiw->tki", hidden.float(), w1[ids].float())
    active = torch.nn.functional.silu(first[..., :inner]) * first[..., inner:]
    active = active * weights.unsqueeze(-1) if weighted == 1 else active
    second = torch.einsum("tki,tkwi->tkw", active, w2[ids].float())
    expected = (second * weights.unsqueeze(-1) if weighted == 2 else second).sum(1)
    _close(between.float(), active, 0.15)
    _close(out.float(), expected, 0.15)


@pytest.mark.parametrize("causal", [0, 1], ids=["all", "causal"])
@pytest.mark.parametrize("layout", [0, 1], ids=["NHD", "HND"])
@pytest.mark.parametrize("form", ["batch_prefill_paged", "batch_prefill_ragged", "single_prefill"])
def test_flashinfers_prefill_reads_pages_or_packed_keys_or_one_sequence(form: str, layout: int, causal: int) -> None:
    query, out, cache = torch.randn(5, 4, 8), torch.zeros(5, 4, 8), torch.randn(2, 6, 4, 2, 8)
    sequences = [[torch.randn(keys, 2, 8) for _part in "kv"] for keys in (8, 9)]
    given: dict[str, Any] = decode(cache, layout, out, query) | {"mask_mode": causal, "layout": layout}
    given |= {"maybe_alibi_slopes": None}
    unused = {"kv_layout_code", "alibi_slopes", "enable_pdl"}
    if "paged" in form:
        sequences = [[of_pages(part, each) for part in cache] for each in range(2)]
    else:
        packed = [torch.cat(each) for each in zip(*sequences, strict=True)]
        unused |= {name for name in given if "paged" in name}
        given |= dict(
            zip("kv", (each.transpose(0, 1).contiguous() if layout else each for each in packed), strict=True)
        )
    if "ragged" in form:
        given |= {"kv_indptr": torch.tensor([0, 8, 17], dtype=torch.int32)}
    if "batch" in form:
        given |= {"qo_indptr": _STARTS, "maybe_custom_mask": None, "maybe_mask_indptr": None}
    else:
        unused |= {"float_workspace_buffer", "int_workspace_buffer", "plan_info_vec"}
        given |= {"tmp": torch.zeros(8), "maybe_packed_custom_mask": None, "maybe_lse": torch.ones(5, 4)}
        sequences = [packed]
    given = {name: each for name, each in given.items() if name not in unused}
    run(f"flashinfer::{form}", **given)
    begin = 0
    for rows, (keys, values) in zip(query.split([2, 3] if "batch" in form else 5), sequences, strict=True):
        expected = [attention(each, keys, values, 0.3, 1.5) for each in rows.split(len(rows) if causal else 1)]
        _close(out[begin : begin + len(rows)], torch.cat(expected), 1e-5)
        begin += len(rows)
    assert "attention with mask_mode" in refusal(f"flashinfer::{form}", **given | {"mask_mode": 2})


@pytest.mark.parametrize("library", ["_flashmla_C", "sgl_kernel"])
def test_sparse_latent_attention_reads_the_keys_chosen_for_each_query(library: str) -> None:
    machine = Machine()
    query, cache, sink = torch.randn(3, 4, 24), torch.randn(9, 1, 24), torch.randn(4)
    chosen = torch.tensor([[[0, -1, 5, -1]], [[8, 7, 6, 2]], [[3, -1, -1, 99]]], dtype=torch.int32)
    results = [machine.new((3, 4, 16)), machine.new((3, 4)), machine.new((3, 4))]
    given = {"q": query, "kv": cache, "indices": chosen, "sm_scale": 0.3, "d_v": 16, "attn_sink": sink}
    machine.run(rewrite(machine, f"{library}::sparse_prefill_fwd", given, [results]))
    for each, (row,) in enumerate(chosen):
        keys = cache[row[(row >= 0) & (row < 9)].long()]
        expected = attention(query[each : each + 1], keys, keys[..., :16], 0.3, 0.0, sink)
        _close(machine.values[id(results[0])][each : each + 1], expected, 1e-5)


@pytest.mark.parametrize(
    "text",
    [
        "execute_5_context_1(sq3sk9sqsq9sqsk27)_generation_2(sq2sk14sqsq2sqsk14)",
        "execute_2_context_0(sq0sk0sqsq0sqsk0)_generation_2(sq2sk14sqsq2sqsk14)",
    ],
    ids=["mixed", "decode"],
)
def test_vllms_own_latent_attention_has_its_cache_and_weights_from_before(text: str) -> None:
    machine, heads, own, turned, rank, value = Machine(), 4, 6, 4, 8, 5
    step = parse_iteration(text)
    prefills = "context_1" in text
    tokens = 5 if prefills else 2
    query, latent, places = (
        torch.randn(tokens, heads, own + turned),
        torch.randn(tokens, rank),
        torch.randn(tokens, 1, turned),
    )
    out = torch.zeros(tokens, heads * value)
    given = {"q": query, "kv_c_normed": latent, "k_pe": places, "output": out, "layer_name": ""}
    rewritten = rewrite(machine, "vllm::unified_mla_attention_with_output", given, None, step)
    before, known = [], {each.storage for each in machine.kept}
    for _kernel, arguments, _results in rewritten.calls:
        for each in tensors_in([part for _name, part in arguments]):
            if each.storage is not None and each.storage.origin is StorageOrigin.absent and each.storage not in known:
                known.add(each.storage)
                before.append((each.meta.sizes, machine.values.setdefault(id(each), torch.randn(each.meta.sizes))))
    machine.run(rewritten)
    of = dict(before)
    up_keys, up_values = of[heads, own, rank], of[heads, rank, value]
    expected = []
    for count, queries, keys in [(2, 1, 7), *([(1, 3, 9)] if prefills else [])]:
        cache = of[count, keys, 1, rank + turned]
        for each in range(count):
            compressed, back = cache[each, :, 0, :rank], cache[each, :, :, rank:]
            full = torch.cat([torch.einsum("kr,hor->kho", compressed, up_keys), back.expand(keys, heads, turned)], -1)
            rows = query[len(expected) : len(expected) + queries]
            mixed = attention(rows, full, torch.einsum("kr,hrv->khv", compressed, up_values), (own + turned) ** -0.5)
            expected += [*mixed]
    _close(out, torch.stack(expected).flatten(1), 1e-4)
    assert "no annotation says" in refusal("vllm::unified_mla_attention_with_output", **given)


@pytest.mark.slow
def test_prefill_and_latent_attention_of_a_trace_are_replayed_on_the_cpu(tmp_path: Path) -> None:
    def half(*sizes: int) -> Any:
        return tensor("c10::BFloat16", *sizes)

    space, pages, cut = tensor("unsigned char", 8), tensor("int", 3), [scalar(each) for each in ("0.", "0.3")]
    paged = [space, space, numbers("[0, 1]"), half(5, 4, 8), half(6, 4, 2, 8), half(6, 4, 2, 8), pages, pages]
    paged += [tensor("int", 5), tensor("int", 2), half(5, 4, 8), NONE, scalar("1"), scalar("0"), scalar("-1")]
    paged += [scalar("False"), *[NONE] * 6, *cut, scalar("1."), scalar("10000."), scalar("0"), *[NONE] * 6]
    calls = {
        "flashinfer::batch_prefill_with_kv_cache_dtype_q_bf16_posenc_0_use_swa_False_paged_run": paged,
        "vllm::unified_mla_attention_with_output": [
            half(5, 4, 10),
            half(5, 8),
            half(5, 1, 4),
            half(5, 20),
            *[NONE] * 9,
        ],
        "_flashmla_C::sparse_prefill_fwd": [
            half(3, 4, 24),
            half(9, 1, 24),
            tensor("int", 3, 1, 4),
            cut[1],
            scalar("16"),
        ],
    }
    events = [annotation("execute_5_context_1(sq3sk9sqsq9sqsk27)_generation_2(sq2sk14sqsq2sqsk14)", 0, 100)]
    for number, (name, given) in enumerate(calls.items(), 1):
        start = 20 * number
        events += [op(name, start, 10, given), launch(number, start + 2), kernel(number, start + 5, 4)]
    path, out = trace(tmp_path / "trace.json", events), tmp_path / "out.opreplay"
    report = import_trace(path, out, rewrite="portable")
    assert report.calls()["incomplete"] == 0 and "(100.0%) by replacements" in "\n".join(report.lines())
    assert replayfmt.run(out, devices=["cpu"]).outcome == "ok"
