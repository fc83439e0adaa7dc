"""--cuda-graph: work launched as one graph of its device, without the gaps in which that waits for the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replayfmt.errors import UsageError
from replayfmt.pytorch.accelerators import is_accelerator
from replayfmt.pytorch.device_graphs import NoGraphs, new_graph

FLAG = "--cuda-graph"


def require_graphs(devices: Sequence[torch.device]) -> torch.device:
    """The one accelerator that a replay works on. Raises UsageError if there is none, or if it has no graphs."""
    found = [device for device in devices if is_accelerator(device)]
    if not found:
        works_on = ", ".join(map(str, devices)) or "no device"
        raise UsageError(
            f"{FLAG} needs a device that has graphs, such as a CUDA device, and the replay works on {works_on}: "
            "leave it out, or replay on one with --device"
        )
    if len(found) > 1:
        raise UsageError(f"{FLAG} measures one device, and the replay works on {', '.join(map(str, found))}")
    try:
        new_graph(found[0])
    except (NoGraphs, RuntimeError) as problem:
        raise UsageError(f"{FLAG}: {problem}: leave it out") from problem
    return found[0]
