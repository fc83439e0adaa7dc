"""A task in the forms of flashinfer-bench and KernelBench computes what the captured program computed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from replayfmt.benchmark.candidates.task_cases import read_safetensors
from replayfmt.errors import ReplayRefused

from .conftest import Exported
from .test_exporting import described


def definitions(task: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in sorted((task / "definitions").rglob("*.json"))]
    return {each["name"]: each for each in found}


def workloads(task: Path) -> list[dict[str, Any]]:
    lines = [line for path in (task / "workloads").rglob("*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def tensors(task: Path, definition: dict[str, Any], workload: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a workload of flashinfer-bench, as its format says."""
    sizes = {name: axis.get("value") for name, axis in definition["axes"].items()} | workload["axes"]
    found: dict[str, Any] = {}
    for name, given in workload["inputs"].items():
        spec = definition["inputs"][name]
        if given["type"] == "scalar":
            found[name] = given["value"]
        else:
            data = read_safetensors(task / given["path"])[given["tensor_key"]]
            found[name] = data.view(getattr(torch, spec["dtype"])).reshape([sizes[axis] for axis in spec["shape"]])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["aten::addmm", "aten::_softmax", "aten::native_layer_norm"])
def test_a_flashinfer_definition_runs_on_its_workloads_as_captured(kernel: str, exported: Exported) -> None:
    task = exported(kernel=kernel, form="flashinfer-bench")
    found = definitions(task)
    captured = {each["name"]: each for each in described(task)["workloads"]}
    assert len(workloads(task)) == sum(len(each["cases"]) for each in captured.values())
    for each in workloads(task):
        definition = found[each["definition"]]
        assert not set(definition["inputs"]) & set(definition["outputs"])
        assert {axis for axis, kind in definition["axes"].items() if kind["type"] == "var"} == set(
            each["workload"]["axes"]
        )
        space: dict[str, Any] = {}
        exec(definition["reference"], space)
        results = space["run"](**tensors(task, definition, each["workload"]))
        name, case = each["workload"]["uuid"].rsplit("-", 2)[1:]
        expected = read_safetensors(task / captured[name]["cases"][int(case)]["file"])
        for place, result in enumerate(results if isinstance(results, tuple) else (results,)):
            kept = expected[f"result.{place}"].view(result.dtype).reshape(result.shape)
            assert torch.allclose(result, kept, atol=1e-6)


def test_workloads_of_several_sizes_share_a_definition_with_a_variable_axis(exported: Exported) -> None:
    task = exported(kernel="aten::_softmax", form="flashinfer-bench")
    (definition,) = definitions(task).values()
    kinds = sorted(axis["type"] for axis in definition["axes"].values())
    assert kinds == ["const", "var"]
    (solution,) = (json.loads(path.read_text()) for path in (task / "solutions").rglob("*.json"))
    assert solution["definition"] == definition["name"] and solution["spec"]["entry_point"] == "main.py::run"


def test_the_package_of_flashinfer_bench_reads_what_is_written(exported: Exported) -> None:
    data = pytest.importorskip("flashinfer_bench.data")
    task = exported(kernel="aten::addmm", form="flashinfer-bench")
    found = data.TraceSet.from_path(str(task))
    assert set(found.definitions) == set(definitions(task)) == set(found.workloads) == set(found.solutions)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["aten::addmm", "aten::native_layer_norm"])
def test_a_kernelbench_file_gives_the_captured_outputs_from_the_captured_inputs(
    kernel: str, exported: Exported
) -> None:
    task = exported(kernel=kernel, form="kernelbench")
    program = (
        "import sys\nfor name in sys.argv[2:]:\n    there = {}\n"
        "    exec(open(f'{sys.argv[1]}/{name}.py').read(), there)  # as KernelBench's evaluation does\n"
        "    result = there['Model'](*there['get_init_inputs']())(*there['get_inputs']())\n"
        "    result = result[0] if isinstance(result, tuple) else result\n"
        "    print(repr(result.double().sum().item()))\n"
    )
    names = [each["name"] for each in described(task)["workloads"]]
    done = subprocess.run(
        [sys.executable, "-c", program, str(task / "kernelbench"), *names], capture_output=True, text=True, check=True
    )
    for name, line in zip(names, done.stdout.split(), strict=True):
        expected = read_safetensors(task / f"{name}.0.safetensors")["result.0"].view(torch.float32)
        assert float(line) == pytest.approx(float(expected.double().sum()), abs=1e-4)


@pytest.mark.slow
def test_what_a_form_cannot_say_is_refused(exported: Exported) -> None:
    for form in ("flashinfer-bench", "kernelbench"):
        with pytest.raises(ReplayRefused, match="an argument is written"):
            exported(kernel="aten::mul_", form=form)
