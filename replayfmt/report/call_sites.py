"""The ops of a capture added up: by call site, which is a signature in a scope, and by kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .ops import CapturedOps

Clock = Literal["device", "host"]


@dataclass(frozen=True)
class CapturedTime:
    """Time that calls took during capture: the sum over those with a known time, which `calls` counts. None: of no call
    is it known."""

    total_ns: float | None
    calls: int

    @property
    def mean_ns(self) -> float | None:
        return None if self.total_ns is None else self.total_ns / self.calls


@dataclass(frozen=True)
class CapturedCallSite:
    """Calls of one signature in one scope. `number` counts sites from 1, in order of first call; `kernel` and `scope`
    are ids of the capture. `first` is the ordinal of the first of the calls."""

    number: int
    signature: str
    kernel: int
    scope: int
    calls: int
    first: int
    host: CapturedTime
    device: CapturedTime


@dataclass(frozen=True)
class KernelTotals:
    """All calls of a kernel."""

    kernel: int
    calls: int
    signatures: int
    host: CapturedTime
    device: CapturedTime


def clock_of(ops: CapturedOps) -> Clock | None:
    """Which captured times are compared with each other: the devices', where any is known, else the host's. None: the
    capture has no times."""
    if (ops.device_ns >= 0).any():
        return "device"
    return "host" if (ops.duration_ns >= 0).any() else None


def call_sites(ops: CapturedOps) -> tuple[list[CapturedCallSite], np.ndarray]:
    """In order of first call; and for each op the number of its site."""
    scopes = int(ops.scope.max(initial=0)) + 1
    keys, first, group = np.unique(ops.signature * scopes + ops.scope, return_index=True, return_inverse=True)
    sums = _Sums(ops, group.reshape(-1), len(keys))
    order = np.argsort(first, kind="stable")
    numbers = np.empty(len(keys), np.int64)
    numbers[order] = np.arange(1, len(keys) + 1)
    sites = [
        CapturedCallSite(
            number,
            ops.signatures[int(ops.signature[row])],
            int(ops.kernel[row]),
            int(ops.scope[row]),
            sums.calls[place],
            int(ops.ordinal[row]),
            sums.host[place],
            sums.device[place],
        )
        for number, (place, row) in enumerate(((place, int(first[place])) for place in order.tolist()), start=1)
    ]
    return sites, numbers[group.reshape(-1)]


def kernel_totals(ops: CapturedOps) -> list[KernelTotals]:
    """In order of the kernels' ids; only those that are called."""
    kernels, group = np.unique(ops.kernel, return_inverse=True)
    group = group.reshape(-1)
    sums = _Sums(ops, group, len(kernels))
    texts = len(ops.signatures) + 1
    pairs = np.unique(group * texts + ops.signature) // texts
    signatures = np.bincount(pairs, minlength=len(kernels)).tolist()
    return [
        KernelTotals(kernel, sums.calls[place], signatures[place], sums.host[place], sums.device[place])
        for place, kernel in enumerate(kernels.tolist())
    ]


class _Sums:
    """Calls and times by group. A record that stands for many calls has their mean time."""

    def __init__(self, ops: CapturedOps, group: np.ndarray, groups: int) -> None:
        self.calls = _total(group, ops.calls, groups).astype(np.int64).tolist()
        self.host = _times(group, ops.duration_ns, ops.calls, groups)
        self.device = _times(group, ops.device_ns, ops.calls, groups)


def _total(group: np.ndarray, values: np.ndarray, groups: int) -> np.ndarray:
    return np.bincount(group, weights=values, minlength=groups)


def _times(group: np.ndarray, times: np.ndarray, calls: np.ndarray, groups: int) -> list[CapturedTime]:
    known = times >= 0
    counts = _total(group[known], calls[known], groups).astype(np.int64).tolist()
    totals = _total(group[known], times[known].astype(np.float64) * calls[known], groups).tolist()
    return [CapturedTime(total if count else None, count) for total, count in zip(totals, counts, strict=True)]
