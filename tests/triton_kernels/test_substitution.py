"""Other kernels in place of captured ones of Triton."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.triton_kernels.conftest import run_python

REPLACEMENTS = Path(__file__).with_name("replacements.py")
NAME = "triton::softmax_kernel"
REFUSED = {
    "that_is_wrong": "SubstitutionRejected.*too far off",
    "that_writes_more": "SubstitutionRejected.*writes.* x",
    "of_fewer_parameters": r"UsageError.*it takes the parameters \['out', 'x', 'BLOCK'\], the kernel takes",
    "of_other_constexprs": r"UsageError.*its constexprs are \['columns'\], those of the kernel are \['BLOCK'\]",
    "in_python": "UsageError.*it is not decorated by triton.jit",
}


def request(function: str, form: str = "@triton") -> str:
    return f"{NAME}{form}={REPLACEMENTS}:{function}"


@pytest.fixture(scope="module")
def results(captures: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    folder, _ = captures
    requests = [request(name) for name in ("softmax_kernel", *REFUSED)]
    requests += [request("in_python", ""), f"all@triton={REPLACEMENTS}", f"aten::mul@triton={REPLACEMENTS}:in_python"]
    capture = str(folder / "softmax.opreplay")
    done = run_python("-m", "tests.triton_kernels.substituting", capture, *requests)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("function", "form"), [("softmax_kernel", "@triton"), ("in_python", "")])
def test_a_kernel_that_does_the_same_takes_its_place(results: dict[str, Any], function: str, form: str) -> None:
    result = results[request(function, form)]
    assert result == {"outcome": "ok", "calls": 1, "ok": True}


@pytest.mark.parametrize("function", REFUSED)
def test_what_does_not_fit_is_refused(results: dict[str, Any], function: str) -> None:
    assert re.search(REFUSED[function], results[request(function)].get("error", "")), results[request(function)]


def test_functions_of_triton_replace_kernels_of_triton_that_are_named(results: dict[str, Any]) -> None:
    assert "all does not take functions of Triton" in results[f"all@triton={REPLACEMENTS}"]["error"]
    assert "it is no Triton kernel" in results[f"aten::mul@triton={REPLACEMENTS}:in_python"]["error"]
