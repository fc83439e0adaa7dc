"""Reading and making storages, and tensors as views on them, without touching the program's objects.

A tensor's metadata is read without the program's noticing, mapped to the format's codes, and held against its memory.

Bytes are brought from the host to a device's storage and back piece by piece, through pinned memory where that pays.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
import xxhash

from replayfmt.errors import first_line
from replayfmt.format.codes import DType, Layout, MemoryFormat, TensorFlag
from replayfmt.format.model import spanned
from replayfmt.native import RECORDER_KEY

from ..accelerators import AUTOCAST_KEYS, pins_memory

# Of a storage, past the hook of the programs' own questions for it.
address_of: Callable[[torch.UntypedStorage], int] = torch._C.StorageBase.data_ptr  # type: ignore[attr-defined]

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


# Not an array of ctypes: for each length that makes a class, which takes longer than what it is for.
_view_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_WRITABLE = 0x200  # PyBUF_WRITE


def memory_at(address: int, length: int) -> memoryview:
    """Live memory of this process, without a copy. Valid only as long as its owner keeps it."""
    return _view_memory(address, length, _WRITABLE) if length else memoryview(b"")


def host_view(storage: torch.UntypedStorage) -> memoryview:
    """The live bytes of a CPU storage, without a copy. Valid only while the storage lives and keeps its length."""
    return memory_at(address_of(storage), storage.nbytes())


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


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in a value and its lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    for item in value if isinstance(value, (list, tuple)) else ():
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found += tensors_in(item)
    return found


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
    for part in parts(tensor.view(-1) if tensor.is_contiguous() else tensor, most):
        piece = buffer[: part.numel()]
        piece.view(part.shape).copy_(part)
        yield piece


def parts(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """The elements in row-major order, in views of at most `most`."""
    if tensor.numel() <= most:
        yield tensor
        return
    row = tensor.numel() // len(tensor)
    if row > most:
        for part in tensor:
            yield from parts(part, most)
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


TORCH_DTYPE: dict[DType, torch.dtype] = {
    code: getattr(torch, code.name)
    for code in DType
    if code and isinstance(getattr(torch, code.name, None), torch.dtype)
}
DTYPE_CODE: dict[torch.dtype, DType] = {dtype: code for code, dtype in TORCH_DTYPE.items()}

TORCH_LAYOUT: dict[Layout, torch.layout] = {
    code: getattr(torch, "_mkldnn" if code is Layout.mkldnn else code.name) for code in Layout if code
}
LAYOUT_CODE: dict[torch.layout, Layout] = {layout: code for code, layout in TORCH_LAYOUT.items()}

TORCH_MEMORY_FORMAT: dict[MemoryFormat, torch.memory_format] = {
    code: getattr(torch, code.name) for code in MemoryFormat if code
}
MEMORY_FORMAT_CODE: dict[torch.memory_format, MemoryFormat] = {
    memory_format: code for code, memory_format in TORCH_MEMORY_FORMAT.items()
}

# Dtypes of whole numbers, one in each element.
INTEGERS = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    }
)


_Base = torch._C.TensorBase

dtype_of = _Base.dtype.__get__  # type: ignore[attr-defined]
shape_of = _Base.shape.__get__  # type: ignore[attr-defined]
device_of = _Base.device.__get__
layout_of = _Base.layout.__get__  # type: ignore[attr-defined]
is_quantized = _Base.is_quantized.__get__  # type: ignore[attr-defined]
is_nested = _Base.is_nested.__get__  # type: ignore[attr-defined]
stride_of = _Base.stride
offset_of = _Base.storage_offset
storage_of = _Base.untyped_storage
is_complex = _Base.is_complex
is_conj = _Base.is_conj
is_neg = _Base.is_neg
is_zerotensor = _Base._is_zerotensor


_COMPRESSED_DIMENSION = {torch.sparse_csr: 0, torch.sparse_bsr: 0, torch.sparse_csc: 1, torch.sparse_bsc: 1}


def require_inside(tensor: Any) -> Any:
    """The same tensor (or tensors in lists). Raises RuntimeError if one goes beyond its storage."""
    if isinstance(tensor, list | tuple):
        for each in tensor:
            require_inside(each)
    elif isinstance(tensor, torch.Tensor):
        for part in _dense_parts(tensor):
            needed, there = _end(part), part.untyped_storage().nbytes()
            if needed > there:
                raise RuntimeError(f"a tensor needs {needed} bytes of a storage that has {there}")
    return tensor


def view_inside(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    sizes: Sequence[int],
    strides: Sequence[int],
    offset: int,
    flags: TensorFlag,
) -> torch.Tensor:
    """A view inside of a storage. Raises RuntimeError for any other: PyTorch would make the storage longer."""
    if min((offset, *sizes, *strides)) < 0:
        raise RuntimeError(f"a tensor has sizes {list(sizes)}, strides {list(strides)} and offset {offset}")
    length, there = spanned(sizes, strides), storage.nbytes()
    needed = (offset + length) * dtype.itemsize if length else 0
    if needed > there:
        raise RuntimeError(f"a tensor needs {needed} bytes of a storage that has {there}")
    return make_view(storage, dtype, sizes, strides, offset, flags)


def check_sparse_coo(indices: torch.Tensor, values: torch.Tensor, sizes: Sequence[int]) -> None:
    """Raises ValueError if indices lie outside of `sizes`, or do not go with the values."""
    if (
        indices.dim() != 2
        or indices.dtype != torch.int64
        or values.dim() < 1
        or (indices.shape[1] != values.shape[0] or indices.shape[0] + values.dim() - 1 != len(sizes))
    ):
        raise ValueError("a sparse tensor's indices and values do not go with its sizes")
    sparse = indices.shape[0]
    if tuple(values.shape[1:]) != tuple(sizes[sparse:]):
        raise ValueError("a sparse tensor's values do not go with its sizes")
    if indices.numel():
        limits = torch.tensor(list(sizes[:sparse]), device=indices.device)
        if bool((indices < 0).any()) or bool((indices >= limits.unsqueeze(1)).any()):
            raise ValueError("a sparse tensor has indices outside of its sizes")


def check_sparse_compressed(
    compressed: torch.Tensor, plain: torch.Tensor, values: torch.Tensor, sizes: Sequence[int], layout: torch.layout
) -> None:
    """Raises ValueError if kernels would read beyond the parts of a compressed tensor: if PyTorch's own invariants do
    not hold, apart from sorted and distinct indices, which programs do without."""
    try:
        torch._validate_sparse_compressed_tensor_args(compressed, plain, values, list(sizes), layout)
    except (RuntimeError, IndexError) as error:
        of_content = str(error).rstrip().endswith("is not satisfied.")  # types and shapes hold then
        if not (of_content and _is_within(compressed, plain, values, sizes, _COMPRESSED_DIMENSION[layout])):
            raise ValueError(f"a sparse tensor's parts do not go together: {first_line(error)}") from None


def _is_within(
    compressed: torch.Tensor, plain: torch.Tensor, values: torch.Tensor, sizes: Sequence[int], dimension: int
) -> bool:
    batch, has_blocks = compressed.dim() - 1, values.dim() > len(sizes)
    limit = sizes[batch + 1 - dimension] // (values.shape[batch + 2 - dimension] if has_blocks else 1)
    return bool(
        (compressed[..., 0] == 0).all()
        and (compressed[..., -1] == plain.shape[-1]).all()
        and (compressed.diff() >= 0).all()
        and (plain >= 0).all()
        and (plain < limit).all()
    )


def check_per_channel(sizes: tuple[int, ...], scales: torch.Tensor, zero_points: torch.Tensor, axis: int) -> None:
    """Raises ValueError if there is not a scale and a zero point for every channel."""
    if not 0 <= axis < len(sizes) or not scales.shape == zero_points.shape == torch.Size([sizes[axis]]):
        raise ValueError("a quantized tensor has not as many scales and zero points as channels")


def check_nested(buffer: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor) -> None:
    """Raises ValueError if a part of a nested tensor lies outside of its buffer."""
    parts = (sizes, strides, offsets)
    if (
        buffer.dim() != 1
        or not all(each.is_contiguous() for each in (buffer, *parts))  # kernels read them through addresses
        or any(each.device.type != "cpu" or each.dtype != torch.int64 for each in parts)
        or (
            sizes.shape != strides.shape
            or offsets.dim() != 1
            or sizes.dim() not in (0, 2)
            or (sizes.dim() == 2 and len(offsets) != len(sizes))
        )
    ):
        raise ValueError("a nested tensor's sizes, strides and offsets do not go together")
    rows = zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True) if sizes.dim() == 2 else ()
    for size, stride, offset in rows:  # in Python's integers, which do not overflow
        if min(*size, *stride, offset, 0) < 0:
            raise ValueError("a nested tensor has a negative size, stride or offset")
        last = offset + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
        if 0 not in size and last >= buffer.numel():
            raise ValueError("a part of a nested tensor lies outside of its buffer")


def _dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.strided:
        if tensor.is_nested:
            return []  # made of a buffer that was checked with it
        return [] if tensor.device.type == "meta" or tensor._is_zerotensor() else [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in _COMPRESSED_DIMENSION:
        rows = _COMPRESSED_DIMENSION[tensor.layout] == 0
        indices = (
            [tensor.crow_indices(), tensor.col_indices()] if rows else [tensor.ccol_indices(), tensor.row_indices()]
        )
        return [*indices, tensor.values()]
    return []


def _end(tensor: torch.Tensor) -> int:
    """How many bytes of its storage a strided tensor reaches."""
    if not tensor.numel():
        return 0
    last = tensor.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return int(last + 1) * tensor.element_size()
