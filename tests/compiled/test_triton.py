"""Triton kernels that Inductor generates are recorded as launches, between what else a region calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from replayfmt.recording.code.triton_launches import AutotunerUnsupported, function_of
from replayfmt.recording.inductor import Unknown, read_module

pytestmark = pytest.mark.slow
SINE, RECTIFIED = "triton::triton_poi_fused_sin_0", "triton::triton_poi_fused_add_relu_1"
CHAINED = ["aten::empty_strided", SINE, "aten::empty_strided", "aten::mm", RECTIFIED]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a process in which Triton compiles for a device that is not there."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("triton")
    # Inductor's cache has what autotuners have chosen before.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compiled.triton_programs", str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_launches_are_ops_between_library_calls(found: dict[str, Any]) -> None:
    plain = found["plain"]
    assert plain["ops"] == CHAINED and plain["unsupported"] == []
    assert plain["result"] == found["expected"]
    assert plain["launches"] == [[name.partition("::")[2], [1, 1, 1], 1] for name in (SINE, RECTIFIED)]
    schema = plain["kernels"][SINE]["schema"]
    assert "(Tensor in_ptr0, Tensor(a1!) out_ptr0, int xnumel, *, int XBLOCK, int[] grid, int num_warps" in schema
    assert all(option in schema for option in ("bool debug", "bool enable_fp_fusion", "int num_stages"))


def test_memory_that_a_region_has_just_allocated_needs_no_content(found: dict[str, Any]) -> None:
    """Inductor has all of it written before it is read; the region's argument is what enters."""
    for name in ("plain", "static", "tuned"):
        assert found[name]["imports"] == ["first_use"], name


def test_a_binary_is_kept_where_triton_would_compile_the_same(found: dict[str, Any]) -> None:
    kernels = found["plain"]["kernels"]
    assert {"cubin", "ptx", "source", "ttir"} <= set(kernels[RECTIFIED]["roles"])
    assert kernels[RECTIFIED]["how"] == ["launched from the stored binary", [1.0, 2.0]]
    # The region's argument may lie anywhere, which Inductor knows, and Triton looks at.
    assert "cubin" not in kernels[SINE]["roles"] and kernels[SINE]["target"]["arch"] == 90
    assert kernels[SINE]["how"] == "compiled by Triton from the stored source"


def test_kernels_that_a_worker_compiled_are_recorded_as_those_compiled_here(found: dict[str, Any]) -> None:
    """What a worker sends back has no function of Python."""
    assert found["elsewhere"] == found["plain"]


SOURCE = SimpleNamespace(fn=len, src="def kernel(): pass", cache_key="one", hash="one")


@pytest.mark.parametrize(
    ("kept", "loaded", "why"),
    [
        (SOURCE, None, ""),
        ({"fn": None}, SOURCE, ""),
        ({"fn": None, "hash": None}, SOURCE, ""),  # it was not compiled
        ({"fn": None}, {"src": "def kernel(): return"}, "is not what was compiled"),
        ({"fn": None}, {"cache_key": "another"}, "is not what was compiled"),
        ({"fn": None}, {"fn": None}, "is not what was compiled"),
        ({"fn": None}, {}, "cannot load its source again: FileNotFoundError"),
        ({"fn": None}, None, "kept no way to load its source"),
    ],
)
def test_a_dropped_source_is_one_that_has_the_text_and_the_hash_of_what_was_compiled(
    kept: Any, loaded: Any, why: str
) -> None:
    def changed(changes: Any) -> Any:
        return SOURCE if changes is SOURCE else SimpleNamespace(**{**vars(SOURCE), **changes})

    def reload() -> Any:
        if loaded == {}:
            raise FileNotFoundError
        return SimpleNamespace(fn=changed(loaded))

    tuner = SimpleNamespace(fn=changed(kept), _reload_kernel=None if loaded is None else reload)
    if not why:
        assert function_of(tuner) is SOURCE
    else:
        with pytest.raises(AutotunerUnsupported, match=why):
            function_of(tuner)


def test_trial_launches_and_what_compiling_computes_are_no_part_of_a_capture(found: dict[str, Any]) -> None:
    tuned = found["tuned"]
    assert len(tuned["launches"]) > 2 and len({tuple(grid) for _name, grid, _warps in tuned["launches"]}) > 1
    for each in (tuned, found["descended"]):
        assert each["ops"][0] == "aten::empty_strided" and each["unsupported"] == []
        (kernel,) = each["kernels"].values()
        assert {"ttir", "ptx"} <= set(kernel["roles"])  # what was chosen, wherever Inductor has it


def test_what_inductor_has_chosen_from_while_it_was_captured_is_kept(found: dict[str, Any]) -> None:
    (row,) = found["tuned"]["configurations"]
    assert len(row["configurations"]) > 1 and row["chosen"] in row["configurations"]
    assert {"XBLOCK", "grid"} & {name for each in row["configurations"].values() for name in each}
    tried = {json.dumps([grid, warps]) for _name, grid, warps in found["tuned"]["launches"]}
    for each in row["configurations"].values():
        assert "grid" not in each or any(json.loads(one)[0] == each["grid"] for one in tried)
    assert found["tuned before"]["configurations"] == found["plain"]["configurations"] == []


def test_a_replay_chooses_again_from_what_inductor_had_chosen_from(found: dict[str, Any]) -> None:
    outcome, (choice,) = found["again"]
    assert outcome == "ok" and not choice["failed"]
    assert set(choice["times_ns"]) == set(found["tuned"]["configurations"][0]["configurations"])
    (why,) = found["again before"]
    assert "no autotuner chose a launch in this capture" in why


def test_a_binary_that_inductor_launches_without_triton_is_taken_from_tritons_cache(found: dict[str, Any]) -> None:
    assert found["static"] == found["plain"]


def test_without_what_was_compiled_the_source_is_kept(found: dict[str, Any]) -> None:
    static = found["static and gone"]
    assert static["ops"] == CHAINED and static["result"] == found["expected"]
    assert static["kernels"][SINE]["roles"] == ["metadata", "source"]
    assert static["kernels"][SINE]["target"] == "inductor"


def test_a_launch_that_a_plugin_may_change_is_one_unsupported_record(found: dict[str, Any]) -> None:
    plugin = found["plugin"]
    ((reason, name, detail),) = plugin["unsupported"]
    assert (reason, name) == ("triton_launch", "triton_poi_fused_sin_0") and "a plugin of its autotuner" in detail
    assert SINE not in plugin["ops"] and plugin["result"] == found["expected"]


@pytest.mark.parametrize("lacks", ["eval_slow", "_create_compile_options"])
def test_what_this_pytorch_lacks_is_a_record_and_no_error_in_the_program(found: dict[str, Any], lacks: str) -> None:
    lacking = found[f"lacks {lacks}"]
    assert lacking["result"] == found["expected"]
    assert lacking["unsupported"] and all(lacks in detail for _reason, _name, detail in lacking["unsupported"])


def test_what_a_compiler_refuses_reaches_the_program_as_it_is(found: dict[str, Any]) -> None:
    assert found["refused"] == "the program's own compiler refuses"


ON_A_DEVICE = """
def call(args):
    arg0_1, = args
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        arg0_1 = copy_if_misaligned(arg0_1)
        raw_stream0 = get_raw_stream(0)
        {launch}
    return (arg0_1, )
"""


@pytest.mark.parametrize(
    ("launch", "known"),
    [
        ("triton_poi_fused_0.run(arg0_1, 64, stream=raw_stream0)", True),
        ("torch.ops.aten.randperm.default(8, device=torch.device('cpu'))", True),
        ("done = torch.Event(); done.record(); done.synchronize()", True),
        ("kept = [[]]; kept[0].append(arg0_1); kept[0][0].unsqueeze(0).clone()", True),
        ("kept = [arg0_1]; kept[0].tolist()", False),
        ("torch.cuda.current_stream()", False),
        ("triton_poi_fused_0.other(arg0_1)", False),
    ],
)
def test_what_places_work_on_a_device_is_known(launch: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    place: Any = torch._C
    monkeypatch.setattr(place, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    kernel = CachingAutotuner.__new__(CachingAutotuner)
    module = ModuleType("generated")
    vars(module).update(
        torch=torch,
        copy_if_misaligned=getattr(torch._C._dynamo.guards, "copy_if_misaligned", None),
        get_raw_stream=place._cuda_getCurrentRawStream,
        triton_poi_fused_0=kernel,
    )
    text = ON_A_DEVICE.format(launch=launch)
    if vars(module)["copy_if_misaligned"] is None:  # PyTorch 2.11 generates no such line
        text = text.replace("copy_if_misaligned(arg0_1)", "arg0_1")
    (running,) = [
        each for each in compile(text, "<generated>", "exec", dont_inherit=True).co_consts if hasattr(each, "co_code")
    ]
    if known:
        assert read_module(text, vars(module), running).kernels == ()
    else:
        with pytest.raises(Unknown, match="which is not known"):
            read_module(text, vars(module), running)
