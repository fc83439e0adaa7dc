"""Computing the digest of a tensor (see replayfmt.format.records.digest for what it holds).

The bytes are hashed on the host, statistics are computed where the tensor lives, in double precision and in bounded
chunks. Call inside `undispatched()`.
"""

from __future__ import annotations

import math

import torch
import xxhash

from replayfmt.format.codes import DType
from replayfmt.format.records.digest import TensorDigest, sample_positions, signed

from .dtypes import DTYPE_CODE
from .memory import host_view, make_view

_CHUNK_ELEMENTS = 1 << 22
_LOW_HALF = (1 << 64) - 1

# Bit patterns without a number behind an element: hashed, never sampled.
_PATTERNS = {
    code
    for code in DType
    if code.name.startswith(("bits", "quint4", "quint2", "float4"))
    or code.name in {f"{sign}int{width}" for sign in ("", "u") for width in range(1, 8)}
}
_QUANTIZED_CARRIER = {DType.qint8: torch.int8, DType.quint8: torch.uint8, DType.qint32: torch.int32}


def digest_tensor(tensor: torch.Tensor) -> TensorDigest:
    """Digest of a strided tensor's logical elements. Raises TypeError for any other layout and packed dtypes."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"only strided tensors have a digest, not {tensor.layout}; digest its components")
    code = DTYPE_CODE[tensor.dtype]
    plain = _as_numbers(tensor.detach(), code)
    elements = plain.numel()
    if elements == 0:
        return TensorDigest(*_hash(b""), 0, 0, 0, None, None, None, None, ())
    flat = _contiguous(plain).view(-1)
    low, high = _hash_elements(flat)
    if code in _PATTERNS:
        return TensorDigest(low, high, elements, 0, 0, None, None, None, None, ())
    sample = _sample(flat)
    if code is DType.bool:
        return TensorDigest(low, high, elements, 0, 0, None, None, None, None, sample)
    return TensorDigest(low, high, elements, *_statistics(flat), sample)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype is not torch.complex32:
        return tensor.contiguous()
    return tensor.view(torch.float32).contiguous().view(torch.complex32)     # see `_gathered_as`


def _as_numbers(tensor: torch.Tensor, code: DType) -> torch.Tensor:
    """The same elements without lazy bits, in a dtype that ordinary operators take."""
    if tensor.is_complex() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor._is_zerotensor():
        tensor = tensor.clone()
    if code in (DType.quint4x2, DType.quint2x4):
        raise TypeError(f"{code.name} packs several elements into a byte: digest its storage as uint8")
    carrier = _QUANTIZED_CARRIER.get(code)
    if code in _PATTERNS:
        carrier = torch.uint8 if tensor.element_size() == 1 else torch.int16
    if carrier is None:
        return tensor
    return make_view(tensor.untyped_storage(), carrier, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def _hash(content: bytes | memoryview) -> tuple[int, int]:
    digest = xxhash.xxh3_128_intdigest(content)
    return digest & _LOW_HALF, digest >> 64


def _hash_elements(flat: torch.Tensor) -> tuple[int, int]:
    """XXH3-128 (low, high) over the bytes of a contiguous one-dimensional tensor."""
    host = flat.cpu()
    start = host.storage_offset() * host.element_size()
    return _hash(host_view(host.untyped_storage())[start : start + host.numel() * host.element_size()])


def _sample(flat: torch.Tensor) -> tuple[int | float | complex, ...]:
    positions = torch.tensor(sample_positions(flat.numel()), device=flat.device)
    carrier = _gathered_as(flat.dtype)
    if carrier is not None:
        values = flat.view(carrier)[positions].view(flat.dtype)
    else:
        values = flat[positions]
    if values.is_floating_point():
        values = values.to(torch.float64)
    elif values.dtype is torch.complex32:
        values = values.to(torch.complex64)
    picked = values.tolist()
    return tuple(signed(int(value)) if isinstance(value, int) else value for value in picked)


def _gathered_as(dtype: torch.dtype) -> torch.dtype | None:
    """What elements are to be taken as where they are copied: float8 has no kernel for it, its bytes do; of complex32
    PyTorch warns once, and that warning is the program's."""
    if dtype is torch.complex32:
        return torch.float32
    return torch.uint8 if dtype.itemsize == 1 else None


def _statistics(flat: torch.Tensor) -> tuple[int, int, float | None, float | None, float | None, float | None]:
    """(NaN count, inf count, min, max, mean, L2 norm) of a flat tensor; complex elements count by absolute value."""
    nan = inf = finite_count = 0
    lowest, highest = math.inf, -math.inf
    total = squares = 0.0
    is_complex = flat.is_complex()
    for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
        chunk = flat[start : start + _CHUNK_ELEMENTS]
        values = chunk.to(torch.complex128).abs() if is_complex else chunk.to(torch.float64)
        if is_complex or flat.is_floating_point():
            nans = int(values.isnan().sum())
            infs = int(values.isinf().sum())
            nan, inf = nan + nans, inf + infs
            if nans or infs:
                values = values[values.isfinite()]
        count = values.numel()
        if count == 0:
            continue
        finite_count += count
        low, high = torch.aminmax(values)
        lowest, highest = min(lowest, float(low)), max(highest, float(high))
        total += float(values.sum())
        squares += float((values * values).sum())
    if finite_count == 0:
        return nan, inf, None, None, None, None
    mean, norm = total / finite_count, math.sqrt(squares)
    if is_complex:
        return nan, inf, None, None, mean, norm
    return nan, inf, lowest, highest, mean, norm
