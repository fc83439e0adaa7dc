"""Values of calls that are no plain tensors: wrapper tensors, packed ones and packed parameters, and addresses.

`plain_parts` gives the plain tensors that a tensor consists of. `Unpacked` represents the contents of packed tensors
and parameters as tensors that stay the same from use to use. `Handles` keeps addresses that operators return to the
program: handles to objects inside an operator library.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import xxhash
from torch.utils.weak import WeakTensorKeyDictionary

from replayfmt.pytorch.tensors.composites import is_composite, is_packed, take_apart
from replayfmt.pytorch.tensors.memory import (
    call_undispatched,
    fill_storage,
    host_view,
    make_view,
    new_storage,
    storage_bytes,
)

from .content.file_mappings import PAGE, begins_heap_block, heap_begin, is_mapped
from .stream.records import Unrepresentable


def dispatches_itself(kind: type) -> bool:
    """Whether a tensor class has a `__torch_dispatch__` of its own."""
    dispatch = kind.__torch_dispatch__  # type: ignore[attr-defined]
    return dispatch is not torch.Tensor.__torch_dispatch__ and dispatch is not torch._C._disabled_torch_dispatch_impl


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor wraps others, whose operators arrive one by one."""
    return dispatches_itself(type(tensor))


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A strided tensor itself, or the tensors that a composite consists of; none for a tensor without memory of its
    own."""
    if is_wrapper(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return []
    if not is_composite(tensor):
        return [tensor]
    if is_packed(tensor):
        return []
    try:
        _form, parts = call_undispatched(take_apart, tensor)
    except TypeError:
        return []
    return [part for part in parts if isinstance(part, torch.Tensor)]


_MOST_OBJECTS = 1024

UnpackedParts = tuple[str, dict[int, torch.Tensor], list[Any]]


class Unpacked:
    """The packed objects of one capture. Callers hold the recorder's lock."""

    def __init__(self) -> None:
        self._objects: OrderedDict[int, UnpackedParts] = OrderedDict()
        self._tensors: Any = WeakTensorKeyDictionary()  # the same by tensor

    def parts(self, packed: torch.ScriptObject | torch.Tensor) -> tuple[str, tuple[Any, ...]]:
        """(form, parts). Raises TypeError for objects that cannot be unpacked."""
        return call_undispatched(self._parts, packed)

    def _parts(self, packed: torch.ScriptObject | torch.Tensor) -> tuple[str, tuple[Any, ...]]:
        form, parts = take_apart(packed)
        content = [_content(part) for part in parts]
        objects: Any = self._tensors if isinstance(packed, torch.Tensor) else self._objects
        place = packed if isinstance(packed, torch.Tensor) else hash(packed)
        seen = objects.get(place)
        if seen is None or (seen[0], seen[2]) != (form, content):
            again = take_apart(packed)[1]
            copies = {
                index: part
                for index, (part, other) in enumerate(zip(parts, again, strict=True))
                if isinstance(part, torch.Tensor) and _place(part) != _place(other)
            }
            seen = objects[place] = form, copies, content
            if len(self._objects) > _MOST_OBJECTS:
                self._objects.popitem(last=False)
        if objects is self._objects:
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


def _least_address() -> int:
    try:
        return min(heap_begin(), _FAR)
    except OSError:
        return _FAR


_FAR = 1 << 32  # numbers from there on are addresses where there is memory
LEAST_ADDRESS = _least_address()  # lower integers count as numbers, even if the process has memory there
_LARGEST_TABLE_BYTES = 512  # of integers: longer tables are data
_PAST_ADDRESSES = 1 << 63  # no process has memory from there on


class Handles:
    """The addresses that captured operators returned, and the tensors that represent them. Callers hold the recorder's
    lock."""

    def __init__(self) -> None:
        self._tensors: dict[int, torch.Tensor] = {}  # by address
        self._made: set[int] = set()  # all integers that they returned
        self._storages: set[int] = set()  # storages of those tensors, by their identity

    def returned(self, value: int) -> torch.Tensor | None:
        """The tensor for an integer that an operator library's operator returned; None if it is not an address."""
        if not _is_object(value):
            return None
        # The same address again is another object, allocated in the memory of one that was freed.
        tensor = self._tensors[value] = call_undispatched(_as_tensor, value)
        self._storages.add(tensor.untyped_storage()._cdata)
        return tensor

    def tensor_of(self, value: int) -> torch.Tensor | None:
        """The tensor for an address that a captured operator returned."""
        return self._tensors.get(value)

    def passed(self, value: int) -> torch.Tensor | None:
        """The tensor for an integer given to an operator library's operator; None if it is a number.

        Raises Unrepresentable for an address that no captured operator returned.
        """
        tensor = self._tensors.get(value)
        if tensor is None and is_address(value):
            raise Unrepresentable(
                "opaque_argument",
                "an integer is the address of something in this process that no captured operator returned",
            )
        return tensor

    def made(self, value: int) -> None:
        """An operator library's operator returned an integer."""
        self._made.add(value)

    def check_state(self, name: str, value: object) -> None:
        """Raises Unrepresentable if an argument with a name such as `handle` is a number that no captured operator
        returned: a replay would use what is not there."""
        if type(value) is int and 0 <= value < _FAR and value not in self._made and not is_address(value):
            raise Unrepresentable(
                "opaque_argument",
                f"its argument {name} ({value}) stands for state that another operator made before the capture began; "
                "begin the capture before that",
            )

    def stands_for(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is the recorder's own, in place of an address."""
        return storage._cdata in self._storages

    def held_by(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """The storage for an address, if that address is known and is all that a CPU storage of the program holds."""
        if not self._tensors or storage.nbytes() != 8:
            return None
        tensor = self._tensors.get(_integers(storage)[0])
        return None if tensor is None else tensor.untyped_storage()

    def check_content(self, tensor: torch.Tensor) -> None:
        """Raises Unrepresentable if a table of integers that entered as content holds an address."""
        storage = tensor.untyped_storage()
        if tensor.dtype not in (torch.int64, torch.uint64) or storage.device.type != "cpu":
            return
        if storage.nbytes() > _LARGEST_TABLE_BYTES or storage.nbytes() % 8:
            return
        if any(value in self._tensors or is_address(value) for value in _integers(storage)):
            raise Unrepresentable(
                "opaque_argument", "a tensor holds the address of something in this process that a replay has elsewhere"
            )


def is_address(value: int) -> bool:
    """Whether an integer is an address in the memory of this process. Below 4 GiB only what malloc handed out counts,
    apart from multiples of a page, which sizes often are and one block in 256 is."""
    return _is_object(value) and (value >= _FAR or value % PAGE != 0)


def _is_object(value: int) -> bool:
    if value < _FAR:
        return value >= LEAST_ADDRESS and begins_heap_block(value)
    return value < _PAST_ADDRESSES and is_mapped(value)


def _as_tensor(value: int) -> torch.Tensor:
    storage = new_storage(8, torch.device("cpu"))
    fill_storage(storage, value.to_bytes(8, "little"))
    return make_view(storage, torch.int64, (), ())


def _integers(storage: torch.UntypedStorage) -> list[int]:
    return host_view(storage).cast("q").tolist()
