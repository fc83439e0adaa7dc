"""Content that is neither in the capture nor in a file it refers to: which initializer fills which storage."""

from __future__ import annotations

import torch

from .scan import Scan


class Synthesis:
    """Fills storages whose content was not captured."""

    def __init__(self, scan: Scan) -> None:
        self._missing = {(each.storage, each.version) for each in scan.entrances()}

    def fill(self, storage: int, version: int, target: torch.UntypedStorage) -> None:
        """Leave the memory as it is: nothing is known of it yet."""

    def missing(self, storage: int, version: int) -> str | None:
        """Why a storage cannot be filled, None where it can be, or need not."""
        if (storage, version) not in self._missing:
            return None
        return f"the content of storage {storage} is not in the capture"
