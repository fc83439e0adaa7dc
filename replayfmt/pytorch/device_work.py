"""Work of devices that a program's own stream does not wait for."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch


def time_left(devices: Sequence[torch.device]) -> int:
    """Nanoseconds for which devices work on, on whatever stream, beyond what waiting for them takes anyway. They are
    idle then."""
    stamps = [time.perf_counter_ns()]
    for _ in range(2):
        for device in devices:
            torch.accelerator.synchronize(device)
        stamps.append(time.perf_counter_ns())
    begun, done, asked = stamps
    return max(0, (done - begun) - (asked - done))
