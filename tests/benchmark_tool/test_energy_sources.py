"""Where energy comes from: NVML and RAPL behind zeus, the process that samples them, and what happens when they go."""

import json
import signal
import subprocess
import sys
from datetime import UTC
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import torch

import replayfmt
from replayfmt.benchmark.energy.energy_report import make_energy_report
from replayfmt.benchmark.energy.power_log import read_power_log
from replayfmt.benchmark.energy.running import WindowClock, WindowOptions, WindowRunner
from replayfmt.benchmark.energy.sampler import PowerSourceLost, Sampler, _update_period, sampling
from replayfmt.benchmark.energy.windows import EnergyWindow, WindowsFile, integrate
from replayfmt.benchmark.machine import EnergySource, NoSource, PowerSample, SourceLost, WrappingCounter, open_source
from replayfmt.errors import UsageError
from replayfmt.replay.plan import Plan

pytest.importorskip("zeus")
import zeus.device
import zeus.device.cpu
import zeus.device.cpu.rapl
import zeus.device.gpu

from . import fake_nvml
from .fake_nvml import Board

NOW = 1_700_000_000.0
SCHEMA = json.loads((Path(__file__).parents[2] / "docs/energy.schema.json").read_text())


@pytest.fixture
def boards(monkeypatch):
    """A list of GPUs that NVML finds in this process."""
    found = []
    fake_nvml.install(found, monkeypatch.setattr)
    monkeypatch.setattr(zeus.device.gpu, "_gpus", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    zeus.device.gpu.nvml_is_available.cache_clear()
    yield found
    zeus.device.gpu.nvml_is_available.cache_clear()


@pytest.fixture
def rapl(tmp_path, monkeypatch):
    """A tree of RAPL's files: a function sets (zone, file) to a text."""
    root = tmp_path / "intel-rapl"

    def write(zone, **files):
        (root / zone).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (root / zone / name).write_text(f"{text}\n")
        return root / zone

    monkeypatch.setattr(zeus.device.cpu.rapl, "RAPL_DIR", str(root))
    monkeypatch.setattr(zeus.device.cpu, "_cpus", None)
    zeus.device.cpu.rapl.rapl_is_available.cache_clear()
    yield write
    zeus.device.cpu.rapl.rapl_is_available.cache_clear()


# ---------------------------------------------------------------------------------------------------------- sources


def test_a_gpu_says_its_power_and_counts_its_energy_where_the_board_can(boards):
    boards += [Board(watts=70.5), Board(watts=30.0, counts=False)]
    source = open_source(["gpu"])
    first, second = source.read()
    assert (first.device, first.watts) == ("0", 70.5) and first.joules > 0
    assert second == PowerSample("1", 30.0, None)
    assert source.name == "NVIDIAGPUs of zeus" and not source.has_counters()


def test_a_gpu_that_says_nothing_is_no_source(boards):
    boards += [Board(), Board(watts=None)]
    with pytest.raises(NoSource, match=r"GPU 1 does not say what power it takes \(.*Not Supported"):
        open_source(["gpu"])
    boards.clear()
    zeus.device.gpu._gpus = None
    with pytest.raises(NoSource, match="finds no GPU"):
        open_source(["gpu"])


def test_processors_and_their_memory_are_counted_through_wraps(rapl):
    package = rapl("intel-rapl:0", name="package-0", energy_uj=999_999, max_energy_range_uj=1_000_000)
    rapl("intel-rapl:0/intel-rapl:0:0", name="core", energy_uj=5, max_energy_range_uj=1_000_000)
    rapl("intel-rapl:0/intel-rapl:0:1", name="dram", energy_uj=7, max_energy_range_uj=1_000_000)
    source = open_source(["cpu"])
    assert source.read() == [PowerSample("cpu:0", None, 0.999999), PowerSample("cpu:0:dram", None, 7e-6)]
    (package / "energy_uj").write_text("4\n")
    assert source.read()[0].joules == pytest.approx(1.000004)
    (package / "energy_uj").unlink()
    with pytest.raises(FileNotFoundError):
        source.read()


def test_a_counter_that_fell_and_did_not_wrap_is_lost():
    values, moments = iter([900.0, 950.0, 10.0, 20.0, 15.0]), iter([0.0, 1.0, 2.0, 3.0, 3.01])
    counter = WrappingCounter("cpu:0", lambda: next(values), 1000.0, lambda: next(moments))
    assert [counter.joules() for _ in range(3)] == [950.0, 1010.0, 1020.0]
    with pytest.raises(SourceLost, match="the energy counter of cpu:0 fell from 20 to 15 J"):
        counter.joules()


@pytest.mark.parametrize(
    ("energy", "samples"),
    [
        ({"total_energy_mj": 5000.0, "cpu_energy_mj": 1.0, "gpu_energy_mj": 1.0}, [PowerSample("soc", None, 5.0)]),
        (
            {"total_energy_mj": None, "cpu_energy_mj": 1000.0, "gpu_energy_mj": None},
            [PowerSample("soc:cpu_energy", None, 1.0)],
        ),
        (
            {"cpu_total_mj": 1000, "performance_cluster_mj": [900], "gpu_mj": 2000, "ane_mj": None},
            [PowerSample("soc:cpu_total", None, 1.0), PowerSample("soc:gpu", None, 2.0)],
        ),
    ],
)
def test_a_system_on_a_chip_is_the_sum_of_parts_that_do_not_contain_each_other(monkeypatch, energy, samples):
    soc = SimpleNamespace(get_total_energy_consumption=lambda: SimpleNamespace(**energy))
    monkeypatch.setattr(zeus.device, "get_soc", lambda: soc)
    assert open_source(["soc"]).read() == samples


def test_the_first_kind_that_is_there_is_taken_and_the_reasons_of_all_are_said(boards, rapl):
    rapl("intel-rapl:0", name="package-0", energy_uj=1, max_energy_range_uj=10)
    boards.append(Board())
    assert open_source(["cpu", "gpu"]).name == "RAPL through zeus"
    assert open_source(["gpu", "cpu"]).name == "NVIDIAGPUs of zeus"
    assert open_source(["soc", "gpu"]).name == "NVIDIAGPUs of zeus"
    boards.clear()
    zeus.device.gpu._gpus = None
    with pytest.raises(NoSource, match="no system on a chip says what energy it takes .*; zeus finds no GPU"):
        open_source(["soc", "gpu"])


def test_how_often_a_counter_changes_is_found_and_of_one_that_does_not_nothing(monkeypatch):
    from replayfmt.benchmark.energy import sampler

    clock = SimpleNamespace(now=0.0)

    def monotonic():
        clock.now += 0.001
        return clock.now

    monkeypatch.setattr(sampler, "time", SimpleNamespace(monotonic=monotonic))
    steps = EnergySource(
        "made up", lambda: [PowerSample("0", None, clock.now // 0.02), PowerSample("1", None, clock.now // 0.05)]
    )
    assert _update_period(steps) == pytest.approx(0.05, abs=0.002)
    assert _update_period(EnergySource("made up", lambda: [PowerSample("0", None, 5.0)])) == 1.0
    assert WindowOptions(0.04, 0.5, update_s=0.1).window_s == pytest.approx(1.2)


# ---------------------------------------------------------------------------------------------------------- logs


def log_from(tmp_path, header, rows):
    path = tmp_path / "power.csv"
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return read_power_log(path, zone=UTC)


def counted(tmp_path, joules, watts=lambda t: 50.0, step=0.1, until=10.0):
    rows = [(NOW + i * step, 0, watts(i * step), joules(i * step)) for i in range(round(until / step) + 1)]
    return log_from(tmp_path, "timestamp,gpu,power_w,energy_counter_j", rows)


def test_a_counter_tells_the_energy_and_the_power_stands_beside_it(tmp_path):
    log = counted(tmp_path, lambda t: 1000 + 60 * t, lambda t: "[N/A]" if t == 0 else 50.0)
    found = integrate(log, NOW + 1.05, NOW + 8.05)
    assert found.joules == pytest.approx(60 * 7, rel=1e-6) and found.error == pytest.approx(2 * 6, rel=1e-4)
    assert found.samples == 70 and integrate(log.power_alone(), NOW + 1.05, NOW + 8.05).joules == pytest.approx(350)
    assert not log.left_out  # a row with a counter says something


def test_a_counter_that_moves_in_steps_is_as_late_as_its_error_says(tmp_path):
    log = counted(tmp_path, lambda t: 60 * (t // 0.5 * 0.5))  # it moves each half second
    found = integrate(log, NOW + 0.9, NOW + 9.1)
    assert found.error == pytest.approx(2 * 30, rel=0.01) and abs(found.joules - 60 * 8.2) <= found.error
    short = integrate(log, NOW + 1, NOW + 3)
    assert short.joules is None and "changes of the energy counter in the window; 10 are needed" in short.reason


def test_a_counter_that_fell_has_no_figure_in_windows_that_saw_it(tmp_path):
    log = counted(tmp_path, lambda t: 60 * t + 500 if t < 5 else 60 * t)
    fallen = integrate(log, NOW + 3, NOW + 7)
    assert fallen.joules is None and fallen.reason == "the energy counter of GPU 0 ran backwards in the window"
    assert integrate(log, NOW + 5.5, NOW + 9).joules == pytest.approx(60 * 3.5)
    at_the_edge = integrate(log, NOW + 4.95, NOW + 9)
    assert at_the_edge.joules is None  # it fell between the sample before the window and the first one in it


def test_devices_with_a_counter_and_devices_with_power_add_up(tmp_path):
    rows = [(NOW + i / 10, *each) for i in range(101) for each in ((0, 50.0, ""), ("cpu:0", "[N/A]", 20 * i / 10))]
    log = log_from(tmp_path, "timestamp,gpu,power_w,energy_counter_j", rows)
    assert log.gpus == ["0", "cpu:0"] and integrate(log, NOW + 1, NOW + 9).joules == pytest.approx(70 * 8)
    assert log.power_alone() is None and not log.left_out


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("timestamp,gpu,power_uw", "45500000"),
        ("timestamp,gpu,Power [kW]", "0.0455"),
        ("timestamp,gpu,power_milliwatts", "45500"),
        ("timestamp,gpu,power (µW)", "45500000"),
        ("timestamp,gpu,power_w", "45500000 uW"),
        ("timestamp,gpu,power.draw", "0.0455 kW"),
    ],
)
def test_power_in_other_units_is_the_same_power(tmp_path, header, value):
    (series,) = log_from(tmp_path, header, [(NOW, 0, value), (NOW + 1, 0, value)]).series.values()
    assert series.watts.tolist() == pytest.approx([45.5, 45.5])


def test_a_unit_that_is_none_of_power_and_limits_are_not_taken_for_it(tmp_path):
    with pytest.raises(UsageError, match=r"the column power \[A\] has the unit 'a'"):
        log_from(tmp_path, "timestamp,gpu,power [A]", [(NOW, 0, 1)])
    columns = "timestamp,index,power.limit [W],power.max_limit [W]"
    with pytest.raises(UsageError, match="no column of the power log holds a power"):
        log_from(tmp_path, columns, [(NOW, 0, 300, 350)])
    drawn = log_from(tmp_path, columns + ",enforced.power.limit [W],power.draw [W]", [(NOW, 0, 300, 350, 299, 45)])
    assert drawn.series["0"].watts.tolist() == [45]


def test_the_report_says_counters_and_what_power_adds_up_to_and_warns_where_they_differ(tmp_path):
    windows = [
        EnergyWindow(role, role, runs, int((NOW + a) * 1e9), int((NOW + b) * 1e9), int(a * 1e9), int(b * 1e9))
        for role, runs, a, b in (("idle", 0, 1, 3), ("whole", 10, 4, 6), ("scope", 4, 7, 9), ("program", 2, 4, 6))
    ]
    not_run = [{"role": "scope", "name": "odd", "count": 1, "reason": "it ends before it begins"}]
    file = WindowsFile({}, 0, windows, not_run)
    told = make_energy_report(file, counted(tmp_path, lambda t: 60 * t), offset_s=0.0, source="a made-up board")
    content = told.content
    jsonschema.validate(content, SCHEMA)
    whole = content["whole_model"]
    assert (whole["joules"], whole["joules_from_power"]) == (pytest.approx(120), pytest.approx(100))
    assert content["power_log"]["counters"] == ["0"] and "energy counter" in content["method"]
    assert content["program"]["joules_per_run"] == pytest.approx(60)
    measured, odd = content["scopes"]
    assert measured["joules_per_run"] == pytest.approx(30)
    assert odd["joules"] is None and odd["reason"] == "it ends before it begins" and odd["name"] == "odd"
    assert content["isolated_kernels"]["distinct"] == 0
    assert content["warnings"] == [
        "the energy counter says 120 J for the whole model, the sampled power 100 J: one of them does not fit the "
        "other's time or device"
    ]
    text = "\n".join(told.lines())
    assert "source      a made-up board" in text and "100 J from sampled power" in text
    assert "scope       not measured: it ends before it begins  odd" in text
    agreeing = make_energy_report(file, counted(tmp_path, lambda t: 50 * t), offset_s=0.0)
    assert not agreeing.content["warnings"]


def test_a_log_of_counters_alone_has_no_rise_to_find(tmp_path):
    rows = [(NOW + i / 10, 0, 5 * i) for i in range(101)]
    log = log_from(tmp_path, "timestamp,gpu,energy_counter_j", rows)
    windows = [
        EnergyWindow("idle", "idle", 0, int((NOW + 1) * 1e9), int((NOW + 2) * 1e9), 10**9, 2 * 10**9),
        EnergyWindow("whole", "whole", 1, int((NOW + 2) * 1e9), int((NOW + 4) * 1e9), 2 * 10**9, 4 * 10**9),
    ]
    file = WindowsFile({}, 0, windows, [])
    report = make_energy_report(file, log, offset_s=0.0)
    jsonschema.validate(report.content, SCHEMA)
    assert report.content["whole_model"]["joules"] == pytest.approx(100) and "no power" in next(report.lines())
    with pytest.raises(UsageError, match="holds no power"):
        make_energy_report(file, log)


# ---------------------------------------------------------------------------------------------------------- sampling


FAKE_ZEUS = """
class Gpus:
    def __len__(self):
        return 2
    def get_instant_power_usage(self, index):
        raise RuntimeError("not on this board")
    def get_average_power_usage(self, index):
        return 30_000 + 10_000 * index
    def supports_get_total_energy_consumption(self, index):
        return False
def get_gpus():
    return Gpus()
"""


def a_zeus(folder, monkeypatch, text):
    """A zeus for processes that start from now on."""
    (folder / "zeus").mkdir()
    (folder / "zeus" / "__init__.py").write_text("")
    (folder / "zeus" / "device.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_measured_and_says_so(tools, tmp_path, monkeypatch):
    """Ctrl-C while the second op is measured, whose window must not be in the report."""
    a_zeus(tmp_path, monkeypatch, FAKE_ZEUS)
    path, out, repeat, x = tmp_path / "a.opreplay", tmp_path / "report.json", WindowRunner._repeat, torch.ones(3)
    with replayfmt.capture(path):
        x.sin().cos().tan()

    def interrupted(self, role, name, *arguments, **named):
        repeat(self, role, name, *arguments, **named)
        if "cos" in name:
            raise KeyboardInterrupt

    monkeypatch.setattr(WindowRunner, "_repeat", interrupted)
    flags = ["--energy", "--energy-source=gpu", "--power-interval=0.005", "--power-averaging=0.05"]
    ran = tools("benchmark", path, *flags, f"--energy-out={out}")
    assert ran.code == 130 and "interrupted: the other ops were not measured" in ran.err.splitlines()
    sine, *others = json.loads(out.read_text())["kernels"]
    assert "whole model " in ran.out and sine["kernel"] == "aten::sin.default" and sine["runs"]
    assert [(each["kernel"], each["reason"]) for each in others] == [
        (f"aten::{name}.default", "interrupted before it was measured") for name in ("cos", "tan")
    ]


def test_an_interrupt_of_a_whole_group_of_processes_leaves_the_sampler_alone(tmp_path, monkeypatch):
    a_zeus(tmp_path, monkeypatch, FAKE_ZEUS)
    log = tmp_path / "power.csv"
    with sampling(log, 0.001) as sampler:
        sampler._process.send_signal(signal.SIGINT)
        before = log.stat().st_size
        while log.stat().st_size < before + 1000:
            sampler.require_running()


@pytest.mark.slow
def test_power_is_sampled_by_a_process_of_its_own_and_its_log_is_kept(tools, captured, tmp_path, monkeypatch):
    a_zeus(tmp_path, monkeypatch, FAKE_ZEUS)
    out, log = tmp_path / "report.json", tmp_path / "power.csv"
    flags = ["--energy", "--kernel=aten::tanh", "--power-interval=0.005", "--power-averaging=0.2"]
    flags += ["--energy-source=gpu", "--scope=init"]
    ran = tools("benchmark", captured, *flags, f"--energy-out={out}", f"--power-log-out={log}")
    assert ran.code == 0 and "whole model " in ran.out
    content = json.loads(out.read_text())
    jsonschema.validate(content, SCHEMA)
    assert content["power_log"]["gpus"] == ["0", "1"]
    assert log.read_text().startswith("timestamp,gpu,power_w\n") and set(read_power_log(log).series) == {"0", "1"}
    for each in (content["whole_model"], *content["kernels"]):
        assert each["mean_watts"] is None or each["mean_watts"] == pytest.approx(70)
        assert each["mean_watts"] is not None or "samples in the window" in each["reason"]  # on a machine that starves


@pytest.mark.parametrize(
    ("zeus", "reason"),
    [
        ("raise ImportError('no zeus')", "zeus is not installed (no zeus): pip install 'opreplay[energy]'"),
        (
            "def get_gpus():\n    raise OSError('NVML and AMDSMI unavailable')",
            "no GPU says what energy it takes (OSError: NVML and AMDSMI unavailable)",
        ),
        ("def get_gpus():\n    return []", "zeus finds no GPU"),
        (FAKE_ZEUS.replace("return 30_000", "raise OSError('N/A')"), "GPU 0 does not say what power it takes"),
    ],
)
def test_a_machine_without_a_source_of_power_says_why_nothing_is_measured(
    tools, captured, tmp_path, monkeypatch, zeus, reason
):
    a_zeus(tmp_path, monkeypatch, zeus)
    out = tmp_path / "report.json"
    ran = tools("benchmark", captured, "--energy", "--energy-source=gpu", f"--energy-out={out}")
    assert ran.code == 1 and not ran.out and not out.exists()
    assert f"--energy: not measured: {reason}" in ran.err and "use --energy-windows" in ran.err


@pytest.mark.slow
def test_a_sampler_that_is_killed_leaves_no_figure_and_its_log(tmp_path, monkeypatch):
    a_zeus(tmp_path, monkeypatch, FAKE_ZEUS)
    log = tmp_path / "power.csv"
    with pytest.raises(PowerSourceLost, match=r"the power sampler ended \(signal 9\)"), sampling(log, 0.005) as sampler:
        sampler._process.kill()
        sampler._process.wait()
    assert log.read_text().startswith("timestamp,gpu,power_w\n")
    with sampling(log, 0.005) as sampler:
        process = sampler._process
    assert process.poll() == 0  # it ends with the process that it samples for


@pytest.mark.slow
def test_counters_are_sampled_beside_power_and_the_program_is_measured_too(tools, captured, tmp_path, monkeypatch):
    fake_nvml.for_processes(tmp_path, monkeypatch, [Board(watts=70.0)])
    script = tmp_path / "script.py"
    script.write_text("import sys\nassert sys.argv[1:] == ['3']\nsys.argv.append('4')\nsum(range(100_000))\n")
    out, log = tmp_path / "report.json", tmp_path / "power.csv"
    flags = ["--energy", "--energy-source=gpu", "--kernel=aten::tanh", "--scope=execute"]
    flags += ["--power-interval=0.005", "--power-averaging=0.05", f"--program={script} 3"]
    ran = tools("benchmark", captured, *flags, f"--energy-out={out}", f"--power-log-out={log}")
    assert ran.code == 0, ran.err
    content = json.loads(out.read_text())
    jsonschema.validate(content, SCHEMA)
    assert content["power_log"]["counters"] == ["0"] and content["power_log"]["source"] == "NVIDIAGPUs of zeus"
    assert log.read_text().startswith("timestamp,gpu,power_w,energy_counter_j\n")
    (scope,) = content["scopes"]
    assert scope["name"] == "execute" and "script.py 3" in content["program"]["name"]
    assert content["program"]["runs"] >= 1
    for each in (content["whole_model"], content["program"], scope):
        assert each["joules"] is not None or "in the window" in each["reason"]  # on a machine that starves
        assert each["joules"] is None or abs(each["joules"] - 70 * each["seconds"]) <= each["error_joules"]
    assert "the replay uses no accelerator" in content["warnings"][0]


def test_a_source_that_is_not_there_is_one_line_that_names_it(tools, captured, tmp_path, monkeypatch):
    a_zeus(tmp_path, monkeypatch, "def get_cpus():\n    raise OSError('RAPL unavailable')\n")
    ran = tools("benchmark", captured, "--energy", "--energy-source=cpu")
    assert ran.code == 1 and not ran.out
    assert "not measured: no processor says what energy it takes (OSError: RAPL unavailable)" in ran.err


@pytest.mark.slow
def test_a_source_that_disappears_ends_the_measurement_with_its_reason(tmp_path, monkeypatch):
    fake_nvml.for_processes(tmp_path, monkeypatch, [Board(lost_after=5, counts=False)])
    log = tmp_path / "power.csv"
    with (
        pytest.raises(PowerSourceLost, match=r"the power sampler ended \(.*GPU is lost.*\) while energy was measured"),
        sampling(log, 0.001, ["gpu"]) as sampler,
    ):
        sampler._process.wait(60)
        sampler.require_running()
    assert log.read_text().count("\n") >= 2


def test_the_reason_of_a_sampler_that_ends_as_soon_as_it_is_ready_is_told():
    said = 'ready: {"source": "a board", "counter_period_s": null}\nGPU is lost'
    command = [sys.executable, "-c", f"import sys; sys.stderr.write({said!r}); sys.exit(1)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.wait(60)
        sampler = Sampler(process)
        sampler.await_ready()
        with pytest.raises(PowerSourceLost, match=r"the power sampler ended \(GPU is lost\)"):
            sampler.require_running()
    assert sampler.source == "a board"


def test_what_libraries_say_before_the_sampler_is_ready_is_passed_over(tmp_path, monkeypatch):
    noise = "import sys\nprint('amdsmi: no driver', file=sys.stderr)\n"
    a_zeus(tmp_path, monkeypatch, noise + FAKE_ZEUS)
    with sampling(tmp_path / "power.csv", 0.005, ["gpu"]) as sampler:
        assert sampler.source == "Gpus of zeus" and sampler.counter_period_s is None


def test_no_window_is_run_once_the_sampler_is_gone(captured):
    checks = iter([None, None, PowerSourceLost("the power sampler ended")])  # idle, whole, the first op

    def require_source():
        gone = next(checks)
        if gone is not None:
            raise gone

    now = SimpleNamespace(ns=0)

    def tick():
        now.ns += 1_000_000
        return now.ns

    moments = WindowClock(tick, tick, lambda seconds: None)
    runner = WindowRunner(WindowOptions(0.001, 0.002, "none"), moments, require_source=require_source)
    with Plan(captured) as plan:
        runner.idle_and_whole(plan)
    with Plan(captured, keep_going=True) as plan, pytest.raises(PowerSourceLost, match="the power sampler ended"):
        runner.ops(plan)
    assert [each.role for each in runner.windows][:3] == ["idle", "whole", "op"] and not runner.not_run


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_counter_and_the_integral_of_power_agree_on_a_gpu(tools, tmp_path):
    path, out, x = tmp_path / "one_op.opreplay", tmp_path / "report.json", torch.ones(64, device="cuda")
    with replayfmt.capture(path):
        x.sin()
    flags = ["--energy", "--energy-source=gpu", "--power-averaging=3"]
    assert tools("benchmark", path, *flags, f"--energy-out={out}").code == 0
    idle = json.loads(out.read_text())["idle"]
    assert idle["joules_from_power"] == pytest.approx(idle["joules"], rel=0.05)
