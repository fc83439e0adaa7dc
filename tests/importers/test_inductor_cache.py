"""Triton kernels of a trace become kernels that a replay launches, where the user's Inductor cache has the very source
that the trace ran. Importing reads the source and runs nothing of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from opreplay_tools.importer import cli

from replayfmt.errors import ReplayRefused, UsageError
from replayfmt.format.attachments import contents_of
from replayfmt.format.codes import KernelKind
from replayfmt.format.reader import open_capture
from replayfmt.importers.common.inductor_cache import code_hash
from replayfmt.importers.importing import import_trace
from replayfmt.replay.plan import Plan

from .observed import Traced, Written
from .traces import kernel, launch, op, scalar, tensor, trace

HEAD = """
import triton
import triton.language as tl

from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties
triton_helpers.set_driver_to_gpu()
open({mark!r}, "a").write("ran")

@triton_heuristics.{tuner}(
    size_hints={{'x': 128}},
    filename=__file__,
    triton_meta={{'signature': {signature}, 'device': DeviceProperties(type='cuda', index=0), 'constants': {{}}}},
    inductor_meta={{'grid_type': 'Grid1D', 'autotune_hints': set(), 'kernel_name': '{name}', 'mutated_arg_names': []}},
)
@triton.jit
"""
ADD = """\
def triton_poi_fused_add_0(in_ptr0, in_out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    tmp0 = tl.load(in_ptr0 + (xindex), xmask)
    tmp1 = tl.load(in_out_ptr0 + (xindex), xmask)
    tl.store(in_out_ptr0 + (xindex), triton_helpers.maximum(tmp0, tmp1), xmask)
"""
GATHER = """\
def triton_poi_fused_gather_1(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    tmp0 = tl.load(in_ptr0 + (xindex), xmask)
    tl.store(out_ptr0 + (xindex), tl.load(in_ptr1 + (tmp0), xmask), xmask)
"""
OF_PROGRAM = """\
def triple(x, scale, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = x
    tl.store(y + at, tl.load(kept + at, at < n) * scale, at < n)
"""
SIGNATURES: dict[str, dict[str, str]] = {
    ADD: {"in_ptr0": "*fp32", "in_out_ptr0": "*fp32", "xnumel": "i32", "XBLOCK": "constexpr"},
    GATHER: {"in_ptr0": "*i64", "in_ptr1": "*fp32", "out_ptr0": "*fp32", "xnumel": "i32", "XBLOCK": "constexpr"},
    OF_PROGRAM: {"x": "*fp32", "scale": "fp32", "y": "*fp32", "n": "i32", "BLOCK": "constexpr"},
}


class Cache:
    """A cache with one source in it, and the event of a launch of its kernel."""

    def __init__(self, folder: Path, body: str, tuner: str = "pointwise") -> None:
        self.folder, self.mark = folder / "cache", folder / "ran"
        defined = body.partition("(")[0].removeprefix("def ")
        self.name = defined + ("_7" if tuner == "user_autotune" else "")  # as Inductor calls kernels of programs
        head = HEAD.format(mark=str(self.mark), tuner=tuner, signature=SIGNATURES[body], name=self.name)
        self.hash = code_hash(head + body)
        self.file = self.folder / self.hash[1:3] / f"{self.hash}.py"
        self.file.parent.mkdir(parents=True)
        self.file.write_text(head + body)

    def events(self, inputs: list[Any], grid: tuple[int, ...] = (2, 1, 1), **said: Any) -> list[dict[str, Any]]:
        told = {
            "kernel_backend": "triton",
            "kernel_file": f"/tmp/torchinductor_somebody/{self.hash[1:3]}/{self.hash}.py",
            "kernel_hash": self.hash,
            "kernel_kwargs": "XBLOCK=64",
            "num_warps": 2,
            "num_stages": 1,
            **said,
        }
        work = {**kernel(1, 50, 5, self.name)}
        work["args"] = {**work["args"], "grid": list(grid)}
        return [op(self.name, 10, 20, inputs, **told), launch(1, 12), work]


def floats(*sizes: int) -> tuple[Any, ...]:
    return tensor("float", *sizes)


def imported(cache: Cache, events: list[dict[str, Any]]) -> tuple[Path, str]:
    """The capture, and what the tool prints of it."""
    source, out = trace(cache.mark.with_name("trace.json"), events), cache.mark.with_name("out.opreplay")
    done = CliRunner().invoke(cli, [str(source), "-o", str(out), f"--inductor-cache={cache.folder}"])
    assert done.exit_code == 0, done.output
    assert not cache.mark.exists()
    return out, " ".join(done.output.split())


# Launches the kernel of each capture on tensors of its own, then replays the capture, in one process.
LAUNCHES = """
import json, sys, torch, replayfmt
from replayfmt.format.attachments import contents_of
from replayfmt.format.reader import open_capture
from replayfmt.replay.resolution.code_kernels import resolve_triton

found = []
for path, given in zip(sys.argv[2:], json.loads(sys.argv[1])):
    with open_capture(path) as reader:
        kernel, = (each for each in reader.kernels if each is not None)
        loaded = resolve_triton(kernel, lambda: contents_of(reader, kernel), frozenset({"cpu"})).loaded()
        values = {name: torch.tensor(value) if name != "grid" and isinstance(value, list) else value
                  for name, value in given.items()}
        loaded.call(**values)
    with replayfmt.Plan(path, allow_code=True, devices=("cpu",)) as plan:
        outcome = plan.execute(verify="none").outcome
    found.append({name: value.tolist() for name, value in values.items() if hasattr(value, "tolist")} | {"": outcome})
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_replay_that_may_run_code_launches_the_source_as_the_trace_did(tmp_path: Path) -> None:
    how = {"num_warps": 2, "num_stages": 1}
    add = Cache(tmp_path / "add", ADD)
    made = [imported(add, add.events([floats(10, 10), floats(10, 10), scalar("100")]))]
    a, b = [float(each) for each in range(100)], [50.0] * 100
    given: list[dict[str, Any]] = [
        {"in_ptr0": a, "in_out_ptr0": b, "xnumel": 100, "grid": [2, 1, 1], "XBLOCK": 64, **how}
    ]
    triple = Cache(tmp_path / "triple", OF_PROGRAM, "user_autotune")
    inputs = [floats(100), scalar("3."), floats(100), scalar("100")]
    made.append(imported(triple, triple.events(inputs, kernel_kwargs="BLOCK=64")))
    given.append({"x": a, "scale": 3.0, "y": b, "n": 100, "grid": [2, 1, 1], "BLOCK": 64, **how})
    gather = Cache(tmp_path / "gather", GATHER)
    inputs = [tensor("long int", 100), floats(7), floats(100), scalar("100")]
    made.append(imported(gather, gather.events(inputs)))
    kept = {"in_ptr0": [6, 0] * 50, "in_ptr1": a[:7], "out_ptr0": b}
    given.append({**kept, "xnumel": 100, "grid": [2, 1, 1], "XBLOCK": 64, **how})
    for path, told in made:
        assert "1 call: operators of the Inductor cache" in told
        with pytest.raises(ReplayRefused, match="allow-code|allow_code"), Plan(path, devices=("cpu",)):
            pass
    paths = [str(path) for path, _told in made]
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHES, json.dumps(given), *paths], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found[0]["in_out_ptr0"] == [max(each) for each in zip(a, b, strict=True)]
    assert found[1]["y"] == [3 * each for each in a]
    assert found[2]["out_ptr0"] == [6.0, 0.0] * 50
    assert [each[""] for each in found] == ["ok"] * 3  # the gather's indices are 0: they leave no tensor
    assert add.mark.exists()  # what the source says at its top ran now, and not before


def test_what_only_loads_use_is_read_and_of_the_rest_it_is_told_how_that_is_known(tmp_path: Path) -> None:
    add = Cache(tmp_path / "add", ADD)
    assert schema(imported(add, add.events([floats(100), floats(100), scalar("100")]))[0]) == (
        "(Tensor in_ptr0, Tensor(a1!) in_out_ptr0, int xnumel, *, int XBLOCK, int[] grid, int num_warps, "
        "int num_stages) -> ()"
    )
    triple = Cache(tmp_path / "triple", OF_PROGRAM, "user_autotune")
    inputs = [floats(100), scalar("3."), floats(100), scalar("100")]
    path, _told = imported(triple, triple.events(inputs, kernel_kwargs="BLOCK=64"))
    assert schema(path).startswith("(Tensor(a0!) x, float scale, Tensor(a2!) y, int n, *, int BLOCK")
    with open_capture(path) as reader:
        (found,) = [each for each in reader.kernels if each is not None]
        assert json.loads(contents_of(reader, found)["metadata"])["writes"] == "assumed"


def schema(path: Path) -> str:
    with open_capture(path) as reader:
        (found,) = [each for each in reader.kernels if each is not None]
        assert found.kind is KernelKind.triton
        return "(" + found.schema.partition("(")[2]


THREE = [floats(10, 10), floats(10, 10), scalar("100")]


@pytest.mark.parametrize(
    ("inputs", "grid", "said", "why"),
    [
        (THREE, (2, 1, 1), {"kernel_hash": "c" + "a" * 51, "kernel_file": ""}, "has no aa/caaa"),
        (THREE, (2, 1, 1), {"kernel_hash": "c" + "a" * 51}, "which are not of one source"),
        (THREE, (2, 1, 1), {"kernel_hash": "../../etc", "kernel_file": ""}, "is not the hash of a source"),
        (THREE, (3, 1, 1), {}, "the grid [3, 1, 1], its source and arguments make it [2]"),
        (THREE, (2, 1, 1), {"kernel_kwargs": ""}, "the trace has 3 arguments and the configuration {}"),
        (THREE, (2, 1, 1), {"kernel_kwargs": "XBLOCK"}, "which is not NAME=VALUE"),
        (THREE[:2], (2, 1, 1), {}, "the trace has 2 arguments"),
        (
            [tensor("c10::Half", 100), *THREE[1:]],
            (2, 1, 1),
            {},
            "takes *fp32 as in_ptr0, the trace has a tensor float16",
        ),
        ([*THREE[:2], scalar("0.5")], (2, 1, 1), {}, "takes i32 as xnumel, the trace has 0.5"),
        ([*THREE[:2], ("", [], [], "")], (2, 1, 1), {}, "takes i32 as xnumel, the trace has no value"),
        ([tensor("float", 100, strides=[-1]), *THREE[1:]], (2, 1, 1), {}, "its argument in_ptr0"),
        (None, (2, 1, 1), {}, "the trace says nothing of its arguments"),
    ],
)
def test_a_launch_that_does_not_fit_its_source_stays_as_it_is_and_says_why(
    tmp_path: Path, inputs: Any, grid: tuple[int, ...], said: dict[str, Any], why: str
) -> None:
    cache = Cache(tmp_path, ADD)
    path, told = imported(cache, cache.events(inputs, grid, **said))
    assert "not replayable: " in told and why in told.partition("not replayable: ")[2]
    with open_capture(path) as reader:
        assert not any(reader.kernels)


def test_a_source_that_is_not_the_one_that_ran_is_not_taken(tmp_path: Path) -> None:
    cache = Cache(tmp_path, ADD)
    events = cache.events(THREE)
    cache.file.write_text(cache.file.read_text().replace("maximum", "minimum"))
    path, told = imported(cache, events)
    assert f"{cache.file} is not what the trace ran: its text has the hash c" in told
    with open_capture(path) as reader:
        assert not any(reader.kernels)


@pytest.mark.parametrize("name", ["", "triton_poi_another_0"])
@pytest.mark.parametrize("text", ["def triton_poi_fused_add_0(:", "x = 1\n", ADD, ""])
def test_a_source_of_another_form_is_not_taken(tmp_path: Path, text: str, name: str) -> None:
    cache = Cache(tmp_path, ADD)
    text = text or cache.file.read_text()
    cache.hash, cache.name = code_hash(text), name or cache.name
    file = cache.folder / f"{cache.hash}.py"  # the sources beside an execution trace lie so
    file.write_text(text)
    taken = not name and "triton_meta" in text
    assert ("not replayable: its source" in imported(cache, cache.events(THREE))[1]) is not taken


def test_a_kernel_whose_programs_wait_for_each_other_is_not_taken(tmp_path: Path) -> None:
    cache = Cache(tmp_path, ADD, "cooperative_reduction")
    assert "its programs wait for each other" in imported(cache, cache.events(THREE))[1]


def test_an_execution_trace_without_the_source_beside_it_gets_it_from_the_cache(tmp_path: Path) -> None:
    cache = Cache(tmp_path, ADD)
    written = Written()
    for name in (cache.hash, "c" + "a" * 51):
        inputs = [Traced(10, 20, [16], device="cuda:0"), 16]
        written.node(cache.name, "", inputs, [], kernel_backend="triton", kernel_file=f"{name}.py")
    source, out = written.save(tmp_path / "t.json"), tmp_path / "out.opreplay"
    report = import_trace(source, out, inductor_cache=cache.folder)
    assert any("aaa.py not found: " in each.detail for each in report.entries.values())
    with open_capture(out) as reader:
        found, missing = [each.annotation["triton"]["source"] for each in reader.records() if each.annotation]
    assert found == cache.file.read_text() and missing is None


def test_the_cache_must_be_a_directory_and_the_trace_one_that_can_have_kernels(tmp_path: Path) -> None:
    cache = Cache(tmp_path, ADD)
    source = trace(tmp_path / "trace.json", cache.events(THREE))
    with pytest.raises(UsageError, match="no such directory; give the cache of the traced program"):
        import_trace(source, tmp_path / "out.opreplay", inductor_cache=tmp_path / "nothing")
    ir = tmp_path / "ir.json"
    ir.write_text(json.dumps([{"op_name": "aten::relu", "replay_ir": {}}]))
    with pytest.raises(UsageError, match="--inductor-cache="):
        import_trace(ir, tmp_path / "out.opreplay", inductor_cache=cache.folder)
