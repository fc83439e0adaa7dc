"""The text beside recordings: what is taken from it, what is passed over, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayfmt.errors import CaptureNotFound, InvalidRecording
from replayfmt.probes.recordings import (
    BenchmarkTimes,
    LaunchShape,
    LoggedLaunch,
    PtxasFigures,
    TraceFolder,
    read_event_log,
    read_peak_memory,
    read_ptxas_log,
    read_tensors,
)

EVENTS = """\
[pid] 812
[cmd] 20 python fill.py
[info] dl 0x5581
[probe] rename fill_kernel(float*, int) 0_da39a3ee5e6b4b0d3255bfef95601890afd80709
[probe] finish 0x5590 name fill_kernel(float*, int) n_param 2
[exec] funcmap-find 0x5590 success
[exec] 1700000000000000000 param 7f0000000000 1000
[exec] grid 32768 1 1 block 128 1 1 shared 0
[exec] grid 32768 warp  4 probe 16 total 2097152
[exec] probe-mem 2097152 (bytes)
[exec] succeed 0
[benchmark] prologue 0.100000 kernel 0.300000 epilogue 0.200000 original 0.150000 impact 2.000000 0
[exec] funcmap-find 0x5591 fail
[exec] backup 1 1 1 block 32 1 1 shared 0
[exec] funcmap-find 0x5590 success
[benchmark] prologue 1 kernel 2 epilogue 3 original 4 impact 0.5 700
"""


def test_an_event_log_names_its_launches(tmp_path: Path) -> None:
    (tmp_path / "event.log").write_text(EVENTS)
    log = read_event_log(tmp_path / "event.log")
    kernel = "fill_kernel(float*, int)"
    assert log.launches == [
        LoggedLaunch(kernel, LaunchShape((32768, 1, 1), (128, 1, 1)), 2097152, BenchmarkTimes(0.1, 0.3, 0.2, 0.15)),
        LoggedLaunch(None),
        LoggedLaunch(kernel, times=BenchmarkTimes(1, 2, 3, 4), failed=True),
    ]
    assert log.folders == {"0_da39a3ee5e6b4b0d3255bfef95601890afd80709": kernel}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[benchmark] prologue 0.1 kernel x", "line 17: at byte 0: expected `[benchmark] prologue … kernel …"),
        ("[exec] probe-mem many (bytes)", "line 17: at byte 0: expected `[exec] probe-mem N (bytes)`, got `[exec]"),
        ("x" * (1 << 21), "expected lines of at most 1048576 bytes, got a longer one"),
    ],
)
def test_a_line_that_cannot_be_read_is_one_error(tmp_path: Path, line: str, expected: str) -> None:
    (tmp_path / "event.log").write_text(EVENTS + line + "\n")
    with pytest.raises(InvalidRecording) as raised:
        read_event_log(tmp_path / "event.log")
    assert expected in str(raised.value) and len(str(raised.value)) < 600


PTXAS = """\
ptxas -arch=sm_90 -m64 --verbose run/probed.ptx -o run/probed.bin
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'fill' for 'sm_90'
ptxas info    : Function properties for fill
    0 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 368 bytes cmem[0]
ptxas -arch=sm_90 -m64 --verbose run/pruned.ptx -o run/pruned.bin
ptxas info    : Compiling entry function 'fill' for 'sm_90'
ptxas info    : Used 32 registers, 360 bytes cmem[0]
"""


@pytest.mark.parametrize("other", ["countd.ptx", "run/other.ptx", "a-b.ptx"])
def test_another_file_of_the_assembler_does_not_change_the_figures_of_pruned(other: str, tmp_path: Path) -> None:
    figures = "ptxas info    : Compiling entry function 'f' for 'sm_90'\nptxas info    : Used {} registers\n"
    log = "".join(
        f"ptxas -arch=sm_90 -v {file} -o out\n{figures.format(count)}"
        for file, count in (("pruned.ptx", 18), (other, 26), ("x_probed.ptx", 30))
    )
    (tmp_path / "ptxas.log").write_text(log)
    found = read_ptxas_log(tmp_path / "ptxas.log")
    assert found["pruned"]["f"].registers == 18 and found["probed"]["f"].registers == 30


def test_a_warning_of_the_assembler_names_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "ptxas.log").write_text(
        "ptxas pruned.ptx -o out\nptxas tmp.ptx, line 9; warning : odd\n"
        "ptxas info    : Compiling entry function 'f' for 'sm_90'\nptxas info    : Used 18 registers\n"
    )
    assert read_ptxas_log(tmp_path / "ptxas.log")["pruned"]["f"].registers == 18


def test_ptxas_says_registers_and_spills_of_each_file(tmp_path: Path) -> None:
    (tmp_path / "process.log").write_text(PTXAS)
    assert read_ptxas_log(tmp_path / "process.log") == {
        "probed": {"fill": PtxasFigures(40, 12, 16)},
        "pruned": {"fill": PtxasFigures(32)},
    }


def test_a_ptxas_log_without_its_command_is_that_of_its_name(tmp_path: Path) -> None:
    body = PTXAS.partition("\n")[2].partition("ptxas -arch")[0]
    (tmp_path / "original.log").write_text(body)
    assert read_ptxas_log(tmp_path / "original.log") == {"original": {"fill": PtxasFigures(40, 12, 16)}}
    (tmp_path / "nothing.log").write_text(body)
    with pytest.raises(InvalidRecording, match="expected `the command line of ptxas before its figures`"):
        read_ptxas_log(tmp_path / "nothing.log")


@pytest.mark.parametrize(
    ("line", "peak"),
    [
        ("max memory: 1234", 1234),
        ("x max memory: 1.5 GB now", 1_500_000_000),
        ("max memory: 2 GiB", 2 << 30),
        ("max memory:3MiB", 3 << 20),
        ("max memory: 1,024 bytes", 1024),
        ("nothing", None),
    ],
)
def test_the_peak_of_a_programs_memory_is_its_largest_line(tmp_path: Path, line: str, peak: int | None) -> None:
    (tmp_path / "stdout.log").write_text(f"loading\n{line}\nmax memoir: 5\n")
    assert read_peak_memory(tmp_path / "stdout.log") == peak
    if peak:
        (tmp_path / "stdout.log").write_text(f"{line}\nmax memory: 1\nmax memory: {peak + 1}\n")
        assert read_peak_memory(tmp_path / "stdout.log") == peak + 1


@pytest.mark.parametrize("line", ["max memory: lots", "max memory: 5 parsecs", "max memory: -4", "max memory: 1e99"])
def test_a_peak_that_is_no_amount_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "stdout.log").write_text(line)
    with pytest.raises(InvalidRecording, match="line 1: at byte 0: expected `max memory: NUMBER"):
        read_peak_memory(tmp_path / "stdout.log")


def test_tensors_are_those_that_the_latest_line_names(tmp_path: Path) -> None:
    (tmp_path / "tensor.trace").write_text(
        "[call]  17  torch.Size([4, 4])  64  4096  x  forward  model.py:3\n"
        "something else\n"
        "[call]  18  torch.Size([8])  32  1024  bias  forward  model.py:4\n"
        "[call]  19  torch.Size([16])  64  4096  y  backward  model.py:5\n"
    )
    bias, y = read_tensors(tmp_path / "tensor.trace")
    assert (bias.name, bias.shape, bias.begin, bias.nbytes) == ("bias", "torch.Size([8])", 1024, 32)
    assert (y.name, y.begin) == ("y", 4096)
    for line in ("[call]  1  s  many  5  x", "[call]  1", "[call]  1  s  4  -5  x"):
        (tmp_path / "tensor.trace").write_text(line)
        with pytest.raises(InvalidRecording, match="TIME  SHAPE  BYTES"):
            read_tensors(tmp_path / "tensor.trace")


@pytest.mark.slow
@pytest.mark.guarantee("recording-bounds")
@given(st.lists(st.sampled_from([*EVENTS.splitlines(), *PTXAS.splitlines(), "max memory: 7", "\0\x80"])), st.text())
def test_any_log_is_read_or_one_error(tmp_path_factory: pytest.TempPathFactory, chosen: list[str], text: str) -> None:
    path = tmp_path_factory.mktemp("log") / "any.log"
    path.write_bytes("\n".join([*chosen, text]).encode("utf-8", "surrogatepass"))
    for read in (read_event_log, read_ptxas_log, read_peak_memory, read_tensors):
        try:
            read(path)
        except InvalidRecording as error:
            assert "line " in str(error)


def test_a_folder_shows_what_a_run_left_in_order(tmp_path: Path) -> None:
    (tmp_path / "event.log").write_text("")
    for name in ("kernel/10_ab", "kernel/9_cd", "kernel/other", "result"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("10.500000.bin", "9.250000.bin", "9.250000.dmat", "readme"):
        (tmp_path / "result" / name).write_bytes(b"")
    folder = TraceFolder.open(tmp_path)
    assert [each.name for each in folder.kernels] == ["9_cd", "10_ab"]
    assert [each.name for each in folder.results] == ["9.250000.bin", "10.500000.bin"]
    assert folder.event_log == tmp_path / "event.log" and folder.tensors is None


def test_a_folder_of_something_else_is_not_found(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(CaptureNotFound):
            TraceFolder.open(path)
