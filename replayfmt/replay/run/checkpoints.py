"""Replays that begin alike need not all begin at the beginning: the state between two windows is kept, and a later
replay that does the same up to there goes on from it.

The state is the content of all live memory that something writes, the random generators and the settings. What a
custom operator keeps of its own is not in it: who relies on a replay that began in the middle confirms it by a whole
one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from replayfmt.pytorch.environment import apply_settings, read_settings
from replayfmt.pytorch.tensors.composites import is_composite

from ..codegen.windows import Window
from ..planning.scan import WindowSize
from .content import Clones, free_bytes, has_memory

_WINDOWS = 32  # of a replay, about: there is a state between every two
_MEMORY_SHARE = 4  # how much of a device's free memory states may take: one part of so many
_ALIGNED_BYTES = 64  # kernels may compute other bits on memory that is aligned otherwise


class Beginning(Protocol):
    """What a replay does of its own, up to an ordinal."""

    def prefix(self, ordinal: int) -> Hashable:
        """Equal for replays that do the same before an ordinal; false if that is what the capture says."""

    def noted(self) -> Any:
        """A copy of what was noted so far."""

    def note(self, noted: Any) -> None:
        """Begin with what was noted by another replay."""


@dataclass(frozen=True)
class _State:
    values: dict[int, Any]  # variables by key
    own: frozenset[int]  # the storages that were copied, by identity: the others are nobody's to write
    generators: list[torch.Tensor]
    settings: dict[str, Any]
    noted: Any
    length_bytes: dict[torch.device, int]


class Checkpoints:
    """States of replays of one plan. `windows` are the plan's, once they are made; `began` is the ordinal at which the
    last replay went on."""

    def __init__(self, beginning: Beginning, generators: Iterable[torch.Generator | None]) -> None:
        self.windows: list[Window] | None = None
        self.began = 0
        self.resumes = False  # whether the next replay may begin in the middle
        self._beginning = beginning
        self._generators = [each for each in dict.fromkeys(generators) if each is not None]
        self._states: dict[tuple[int, Hashable], _State] = {}
        self._free: dict[torch.device, int] = {}

    @staticmethod
    def window_size(records: int) -> WindowSize:
        """Windows that make enough places to go on from."""
        usual, least = WindowSize(), max(records // _WINDOWS, 1)
        return WindowSize(min(usual.least, least), min(usual.most, 2 * least))

    def clear(self) -> None:
        """Forget all states: memory that is shared with them has changed."""
        self._states.clear()
        self._free.clear()

    def resume(self, values: dict[int, Any]) -> int:
        """Put the latest state from which this replay can go on into `values`; the ordinal of its next record."""
        fitting = (key for key in self._states if self.resumes and key[1] == self._beginning.prefix(key[0]))
        key = max(fitting, default=None, key=lambda each: each[0])
        self.began = 0 if key is None else key[0]
        if key is not None:
            state = self._states[key]
            values.update(Clones(only=state.own).of(state.values))
            for generator, seen in zip(self._generators, state.generators, strict=True):
                generator.set_state(seen)
            apply_settings(state.settings)
            self._beginning.note(state.noted)
        return self.began

    def keep(self, ordinal: int, values: dict[int, Any], shared: set[int]) -> None:
        """Keep the state before a record, if there is none of the kind, and if memory suffices. `shared` storages (by
        identity) are those that nothing writes."""
        key = (ordinal, self._beginning.prefix(ordinal))
        if key in self._states or not all(map(_is_plain, values.values())):
            return
        storages = {each._cdata: each for each in map(_storage, values.values()) if each is not None}
        own = {number: each for number, each in storages.items() if number not in shared}
        lengths: dict[torch.device, int] = {}
        for each in own.values():
            lengths[each.device] = lengths.get(each.device, 0) + each.nbytes()
        if not self._make_room(lengths, captured=not key[1]):
            return
        clones = Clones(only=own.keys())
        kept = clones.of(dict(values))
        pairs = zip(clones.originals.values(), clones.copies.values(), strict=True)
        if any((one.data_ptr() - other.data_ptr()) % _ALIGNED_BYTES for one, other in pairs):
            return
        for device, length in lengths.items():
            self._free[device] -= length
        self._states[key] = _State(
            kept,
            frozenset(each._cdata for each in clones.copies.values()),
            [generator.get_state() for generator in self._generators],
            read_settings(),
            self._beginning.noted(),
            lengths,
        )

    def _make_room(self, lengths: dict[torch.device, int], *, captured: bool) -> bool:
        """Whether that many bytes may be kept; for what begins as captured, which most replays do, others are given
        up."""
        for device in lengths:
            if device not in self._free:
                self._free[device] = (free_bytes(device) or 0) // _MEMORY_SHARE

        def fits() -> bool:
            return all(length <= self._free[device] for device, length in lengths.items())

        others: Sequence[tuple[int, Hashable]] = [key for key in self._states if key[1]] if not fits() else []
        for key in others:
            if fits() or not captured:
                break
            for device, length in self._states.pop(key).length_bytes.items():
                self._free[device] += length
        return fits()


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.UntypedStorage) or (type(value) is torch.Tensor and not is_composite(value))


def _storage(value: Any) -> torch.UntypedStorage | None:
    if isinstance(value, torch.UntypedStorage):
        return value
    return value.untyped_storage() if has_memory(value) else None
