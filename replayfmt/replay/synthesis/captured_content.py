"""What the capture says about a tensor's content before anything runs, for initializers that must agree with it."""

from __future__ import annotations

import torch

from replayfmt.format.codes import StorageOrigin
from replayfmt.format.reader import CaptureReader
from replayfmt.initializers import TensorInfo
from replayfmt.pytorch.tensors.memory import host_view, make_view, new_storage

from ..planning.external_files import ExternalFiles
from ..planning.scan import Scan

_HOST = torch.device("cpu")


class CapturedContent:
    """Called with a captured tensor; returns it with its content, on the host."""

    def __init__(self, reader: CaptureReader, scan: Scan, files: ExternalFiles) -> None:
        self._reader, self._scan, self._files = reader, scan, files

    def __call__(self, info: TensorInfo) -> torch.Tensor | None:
        """None if an op produced the tensor or may have written to it, or if its content was not captured."""
        if not info.storage:
            return None
        born = self._reader.storage(info.storage)
        if self._scan.is_written(info.storage):
            return None
        storage = new_storage(born.bytes, _HOST)
        if born.origin is StorageOrigin.payload:
            self._reader.read_payload_into(born.payload, host_view(storage))
        elif born.origin is StorageOrigin.external_file and self._files.problem(born.payload) is None:
            self._files.read_into(born.payload, host_view(storage), 0)
        else:
            return None
        return make_view(storage, info.dtype, info.sizes, info.strides, info.offset)
