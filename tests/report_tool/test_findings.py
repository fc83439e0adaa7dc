"""What stands out in a capture: each rule finds its planted case, and is silent where there is none."""

from __future__ import annotations

import html
import importlib
import json
import shlex
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import torch
from dump.captures import STRIDED, Builder
from in_process import Tools

import replayfmt
from replayfmt.benchmark.baseline import Document
from replayfmt.format.codes import DType, KernelKind, OpStatus, RecordKind, ValueKind
from replayfmt.format.model import Device, Kernel, Node, Signature, TensorMeta
from replayfmt.format.reader import open_capture
from replayfmt.report.contents import ReportInputs, make_contents
from replayfmt.report.findings import MOST_FINDINGS, Finding, capture_findings
from replayfmt.report.measurements import read_benchmark

from .conftest import Measured

ROOT = Path(__file__).parents[2]


def found_in(path: Path) -> dict[str, Finding]:
    with open_capture(path) as reader:
        return {each.rule: each for each in capture_findings(reader)}


def captured(folder: Path, program: Callable[[], object]) -> Path:
    with replayfmt.capture(folder / "planted.opreplay"):
        kept = program()
    del kept
    return folder / "planted.opreplay"


def test_the_most_expensive_kernel_is_named_with_its_share_and_shapes(tmp_path: Path) -> None:
    def program() -> None:
        large, small = torch.randn(700, 700), torch.randn(4, 4)
        for _ in range(3):
            large @ large
            small @ small
            small + 1

    finding = found_in(captured(tmp_path, program))["most_expensive_kernel"]
    assert finding.figures["kernel"] == "aten::mm.default" and finding.figures["calls"] == 6
    assert "float32[700,700]" in finding.figures["signature"] and finding.figures["share"] > 0.3
    assert "--kernel=aten::mm.default" in finding.command


def test_the_memory_peak_says_where_it_is_and_who_made_it(tmp_path: Path) -> None:
    def program() -> torch.Tensor:
        small = torch.zeros(10)
        big = torch.full((250_000,), 2.0)
        return small + big[:10]

    path = captured(tmp_path, program)
    finding = found_in(path)["memory_peak"]
    assert finding.figures["made_by"] == "aten::full.default" and finding.figures["bytes"] >= 1_000_000
    assert finding.figures["share"] > 0.99 and finding.section == "memory"


@pytest.mark.slow
def test_work_on_the_same_tensors_is_repeated_until_one_of_them_is_written(tmp_path: Path) -> None:
    def program(written: bool) -> None:
        table = torch.randn(300, 300)
        for _ in range(30):
            if written:
                table.add_(1.0)
            torch.linalg.inv_ex(table)

    again = found_in(captured(tmp_path, lambda: program(False)))["repeated_work"]
    assert again.figures["calls"] == 29 and again.figures["kernel"].startswith("aten::linalg_inv_ex")
    (tmp_path / "planted.opreplay").unlink()
    assert "repeated_work" not in found_in(captured(tmp_path, lambda: program(True)))


def test_random_numbers_and_views_are_no_repeated_work(tmp_path: Path) -> None:
    def program() -> None:
        base = torch.ones(64, 64)
        for _ in range(30):
            torch.bernoulli(base)
            base.view(-1)

    assert "repeated_work" not in found_in(captured(tmp_path, program))


def test_small_copies_are_counted_and_large_ones_are_not(tmp_path: Path) -> None:
    def program(elements: int) -> None:
        source = torch.ones(elements)
        for _ in range(30):
            source.clone()

    few = found_in(captured(tmp_path, lambda: program(100)))["small_copies"]
    assert few.figures["ops"] == 30
    (tmp_path / "planted.opreplay").unlink()
    assert "small_copies" not in found_in(captured(tmp_path, lambda: program(100_000)))


def timed(path: Path, device: str, times: list[tuple[int, int]], operator: str = "aten::relu") -> Path:
    """A capture of one op after the other: when each began on the host, and how long it took, on the device if that is
    no cpu. In nanoseconds."""
    builder = Builder(path)
    number = builder.writer.device(Device(device, 0 if device != "cpu" else -1))
    meta = builder.writer.meta(TensorMeta(DType.float32, STRIDED, number, (4,), (1,)))
    schema = f"{operator}(Tensor self) -> Tensor"
    kernel = builder.writer.kernel(Kernel(operator, "default", schema, KernelKind.operator))
    node = Node(ValueKind.tensor, "self")
    call = Signature(RecordKind.op, (node,), (Node(ValueKind.tensor, ""),), kernel, OpStatus.ok)
    for _ in times:
        given, made = (builder.tensor(builder.storage(16, number), meta) for _ in range(2))
        builder.record(call, [given, made])
    builder.starts = [start for start, _taken in times]
    taken = [taken for _start, taken in times]
    builder.frame(taken) if device == "cpu" else builder.frame(False, taken)
    return builder.close()


def test_time_between_ops_is_said_where_it_is_a_quarter_or_more(tmp_path: Path) -> None:
    seldom = timed(tmp_path / "a.opreplay", "cpu", [(number * 1000, 400) for number in range(40)])
    assert found_in(seldom)["time_in_no_op"].figures["share"] == pytest.approx(0.6, abs=0.02)
    often = timed(tmp_path / "b.opreplay", "cpu", [(number * 1000, 900) for number in range(40)])
    assert "time_in_no_op" not in found_in(often)


def test_a_device_that_waits_for_launches_is_said_and_a_busy_one_is_not(tmp_path: Path) -> None:
    waiting = timed(tmp_path / "a.opreplay", "cuda", [(number * 10_000, 2_000) for number in range(40)])
    finding = found_in(waiting)["idle_device"]
    assert finding.figures["busy_share"] == pytest.approx(0.2, abs=0.02) and finding.figures["short_share"] == 1
    busy = timed(tmp_path / "b.opreplay", "cuda", [(number * 10_000, 9_900) for number in range(40)])
    assert "idle_device" not in found_in(busy)


def test_reads_that_wait_for_a_device_are_counted_and_those_of_host_memory_are_not(tmp_path: Path) -> None:
    times = [(number * 10_000, 9_900) for number in range(4)]
    name = "aten::_local_scalar_dense"
    assert found_in(timed(tmp_path / "a.opreplay", "cuda", times, name))["host_waits"].figures["calls"] == 4
    assert "host_waits" not in found_in(timed(tmp_path / "b.opreplay", "cpu", times, name))


def test_kernels_far_from_the_roof_are_found_in_a_benchmark(measured: Measured, tmp_path: Path) -> None:
    document: Document = json.loads(measured.per_op.read_text())
    for row in document["benchmarks"]:
        if row.get("run_type") != "aggregate":
            row["share_of_roof"] = 0.01
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(document))
    with open_capture(measured.capture) as reader:
        inputs = ReportInputs([("--benchmark", read_benchmark(slow, reader))])
        rules = [each.rule for each in make_contents(reader, inputs).findings]
    assert "far_from_the_roof" in rules


def test_there_are_few_of_them_and_the_page_begins_with_them(measured: Measured, tools: Tools, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert tools("report", measured.capture, "-o", out).code == 0
    with open_capture(measured.capture) as reader:
        expected = capture_findings(reader)
    page = html.unescape(out.read_text())
    assert 0 < len(expected) <= MOST_FINDINGS
    places = [page.index(each.text) for each in expected]
    assert places == sorted(places) and places[-1] < page.index('class="tiles"')
    for each in expected:
        assert each.command in page and f'id="{each.section}"' in page


@pytest.mark.slow
def test_dump_prints_them_for_people_and_as_rows_of_the_schema(measured: Measured, tools: Tools) -> None:
    with open_capture(measured.capture) as reader:
        expected = capture_findings(reader)
    said = tools("dump", "--findings", measured.capture)
    assert said.code == 0
    assert [line.strip() for line in said.out.splitlines()] == [
        part for each in expected for part in (each.text, each.command)
    ]
    rows = [
        json.loads(line) for line in tools("dump", "--findings", "--format=jsonl", measured.capture).out.splitlines()
    ]
    schema = json.loads((ROOT / "docs/rows.schema.json").read_text())
    for row in rows:
        jsonschema.validate(row, schema)
    assert [row["rule"] for row in rows] == [each.rule for each in expected]
    assert tools("dump", "--findings", "--jq=.rule", "-r", measured.capture).out.split() == [
        each.rule for each in expected
    ]
    assert tools("dump", "--findings", "--summary", measured.capture).code == 2


def test_where_nothing_stands_out_that_is_said(tools: Tools, tmp_path: Path) -> None:
    empty = Builder(tmp_path / "empty.opreplay").close()
    assert tools("dump", "--findings", empty).out == "nothing stands out\n"
    assert tools("dump", "--findings", "--format=jsonl", empty).out == ""


def test_the_commands_of_findings_are_ones_that_the_tools_take(measured: Measured) -> None:
    with open_capture(measured.capture) as reader:
        commands = [shlex.split(each.command) for each in capture_findings(reader)]
    assert commands
    for name, *arguments in commands:
        tool = importlib.import_module(f"opreplay_tools.{name.removeprefix('opreplay-')}").cli
        with tool.make_context(name, arguments):  # refuses what it does not know
            assert str(measured.capture) in arguments


@pytest.mark.slow
def test_a_report_measures_itself(measured: Measured, tmp_path: Path, tools: Tools) -> None:
    out = tmp_path / "page.html"
    given = "--replay-options=--peak-flops=1T --peak-bandwidth=100G"
    ran = tools("report", "--measure=1", given, measured.capture, "-o", out)
    assert ran.code == 0 and ran.err.count("measuring: opreplay-benchmark") == 2
    page = out.read_text()
    assert "isolated time of all ops" in page and "no benchmark of whole replays was given" not in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--replay-options=--threads=1"], 2),
        (["--measure=2", "--benchmark=x.json"], 2),
        (["--measure=2", "--replay-options='"], 2),
        (["--measure=2", "--replay-options=--no-such-option"], 2),
        (["--measure=2", "--replay-options=--device=cuda:99"], 2),
    ],
)
def test_what_cannot_be_measured_leaves_no_page(
    measured: Measured, tmp_path: Path, tools: Tools, flags: list[str], code: int
) -> None:
    ran = tools("report", *flags, measured.capture, "-o", tmp_path / "page.html")
    assert ran.code == code and not list(tmp_path.iterdir())
    assert ran.err.splitlines()[-1].startswith(("INVALID_ARGUMENT: ", "FAILED_PRECONDITION: "))
