"""Addresses that operators return to the program: handles to objects inside an operator library.

Such an operator returns the address of an object as an integer, and later operators take it as an argument: as an
integer, or in a one-element tensor that the program made from it. Addresses differ in a replay, so the number itself
must not enter the capture. It is recorded as a result of the operator that created the object: a zero-dimensional int64
tensor on a storage of its own, used wherever the program passes the address. An address in this process that no
captured operator returned is an opaque argument.
"""

from __future__ import annotations

import torch

from replayfmt.pytorch.tensors.memory import call_undispatched, fill_storage, host_view, make_view, new_storage

from ..storages.pages import is_mapped
from ..stream.records import Unrepresentable

_LEAST_ADDRESS = 1 << 32  # lower values count as counts or sizes, even if the process has memory there
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
        if not is_address(value):
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
        if type(value) is int and 0 <= value < _LEAST_ADDRESS and value not in self._made:
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
    """Whether an integer is an address in the memory of this process."""
    return _LEAST_ADDRESS <= value < _PAST_ADDRESSES and is_mapped(value)


def _as_tensor(value: int) -> torch.Tensor:
    storage = new_storage(8, torch.device("cpu"))
    fill_storage(storage, value.to_bytes(8, "little"))
    return make_view(storage, torch.int64, (), ())


def _integers(storage: torch.UntypedStorage) -> list[int]:
    return host_view(storage).cast("q").tolist()
