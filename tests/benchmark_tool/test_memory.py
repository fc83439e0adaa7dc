"""`opreplay-benchmark --memory`: the capture's figures beside the allocator's, and what was not measured."""

import json

import pytest
import torch

import replayfmt
from replayfmt.benchmark.memory_report import MemoryReport
from replayfmt.format.memory import memory_by_device
from replayfmt.format.reader import open_capture
from replayfmt.replay.results import PeakMemory

KIB = 1 << 10


@pytest.fixture
def path(tmp_path):
    """Parameters of 4 KiB, four activations of 16 KiB of which two are alive at once."""
    weight = torch.ones(1024)
    with replayfmt.capture(tmp_path / "a.opreplay"), replayfmt.scope("execute"):
        x = torch.zeros(4, 1024)
        for _ in range(3):
            x = x + weight
        x.sum().item()
    return tmp_path / "a.opreplay"


def run(tools, path, *flags):
    return tools("benchmark", "--memory", "--benchmark-min-time=1x", "--benchmark-warmup=0", *flags, path)


def test_memory_prints_the_peak_with_what_makes_it_up_and_what_was_not_measured(tools, path):
    done = run(tools, path)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("memory of cpu"))
    assert lines[start].startswith("memory of cpu: 36.00 KiB in 3 storages at ordinal ")
    assert lines[start + 1 : start + 4] == [
        "   16.00 KiB  made by aten::add.Tensor, 1 storage",
        "   16.00 KiB  made by aten::zeros.default, 1 storage",
        "   4.000 KiB  from outside (inputs, parameters), from their first use on, 1 storage",
    ]
    assert any("made by aten::zeros.default (ordinal 1, scope execute)" in line for line in lines)
    assert any("from outside, first used by aten::add.Tensor" in line for line in lines)
    assert "allocator of cpu: not measured: PyTorch's allocator for the CPU keeps no statistics" in lines


def test_memory_is_a_section_of_the_json_and_of_the_result_file(tools, path, tmp_path):
    done = run(tools, path, "--benchmark-format=json", f"--benchmark-out={tmp_path / 'out.json'}")
    assert done.code == 0, done.err
    memory = json.loads(done.out)["memory"]
    assert json.loads((tmp_path / "out.json").read_text())["memory"]["captured"] == memory["captured"]
    with open_capture(path) as reader:
        (device,) = memory_by_device(reader)
    assert memory["captured"] == [device.as_json() | {"replayed_on": "cpu"}]
    (measured,) = memory["measured"]
    assert measured["allocator_peak_bytes"] is None and measured["allocator_minus_captured_bytes"] is None
    assert measured["allocator_peak_bytes_reason"] == "PyTorch's allocator for the CPU keeps no statistics"
    assert measured["resident_set_peak_bytes"] >= measured["resident_set_before_bytes"] > 0


def test_what_the_allocator_reports_stands_beside_the_only_device_replayed_there(path):
    with open_capture(path) as reader:
        (device,) = memory_by_device(reader)
    measured = (PeakMemory("cuda:0", 40 * KIB, 4 * KIB, "allocated by torch"),)
    report = MemoryReport([device], ["cuda:0"], measured)
    assert report.as_json()["measured"][0]["allocator_minus_captured_bytes"] == 4 * KIB
    assert list(report.lines())[-2:] == [
        "allocator of cuda:0: 40.00 KiB at most in a replay, 4.000 KiB before the ops",
        "  4.000 KiB more than the capture's figure: kernels' own memory, rounding, content that is there before its "
        "first use, copies to restore it from",
    ]
    both = MemoryReport([device, device], ["cuda:0", "cuda:0"], measured)
    assert both.as_json()["measured"][0]["allocator_minus_captured_bytes"] is None


@pytest.mark.parametrize("flag", ["--per-op", "--compare", "--reconcile", "--energy", "--energy-windows=w"])
def test_memory_refuses_the_flags_of_other_measurements(tools, path, flag):
    done = tools("benchmark", "--memory", flag, path)
    assert done.code == 2 and f"{flag.partition('=')[0]} does not go with --memory" in done.err


def test_memory_has_no_rows_for_csv(tools, path):
    done = run(tools, path, "--benchmark-format=csv")
    assert done.code == 2 and "--benchmark-format=csv" in done.err and not done.out


@pytest.mark.parametrize(
    ("peak", "said"), [(5 * KIB, "1.000 KiB more than before the ops"), (4 * KIB, "no growth that Linux saw")]
)
def test_a_resident_set_that_did_not_grow_is_not_said_to_have_taken_nothing(path, peak, said):
    with open_capture(path) as reader:
        devices = memory_by_device(reader)
    report = MemoryReport(devices, ["cpu"], (PeakMemory("cpu", peak, 4 * KIB, "resident set of the process"),))
    assert list(report.lines())[-1] == f"  the process's resident set: {peak // KIB}.000 KiB, {said}"
