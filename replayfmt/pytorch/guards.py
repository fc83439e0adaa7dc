"""Memory that shows accesses beside it, and new memory that shows that nothing wrote it.

Imports torch alone: kernel tasks have this text in a file that runs without OpReplay.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

CANARY = 0xFF  # as a floating-point number it is NaN
_PAD = 4096


class Memory:
    """One storage with canaries on both sides, or on the CPU with unreadable pages."""

    def __init__(
        self, content: torch.Tensor, device: str, *, shift: int = 0, canary: int = CANARY, pages: str = ""
    ) -> None:
        """With the bytes of `content`. `shift`: so many bytes beyond an aligned address. `pages`: the side, before or
        after, on which the unreadable page follows directly."""
        self.bytes = content.nbytes
        self._canaries: list[torch.Tensor] = []
        self.canary = canary
        data = content.view(torch.uint8)
        if torch.device(device).type != "cpu":
            self.tensor = self._on_device(torch.device(device), shift)
        elif pages:
            self.tensor = self._between_pages(pages)
        else:
            buffer = bytearray(self.bytes + 2 * _PAD)
            whole = torch.frombuffer(buffer, dtype=torch.uint8)
            start = _PAD // 2 + (-(whole.data_ptr() + _PAD // 2)) % 64 + shift
            self.tensor = torch.frombuffer(buffer, dtype=torch.uint8, count=max(self.bytes, 1), offset=start)
            self._canaries = [whole[:start], whole[start + self.bytes :]]
            for each in self._canaries:
                each.fill_(canary)
        self.storage = self.tensor.untyped_storage()
        self.write(data)

    def _on_device(self, device: torch.device, shift: int) -> torch.Tensor:
        start, length = _PAD // 2 + shift, max(self.bytes, 1)
        self._whole = torch.empty(self.bytes + _PAD, dtype=torch.uint8, device=device).fill_(self.canary)
        self._canaries = [self._whole[:start], self._whole[start + self.bytes :]]
        # A storage of its own, which does not own its memory: a kernel sees nothing of what lies beside it.
        inner: Any = torch._C._construct_storage_from_data_pointer(self._whole.data_ptr() + start, device, length)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(inner, 0, (length,), (1,))

    def _between_pages(self, side: str) -> torch.Tensor:
        page = mmap.PAGESIZE
        room = -(-max(self.bytes, 1) // page) * page
        area = mmap.mmap(-1, room + 2 * page)
        whole = torch.frombuffer(area, dtype=torch.uint8)
        start = page if side == "before" else page + (room - self.bytes) // 16 * 16
        self._canaries = [whole[page:start], whole[start + self.bytes : page + room]]
        for each in self._canaries:
            each.fill_(self.canary)
        address = whole.data_ptr()
        for first in (address, address + page + room):
            if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(first), page, 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")
        return torch.frombuffer(area, dtype=torch.uint8, count=max(self.bytes, 1), offset=start)

    def write(self, data: torch.Tensor) -> None:
        if self.bytes:
            self.tensor[: self.bytes].copy_(data.view(torch.uint8))

    def read(self) -> torch.Tensor:
        return self.tensor[: self.bytes].cpu().clone()

    def overwritten(self) -> str:
        """The side on which something was written, "" if nothing was."""
        for side, canary in zip(("before", "after"), self._canaries, strict=False):
            if bool((canary != self.canary).any()):
                return side
        return ""


@contextmanager
def poisoned(on: bool) -> Iterator[None]:
    """New memory of PyTorch's is filled with NaN, or the largest integer."""
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_deterministic_algorithms(True, warn_only=True)  # the public function imports a compiler
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])
