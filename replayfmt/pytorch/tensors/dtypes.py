"""The format's dtype, layout and memory format codes, and their PyTorch objects.

A code whose dtype this torch build does not know is absent from the tables; a plan refuses such a capture.
"""

from __future__ import annotations

import torch

from replayfmt.format.codes import DType, Layout, MemoryFormat

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
