"""Steps about single kernels: measured one by one, with probes inside, and their energy."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from figures import (
    DEVICE,
    NEEDS_GPU,
    ON_GPU,
    WORK,
    Timer,
    benchmark,
    captured,
    needs_gpu,
    require,
    tell,
    telling,
    tool,
    wait,
)
from goals import PROBED, PROBES
from programs import Training
from torch.profiler import ProfilerActivity, profile

import replayfmt

MIN_TIME = ["--benchmark-min-time=0.01s"] if ON_GPU else ["--benchmark-min-time=1x", "--op-limit=8"]


def _training(path: Path) -> Training:
    """Capture a training step that a GPU can put into one graph."""
    work = Training(llama=False, math=True, batch=16 if ON_GPU else 2)
    for _ in range(2):
        work.step()
    captured(path, work.step, digests="none")
    return work


def _sum_us(rows: list[dict[str, Any]]) -> float:
    return sum(row["estimated_us"] for row in rows if row.get("estimated_us"))


def _by_name(rows: list[dict[str, Any]]) -> Counter[str]:
    """Microseconds of each operator (`aten::mm`)."""
    found: Counter[str] = Counter()
    for row in rows:
        if row.get("estimated_us"):
            found[row["op"].rpartition(".")[0] or row["op"]] += row["estimated_us"]
    return found


def per_op() -> None:
    from replayfmt.benchmark.per_op import roofline

    # Peaks of this run, not of an earlier one.
    roofline.cache_file = lambda: WORK / "peaks.json"
    path = WORK / "per_op.opreplay"
    sums = {inputs: f"per op, {inputs}: sum / device time of the whole" for inputs in ("hot", "in graphs", "cold")}
    top = "per op: of the five kernels that torch.profiler finds most expensive, found too"
    waiting = "per op: ops whose times hold waiting for the host"
    roof = "roofline, cold: the largest share of a roof"
    found: dict[str, dict[str, Any]] = {}
    profiled: Counter[str] = Counter()
    whole: dict[str, Any] = {}
    with telling(top):
        work = _training(path)
        profiled = _profiled(work, path)
        whole = _whole(path, profiled)
        found["hot"] = benchmark(path, "--per-op", "--inputs=hot", *MIN_TIME, codes=(0, 1))
        measured = _by_name(found["hot"]["benchmarks"])
        least = 0.9 * measured.most_common(5)[-1][1]  # the fifth and the sixth may take as long
        here = sum(measured[name] >= least for name, _us in profiled.most_common(5))
        tell(top, here, profiler=profiled.most_common(8), per_op=measured.most_common(8))
    flags = {"hot": [], "in graphs": ["--cuda-graph"], "cold": ["--inputs=cold", "--roofline"]}
    for inputs, what in sums.items():
        with telling(what):
            if inputs == "in graphs" and needs_gpu(what):
                continue
            require(whole, top)
            if inputs not in found:
                found[inputs] = benchmark(path, "--per-op", *MIN_TIME, *flags[inputs], codes=(0, 1))
            context, rows = found[inputs]["context"], found[inputs]["benchmarks"]
            details = {
                "sum_us": _sum_us(rows),
                "whole": whole,
                "event_pair_ns": context.get("event_pair_ns"),
                "not_in_graphs": sum(bool(row.get("no_graph")) for row in rows),
                "without_times": sum("error_occurred" in row for row in rows),
                "warnings": context["warnings"][:5],
            }
            tell(what, _sum_us(rows) / whole["us"], **details)
    with telling(waiting):
        if not needs_gpu(waiting):
            require(found.get("hot"), sums["hot"])
            rows = [row for row in found["hot"]["benchmarks"] if "device_waited" in row]
            tell(waiting, len(rows), ops=[row["op"] for row in rows[:10]])
    with telling(roof):
        require(found.get("cold"), sums["cold"])
        shares = [(row.get("share_of_roof", 0.0), row["op"]) for row in found["cold"]["benchmarks"] if "op" in row]
        tell(roof, max(shares)[0], first=sorted(shares)[-5:], peaks=found["cold"]["context"]["peaks"])


def _profiled(work: Training, path: Path) -> Counter[str]:
    """Microseconds in each operator of a step, by torch.profiler."""
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]) as profiler:
        work.step()
        wait()
    with replayfmt.open(path) as reader:
        recorded = {kernel.name for kernel in reader.kernels if kernel is not None}
    return by_recorded(profiler.events(), recorded, "self_device_time_total" if ON_GPU else "self_cpu_time_total")


def by_recorded(events: Iterable[Any], recorded: set[str], taken: str) -> Counter[str]:
    """What a profiler's events took; an operator's time belongs to the outermost one around it that was recorded."""
    found: Counter[str] = Counter()
    for event in events:
        owner, outer = event.name, event
        while outer is not None:
            owner, outer = (outer.name if outer.name in recorded else owner), outer.cpu_parent
        if owner.startswith("aten::"):
            found[owner] += getattr(event, taken)
    return found


def _whole(path: Path, profiled: Counter[str]) -> dict[str, Any]:
    """The device time of the whole in microseconds, without gaps: as one graph, or else what a profiler adds up."""
    by_profiler = {"us": profiled.total(), "from": "torch.profiler's times of operators, added up"}
    if not ON_GPU:
        with replayfmt.Plan(path) as plan:
            plan.execute()
            timer = Timer()
            plan.execute(timer=timer)
            return {"us": timer.wall_ms * 1e3, "from": "a replay on the host"}
    row = replayfmt.benchmark(path, cuda_graph=True, min_time="10x", verify="none").rows[0]
    if not row["graph"]:
        return by_profiler | {"no_graph": row["no_graph"]}
    return {"us": row["real_time"] / 1e3, "from": "the replay as one graph", "profiler_us": profiled.total()}


# -------------------------------------------------------------------------------------------------------------- probes

N, BLOCK, SIDE = 1 << 16, 1024, 64
# Bytes that each of the kernels moves, and its blocks.
MOVED = {"relu": 2 * 4 * N, "add": 3 * 4 * N, "matmul": SIDE * SIDE * (2 + 2 + 4)}
WIDEST = 16  # bytes of an access
BLOCKS = {"relu": N // BLOCK, "add": N // BLOCK, "matmul": 1}


def probes() -> None:
    what = {
        (probe, kernel): f"probe {probe} on {kernel}: same results, records as calculated"
        for kernel in PROBED
        for probe in PROBES
    }
    if needs_gpu(*what.values()):
        return
    path = WORK / "probed.opreplay"
    with telling(*what.values()):
        _capture_kernels(path)
        for (probe, kernel), name in what.items():
            with telling(name):
                _probe(path, probe, kernel, name)


def _capture_kernels(path: Path) -> None:
    import triton_kernels as kernels

    x, y, out = (torch.randn(N, device="cuda") for _ in range(3))
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.float16) for _ in range(2))
    product = torch.zeros(SIDE, SIDE, device="cuda")
    with replayfmt.capture(path, force=True):
        kernels.relu[(N // BLOCK,)](x, out, N, BLOCK=BLOCK)
        kernels.add[(N // BLOCK,)](x, y, out, N, BLOCK=BLOCK)
        kernels.matmul[(1,)](a, b, product, SIDE, BLOCK=SIDE)


def bytes_between(addresses: list[int]) -> int:
    """The bytes of the tensors that accesses cover without a hole: each access ends where the next address begins; the
    last one before a hole is as wide as the one before it."""
    distinct, found, width = sorted(set(addresses)), 0, WIDEST
    for address, following in itertools.pairwise([*distinct, 1 << 64]):
        if following - address <= WIDEST:
            width = following - address
        found += width
    return found


def _probe(path: Path, probe: str, kernel: str, what: str) -> None:
    import numpy as np

    from replayfmt.probes.definitions import find_probe
    from replayfmt.probes.recordings import ProbeRecording
    from replayfmt.probing import CudaDevice, collect, plan_probe

    definition = find_probe(probe)
    with replayfmt.Plan(path, keep_going=True, allow_code=True) as plan:
        planned = plan_probe(plan, f"triton::{kernel}", definition)
        folder = WORK / f"{probe}_{kernel}"
        (launch,) = collect(plan, planned, CudaDevice(torch.device("cuda", 0)), folder, force=True)
    if launch.recording is None:
        tell(what, 0, outcome=launch.outcome, why=launch.why)
        return
    saved = np.asarray(ProbeRecording.open(launch.recording).section(0).records(definition.layout))
    if probe == "gmem_bytes":
        counted, expected = int(saved["sync_bytes"].sum() + saved["async_bytes"].sum()), MOVED[kernel]
    elif probe == "block_sched":
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        plausible = (saved["elapsed"] > 0).all() and saved["sm"].max() < processors
        counted, expected = len(saved) if plausible else -1, BLOCKS[kernel]
    else:
        counted, expected = bytes_between(saved["address"].ravel().tolist()), MOVED[kernel]
    times = {"original_ms": launch.times.original_ms, "probed_ms": launch.times.kernel_ms, "records": launch.records}
    right = launch.outcome == "bitwise" and counted == expected and len(saved) > 0
    tell(what, right, outcome=launch.outcome, counted=counted, expected=expected, **times)


# -------------------------------------------------------------------------------------------------------------- energy


def energy() -> None:
    """Two different operators, one bound by arithmetic and one by memory: each takes seconds to measure."""
    counter, total = "energy: counter / integral of power", "energy: sum of the kernels / whole"
    with telling(counter, total, share=1):
        path, report = WORK / "energy.opreplay", WORK / "energy.json"
        torch.manual_seed(0)
        width = 4096 if ON_GPU else 64
        x = torch.randn(width, width, device=DEVICE, dtype=torch.bfloat16)
        weight = torch.randn_like(x) / (2 * width**0.5)

        def program() -> torch.Tensor:
            y = x
            for _ in range(20):
                y = x + y @ weight
            return y

        program()
        captured(path, program, digests="none")
        flags = ["--energy", f"--energy-source={'gpu' if ON_GPU else 'cpu'}", "--power-averaging=4"]
        tool("benchmark", *flags, f"--energy-out={report}", "--force", path)
        content = json.loads(report.read_text())
        whole, compared = content["whole_model"], content["comparison"]
        if whole["joules"] and whole["joules_from_power"]:
            tell(counter, whole["joules"] / whole["joules_from_power"], whole=whole)
        else:
            tell(counter, None, reason=whole["reason"] or "there is no counter, or no power beside it", whole=whole)
        ratio, reason = compared["ratio"], compared["reason"] or (None if ON_GPU else NEEDS_GPU)
        details = {"comparison": compared, "idle": content["idle"], "warnings": content["warnings"][:5]}
        tell(total, ratio, **details, **({} if ratio is not None else {"reason": reason}))
