"""The examples do what they say: the fused kernel passes, each wrong one is caught for its own reason."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from .conftest import Tool

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the examples, and the capture of the model that they replace a kernel of."""
    path = tmp_path_factory.mktemp("examples")
    for file in ("rms_norm_op.py", "rms_norm_model.py", "fused_rms_norm.py", "wrong_rms_norm.py"):
        shutil.copy(ROOT / "examples" / file, path)
    tool = str(Path(sys.executable).parent / "opreplay-capture")
    done = subprocess.run(
        [tool, "-o", "norm.opreplay", "rms_norm_model.py"], cwd=path, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("result ") and "unsupported: none" in done.stderr
    yield path


@pytest.mark.slow
def test_the_fused_kernel_passes_and_is_verified(folder: Path, tool: Tool) -> None:
    code, out, err = tool(
        "run", f"--replay-kernel-substitution=demo::rms_norm={folder / 'fused_rms_norm.py'}", folder / "norm.opreplay"
    )
    assert (code, err) == (0, "")
    assert "verified: close" in out
    assert "substituted: 5 calls of 2 signatures, each checked against the original kernel" in out
    assert "demo::rms_norm.default(float32[2,64,256], float32[256]) by fused_rms_norm.py:rms_norm: 4 calls" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rms_norm", "elements are too far off"),
        ("in_place", "writes argument x, which the original does not write"),
        ("one_buffer", "returns the same memory from two calls, so that one overwrites the other"),
    ],
)
def test_each_wrong_kernel_is_caught(folder: Path, tool: Tool, name: str, said: str) -> None:
    flag = f"--replay-kernel-substitution=demo::rms_norm={folder / 'wrong_rms_norm.py'}:{name}"
    code, _out, err = tool("run", flag, folder / "norm.opreplay")
    assert code == 1 and all(said in finding for finding in err.splitlines()[1:])
    assert len(err.splitlines()) == 3
    code, out, err = tool("benchmark", "--compare", flag, folder / "norm.opreplay")
    assert code == 1 and "median" not in out and said in err


def test_the_kernels_give_what_they_say_they_give() -> None:
    """The wrong ones are wrong in the way their text says: two give the right numbers."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        fused, wrong = (_module(name) for name in ("fused_rms_norm", "wrong_rms_norm"))
    finally:
        sys.path.remove(str(ROOT / "examples"))
    x, weight = torch.randn(4, 64), torch.rand(64)
    right = fused.rms_norm(x, weight)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(right, expected)
    torch.testing.assert_close(wrong.one_buffer(x, weight), expected)
    torch.testing.assert_close(wrong.in_place(x.clone(), weight), expected)
    assert not torch.allclose(wrong.rms_norm(x, weight), expected)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_triton_kernel_passes_where_it_can_run(folder: Path) -> None:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    flag = f"--replay-kernel-substitution=demo::rms_norm={folder / 'fused_rms_norm.py'}:rms_norm_triton"
    done = subprocess.run(
        [sys.executable, "-c", "from opreplay_tools import run; run.main()", flag, str(folder / "norm.opreplay")],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "each checked against the original kernel" in done.stdout, done.stderr


def _module(name: str):  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
