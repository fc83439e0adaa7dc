"""examples/energy: from the capture of a BLOOM to a report with pictures, in a small size."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch

ROOT = Path(__file__).parents[2]


def _example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/energy/{name}.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["bloom.pt", "bloom.pt2"])
def test_an_exported_file_computes_what_the_model_does(name, tmp_path):
    example = _example("bloom_generate")
    model, ids = example.Logits(example.bloom(True, "cpu")).eval(), torch.tensor([[4, 5, 6]])
    example.export(model, ids, tmp_path / name)
    with torch.no_grad():
        assert torch.equal(example.load(tmp_path / name, "cpu")(ids), model(ids))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["bloom.pt", pytest.param("", marks=pytest.mark.sweep), pytest.param("bloom.pt2", marks=pytest.mark.sweep)]
)
def test_the_example_goes_from_a_model_to_a_report_with_pictures(model, tools, tmp_path, monkeypatch, capsys):
    script, example = ROOT / "examples/energy/bloom_energy.py", _example("bloom_energy")
    as_a_process, ran = example.run, []

    def run(tool, *arguments):
        """All but the capture in this process: importing PyTorch takes seconds."""
        ran.append(tool)
        if tool == "capture":
            as_a_process(tool, *arguments)
        else:
            assert tools(tool, *arguments).code == 0

    monkeypatch.setattr(example, "run", run)
    flags = ["--power-interval=0.001", "--power-averaging=0.01", "--kernel=aten::addmm"]
    file = [f"--model={tmp_path / model}"] if model else []
    monkeypatch.setattr(
        sys, "argv", [str(script), str(tmp_path), "--small", "--tokens=2", "--recorded", *file, "--", *flags]
    )
    example.main()
    assert ran == ["capture", "benchmark", "energy", "report"]
    report = json.loads((tmp_path / "gpu_energy_report.json").read_text())
    jsonschema.validate(report, json.loads((ROOT / "docs/energy.schema.json").read_text()))
    # The log says 230 W of the whole, whatever the machine does.
    assert report["whole_model"]["mean_watts"] == pytest.approx(example.WORK_W["whole"], rel=0.2)
    assert [each["name"] for each in report["scopes"]] == ["generate"]
    assert set(report["by_class"]) == {"matrix product or convolution"}
    assert "of a made-up power log" in capsys.readouterr().out
    assert not model or (tmp_path / model).stat().st_size > 100_000, "the model was exported to the file that is named"
    assert (tmp_path / "energy.svg").read_text().count("<svg") == 1
    assert (tmp_path / "energy.png").read_bytes().startswith(b"\x89PNG")
    assert "aten::addmm" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_example_measures_a_gpu(tmp_path):
    script = ROOT / "examples/energy/bloom_energy.py"
    command = [sys.executable, str(script), str(tmp_path), "--small", "--tokens=2", "--", "--kernel=aten::addmm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "gpu_energy_report.json").read_text())
    assert report["whole_model"]["mean_watts"] > 10
    assert report["isolated_kernels"]["measured"] > 0 and 0 < report["comparison"]["ratio"] < 10
