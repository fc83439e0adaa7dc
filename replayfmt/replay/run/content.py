"""The storages that enter a replay from outside, and their fresh state before each run.

A storage that the program never freed stays allocated between runs; if anything in the capture writes it, its bytes
are restored before each run, from the second run on out of a pristine copy beside it where that fits, else from where
they came. Everything else is allocated and filled when its window comes, and dies with its last use. Content in an
external file that is never written is mapped, not read, if it stays on the host. None of it is timed.
"""

from __future__ import annotations

from pathlib import Path

import torch

from replayfmt.errors import InvalidCapture
from replayfmt.format.codes import ValueKind
from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch.tensors.memory import byte_tensor, host_view, new_storage
from replayfmt.pytorch.tensors.staging import fill_from

from ..codegen.windows import Staged
from ..planning.external_files import ExternalFiles
from ..planning.scan import Scan
from ..planning.sources import ContentSource
from ..synthesis.assignment import Synthesis

# How much of a device's free memory pristine copies may take.
_COPY_SHARE = 4


class Content:
    """Owns the storages it keeps between runs and their pristine copies; `release` lets go of them.

    `synthesis` fills what is neither in the capture nor in a file.
    """

    def __init__(self, reader: CaptureReader, scan: Scan, files: ExternalFiles, synthesis: Synthesis) -> None:
        self._reader = reader
        self._scan = scan
        self._files = files
        self._synthesis = synthesis
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
        written = self._scan.is_written(staged.storage)
        if known is not None and known.nbytes() == staged.length_bytes:
            if written:
                self._restore(staged, known)
            return known
        storage = None
        if staged.device.type == "cpu" and staged.source.kind is ValueKind.range:
            if not written:
                storage = self._files.mapped(staged.source.id, in_place=staged.in_file)
            if storage is None and staged.in_file:
                storage = self._files.placed_alike(staged.source.id)
                self._fill(staged, storage)
        if storage is None:
            storage = new_storage(staged.length_bytes, staged.device)
            self._fill(staged, storage)
        if not self._scan.is_released(staged.storage):
            self._kept[staged.storage] = storage
        return storage

    def missing(self, storage: int, source: ContentSource, version: int) -> str | None:
        """Why there is no content to put into a storage, None if there is."""
        if source.kind is ValueKind.payload:
            return None
        if source.kind is ValueKind.range:
            return self._files.problem(source.id)
        return self._synthesis.missing(storage, version)

    def load(self, storage: int, source: ContentSource, version: int, target: torch.UntypedStorage) -> None:
        """Put content into the first bytes of a storage that is there: what the program wrote from outside.

        Raises InvalidCapture if it does not fit, ReplayRefused if its file has changed.
        """
        length = self._length(source)
        if length is None:
            self._synthesis.fill(storage, version, target)
            return
        if length > target.nbytes():
            raise InvalidCapture(
                f"{self._reader.path}: new content of {length} bytes for storage {storage}, which has {target.nbytes()}"
            )
        self._load(source, length, target)

    def _load(self, source: ContentSource, length: int, target: torch.UntypedStorage) -> None:
        if source.kind is ValueKind.range:
            fill_from(target, length, lambda buffer, offset: self._files.read_into(source.id, buffer, offset))
        elif target.device.type == "cpu":
            self._reader.read_payload_into(source.id, host_view(target)[:length])
        else:
            content = memoryview(self._reader.payload(source.id))

            def read(buffer: memoryview, offset: int) -> None:
                buffer[:] = content[offset : offset + len(buffer)]

            fill_from(target, length, read)

    def _length(self, source: ContentSource) -> int | None:
        """How long captured content is, in bytes; None if it is not captured."""
        if source.kind is ValueKind.payload:
            return self._reader.payload_info(source.id).raw_bytes
        if source.kind is ValueKind.range:
            captured = self._reader.ranges[source.id]
            assert captured is not None
            return captured.bytes
        return None

    def _restore(self, staged: Staged, storage: torch.UntypedStorage) -> None:
        pristine = self._pristine.get(staged.storage)
        if pristine is None and self._fits(staged):
            pristine = self._pristine[staged.storage] = new_storage(staged.length_bytes, staged.device)
            self._fill(staged, pristine)
        if pristine is None:
            self._fill(staged, storage)
        else:
            byte_tensor(storage).copy_(byte_tensor(pristine))

    def _fits(self, staged: Staged) -> bool:
        if staged.device not in self._budget:
            self._budget[staged.device] = (free_bytes(staged.device) or 0) // _COPY_SHARE
        if staged.length_bytes > self._budget[staged.device]:
            return False
        self._budget[staged.device] -= staged.length_bytes
        return True

    def _fill(self, staged: Staged, storage: torch.UntypedStorage) -> None:
        if not staged.length_bytes or self.missing(staged.storage, staged.source, 0) is not None:
            return  # what reads it is refused; only plans that keep going get here without it
        length = self._length(staged.source)
        if length is None:
            self._synthesis.fill(staged.storage, 0, storage)
            return
        if length != staged.length_bytes:
            raise InvalidCapture(
                f"{self._reader.path}: storage {staged.storage} has {staged.length_bytes} bytes, its "
                f"{staged.source.kind.name} {staged.source.id} has {length}"
            )
        self._load(staged.source, length, storage)


def free_bytes(device: torch.device) -> int | None:
    """Memory that could still be allocated on a device; None if that is unknown."""
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
