"""Reading and making storages, and tensors as views on them, without touching the program's objects.

Bytes are brought from the host to a device's storage and back piece by piece, through pinned memory where that pays.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
import xxhash

from replayfmt.format.codes import TensorFlag
from replayfmt.native import RECORDER_KEY

from ..accelerators import AUTOCAST_KEYS, pins_memory

_P = ParamSpec("_P")
_T = TypeVar("_T")
_NO_FLAGS = TensorFlag(0)
_RECORDERS_KEY = torch._C._parse_dispatch_key(RECORDER_KEY)
_HIDDEN_FROM = functools.reduce(
    operator.or_, (torch._C.DispatchKeySet(key) for key in (*AUTOCAST_KEYS, _RECORDERS_KEY) if key is not None)
)


@contextmanager
def undispatched() -> Iterator[None]:
    """Run torch calls as the recorder's and replayer's own: unseen by the program's modes, transforms (torch.func),
    autograd and autocast."""
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch._C._DisableFuncTorch(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._ExcludeDispatchKeyGuard(_HIDDEN_FROM),
    ):
        yield


def call_undispatched(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """One call inside `undispatched()`, for use while a program runs: whatever a signal handler of the program raises,
    and wherever, the thread's dispatch state is restored at once and in order. (A Python context manager that is
    interrupted while it is entered or left restores it when the exception's traceback is freed.)"""
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch._C._DisableFuncTorch(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._ExcludeDispatchKeyGuard(_HIDDEN_FROM),
    ):
        return function(*args, **kwargs)


def host_view(storage: torch.UntypedStorage) -> memoryview:
    """The live bytes of a CPU storage, without a copy. Valid only while the storage lives and keeps its length."""
    length = storage.nbytes()
    if length == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * length).from_address(storage.data_ptr())).cast("B")


def storage_bytes(storage: torch.UntypedStorage) -> memoryview:
    """All bytes of a storage: on the CPU the live memory (see `host_view`), from another device a host copy."""
    if storage.device.type == "cpu":
        return host_view(storage)
    if storage.nbytes() == 0:
        return memoryview(b"")
    copy = byte_tensor(storage).cpu().untyped_storage()
    view = host_view(copy)
    # The view does not own the copy: hand out bytes that own themselves.
    return memoryview(bytes(view))


def byte_tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage's bytes as a tensor on it."""
    return make_view(storage, torch.uint8, (storage.nbytes(),), (1,))


def row_major_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a strided tensor's elements in row-major order, copied to the host."""
    flat = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    start = int(flat.storage_offset()) * flat.element_size()
    return bytes(storage_bytes(flat.untyped_storage())[start : start + flat.numel() * flat.element_size()])


def new_storage(length_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """A fresh storage whose bytes are not set."""
    return torch.empty((length_bytes,), dtype=torch.uint8, device=device).untyped_storage()


def fill_storage(storage: torch.UntypedStorage, content: bytes | bytearray | memoryview) -> None:
    """Overwrite the first bytes of a storage with `content`. Raises ValueError if it does not fit."""
    source = memoryview(content).cast("B")
    if len(source) > storage.nbytes():
        raise ValueError(f"{len(source)} bytes do not fit into a storage of {storage.nbytes()} bytes")
    if len(source) == 0:
        return
    if storage.device.type == "cpu":
        host_view(storage)[: len(source)] = source
        return
    staging = new_storage(len(source), torch.device("cpu"))
    host_view(staging)[:] = source
    make_view(storage, torch.uint8, (len(source),), (1,)).copy_(byte_tensor(staging))


def fix_length(storage: torch.UntypedStorage) -> None:
    """Let a CPU storage keep its length for good, as memory that torch did not allocate does."""
    byte_tensor(storage).numpy()


def make_view(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    sizes: Iterable[int],
    strides: Iterable[int],
    offset: int = 0,
    flags: TensorFlag = _NO_FLAGS,
) -> torch.Tensor:
    """A tensor on `storage` (shared, not copied); strides and offset are in elements.

    Raises RuntimeError if the view does not fit into the storage.
    """
    # PyTorch warns once of empty memory as complex32, and a program is to have that warning where it has its own.
    lent = torch.float32 if dtype is torch.complex32 else None
    tensor = torch.empty((0,), dtype=lent or dtype, device=storage.device)
    if lent is not None:
        tensor = tensor.view(dtype)
    tensor.set_(storage, offset, tuple(sizes), tuple(strides))
    if flags:
        mark_view(tensor, flags)
    return tensor


def mark_view(tensor: torch.Tensor, flags: TensorFlag) -> None:
    """Let a tensor stand for conjugated or negated values of its memory, as `flags` say."""
    if flags & TensorFlag.conj:
        torch._C._set_conj(tensor, True)
    if flags & TensorFlag.neg:
        torch._C._set_neg(tensor, True)


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
