"""Caveats: reasons to doubt the figures, printed beside them as torch.utils.benchmark does.

Each caveat is one sentence. Those of a measurement come from its own times; those of a run from the machine and from
what the capture says about where it was made.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch.accelerators import HOST, NOTHING, is_accelerator
from replayfmt.pytorch.environment import cpu_capability, describe_device

from ..gpu_state import gpu_caveats
from ..measure import PATIENCE, Measurement, Run
from ..precision import Precision
from ..statistics import SMALLEST_FOR_INTERVAL, summarize
from .machine import frequency_scaling

# Standard deviation over mean. torch.utils.benchmark warns at the same shares, of the interquartile range.
NOISY = 0.10
VERY_NOISY = 0.25


def measurement_caveats(measurement: Measurement, precision: Precision | None = None) -> list[str]:
    """Reasons in one region's own times to doubt them, among them that they miss the `precision` asked for."""
    found = []
    if measurement.in_graph is not None and measurement.in_graph.reason:
        found.append(f"measured op by op, because it could not be put into a graph: {measurement.in_graph.reason}")
    half_width = measurement.reported[0].statistics().half_width
    if precision is not None and half_width is not None and half_width > precision.share:
        found.append(
            f"the median is known to +-{half_width:.2g} of itself, not to the {precision.share:.2g} asked for, after "
            f"{precision.cap_s:g} s: raise --benchmark-max-time, or stop other programs"
        )
    for index, sample in enumerate(measurement.reported):
        interval = sample.statistics().interval
        if interval is not None and interval.independent < len(sample.real):
            found.append(
                f"repetition {index + 1}: successive times depend on each other (heat, other programs, modes that "
                f"last): {len(sample.real):,} of them tell as much as {interval.independent:.0f} independent ones "
                "would; the interval allows for it"
            )
    iterations = len(measurement.reported[0].real)
    if iterations < SMALLEST_FOR_INTERVAL:
        found.append(
            f"only {iterations} iteration{'s' if iterations > 1 else ''}: too few to tell how far the median "
            f"can be trusted; give --benchmark-min-time={SMALLEST_FOR_INTERVAL}x or more"
        )
    for index, sample in enumerate(measurement.reported):
        variation = sample.statistics().variation
        if variation is not None and variation > NOISY:
            cause = (
                "suggests strong interference from other work"
                if variation > VERY_NOISY
                else "could be other work on the machine"
            )
            found.append(
                f"repetition {index + 1}: iterations vary by {variation:.0%} (standard deviation over mean), "
                f"which {cause}"
            )
    if len(measurement.reported) > 1:
        variation = summarize([float(sample.real.mean()) for sample in measurement.reported]).variation
        if variation is not None and variation > NOISY:
            found.append(f"repetitions vary by {variation:.0%}: conditions on the machine changed")
    return found


def run_caveats(run: Run, reader: CaptureReader, devices: list[torch.device], root: Path = Path("/")) -> list[str]:
    """Reasons in the machine and the capture to doubt all figures of a run. `root` is where proc and sys are."""
    found = []
    if run.before is None or run.before.verification.mode == "none":
        why = "--verify=none" if run.before is None else "; ".join(run.before.verification.reasons)
        found.append(f"nothing was verified ({why}): the timed work may differ from the captured work")
    if run.cut_short is not None:
        found.append(
            f"stopped after {run.cut_short:.3g} s, {PATIENCE} times what --benchmark-min-time asks for, with "
            "fewer timed seconds than that: restoring state between replays, which is not timed, takes long"
        )
    if frequency_scaling(root):
        found.append("CPU frequency scaling is on, which makes real times noisy: set the performance governor")
    if torch.version.debug:
        found.append("this torch is a debug build: its times mean little")
    found += busy_machine()
    processors = os.cpu_count()
    threads = reader.session.settings.get("num_threads")
    if processors and isinstance(threads, int) and threads > processors:
        found.append(f"the capture's {threads} threads share {processors} processors here")
    if not reader.complete:
        found.append(f"the capture is incomplete: {reader.incomplete_reason}")
    return [*found, *gpu_caveats(run.gpus), *_differences(reader, devices)]


def busy_machine() -> list[str]:
    """That more wanted to run here than there are processors, in the last minute."""
    load, processors = os.getloadavg()[0], os.cpu_count()
    if not processors or load <= processors:
        return []
    return [f"the machine was busy: load average {load:.1f} with {processors} processors"]


def _differences(reader: CaptureReader, devices: list[torch.device]) -> list[str]:
    """How this machine and setup differ from the capture's: its own times cannot be compared with these."""
    session = reader.session
    here = describe_device(torch.device("cpu"))
    pairs: list[tuple[str, Any, Any]] = [
        ("torch", session.torch_version, torch.__version__),
        ("processor", session.cpu, here.name or None),
        ("CPU capability", session.cpu_capability, cpu_capability()),
    ]
    captured = [device for device in reader.devices[1:] if device is not None]
    names = [device.name or str(device) for device in captured if device.kind not in (HOST, NOTHING)]
    names_here = [describe_device(device).name or str(device) for device in devices if is_accelerator(device)]
    if names or names_here:
        pairs.append(("accelerator", ", ".join(names) or "none", ", ".join(names_here) or "none"))
    return [
        f"captured with another {what} ({then}, here {now}): its captured times cannot be compared with these"
        for what, then, now in pairs
        if then is not None and now is not None and then != now
    ]
