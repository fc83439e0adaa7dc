"""--no-sources of a program with Triton kernels: neither source nor its path is in the capture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import replayfmt
from replayfmt.errors import ReplayRefused
from replayfmt.format.codes import KernelKind
from replayfmt.format.reader import open_capture
from replayfmt.pytorch.triton.kernels import source_without_bodies
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


@pytest.mark.slow
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


def declared(name: str = "double", **changed: Any) -> dict[str, Any]:
    function = {"constexpr": False, "options": {}, "parameters": {"x": "*fp32", "B": "constexpr"}, "by_name": ["B"]}
    return {"functions": {name: {**function, **changed}}}


def test_a_declaration_is_a_module_without_bodies() -> None:
    text = source_without_bodies(declared(options={"do_not_specialize": ["x", 1], "noinline": True}))
    assert (
        "@triton.jit(do_not_specialize=['x', 1], noinline=True)\ndef double(x: '*fp32', *, B: tl.constexpr):\n" in text
    )
    assert "@triton.constexpr_function\ndef double():" in source_without_bodies(
        declared(constexpr=True, parameters={}, by_name=[])
    )


@pytest.mark.guarantee("generated-code")
@pytest.mark.parametrize(
    "declaration",
    [
        declared("f(): pass\nimport os\ndef g"),
        declared("triton"),
        declared("def"),
        declared(parameters={"x=print()": ""}),
        declared(parameters={"x": "'+print()+'"}),
        declared(parameters={"x": 7}),
        declared(parameters=["x"]),
        declared(by_name="B"),
        declared(options={"repr": "print"}),
        declared(options={"do_not_specialize": ["print()"]}),
        declared(options={"do_not_specialize": {"print()": 1}}),
        declared(more=1),
        {"functions": {}},
        {"functions": ["double"]},
        ["functions"],
        None,
    ],
)
def test_a_declaration_becomes_no_code_but_names_and_kinds(declaration: Any) -> None:
    with pytest.raises(ValueError, match=r"declaration"):
        source_without_bodies(declaration)
