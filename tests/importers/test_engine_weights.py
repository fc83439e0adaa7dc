"""Products with packed weights as compositions: each is compared with its definition, element by element."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.importers.test_portable import Machine

from .test_engine_rewrites import refusal, rewrite, run

# Where a word of AWQ's, or a shuffled one of GPTQ's, has its elements: nibble 4 holds the one after nibble 0.
_SHUFFLED = [0, 4, 1, 5, 2, 6, 3, 7]


def _pack(elements: torch.Tensor, bits: int, order: list[int]) -> torch.Tensor:
    """Of a matrix, along its rows; `order` is the place of each element."""
    words = torch.zeros(len(elements) // len(order), elements.shape[1], dtype=torch.int64)
    for row, line in enumerate(elements):
        words[row // len(order)] |= line << (order[row % len(order)] * bits)
    return ((words + 2**31) % 2**32 - 2**31).to(torch.int32)


def _random(rows: int, columns: int, bits: int) -> torch.Tensor:
    return torch.randint(0, 1 << bits, (rows, columns), generator=torch.Generator().manual_seed(rows + bits))


def _result(name: str, sizes: tuple[int, ...], dtype: torch.dtype = torch.float32, **given: Any) -> torch.Tensor:
    machine = Machine()
    result = machine.new(sizes, dtype)
    machine.run(rewrite(machine, name, given, [result]))
    return machine.values[id(result)]


@pytest.mark.parametrize("library", ["_C", "sgl_kernel"])
@pytest.mark.parametrize("swapped", [False, True])
def test_awq_unpacks_along_columns(library: str, swapped: bool) -> None:
    whole, points, scales = _random(16, 8, 4), _random(2, 8, 4), torch.randn(2, 8)
    expected = (whole - points.repeat_interleave(8, 0)) * scales.repeat_interleave(8, 0)
    weight, zeros = (_pack(each.T, 4, _SHUFFLED).T.contiguous() for each in (whole, points))
    names = ("qweight", "scales", "qzeros") if library == "sgl_kernel" else ("_kernel", "_scaling_factors", "_zeros")
    given: dict[str, Any] = dict(zip(names, (weight, *((zeros, scales) if swapped else (scales, zeros))), strict=True))
    more = {} if library == "sgl_kernel" else {"split_k_iters": 0, "thx": 0, "thy": 0}
    torch.testing.assert_close(_result(f"{library}::awq_dequantize", (16, 8), **given, **more), expected)
    if library == "_C":
        data = torch.randn(3, 16)
        found = _result("_C::awq_gemm", (3, 8), _in_feats=data, **given, split_k_iters=8)
        torch.testing.assert_close(found, data @ expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("name", ["_C::gptq_gemm", "sgl_kernel::gptq_gemm"])
def test_gptq_unpacks_along_rows(bits: int, shuffled: bool, listed: bool, name: str) -> None:
    whole, points, scales, data = _random(16, 8, bits), _random(2, 8, bits), torch.randn(2, 8), torch.randn(3, 16)
    plain = list(range(32 // bits))
    groups = torch.arange(16) // 8
    order = torch.zeros(0, dtype=torch.int32)
    left = data
    if listed and shuffled:
        order = torch.randperm(16).int()
        left = data[:, order.long()]
    elif listed:
        order = groups = torch.arange(16).int() % 2
    second = name == "_C::gptq_gemm" and bits == 4
    expected = left @ ((whole - points[groups.long()] - (0 if second else 1)) * scales[groups.long()])
    found = _result(
        name,
        (3, 8),
        a=data,
        b_q_weight=_pack(whole, bits, _SHUFFLED if shuffled and bits == 4 else plain),
        b_gptq_qzeros=_pack(points.T, bits, plain).T.contiguous(),
        b_gptq_scales=scales,
        b_g_idx=order,
        bit=bits,
        **({"use_shuffle": shuffled} if "sgl" in name else {"use_exllama": shuffled}),
        **({"use_v2_format": True} if second else {}),
    )
    torch.testing.assert_close(found, expected)


def test_other_packings_are_refused() -> None:
    words, scales = torch.zeros(2, 8, dtype=torch.int32), torch.ones(2, 8)
    given = {"a": torch.ones(3, 16), "b_q_weight": words, "b_gptq_qzeros": words[:, :1], "b_gptq_scales": scales}
    given["b_g_idx"] = words[0, :0]
    assert "weights of 3 bits" in refusal("_C::gptq_gemm", **given, use_exllama=False, bit=3)
    given["b_q_weight"] = words.long()
    assert "packed weights of int64" in refusal("_C::gptq_gemm", **given, use_exllama=False, bit=4)


# ----------------------------------------------------------------------------------------------------------- Marlin

_UINT4, _UINT4B8, _UINT8B128, _FLOAT8, _FLOAT4 = 0x400, 0x400 | 8 << 17, 0x800 | 128 << 17, 0x10304, 0x10102
_FLOAT4_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
_MIXED, _MIXED_SINGLE = (
    [i + 8 * j for i in range(8) for j in range(8)],
    [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)],
)


def _marlin_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """As vLLM's marlin_utils packs a matrix: tiles of 16 rows, in the order in which threads take their elements."""
    order: list[int] = []
    for thread in range(32):
        rows = [2 * (thread % 4), 2 * (thread % 4) + 1, 2 * (thread % 4 + 4), 2 * (thread % 4 + 4) + 1]
        own = [16 * row + thread // 4 + 8 * block for block in range(2) for row in rows]
        order += [place + 256 * tile for tile in range(4) for place in own]
    shuffle = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else [0, 2, 1, 3]
    places = torch.tensor(order).reshape(-1, len(shuffle))[:, shuffle].flatten()
    rows, columns = codes.shape
    tiles = codes.reshape(rows // 16, 16, columns // 16, 16).permute(0, 2, 1, 3).reshape(rows // 16, -1)
    tiles = tiles.reshape(-1, 1024)[:, places].reshape(rows // 16, -1)
    return _pack(tiles.T, bits, list(range(32 // bits))).T.contiguous()


def _mixed(lines: torch.Tensor, order: list[int]) -> torch.Tensor:
    return lines.reshape(-1, len(order))[:, order].reshape(lines.shape)


@pytest.mark.parametrize(("kind", "bits"), [(_UINT4, 4), (_UINT4B8, 4), (_UINT8B128, 8), (_FLOAT8, 8), (_FLOAT4, 4)])
@pytest.mark.parametrize("groups", [1, 2])
def test_marlins_words_hold_tiles(kind: int, bits: int, groups: int) -> None:
    rows, columns, dtype = 32, 64, torch.float16
    codes, data = _random(rows, columns, bits), torch.randn(3, rows, dtype=dtype)
    scales, bias = torch.rand(groups, columns) + 0.5, torch.randn(columns, dtype=dtype)
    given: dict[str, Any] = {"b_zeros": None, "global_scale": None}
    kept = scales = scales.half().float()
    if kind == _FLOAT8:
        codes = codes % 0x70  # no NaN
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
        kept = scales * 2**8  # what the kernel's float16 lacks
    elif kind == _FLOAT4:
        values = torch.tensor(_FLOAT4_VALUES)[codes]
        kept = scales = torch.exp2(torch.arange(groups * columns).reshape(groups, columns) % 3 - 1.0)
    elif kind == _UINT4:
        points = _random(groups, columns, 4)
        values = (codes - points.repeat_interleave(rows // groups, 0)).float()
        shuffled = _mixed(_mixed(points, _MIXED), [0, 2, 4, 6, 1, 3, 5, 7])
        given["b_zeros"] = _pack(shuffled.T, 4, list(range(8))).T.contiguous()
    else:
        values = (codes - (8 if bits == 4 else 128)).float()
    kept = _mixed(kept, _MIXED if groups > 1 else _MIXED_SINGLE)
    if kind == _FLOAT4:
        kept = _mixed(kept, [0, 2, 1, 3]).to(torch.float8_e8m0fnu)
    expected = data.float() @ (values * scales.repeat_interleave(rows // groups, 0)) + bias.float()
    fixed = {"size_m": 3, "size_n": columns, "size_k": rows, "b_type_id": kind, "a_scales": None, "c": None}
    given |= dict.fromkeys(("is_k_full", "use_atomic_add", "use_fp32_reduce", "is_zp_float"), False)
    given |= {"g_idx": None, "perm": None, "workspace": torch.zeros(1), "b_q_weight": _marlin_words(codes, bits)}
    given |= {"a": data, "b_bias": _mixed(bias, _MIXED_SINGLE), "b_scales": kept if kind == _FLOAT4 else kept.half()}
    found = _result("_C::gptq_marlin_gemm", (3, columns), torch.float16, **given, **fixed)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=0.1)


@pytest.mark.slow
def test_marlins_experts_multiply_the_tokens_that_are_sorted_to_them() -> None:
    rows, columns, experts, block, chosen = 32, 64, 3, 4, 2
    codes = torch.stack([_random(rows + each, columns, 4)[:rows] for each in range(experts)])
    scales, data = torch.rand(experts, 1, columns), torch.randn(5, rows)
    ids = torch.tensor([[0, 2], [2, 0], [0, 1], [2, 1], [0, 2]])
    order = [
        [place for place, each in enumerate(ids.flatten().tolist()) if each == expert] for expert in range(experts)
    ]
    ids_sorted = sum(([*each, *[10] * (-len(each) % block)] for each in order), [])
    of_blocks = sum(([expert] * -(-len(each) // block) for expert, each in enumerate(order)), [])
    share = torch.rand(5, chosen)
    whole = ((codes - 8).float() * scales).to(torch.bfloat16).float()
    expected = torch.einsum("tk,tckn->tcn", data, whole[ids]) * share.unsqueeze(2)
    given: dict[str, Any] = {
        "a": data,
        "b_q_weight": torch.stack([_marlin_words(each, 4) for each in codes]),
        "b_scales": _mixed(scales, _MIXED_SINGLE),
        "workspace": torch.zeros(1),
        "sorted_token_ids": torch.tensor([*ids_sorted, *[99] * block], dtype=torch.int32),
        "expert_ids": torch.tensor([*of_blocks, 77], dtype=torch.int32),
        "valid": torch.tensor([len(ids_sorted)], dtype=torch.int32),
        "topk_weights": share,
    }
    given |= dict.fromkeys(("c", "global_scale", "b_zeros", "g_idx", "perm"))
    given |= {"block": block, "top_k": chosen, "mul_topk_weights": True, "b_type_id": _UINT4B8, "is_ep": False}
    given |= {"size_m": 5, "size_n": columns, "size_k": rows, "is_k_full": True, "is_zp_float": False}
    given |= {"use_atomic_add": False, "use_fp32_reduce": True}
    for library in ("_moe_C", "sgl_kernel"):
        found = _result(f"{library}::moe_wna16_marlin_gemm", (10, columns), **given)
        torch.testing.assert_close(found, expected.reshape(10, columns), rtol=3e-2, atol=0.3)
    packed = codes.transpose(1, 2)  # along rows, into bytes
    given = {"input": data, "output": torch.zeros(5, chosen, columns), "b_scales": scales.transpose(1, 2).contiguous()}
    given |= {"b_qweight": (packed[..., ::2] | packed[..., 1::2] << 4).to(torch.uint8), "b_qzeros": None, "bit": 4}
    given |= {"sorted_token_ids": torch.tensor(ids_sorted, dtype=torch.int32), "topk_weights": share, "top_k": chosen}
    given |= {"expert_ids": torch.tensor(of_blocks, dtype=torch.int32), "BLOCK_SIZE_M": block}
    given |= {"num_tokens_post_pad": torch.tensor([len(ids_sorted)]), "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32}
    run("_moe_C::moe_wna16_gemm", **given)
    torch.testing.assert_close(given["output"], expected, rtol=3e-2, atol=0.3)


def test_machetes_product_has_scales_of_groups_columns_and_tokens() -> None:
    codes, data, scales = _random(32, 8, 4), torch.randn(3, 32, dtype=torch.bfloat16), torch.rand(2, 8)
    of_columns, of_tokens = torch.rand(8), torch.rand(3, 1)
    given = {"A": data, "B": _pack(codes, 4, list(range(8))), "b_type": _UINT4B8, "out_type": None, "group_size": 16}
    given |= {"group_scales": scales, "group_zeros": None, "channel_scales": of_columns, "token_scales": of_tokens}
    found = _result("_C::machete_mm", (3, 8), torch.bfloat16, **given, schedule=None)
    expected = data.float() @ ((codes - 8) * scales.repeat_interleave(16, 0)) * of_columns * of_tokens
    torch.testing.assert_close(found.float(), expected, rtol=3e-2, atol=0.2)


def test_marlin_with_quantized_factors_is_refused() -> None:
    given = dict.fromkeys(("c", "b_bias", "global_scale", "b_zeros"))
    given |= {
        "a": torch.ones(3, 32),
        "b_q_weight": torch.zeros(2, 128, dtype=torch.int32),
        "b_scales": torch.ones(1, 64),
    }
    given |= {"size_k": 32, "b_type_id": _UINT4B8}
    assert "a_scales" in refusal("_C::marlin_gemm", **given, a_scales=torch.ones(3))
    assert "global_scale" in refusal("_C::marlin_gemm", **given | {"global_scale": torch.ones(1)})  # NVFP4
    assert "weights of the type 770" in refusal("_C::marlin_gemm", **given | {"b_type_id": 0x302})
