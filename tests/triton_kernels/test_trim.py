"""Parts of captures with Triton kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replayfmt.format.attachments import contents_of
from replayfmt.format.codes import KernelKind
from replayfmt.format.reader import CaptureReader
from tests.triton_kernels.conftest import run_python
from tests.triton_kernels.test_recording import launches

# Runs opreplay-trim, and then the replay of what it wrote, in one process.
TRIM = """
import json, sys
import replayfmt
from opreplay_tools import trim

try:
    trim.main()
except SystemExit as left:
    assert not left.code, left
with replayfmt.Plan(sys.argv[2], allow_code=True) as plan:
    result = plan.execute(verify="auto")
print(json.dumps([result.outcome, result.verification.mode, result.verification.digests, result.ops]))
"""


def trimmed(*arguments: str) -> list[Any]:
    done = run_python("-c", TRIM, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_one_launch_is_a_capture_of_its_own(captures: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = captures
    out = tmp_path / "part.opreplay"
    capture = str(folder / "layer_norm.opreplay")
    assert trimmed(capture, str(out), "--kernel=triton::norm_backward", "--allow-code") == ["ok", "bitwise", 3, 1]
    with CaptureReader(capture) as whole, CaptureReader(out) as part:
        (launch,) = launches(part)
        assert launch["kernel"] == "triton::norm_backward" and launch["grid"] == [6]
        (kept,) = [each for each in part.kernels if each is not None and each.kind is KernelKind.triton]
        captured = next(each for each in whole.kernels if each is not None and each.name == kept.name)
        assert contents_of(part, kept) == contents_of(whole, captured)


@pytest.mark.slow
def test_without_content_the_launches_stay(captures: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = captures
    out = tmp_path / "stripped.opreplay"
    outcome, mode, digests, ops = trimmed(str(folder / "layer_norm.opreplay"), str(out), "--payload=none")
    assert (outcome, mode, digests) == ("ok", "none", 0) and ops > 2
