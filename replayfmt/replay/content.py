"""The storages that enter a replay from the capture, and their fresh state before each run.

A storage that the program never freed stays allocated between runs; if anything in the capture writes it, its bytes
are restored before each run, from the second run on out of a pristine copy beside it where that fits, else out of the
file. Everything else is allocated and filled when its window comes, and dies with its last use. None of it is timed.
"""

from __future__ import annotations

from pathlib import Path

import torch

from replayfmt.errors import InvalidCapture
from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch.memory import fill_storage, host_view, make_view, new_storage

from .scan import Scan
from .windows import Staged

# How much of a device's free memory pristine copies may take.
_COPY_SHARE = 4


class Content:
    """Owns the storages it keeps between runs and their pristine copies; `release` lets go of them."""

    def __init__(self, reader: CaptureReader, scan: Scan) -> None:
        self._reader = reader
        self._scan = scan
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._pristine: dict[int, torch.UntypedStorage] = {}
        self._budget: dict[torch.device, int] = {}

    def release(self) -> None:
        """Free everything."""
        self._kept.clear()
        self._pristine.clear()
        self._budget.clear()

    def stage(self, staged: Staged) -> torch.UntypedStorage:
        """A storage with its first content."""
        known = self._kept.get(staged.storage)
        if known is not None and known.nbytes() == staged.length_bytes:
            if self._scan.is_written(staged.storage):
                self._restore(staged, known)
            return known
        storage = new_storage(staged.length_bytes, staged.device)
        self._fill(staged, storage)
        if not self._scan.is_released(staged.storage):
            self._kept[staged.storage] = storage
        return storage

    def _restore(self, staged: Staged, storage: torch.UntypedStorage) -> None:
        pristine = self._pristine.get(staged.storage)
        if pristine is None and self._fits(staged):
            pristine = self._pristine[staged.storage] = new_storage(staged.length_bytes, staged.device)
            self._fill(staged, pristine)
        if pristine is None:
            self._fill(staged, storage)
        else:
            _bytes_of(storage).copy_(_bytes_of(pristine))

    def _fits(self, staged: Staged) -> bool:
        if staged.device not in self._budget:
            self._budget[staged.device] = (free_bytes(staged.device) or 0) // _COPY_SHARE
        if staged.length_bytes > self._budget[staged.device]:
            return False
        self._budget[staged.device] -= staged.length_bytes
        return True

    def _fill(self, staged: Staged, storage: torch.UntypedStorage) -> None:
        if not staged.payload or not staged.length_bytes:
            return
        length = self._reader.payload_info(staged.payload).raw_bytes
        if length != staged.length_bytes:
            raise InvalidCapture(f"{self._reader.path}: storage {staged.storage} has {staged.length_bytes} bytes, its "
                                 f"payload {staged.payload} has {length}")
        if staged.device.type == "cpu":
            self._reader.read_payload_into(staged.payload, host_view(storage))
        else:
            fill_storage(storage, self._reader.payload(staged.payload))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return make_view(storage, torch.uint8, (storage.nbytes(),), (1,))


def free_bytes(device: torch.device) -> int | None:
    """Memory that could still be allocated on a device; None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
