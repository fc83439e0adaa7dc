"""Launches of kernels that Triton compiled, ahead of time for devices that are not there: a driver of the tests' own
notes what Triton launches and does it on the CPU. Everything else is Triton's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from in_process import Tools

from tests.triton_kernels.conftest import run_python, skip_unless_triton_compiles

STAGES = {"source", "metadata", "ttir", "ttgir", "llir", "ptx", "cubin"}
DOUBLED, AS_IT_WAS = [2.0] * 8, [1.0] * 8


def skip_where_no_launch_is_shortened() -> None:
    if not pytest.importorskip("triton").__version__.startswith("3.9."):
        pytest.skip("launches like earlier ones are shortened for Triton 3.9 alone")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    skip_unless_triton_compiles()
    folder = tmp_path_factory.mktemp("compiled")
    done = run_python(
        "-m", "tests.triton_kernels.compiled_programs", str(folder), interpret="0", cache=folder / "cache"
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = {**json.loads(done.stdout), "folder": folder}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_keep_what_was_compiled_for_the_target(found: dict[str, Any], arch: int) -> None:
    kernels = found[f"sm{arch}"]["kernels"]
    assert [each["name"].partition(".")[0] for each in kernels] == ["triton::double_kernel"] * 3 + [
        "triton::fill_kernel"
    ]
    assert len({each["name"] for each in kernels}) == 4
    for each in kernels:
        said = each["metadata"]
        assert set(each["roles"]) == STAGES and each["elf"]
        assert said["target"] == {"backend": "cuda", "arch": arch, "warp_size": 32}
        assert set(said["sha256"]) == STAGES - {"source", "metadata"}
        assert said["writes"] == "ir"
        assert "(Tensor(a0!) " in each["schema"] and "int num_warps, int num_ctas, int num_stages" in each["schema"]
    specializations = [each["metadata"]["specialization"] for each in kernels[:2]]
    assert specializations[0]["signature"] == {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    aligned, shifted = (dict((tuple(path), kind) for path, kind in each["attributes"]) for each in specializations)
    assert aligned[0,] == [["tt.divisibility", 16]] and (0,) not in shifted
    assert "BLOCK: 32, num_warps: 8" in kernels[3]["metadata"]["configuration"]


@pytest.mark.slow
def test_every_launch_was_made_once(found: dict[str, Any]) -> None:
    """What was recorded made no launch of its own; the autotuner's were not changed."""
    plain = [["double_kernel", [2, 1, 1], 2]] * 2 + [["double_kernel", [1, 1, 1], 4]] * 2
    trials = [["fill_kernel", [1, 1, 1], warps] for warps in (2, 4, 8)]
    assert found["sm80"]["launches"] == [*plain, *trials, ["fill_kernel", [1, 1, 1], 8]]
    assert found["sm90"]["launches"] == [*plain, ["fill_kernel", [1, 1, 1], 8]]
    assert found["sm80"]["result"] == found["sm90"]["result"]


def test_it_computes_as_it_was_compiled_to_whatever_triton_would_choose_here(found: dict[str, Any]) -> None:
    """Triton's defaults differ between its versions, and by the environment."""
    cases = found["cases"]
    assert (cases["another Triton"]["fused"], cases["another Triton and other arithmetic"]["fused"]) == (
        [True],
        [False],
    )
    chosen_otherwise = cases["other arithmetic by default"]
    assert (chosen_otherwise["how"], chosen_otherwise["stored"]) == ("launched from the stored binary", [True])


@pytest.mark.parametrize("name", ["same device", "one of several devices"])
def test_the_stored_binary_is_launched_where_device_and_version_match(found: dict[str, Any], name: str) -> None:
    case = found["cases"][name]
    assert (case["how"], case["stored"], case["x"]) == ("launched from the stored binary", [True], DOUBLED)
    assert case["launches"] == [["double_kernel", [2, 1, 1], 2]]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("another device", ": it was compiled for cuda:90, this is cuda:80"),
        ("another Triton", ": it was compiled by Triton 3.0.0, this is "),
        ("without a binary", ""),
    ],
)
def test_elsewhere_the_stored_source_is_compiled(found: dict[str, Any], name: str, why: str) -> None:
    case = found["cases"][name]
    assert case["how"].startswith("compiled by Triton from the stored source" + why)
    assert (case["stored"], case["x"]) == ([False], DOUBLED)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("another binary", "its cubin does not match the hash in its metadata"),
        ("another dtype", "takes a tensor of torch.float32 as x, not torch.float64"),
        ("another alignment", "its binary was not compiled for: attributes"),
        ("another constant", "its binary was not compiled for: constants"),
        ("other options", "num_warps: compiled for 2, given 4"),
        ("too many programs", "a grid of 1,099,511,627,776 programs"),
        ("too many programs beside each other", "a grid of 65,536 programs"),
    ],
)
def test_what_a_binary_is_not_for_is_refused_before_the_launch(found: dict[str, Any], name: str, why: str) -> None:
    case = found["cases"][name]
    assert why in case.get("refused", "") + case.get("failed", "")
    assert (case["launches"], case["x"]) == ([], AS_IT_WAS)


def test_what_was_launched_before_is_launched_without_looking_for_it(found: dict[str, Any]) -> None:
    skip_where_no_launch_is_shortened()
    launches = found["often"]["launches"]
    assert {name: each["looked"] for name, each in launches.items() if not each["failed"]} == {
        "first": 1,
        "second": 1,
        "again": 0,
        "another length": 0,
        "another grid": 1,
        "another grid again": 0,
        "as before": 0,
        "with hooks on launches": 0,
        "with them off again": 0,
        "with a hook before launches": 1,
        "with another function in Triton's place": 1,
        "with nothing kept": 1,
        "with something kept again": 0,
    }
    for name, each in launches.items():
        if not each["failed"]:
            assert each["grids"] == [[3 if "grid" in name else 2, 1, 1]]
            assert each["x"] == ([2.0] * 3 + [1.0] * 5 if name == "another length" else DOUBLED)


def test_what_differs_from_what_was_launched_before_is_checked(found: dict[str, Any]) -> None:
    refused = {name: each for name, each in found["often"]["launches"].items() if each["failed"]}
    assert {name: each["looked"] for name, each in refused.items()} == {
        "another alignment": 1,
        "another dtype": 0,  # refused before
        "a length that is divisible": 1,
        "a length of one": 1,
        "a long length": 1,
        "a length of another type": 1,
        "another constant": 1,
        "other options": 1,
        "with Triton's checks on": 1,
    }
    for each in refused.values():
        assert each["grids"] == [] and set(each["x"]) == {1.0}


def test_a_kernel_that_needs_memory_of_its_own_gets_it_from_pytorch_or_from_whom_the_caller_says(
    found: dict[str, Any],
) -> None:
    said = found["with memory"]
    given, by_the_program = said.pop("capture")
    assert given == by_the_program and given[0] > 0
    assert set(said) == {"launched from the stored binary", "compiled by Triton from the stored source"}
    for launches, by_the_caller, right, afterwards in said.values():
        assert launches == given * 4 and by_the_caller == given and right
        assert afterwards == given, "the last launch had an allocator"


def test_hooks_see_launches_of_what_was_launched_before(found: dict[str, Any]) -> None:
    skip_where_no_launch_is_shortened()
    notes = found["often"]["notes"]
    assert notes == [
        ["enter", "double_kernel"],
        ["exit", "double_kernel"],
        ["before", 4],
        ["seen", [2]],
        *[["looked by another Triton", 1]] * 2,
    ]


def test_parameters_that_are_named_like_options_are_given_as_the_program_gave_them(found: dict[str, Any]) -> None:
    """By name they are options, too, and the kernel is compiled with them."""
    outcome, *notes = found["replayed"]
    launched = "triton::described_kernel, triton::launch_grid_kernel, triton::named_like_options"
    assert outcome == "ok" and f"4 triton kernels are launched from the stored binary: {launched}" in notes


def test_a_script_compiles_what_was_compiled(found: dict[str, Any], tmp_path: Path, tools: Tools) -> None:
    out = tmp_path / "out.py"
    capture = found["folder"] / "sm80.opreplay"
    ran = tools("trim", "--kernel=triton::double_kernel", "--allow-code", f"--script={out}", capture)
    assert ran.code == 0, ran.err
    text = out.read_text()
    assert text.index('os.environ["TRITON_INTERPRET"] = "0"') < text.index("import triton")
    assert "double_kernel[(2,)](t1, 8, BLOCK=4, num_warps=2" in text
    compile(text, str(out), "exec")


def test_a_script_has_memory_for_descriptors_where_a_kernel_makes_some(
    found: dict[str, Any], tmp_path: Path, tools: Tools
) -> None:
    for capture, kernel, has in (("memory", "describing_kernel", True), ("sm80", "double_kernel", False)):
        out = tmp_path / f"{capture}.py"
        ran = tools(
            "trim",
            f"--kernel=triton::{kernel}",
            "--allow-code",
            f"--script={out}",
            found["folder"] / f"{capture}.opreplay",
        )
        assert ran.code == 0, ran.err
        text = out.read_text()
        assert ("triton.set_allocator(" in text) is has
        compile(text, str(out), "exec")


def test_without_its_source_a_binary_is_launched_where_it_fits(found: dict[str, Any]) -> None:
    """Functions, types and constexprs as arguments, arguments by name, what is not specialized: as declared."""
    case = found["without sources"]
    assert "source" not in case["kept"] and case["kept"].count("cubin") == 4
    assert [each["how"] for each in case["90"]["said"]] == ["launched from the stored binary"] * 4
    assert case["90"]["launches"] == case["recorded"] and len(case["recorded"]) == 4
    assert case["90"]["out"] == case["computed"] != [0.0] * 8


def test_without_its_source_a_binary_for_another_device_is_refused(found: dict[str, Any]) -> None:
    case = found["without sources"]["80"]
    for each in case["said"]:
        assert "has no source of it" in each["refused"]
        assert "it was compiled for cuda:90, this is cuda:80" in each["refused"]
    assert len(case["said"]) == 4 and case["launches"] == []
