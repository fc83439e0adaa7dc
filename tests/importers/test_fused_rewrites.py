"""Fused operators of accelerators by their steps: run, and compared with their definitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from opreplay_tools.dump import cli as dump

import replayfmt
from replayfmt.dump.selection import OpSelection
from replayfmt.format.codes import DType
from replayfmt.format.model import Kernel
from replayfmt.format.reader import open_capture
from replayfmt.importers.importing import import_trace
from replayfmt.importers.rewrites.portable import Portable
from replayfmt.trim.trimming import strip_capture

from .test_portable import Machine, rewrite
from .traces import kernel, launch, op, tensor, trace


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "baddbmm"])
def test_products_with_another_dtype_for_their_result(name: str) -> None:
    batch = (3,) if name.startswith("b") else ()
    one, other = torch.randn(*batch, 4, 6).bfloat16(), torch.randn(*batch, 6, 5).bfloat16()
    names = {
        "mm": ("self", "mat2"),
        "bmm": ("self", "mat2"),
        "addmm": ("mat1", "mat2"),
        "baddbmm": ("batch1", "batch2"),
    }[name]
    expected = one.float() @ other.float()
    given: dict[str, Any] = dict(zip(names, (one, other), strict=True))
    if name.startswith(("add", "badd")):
        bias = torch.randn(5)
        given = {"self": bias, **given}
        expected = expected * 2 + bias
    given["out_dtype"] = DType.float32
    if "add" in name:
        given["alpha"] = 2
    machine = Machine()
    (result,) = rewrite(f"aten::{name}.dtype", given, [machine.new((*batch, 4, 5))], machine)
    torch.testing.assert_close(result, expected)


def test_cells_of_recurrent_networks() -> None:
    lstm, gru, x, h, c = (
        torch.nn.LSTMCell(3, 4),
        torch.nn.GRUCell(3, 4),
        torch.randn(2, 3),
        torch.randn(2, 4),
        torch.randn(2, 4),
    )
    for cell, name, biased in ((lstm, "lstm", True), (gru, "gru", True), (lstm, "lstm", False)):
        taken, held = x @ cell.weight_ih.t(), h @ cell.weight_hh.t()
        biases = {"input_bias": cell.bias_ih.detach(), "hidden_bias": cell.bias_hh.detach()}
        if not biased:
            taken, held, biases = taken + cell.bias_ih, held + cell.bias_hh, {"input_bias": None, "hidden_bias": None}
        machine = Machine()
        state = {"cx": c} if name == "lstm" else {"hx": h}
        sizes = [(2, 4), (2, 4), (2, 16)] if name == "lstm" else [(2, 4), (2, 20)]
        results = rewrite(
            f"aten::_thnn_fused_{name}_cell",
            {"input_gates": taken.detach(), "hidden_gates": held.detach(), **state, **biases},
            [machine.new(each) for each in sizes],
            machine,
        )
        expected = cell(x, (h, c)) if name == "lstm" else (cell(x, h),)
        for got, wanted in zip(results, expected, strict=False):
            torch.testing.assert_close(got, wanted.detach())


@pytest.mark.parametrize("weighted", [True, False])
def test_the_backward_pass_of_rms_norm(weighted: bool) -> None:
    x = torch.randn(2, 3, 8, requires_grad=True)
    weight = torch.rand(8, requires_grad=True) if weighted else None
    expected = torch.nn.functional.rms_norm(x, [8], weight, 1e-6)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    scale = (x.detach().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    machine = Machine()
    results = rewrite(
        "aten::_fused_rms_norm_backward",
        {
            "grad_out": grad,
            "input": x.detach(),
            "normalized_shape": [8],
            "rstd": scale,
            "weight": None if weight is None else weight.detach(),
            "output_mask": [True, weighted],
        },
        [machine.new((2, 3, 8)), machine.new((8,)) if weighted else None],
        machine,
    )
    torch.testing.assert_close(results[0], x.grad)
    if weight is not None:
        torch.testing.assert_close(results[1], weight.grad)


def test_dropouts_mask_and_cudnns_affine_grid_backwards() -> None:
    machine, x, mask = Machine(), torch.randn(3, 4), torch.tensor([0, 1, 1, 0], dtype=torch.uint8).expand(3, 4)
    (result,) = rewrite("aten::_masked_scale", {"self": x, "mask": mask, "scale": 2.0}, [machine.new((3, 4))], machine)
    torch.testing.assert_close(result, x * mask * 2)
    theta = torch.randn(2, 2, 3, requires_grad=True)
    grid = torch.nn.functional.affine_grid(theta, [2, 3, 4, 5], align_corners=True)
    grad = torch.randn_like(grid)
    grid.backward(grad)
    (result,) = rewrite(
        "aten::cudnn_affine_grid_generator_backward",
        {"grad": grad, "N": 2, "C": 3, "H": 4, "W": 5},
        [machine.new((2, 2, 3))],
        machine,
    )
    torch.testing.assert_close(result, theta.grad)


def test_what_is_left_is_named(tmp_path: Path) -> None:
    portable = Portable()
    said = portable.rewrite(Kernel("aten::_cslt_compress", "default", ""), [("input", Machine().new((4, 4)))], None)
    assert said == "aten::_cslt_compress.default: no replacement is known, and there is no kernel for a CPU"
    for name, overload in (
        ("aten::mm", "default"),
        ("aten::add", "Tensor"),
        ("aten::empty", "memory_format"),
        ("vllm::thing", "default"),
        ("aten::linear", "default"),
    ):
        assert portable.rewrite(Kernel(name, overload, ""), [], None) is None
    events = [
        event
        for number in range(2)
        for event in (
            op("aten::_cslt_compress", 100 * number + 10, 20, [tensor("float", 32, 32)]),
            launch(number + 1, 100 * number + 15),
            kernel(number + 1, 100 * number + 50, 5),
        )
    ]
    report = import_trace(trace(tmp_path / "t.json", events), tmp_path / "left.opreplay", rewrite="portable")
    assert [note for note in report.notes if "stays as it is" in note] == [
        f"aten::_cslt_compress.default stays as it is: {said}"
    ]


def test_aiters_attention_is_replaced_though_the_library_is_not_here(tmp_path: Path) -> None:
    q, numbers = tensor("c10::BFloat16", 1, 16, 3, 8), ("0.", "0.35355339", "False", "-1", "-1", "True", "False", "2")
    inputs = [q, q, q, *(("Scalar", [], [], value) for value in numbers), *[("", [], [], "")] * 7]
    events = [
        op("aiter::fmha_v3_fwd", 10, 20, inputs),
        launch(1, 15),
        kernel(1, 50, 5),
        op(
            "aiter::_groupnorm_run",
            110,
            20,
            [
                tensor("c10::BFloat16", 1, 8, 4, 4),
                ("Scalar", [], [], "2"),
                tensor("c10::BFloat16", 8),
                tensor("c10::BFloat16", 8),
                ("Scalar", [], [], "1e-06"),
            ],
        ),
        launch(2, 115),
        kernel(2, 150, 7),
    ]
    path, out = trace(tmp_path / "t.json", events), tmp_path / "out.opreplay"
    report = import_trace(path, out, rewrite="portable")
    assert report.calls()["incomplete"] == 0
    assert any("aiter::fmha_v3_fwd by " in note and "aten::_softmax" in note for note in report.notes)
    with replayfmt.Plan(out, devices=["cpu"]) as plan:
        assert plan.execute().outcome == "ok"
    with replayfmt.open(out) as capture:
        names = [each.kernel.name for each in capture.ops]
        times = [each.record.duration_ns for each in capture.ops]
    assert names[-1] == "aten::group_norm" and names.count("aten::matmul") == 2
    assert times == [20_000, *[None] * (len(times) - 2), 20_000], "of what came in an operator's place, nobody knows"
    rows = [json.loads(line) for line in CliRunner().invoke(dump, [str(out), "--format=jsonl"]).output.splitlines()]
    assert [row["duration_ns"] for row in rows if row["kind"] == "op"] == times
    with open_capture(out) as reader:
        strip_capture(reader, str(tmp_path / "stripped.opreplay"), OpSelection())
    with replayfmt.open(tmp_path / "stripped.opreplay") as capture:
        assert [each.record.duration_ns for each in capture.ops] == times
    assert import_trace(path, out, force=True).calls()["incomplete"] == 2, "only where that is asked for"


def test_aiters_attention_is_attention() -> None:
    machine = Machine()
    q, k, v = torch.randn(3, 2, 16, 4, 8).unbind()
    given = {
        "q": q,
        "k": k,
        "v": v,
        "dropout_p": 0.0,
        "softmax_scale": 0.3,
        "is_causal": True,
        "window_size_left": -1,
        "window_size_right": -1,
        "return_softmax_lse": True,
        "return_dropout_randval": False,
        "how_v3_bf16_cvt": 2,
    }
    result, sums = rewrite("aiter::fmha_v3_fwd", given, [machine.new((2, 16, 4, 8)), machine.new((2, 4, 16))], machine)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(each.transpose(1, 2) for each in (q, k, v)), is_causal=True, scale=0.3
    ).transpose(1, 2)
    torch.testing.assert_close(result, expected)
    assert sums.isfinite().all()
    for more in ({"extra_1": v}, {"return_dropout_randval": True}, {"window_size_left": 4}):
        arguments = [(name, machine.given(value)) for name, value in (given | more).items()]
        assert isinstance(Portable().rewrite(Kernel("aiter::fmha_v3_fwd", "default", ""), arguments, None), str)
