"""`opreplay-compare` as a command: exit codes, rows, and one clear error for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch
from in_process import Tools

import replayfmt

from .models import captured

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs/comparing-captures.schema.json").read_text())


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """A capture, the same work again, and other work of the same kind."""
    paths = []
    for number, scale in enumerate((2.0, 2.0, 2.5)):
        path = tmp_path / f"{number}.opreplay"
        with replayfmt.capture(path, digests="ops"):
            torch.arange(6.0).mul(scale).exp().sum()
        paths.append(str(path))
    return paths


@pytest.mark.slow
def test_the_exit_code_says_whether_results_are_equal(tools: Tools, pair: list[str]) -> None:
    equal, other = tools("compare", *pair[:2]), tools("compare", pair[0], pair[2])
    assert (equal.code, other.code) == (0, 1)
    assert equal.out.splitlines()[-1].startswith("equal ")
    assert "aten::mul.Tensor" in next(line for line in other.out.splitlines() if line.startswith("first"))
    assert tools("compare", "--tolerance=100,100", pair[0], pair[2]).code == 0
    assert tools("compare", "--replay", *pair[:2]).code == 0


@pytest.mark.slow
def test_rows_are_as_documented(tools: Tools, pair: list[str], tmp_path: Path) -> None:
    kinds = set()
    pairs = [(pair[0], pair[2])]
    for model, fault in (("moe", "bf16"), ("decoder", "mask"), ("resnet", "reduction")):
        paths = [captured(tmp_path / f"{model}{name}.opreplay", model, name) for name in ("", fault)]
        pairs.append((str(paths[0]), str(paths[1])))
    for a, b in pairs:
        rows = [json.loads(line) for line in tools("compare", "--format=jsonl", a, b).out.splitlines()]
        for row in rows:
            jsonschema.validate(row, SCHEMA)
            kinds.add(row["kind"])
        assert rows[0]["outcome"] == "different" and rows[0]["a"] == a
    assert kinds == {"comparison", "structure", "unaligned", "divergence"}


@pytest.mark.slow
def test_wrong_usage_and_bad_files_are_one_line(tools: Tools, pair: list[str], tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.opreplay"
    broken = tmp_path / "broken.opreplay"
    broken.write_bytes(Path(pair[0]).read_bytes()[:200])
    for arguments, code, text in (
        ((pair[0],), 2, "Missing argument"),
        (("--tolerance=much", *pair[:2]), 2, "not a tolerance"),
        (("--device=cpu", *pair[:2]), 2, "--device is for replays"),
        ((pair[0], nothing), 3, "nothing.opreplay"),
        ((broken, pair[0]), 3, "broken.opreplay"),
    ):
        ran = tools("compare", *arguments)
        assert (ran.code, ran.out) == (code, "")
        assert text in ran.err and len(ran.err.splitlines()) == 1


def test_an_incomplete_capture_is_compared_as_far_as_it_goes_and_that_is_said(
    tools: Tools, pair: list[str], tmp_path: Path
) -> None:
    cut = tmp_path / "cut.opreplay"
    content = Path(pair[0]).read_bytes()
    cut.write_bytes(content[:-64])
    ran = tools("compare", cut, pair[1])
    assert ran.code in (0, 1) and "is incomplete" in ran.out


@pytest.mark.slow
def test_files_are_compared_without_torch(pair: list[str]) -> None:
    program = (
        "import sys; sys.modules['torch'] = None; import replayfmt; print(replayfmt.compare(*sys.argv[1:]).outcome)"
    )
    ran = subprocess.run([sys.executable, "-c", program, pair[0], pair[2]], capture_output=True, text=True, timeout=600)
    assert (ran.returncode, ran.stdout.strip()) == (0, "different"), ran.stderr
