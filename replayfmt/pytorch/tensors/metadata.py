"""A tensor's metadata: its fields, read without the program's noticing, the format's codes of them, and their bounds.

The bounds say whether the sizes, strides and offset of a tensor lie within its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from replayfmt.format.codes import DType, Layout, MemoryFormat, TensorFlag

from .memory import make_view

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
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    needed, there = 0 if 0 in sizes else (offset + last + 1) * dtype.itemsize, storage.nbytes()
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
    """Raises ValueError if PyTorch's own invariants of compressed tensors do not hold."""
    try:
        torch._validate_sparse_compressed_tensor_args(compressed, plain, values, list(sizes), layout)
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"a sparse tensor's parts do not go together: {str(error).partition(chr(10))[0]}") from None


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
