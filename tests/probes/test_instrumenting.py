"""opreplay-probe instrument and list: kernels of files and captures, the plan, what is refused, what is written."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from replayfmt.format.codes import KernelKind
from replayfmt.format.model import Attachment, CaptureInfo, Kernel
from replayfmt.format.writer import CaptureWriter
from replayfmt.probes.ptx import ptxas_programs
from replayfmt.probes.recordings import TraceFolder, read_ptxas_log

from .kernels import CUDA, FOLDER, ptx
from .test_report import ran

needs_ptxas = pytest.mark.skipif(not ptxas_programs(), reason="no ptxas")
SESSION = CaptureInfo("00112233-4455-6677-8899-aabbccddeeff", "test", "0")
ADD = Kernel("triton::triton_add", "v1", "triton::triton_add.v1(Tensor x) -> ()", KernelKind.triton)
MM = Kernel("aten::mm", "default", "aten::mm(Tensor self, Tensor mat2) -> Tensor")


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """A capture with a Triton kernel that has PTX, one that has source alone, and an operator."""
    path = tmp_path / "step.opreplay"
    writer = CaptureWriter(path, SESSION)
    source = writer.attachment(Attachment("source", "add.py", writer.payload(b"def add(): ...\n")))
    code = writer.attachment(Attachment("ptx", "", writer.payload(ptx("triton_add", 90).encode())))
    writer.kernel(MM)
    writer.kernel(replace(ADD, attachments=(source, code)))
    writer.kernel(replace(ADD, name="triton::bare", schema="triton::bare.v1(Tensor x) -> ()", attachments=(source,)))
    writer.close(0)
    return path


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_kernels_of_a_capture_are_listed_with_what_keeps_a_probe_out(
    capture: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(monkeypatch, "list", capture, "--format=json") == 0
    operator, add, bare = listed(capsys)
    assert operator == {"name": "aten::mm.default", "about": "not probeable: no PTX"}
    assert add["about"] == "probeable" and add["target"] == "sm_90a"
    assert isinstance(add["positions"], list) and "1 end" in add["positions"]
    assert bare["about"] == "not probeable: no PTX"


def test_kernels_of_ptx_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(monkeypatch, "list", FOLDER / "predicated_return.ptx") == 0
    assert capsys.readouterr().out == (
        "predicated_return: probeable\n  target        sm_80\n  positions     2 end, 1 global_store\n"
    )


@needs_ptxas
def test_a_kernel_of_a_capture_gets_its_probe(
    capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("instrument", capture, "--tool=block_sched", "--kernel=triton::triton_add", "--format=json")
    assert ran(monkeypatch, *arguments, "--launch=8,2,1:64,1,1", "-o", tmp_path / "run") == 0
    (plan,) = listed(capsys)
    assert (plan["kernel"], plan["sites"], plan["needed_bytes"]) == ("triton_add", "1 start, 1 end", 16 * 2 * 16)
    assert plan["registers_added"] == plan["registers_after"] - plan["registers_before"]  # type: ignore[operator]
    (kernel,) = TraceFolder.open(tmp_path / "run").kernels
    assert (kernel / "original.ptx").read_text() == ptx("triton_add", 90)
    assert "probe block_sched" in (kernel / "probed.ptx").read_text()
    assert (kernel / "probed.cubin").read_bytes()[:4] == b"\x7fELF" and not (kernel / "counting.ptx").exists()
    assert (kernel / "kernel.info").read_text() == "triton_add\n6\n1\n1,16\n"
    figures = read_ptxas_log(kernel / "process.log")
    assert figures["probed"]["triton_add"].registers == plan["registers_after"]
    assert figures["pruned"]["triton_add"].registers == plan["registers_before"]
    assert ran(monkeypatch, "report", "overhead", tmp_path / "run", "--format=json") == 0
    (report,) = listed(capsys)
    assert report["tables"]["by probe and kernel"][0]["registers_added"] == plan["registers_added"]  # type: ignore[index]


@pytest.mark.slow
@needs_ptxas
def test_a_probe_that_counts_first_says_so_until_records_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("instrument", FOLDER / "predicated_return.ptx", "--tool=dmat", "--format=json")
    for flags, needed in (
        ((), {"not_measured": "no --launch was given"}),
        (("--launch=2,1,1:64,1,1",), {"not_measured": "records are counted by a first launch; --records=N says how "
                                      "many there are in a row"}),
        (("--launch=2,1,1:64,1,1", "--records=3", "--max-bytes=6144"), 2 * 64 * 16 * 3),
    ):  # fmt: skip
        assert ran(monkeypatch, *arguments, *flags, "-o", tmp_path / "run", "--force") == 0
        assert listed(capsys)[0]["needed_bytes"] == needed
    (kernel,) = TraceFolder.open(tmp_path / "run").kernels
    assert "probe dmat: counts" in (kernel / "counting.ptx").read_text()
    assert (kernel / "kernel.info").read_text() == "predicated_return\n2\n1\n0,-1\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["step.opreplay", "--tool=dmat"],
            2,
            "step.opreplay: expected --kernel=NAME of one kernel; there are: aten::mm",
        ),
        (
            ["step.opreplay", "--tool=dmat", "--kernel=aten::mm"],
            1,
            "step.opreplay: aten::mm.default: not probeable: no PTX",
        ),
        (["step.opreplay", "--tool=dmat", "--kernel=other"], 2, "expected a kernel other; there are: aten::mm.default"),
        (["step.opreplay"], 2, "instrument: expected FILE, a capture, a .ptx or a .cu file, and --tool=PROBE"),
        (["a.ptx", "--tool=nothing"], 2, "nothing: expected a probe, one of block_sched"),
        (["a.ptx", "--tool=progress"], 1, "predicated_return: probe progress saves at branch; the kernel has none"),
        (["a.ptx", "--tool=dmat", "--launch=1,1,1:2000,1,1"], 2, "--launch=1,1,1:2000,1,1: expected GX,GY,GZ:BX,BY,BZ"),
        (["a.ptx", "--tool=dmat", "--max-bytes=5"], 2, "--max-bytes: give --launch, and --records"),
        (
            ["a.ptx", "--tool=block_sched", "--records=5"],
            2,
            "--records: probe block_sched saves one record in a launch",
        ),
        (["a.ptx", "--tool=dmat", "--section=1"], 2, "--section is an option of report; instrument does not use it"),
        (["a.txt", "--tool=dmat"], 2, "a.txt: expected a capture (.opreplay), PTX (.ptx) or CUDA source (.cu)"),
        (["broken.ptx", "--tool=dmat"], 1, "broken.ptx: PTX: expected .version and .target; this is not PTX"),
        (["none.ptx", "--tool=dmat"], 3, "none.ptx: no such file or directory"),
        (["none.opreplay", "--tool=dmat"], 3, "none.opreplay: no such file or directory"),
    ],
)
def test_what_cannot_be_instrumented_is_one_line_and_nothing_is_written(
    arguments: list[str],
    code: int,
    message: str,
    capture: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(capture.parent)
    Path("a.ptx").write_text(ptx("predicated_return"))
    Path("broken.ptx").write_text("nothing\n")
    assert ran(monkeypatch, "instrument", *arguments, "-o", "run") == code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not Path("run").exists()


def test_more_bytes_than_allowed_are_refused_before_anything_is_assembled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("instrument", FOLDER / "predicated_return.ptx", "--tool=block_sched", "--launch=1000,1,1:128,1,1")
    assert ran(monkeypatch, *arguments, "--max-bytes=63999", "-o", tmp_path / "run") == 1
    assert "needs 64,000 bytes for 1,000 blocks of 128 threads; --max-bytes allows 63,999" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@needs_ptxas
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
def test_cuda_source_is_compiled_for_the_target_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.cu").write_text(CUDA)
    flags = ("--kernel=cuda_saxpy", "--tool=gmem_bytes", "--target=sm_90", "--format=json")
    assert ran(monkeypatch, "instrument", tmp_path / "a.cu", *flags) == 0
    (plan,) = listed(capsys)
    assert plan["target"] == "sm_90" and plan["kernel"] == "cuda_saxpy"
    (tmp_path / "a.cu").write_text("__global__ void broken( {}")
    assert ran(monkeypatch, "list", tmp_path / "a.cu") == 1
    assert "nvcc does not compile it: " in capsys.readouterr().err


def test_without_nvcc_cuda_source_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.cu").write_text(CUDA)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ran(monkeypatch, "list", tmp_path / "a.cu") == 1
    assert "CUDA source needs nvcc, which is not on PATH; name a .ptx file" in capsys.readouterr().err


@needs_ptxas
def test_a_folder_is_replaced_only_with_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("instrument", FOLDER / "predicated_return.ptx", "--tool=block_sched", "-o", tmp_path / "run")
    assert ran(monkeypatch, *arguments) == 0
    assert ran(monkeypatch, *arguments) == 1
    assert "exists already" in capsys.readouterr().err
    assert ran(monkeypatch, *arguments, "--force") == 0
