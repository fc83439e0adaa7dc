"""Other kernels in place of captured ones of Triton."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from in_process import Tools

from tests.triton_kernels.conftest import run_python
from tests.triton_kernels.crafted import SOURCE, craft

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
    requests.append(f"{NAME}@cubin={REPLACEMENTS}")
    capture = str(folder / "softmax.opreplay")
    done = run_python("-m", "tests.triton_kernels.substituting", capture, *requests)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("function", "form"), [("softmax_kernel", "@triton"), ("in_python", "")])
def test_a_kernel_that_does_the_same_takes_its_place(results: dict[str, Any], function: str, form: str) -> None:
    result = results[request(function, form)]
    assert result == {"outcome": "ok", "calls": 1, "ok": True}


@pytest.mark.slow
@pytest.mark.parametrize("function", REFUSED)
def test_what_does_not_fit_is_refused(results: dict[str, Any], function: str) -> None:
    assert re.search(REFUSED[function], results[request(function)].get("error", "")), results[request(function)]


def test_functions_of_triton_replace_kernels_of_triton_that_are_named(results: dict[str, Any]) -> None:
    assert "all does not take functions of Triton" in results[f"all@triton={REPLACEMENTS}"]["error"]
    assert "it is not a Triton kernel" in results[f"aten::mul@triton={REPLACEMENTS}:in_python"]["error"]


def test_the_interpreter_launches_no_binaries(results: dict[str, Any]) -> None:
    assert "Triton's interpreter runs the kernel here" in results[f"{NAME}@cubin={REPLACEMENTS}"]["error"]


@pytest.mark.slow
def test_skeletons_pass_unchanged_with_the_originals_bits(
    captures: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, _ = captures
    names = ["softmax", "matmul", "layer_norm", "flash_attention", "atomics", "in_place", "autotuned", "calling"]
    names += ["given_a_function", "constexprs_of_each_kind", "tuples_and_none", "descriptors", "names_of_a_script"]
    names += ["given_by_name_alone", "in_a_function_that_hides_a_global", "names_that_launches_have", "random_numbers"]
    paths = [str(folder / f"{name}.opreplay") for name in names]
    done = run_python("-m", "tests.triton_kernels.skeletons", str(tmp_path), *paths, interpret="1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == dict.fromkeys(names, False)


def test_a_skeleton_says_what_is_written_and_where_code_goes(
    captures: tuple[Path, dict[str, Any]], tools: Tools
) -> None:
    folder, _ = captures
    ran = tools("dump", "--kernel-skeleton=triton::softmax_kernel", "--allow-code", folder / "softmax.opreplay")
    assert "\nIt must write out, and no other argument." in str(ast.get_docstring(ast.parse(ran.out)))
    assert "# The captured source: your code goes into softmax_kernel, which keeps its parameters." in ran.out
    assert f"--replay-kernel-substitution={NAME}.v" in ran.out


def test_code_of_a_capture_is_code_of_a_skeleton_only_if_that_is_allowed(tmp_path: Path, tools: Tools) -> None:
    capture = craft(tmp_path / "crafted.opreplay")
    ran = tools("dump", "--kernel-skeleton=triton::double", capture)
    assert (ran.code, ran.out) == (2, "") and "which runs with the file; --allow-code allows that" in ran.err
    assert SOURCE.rstrip() in tools("dump", "--kernel-skeleton=triton::double", "--allow-code", capture).out
