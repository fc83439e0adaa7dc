"""Execution traces that other people made: what is imported, what replays here, and what is refused with its reason."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from opreplay_tools.importer import cli

import replayfmt
from replayfmt.errors import ReplayRefused
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture
from replayfmt.importers.common.options import ImportOptions
from replayfmt.importers.execution_trace.importer import import_execution_trace
from replayfmt.replay.plan import Plan

from .observed import Traced, Written
from .test_execution_trace_graph import CONVOLUTION, CUDNN
from .traces import SHARED

FOLDER = SHARED / "execution_trace"
shared = pytest.mark.skipif(not FOLDER.is_dir(), reason="the traces of other tools are not here")


@pytest.mark.slow
@shared
def test_a_graph_of_schema_1_0_1_replays_whole_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "linear.opreplay"
    done = CliRunner().invoke(cli, [str(FOLDER / "linear_et.json.gz"), "-o", str(out)])
    assert done.exit_code == 0, done.output
    with Plan(out, devices=["cpu"]) as plan:
        result = plan.execute()
    assert (result.outcome, result.ops) == ("ok", 342)
    with open_capture(out) as reader:
        names = Counter(
            reader.kernels[number].name
            for number, calls in reader.summary.kernel_calls.items()
            for _call in range(calls)
        )
    # As many as the trace has, none of them twice: 104 transpositions, 41 + 21 products, and what they were called by.
    assert (names["aten::t"], names["aten::mm"], names["aten::addmm"], names["aten::linear"]) == (104, 41, 21, 0)


@pytest.mark.slow
@shared
def test_a_gpus_training_steps_are_refused_here_unless_they_are_rewritten(tmp_path: Path) -> None:
    trace = FOLDER / "resnet_1gpu_et.json.tar.gz"
    import_execution_trace(trace, tmp_path / "gpu.opreplay")
    with pytest.raises(ReplayRefused) as caught:
        Plan(tmp_path / "gpu.opreplay", devices=["cpu"])
    findings = "\n".join(caught.value.findings)
    for refused in (
        "aten::cudnn_convolution.default has no kernel for cpu",
        "aten::cudnn_batch_norm.default has",
        "aten::cudnn_batch_norm_backward.default has",
        "c10d::allreduce_ 15 times",
        "c10d::broadcast_ 6 times",
    ):
        assert refused in findings

    report = import_execution_trace(trace, tmp_path / "portable.opreplay", ImportOptions(rewrite="portable"))
    notes = "\n".join(report.notes)
    for rewritten in (
        "aten::cudnn_convolution by aten::convolution",
        "aten::cudnn_batch_norm by aten::native_batch_norm",
        "aten::cudnn_batch_norm_backward by aten::native_batch_norm_backward",
        "c10d::allreduce_ by aten::alias",
    ):
        assert f"rewritten: {rewritten}" in notes
    capture = replayfmt.open(tmp_path / "portable.opreplay")
    with Plan(capture, devices=["cpu"]) as plan:
        assert not plan.findings
    # All of it takes a minute: here up to the first normalization, through 100 copies out of flattened buffers.
    first = next(number for number, op in capture.ops.by_ordinal.items() if op.kernel.name == "aten::native_batch_norm")
    normalized, mean, scale = capture.ops.by_ordinal[first].replay(device="cpu")
    assert (normalized.shape, mean.shape, scale.shape) == ((32, 64, 112, 112), (64,), (64,))
    note = capture.ops.by_ordinal[first].record.annotation
    assert note is not None and note["rewritten"] == "portable"
    capture.close()


@pytest.mark.slow
@shared
def test_collectives_of_two_ranks_are_named_with_their_sizes_and_groups(tmp_path: Path) -> None:
    report = import_execution_trace(
        FOLDER / "resnet_2gpu_et_v1.1.0.json.gz", tmp_path / "x.opreplay", ImportOptions(rewrite="portable")
    )
    assert any("1.1.0-chakra.0.0.4 has no strides" in note for note in report.notes)
    with open_capture(tmp_path / "x.opreplay") as reader:
        details = {
            str(record.argument("detail")) for record in reader.records() if record.kind is RecordKind.unsupported
        }
    assert "allreduce of 2049000 Float elements over 2 ranks, group '0' (default_pg)" in details
    assert all(" over 2 ranks" in detail for detail in details)


@shared
def test_triton_kernels_come_with_the_sources_in_the_archive(tmp_path: Path) -> None:
    import_execution_trace(FOLDER / "pt2_et.json.tar.gz", tmp_path / "x.opreplay")
    with open_capture(tmp_path / "x.opreplay") as reader:
        launches = [record for record in reader.records() if record.kind is RecordKind.unsupported]
        assert [str(each.argument("op")) for each in launches] == ["triton_poi_fused_add_cos_neg_sin_0"] * 2
        note = launches[0].annotation
        assert note is not None and "def triton_poi_fused" in note["triton"]["source"]


def test_the_tools_flag_rewrites_and_says_so(tmp_path: Path) -> None:
    trace = Written()
    x, w, y = (
        Traced(number, 20 + number, sizes, device="cuda:0")
        for number, sizes in enumerate(([1, 2, 5, 5], [3, 2, 3, 3], [1, 3, 3, 3]), 1)
    )
    trace.node("aten::cudnn_convolution", CUDNN, [x, w, [0, 0], [1, 1], [1, 1], 1, False, False, True], [y], parent=900)
    trace.node(
        "aten::convolution", CONVOLUTION, [x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1], [y], number=900
    )
    path = trace.save(tmp_path / "trace.json")
    runner = CliRunner()
    plain = runner.invoke(cli, [str(path), "-o", str(tmp_path / "plain.opreplay")])
    portable = runner.invoke(cli, [str(path), "-o", str(tmp_path / "portable.opreplay"), "--rewrite=portable"])
    assert plain.exit_code == portable.exit_code == 0
    assert "rewritten" not in plain.output
    assert "rewritten: aten::cudnn_convolution by aten::convolution" in portable.output
    with pytest.raises(ReplayRefused):
        Plan(tmp_path / "plain.opreplay", devices=["cpu"])
    with Plan(tmp_path / "portable.opreplay", devices=["cpu"]) as plan:
        assert plan.execute().outcome == "ok"
