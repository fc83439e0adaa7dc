"""What a device can do at most, for rooflines: floating-point operations and bytes a second.

Given by flags, or measured: the rate of a large matrix product of the dtype, and that of a large copy (each byte is
read and written). Measured once for a device, dtype, PyTorch and number of threads, and kept in the user's cache.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from replayfmt.errors import UsageError
from replayfmt.pytorch.accelerators import is_accelerator
from replayfmt.pytorch.environment import describe_device

from .meters.meter import Clock

_RATE = re.compile(r"\s*(\d+\.?\d*|\.\d+)(?:[eE]\+?(\d{1,2}))?([kMGTP]?)\s*", re.ASCII)
_SCALE = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
# Large enough to keep the whole device busy, small enough to take milliseconds.
_WIDTH = {True: 8192, False: 1024}  # of the matrices: on accelerators, and on the host
_COPIED_BYTES = {True: 1 << 30, False: 1 << 28}
_AT_LEAST_NS = 0.2e9
_AT_LEAST_RUNS = 3


def parse_rate(flag: str, text: str) -> float:
    """The number that `19.5T` or `2e12` is. Raises UsageError for anything else and for 0."""
    matched = _RATE.fullmatch(text)
    value = float(matched[1]) * 10.0 ** int(matched[2] or 0) * _SCALE[matched[3]] if matched else 0.0
    if not 0 < value < math.inf:
        raise UsageError(f"{flag}={text}: expected a number a second, more than 0, for instance 19.5T or 2e12")
    return value


@dataclass(frozen=True)
class Peak:
    """A rate, and where it comes from."""

    per_second: float
    source: str


@dataclass
class Peaks:
    """The peaks of one device; of the host, with `threads`. `flops` and `bandwidth` are given, None to measure; `cache`
    is the file of what was measured before."""

    device: torch.device
    threads: int
    flops: float | None = None
    bandwidth: float | None = None
    cache: Path = field(default_factory=lambda: cache_file())
    clock: Clock = field(default_factory=Clock)

    def of_flops(self, dtype: torch.dtype) -> Peak | None:
        """Operations a second with a dtype; None if the device cannot multiply matrices of it."""
        if self.flops is not None:
            return Peak(self.flops, "given")
        return self._known(f"{dtype}", lambda: self._matrix_product(dtype))

    def of_bandwidth(self) -> Peak | None:
        """Bytes a second, read and written together."""
        if self.bandwidth is not None:
            return Peak(self.bandwidth, "given")
        return self._known("bandwidth", self._copy)

    def _known(self, what: str, measure: Callable[[], float | None]) -> Peak | None:
        name = describe_device(self.device).name or str(self.device)
        threads = "" if is_accelerator(self.device) else f", {self.threads} threads"
        key = f"{name}, torch {torch.__version__}{threads}, {what}"
        kept = _read(self.cache)
        if key not in kept:
            before = torch.get_num_threads()
            torch.set_num_threads(self.threads)
            try:
                found = measure()
            finally:
                torch.set_num_threads(before)
            if found is None:
                return None
            kept = {**_read(self.cache), key: found}
            _write(self.cache, kept)
        return Peak(kept[key], "measured")

    def _matrix_product(self, dtype: torch.dtype) -> float | None:
        width = _WIDTH[is_accelerator(self.device)]
        try:
            left = torch.ones(width, width, dtype=dtype, device=self.device)
            right, out = torch.ones_like(left), torch.empty_like(left)
            torch.mm(left, right, out=out)
        except RuntimeError:
            return None
        return 2 * width**3 / self._fastest(lambda: torch.mm(left, right, out=out))

    def _copy(self) -> float | None:
        size = _COPIED_BYTES[is_accelerator(self.device)]
        source = torch.ones(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size / self._fastest(lambda: target.copy_(source))

    def _fastest(self, run: Callable[[], object]) -> float:
        """Seconds of the fastest of several runs: a peak is what the device can do."""
        run()
        best, total, runs = float("inf"), 0, 0
        while total < _AT_LEAST_NS or runs < _AT_LEAST_RUNS:
            self._synchronize()
            began = self.clock.real()
            run()
            self._synchronize()
            taken = self.clock.real() - began
            best, total, runs = min(best, taken), total + taken, runs + 1
        return best / 1e9

    def _synchronize(self) -> None:
        if is_accelerator(self.device):
            torch.accelerator.synchronize(self.device)


def cache_file() -> Path:
    """Where measured peaks are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "opreplay" / "peaks.json"


def _read(path: Path) -> dict[str, float]:
    """What was measured before; a file that cannot be read, or is damaged, holds nothing."""
    try:
        kept: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    items = kept.items() if isinstance(kept, Mapping) else ()
    return {str(key): float(value) for key, value in items if _is_rate(value)}


def _is_rate(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value <= sys.float_info.max


def _write(path: Path, kept: Mapping[str, float]) -> None:
    """Keep them for later. Where the cache cannot be written, they are measured again next time."""
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
