"""Computing the digest of a tensor (see TensorDigest in replayfmt.format.model for what it holds).

The elements of a strided view on host memory are taken in pieces that fit a processor's cache, without a copy of the
whole. Their statistics take one pass, in double precision: in C++ where the library is there (`BlockStatistics`, the
Python side of native/block_statistics.cpp, with helper threads if there are many elements), else in NumPy. A long call
releases the GIL. The helper threads live only during the call: none is left when it returns, and a child that another
thread of the program forks meanwhile has none to wait for.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash

from replayfmt.format.codes import DType, TensorFlag
from replayfmt.format.external_files import processors
from replayfmt.format.model import SAMPLE_ELEMENTS, Sample, TensorDigest, sample_positions, signed
from replayfmt.native.building import NotAvailable, library, say

from .long_content import (
    CHUNK_BYTES,
    HASH_CONSTANTS,
    LongHash,
    add_device_piece,
    content_hash,
    device_pieces,
    hash_chunks_with_xxhash,
    is_long,
)
from .memory import DTYPE_CODE, TORCH_DTYPE, call_undispatched, fetched, host_view, make_view, row_major_pieces

_T = TypeVar("_T")
BLOCK_ELEMENTS = 1 << 16  # as doubles they fit the L2 cache; in smaller blocks NumPy's calls cost more
_BLOCKS_A_THREAD = 64  # a millisecond of work or more: on a busy machine, a thread waits several for a processor
_MOST_THREADS = 8  # more threads only wait for memory
_LONG = 4 * BLOCK_ELEMENTS  # enough elements to make releasing the GIL worthwhile


class Totals(ctypes.Structure):
    """The statistics of the elements so far. `lowest` and `highest` are meaningless while `finite` is 0."""

    _fields_ = [
        ("nan", ctypes.c_int64),
        ("inf", ctypes.c_int64),
        ("finite", ctypes.c_int64),
        ("lowest", ctypes.c_double),
        ("highest", ctypes.c_double),
        ("total", ctypes.c_double),
        ("squares", ctypes.c_double),
    ]
    nan: int
    inf: int
    finite: int
    lowest: float
    highest: float
    total: float
    squares: float

    def __init__(self) -> None:
        super().__init__(0, 0, 0, math.inf, -math.inf)


class BlockStatistics:
    """The library. Raises NotAvailable if it cannot be loaded."""

    def __init__(self) -> None:
        found = library("block_statistics.cpp")
        self._short = _declared(found)
        without_gil = ctypes.CDLL(found._name, handle=found._handle)
        self._long = _declared(without_gil)
        self._hash = without_gil.opreplay_chunk_hashes
        self._hash.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int)
        self._hash.restype = None

    def add(self, totals: Totals, address: int, count: int, kind: str) -> int:
        """Add `count` contiguous elements to `totals`, in blocks of BLOCK_ELEMENTS. Returns how many were added: whole
        blocks, or all. The rest is left to NumPy.

        `kind`: `d`, `f`, `e` or `g` for floating-point numbers of 64, 32, 16 bits and bfloat16; `b`, `h`, `i`, `q` for
        integers of 8, 16, 32, 64 bits, in capitals for unsigned ones.
        """
        if count < _LONG:
            return int(self._short(totals, address, count, ord(kind), 1))
        return int(self._long(totals, address, count, ord(kind), _threads(count)))

    def hash_chunks(self, chunks: memoryview) -> bytes:
        """The XXH3-64 of each chunk of long content, little-endian."""
        count = len(chunks) // CHUNK_BYTES
        hashes = np.empty(count, "<u8")
        self._hash(
            np.frombuffer(chunks, np.uint8).ctypes.data,
            count,
            HASH_CONSTANTS,
            hashes.ctypes.data,
            _threads(len(chunks) // 4),
        )
        return hashes.tobytes()


def _declared(found: ctypes.CDLL) -> ctypes._NamedFuncPointer:
    function = found.opreplay_statistics
    function.argtypes = (ctypes.POINTER(Totals), ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int)
    function.restype = ctypes.c_int64
    return function


def _threads(count: int) -> int:
    """How many threads are worth starting for `count` elements: at most as many as PyTorch may use, and as there are
    processors for this process."""
    most = min(count // (BLOCK_ELEMENTS * _BLOCKS_A_THREAD), _MOST_THREADS)
    if most < 2:
        return 1
    return min(most, torch.get_num_threads(), processors())


Dims = tuple[tuple[int, int], ...]  # (size, stride in elements) of each dimension, outermost first

# What carries the bits of an element of so many bytes.
_NUMPY_CARRIERS: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("c16"),
}


@lru_cache(1024)
def arranged(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Dims, Dims]:
    """The dimensions of the same elements, as few as possible: in the same order, and in that of their places in
    memory. No size may be 0."""
    dims = merged(zip(sizes, strides, strict=True))
    return dims, merged(sorted(dims, key=lambda dim: -dim[1]))


def merged(given: Iterable[tuple[int, int]]) -> Dims:
    """The same elements in the same order with as few dimensions as possible, at least one."""
    dims: list[tuple[int, int]] = []
    for size, stride in given:
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return tuple(dims) or ((1, 1),)


def array_of(memory: memoryview, item: int, dims: Dims, offset: int) -> np.ndarray:
    """The elements, `item` bytes each and `offset` elements into `memory`, as an array of their bits. Shares memory.

    Raises ValueError if they do not fit into it.
    """
    return np.ndarray(
        [size for size, _stride in dims],
        _NUMPY_CARRIERS[item],
        memory,
        offset * item,
        [stride * item for _size, stride in dims],
    )


def pieces(array: np.ndarray, most: int) -> Iterator[np.ndarray]:
    """The elements in row-major order, in contiguous pieces of at most `most`. Copies only what is scattered."""
    if array.ndim == 1:
        for start in range(0, len(array), most):
            yield np.ascontiguousarray(array[start : start + most])
        return
    row = array[0].size
    if row > most:
        for part in array:
            yield from pieces(part, most)
        return
    rows = most // row
    for start in range(0, len(array), rows):
        yield np.ascontiguousarray(array[start : start + rows]).reshape(-1)


# NaN count, inf count, min, max, mean, L2 norm.
Statistics = tuple[int, int, float | None, float | None, float | None, float | None]

_PLAIN = {
    DType.bool: "u1",
    DType.uint8: "u1",
    DType.int8: "i1",
    DType.uint16: "u2",
    DType.int16: "i2",
    DType.uint32: "u4",
    DType.int32: "i4",
    DType.uint64: "u8",
    DType.int64: "i8",
    DType.float32: "f4",
    DType.float64: "f8",
    DType.complex64: "c8",
    DType.complex128: "c16",
    DType.qint8: "i1",
    DType.quint8: "u1",
    DType.qint32: "i4",
}
# What the methods of arrays call; for small ones the way there is most of their time.
_least, _greatest, _sum = np.minimum.reduce, np.maximum.reduce, np.add.reduce
_COMPLEX = {DType.complex32, DType.complex64, DType.complex128}
# What block_statistics.cpp calls them.
_KINDS = {
    DType.float64: "d",
    DType.float32: "f",
    DType.float16: "e",
    DType.bfloat16: "g",
    DType.int8: "b",
    DType.int16: "h",
    DType.int32: "i",
    DType.int64: "q",
    DType.uint8: "B",
    DType.uint16: "H",
    DType.uint32: "I",
    DType.uint64: "Q",
    DType.qint8: "b",
    DType.quint8: "B",
    DType.qint32: "i",
}
_native: BlockStatistics | None = None


@cache
def use_native() -> None:
    """Compute in C++ from here on, if the library can be had and adds up as this NumPy does. Said once if not."""
    global _native
    try:
        native = BlockStatistics()
    except NotAvailable as problem:
        say(f"digests take longer in this process ({problem})")
        return
    numbers = np.arange(1.5 * BLOCK_ELEMENTS) * 0.618 % 1 - 0.4
    for code, dtype, carrier in ((DType.float64, "f8", "u8"), (DType.float32, "f4", "u4"), (DType.float16, "f2", "u2")):
        bits = numbers.astype(dtype).view(carrier)
        found, expected = Totals(), Totals()
        _add(expected, bits, code)
        if native.add(found, bits.ctypes.data, len(bits), _KINDS[code]) != len(bits) or bytes(found) != bytes(expected):
            say("digests take longer in this process (this NumPy does not add up as the library in C++ does)")
            return
    chunks = numbers[:BLOCK_ELEMENTS].data.cast("B")
    if native.hash_chunks(chunks) != hash_chunks_with_xxhash(chunks):
        say("digests take longer in this process (the library in C++ does not hash as xxhash does)")
        return
    _native = native
    LongHash.hash_chunks = native.hash_chunks


@cache
def reader(code: DType) -> Callable[[np.ndarray], np.ndarray]:
    """What makes numbers of the contiguous bits of a dtype, in a dtype that NumPy computes with."""
    if code in _PLAIN:
        dtype = np.dtype(_PLAIN[code])
        return lambda bits: bits.view(dtype)
    if code is DType.bfloat16:
        return lambda bits: (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if code is DType.complex32:
        return lambda bits: bits.view(np.float16).astype(np.float32).view(np.complex64)
    if code is DType.float16:  # NumPy converts it sooner than it computes with it
        return lambda bits: bits.view(np.float16).astype(np.float32)
    of_a_byte = TORCH_DTYPE[code]  # all its numbers, by their bits
    table = np.array(
        call_undispatched(lambda: torch.arange(256, dtype=torch.uint8).view(of_a_byte).to(torch.float64).tolist())
    )
    return lambda bits: table[bits]


def statistics(array: np.ndarray, code: DType) -> Statistics:
    """Statistics of the elements whose bits `array` holds, in its order; of complex elements those of their absolute
    values, without minimum and maximum."""
    totals = Totals()
    add(totals, array, code)
    return figures(totals, code)


def add(totals: Totals, array: np.ndarray, code: DType) -> None:
    """Add elements to what was added before. In pieces of a multiple of BLOCK_ELEMENTS the sum is that of the whole."""
    native, kind = _native, _KINDS.get(code)
    whole = native is not None and array.ndim == 1 and array.strides[0] == array.itemsize
    for piece in (array,) if whole else pieces(array, BLOCK_ELEMENTS):
        done = 0
        if native and kind:  # `piece.ctypes.data` takes twice as long
            done = native.add(totals, ctypes.addressof(ctypes.c_char.from_buffer(piece.data)), len(piece), kind)
        if done < len(piece):
            _add(totals, piece[done:], code)


def figures(totals: Totals, code: DType) -> Statistics:
    """The statistics of what was added."""
    if not totals.finite:
        return totals.nan, totals.inf, None, None, None, None
    bounds = (None, None) if code in _COMPLEX else (totals.lowest, totals.highest)
    return totals.nan, totals.inf, *bounds, totals.total / totals.finite, math.sqrt(totals.squares)


def _add(totals: Totals, contiguous: np.ndarray, code: DType) -> None:
    """Add the elements to `totals` with NumPy."""
    numbers = reader(code)
    scratch = np.empty(min(contiguous.size, BLOCK_ELEMENTS))
    with np.errstate(all="ignore"):
        for bits in pieces(contiguous, BLOCK_ELEMENTS):
            block = numbers(bits)
            if code in _COMPLEX:
                block = np.abs(block.astype(np.complex128))
            low, high = float(_least(block)), float(_greatest(block))
            if not (math.isfinite(low) and math.isfinite(high)):
                kept = block[np.isfinite(block)]
                nans = int(np.count_nonzero(np.isnan(block)))
                totals.nan += nans
                totals.inf += block.size - nans - kept.size
                block = kept
                if not block.size:
                    continue
                low, high = float(_least(block)), float(_greatest(block))
            totals.finite += block.size
            totals.lowest, totals.highest = min(totals.lowest, low), max(totals.highest, high)
            exact = scratch[: block.size]
            np.copyto(exact, block)
            totals.total += float(_sum(exact))
            totals.squares += float(_sum(np.multiply(exact, exact, out=exact)))


_GATHERED_ELEMENTS = 1 << 17  # hashed at once where they are scattered: enough that cache lines are read few times
_PIECE_BYTES = 16 << 20  # of a device's tensor that are on the host at once: a multiple of BLOCK_ELEMENTS elements
_REMEMBERED = 1024  # results; up to twice as many are kept, of some kilobytes each
_LOW_HALF = (1 << 64) - 1
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ITEM_BYTES = {code: dtype.itemsize for dtype, code in DTYPE_CODE.items()}

# Bit patterns without a number behind an element: hashed, never sampled.
_PATTERNS = {
    code
    for code in DType
    if code.name.startswith(("bits", "quint4", "quint2", "float4"))
    or code.name in {f"{sign}int{width}" for sign in ("", "u") for width in range(1, 8)}
}
# Whose statistics a device computes as the host does.
_DEVICE_NUMBERS = {
    *(DType.float64, DType.float32, DType.float16, DType.bfloat16),
    *(DType.int8, DType.int16, DType.int32, DType.int64, DType.uint8),
}
_PACKED = {DType.quint4x2, DType.quint2x4}
_QUANTIZED_CARRIER = {DType.qint8: torch.int8, DType.quint8: torch.uint8, DType.qint32: torch.int32}


def digest_tensor(tensor: torch.Tensor) -> TensorDigest:
    """Digest of a strided tensor's logical elements. Raises TypeError for any other layout and packed dtypes."""
    tensor, code = _resolved(tensor)
    if _comes_in_pieces(tensor):
        bits = _bits(tensor)
        return _where_it_is(_digest_on_device, bits, tensor.dtype, code) or _digest_pieces(bits, code)
    host = _on_host(tensor, code)
    return _digest(host.untyped_storage(), code, host.shape, host.stride(), int(host.storage_offset()))


def digest_view(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    flags: TensorFlag,
) -> TensorDigest:
    """`digest_tensor` of a view on a storage, in the middle of a program; strides and offset are in elements. Raises
    ValueError or RuntimeError if it does not fit into it."""
    code = DTYPE_CODE[dtype]
    if flags or storage.device.type != "cpu" or code in _PACKED:
        return call_undispatched(lambda: digest_tensor(make_view(storage, dtype, sizes, strides, offset, flags)))
    return _digest(storage, code, sizes, strides, offset)


def hash_tensor(tensor: torch.Tensor) -> tuple[int, int]:
    """(low half, high half) of the hash that the digest of a tensor holds, which takes far less time than the digest.
    Raises TypeError as `digest_tensor` does."""
    tensor, code = _resolved(tensor)
    if _comes_in_pieces(tensor):
        bits = _bits(tensor)
        there = _where_it_is(_hash_on_device, bits)
        return _halves(_hash_pieces(bits) if there is None else there)
    host = _on_host(tensor, code)
    if not host.numel():
        return _halves(_hash(b""))
    dims, _ordered = arranged(host.shape, host.stride())
    return _halves(
        _hash_elements(host_view(host.untyped_storage()), host.element_size(), dims, int(host.storage_offset()))
    )


def _where_it_is(compute: Callable[..., _T | None], *args: Any) -> _T | None:
    """What is computed on a device; None where that cannot be, or where it has no memory for it."""
    try:
        return compute(*args)
    except torch.OutOfMemoryError:
        return None


def _hash_on_device(bits: torch.Tensor) -> int | None:
    running, there = content_hash(bits.numel() * bits.element_size()), device_pieces(bits)
    if there is None or not isinstance(running, LongHash):
        return None
    for piece in there:
        add_device_piece(running, piece)
    return running.intdigest()


def _hash_pieces(bits: torch.Tensor) -> int:
    running = content_hash(bits.numel() * bits.element_size())
    for piece in row_major_pieces(bits, _PIECE_BYTES):
        running.update(_array(piece).data)
    return int(running.intdigest())


def _resolved(tensor: torch.Tensor) -> tuple[torch.Tensor, DType]:
    """The same elements without lazy bits, and their dtype's code. Shares memory where that can be."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"only strided tensors have a digest, not {tensor.layout}; digest its components")
    code = DTYPE_CODE[tensor.dtype]
    if code in _PACKED:
        raise TypeError(f"{code.name} packs several elements into a byte: digest its storage as uint8")
    tensor = tensor.detach()
    if tensor.is_complex() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor._is_zerotensor():
        tensor = tensor.clone()
    return tensor, code


def _comes_in_pieces(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu" and is_long(tensor.numel() * tensor.element_size())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view that has each element's bits as an integer (of 16 bytes: as they are)."""
    carrier = _CARRIERS.get(tensor.element_size(), tensor.dtype)
    return make_view(tensor.untyped_storage(), carrier, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def _array(piece: torch.Tensor) -> np.ndarray:
    """The bits of a flat host tensor. Shares memory."""
    return array_of(host_view(piece.untyped_storage()), piece.element_size(), ((piece.numel(), 1),), 0)


def _on_host(tensor: torch.Tensor, code: DType) -> torch.Tensor:
    """The same elements in host memory. Shares memory where that can be."""
    if tensor.device.type == "cpu":
        return tensor
    carrier = _carrier(tensor, code)
    if carrier is not None:
        tensor = make_view(
            tensor.untyped_storage(), carrier, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )
    elif tensor.dtype is torch.complex32:  # PyTorch warns once of complex32, and that warning is the program's
        return tensor.view(torch.float32).contiguous().cpu().view(torch.complex32)
    return fetched(tensor)


def _carrier(tensor: torch.Tensor, code: DType) -> torch.dtype | None:
    """The dtype that ordinary operators take in place of one that they do not."""
    if code in _PATTERNS:
        return torch.uint8 if tensor.element_size() == 1 else torch.int16
    return _QUANTIZED_CARRIER.get(code)


def _digest(
    storage: torch.UntypedStorage, code: DType, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> TensorDigest:
    if 0 in sizes:
        return TensorDigest(*_halves(_hash(b"")), 0, 0, 0, None, None, None, None, ())
    memory = host_view(storage)
    logical, ordered = arranged(sizes, strides)
    content = _hash_elements(memory, _ITEM_BYTES[code], ordered, offset)
    return _remembered((content, code, logical), lambda: _compute(memory, content, code, logical, ordered, offset))


def _digest_pieces(bits: torch.Tensor, code: DType) -> TensorDigest:
    """The digest of a device's elements, whose bits these are, read once and in pieces."""
    running, totals = content_hash(bits.numel() * bits.element_size()), Totals()
    positions, sampled, start = _positions(bits.numel()), [], 0
    numbers = code not in _PATTERNS
    for piece in row_major_pieces(bits, _PIECE_BYTES):
        array = _array(piece)
        running.update(array.data)
        if numbers:
            here = positions[(positions >= start) & (positions < start + len(array))]
            sampled.append(array[here - start])
            if code is not DType.bool:
                add(totals, array, code)
        start += len(array)
    low, high = _halves(running.intdigest())
    found = figures(totals, code) if numbers and code is not DType.bool else (0, 0, None, None, None, None)
    return TensorDigest(low, high, start, *found, _values(np.concatenate(sampled), code) if numbers else ())


def _digest_on_device(bits: torch.Tensor, dtype: torch.dtype, code: DType) -> TensorDigest | None:
    """The same, computed where the elements are; None where that cannot be. The last bits of mean and norm differ from
    the host's: a device adds in another order."""
    running, totals = content_hash(bits.numel() * bits.element_size()), Totals()
    there = device_pieces(bits) if code in _DEVICE_NUMBERS else None
    if there is None or not isinstance(running, LongHash):
        return None
    for piece in there:
        add_device_piece(running, piece)
        numbers = piece.view(dtype)
        if not dtype.is_floating_point:
            numbers = numbers.to(torch.float64)
        found = [*numbers.aminmax(), numbers.sum(dtype=torch.float64)]
        found.append(torch.linalg.vector_norm(numbers, dtype=torch.float64))
        low, high, total, norm = torch.stack([each.to(torch.float64) for each in found]).tolist()
        if math.isfinite(low) and math.isfinite(high):
            totals.finite += len(piece)
            totals.lowest, totals.highest = min(totals.lowest, low), max(totals.highest, high)
            totals.total += total
            totals.squares += norm * norm
        else:
            here = piece.to("cpu", copy=True)
            add(totals, _array(here), code)
    places = np.unravel_index(_positions(bits.numel()), bits.shape)
    sampled = bits[tuple(torch.from_numpy(each).to(bits.device) for each in places)].cpu()
    low_half, high_half = _halves(running.intdigest())
    return TensorDigest(low_half, high_half, bits.numel(), *figures(totals, code), _values(_array(sampled), code))


def _compute(memory: memoryview, content: int, code: DType, logical: Dims, ordered: Dims, offset: int) -> TensorDigest:
    """The digest of elements whose hash in the order of memory is `content`."""
    item = _ITEM_BYTES[code]
    array = as_is = array_of(memory, item, ordered, offset)
    low, high = _halves(content)
    if logical != ordered:
        as_is = array_of(memory, item, logical, offset)
        low, high = _halves(_hash_elements(memory, item, logical, offset))
    if code in _PATTERNS:
        return TensorDigest(low, high, array.size, 0, 0, None, None, None, None, ())
    sample = _sample(as_is, code)
    if code is DType.bool:
        return TensorDigest(low, high, array.size, 0, 0, None, None, None, None, sample)
    found: Statistics = _remembered((content, code), lambda: statistics(array, code))
    return TensorDigest(low, high, array.size, *found, sample)


def _hash(content: Any) -> int:
    return xxhash.xxh3_128_intdigest(content)


def _halves(digest: int) -> tuple[int, int]:
    return digest & _LOW_HALF, digest >> 64


def _hash_elements(memory: memoryview, item: int, dims: Dims, offset: int) -> int:
    """The hash of the elements' bytes in row-major order. Raises ValueError if they do not fit into `memory`."""
    size, stride = dims[0]
    begin, end = offset * item, (offset + size) * item
    if len(dims) == 1 and stride == 1 and end <= len(memory) and not is_long(end - begin):
        return _hash(memory[begin:end])
    array = array_of(memory, item, dims, offset)
    running = content_hash(array.nbytes)
    if array.flags.c_contiguous:
        running.update(array.data)
        return int(running.intdigest())
    for piece in pieces(array, _GATHERED_ELEMENTS):
        running.update(piece.data)
    return int(running.intdigest())


@lru_cache(64)
def _positions(elements: int) -> np.ndarray:
    return np.array(sample_positions(elements))


def _sample(array: np.ndarray, code: DType) -> Sample:
    if array.ndim == 1 and array.size <= SAMPLE_ELEMENTS:
        return _values(np.ascontiguousarray(array), code)
    positions = _positions(array.size)
    places = positions if array.ndim == 1 else np.unravel_index(positions, array.shape)
    return _values(array[places], code)


def _values(bits: np.ndarray, code: DType) -> Sample:
    values = reader(code)(bits)
    picked = values.tolist()
    return tuple(map(signed, picked) if values.dtype.kind == "u" else picked)


_recent: dict[Any, Any] = {}
_older: dict[Any, Any] = {}


def _remembered(key: Any, compute: Callable[[], Any]) -> Any:
    """What was computed for a key; the least used ones are forgotten. Safe to call from several threads."""
    global _recent, _older
    known = _recent.get(key)
    if known is None:
        known = _older.get(key)
        if known is None:
            known = compute()
        if len(_recent) >= _REMEMBERED:
            _recent, _older = {}, _recent
        _recent[key] = known
    return known
