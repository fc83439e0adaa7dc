"""Inspects a tensor of the program without the program's noticing.

A subclass may replace any attribute (an uninitialized parameter raises for its shape), and its `__torch_function__`
sees what is asked of it. So attributes are read with the base class's own descriptors, which issue no operator and make
no tensor. Call what is here inside `torch._C.DisableTorchFunction()`.
"""

from __future__ import annotations

import torch

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
