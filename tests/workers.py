"""How many processes run the tests at once, and how many threads each of them gives to PyTorch.

`pytest -n auto` (what `make test` does) asks here. Processors and memory are those that this process may use, which in
a container can be fewer than the machine has.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_WORKER_BYTES = 2 << 30  # the highest of a worker and what it starts, with room to spare
_MOST = 8  # each one imports PyTorch and collects all tests for itself
_MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_PROCESSOR_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def processors() -> int:
    """How many processors this process may use at once."""
    affinity = len(os.sched_getaffinity(0))
    try:
        quota, period = _PROCESSOR_QUOTA.read_text().split()
    except (OSError, ValueError):
        return affinity
    return affinity if quota == "max" else max(1, min(affinity, int(quota) // int(period)))


def memory_bytes() -> int:
    """How much memory this process and its children may take together."""
    allowed = [psutil.virtual_memory().available]
    for path in _MEMORY_LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text != "max":
            allowed.append(int(text))
    return min(allowed)


def workers() -> int:
    """One a processor where there is memory for all of them; 0, which is pytest's own process alone, for one."""
    count = min(processors(), memory_bytes() // _WORKER_BYTES, _MOST)
    return count if count > 1 else 0


def threads_of_a_worker(count: int) -> int:
    """How many threads PyTorch may have in each of `count` workers, so that they do not fight for processors."""
    return max(1, processors() // count)
