"""Captures of a real serving engine: vLLM's CPU build. `make serving` installs it and runs these tests; they are
skipped where it is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "vllm_decode.py"
STEPS = "--mark=vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model=step"
FAMILIES = ("llama", "qwen3", "mixtral")
TOOLS = Path(sys.executable).parent


def pytest_ignore_collect() -> bool | None:
    """Nothing here is collected without the engine."""
    return None if find_spec("vllm") is not None else True


def run(*command: object, code: int = 0, or_code: int | None = None) -> str:
    """Run a tool (`opreplay-run`) or a program (`python`); gives what it printed. Fails where its exit code is neither
    `code` nor `or_code`."""
    name, *arguments = map(str, command)
    done = subprocess.run(
        [str(TOOLS / name), *arguments],
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=900,
        capture_output=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert done.returncode in (code, or_code), f"{command} gave {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tokens(output: str) -> list[str]:
    """The lines that the example prints of what it generated."""
    return [line for line in output.splitlines() if line.startswith(("greedy ", "sampled "))]


@dataclass(frozen=True)
class Served:
    """One family: where its checkpoint and its capture are, and what was generated without and with a capture."""

    family: str
    capture: Path
    alone: list[str]
    captured: list[str]


@pytest.fixture(scope="session", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """The engine generates with a small model of a family, alone and under a capture."""
    place, family = tmp_path_factory.mktemp(request.param), str(request.param)
    program = (EXAMPLE, place / "model", f"--family={family}")
    alone = run("python", *program)
    capture = place / "decode.opreplay"
    captured = run("opreplay-capture", "-o", capture, STEPS, *program)
    return Served(family, capture, tokens(alone), tokens(captured))
