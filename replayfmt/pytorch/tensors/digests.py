"""Computing the digest of a tensor (see replayfmt.format.records.digest for what it holds).

Everything is computed on the host. Large tensors of other devices come there in pieces, through one pinned buffer; the
digest is the same. What was computed for the same bytes before is not computed again: bytes are known
by their hash, so nothing depends on noticing what wrote them. Call inside `undispatched()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
import xxhash

from replayfmt.format.codes import DType, TensorFlag
from replayfmt.format.records.digest import Sample, TensorDigest, sample_positions, signed

from .dtypes import DTYPE_CODE
from .elements import Dims, array_of, in_memory_order, merged, pieces
from .memory import host_view, make_view
from .staging import fetched, row_major_pieces
from .statistics import Statistics, Totals, add, figures, reader, statistics

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
_PACKED = {DType.quint4x2, DType.quint2x4}
_QUANTIZED_CARRIER = {DType.qint8: torch.int8, DType.quint8: torch.uint8, DType.qint32: torch.int32}


def digest_tensor(tensor: torch.Tensor) -> TensorDigest:
    """Digest of a strided tensor's logical elements. Raises TypeError for any other layout and packed dtypes."""
    tensor, code = _resolved(tensor)
    if _comes_in_pieces(tensor):
        return _digest_pieces(_bits(tensor), code)
    host = _on_host(tensor, code)
    return _digest(host.untyped_storage(), code, host.shape, host.stride(), int(host.storage_offset()))


def digest_view(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    sizes: Sequence[int],
    strides: Sequence[int],
    offset: int,
    flags: TensorFlag,
) -> TensorDigest:
    """`digest_tensor` of a view on a storage; strides and offset are in elements. Raises ValueError or RuntimeError if
    it does not fit into it."""
    code = DTYPE_CODE[dtype]
    if flags or storage.device.type != "cpu" or code in _PACKED:
        return digest_tensor(make_view(storage, dtype, sizes, strides, offset, flags))
    return _digest(storage, code, sizes, strides, offset)


def hash_tensor(tensor: torch.Tensor) -> tuple[int, int]:
    """(low half, high half) of the hash that the digest of a tensor holds, which takes far less time than the digest.
    Raises TypeError as `digest_tensor` does."""
    tensor, code = _resolved(tensor)
    if _comes_in_pieces(tensor):
        running = xxhash.xxh3_128()
        for piece in row_major_pieces(_bits(tensor), _PIECE_BYTES):
            running.update(_array(piece).data)
        return _halves(running.intdigest())
    host = _on_host(tensor, code)
    if not host.numel():
        return _halves(_hash(b""))
    array = array_of(
        host_view(host.untyped_storage()),
        host.element_size(),
        merged(host.shape, host.stride()),
        int(host.storage_offset()),
    )
    return _halves(_hash_elements(array))


# ------------------------------------------------------------------------------------------------------------- memory


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
    return tensor.device.type != "cpu" and tensor.numel() * tensor.element_size() > _PIECE_BYTES


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


# ------------------------------------------------------------------------------------------------------------- digest


def _digest(
    storage: torch.UntypedStorage, code: DType, sizes: Sequence[int], strides: Sequence[int], offset: int
) -> TensorDigest:
    elements = prod(sizes)
    if not elements:
        return TensorDigest(*_halves(_hash(b"")), 0, 0, 0, None, None, None, None, ())
    memory = host_view(storage)
    logical = merged(sizes, strides)
    ordered = in_memory_order(logical)
    array = array_of(memory, _ITEM_BYTES[code], ordered, offset)
    content = _hash_elements(array)
    return _remembered(
        (content, code, logical), lambda: _compute(memory, array, content, code, logical, ordered, offset)
    )


def _digest_pieces(bits: torch.Tensor, code: DType) -> TensorDigest:
    """The digest of a device's elements, whose bits these are, read once and in pieces."""
    running, totals = xxhash.xxh3_128(), Totals()
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


def _compute(
    memory: memoryview, array: np.ndarray, content: int, code: DType, logical: Dims, ordered: Dims, offset: int
) -> TensorDigest:
    """The digest of elements whose hash in the order of memory, as in `array`, is `content`."""
    as_is = array if logical == ordered else array_of(memory, array.itemsize, logical, offset)
    low, high = _halves(content if as_is is array else _hash_elements(as_is))
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


def _hash_elements(array: np.ndarray) -> int:
    """XXH3-128 of the elements' bytes in row-major order."""
    if array.flags.c_contiguous:
        return _hash(array)
    running = xxhash.xxh3_128()
    for piece in pieces(array, _GATHERED_ELEMENTS):
        running.update(piece.data)
    return running.intdigest()


@lru_cache(64)
def _positions(elements: int) -> np.ndarray:
    return np.array(sample_positions(elements))


def _sample(array: np.ndarray, code: DType) -> Sample:
    positions = _positions(array.size)
    places = positions if array.ndim == 1 else np.unravel_index(positions, array.shape)
    return _values(array[places], code)


def _values(bits: np.ndarray, code: DType) -> Sample:
    values = reader(code)(bits)
    if values.dtype.kind == "f":
        with np.errstate(all="ignore"):  # of signalling NaNs
            values = values.astype(np.float64)
    picked = values.tolist()
    return tuple(picked) if values.dtype.kind in "fc" else tuple(signed(int(value)) for value in picked)


# ---------------------------------------------------------------------------------------------------------- known bytes

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
