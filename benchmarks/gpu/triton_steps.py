"""The step about Triton kernels of a program's own: replaced, chosen again, guarded, and given to a judge as a task."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from figures import DEVICE, WORK, captured, needs_gpu, replays, tell, telling, tool

import replayfmt
from replayfmt.errors import GuardViolated, OpReplayError

LENGTH, BLOCK = 1 << 12, 1024
RIGHT, WRONG = "out.copy_(x + y)", "out.copy_(x - y)"


def triton() -> None:
    import triton_kernels as kernels

    program = "Triton program: {}".format
    x, y, out = (torch.randn(LENGTH, device=DEVICE) for _ in range(3))

    def launch() -> None:
        kernels.add[(LENGTH // BLOCK,)](x, y, out, LENGTH, BLOCK=BLOCK)

    path = WORK / "triton.opreplay"
    with telling(bits := program("replays bit for bit")):
        captured(path, launch)
        replays(bits, path, "bitwise", allow_code=True)
    for name, text, accepted in (
        (program("a right replacement is accepted"), RIGHT, True),
        (program("a wrong replacement is rejected"), WRONG, False),
    ):
        with telling(name):
            file = WORK / f"replacement_{accepted}.py"
            file.write_text(f"def add(x, y, out, n{_grid_of(path)}):\n    {text}\n")
            _replaced(name, path, f"triton::add={file}", accepted)
    right, wrong = names = program("a right cubin is accepted"), program("a wrong cubin is rejected")
    with telling(*names):
        if not needs_gpu(*names):
            _replaced(right, path, f"triton::add@cubin={_cubin('right_cubin', kernels.add, x, y, out)}", True)
            _replaced(wrong, path, f"triton::add@cubin={_cubin('wrong_cubin', kernels.difference, x, y, out)}", False)
    _guarded(path, kernels, x, y)
    with telling(again := program("--autotune=again replays as captured")):
        tuned = WORK / "tuned.opreplay"
        captured(tuned, lambda: kernels.tuned[lambda meta: (-(-LENGTH // meta["BLOCK"]),)](x, out, LENGTH) and None)
        with replayfmt.Plan(tuned, allow_code=True, autotune="again") as plan:
            outcome = plan.execute(verify="auto").outcome
            report = plan.substitution and plan.substitution.report
            choices = [] if report is None else [each.row for each in report.choices]
        tell(again, outcome == "ok" and len(choices) == 1, outcome=outcome, choices=choices)
    with telling(task := program("its task's judge accepts what is right and rejects what is wrong")):
        _judged(task, path)


def _replaced(name: str, path: Path, request: str, accepted: bool) -> None:
    """Tell whether a replacement is accepted, or else rejected, as it should be."""
    try:
        with replayfmt.Plan(path, allow_code=True, substitutions=[request]) as plan:
            outcome = plan.execute(verify="auto").outcome
    except OpReplayError as error:
        outcome = f"{type(error).__name__}: {error}"[:300]
    tell(name, outcome == "ok" if accepted else outcome.startswith("SubstitutionRejected"), outcome=outcome)


def _grid_of(path: Path) -> str:
    """Parameters of the captured kernel after its own four, as its schema names them."""
    with replayfmt.open(path) as reader:
        (schema,) = [each.schema for each in reader.kernels if each is not None and each.name == "triton::add"]
    names = re.findall(r"(\w+)(?=[,)=])", schema[schema.index("(") : schema.rindex("->")])
    return "".join(f", {name}=None" for name in names if name not in ("x", "y", "out", "n", "a0"))


def _cubin(name: str, kernel: Any, *tensors: torch.Tensor) -> Path:
    """What Triton compiles of a kernel, for twice as many warps as is usual, with what a cubin does not say."""
    made = kernel.warmup(*tensors, LENGTH, BLOCK=BLOCK, num_warps=8, grid=(LENGTH // BLOCK,))
    path = WORK / f"{name}.cubin"
    path.write_bytes(made.asm["cubin"])
    path.with_suffix(".json").write_text(json.dumps({"shared": made.metadata.shared, "num_warps": 8}))
    return path


def _guarded(path: Path, kernels: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    from replayfmt.replay.substitution.session import guard

    alone, beside = (f"--guard: {what}" for what in ("a right kernel is not blamed", "a write beside is found"))

    def found(path: Path) -> tuple[bool, str]:
        try:
            with replayfmt.Plan(path, allow_code=True) as plan:
                return False, guard(plan).text
        except GuardViolated as error:
            return True, str(error.findings)

    with telling(alone):
        blamed, said = found(path)
        tell(alone, not blamed, said=said[:300])
    with telling(beside):
        short = torch.empty(LENGTH - 1, device=DEVICE)  # an allocator gives a little more
        captured(off := WORK / "beside.opreplay", lambda: kernels.add[(LENGTH // BLOCK,)](x, y, short, LENGTH, BLOCK))
        blamed, said = found(off)
        tell(beside, blamed and "after argument out" in said, said=said[:300])


def _judged(name: str, path: Path) -> None:
    """Give a judge right and wrong kernels, also cubins where there are any."""
    task, folder, out = WORK / "task", WORK / "candidates", WORK / "judged.json"
    tool("export", "--format=kernel-task", "--allow-code", "--kernel=triton::add", "--force", path, task)
    function = json.loads((task / "task.json").read_text())["function"]
    folder.mkdir(exist_ok=True)
    for each, text in (("right", RIGHT), ("wrong", WRONG)):
        (folder / f"{each}.py").write_text(f"def {function}(x, y, out, n, *_more, **_named):\n    {text}\n")
    for cubin in WORK.glob("*_cubin.*"):
        (folder / cubin.name).write_bytes(cubin.read_bytes())
    flags = ["--compare", f"--candidates={folder}", "--benchmark-min-time=0.01s", f"--benchmark-out={out}", "--force"]
    tool("benchmark", *flags, task, codes=(0, 1))
    document = json.loads(out.read_text())
    verdicts = {Path(each["candidate"]).name: each["verdict"] for each in document["candidates"]}
    right = all((verdict == "accepted") is each.startswith("right") for each, verdict in verdicts.items())
    texts = {Path(each["candidate"]).name: each["text"][:200] for each in document["candidates"]}
    tell(name, right and document["reference"]["ok"], verdicts=verdicts, texts=texts, reference=document["reference"])
