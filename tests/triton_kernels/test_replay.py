"""Captured launches, replayed by Triton's interpreter without the program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from in_process import Tools

from replayfmt.format.codes import DType
from tests.triton_kernels.conftest import run_python
from tests.triton_kernels.crafted import SCHEMA, SOURCE, craft
from tests.triton_kernels.test_recording import WRITTEN

# The operator that it calls is the program's own.
REPLAYED = sorted(set(WRITTEN) - {"inside_an_operator"})
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "grid_of_2_to_the_40": ({"grid": (1 << 40,)}, "a grid of 1,099,511,627,776 programs"),
    "grid_of_2_to_the_40_in_two_parts": ({"grid": (1 << 20, 1 << 20)}, "a grid of 1,099,511,627,776 programs"),
    "grid_below_zero": ({"grid": (-1,)}, "the grid [-1]"),
    "grid_without_sizes": ({"grid": ()}, "the grid []"),
    "grid_of_four_sizes": ({"grid": (1, 1, 1, 1)}, "the grid [1, 1, 1, 1]"),
    "tensor_past_its_storage": ({"sizes": (3,)}, "a tensor needs 12 bytes of a storage that has 8"),
    "other_dtype": ({"dtype": DType.int32}, "takes a tensor of torch.float32 as x, not torch.int32"),
    "no_source": ({"without": "source"}, "the capture has no source of it"),
    "no_metadata": ({"without": "metadata"}, "the capture has no metadata of it"),
    "other_source": ({"said": {"source_sha256": "0" * 64}}, "its source does not match the hash in its metadata"),
    "metadata_of_another_kind": ({"said": {"kind": "cuda"}}, "are not those of a Triton kernel of version 1"),
    "metadata_without_forms": ({"said": {"parameters": 7}}, "its metadata have no parameters"),
    "parameter_of_no_form": ({"said": {"parameters": {"x": "x", "n": {"eval": "1"}}}}, "is not the form of a"),
    "parameter_that_is_not_there": ({"said": {"parameters": {"x": "x"}}}, "its metadata have the parameters"),
    "argument_that_is_not_there": ({"said": {"parameters": {"x": "x", "n": "m"}}}, "names the argument 'm'"),
    "grid_that_is_not_there": ({"said": {"grid": "blocks"}}, "name arguments that its schema does not have (blocks)"),
    "kernel_that_is_not_there": ({"said": {"function": "tl"}}, "its source has no kernel 'tl'"),
    "source_that_is_no_python": ({"source": "def double(:"}, "its source cannot be loaded: SyntaxError"),
    "source_that_raises": ({"source": SOURCE + "raise OSError('no')\n"}, "its source cannot be loaded: OSError: no"),
    "schema_that_is_none": ({"schema": SCHEMA.replace("int n", "n of int")}, "cannot be launched"),
}


@pytest.fixture(scope="module")
def replays(captures: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of replaying every capture, by name. The replay imports Triton, and tells it to interpret."""
    folder, _ = captures
    paths = [folder / f"{name}.opreplay" for name in REPLAYED]
    hostile = tmp_path_factory.mktemp("hostile")
    paths += [craft(hostile / f"{name}.opreplay", **said) for name, (said, _) in HOSTILE.items()]
    paths += [craft(hostile / "as_it_is.opreplay"), craft(hostile / "of_nothing.opreplay", grid=(0,))]
    done = run_python("-m", "tests.triton_kernels.replays", *map(str, paths))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert not [name for name in told["imported"] if name.endswith(("programs", "helpers"))]
    return {Path(path).stem: result for path, result in told["found"].items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", REPLAYED)
def test_a_replay_is_bitwise_and_says_what_ran_the_kernels(replays: dict[str, Any], name: str) -> None:
    result = replays[name]
    assert result.get("outcomes") == ["ok", "ok"], result
    assert result["digests"] > 0
    (note,) = [note for note in result["notes"] if "triton kernel" in note]
    assert "run by Triton's interpreter" in note and all(kernel in note for kernel in WRITTEN[name])


@pytest.mark.slow
def test_a_crafted_capture_runs_as_it_is(replays: dict[str, Any]) -> None:
    assert replays["as_it_is"].get("values") == [-2.0, 4.0], replays["as_it_is"]
    assert replays["of_nothing"].get("values") == [-1.0, 2.0], replays["of_nothing"]


@pytest.mark.guarantee("triton-kernels")
@pytest.mark.parametrize("name", HOSTILE)
def test_what_does_not_fit_is_refused_before_the_launch(replays: dict[str, Any], name: str) -> None:
    result = replays[name]
    assert "error" in result, result
    assert HOSTILE[name][1] in " ".join([result["error"], *result["findings"]]), result


def touch(path: Path, **said: Any) -> tuple[Path, Path]:
    """A capture whose source makes a file when it is run, and that file."""
    made = path.with_name("made")
    return craft(path, source=f"open({str(made)!r}, 'w').close()\n{SOURCE}", **said), made


@pytest.fixture
def touching(tmp_path: Path) -> tuple[Path, Path]:
    return touch(tmp_path / "touching.opreplay")


def test_without_leave_no_source_is_run(touching: tuple[Path, Path], tools: Tools) -> None:
    capture, made = touching
    for arguments in (["run"], ["run", "--keep-going"], ["benchmark", "--per-op"], ["dump"], ["dump", "--signatures"]):
        tools(*arguments, capture)
    ran = tools("run", capture)
    assert ran.code == 1 and "triton::double.v1" in ran.err and "--allow-code" in ran.err
    assert not made.exists()


@pytest.mark.slow
def test_with_leave_it_is_run(touching: tuple[Path, Path]) -> None:
    capture, made = touching
    done = run_python("-m", "tests.triton_kernels.replays", str(capture))
    assert done.returncode == 0 and "values" in done.stdout, done.stdout + done.stderr
    assert made.exists()


@pytest.mark.slow
def test_a_launch_is_reconciled_with_isolated_launches(tmp_path: Path) -> None:
    capture, out = craft(tmp_path / "a.opreplay"), tmp_path / "a.json"
    flags = ("--reconcile", "--allow-code", "--benchmark-min-time=6x", f"--benchmark-out={out}")
    done = run_python("-m", "opreplay_tools.benchmark", *flags, str(capture))
    assert done.returncode == 0 and "reconciliation of BM_replay" in done.stdout, done.stdout + done.stderr
    found = json.loads(out.read_text())["reconciliation"]
    for inputs in ("isolated_hot", "isolated_cold"):
        assert found[inputs]["total_ns"] > 0 and not found[inputs]["left_out"]
    assert found["whole_replay_ns"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "tool",
    [("run", "--verify=bitwise"), ("benchmark", "--benchmark-min-time=1x"), ("benchmark", "--per-op", "--roofline")],
    ids=["run", "whole", "per_op"],
)
def test_each_tool_has_triton_interpret_before_anything_else_imports_it(
    captures: tuple[Path, dict[str, Any]], tool: tuple[str, ...]
) -> None:
    peaks = ("--peak-flops=1T", "--peak-bandwidth=100G", "--benchmark-min-time=1x") if "--roofline" in tool else ()
    done = run_python("-m", "replayfmt", *tool, *peaks, "--allow-code", str(captures[0] / "softmax.opreplay"))
    assert done.returncode == 0 and "refused 1" not in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.guarantee("code-order")
def test_no_source_is_run_where_anything_else_speaks_against_the_replay(tmp_path: Path) -> None:
    capture, made = touch(tmp_path / "refused.opreplay", then="aten::nothing")
    done = run_python("-m", "tests.triton_kernels.replays", str(capture))
    (result,) = json.loads(done.stdout)["found"].values()
    assert "nothing was run" in result["error"] and "aten::nothing.default does not exist" in result["findings"][0]
    assert not made.exists()


@pytest.mark.slow
def test_without_triton_there_is_one_finding(tmp_path: Path) -> None:
    capture = craft(tmp_path / "a.opreplay")
    program = "import sys; sys.modules['triton'] = None; from tests.triton_kernels import replays; replays.main()"
    done = run_python("-c", program, str(capture))
    (result,) = json.loads(done.stdout)["found"].values()
    (finding,) = result["findings"]
    assert "Triton is not installed here" in finding and "triton::double.v1" in finding
