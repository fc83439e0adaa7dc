"""The section on what ran when: as captured, as replayed, and as isolated calls take. Each is a picture with an axis of
its own: a capture may take a hundred times as long as its replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from .isolated import IsolatedTimes
from .kernel_sections import KernelFigures, Section
from .lanes import Lane, Names, captured_lanes, isolated_lanes, replayed_lanes
from .ops import CapturedOps
from .pictures import CATEGORIES, MissingPicture, Picture, TimelinePicture
from .replayed_trace import ReplayedTrace
from .timeline import timeline_of

_ABOUT = [
    "Captured: ops as they ran while the program was recorded, with the recorder's own work between them. Replayed: "
    "one replay under PyTorch's profiler, which adds its own work to each op; on devices, from when their work began. "
    "Isolated: not a run, but the median time of each call in a loop of its own, one after the other in capture order; "
    "nothing overlaps in it, and there are no gaps. Each has its own axis of time.",
    "Drag to zoom, double-click to see everything, click a bar for its call site. Where there is no room for each op, "
    "neighbours share a bar, which says how many they are.",
]


def timeline_section(
    figures: KernelFigures, ops: CapturedOps, site_of: np.ndarray, replayed: ReplayedTrace | None
) -> Section:
    """`site_of` has the number of each op's call site. Raises UsageError for a trace in which nothing was replayed."""
    names, notes = Names(), []
    captured = captured_lanes(ops, site_of, figures.reader, names)
    if captured and figures.clock == "device":
        notes.append(
            "In the captured lanes of devices a bar begins when the host issued the op, and is as long as the device "
            "took: the capture does not hold when the device began."
        )
    dropped = int(((ops.duration_ns < 0) & ((ops.device_ns < 0) | (ops.device == 0))).sum())
    if captured and dropped:
        notes.append(f"{dropped:,} ops have no captured time, and are not in the picture of the capture.")
    traced = [] if replayed is None else replayed_lanes(replayed, figures.reader, names)
    if replayed is not None and not replayed.names_its_capture:
        notes.append("The replay's trace does not say of which capture it is.")
    isolated: list[Lane] = []
    times = IsolatedTimes(figures.measured)
    if times:
        isolated, without = isolated_lanes(ops, site_of, figures.reader, names, times)
        if without:
            notes.append(f"{without:,} ops have no isolated time, and are not in the picture of isolated calls.")
    command = figures.command("run --device-profiling-mode=host-ops --device-profiling-output=replay.json.gz")
    parts = (
        ("timeline", "Timeline, captured", captured, figures.no_captured),
        (
            "timeline-replayed",
            "Timeline, replayed",
            traced,
            f"no trace of a replay was given. Record one with {command}, then add --replayed=replay.json.gz",
        ),
        ("timeline-isolated", "Timeline, isolated calls", isolated, figures.no_calls),
    )
    coloured = _most_time((*captured, *traced, *isolated))
    pictures: list[Picture] = []
    for name, title, lanes, missing in parts:
        if not lanes:
            pictures.append(MissingPicture(name, title, missing))
            continue
        timeline = timeline_of(lanes, names)
        pictures.append(TimelinePicture(name, title, timeline, coloured))
        if timeline.lanes_left_out:
            notes.append(f"{title}: {timeline.lanes_left_out:,} more lanes of threads and streams are left out.")
    return Section("timeline", "Timeline", _ABOUT, pictures, [], notes)


def _most_time(lanes: Sequence[Lane]) -> list[int]:
    """The names with most time in any picture, as many as there are colours."""
    taken: Counter[int] = Counter()
    for lane in lanes:
        if not lane.scopes:
            found, place = np.unique(lane.name, return_inverse=True)
            sums = np.bincount(place.reshape(-1), weights=lane.taken)
            taken.update(dict(zip(found.tolist(), sums.tolist(), strict=True)))
    return [name for name, total in taken.most_common(len(CATEGORIES)) if total > 0]
