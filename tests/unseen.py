"""Writes that no capture sees, as a function of a C++ extension makes them."""

from __future__ import annotations

import ctypes

import torch


def write_unseen(written: torch.Tensor, begin_byte: int = 0) -> None:
    """Write each byte of the tensor's storage from `begin_byte` on, with another value than it had: memory from
    `torch.empty` may hold anything, also what an earlier test wrote."""
    storage = written.untyped_storage()
    address, length = torch._C.StorageBase.data_ptr(storage) + begin_byte, storage.nbytes() - begin_byte
    before = ctypes.string_at(address, length)
    ctypes.memmove(address, bytes(0x3E if byte == 0x3F else 0x3F for byte in before), length)
