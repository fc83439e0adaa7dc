"""Traces that the profiler makes here, and those that other people made."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from replayfmt.format.attachments import device_kernel_rows
from replayfmt.importers.importing import import_trace
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.kernels import ResolvedKernel

from .conftest import Import
from .traces import SHARED

shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the traces of other tools are not here")


def work() -> torch.Tensor:
    """A small training step and some operators that are hard to read back."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(8, 16)
    loss = torch.nn.functional.cross_entropy(model(x), torch.zeros(8, dtype=torch.long))
    loss.backward()
    optimizer.step()
    y = torch.nn.functional.conv2d(torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3))
    torch.cat([x, x * 2.5], 0)
    x.to(torch.float64)
    torch.where(x > 0, x, 0.0)
    torch.stack([x, x])
    torch.arange(0, 10, 2)
    return y.sum()


def profiled(path: Path, **options: Any) -> Path:
    with profile(activities=[ProfilerActivity.CPU], **options) as profiler:
        for step in range(2):
            with record_function(f"ProfilerStep#{step}"):
                work()
    profiler.export_chrome_trace(str(path))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"with_stack": True, "with_modules": True, "profile_memory": True, "with_flops": True}]
)
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_trace_of_this_torch_is_imported_whole(
    options: dict[str, Any], suffix: str, tmp_path: Path, imported: Import
) -> None:
    if suffix == ".json.gz" and options:
        pytest.skip("one compressed trace is enough")
    result = imported(profiled(tmp_path / f"trace{suffix}", record_shapes=True, **options))
    assert result.report.unique()["incomplete"] == 0, list(result.report.lines())
    counts = Counter(result.ops)
    for name in (
        "aten::addmm.default",
        "aten::gelu.default",
        "aten::native_layer_norm.default",
        "aten::mm.default",
        "aten::_fused_adamw_.default",
        "aten::nll_loss_forward.default",
        "aten::cat.default",
    ):
        assert counts[name] >= 2, name
    assert "aten::linear.default" not in counts and "aten::layer_norm.default" not in counts
    scopes = {result.scope(record).partition("/")[0] for record in result.of("op")}
    assert scopes == {"ProfilerStep#0", "ProfilerStep#1"}, "the backward pass's thread included"


@pytest.mark.slow
def test_every_call_of_a_trace_of_this_torch_runs_here(tmp_path: Path, imported: Import) -> None:
    result = imported(profiled(tmp_path / "trace.json", record_shapes=True), unique=True)
    for record in result.of("op"):
        kernel = result.reader.kernels[record.signature.kernel]
        assert kernel is not None and str(getattr(_packet(kernel.name), kernel.overload)._schema) == kernel.schema


def _packet(name: str) -> Any:
    namespace, _separator, base = name.partition("::")
    return getattr(getattr(torch.ops, namespace), base)


@pytest.mark.slow
def test_without_shapes_everything_is_named_and_nothing_guessed(tmp_path: Path, imported: Import) -> None:
    result = imported(profiled(tmp_path / "trace.json", record_shapes=False))
    assert not result.ops
    assert {str(each.argument("reason")) for each in result.of("unsupported")} == {"import_incomplete"}
    assert "aten::addmm" in {str(each.argument("op")) for each in result.of("unsupported")}


# For each trace: how many different calls may be incomplete at the default level, and why.
@pytest.mark.slow
@shared
@pytest.mark.parametrize(
    ("name", "incomplete", "reasons"),
    [
        ("h100_bert_small_inference", 0, set()),
        ("h100_qwen15_05b_inference", 0, set()),
        ("mi300_vit_inference", 0, set()),
        ("mi300_resnet_ddp_checkpoint_train", 7, {"collective", "import_incomplete"}),
        ("mi300_vllm_decode", 2, {"cuda_graph", "import_incomplete"}),
        ("sglang_qwen3_8b_decode", 4, {"cuda_graph", "outside_operator"}),
        ("torch_compile_triton", 4, {"triton_launch"}),
    ],
)
def test_other_peoples_traces_are_imported_with_every_call_classified(
    name: str, incomplete: int, reasons: set[str], imported: Import
) -> None:
    result = imported(SHARED / "kineto" / f"{name}.json.gz")
    assert not result.report.problems
    unique = result.report.unique()
    assert unique["incomplete"] <= incomplete and unique["exact"] > 0
    assert {str(each.argument("reason")) for each in result.of("unsupported")} <= reasons
    rows = [row for row in result.report.rows() if row["kind"] == "op"]
    assert sum(row["calls"] for row in rows) == len(result.of("op")) + len(result.of("unsupported"))
    for record in result.of("op"):
        assert record.annotation is not None and record.annotation["import"] in ("exact", "inferred")
        assert ("assumed" in record.annotation) == (record.annotation["import"] == "inferred")
    _all_work_is_in_the_table(SHARED / "kineto" / f"{name}.json.gz", device_kernel_rows(result.reader) or [])


def _all_work_is_in_the_table(path: Path, rows: list[dict[str, Any]]) -> None:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    work = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row["name"]] += row["count"]
    assert counts == Counter(each["name"] for each in work)
    assert sum(row["total_ns"] for row in rows) == sum(round(each["dur"] * 1000) for each in work)
    for theirs, ours in (("registers per thread", "registers_per_thread"), ("bytes", "bytes")):
        known = [row for row in rows if row[ours] is not None]
        assert sum(row["count"] for row in known) == sum(theirs in each["args"] for each in work)


@pytest.mark.slow
@shared
@pytest.mark.parametrize(
    "name",
    ["h100_bert_small_inference", "mi300_vit_inference", "torch_compile_triton", "mi300_resnet_ddp_checkpoint_train"],
)
@pytest.mark.parametrize("level", ["launching", "root", "leaf"])
def test_no_level_has_any_work_twice_or_loses_any(name: str, level: str, imported: Import) -> None:
    result = imported(SHARED / "kineto" / f"{name}.json.gz", level=level)
    recorded = sum(each.device_duration_ns or 0 for each in result.records)
    kernels = sum(len((each.annotation or {}).get("device_kernels", ())) for each in result.records)
    lost = next((int(note.split()[0]) for note in result.report.notes if "before the trace" in note), 0)
    assert kernels + lost == result.report.counts["device work"]
    assert recorded > 0


@pytest.mark.slow
@shared
@pytest.mark.parametrize("name", ["h100_bert_small_inference", "mi300_vit_inference"])
@pytest.mark.parametrize("level", ["auto", "leaf", "root"])
def test_at_every_level_portable_replacements_make_all_of_a_trace_run_on_the_host(
    name: str, level: Any, tmp_path: Path
) -> None:
    import_trace(
        SHARED / "kineto" / f"{name}.json.gz", tmp_path / "t.opreplay", level=level, unique=True, rewrite="portable"
    )
    with Plan(tmp_path / "t.opreplay", devices=["cpu"]) as plan:  # refused where one is left
        kernels = {each.overload.name() for each in plan.kernels if isinstance(each, ResolvedKernel)}
    assert kernels and not any("flash" in each or "miopen" in each for each in kernels)


@shared
def test_the_steps_of_serving_engines_are_scopes(imported: Import) -> None:
    result = imported(SHARED / "kineto" / "sglang_qwen3_8b_decode.json.gz")
    paths = [result.scope(each) for each in result.of("scope_begin")]
    assert any(path.endswith("step[DECODE bs=32]") for path in paths) or any(
        "execute_32_context_0" in path for path in paths
    )
    iterations = [each.annotation["iteration"] for each in result.of("scope_begin") if each.annotation]
    assert iterations and iterations[0]["phase"] == "decode"


@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolution_on_the_cpu_is_taken_and_not_what_it_allocates(
    transposed: bool, tmp_path: Path, imported: Import
) -> None:
    data = torch.randn(2, 3, 8, 8).requires_grad_()
    weight = torch.randn(3, 2, 2, 2).requires_grad_() if transposed else torch.randn(4, 3, 3, 3).requires_grad_()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        result = torch.conv_transpose2d(data, weight) if transposed else torch.conv2d(data, weight)
        result.sum().backward()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    ops = imported(path).ops
    forward = [name for name in ops if "conv" in name and "backward" not in name]
    assert len(forward) == 1, ops
    assert [name for name in ops if "backward" in name] == ["aten::convolution_backward.default"], ops
    assert not [name for name in ops if name.startswith(("aten::resize_", "aten::as_strided_"))], ops
