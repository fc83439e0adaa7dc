"""Recordings whose answers are known: a simulated scheduler, access patterns of a known stride and reuse."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from replayfmt.probes.recordings import BLOCK_SCHED, DMAT, LaunchShape, Structured


def block_records(
    blocks: Sequence[tuple[int, int, int]], warps: int = 1, warp_lag: int = 0, clock_bits: int = 64
) -> Structured:
    """Records of blocks, each (SM, start, elapsed): warp w of a block starts and ends `warp_lag` × w cycles later than
    warp 0, so that a block lasts from its start for elapsed cycles in all."""
    records = np.zeros((len(blocks), warps, 1), BLOCK_SCHED.dtype)
    span = warp_lag * (warps - 1)
    for number, (sm, start, elapsed) in enumerate(blocks):
        for warp in range(warps):
            records[number, warp, 0] = ((start + warp * warp_lag) % (1 << clock_bits), elapsed - span, sm)
    return records


def waves(sms: int, slots: int, rounds: int, elapsed: int, gap: int, first: int = 1000) -> list[tuple[int, int, int]]:
    """Blocks of a scheduler that fills `slots` slots of each of `sms` SMs `rounds` times: the next block of a slot
    starts `gap` cycles after the one before it ended. Each SM's clock has its own zero."""
    return [
        (sm, first + 10_000 * sm + turn * (elapsed + gap), elapsed)
        for turn in range(rounds)
        for _slot in range(slots)
        for sm in range(sms)
    ]


def shape_of(blocks: int, threads: int = 32, shared_bytes: int = 0) -> LaunchShape:
    return LaunchShape((blocks, 1, 1), (threads, 1, 1), shared_bytes)


def sweep_records(pages: int, sweeps: int, step: int, base: int = 0x7F00_0000_0000) -> Structured:
    """One thread that accesses `pages` pages one after the other, `sweeps` times, an access every `step` cycles."""
    records = np.zeros((1, 1, pages * sweeps), DMAT.dtype)
    records["clock"] = 1 + step * np.arange(pages * sweeps)
    records["address"] = base + (np.arange(pages * sweeps) % pages) * 65536 + 12
    return records


def write_access_map(path: Path, clocks: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> None:
    """Write a `.dmat` file. `clocks`: each clock with pairs of a page's address and its count."""
    pages = sorted({page for _clock, pairs in clocks for page, _count in pairs})
    content = struct.pack("<QQ", len(pages), len(clocks)) + np.array(pages, "<u8").tobytes()
    for clock, pairs in clocks:
        content += struct.pack("<QQ", clock, len(pairs))
        content += b"".join(struct.pack("<QI", page, count) for page, count in pairs)
    path.write_bytes(content)
