"""opreplay-report --probes: what a probe cost the kernel of the capture that was probed, or one error and no page."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from dump.captures import STRIDED, Builder, tensors

from replayfmt.errors import UsageError
from replayfmt.format.codes import DType, KernelKind, OpStatus, RecordKind
from replayfmt.format.model import Attachment, Device, Kernel, Signature, TensorMeta
from replayfmt.format.reader import open_capture
from replayfmt.probes.definitions import find_probe
from replayfmt.probes.ptx import parse_ptx, probed_ptx
from replayfmt.probes.recordings import write_recording
from replayfmt.report.contents import ReportContents, ReportInputs, make_contents
from replayfmt.report.pictures import NOT_MEASURED, BarPicture, MissingPicture
from replayfmt.report.probe_section import read_probe_run
from tests.probes.kernels import ptx
from tests.probes.synthetic import block_records, shape_of, waves
from tests.probes.test_costs import run_folder

from .conftest import tool

BLOCKS = waves(sms=2, slots=2, rounds=3, elapsed=900, gap=100)
ONE_IS_LONG = [(0, 50, 1000)] * (len(BLOCKS) - 1) + [(0, 50, 4000)]


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two variants of a Triton kernel, of which the first is called twice and the second once; another without PTX."""
    b = Builder(tmp_path_factory.mktemp("probed") / "step.opreplay")
    device = b.writer.device(Device("cpu", -1, "cpu"))
    meta = b.writer.meta(TensorMeta(DType.float32, STRIDED, device, (4,), (1,)))
    first, second, bare = (
        Kernel(f"triton::{name}", variant, f"triton::{name}.{variant}(Tensor x) -> ()", KernelKind.triton)
        for name, variant in (("fill", "v1"), ("fill", "v2"), ("bare", "v1"))
    )
    for kernel, calls, code in ((first, 2, b"// one"), (second, 1, b"// two"), (bare, 1, None)):
        if code is not None:
            attachment = b.writer.attachment(Attachment("ptx", "", b.writer.payload(code)))
            kernel = replace(kernel, attachments=(attachment,))
        signature = Signature(RecordKind.op, tensors("x"), (), b.writer.kernel(kernel), OpStatus.ok)
        for _ in range(calls):
            b.record(signature, [b.tensor(b.storage(16, device), meta)])
    b.frame()
    return b.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The second variant with block_sched: slowdowns of 2 and 3, registers from 30 to 36, a launch that failed."""
    folder = run_folder(tmp_path / "run", [(1.0, 2.0, 0), (1.0, 3.0, 0), (1.0, 1.0, 700)])
    log = folder / "event.log"
    log.write_text(log.read_text().replace("grid 64 1 1 block 96", f"grid {len(BLOCKS)} 1 1 block 32"))
    (folder / "kernel/0_ab/original.ptx").write_bytes(b"// two")
    module = parse_ptx(ptx("triton_add", 90))
    probed = probed_ptx(module, "triton_add", find_probe("block_sched"))
    (folder / "kernel/0_ab/probed.ptx").write_text(probed.text)
    (folder / "result").mkdir()
    for number, blocks in enumerate([BLOCKS, BLOCKS, ONE_IS_LONG]):
        write_recording(folder / "result" / f"{number}.5.bin", shape_of(len(blocks)), [block_records(blocks)])
    return folder


def contents_of(capture: Path, *runs: Path) -> ReportContents:
    with open_capture(capture) as reader:
        inputs = ReportInputs(probes=[read_probe_run(str(each), reader) for each in runs])
        return make_contents(reader, inputs)


def rows(contents: ReportContents, table: str) -> list[dict[str, str]]:
    (shown,) = (each for section in contents.sections for each in section.tables if each.name == table)
    titles = [column.title for column in shown.columns]
    return [dict(zip(titles, (cell.text for cell in row.cells), strict=True)) for row in shown.rows]


def notes(contents: ReportContents) -> str:
    return " ".join(next(each for each in contents.sections if each.name == "probes").notes)


def test_the_page_shows_what_the_probe_cost_the_variant_that_was_probed(capture: Path, run: Path) -> None:
    contents = contents_of(capture, run)
    (row,) = rows(contents, "probed")
    assert row["kernel"] == "triton::fill.v2" and row["probe"] == "block_sched" and row["launches"] == "2"
    assert row["slowdown"] == "2.500 ×" and (row["without the probe"], row["with the probe"]) == ("1 ms", "2.5 ms")
    assert (row["registers before"], row["registers after"]) == ("30", "36")
    (kernel,) = (each for each in rows(contents, "kernels") if each["kernel"] == "triton::fill.v2")
    assert row["captured, host, a call"] == kernel["captured, host"] != NOT_MEASURED, "of its only call"
    assert row["isolated, a call"] == NOT_MEASURED
    assert "fill, block_sched: launches that failed, or have no time, and are in no figure: 1." in notes(contents)
    (picture,) = next(each for each in contents.sections if each.name == "probes").pictures
    assert isinstance(picture, BarPicture) and picture.series[0].values == [2.5]
    assert (picture.series[0].low, picture.series[0].high) == ([2.0], [3.0])


def test_a_launch_has_the_figures_of_its_schedule(capture: Path, run: Path) -> None:
    """On each of two SMs, two slots run three blocks of 900 cycles with 100 between: 200 of 2,900 cycles are waits."""
    found = rows(contents_of(capture, run), "schedules")
    assert [each["recording"] for each in found] == ["0.5.bin", "1.5.bin", "2.5.bin"]
    for each in found:
        assert (each["kernel"], each["blocks"], each["not recorded"]) == ("triton::fill.v2", "12", "0")
    for each in found[:2]:
        assert (each["SMs"], each["cycles"], each["tail"]) == ("2", "2,900", "0.0%")
        assert each["scheduling share"] == f"{200 / 2900:.1%}"
    assert (found[2]["SMs"], found[2]["cycles"], found[2]["tail"]) == ("1", "4,000", "75.0%")
    assert found[2]["scheduling share"] == NOT_MEASURED, "no slot ran a second block"


def test_a_run_without_ptx_is_of_all_variants_of_its_name_which_is_said(capture: Path, run: Path) -> None:
    (run / "kernel/0_ab/original.ptx").unlink()
    contents = contents_of(capture, run)
    (row,) = rows(contents, "probed")
    assert row["kernel"] == "fill" and row["captured, host, a call"] == NOT_MEASURED and row["slowdown"] == "2.500 ×"
    assert "does not tell which of 2 variants" in notes(contents)


def test_recordings_that_are_no_launches_of_the_log_have_no_schedule(capture: Path, run: Path) -> None:
    (run / "result/1.5.bin").unlink()
    contents = contents_of(capture, run)
    assert not any(table.name == "schedules" for section in contents.sections for table in section.tables)
    assert "2 recordings, 3 launches in event.log" in notes(contents)


def test_another_probe_has_no_schedule_and_what_was_not_measured_is_not_0(capture: Path, run: Path) -> None:
    (run / "kernel/0_ab/probed.ptx").write_text("// probe dmat: counts\n")
    log = run / "event.log"
    log.write_text("".join(line + "\n" for line in log.read_text().splitlines() if "[benchmark]" not in line))
    contents = contents_of(capture, run)
    (row,) = rows(contents, "probed")
    assert row["probe"] == "dmat" and row["slowdown"] == row["with the probe"] == NOT_MEASURED
    assert row["registers after"] == "36" and row["launches"] == "0"
    section = next(each for each in contents.sections if each.name == "probes")
    assert isinstance(section.pictures[0], MissingPicture) and [each.name for each in section.tables] == ["probed"]


def test_several_runs_are_rows_of_their_own(capture: Path, run: Path, tmp_path: Path) -> None:
    other = run_folder(tmp_path / "dmat", [(1.0, 4.0, 0)], (20, 24), kernel="bare")
    found = rows(contents_of(capture, run, other), "probed")
    assert [(each["kernel"], each["probe"]) for each in found] == [
        ("triton::fill.v2", "block_sched"),
        ("triton::bare.v1", "dmat"),
    ]


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda run: shutil.rmtree(run), "is not a directory"),
        (lambda run: (run / "event.log").unlink(), "has no event.log"),
        (lambda run: (run / "event.log").write_text("nothing of it\n"), "names no kernel"),
        (lambda run: (run / "kernel/0_ab/original.ptx").write_bytes(b"// six"), "its PTX differs"),
        (lambda run: (run / "result/0.5.bin").write_bytes(b"\0" * 7), "expected"),
        (lambda run: (run / "event.log").write_text((run / "event.log").read_text().replace("fill", "relu")),
         "which .* does not have: it has triton::bare, triton::fill"),
        (lambda run: (run / "event.log").write_text((run / "event.log").read_text().replace("block 32", "block 64")),
         "expected the grid and block"),
    ],
)  # fmt: skip
def test_a_run_that_is_damaged_or_of_another_capture_is_one_error_and_no_page(
    capture: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: object, error: str
) -> None:
    assert callable(spoil)
    spoil(run)
    out = tmp_path / "x.html"
    capsys.readouterr()
    assert tool("report", f"--probes={run}", "-o", out, capture) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"INVALID_ARGUMENT: --probes={run}: ") and re.search(error, line) and not out.exists()


@pytest.mark.slow
def test_the_page_and_the_pictures_are_written_with_probes(capture: Path, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.html"
    assert tool("report", f"--probes={run}", f"--plots={tmp_path / 'p'}", "-o", out, capture) == 0
    text = out.read_text()
    assert "Kernels with probes" in text and "Schedules of blocks" in text and 'href="#kernel-2"' in text
    assert (tmp_path / "p/probes.svg").exists()
    log = run / "event.log"
    before = log.read_bytes()
    assert tool("report", "--force", f"--probes={run}", "-o", log, capture) == 2 and log.read_bytes() == before


def test_an_operator_of_the_same_name_is_not_the_kernel(run: Path, hostile: Path) -> None:
    with open_capture(hostile) as reader, pytest.raises(UsageError, match="it has no Triton kernel"):
        read_probe_run(str(run), reader)
