"""Whether the inputs of measured work are in the caches: --inputs=hot or cold.

Hot: the same buffers each time, so whatever fits into the caches stays there. Cold: before each measured call or
replay a buffer larger than the last-level cache is rewritten, untimed, on every device that takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from replayfmt.pytorch.accelerators import device_module, is_accelerator

from .reports.machine import largest_cache

Inputs = Literal["hot", "cold"]
INPUTS: tuple[Inputs, ...] = ("hot", "cold")
# The buffer is this many times as large as the cache: what is replaced is the cache's choice, not always the oldest.
_TIMES_THE_CACHE = 2
# Where the size of the cache is not known; larger than the last-level caches of most processors.
_UNKNOWN_CACHE_BYTES = 256 << 20
_MIB = 1 << 20


def default_inputs(devices: Sequence[torch.device]) -> Inputs:
    """What isolated ops are measured with unless asked otherwise: cold on accelerators, hot elsewhere."""
    return "cold" if any(map(is_accelerator, devices)) else "hot"


class CacheFlush:
    """Replaces the content of the caches of some devices; the host's are among them only if it is a device."""

    def __init__(self, devices: Sequence[torch.device], root: Path = Path("/")) -> None:
        """Allocates the buffers. `root` is where sys is."""
        self._buffers: list[torch.Tensor] = []
        described = []
        for device in devices:
            if device.type == "meta":
                continue
            cache = _device_cache(device) if is_accelerator(device) else largest_cache(root)
            size = _TIMES_THE_CACHE * cache if cache else _UNKNOWN_CACHE_BYTES
            self._buffers.append(torch.zeros(size, dtype=torch.uint8, device=device))
            of = f"its last-level cache has {cache / _MIB:.4g} MiB" if cache else "the size of its caches is not known"
            described.append(f"{device}: {size / _MIB:.4g} MiB are rewritten before each; {of}")
        self.description = "; ".join(described) or "nothing is rewritten, because no device with a cache takes part"

    def __call__(self) -> None:
        """Read and write every byte of the buffers; on accelerators, issue the work that does."""
        for buffer in self._buffers:
            buffer.add_(1)


def _device_cache(device: torch.device) -> int | None:
    """Bytes of an accelerator's last-level cache; None if PyTorch does not say."""
    properties = getattr(device_module(device.type), "get_device_properties", None)
    size = getattr(properties(device), "L2_cache_size", 0) if properties is not None else 0
    return int(size) or None


def describe_inputs(inputs: Inputs, flush: CacheFlush | None, calls: str) -> str:
    """One line for reports: what the figures hold for. `calls` names what is repeated."""
    if inputs == "hot" or flush is None:
        return f"hot: the same buffers in each of the {calls}, so what fits into the caches stays there"
    return f"cold: {flush.description}"
