"""Align two captures of a million ops: one training step again and again, the second time with one op more in it. And
run each op of such a step in two ways, against a verified replay.

Time and memory are those of reading both files, aligning them and finding where they part. They hold no digests, so
that nothing but structure tells what belongs together.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from time import perf_counter

import large_capture
import tiny_gpt2
import torch
from measuring import arguments, forget_peak, progress, resident_bytes, row, scratch

import replayfmt
from replayfmt.compare import isolate
from replayfmt.compare.alignment import align
from replayfmt.compare.divergence import diverge
from replayfmt.compare.trace import read_trace
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture


def isolating(path: Path) -> None:
    """The times of whole runs, plans included, in alternation."""
    verified, isolated = [], []
    for _ in range(5):
        begin = perf_counter()
        replayfmt.run(path)
        between = perf_counter()
        found = isolate(path, settings=["mkldnn=off"])
        verified.append(between - begin)
        isolated.append(perf_counter() - between)
    ratio = median(isolated) / median(verified)
    row("each op in two ways: time / a verified replay's", ratio, "×", at_most=3, ops=found.compared)


def main() -> None:
    ops = 20_000 if arguments(__doc__).quick else 1_000_000
    torch.set_num_threads(1)
    network = tiny_gpt2.model().train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, foreach=False)
    tokens = torch.randint(256, (1, 16))

    def step(changed: bool) -> None:
        optimizer.zero_grad()
        logits = network(input_ids=tokens, use_cache=False).logits
        (logits.mul(1.5) if changed else logits).logsumexp(-1).mean().backward()
        optimizer.step()

    step(False)
    with scratch() as directory:
        with replayfmt.capture(directory / "step.opreplay"):
            for _ in range(3):
                step(False)
        isolating(directory / "step.opreplay")
        paths = []
        for name, changed in (("a", False), ("b", True)):
            short, path = directory / f"short-{name}.opreplay", directory / f"{name}.opreplay"
            with replayfmt.capture(short, payload="none"), replayfmt.scope("execute"):
                step(changed)
            with open_capture(short) as reader:
                records = ops * reader.record_count // reader.summary.records[RecordKind.op]
            large_capture.write(short, path, records)
            paths.append(path)
        forget_peak()
        before, begin = resident_bytes(), perf_counter()
        readers = [open_capture(path) for path in paths]
        traces = [read_trace(reader) for reader in readers]
        progress("aligning")
        read = perf_counter()
        found = align(*traces)
        aligned = perf_counter()
        diverge(*traces, found)
        took = perf_counter() - begin
        peak = resident_bytes("VmHWM")
    details = {
        "ops": [trace.ops for trace in traces],
        "read_s": read - begin,
        "align_s": aligned - read,
        "share": found.share,
        "doubts": len(found.doubts),
        "unaligned_groups": len(found.blocks),
    }
    row("compare two captures of a million ops", took, "s", at_most=60, **details)
    row("compare two captures of a million ops, memory", (peak - before) / 2**30, "GiB", at_most=2, **details)


if __name__ == "__main__":
    main()
