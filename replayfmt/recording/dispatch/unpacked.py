"""The contents of packed parameters, as tensors that stay the same from use to use.

An object is unpacked at each use and has no lasting identity. So its parts are compared with what an object at the same
place returned before, and the content enters the capture only once. Copies are kept for that; tensors that the object
returns as they are (a bias that belongs to the program) are not kept.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import xxhash

from replayfmt.pytorch.tensors.composites import take_apart
from replayfmt.pytorch.tensors.memory import call_undispatched, storage_bytes

_MOST_OBJECTS = 1024

UnpackedParts = tuple[str, dict[int, torch.Tensor], list[Any]]


class Unpacked:
    """The packed objects of one capture. Callers hold the recorder's lock."""

    def __init__(self) -> None:
        self._objects: OrderedDict[int, UnpackedParts] = OrderedDict()

    def parts(self, packed: torch.ScriptObject) -> tuple[str, tuple[Any, ...]]:
        """(form, parts). Raises TypeError for objects that cannot be unpacked."""
        return call_undispatched(self._parts, packed)

    def _parts(self, packed: torch.ScriptObject) -> tuple[str, tuple[Any, ...]]:
        form, parts = take_apart(packed)
        content = [_content(part) for part in parts]
        place = hash(packed)
        seen = self._objects.get(place)
        if seen is None or (seen[0], seen[2]) != (form, content):
            again = take_apart(packed)[1]
            copies = {
                index: part
                for index, (part, other) in enumerate(zip(parts, again, strict=True))
                if isinstance(part, torch.Tensor) and _place(part) != _place(other)
            }
            seen = self._objects[place] = form, copies, content
            if len(self._objects) > _MOST_OBJECTS:
                self._objects.popitem(last=False)
        self._objects.move_to_end(place)
        return form, tuple(seen[1].get(index, part) for index, part in enumerate(parts))


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _content(part: Any) -> Any:
    """What distinguishes one part from another."""
    if not isinstance(part, torch.Tensor):
        return part
    content = xxhash.xxh3_128_intdigest(storage_bytes(part.untyped_storage()))
    return part.dtype, tuple(part.shape), part.stride(), part.storage_offset(), content
