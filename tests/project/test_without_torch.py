"""Where PyTorch is not installed: captures can be looked at, checked and stripped; the rest is refused in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import replayfmt

ROOT = Path(__file__).parents[2]

# Read by Python as it starts: nothing finds torch from then on.
HIDES_TORCH = """
import sys

class Hides:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name="torch")

sys.meta_path.insert(0, Hides())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a capture, and a sitecustomize that hides torch."""
    folder = tmp_path_factory.mktemp("without")
    with replayfmt.capture(folder / "one.opreplay"):
        torch.ones(2).add(1)
    (folder / "sitecustomize.py").write_text(HIDES_TORCH)
    return folder


def tool(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "replayfmt", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("dump", "one.opreplay"),
        ("dump", "--format=jsonl", "one.opreplay"),
        ("dump", "--jq=length", "-s", "one.opreplay"),
        ("dump", "--signatures", "one.opreplay"),
        ("dump", "--kernel-skeleton=1", "one.opreplay"),
        ("check", "one.opreplay"),
        ("trim", "--payload=none", "--force", "one.opreplay", "stripped.opreplay"),
        ("run", "--help"),
    ],
    ids=" ".join,
)
def test_what_needs_no_torch_works_without_it(folder: Path, arguments: tuple[str, ...]) -> None:
    done = tool(folder, *arguments)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "one.opreplay"),
        ("benchmark", "one.opreplay"),
        ("trim", "--ops=0:2", "one.opreplay", "part.opreplay"),
        ("trim", "--vectors=vectors", "one.opreplay"),
    ],
    ids=" ".join,
)
def test_what_needs_torch_says_so_in_one_line(folder: Path, arguments: tuple[str, ...]) -> None:
    done = tool(folder, *arguments)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        f"FAILED_PRECONDITION: opreplay-{arguments[0]} needs PyTorch for this, which is not installed: "
        "pip install torch; opreplay-dump and opreplay-check work without it\n"
    )


@pytest.mark.slow
def test_a_missing_module_of_somebody_else_is_not_taken_for_torch(folder: Path) -> None:
    (folder / "mine.py").write_text("import nothing_of_this_name\n")
    done = subprocess.run(
        [sys.executable, "-m", "replayfmt", "run", "--replay-initializer=mine.py", "one.opreplay"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode != 0 and "nothing_of_this_name" in done.stderr and "needs PyTorch" not in done.stderr
