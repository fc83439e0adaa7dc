"""The part of a window's beginning that is prepared once for a plan, not for each run: storages that nothing writes,
and the tensors on them.

A tensor may be used again if no op of the capture is known to change its memory, or the tensor itself: an op that
changes a tensor's sizes in place writes it, as its schema says. Windows with other functions in place of kernels have
no tensors here, because it is unknown what those do to the objects that they receive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..codegen.operations import View
from ..codegen.windows import Staged, Window


@dataclass(frozen=True)
class Ready:
    """A window's beginning where part of it was prepared before. `values` are variables by key; `staged`, `hoisted` and
    `dropped` are what is left of the window's own."""

    values: dict[int, Any]
    staged: list[Staged]
    hoisted: list[tuple[int, int, View]]
    dropped: list[int]


class ReadyWindows:
    """The beginnings of a plan's windows, for as long as the plan keeps these."""

    def __init__(self) -> None:
        self._ready: WeakKeyDictionary[Window, Ready] = WeakKeyDictionary()

    def get(self, window: Window) -> Ready | None:
        """What was kept for a window; None before its first run."""
        return self._ready.get(window)

    def add(self, window: Window, values: Mapping[int, Any], stays: Callable[[int], bool]) -> None:
        """Keep what was prepared for a window, `values` by key. `stays` says of a storage whether it is the same one,
        with the same bytes, in every run."""
        kept = {staged.storage for staged in window.staged if stays(staged.storage)}
        dropped = set(window.dropped)
        hoisted = [(key, base) for key, base, _view in window.hoisted if stays(-base)]
        ready = {key: values[key] for key in [*(-storage for storage in kept), *(key for key, _base in hoisted)]}
        tensors = {key for key, _base in hoisted}
        self._ready[window] = Ready(
            {key: value for key, value in ready.items() if key not in dropped},
            [staged for staged in window.staged if staged.storage not in kept],
            [each for each in window.hoisted if each[0] not in tensors],
            [key for key in window.dropped if key not in ready],
        )

    def clear(self) -> None:
        """Let go of everything: the next run prepares its windows anew."""
        self._ready.clear()

    def altered(self, storages: Mapping[int, torch.UntypedStorage]) -> set[int]:
        """Which of these storages have tensors that are no longer the views as which they were made."""
        found = set()
        for window, ready in self._ready.items():
            for key, base, view in window.hoisted:
                tensor = ready.values.get(key)
                storage = storages.get(-base)
                if tensor is not None and storage is not None and not view.is_on(tensor, storage):
                    found.add(-base)
        return found
