"""Steps about compiled programs and kernels in Triton, about streams and graphs, and the tests that need a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from figures import DEVICE, NEEDS_GPU, ON_GPU, WORK, captured, needs_gpu, replays, tell, telling
from goals import STREAM_CASES
from programs import Training

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


# ------------------------------------------------------------------------------------------------------------ compiled


def compiled() -> None:
    prefix = "compiled, {}: replays as captured"
    binaries, source = prefix.format("default, from binaries"), prefix.format("default, from source")
    with telling(binaries, source, share=0.8):  # what compiles first takes longest
        path = WORK / "compiled.opreplay"
        _compiled(path)
        replays(binaries, path, said="launched from the stored binary" if ON_GPU else "", allow_code=True)
        with mock.patch(
            "replayfmt.pytorch.triton.compiled.StoredBinary.mismatch", lambda *_: "the source was asked for"
        ):
            replays(source, path, said="the source was asked for" if ON_GPU else "", allow_code=True)
    with telling(name := prefix.format("CUDA graph trees")):
        if not needs_gpu(name):  # on the host this and the next are the default mode, and take long to compile
            torch.compiler.reset()
            _compiled(path := WORK / "graph_trees.opreplay", mode="reduce-overhead")
            replays(name, path, allow_code=True)
    with telling(name := prefix.format("max-autotune")):
        if not needs_gpu(name):
            torch.compiler.reset()
            _autotuned(path := WORK / "autotuned.opreplay")
            replays(name, path, allow_code=True)


def _autotuned(path: Path) -> None:
    """Capture one product: for each shape of a product, autotuning takes more than ten seconds."""
    a, b = (torch.randn(512, 512, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    product = torch.compile(lambda a, b: torch.relu(a @ b) + 1, mode="max-autotune-no-cudagraphs")
    product(a, b)
    captured(path, lambda: product(a, b))


def _compiled(path: Path, **options: Any) -> None:
    """Capture a training step whose model is compiled; on the host only a small part is, for the time it takes."""
    if not ON_GPU:
        x = torch.randn(64, 64)
        small = torch.compile(lambda x: torch.softmax(torch.nn.functional.gelu(x) * 2, -1))
        small(x)
        captured(path, lambda: small(x))
        return
    work = Training(llama=True, batch=8, layers=1)  # each layer is compiled for itself
    work.run = torch.compile(work.model, **options)  # type: ignore[assignment]
    for _ in range(3):
        work.step()
    captured(path, work.step)


# ------------------------------------------------------------------------------------------------------------- streams


def _side_stream() -> Any:
    main, other = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.randn(512, 512, device="cuda") * 2
    event = torch.cuda.Event()
    event.record(main)
    other.wait_event(event)
    with torch.cuda.stream(other):
        y = (x @ x).relu()
    main.wait_stream(other)
    return y * 2, y


def _record_stream() -> Any:
    """Memory that one stream frees while another still uses it."""
    main, other = torch.cuda.current_stream(), torch.cuda.Stream()
    sums = []
    for number in range(8):
        x = torch.full((1 << 20,), float(number), device="cuda")
        other.wait_stream(main)
        with torch.cuda.stream(other):
            sums.append((x * 2).sum())
            x.record_stream(other)
        del x
    main.wait_stream(other)
    return torch.stack(sums) + 1


def _pinned_copies() -> Any:
    given = torch.randn(1 << 18).pin_memory()
    back = torch.empty(1 << 18, pin_memory=True)
    x = given.to("cuda", non_blocking=True) * 2
    back.copy_(x, non_blocking=True)
    torch.cuda.synchronize()
    return x, back + 1


def _graph_of(pool: Any = None) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
    x, graph = torch.ones(1 << 12, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        y = (x * 2).relu() + 1
        x.add_(1)
    return graph, x, y


def _graph() -> Any:
    graph, x, y = _graph_of()
    kept = []
    for _ in range(3):
        graph.replay()
        kept.append(y.clone())
    return graph, x, kept


def _graphs_in_one_pool() -> Any:
    first, x, y = _graph_of()
    second, other, z = _graph_of(first.pool())
    kept = []
    for _ in range(2):
        first.replay()
        kept.append(y.clone())
        second.replay()
        kept.append(z.clone())
    return first, second, x, other, kept


def _graphed_callables() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2)).cuda()
    made = torch.cuda.make_graphed_callables(model, (torch.randn(8, 64, device="cuda"),))
    for number in range(2):
        made(torch.full((8, 64), float(number), device="cuda")).square().sum().backward()
    return made, [parameter.grad for parameter in model.parameters()]


def streams() -> None:
    cases: tuple[Callable[[], Any], ...] = (
        _side_stream,
        _record_stream,
        _pinned_copies,
        _graph,
        _graphs_in_one_pool,
        _graphed_callables,
    )
    for case, program in zip(STREAM_CASES, cases, strict=True):
        with telling(what := f"streams, {case}: replays as captured"):
            if needs_gpu(what):
                continue
            torch.manual_seed(0)
            path = WORK / f"{program.__name__.strip('_')}.opreplay"
            kept = captured(path, program)
            replays(what, path, "bitwise")
            del kept


# --------------------------------------------------------------------------------------------------------------- tests


def tests() -> None:
    """The tests that need a GPU; without one, only whether all of them are collected."""
    collected, passed = "tests marked gpu: all are collected", "tests marked gpu: passed, of those that ran"
    # Only files that have such tests: importing all others would take longer than running these.
    every = (path for path in ROOT.glob("tests/**/test_*.py") if "pytest.mark.gpu" in path.read_text())
    files = sorted((str(path.relative_to(ROOT)) for path in every), key=lambda file: ("energy" not in file, file))
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    if not ON_GPU:
        with telling(collected, passed):
            done = subprocess.run([*command, "--collect-only", *files], cwd=ROOT, capture_output=True, text=True)
            print(done.stdout[-4000:], done.stderr[-1000:])
            errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
            count = sum("::" in line for line in done.stdout.splitlines() if line.startswith("tests/"))
            tell(collected, count > 0 and not errors and done.returncode == 0, tests=count, errors=errors[:20])
            tell(passed, None, reason=NEEDS_GPU)
        return
    with telling(collected, passed, share=1):
        command += ["-p", "outcomes", "-q", "--tb=short"]
        if importlib.util.find_spec("xdist"):  # one test at a time, so that the long ones, which come first, are spread
            command += ["-n", str(min(os.cpu_count() or 1, 16)), "--dist=load", "--maxschedchunk=1"]
        rows, ended = _outcomes([*command, *files])
        errors = [row for row in rows if row["outcome"] == "not collected"]
        outcomes = {row["test"]: row["outcome"] for row in rows if row not in errors}
        tell(collected, bool(outcomes) and not errors, tests=len(outcomes), errors=errors[:20])
        counts = Counter(outcomes.values())
        ran = counts["passed"] + counts["failed"] + counts["error"]
        details = {
            "counts": counts,
            "ended": ended,
            "failed": {row["test"]: row["message"] for row in rows if "message" in row},
            "longest": sorted(((row["seconds"], row["test"]) for row in rows), reverse=True)[:12],
            "outcomes": outcomes,
        }
        tell(passed, counts["passed"] / ran if ran else None, **details, **({} if ran else {"reason": "no test ran"}))


def _outcomes(command: list[str]) -> tuple[list[dict[str, Any]], str]:
    """The rows of outcomes.py, and whether the time sufficed."""
    rows: list[dict[str, Any]] = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    left = float(os.environ["GPU_CHECK_ENDS"]) - time.time()
    timers = [threading.Timer(left - 5, process.send_signal, [signal.SIGINT]), threading.Timer(left, process.kill)]
    for timer in timers:
        timer.daemon = True
        timer.start()
    assert process.stdout is not None
    for line in map(str.rstrip, process.stdout):
        print(line, flush=True)
        if line.startswith('{"test"'):
            rows.append(json.loads(line))
    code = process.wait()
    in_time = timers[0].is_alive()
    for timer in timers:
        timer.cancel()
    return rows, f"exit code {code}" if in_time else "the time was up before all had run"
