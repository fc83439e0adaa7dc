"""Bringing bytes from the host to a device's storage and back, piece by piece, through pinned memory where that pays.

While one piece travels to an accelerator the next one is read into the other of two pinned buffers, so that reading and
copying overlap and the host needs two pieces of memory, however long the content. Owns nothing between calls: PyTorch
keeps freed pinned memory for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import xxhash

from ..accelerators import pins_memory
from .memory import byte_tensor, fill_storage, host_view, new_storage

PIECE_BYTES = 32 << 20
# Pinning costs more than it gives for less.
_WORTH_PINNING = 4 << 20
_WORTH_PINNING_TO_READ = 256 << 10  # PyTorch keeps the memory: small tensors gain nothing by it

# Fills a buffer with the content from a byte offset on.
ReadPiece = Callable[[memoryview, int], None]


def fill_from(storage: torch.UntypedStorage, length_bytes: int, read: ReadPiece) -> None:
    """Fill the first `length_bytes` of a storage on any device; has arrived on return.

    Raises what `read` raises; ValueError where the storage is shorter.
    """
    if length_bytes > storage.nbytes():
        raise ValueError(f"{length_bytes} bytes do not fit into a storage of {storage.nbytes()} bytes")
    if not length_bytes:
        return
    if storage.device.type == "cpu":
        read(host_view(storage)[:length_bytes], 0)
    elif length_bytes >= _WORTH_PINNING and pins_memory(storage.device.type):
        _through_pinned_memory(storage, length_bytes, read)
    else:
        _through_pageable_memory(storage, length_bytes, read)


def pieces(storage: torch.UntypedStorage) -> Iterator[memoryview]:
    """A storage's bytes on the host, in order. Each piece is valid until the next one is asked for."""
    if storage.device.type == "cpu":
        yield host_view(storage)
        return
    source = byte_tensor(storage)
    for start in range(0, storage.nbytes(), PIECE_BYTES):
        piece = source[start : start + PIECE_BYTES].cpu()
        yield host_view(piece.untyped_storage())


def row_major_pieces(tensor: torch.Tensor, most_bytes: int = PIECE_BYTES) -> Iterator[torch.Tensor]:
    """The elements of a device's tensor in row-major order, as flat host tensors of at most so many bytes, the same
    memory for each: valid until the next one is asked for. Nothing else of that size is allocated, here or there.

    Copies wait, on the current stream, as `.cpu()` does: what the program issued there before is done, and what it
    issues next comes after.
    """
    most = most_bytes // tensor.element_size()
    buffer = torch.empty((most,), dtype=tensor.dtype, pin_memory=pins_memory(tensor.device.type))
    for part in _parts(tensor.view(-1) if tensor.is_contiguous() else tensor, most):
        piece = buffer[: part.numel()]
        piece.view(part.shape).copy_(part)
        yield piece


def _parts(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """The elements in row-major order, in views of at most `most`."""
    if tensor.numel() <= most:
        yield tensor
        return
    row = tensor.numel() // len(tensor)
    if row > most:
        for part in tensor:
            yield from _parts(part, most)
        return
    for start in range(0, len(tensor), most // row):
        yield tensor[start : start + most // row]


def fetched(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a device's tensor in host memory, which has arrived on return."""
    if tensor.numel() * tensor.element_size() < _WORTH_PINNING_TO_READ or not pins_memory(tensor.device.type):
        return tensor.contiguous().cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def hash_storage(storage: torch.UntypedStorage) -> int:
    """The XXH3-128 of a storage's bytes, as payloads have it, on any device."""
    hashing = xxhash.xxh3_128()
    for piece in pieces(storage):
        hashing.update(piece)
    return hashing.intdigest()


def _through_pageable_memory(storage: torch.UntypedStorage, length_bytes: int, read: ReadPiece) -> None:
    if length_bytes <= PIECE_BYTES:
        piece = bytearray(length_bytes)
        read(memoryview(piece), 0)
        fill_storage(storage, piece)
        return
    buffer = new_storage(PIECE_BYTES, torch.device("cpu"))
    source = byte_tensor(buffer)
    target = byte_tensor(storage)
    for start in range(0, length_bytes, PIECE_BYTES):
        length = min(PIECE_BYTES, length_bytes - start)
        read(host_view(buffer)[:length], start)
        target[start : start + length].copy_(source[:length])


def _through_pinned_memory(storage: torch.UntypedStorage, length_bytes: int, read: ReadPiece) -> None:
    piece = min(PIECE_BYTES, length_bytes)
    target = byte_tensor(storage)
    stream = torch.accelerator.current_stream(storage.device)
    buffers = [torch.empty((piece,), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    travelled = [torch.Event(storage.device), torch.Event(storage.device)]
    try:
        for number, start in enumerate(range(0, length_bytes, piece)):
            length = min(piece, length_bytes - start)
            buffer, event = buffers[number % 2], travelled[number % 2]
            event.synchronize()  # returns at once where it was never recorded
            read(host_view(buffer.untyped_storage())[:length], start)
            target[start : start + length].copy_(buffer[:length], non_blocking=True)
            event.record(stream)
    finally:
        stream.synchronize()  # the buffers must not go while something still reads them
