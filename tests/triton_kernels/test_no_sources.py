"""--no-sources of a program with Triton kernels: neither source nor its path is in the capture."""

from __future__ import annotations

from pathlib import Path

import pytest

import replayfmt
from replayfmt.errors import ReplayRefused
from replayfmt.format.codes import KernelKind
from replayfmt.format.reader import open_capture
from tests.triton_kernels.conftest import run_python

PROGRAM = """
import torch, triton, triton.language as tl

@triton.jit
def double(x, n):
    at = tl.program_id(0)
    tl.store(x + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

x = torch.arange(4.0)
double[(4,)](x, 4)
print(x.sum().item())
"""


def test_a_capture_without_sources_has_none_and_says_so(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "doubling.py").write_text(PROGRAM)
    out = tmp_path / "out.opreplay"
    flags = ("--no-sources", "--payload=none", "-o", str(out))
    done = run_python("-m", "opreplay_tools.capture", *flags, str(tmp_path / "doubling.py"), interpret="1")
    assert done.returncode == 0, done.stderr
    with open_capture(out) as reader:
        (kernel,) = [each for each in reader.kernels[1:] if each.kind is KernelKind.triton]
        assert [reader.attachments[number].role for number in kernel.attachments] == ["metadata"]
        assert reader.session.policies["no-sources"] is True
        held = b"".join(bytes(reader.payload(number)) for number in range(1, len(reader.payloads) + 1))
    assert b"tl.load" not in held and str(tmp_path).encode() not in held
    with pytest.raises(ReplayRefused) as caught:
        replayfmt.Plan(out, allow_code=True)
    assert any("has no source of it" in finding for finding in caught.value.findings)
