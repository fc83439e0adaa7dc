"""Open a capture of ten million records, read single records of it, and print its summary.

The capture is a real training step's, written again and again through CaptureWriter with fresh tensor and storage ids,
as a long program would have them.
"""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import tiny_gpt2
import torch
from measuring import arguments, progress, row, scratch

import replayfmt
from replayfmt.format.codes import ValueKind
from replayfmt.format.reader import CaptureReader, open_capture
from replayfmt.format.record_columns import RecordColumns
from replayfmt.format.signature_layout import SLOTS
from replayfmt.format.writer import CaptureWriter

RECORDS_A_FRAME = 16_384


class Repeated:
    """The records of a short capture, to be written any number of times with fresh ids."""

    def __init__(self, capture: CaptureReader) -> None:
        self.capture = capture
        frames = [capture.frame(number) for number in range(len(capture.record_frames))]
        self.signature = np.concatenate([f.signature for f in frames])
        self.scope = np.concatenate([f.scope for f in frames])
        self.thread = np.concatenate([f.thread for f in frames])
        self.start_ns = np.concatenate([f.start_ns for f in frames]).astype(np.int64)
        self.period_ns = int(self.start_ns[-1]) + 1000
        self.tensors = np.concatenate([f.tensor_id[f.tensor_slots] for f in frames]).astype(np.int64)
        self.ints = np.concatenate([f.ints for f in frames])
        self.floats = np.concatenate([f.floats for f in frames])
        self.definitions: dict[int, tuple[int, int, int]] = {}
        for f in frames:
            columns = zip(
                f.tensor_id.tolist(),
                f.tensor_storage.tolist(),
                f.tensor_offset.tolist(),
                f.tensor_meta.tolist(),
                strict=True,
            )
            self.definitions.update({tensor: (storage, offset, meta) for tensor, storage, offset, meta in columns})
        self.storages = [
            np.concatenate([getattr(f, name) for f in frames])
            for name in ("storage_bytes", "storage_device", "storage_origin")
        ]
        self.most_tensors = max(self.definitions) + 1
        # Which of the int slots hold storage ids: they change with the storages.
        kinds = {
            number: [node.kind is ValueKind.storage for node in signature.nodes if SLOTS.get(node.kind, (0, 0))[1]]
            for number, signature in enumerate(capture.signatures)
            if signature is not None
        }
        self.storage_ints = np.array([slot for number in self.signature.tolist() for slot in kinds[number]], dtype=bool)

    def __len__(self) -> int:
        return len(self.signature)

    def columns(self, first: int, count: int) -> RecordColumns:
        """`count` repetitions, the first of which is number `first` of all."""
        storages = len(self.storages[0])
        numbers = np.arange(first, first + count, dtype=np.int64)[:, None]
        definitions = {
            tensor + number * self.most_tensors: (storage and storage + number * storages, offset, meta)
            for number in range(first, first + count)
            for tensor, (storage, offset, meta) in self.definitions.items()
        }
        return RecordColumns(
            signature=np.tile(self.signature, count),
            scope=np.tile(self.scope, count),
            thread=np.tile(self.thread, count),
            start_ns=(self.start_ns + numbers * self.period_ns).ravel().astype(np.uint64),
            duration_ns=None,
            tensors=(self.tensors + numbers * self.most_tensors).ravel().astype(np.uint64),
            ints=(self.ints + numbers * (self.storage_ints * storages)).ravel(),
            floats=np.tile(self.floats, count),
            tensor_definitions=definitions,
            first_storage=1 + first * storages,
            storage_bytes=np.tile(self.storages[0], count),
            storage_device=np.tile(self.storages[1], count),
            storage_origin=np.tile(self.storages[2], count),
            storage_payload=np.zeros(storages * count, np.uint32),
        )


def write(short: Path, path: Path, records: int) -> None:
    """Write at least `records` records, the ones of `short` over and over."""
    capture = open_capture(str(short))
    repeated = Repeated(capture)
    writer = CaptureWriter(path, dataclasses.replace(capture.session), force=True)
    # Interning in the order of the ids gives the same ids, so that the columns hold as they are.
    for payload in capture.payloads:
        writer.payload(capture.payload(payload.id))
    for text in capture.strings[1:]:
        writer.string(text)
    for device in capture.devices[1:]:
        writer.device(device)
    for kernel in capture.kernels[1:]:
        writer.kernel(kernel)
    for generator in capture.generators[1:]:
        writer.generator(generator)
    for scope in capture.scopes[1:]:
        writer.scope(scope.parent, scope.name)
    for meta in capture.metas[1:]:
        writer.meta(meta)
    for signature in capture.signatures[1:]:
        writer.signature(signature)
    count, first = max(1, RECORDS_A_FRAME // len(repeated)), 0
    while first * len(repeated) < records:
        writer.records(repeated.columns(first, count))
        first += count
        progress(f"{first * len(repeated)} records written")
    writer.close(first * repeated.period_ns)
    capture.close()


def forget_cached(path: Path) -> None:
    """Ask the system to drop the file from its cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def main() -> None:
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    with scratch() as directory:
        short, path = directory / "short.opreplay", directory / "long.opreplay"
        run = tiny_gpt2.training_step()
        run()
        with replayfmt.capture(short, payload="none"), replayfmt.scope("execute"):
            run()
        write(short, path, 50_000 if quick else 10_000_000)

        warm, cold, single, cached = [], [], [], []
        chosen = random.Random(0)
        for _ in range(3 if quick else 51):
            for taken, prepare in ((cold, True), (warm, False)):
                if prepare:
                    forget_cached(path)
                begin = perf_counter()
                capture = open_capture(str(path))
                taken.append((perf_counter() - begin) * 1e3)
                records = capture.record_count
                ordinal = chosen.randrange(records)
                begin = perf_counter()
                capture.record(ordinal)
                single.append((perf_counter() - begin) * 1e3)
                begin = perf_counter()
                capture.record(ordinal)
                cached.append((perf_counter() - begin) * 1e3)
                capture.close()
        length = path.stat().st_size
        summary = [sys.executable, "-m", "opreplay_tools.dump", "--summary", str(path)]
        shown = []
        for _ in range(3):
            begin = perf_counter()
            subprocess.run(summary, stdout=subprocess.DEVNULL, check=True)
            shown.append(perf_counter() - begin)
    details = {"records": records, "file_mib": length / 2**20}
    row(
        "open 10 M records",
        median(warm),
        "ms",
        at_most=50,
        after_dropping_caches_ms=median(cold),
        worst_ms=max(cold + warm),
        **details,
    )
    row("summary of 10 M records, the whole command", median(shown), "s", at_most=2, **details)
    row(
        "read record N, no frame read before",
        median(single),
        "ms",
        at_most=5,
        worst_ms=max(single),
        again_ms=median(cached),
        **details,
    )


if __name__ == "__main__":
    main()
