"""Tensors that are made of other tensors, taken apart and put together: sparse, quantized and strided nested ones, and
those in oneDNN's layout.

The components are plain strided tensors that share memory with the composite, so writing to one is seen in the other,
on both sides; but those of `mkldnn` and the packed forms are copies. The forms and their parts, in order:

    sparse_coo                                        indices, values, sizes, is_coalesced
    sparse_csr, sparse_csc, sparse_bsr, sparse_bsc    compressed indices, plain indices, values, sizes
    quantized_per_tensor                              integers, dtype, scale, zero point
    quantized_per_channel                             integers, dtype, scales, zero points, axis
    nested                                            buffer, sizes, strides, offsets (the last three are tensors)
    mkldnn                                            its content as a plain tensor, which is laid out again
    packed_…                                          see packed_parameters.py

`integers` is the quantized tensor's own memory, with its sizes and strides, as int8, uint8 or int32; of quint4x2, two
elements a byte, it is contiguous and has half as many elements in its last dimension. Call inside `undispatched()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from replayfmt.format.codes import Layout

from . import packed_parameters
from .memory import (
    TORCH_LAYOUT,
    check_nested,
    check_per_channel,
    check_sparse_compressed,
    check_sparse_coo,
    dtype_of,
    is_nested,
    is_quantized,
    layout_of,
    make_view,
    offset_of,
    shape_of,
    storage_of,
    stride_of,
)

Parts = tuple[Any, ...]

_COMPRESSED = {
    torch.sparse_csr: "sparse_csr",
    torch.sparse_csc: "sparse_csc",
    torch.sparse_bsr: "sparse_bsr",
    torch.sparse_bsc: "sparse_bsc",
}
_COMPRESSED_LAYOUT = {form: layout for layout, form in _COMPRESSED.items()}
_ROWS_ARE_COMPRESSED = (torch.sparse_csr, torch.sparse_bsr)
_MKLDNN = TORCH_LAYOUT[Layout.mkldnn]
_INTEGERS = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32, torch.quint4x2: torch.uint8}

FORMS = (
    "sparse_coo",
    *_COMPRESSED_LAYOUT,
    "quantized_per_tensor",
    "quantized_per_channel",
    "nested",
    "mkldnn",
    *packed_parameters.FORMS,
)


def is_composite(tensor: torch.Tensor) -> bool:
    """Whether a tensor must be taken apart (or cannot be: see `take_apart`)."""
    return layout_of(tensor) is not torch.strided or is_quantized(tensor) or is_nested(tensor)


def is_packed(tensor: torch.Tensor | torch.ScriptObject) -> bool:
    """Whether the parts of a composite are copies of its content."""
    return not isinstance(tensor, torch.Tensor) or layout_of(tensor) is _MKLDNN


def take_apart(tensor: torch.Tensor | torch.ScriptObject) -> tuple[str, Parts]:
    """(form, parts) of a composite. The tensors among the parts share its memory, or are copies (`is_packed`).

    Raises TypeError for what has no form here (some packed quantized tensors, other objects).
    """
    if isinstance(tensor, torch.ScriptObject):
        return packed_parameters.take_apart(tensor, _take_quantized)
    layout = layout_of(tensor)
    if layout is torch.sparse_coo:
        return "sparse_coo", (tensor._indices(), tensor._values(), tuple(shape_of(tensor)), tensor.is_coalesced())
    if layout in _COMPRESSED:
        if layout in _ROWS_ARE_COMPRESSED:
            indices = (tensor.crow_indices(), tensor.col_indices())
        else:
            indices = (tensor.ccol_indices(), tensor.row_indices())
        return _COMPRESSED[layout], (*indices, tensor.values(), tuple(shape_of(tensor)))
    if layout is _MKLDNN:
        return "mkldnn", (tensor.to_dense(),)
    if is_quantized(tensor) and dtype_of(tensor) in _INTEGERS:
        return _take_quantized(tensor)
    if is_nested(tensor) and layout is torch.strided:
        shape = (tensor._nested_tensor_size(), tensor._nested_tensor_strides(), tensor._nested_tensor_storage_offsets())
        return "nested", (torch.ops.aten.values.default(tensor), *shape)
    raise TypeError(f"a tensor of layout {layout} and dtype {dtype_of(tensor)} cannot be taken apart")


def _take_quantized(tensor: torch.Tensor) -> tuple[str, Parts]:
    dtype, sizes, strides, offset = dtype_of(tensor), shape_of(tensor), stride_of(tensor), int(offset_of(tensor))
    if dtype is torch.quint4x2:
        if not sizes or sizes[-1] % 2 or offset or not tensor.is_contiguous():
            raise TypeError(f"a tensor of dtype {dtype} and sizes {list(sizes)} with bytes that are not all its own")
        integers = make_view(
            storage_of(tensor),
            torch.uint8,
            (*sizes[:-1], sizes[-1] // 2),
            (*(stride // 2 for stride in strides[:-1]), 1),
        )
    else:
        integers = make_view(storage_of(tensor), _INTEGERS[dtype], sizes, strides, offset)
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return "quantized_per_tensor", (integers, dtype, tensor.q_scale(), tensor.q_zero_point())
    scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return "quantized_per_channel", (integers, dtype, scales, zero_points, tensor.q_per_channel_axis())


def put_together(form: str, parts: Sequence[Any]) -> Any:
    """The composite that `take_apart` took apart, on the memory of its parts. Raises ValueError for other forms, and
    for parts that do not go together: kernels would read beyond them."""
    if form in packed_parameters.FORMS:
        return packed_parameters.put_together(form, parts, put_together)
    if form == "sparse_coo":
        indices, values, sizes, is_coalesced = parts
        check_sparse_coo(indices, values, tuple(sizes))
        return torch.sparse_coo_tensor(indices, values, tuple(sizes), check_invariants=False, is_coalesced=is_coalesced)
    if form in _COMPRESSED_LAYOUT:
        compressed, plain, values, sizes = parts
        check_sparse_compressed(compressed, plain, values, tuple(sizes), _COMPRESSED_LAYOUT[form])
        return torch.ops.aten._sparse_compressed_tensor_unsafe.default(
            compressed,
            plain,
            values,
            tuple(sizes),
            dtype=values.dtype,
            layout=_COMPRESSED_LAYOUT[form],
            device=values.device,
        )
    if form == "quantized_per_tensor":
        integers, dtype, scale, zero_point = parts
        empty = torch._empty_affine_quantized(
            (0,), scale=scale, zero_point=zero_point, dtype=dtype, device=integers.device
        )
        return _on_memory_of(integers, empty)
    if form == "quantized_per_channel":
        integers, dtype, scales, zero_points, axis = parts
        sizes = _quantized_sizes(integers, dtype)
        check_per_channel(sizes, scales, zero_points, axis)
        empty = torch._empty_per_channel_affine_quantized(
            sizes, scales=scales, zero_points=zero_points, axis=axis, dtype=dtype, device=integers.device
        )
        return _on_memory_of(integers, empty)
    if form == "nested":
        buffer, sizes, strides, offsets = parts
        check_nested(buffer, sizes, strides, offsets)
        return torch._nested_view_from_buffer(buffer, sizes, strides, offsets)
    if form == "mkldnn":
        (content,) = parts
        return content.to_mkldnn()
    raise ValueError(f"there is no composite form {form!r}; known are {', '.join(FORMS)}")


def _quantized_sizes(integers: torch.Tensor, dtype: torch.dtype) -> tuple[int, ...]:
    """Raises ValueError for bytes that do not hold pairs of elements."""
    sizes = tuple(integers.shape)
    if dtype is not torch.quint4x2:
        return sizes
    if not sizes or integers.dtype is not torch.uint8 or integers.storage_offset() or not integers.is_contiguous():
        raise ValueError(f"a tensor of dtype {dtype} is made of contiguous bytes, at the beginning of their storage")
    return (*sizes[:-1], sizes[-1] * 2)


def _on_memory_of(integers: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
    sizes, strides = _quantized_sizes(integers, quantized.dtype), integers.stride()
    if quantized.dtype is torch.quint4x2:
        strides = (*(stride * 2 for stride in strides[:-1]), 1)
    quantized.set_(integers.untyped_storage(), int(integers.storage_offset()), sizes, strides)
    return quantized
