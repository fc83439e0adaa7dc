"""Steps about programs that run eagerly: what a capture costs, how replays compare, what verification finds."""

from __future__ import annotations

import gc
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from figures import (
    DEVICE,
    NEEDS_GPU,
    ON_GPU,
    WORK,
    Timer,
    captured,
    in_turns,
    median_of,
    tell,
    telling,
    timed,
    verified,
    wait,
)
from goals import FIGURES, PROGRAMS
from programs import Training, program
from torch.profiler import ExecutionTraceObserver
from torch.utils._python_dispatch import TorchDispatchMode

import replayfmt

ROUNDS = 5 if ON_GPU else 2
PACKAGES = (
    *("torch", "triton", "numpy", "zstandard", "jq", "zeus", "pytest", "transformers"),
    *("cuda-core", "cuda-bindings", "nvidia-ml-py"),
)
# A program that computes on the host alone, under a capture.
HOST_ONLY = """
import sys, torch, replayfmt
with replayfmt.capture(sys.argv[1], force=True):
    torch.ones(9).add(1)
print(torch.cuda.is_initialized())
"""


def machine() -> None:
    """What the figures hold for, and two facts of which much depends."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "device": DEVICE}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if ON_GPU:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    with telling("a capture of the host's work leaves the device alone"):
        done = subprocess.run([sys.executable, "-c", HOST_ONLY, WORK / "host.opreplay"], capture_output=True, text=True)
        alone = done.returncode == 0 and done.stdout.split()[-1:] == ["False"]
        tell("a capture of the host's work leaves the device alone", alone, machine=found, said=done.stderr[-300:])
    with telling("the native recorder is there"):
        from replayfmt.native.building import NotAvailable
        from replayfmt.native.hook import dispatch_hook
        from replayfmt.native.watching import thread_watch
        from replayfmt.pytorch.tensors.digests import use_native

        began = time.perf_counter()
        with ThreadPoolExecutor() as pool:  # where they have to be built, a minute for each
            hook, *others = [each.result() for each in [pool.submit(dispatch_hook), pool.submit(use_native)]]
        others.append(thread_watch("auto").state)
        there, seconds = not isinstance(hook, NotAvailable), time.perf_counter() - began
        tell("the native recorder is there", there, hook=str(hook)[:200], others=others, seconds=seconds)
    names = [f"{each} 256 MiB of a device: time / copying it to the host" for each in ("hashing", "the digest of")]
    with telling(same := "digests of a device's content are those of the host's", *names):
        from replayfmt.pytorch.tensors.digests import digest_tensor, hash_tensor

        found = {}
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool):
            there = torch.randn(9_000_001, device=DEVICE).mul(9).to(dtype)[1:]
            one, other = digest_tensor(there), digest_tensor(there.cpu())
            found[str(dtype)] = (one.hex, one.sample, one.min, one.max) == (
                other.hex,
                other.sample,
                other.min,
                other.max,
            )
        tell(same, all(found.values()), by_dtype=found)
        big = torch.randn((256 if ON_GPU else 8) << 18, device=DEVICE)
        pinned = torch.empty_like(big, device="cpu", pin_memory=ON_GPU)
        taken = in_turns(
            3,
            copy=lambda: timed(lambda: pinned.copy_(big)).wall_ms,
            hash=lambda: timed(lambda: hash_tensor(big)).wall_ms,
            digest=lambda: timed(lambda: digest_tensor(big)).wall_ms,
        )
        for what, kind in zip(names, ("hash", "digest"), strict=True):
            tell(what, median_of(lambda h, c: h / c, taken[kind], taken["copy"]), bytes=big.nbytes, milliseconds=taken)


# ------------------------------------------------------------------------------------------------------------- capture


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def capture() -> None:
    for name in PROGRAMS:
        prefix = f"capture, {name}"
        costs = [
            f"{prefix}: added time / no-op TorchDispatchMode's",
            f"{prefix}: added time / ExecutionTraceObserver's",
            f"{prefix}: added for an op",
            f"{prefix}: time of a step / without a capture",
        ]
        with telling(*costs):
            _cost(name, costs)
        with telling(what := f"{prefix}: same bits with a capture as without"):
            _same_bits(name, what)


def _cost(name: str, figures: list[str]) -> None:
    work = program(name)
    steps = (3 if name.endswith("training") else 20) if ON_GPU else 2
    for _ in range(2):
        work.step()

    def run() -> float:
        """Milliseconds of a step."""
        return timed(lambda: [work.step() for _ in range(steps)]).wall_ms / steps

    def floor() -> float:
        with Nothing():
            return run()

    def peer() -> float:
        observer = ExecutionTraceObserver()
        observer.register_callback(str(WORK / "observed.json"))
        observer.start()
        try:
            return run()
        finally:
            observer.stop()
            observer.unregister_callback()

    counts: list[int] = []

    def recorded(**options: Any) -> float:
        path = WORK / "cost.opreplay"
        with replayfmt.capture(path, force=True, payload="none", **options):
            work.step()  # what is new
            taken = run()
        with replayfmt.open(path) as reader:
            counts.append(len(reader.ops) // (steps + 1))
        return taken

    taken = in_turns(ROUNDS, eager=run, floor=floor, peer=peer, capture=recorded)
    eager = statistics.median(taken["eager"])
    details = {"ops": counts[-1], "milliseconds_a_step": taken}

    def added(base: str) -> float | None:
        """What a capture adds, as a share of what `base` adds. None if that is within the noise: the device, and not
        the host, then sets the time of a step."""
        own = statistics.median(taken[base]) - eager
        if own < 0.03 * eager:
            return None
        return median_of(lambda e, c, b: (c - e) / (b - e), taken["eager"], taken["capture"], taken[base])

    for figure, base in zip(figures[:2], ("floor", "peer"), strict=True):
        ratio = added(base)
        hidden = {"reason": "what it is compared with adds less than 3% to a step, whose time the device sets"}
        tell(figure, ratio, **details, **(hidden if ratio is None else {}))
    difference = median_of(lambda e, c: c - e, taken["eager"], taken["capture"])
    tell(figures[2], difference * 1e3 / counts[-1], **details)
    tell(figures[3], median_of(lambda e, c: c / e, taken["eager"], taken["capture"]), **details)


def _same_bits(name: str, what: str) -> None:
    """A program twice alone, and once under a capture; with attention that is deterministic."""

    def left() -> list[torch.Tensor]:
        work = program(name, math=True)
        for _ in range(3):
            work.step()
        return [tensor.detach().clone() for tensor in work.state()]

    def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
        return all(torch.equal(a.view(-1), b.view(-1)) for a, b in zip(one, other, strict=True))

    first, second = left(), left()
    watched = captured(WORK / "bits.opreplay", left)
    if not same(first, second):
        tell(what, None, reason="the program itself gives other bits when it runs again", tensors=len(first))
        return
    tell(what, same(first, watched), tensors=len(first))


# -------------------------------------------------------------------------------------------------------------- replay


def replay() -> None:
    for name in PROGRAMS:
        prefix = f"replay, {name}"
        steps = (3 if name.endswith("training") else 16) if ON_GPU else 2
        path = WORK / f"{name.replace(' ', '_')}.opreplay"
        with telling(outcome := f"{prefix}: nothing differs from the capture", kernels := _differing(prefix)):
            peak_bytes = _capture_steps(name, path, steps)
            found = verified(path)
            tell(outcome, found.pop("ok"), **found)
            tell(kernels, found["nondeterministic_count"], **found)
        with telling(peak := f"{prefix}: peak memory / the program's"):
            _peak_memory(peak, path, peak_bytes)
        times = f"{prefix}: wall time / the program's", f"{prefix}: device time / the program's"
        with telling(*times, graph := f"{prefix}: device time of one graph / of the program"):
            own = _times(name, path, steps, times)
            _whole_graph(graph, path, own)


def _differing(prefix: str) -> str:
    return f"{prefix}: kernels that differ from run to run"


def _capture_steps(name: str, path: Path, steps: int) -> int | None:
    """Capture a program that is warm. The peak of its memory without a capture, in bytes."""
    work, peak = program(name), None
    for _ in range(2):
        work.step()
    if ON_GPU:
        wait()
        torch.cuda.reset_peak_memory_stats()
    work.step()
    if ON_GPU:
        wait()
        peak = torch.cuda.max_memory_allocated()
    with replayfmt.capture(path, force=True), replayfmt.scope("steps"):
        for _ in range(steps):
            work.step()
    return peak


def _peak_memory(what: str, path: Path, program_bytes: int | None) -> None:
    if program_bytes is None:
        tell(what, None, reason=NEEDS_GPU)
        return
    gc.collect()
    torch.cuda.empty_cache()
    others = torch.cuda.memory_allocated()
    with replayfmt.Plan(path) as plan:
        plan.execute()
        (memory,) = [each for each in plan.execute().memory if each.device.startswith("cuda")]
    if memory.peak_bytes is None:
        tell(what, None, reason=memory.note)
        return
    bytes_of = {"program_bytes": program_bytes, "replay_bytes": memory.peak_bytes - others, "others_bytes": others}
    tell(what, bytes_of["replay_bytes"] / program_bytes, **bytes_of, note="the copies that restore state are in it")


def _times(name: str, path: Path, steps: int, figures: tuple[str, str]) -> float:
    """Times of the replay and of the program, in turns. The program's device time in milliseconds."""
    work = program(name)
    with replayfmt.Plan(path) as plan:

        def own() -> Timer:
            return timed(lambda: [work.step() for _ in range(steps)])

        def replayed() -> Timer:
            timer = Timer()
            plan.execute(timer=timer)
            return timer

        turns: dict[str, list[Timer]] = {"program": [], "replay": []}
        for number in range(ROUNDS + 1):
            for way, function in (("program", own), ("replay", replayed)):
                taken = function()
                if number:
                    turns[way].append(taken)
    for figure, kind in zip(figures, ("wall_ms", "device_ms"), strict=True):
        series = {way: [getattr(each, kind) for each in timers] for way, timers in turns.items()}
        tell(
            figure, median_of(lambda r, p: r / p, series["replay"], series["program"]), steps=steps, milliseconds=series
        )
    return statistics.median(each.device_ms for each in turns["program"])


def _whole_graph(what: str, path: Path, program_ms: float) -> None:
    if not ON_GPU:
        tell(what, None, reason=NEEDS_GPU)
        return
    row = replayfmt.benchmark(path, cuda_graph=True, min_time="10x", verify="none").rows[0]
    kept = {name: row.get(name) for name in ("real_time", "eager_time", "host_time", "graph_compared", "no_graph")}
    if not row["graph"]:
        tell(what, None, reason=f"the replay is no graph: {row['no_graph']}", **kept)
        return
    tell(what, row["real_time"] / 1e6 / program_ms, program_ms=program_ms, **kept)


# -------------------------------------------------------------------------------------------------------- verification


def verification() -> None:
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        prefix = f"verification, attention in {name}"
        with telling(outcome := f"{prefix}: nothing differs", kernels := _differing(prefix)):
            work = Training(llama=False, dtype=dtype, batch=4 if ON_GPU else 2)
            work.step()
            captured(path := WORK / f"attention_{name}.opreplay", work.step)
            found = verified(path)
            tell(outcome, found.pop("ok"), **found)
            tell(kernels, found["nondeterministic_count"], **found)
    numbers = itertools.count()

    def under(digests: str, work: Training, steps: int) -> Callable[[], float]:
        """Milliseconds of a step in a scope of its own, after the first of a capture: `live` digests where it ends."""

        def step() -> None:
            with replayfmt.scope("step"):
                work.step()

        def run() -> float:
            with replayfmt.capture(WORK / f"digests_{next(numbers) % 2}.opreplay", force=True, digests=digests):
                step()
                return timed(lambda: [step() for _ in range(steps)]).wall_ms / steps

        return run

    live, ops = (name for name in FIGURES if name.startswith("verification, digests="))
    with telling(live):
        work = Training(llama=False)
        work.step()
        taken = in_turns(3, none=under("none", work, 2), live=under("live", work, 2))
        tell(live, median_of(lambda one, other: one / other, taken["live"], taken["none"]), milliseconds=taken)
    with telling(ops):  # every result is digested: of a large batch, for minutes
        work = Training(llama=False, batch=4 if ON_GPU else 2)
        work.step()
        taken = in_turns(2, eager=lambda: timed(work.step).wall_ms, ops=under("ops", work, 1))
        tell(ops, median_of(lambda one, other: one / other, taken["ops"], taken["eager"]), milliseconds=taken)
