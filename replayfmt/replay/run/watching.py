"""A replay with an observer, which is called right before and right after chosen ops run.

This is how content is taken out of a running replay: the watcher receives the storages that an op uses, and what the
op returned. It looks and copies, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from replayfmt.format.slots import NodePlace
from replayfmt.pytorch.tensors.composites import take_apart

from ..codegen.call_templates import Operand
from ..codegen.lowering import Lowering
from ..codegen.op_lowering import OpLine, lower_op
from ..codegen.operations import storage_of


class Watcher(Protocol):
    """Is called for the ops at the ordinals it watches. Settings and generators are those of the replay."""

    def watches(self, ordinal: int) -> bool: ...

    def before(self, ordinal: int, storages: dict[int, torch.UntypedStorage]) -> None:
        """The op runs next. `storages` are those it takes, by their id in the capture."""
        ...

    def after(self, ordinal: int, results: dict[int, torch.Tensor], args: dict[int, torch.Tensor]) -> None:
        """The op returned. Both by tensor slot of the record; components stand for composites. Not called for an op
        that raised under capture."""
        ...


def lower_watched(watcher: Watcher) -> Callable[[Lowering, int, int], None]:
    """How to lower ops so that the watcher is called."""

    def lower(lowering: Lowering, row: int, ordinal: int) -> None:
        template = lowering.template(lowering.frame.signatures[row]) if watcher.watches(ordinal) else None
        if template is None:
            lower_op(lowering, row, ordinal)
        else:
            _WatchedLine(watcher, lowering, template, row, ordinal).write()

    return lower


class _WatchedLine(OpLine):
    def __init__(self, watcher: Watcher, *line: Any) -> None:
        super().__init__(*line)
        self._watcher = watcher

    def _call(self, *, expect_failure: bool = True) -> tuple[str, list[str]]:
        call, slot_names = super()._call(expect_failure=expect_failure)
        lowering, frame, text = self.lowering, self.lowering.frame, self.lowering.text
        slots = [what for operand, what in self.template.operands if operand is Operand.tensor]
        storages = [frame.storages[self.first + slot] for slot in slots]
        names = list(slot_names)
        for operand, what in self.template.operands:
            if operand is Operand.storage:
                storages.append(frame.ints[frame.int_first[self.row] + what])
                names.append(lowering.storage(storages[-1], self.ordinal))
        before = text.constant(_Before(self._watcher, self.ordinal, storages))
        text.line(self.ordinal, f"{before}({', '.join(names)})")
        if self.template.raises:
            return call, slot_names
        after = text.constant(_After(self._watcher, self.ordinal, self.template.layout.results, slots))
        return f"{after}({call}{''.join(f', {name}' for name in slot_names)})", slot_names


class _Before:
    def __init__(self, watcher: Watcher, ordinal: int, storages: Sequence[int]) -> None:
        self._watcher, self._ordinal, self._storages = watcher, ordinal, storages

    def __call__(self, *values: Any) -> None:
        found = {number: storage_of(value) for number, value in zip(self._storages, values, strict=True) if number}
        self._watcher.before(self._ordinal, found)


class _After:
    def __init__(self, watcher: Watcher, ordinal: int, results: Sequence[NodePlace], slots: Sequence[int]) -> None:
        self._watcher, self._ordinal, self._results, self._slots = watcher, ordinal, results, slots

    def __call__(self, returned: Any, *args: torch.Tensor) -> Any:
        found: dict[int, torch.Tensor] = {}
        values = (returned,) if len(self._results) == 1 else returned if self._results else ()
        # If the structure of a result differs, the comparison that follows finds that.
        if isinstance(values, tuple | list) and len(values) == len(self._results):
            for place, value in zip(self._results, values, strict=True):
                _gather(place, value, found)
        self._watcher.after(self._ordinal, found, dict(zip(self._slots, args, strict=True)))
        return returned


def _gather(place: NodePlace, value: Any, found: dict[int, torch.Tensor]) -> None:
    """The tensors of one result by slot."""
    if not place.tensors:
        return
    if not place.children:
        if isinstance(value, torch.Tensor):
            found[place.tensor_slot] = value
        return
    parts = take_apart(value)[1] if isinstance(value, torch.Tensor | torch.ScriptObject) else value
    if isinstance(parts, tuple | list) and len(parts) == len(place.children):
        for child, part in zip(place.children, parts, strict=True):
            _gather(child, part, found)
