"""opreplay-probe run: a probe on the launches of a captured kernel. Imports torch once it runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from replayfmt.errors import ReplayMismatch, UsageError
from replayfmt.probes.definitions import find_probe
from replayfmt.probes.tables import plain, shown

from .command import emit, reader_may_leave, say

if TYPE_CHECKING:
    from replayfmt.probing import ProbedLaunch, ProbePlan
    from replayfmt.replay.plan import Plan


def run_probe(
    words: tuple[str, ...],
    form: str,
    output: str | None,
    force: bool,
    *,
    probe: str | None,
    kernel: str | None,
    launches: int | None,
    most_bytes: int | None,
    device: tuple[str, ...],
    allow_code: bool,
    remaps: Sequence[str],
) -> None:
    """Print the plan, run it, print what came of each launch. Raises ReplayMismatch at the end if a probe changed a
    result, or a kernel does not give the same results twice."""
    if len(words) != 1 or probe is None or output is None:
        raise UsageError("run: expected CAPTURE, --tool=PROBE and -o DIR")
    definition = find_probe(probe)
    from replayfmt.probing import DEFAULT_MOST_BYTES, collect, plan_probe
    from replayfmt.replay.plan import Plan

    with Plan(words[0], list(device), keep_going=True, allow_code=allow_code, file_remaps=remaps) as plan:
        most = DEFAULT_MOST_BYTES if most_bytes is None else most_bytes
        target = _device(plan)
        planned = plan_probe(plan, kernel, definition, at_most=launches, most_bytes=most)
        _print_plan(planned, form)
        done = collect(plan, planned, target, output, force=force, on_launch=lambda each: _print_launch(each, form))
    wrong = [each for each in done if each.outcome != "bitwise"]
    if wrong:
        first = wrong[0]
        raise ReplayMismatch(
            f"{len(wrong)} of {len(done)} launches have no recording; ordinal {first.ordinal}: {first.outcome}: "
            f"{first.why}"
        )


def _device(plan: Plan) -> Any:
    from replayfmt.probing import CudaDevice

    found = [device for device in plan.devices if device.type == "cuda"]
    if len(found) != 1:
        here = ", ".join(map(str, plan.devices)) or "no device"
        raise UsageError(f"run: a probe runs on one CUDA device, this replay is on {here}; see --device")
    return CudaDevice(found[0])


def _print_plan(planned: ProbePlan, form: str) -> None:
    table = planned.made.table
    row = dict(zip(table.columns, table.rows[0], strict=True))
    row |= {"needed_bytes": max((planned.bytes_of(each.shape) for each in planned.launches), key=_known)}
    row |= {"launches": len(planned.launches), "most_bytes": planned.most_bytes}
    with reader_may_leave():
        if form == "json":
            emit(json.dumps({"type": "plan", **{name: plain(cell) for name, cell in row.items()}}))
        else:
            for name, cell in row.items():
                say(f"{name:26} {shown(cell)}")


def _known(value: object) -> int:
    return value if isinstance(value, int) else -1


def _print_launch(launch: ProbedLaunch, form: str) -> None:
    times = launch.times
    with reader_may_leave():
        if form == "json":
            row = {
                "type": "launch",
                "ordinal": launch.ordinal,
                "grid": list(launch.shape.grid),
                "block": list(launch.shape.block),
                "outcome": launch.outcome,
                "why": launch.why or None,
                "records": launch.records,
                "bytes": launch.nbytes,
                "original_ms": times.original_ms,
                "probed_ms": None if launch.recording is None else times.kernel_ms,
                "recording": None if launch.recording is None else str(launch.recording),
            }
            emit(json.dumps(row))
            return
        grid = "×".join(map(str, launch.shape.grid))
        if launch.recording is None:
            say(f"ordinal {launch.ordinal}: grid {grid}: {launch.outcome}: {launch.why}")
            return
        say(
            f"ordinal {launch.ordinal}: grid {grid}: {launch.records:,} records, {launch.nbytes:,} bytes, "
            f"{times.original_ms:.4f} ms, with the probe {times.kernel_ms:.4f} ms; same results; "
            f"written: {launch.recording}"
        )
