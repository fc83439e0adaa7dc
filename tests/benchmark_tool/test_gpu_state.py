"""What NVML says of a GPU's clocks before and after a measurement, in every result, and when it is a WARNING."""

import json

import pytest
import torch

from replayfmt.benchmark.energy.windows import read_windows
from replayfmt.benchmark.machine import GpuState, GpuWatch, are_gpu_rows, gpu_caveats, gpu_lines, nvml_reader, open_nvml
from replayfmt.errors import UsageError

pytest.importorskip("pynvml")
from . import fake_nvml
from .fake_nvml import Board

GPU = torch.device("cuda:0")


@pytest.fixture
def board(monkeypatch):
    """A made-up GPU of NVML."""
    board = Board()
    fake_nvml.install([board], monkeypatch.setattr)
    return board


def watched(board, **after):
    """The rows of a measurement after which the board says something else."""
    watch = GpuWatch([GPU], lambda device: nvml_reader("made-up-0"))
    watch.begin()
    for name, value in after.items():
        setattr(board, name, value)
    watch.end()
    return watch.rows()


def test_the_states_before_and_after_are_told(board):
    rows = watched(board, celsius=52)
    state = {
        "sm_clock_mhz": 1500,
        "memory_clock_mhz": 1200,
        "temperature_c": 40,
        "power_limit_w": 300,
        "clock_reasons": [],
        "not_measured": {},
    }
    assert rows == [{"device": "cuda:0", "before": state, "after": state | {"temperature_c": 52}, "not_measured": None}]
    assert not gpu_caveats(rows) and are_gpu_rows(json.loads(json.dumps(rows)))
    assert gpu_lines(rows) == [
        "cuda:0: SM clock 1500 MHz before, 1500 MHz after; memory clock 1200 MHz before, 1200 MHz after; temperature "
        "40 °C before, 52 °C after; power limit 300 W before, 300 W after; clocks limited by: nothing"
    ]


@pytest.mark.parametrize(
    ("after", "warning"),
    [
        ({"sm_mhz": 1410}, "its SM clock changed from 1500 to 1410 MHz while it was measured"),
        ({"sm_mhz": 1470}, None),  # a boost step
        ({"memory_mhz": 405}, "its memory clock changed from 1200 to 405 MHz while it was measured"),
        ({"limit_watts": 250.0}, "its power limit changed from 300 W to 250 W while it was measured"),
        ({"celsius": 60}, "went from 40 to 60 °C while it was measured"),
        ({"reasons": 0x44}, "was slowed down while it was measured: hardware thermal slowdown, software power cap"),
        ({"reasons": 0x1 | 0x2}, None),  # idle, and clocks that the user set
    ],
)
def test_a_change_or_an_active_throttle_reason_is_a_warning(board, after, warning):
    assert gpu_caveats(watched(board, **after)) == ([] if warning is None else [f"cuda:0: {warning}"])


def test_a_throttle_reason_before_counts_and_an_unknown_one_is_named(board):
    board.reasons = 0x20
    rows = watched(board, reasons=0x10000)
    assert gpu_caveats(rows) == ["cuda:0: was slowed down while it was measured: software thermal slowdown"]
    assert gpu_lines(rows)[0].endswith("clocks limited by: software thermal slowdown, unknown (0x10000)")


def test_what_a_board_does_not_say_is_not_measured_with_its_reason(board):
    board.sm_mhz = board.reasons = None
    (row,) = watched(board)
    assert row["before"]["sm_clock_mhz"] is None and row["before"]["clock_reasons"] is None
    assert row["before"]["not_measured"] == {
        "sm_clock_mhz": "NVML: Not Supported",
        "clock_reasons": "NVML: Not Supported",
    }
    assert "SM clock not measured before" in gpu_lines([row])[0] and gpu_lines([row])[0].endswith("by: not measured")
    assert not gpu_caveats([row])


def test_a_gpu_without_nvml_is_not_measured_and_the_processor_is_no_gpu(monkeypatch):
    import pynvml

    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    watch = GpuWatch([torch.device("cpu"), GPU], lambda device: nvml_reader("made-up-0"))
    watch.begin()
    watch.end()
    assert watch.rows() == [
        {"device": "cuda:0", "before": None, "after": None, "not_measured": "NVML: NVML Shared Library Not Found"}
    ]
    assert gpu_lines(watch.rows()) == ["cuda:0: not measured: NVML: NVML Shared Library Not Found"]
    assert not gpu_caveats(watch.rows())
    assert open_nvml(torch.device("xpu:0")) == "NVML is for NVIDIA GPUs"
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert "pip install 'opreplay[energy]'" in str(nvml_reader("made-up-0"))


@pytest.fixture
def slowing(monkeypatch):
    """Every measurement watches a GPU that is slower each time it is asked."""
    clocks = iter(range(1500, 0, -200))
    watch = GpuWatch.__init__

    def opened(_device):
        return lambda: GpuState(next(clocks), 1200, 40, 300, ["software power cap"])

    monkeypatch.setattr(GpuWatch, "__init__", lambda self, devices, open_gpu=None: watch(self, [GPU], opened))


@pytest.mark.parametrize(
    "flags", [["--benchmark-min-time=1x"], ["--per-op", "--op-limit=1", "--benchmark-min-time=1x"]]
)
def test_every_result_has_the_states_and_their_warnings(tools, captured, tmp_path, slowing, flags):
    out = tmp_path / "results.json"
    ran = tools("benchmark", captured, *flags, f"--benchmark-out={out}")
    assert ran.code == 0, ran.err
    context = json.loads(out.read_text())["context"]
    assert [context["gpus"][0][when]["sm_clock_mhz"] for when in ("before", "after")] == [1500, 1300]
    assert "cuda:0: its SM clock changed from 1500 to 1300 MHz while it was measured" in context["warnings"]
    assert "gpu       cuda:0: SM clock 1500 MHz before, 1300 MHz after" in ran.out
    assert "WARNING: cuda:0: was slowed down while it was measured: software power cap" in ran.out


def test_windows_for_energy_and_their_report_have_them_too(tools, captured, tmp_path, slowing):
    windows, power = tmp_path / "windows.jsonl", tmp_path / "power.csv"
    flags = ["--power-interval=0.001", "--power-averaging=0", "--op-limit=1", "--scope=init"]
    assert tools("benchmark", captured, f"--energy-windows={windows}", *flags).code == 0
    found = read_windows(windows)
    assert found.context["gpus"][0]["after"]["sm_clock_mhz"] == 1300
    begin, end = found.windows[0].start_s - 1, found.windows[-1].end_s + 1
    power.write_text(f"timestamp,gpu,power_w\n{begin},0,30\n{end},0,30\n")
    ran = tools("energy", windows, power)
    assert ran.code == 0 and "gpu         cuda:0: SM clock 1500 MHz before" in ran.out
    assert "WARNING: cuda:0: its SM clock changed from 1500 to 1300 MHz" in ran.out


@pytest.mark.parametrize("rows", [{}, [3], [{"device": "cuda:0"}], [{"device": "cuda:0", "before": {}, "after": None}]])
def test_a_file_of_windows_with_other_states_is_damaged(tools, tmp_path, rows):
    from replayfmt.benchmark.energy.windows import WindowsFile

    path = tmp_path / "windows.jsonl"
    path.write_text(WindowsFile({"gpus": rows}, 0, [], []).text())
    with pytest.raises(UsageError, match="its header is damaged: the states of the GPUs"):
        read_windows(path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_says_its_clocks():
    read = open_nvml(torch.device("cuda:0"))
    assert not isinstance(read, str) and (read().temperature_c or 0) > 0 and (read().sm_clock_mhz or 0) > 0
