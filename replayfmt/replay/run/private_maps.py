"""Whether anything was written to memory that is a private map of a file, without reading it: a page that was written
is not the file's any more, and Linux counts those of each map."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_SMAPS = Path("/proc/self/smaps")
_MAP = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ", re.MULTILINE)
_OWN = re.compile(rb"^(?:Anonymous|Swap): +([0-9]+) kB$", re.MULTILINE)


class PrivateMaps:
    """The maps of this process as they are now."""

    def __init__(self) -> None:
        self._clean: list[tuple[int, int]] | None = None  # (begin, end) of maps without pages of the process's own

    def is_clean(self, storage: torch.UntypedStorage) -> bool:
        """Whether a host storage is known to lie in a map of which no page was written. False where the system does not
        tell."""
        if self._clean is None:
            self._clean = _clean_maps()
        begin = storage.data_ptr()
        return any(low <= begin and begin + storage.nbytes() <= high for low, high in self._clean)


def _clean_maps() -> list[tuple[int, int]]:
    try:
        text = _SMAPS.read_bytes()
    except OSError:
        return []
    maps = list(_MAP.finditer(text))
    ends = [*(found.start() for found in maps[1:]), len(text)]
    return [
        (int(found[1], 16), int(found[2], 16))
        for found, end in zip(maps, ends, strict=True)
        if [int(count) for count in _OWN.findall(text, found.end(), end)] == [0, 0]
    ]
