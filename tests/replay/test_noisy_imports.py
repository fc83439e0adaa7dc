"""Modules, initializers and substitutions that print while they are loaded, in their calls and at exit: stdout has the
tool's output alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from replayfmt.dump.selection import OpSelection
from replayfmt.format.reader import open_capture
from replayfmt.trim.trimming import strip_capture

MODULE = """
import atexit, ctypes, torch
print("noisy: using the plain backend")
ctypes.CDLL(None).puts(b"noisy: from C")
ctypes.CDLL(None).fflush(None)
library = torch.library.Library("noisy_imports", "DEF")
library.define("double(Tensor x) -> Tensor")
def double(x):
    print("noisy: called")
    return x * 2
library.impl("double", double, "CompositeExplicitAutograd")
atexit.register(print, "noisy: at exit")
"""
PROGRAM = "import torch, noisy_imports\ntorch.ops.noisy_imports.double(torch.ones(3)).sum()\n"
INITIALIZER = """
import torch
from replayfmt.initializers import register
print("noisy: initializers")
@register("noisy_imports::double", argument="x")
def content(request):
    return torch.ones(request.tensor.sizes)
"""
SUBSTITUTION = (
    "import torch\nprint('noisy: substitution')\ndef double(x):\n    print('noisy: called')\n    return x + x\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("noisy")
    for name, text in (
        ("noisy_imports", MODULE),
        ("program", PROGRAM),
        ("initializer", INITIALIZER),
        ("other", SUBSTITUTION),
    ):
        (folder / f"{name}.py").write_text(text)
    assert tool(folder, "capture", "-o", "full.opreplay", "program.py").returncode == 0
    with open_capture(folder / "full.opreplay") as reader:
        strip_capture(reader, str(folder / "none.opreplay"), OpSelection())
    return folder


def tool(
    folder: Path, name: str, *arguments: str, commands: Path = Path(sys.executable).parent
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [commands / f"opreplay-{name}", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        timeout=600,
        check=False,
    )


ALLOW = "--allow-import=noisy_imports"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("run", ALLOW, "--format=jsonl", "--isolate", "full.opreplay"),
        ("run", ALLOW, "--format=jsonl", "--replay-initializer=initializer.py",
         "--replay-kernel-substitution=noisy_imports::double=other.py:double", "none.opreplay"),
        ("benchmark", ALLOW, "--benchmark-format=json", "--benchmark-min-time=1x", "full.opreplay"),
        ("benchmark", ALLOW, "--per-op", "--benchmark-format=jsonl", "--benchmark-min-time=1x", "full.opreplay"),
        ("compare", ALLOW, "--replay", "--format=jsonl", "full.opreplay", "full.opreplay"),
    ],
)  # fmt: skip
def test_stdout_is_json_alone(folder: Path, arguments: tuple[str, ...], commands: Path) -> None:
    done = tool(folder, *arguments, commands=commands)
    assert done.returncode == 0, done.stderr
    for words in ("using the plain backend", "from C", "called", "at exit"):
        assert f"noisy: {words}" in done.stderr
    if "--benchmark-format=json" in arguments:
        json.loads(done.stdout)
    else:
        assert all(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.slow
def test_trim_checks_its_result_although_an_import_prints(folder: Path) -> None:
    done = tool(folder, "trim", ALLOW, "--kernel=noisy_imports::*", "full.opreplay", "part.opreplay")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and (folder / "part.opreplay").exists()
