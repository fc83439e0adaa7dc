"""Replays of a captured launch with cubins of the user's in its place, on a device that is not there. As a script it
works in the directory that it is given, which may have cubins by nvcc, and prints what came of each as JSON."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import replayfmt
from replayfmt.benchmark.candidates.binaries import launched
from replayfmt.benchmark.candidates.task_calls import Task, memories_of, run
from replayfmt.benchmark.candidates.task_cases import Case, Options, load_task
from replayfmt.benchmark.candidates.task_judging import CaseJudge, Fault, Judge, split_candidate
from replayfmt.dump.selection import OpSelection
from replayfmt.errors import OpReplayError
from replayfmt.export.kernel_task import write_task
from replayfmt.export.task_workloads import TaskOptions
from tests.triton_kernels import programs
from tests.triton_kernels.fake_device import install, replay_as_on_a_device

ARCH, NAME = 90, "triton::double_kernel"


@triton.jit
def twofold(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < n)
    tl.store(x + at, values + values, mask=at < n)


@triton.jit
def summing(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_add(out, tl.sum(tl.load(x + at, mask=at < n), 0))


def double(x: torch.Tensor, n: int, *_more: Any) -> None:
    x[:n] *= 2


def triple(x: torch.Tensor, n: int, *_more: Any) -> None:
    x[:n] *= 3


DOES = {name: double for name in ("double_kernel", "twofold", "twice", "narrow", "wide")}


def compiled(folder: Path, name: str, kernel: Any, signature: dict[str, str], arch: int = ARCH, warps: int = 1) -> Path:
    """A cubin by Triton, ahead of time, with the sidecar that Triton writes."""
    constants = {(len(signature),): 4}
    source = ASTSource(kernel, {**signature, "BLOCK": "constexpr"}, constants, {})
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
    path = folder / f"{name}.cubin"
    path.write_bytes(made.asm["cubin"])
    (sidecar,) = [each for each in made.metadata_group.values() if each.endswith(f"{kernel.__name__}.json")]
    shutil.copy(sidecar, path.with_suffix(".json"))
    return path


def beside(path: Path, name: str, said: Any) -> Path:
    """The cubin again, with another sidecar."""
    copied = path.with_name(f"{name}.cubin")
    shutil.copy(path, copied)
    copied.with_suffix(".json").write_text(said if isinstance(said, str) else json.dumps(said))
    return copied


def replayed(capture: Path, request: str, does: Any = None, *, allow_code: bool = True) -> dict[str, Any]:
    driver = install(ARCH, {**DOES, **(does or {})})
    try:
        with replayfmt.Plan(capture, allow_code=allow_code, substitutions=[request] if request else []) as plan:
            result = plan.execute(verify="bitwise")
    except OpReplayError as error:
        text = f"{type(error).__name__}: {error} {' '.join(getattr(error, 'findings', ()))}"
        return {"error": text, "launches": driver.launches}
    return {"outcome": result.outcome, "launches": driver.launches, "loaded": [each.hex() for each in driver.loaded]}


def judged(capture: Path, folder: Path, request: str, does: Any = None) -> dict[str, Any]:
    """What the cubin of a request does as a candidate for a task of the kernel, and what its judge says."""
    driver = install(ARCH, {**DOES, **(does or {})})
    with tempfile.TemporaryDirectory(dir=folder) as out, replayfmt.Plan(capture, allow_code=True) as plan:
        task_folder = Path(out) / "task"
        write_task(plan, str(task_folder), OpSelection(kernel=(NAME,)), TaskOptions(allow_code=True))
        task = load_task(task_folder)
        case = Case(task_folder, task, task["workloads"][0], 0, None)
        driver.launches.clear()
        path, function = split_candidate(request.partition("=")[2])
        try:
            outcome = run(launched(task_folder, task, path, function), case, memories_of(case, case.contents))
        except ValueError as error:
            return {"error": str(error), "launches": driver.launches}
        assert not outcome.error, outcome.error
        doubled = bool((outcome.after[0].view(torch.float32) == 2 * case.contents[0]).all())
        launches = list(driver.launches)
        told: list[dict[str, Any]] = []
        checked = Task(task_folder, Options(min_time_s=0))
        checked.scratch = Path(out)
        checked.prepare(lambda **event: told.append(event))
        checked.take(told)
        judge = Judge(checked, lambda **event: None)
        try:
            CaseJudge(judge, judge.load(f"{path}:{function}"), case, checked.variants(case)).judge()
        except Fault as fault:
            return {"doubled": doubled, "launches": launches, "fault": [fault.reason, fault.text]}
        return {"doubled": doubled, "launches": launches, "fault": None}


def main() -> None:
    folder = Path(sys.argv[1])
    replay_as_on_a_device()
    install(ARCH, DOES)
    capture = folder / "doubled.opreplay"
    x = torch.arange(8.0)
    with replayfmt.capture(capture, digests="ops"):
        programs.double_kernel[(2,)](x, 8, BLOCK=4, num_warps=2)
        x + 1
    ours = compiled(folder, "twofold", twofold, {"x": "*fp32", "n": "i32"})
    requests = {
        "": "",
        "twofold": f"{NAME}@cubin={ours}",
        "named": f"{NAME}@cubin={ours}:twofold",
        "by its ending": f"{NAME}={ours}",
        "no sidecar": f"{NAME}@cubin={shutil.copy(ours, folder / 'alone.cubin')}",
        "no shared": f"{NAME}@cubin={beside(ours, 'empty', {})}",
        "no object": f"{NAME}@cubin={beside(ours, 'list', [])}",
        "no JSON": f"{NAME}@cubin={beside(ours, 'broken', 'shared: 0')}",
        "unknown key": f"{NAME}@cubin={beside(ours, 'key', {'shared': 0, 'warps': 1})}",
        "no warps": f"{NAME}@cubin={beside(ours, 'warps', {'shared': 0, 'num_warps': 0})}",
        "other threads": f"{NAME}@cubin={beside(ours, 'threads', {'shared': 0, 'num_warps': 4})}",
        "too much shared": f"{NAME}@cubin={beside(ours, 'shared', {'shared': 1 << 30})}",
        "other entry": f"{NAME}@cubin={ours}:threefold",
        "other parameters": f"{NAME}@cubin="
        + str(compiled(folder, "summing", summing, {"x": "*fp32", "out": "*fp32", "n": "i32"})),
        "another device": f"{NAME}@cubin={compiled(folder, 'older', twofold, {'x': '*fp32', 'n': 'i32'}, arch=80)}",
        "no cubin": f"{NAME}@cubin={shutil.copy(__file__, folder / 'text.cubin')}",
        "cut off": f"{NAME}@cubin={folder / 'cut.cubin'}",
        "all": f"all@cubin={ours}",
        "an operator": f"aten::add@cubin={ours}",
    }
    (folder / "cut.cubin").write_bytes(ours.read_bytes()[:700])
    (folder / "cut.json").write_text('{"shared": 0}')
    shutil.copy(ours.with_suffix(".json"), folder / "text.json")
    by_nvcc = folder / "by_nvcc.cubin"
    if by_nvcc.exists():
        by_nvcc.with_suffix(".json").write_text('{"shared": 0}')
        requests |= {name: f"{NAME}@cubin={by_nvcc}:{name}" for name in ("twice", "narrow", "wide")}
        requests["several"] = f"{NAME}@cubin={by_nvcc}"
    found = {name: replayed(capture, request) for name, request in requests.items()}
    found["wrong"] = replayed(capture, requests["twofold"], {"twofold": triple})
    found["without leave"] = replayed(capture, requests["twofold"], allow_code=False)
    found |= {f"candidate {name}": judged(capture, folder, requests[name]) for name in sys.argv[2:]}
    found["wrong candidate"] = judged(capture, folder, requests["named"], {"twofold": triple})
    found["cubins"] = {path.stem: path.read_bytes().hex() for path in (ours, by_nvcc) if path.exists()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
