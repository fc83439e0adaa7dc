"""Products with packed weights as compositions: each is compared with its definition, element by element."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.importers.test_portable import Machine

from .test_engine_rewrites import refusal, rewrite

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


def _result(name: str, sizes: tuple[int, ...], **given: Any) -> torch.Tensor:
    machine = Machine()
    result = machine.new(sizes)
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
