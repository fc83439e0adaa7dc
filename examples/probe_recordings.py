"""Recordings of probes as a GPU would give them, from a simulated one: what `opreplay-probe report` evaluates.

    python examples/probe_recordings.py recordings

writes the folders of runs of made-up kernels: how blocks were scheduled, which memory was accessed, what probes cost.
Figures that look measured are drawn from a seeded generator.
"""

from __future__ import annotations

import heapq
import sys
from pathlib import Path

import numpy as np

from replayfmt.probes.costs import LAYOUTS
from replayfmt.probes.recordings import BLOCK_SCHED, DMAT, LaunchShape, write_recording

SMS, SLOTS = 132, 16


def scheduled(blocks: int, warps: int, waiting: float, seed: int) -> np.ndarray:
    """`block_sched` records of blocks that are given, in order, to the slot that is free first. Each SM's clock has its
    own zero."""
    random = np.random.default_rng(seed)
    records = np.zeros((blocks, warps, 1), BLOCK_SCHED.dtype)
    free = [(int(random.integers(0, 400)), sm) for sm in range(SMS) for _slot in range(SLOTS)]
    heapq.heapify(free)
    for block in range(blocks):
        start, sm = heapq.heappop(free)
        lengths = 2000 + random.integers(0, 500, warps) + (4000 if random.random() < 0.001 else 0)
        records["start"][block, :, 0] = 1_000_000 * (sm + 1) + start
        records["elapsed"][block, :, 0] = lengths
        records["sm"][block] = sm
        heapq.heappush(free, (start + int(lengths.max()) + 60 + int(random.exponential(waiting)), sm))
    return records


def write_fill(folder: Path) -> None:
    """A 4096 × 4096 fill: 32,768 blocks of four warps on 132 SMs; alone, and beside other work."""
    launch = LaunchShape((32768, 1, 1), (128, 1, 1))
    for name, waiting, seed in (("exclusive", 80.0, 1), ("shared", 900.0, 2)):
        result = folder / name / "result"
        result.mkdir(parents=True, exist_ok=True)
        write_recording(result / "0.500000.bin", launch, [scheduled(32768, 4, waiting, seed)], force=True)


def write_attention(folder: Path) -> None:
    """Tiles of queries, each of which goes through all keys and values: 64 blocks of one thread that records."""
    tensors = [("q", 64), ("k", 48), ("v", 48), ("out", 64)]  # pages of 64 KiB each
    begin, addresses = 0x7F10_0000_0000, {}
    for name, pages in tensors:
        addresses[name] = begin
        begin += (pages + 16) << 16
    random = np.random.default_rng(3)
    records = np.zeros((64, 1, 2 + 2 * 48), DMAT.dtype)
    for block in range(64):
        clock = 200 + block // 8 * 9000 + int(random.integers(0, 300))
        accesses = [("q", block), *((name, page) for page in range(48) for name in "kv"), ("out", block)]
        for place, (name, page) in enumerate(accesses):
            clock += 60 + int(random.integers(0, 50))
            records[block, 0, place] = (clock, addresses[name] + (page << 16) + int(random.integers(0, 1 << 16)))
    result = folder / "attention" / "result"
    result.mkdir(parents=True, exist_ok=True)
    write_recording(result / "0.750000.bin", LaunchShape((64, 1, 1), (1, 1, 1)), [records], force=True)
    lines = [
        f"[call]  {number}  torch.Size([{pages * 512}, 64])  {pages << 16}  {addresses[name]}  {name}  forward  a.py:9"
        for number, (name, pages) in enumerate(tensors)
    ]
    (folder / "attention" / "tensor.trace").write_text("\n".join(lines) + "\n")


def write_counts(folder: Path) -> None:
    """A product of matrices in tiles, as threads count it: every fourth block, at the edge, has half of the work."""
    random = np.random.default_rng(5)
    turns = np.where(np.arange(256) % 4 == 3, 16, 32)[:, None, None]
    for kind, (layout, *_neutrinos) in LAYOUTS.items():
        records = np.zeros((256, 128, 32 if kind == "progress" else 1), layout.dtype)
        if kind == "progress":
            clocks = 500 + np.cumsum(300 + random.integers(0, 80, records.shape), axis=2)
            records["clock"] = np.where(np.arange(32) < turns, clocks, 0)
        elif kind == "gmem_bytes":
            records["sync_bytes"], records["async_bytes"] = 64, 32 * turns
        else:
            records["count"] = 8 * turns
        (folder / "counts").mkdir(parents=True, exist_ok=True)
        write_recording(folder / "counts" / f"{kind}.bin", LaunchShape((16, 16, 1), (128, 1, 1)), [records], force=True)


KERNELS = ("fill_kernel", "softmax_kernel", "matmul_kernel", "attention_kernel")
PROBES = {"block_sched": (16, "warp", 1.06), "gmem_bytes": (8, "thread", 1.35), "dmat": (512, "thread", 5.5)}


def write_costs(folder: Path) -> None:
    """Event logs, what ptxas printed, and what programs printed, of three probes on four kernels."""
    random = np.random.default_rng(4)
    for probe, (row_bytes, level, slowdown) in PROBES.items():
        events, run = ["[pid] 1"], folder / "costs" / probe
        for number, kernel in enumerate(KERNELS):
            name = f"{number}_{'0123456789abcdef'[number] * 40}"
            blocks, threads = 1 << (15 - number), 128 << (number % 2)
            needed = blocks * threads * row_bytes // (32 if level == "warp" else 1)
            shape = f"[exec] grid {blocks} 1 1 block {threads} 1 1 shared 0"
            events += [
                f"[probe] rename {kernel} {name}",
                f"[probe] finish {hex(4096 + number)} name {kernel} n_param 3",
            ]
            for _repeat in range(10):
                original = 0.02 * (number + 1) * random.normal(1, 0.01)
                probed = original * slowdown * random.normal(1, 0.04)
                events += [f"[exec] funcmap-find {hex(4096 + number)} success", shape]
                events += [f"[exec] probe-mem {needed} (bytes)"]
                events += [
                    f"[benchmark] prologue 0.110000 kernel {probed:f} epilogue 0.210000 original {original:f} "
                    f"impact {probed / original:f} 0"
                ]
            (run / "kernel" / name).mkdir(parents=True, exist_ok=True)
            registers = 24 + 22 * number
            (run / "kernel" / name / "process.log").write_text(
                "".join(
                    f"ptxas -arch=sm_90 -m64 --verbose {file}.ptx -o {file}.bin\n"
                    f"ptxas info    : Compiling entry function '{kernel}' for 'sm_90'\n"
                    f"    0 bytes stack frame, {spilled} bytes spill stores, {spilled} bytes spill loads\n"
                    f"ptxas info    : Used {used} registers, 380 bytes cmem[0]\n"
                    for file, used, spilled in (
                        (
                            "probed",
                            registers + (12 if probe == "dmat" else 6),
                            8 if probe == "dmat" and number == 3 else 0,
                        ),
                        ("pruned", registers, 0),
                    )
                )
            )
        (run / "event.log").write_text("\n".join(events) + "\n")
        (run / "stdout.log").write_text(f"max memory: {3 + len(probe)} GiB\n")


LATENCY = """\
probe,original,ncu,neutrino,prologue,kernel,epilogue
block_sched,1.00,38.2,1.61,0.22,1.06,0.33
gmem_bytes,1.00,41.7,2.10,0.31,1.35,0.44
dmat,1.00,,9.40,1.70,5.50,2.20
"""


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "recordings")
    write_fill(folder)
    write_attention(folder)
    write_counts(folder)
    write_costs(folder)
    (folder / "latency.csv").write_text(LATENCY)
    print(f"{folder}: {sum(path.is_file() for path in folder.rglob('*'))} files")


if __name__ == "__main__":
    main()
