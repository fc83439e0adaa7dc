"""Tasks of real models, of a Triton program and of a compiled region run alone, and the tool takes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import Tools

from replayfmt.benchmark.candidates.judged import run_judge
from replayfmt.benchmark.candidates.task_cases import Options

from .conftest import HERE, Exported
from .test_exporting import check, described


def captured(program: Path, out: Path, **environment: str) -> Path:
    command = [sys.executable, "-m", "opreplay_tools.capture", "-o", str(out), str(program)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **environment})
    return out


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return captured(HERE / "models.py", tmp_path_factory.mktemp("models") / "models.opreplay")


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param("--scope=gpt2", marks=pytest.mark.sweep),
        "--scope=decode",
        pytest.param("--scope=experts", marks=pytest.mark.sweep),
        "--kernel=aten::_scaled_dot_product_flash_attention_for_cpu",
        pytest.param("--kernel=aten::cat", marks=pytest.mark.sweep),
    ],
)
def test_a_task_of_a_model_runs_alone_and_its_reference_passes(
    chosen: str, models: Path, tmp_path: Path, tools: Tools
) -> None:
    task = tmp_path / "task"
    done = tools("export", "--format=kernel-task", chosen, models, task)
    assert done.code == 0, done.err
    assert "reference: as expected" in check(task)
    assert all(each["calls"] and each["cases"] for each in described(task)["workloads"])
    verdicts = both_verdicts(task, tmp_path / "c", tools)
    assert verdicts[0] == verdicts[1] == ["accepted", "wrong"]


def both_verdicts(task: Path, folder: Path, tools: Tools, **more: str) -> list[list[str]]:
    """What check.py alone and the tool say of the reference, of one that is off by one, and of sources by name."""
    facts, text = described(task), (task / "reference.py").read_text()
    function = facts["function"]
    if len({each["program"] for each in facts["workloads"]}) > 1:  # passes that do not do the same
        sizes = [[each["sizes"] for each in workload["arguments"].values()] for workload in facts["workloads"]]
        table = {str(each): workload["program"] for each, workload in zip(sizes, facts["workloads"], strict=True)}
        text += f"\ndef {function}(*args):\n    place = {table}[str([list(each.shape) for each in args])]\n"
        text += "    return PROGRAMS[place](*args)\n"
    off = (
        f"\n_right = {function}\ndef {function}(*args, **named):\n    found = _right(*args, **named)\n"
        "    first = found[0] if isinstance(found, tuple) else found if found is not None else args[0]\n"
        "    first += 1\n    return found\n"
    )
    folder.mkdir()
    sources = {"right": text, "wrong": text + off, **more}
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    out = [folder / "alone.json", folder / "tool.json"]
    files, allowed = [str(folder / f"{name}.py") for name in sources], "calls the original"
    command = [sys.executable, "-I", str(task / "check.py"), "--min-time=0", f"--allow={allowed}", f"--json={out[0]}"]
    subprocess.run([*command, *files], capture_output=True)
    flags = (f"--allow-reason={allowed}", f"--candidates={folder}", f"--benchmark-out={out[1]}")
    tools("benchmark", "--compare", *flags, "--benchmark-min-time=0.001s", task)
    found = [
        {each["candidate"]: each["verdict"] for each in json.loads(path.read_text())["candidates"]} for path in out
    ]
    return [[each[file] for file in files] for each in found]


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("triton") / "t.opreplay"
    return captured(HERE / "triton_program.py", out, TRITON_INTERPRET="1")


@pytest.mark.slow
def test_a_task_has_the_configuration_that_the_program_has_chosen(triton: Path, tmp_path: Path) -> None:
    task, kernel = tmp_path / "task", "--kernel=triton::negate_kernel"
    command = [sys.executable, "-m", "opreplay_tools.export", "--format=kernel-task", "--allow-code", kernel]
    subprocess.run([*command, str(triton), str(task)], check=True, capture_output=True)
    (configuration,) = described(task)["configurations"]
    (workload,) = described(task)["workloads"]
    assert "BLOCK: 16" in configuration and workload["arguments"]["BLOCK"] == 16
    assert workload["arguments"]["grid"] == [2] and "reference: as expected" in check(task)


@pytest.mark.slow
def test_a_triton_kernel_is_exported_with_its_source_as_a_first_candidate(
    triton: Path, tmp_path: Path, tools: Tools
) -> None:
    path = triton
    task, kernel = tmp_path / "task", "--kernel=triton::double_kernel*"
    command = [sys.executable, "-m", "opreplay_tools.export", "--format=kernel-task", kernel, str(path), str(task)]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1 and "--allow-code" in refused.stderr
    subprocess.run([*command, "--allow-code"], check=True, capture_output=True)
    assert "def double_kernel(" in (task / "reference.py").read_text()
    assert "reference: as expected in 3 cases" in check(task)
    mine = tmp_path / "mine.py"
    mine.write_text(
        "def right(out, x, *numbers, **options):\n    out.copy_(x + x)\n"
        "def wrong(out, x, *numbers, **options):\n    out.copy_(x * 3)\n"
    )
    (tmp_path / "mine.cubin").write_bytes(b"\x7fELF\x02\x01\x01\x33")
    (tmp_path / "mine.json").write_text('{"shared": 0}')
    files = [str(task / "reference.py"), f"{mine}:right", f"{mine}:wrong", str(tmp_path / "mine.cubin")]
    found = run_judge(str(task), files, Options(min_time_s=0))["candidates"]
    assert [each["verdict"] for each in found] == ["accepted", "accepted", "wrong", "does not load"], found
    assert "the capture has no binary of triton::double_kernel" in found[-1]["text"]
    verdicts = both_verdicts(task, tmp_path / "c", tools)
    assert verdicts[0] == verdicts[1] == ["accepted", "wrong"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "program.py").write_text(
        "import torch, replayfmt\ntorch.manual_seed(0)\n"
        "f = torch.compile(lambda x, w: (torch.nn.functional.gelu(x @ w), (x * 2).sum(-1)))\n"
        "w = torch.randn(16, 8)\n"
        "for step in range(3):\n    x = torch.randn(8, 16)\n    with replayfmt.scope('region'):\n"
        "        y, s = f(x, w)\n    print(float(y.sum() + s.sum()))\n"
    )
    return captured(folder / "program.py", folder / "c.opreplay")


@pytest.mark.slow
def test_a_kernel_that_inductor_generated_is_exported_with_its_source(
    compiled: Path, tmp_path: Path, tools: Tools
) -> None:
    task, flags = tmp_path / "task", ("--format=kernel-task", "--kernel=inductor_cpp::*gelu*")
    refused = tools("export", *flags, compiled, task)
    assert refused.code == 1 and "--allow-code" in refused.err
    done = tools("export", *flags, "--allow-code", compiled, task)
    assert done.code == 0, done.err
    assert described(task)["kind"] == "inductor_cpp" and "cpp_pybinding" in (task / "reference.py").read_text()
    assert "reference: as expected" in check(task)


@pytest.mark.slow
def test_a_compiled_region_of_generated_cpp_is_one_function_that_a_fused_kernel_replaces(
    compiled: Path, tmp_path: Path, tools: Tools
) -> None:
    task = tmp_path / "task"
    done = tools("export", "--format=kernel-task", "--scope=region", "--allow-code", compiled, task)
    assert done.code == 0, done.err
    assert any(name.startswith("inductor_cpp::") for name in described(task)["operators"])
    fused = f"import torch\ndef {described(task)['function']}(x, w):\n"
    fused += "    return torch.nn.functional.gelu(torch.mm(x, w)), x.sum(-1) * 2\n"
    other = fused.replace("(x, w))", "(x, w), approximate='tanh')")
    verdicts = both_verdicts(task, tmp_path / "c", tools, fused=fused, other=other)
    assert verdicts[0] == verdicts[1] == ["accepted", "wrong", "accepted", "wrong"]


@pytest.mark.slow
def test_a_script_of_a_compiled_region_builds_its_cpp_and_gives_the_captured_results(
    compiled: Path, tmp_path: Path, tools: Tools
) -> None:
    script, data = tmp_path / "s.py", tmp_path / "s.safetensors"
    flags = ("--scope=region", f"--script={script}", f"--script-data={data}")
    assert "--allow-code" in tools("trim", *flags, compiled).err
    done = tools("trim", "--allow-code", *flags, compiled)
    assert done.code == 0, done.err
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
def test_a_source_in_cpp_is_built_and_judged(exported: Exported, tmp_path: Path) -> None:
    (tmp_path / "mine.cpp").write_text(
        "#include <torch/csrc/utils/pybind.h>\n"  # a third of torch/extension.h
        "at::Tensor softmax(at::Tensor self, int64_t dim, bool half) {\n"
        "  auto e = self.sub(self.amax(dim, true)).exp();\n  return e.div(e.sum(dim, true));\n}\n"
        'PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("_softmax", &softmax); }\n'
    )
    found = run_judge(str(exported(kernel="aten::_softmax")), [str(tmp_path / "mine.cpp")], Options(min_time_s=0))
    assert [each["verdict"] for each in found["candidates"]] == ["accepted"], found


@pytest.mark.slow
def test_a_compiled_candidate_is_honest_although_its_compiler_has_threads(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "1")  # as where the caller has compiled, too
    (tmp_path / "mine.py").write_text(
        "import torch\n@torch.compile\ndef _softmax(self, dim, half_to_float):\n"
        "    e = torch.exp(self - self.amax(dim, True))\n    return e / e.sum(dim, True)\n"
    )
    found = run_judge(str(exported(kernel="aten::_softmax")), [str(tmp_path / "mine.py")], Options(min_time_s=0))
    assert [each["verdict"] for each in found["candidates"]] == ["accepted"], found
