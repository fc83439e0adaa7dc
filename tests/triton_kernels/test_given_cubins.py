"""Cubins of the user's in place of captured Triton kernels: by Triton ahead of time, and by nvcc."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from replayfmt.pytorch.triton.compiled import Cubin, CubinKernel
from tests.triton_kernels.conftest import run_python, skip_unless_triton_compiles

SOURCE = Path(__file__).with_name("given_cubins.cu")
WARPS_OF_THE_CAPTURE = 2
AS_CANDIDATES = ("twofold", "named", "no sidecar", "other entry", "other parameters", "another device", "no cubin")
REFUSED = {
    "no sidecar": r'does not say how much dynamic shared memory .* write \{"shared": BYTES\} to .*alone.json',
    "no shared": "empty.json is not a JSON object with 'shared'",
    "no object": "list.json is not a JSON object with 'shared'",
    "no JSON": "broken.json: cannot be read",
    "unknown key": "key.json has 'warps'; expected some of name, shared, num_warps",
    "no warps": "num_warps is 0; expected 1 or more",
    "other threads": "its twofold is to be launched with blocks of exactly 32 threads, and num_warps=4 makes 128",
    "too much shared": "it needs 1,073,741,824 bytes of shared memory, this device has 1,048,576",
    "other entry": r"it has no kernel threefold; its kernels are twofold \(FILE:NAME names one\)",
    "other parameters": r"takes 5 parameters, of 8, 8, 4, 8, 8 bytes; expected 2 and up to 2 .*: x \(8\), n \(4\)",
    "another device": "it is for sm_80, this device is sm_90",
    "no cubin": "it is not a cubin: not an ELF file for NVIDIA devices",
    "cut off": "it is not a cubin: what its headers say is not in it",
    "all": "all does not take binaries: name the kernel that one replaces",
    "an operator": "cannot stand for aten::add.Tensor: it is not a Triton kernel",
    "without leave": "ReplayRefused.* runs only with --allow-code",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    skip_unless_triton_compiles()
    folder = tmp_path_factory.mktemp("given")
    if shutil.which("nvcc"):
        subprocess.run(["nvcc", "-cubin", "-arch=sm_90", "-o", folder / "by_nvcc.cubin", SOURCE], check=True)
    program = ("-m", "tests.triton_kernels.given_programs", str(folder), *AS_CANDIDATES)
    done = run_python(*program, interpret="0", cache=folder / "cache")
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.slow
@pytest.mark.parametrize("how", ["twofold", "named", "by its ending"])
def test_a_cubin_by_triton_is_launched_in_place_of_the_kernel(found: dict[str, Any], how: str) -> None:
    result = found[how]
    assert result["outcome"] == "ok", result
    assert found["cubins"]["twofold"] in result["loaded"]
    assert ["twofold", [2, 1, 1], 1] in result["launches"]  # its own number of warps, the captured grid
    assert found[""]["loaded"] == [each for each in result["loaded"] if each != found["cubins"]["twofold"]]


@pytest.mark.slow
@pytest.mark.parametrize("why", REFUSED)
def test_a_cubin_that_does_not_fit_is_refused_before_a_launch(found: dict[str, Any], why: str) -> None:
    assert re.search(REFUSED[why], found[why]["error"]), found[why]
    assert found[why]["launches"] == []


def test_a_cubin_that_computes_something_else_is_found(found: dict[str, Any]) -> None:
    assert "SubstitutionRejected" in found["wrong"]["error"] and "expected 10, got 15" in found["wrong"]["error"]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_cubin_by_nvcc_is_launched_with_the_captured_warps(found: dict[str, Any]) -> None:
    assert found["twice"]["outcome"] == "ok", found["twice"]
    assert found["cubins"]["by_nvcc"] in found["twice"]["loaded"]
    assert ["twice", [2, 1, 1], WARPS_OF_THE_CAPTURE] in found["twice"]["launches"]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_cubin_by_nvcc_that_does_not_fit_is_refused(found: dict[str, Any]) -> None:
    expected = {
        "narrow": "with blocks of at most 32 threads, and num_warps=2 makes 64",
        "wide": "its wide takes 3 parameters, of 8, 8, 4 bytes",
        "several": "it has no kernel double_kernel; its kernels are narrow, twice, wide",
    }
    for name, why in expected.items():
        assert why in found[name]["error"] and found[name]["launches"] == []
    cubin = Cubin.read(bytes.fromhex(found["cubins"]["by_nvcc"]))
    assert cubin.arch == 90 and cubin.kernels["narrow"] == CubinKernel("narrow", (8, 4), None, 32)


@pytest.mark.parametrize("why", AS_CANDIDATES)
def test_a_cubin_is_a_candidate_for_a_task_as_it_is_for_a_replay(found: dict[str, Any], why: str) -> None:
    result = found[f"candidate {why}"]
    if why in REFUSED:
        assert re.search(REFUSED[why], result["error"]) and result["launches"] == []
    else:
        assert result == {"doubled": True, "launches": [["twofold", [2, 1, 1], 1]], "fault": None}


def test_a_cubin_that_computes_something_else_is_no_candidate(found: dict[str, Any]) -> None:
    reason, text = found["wrong candidate"]["fault"]
    assert reason == "wrong" and "argument x" in text and not found["wrong candidate"]["doubled"]


def test_devices_that_a_cubin_runs_on() -> None:
    for arch, only_there, fitting in ((80, False, {80, 86, 89}), (90, True, {90}), (89, False, {89})):
        cubin = Cubin(arch, only_there, {})
        assert {each for each in (75, 80, 86, 89, 90, 100) if not cubin.mismatch(each)} == fitting


@pytest.mark.slow
def test_any_part_of_a_cubin_is_a_cubin_or_an_error(found: dict[str, Any]) -> None:
    content = bytes.fromhex(found["cubins"]["twofold"])
    assert Cubin.read(content).kernels["twofold"].parameter_bytes == (8, 4, 8, 8)
    outcomes = set()
    for place in range(0, len(content), 61):
        for changed in (content[:place], content[:place] + b"\xff\xff\xff\xff" + content[place + 4 :]):
            try:
                outcomes.add(Cubin.read(changed).arch)
            except ValueError as error:
                outcomes.add(str(error).partition(":")[0])
    assert outcomes <= {"it is not a cubin", *range(256)} and {"it is not a cubin", 90} <= outcomes
