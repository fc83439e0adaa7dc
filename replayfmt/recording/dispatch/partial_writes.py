"""Which elements a call writes that overwrites a part of its first argument: what its indices, or its mask, say.

Only asked about memory that is not fully written yet (storages/coverage.py), where digests must leave out the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from replayfmt.pytorch.tensors.memory import call_undispatched

from ..storages.coverage import ByteRegion
from .kernels import CapturedKernel

Places = np.ndarray | list[ByteRegion]  # by element, whether it is written; or parts of the view that are
_ELEMENTS = 1 << 20  # of the first argument, at most, for a trial
_RUNS = 64  # of successive indices
_VALUES = ("value", "values", "source", "src", "fill_value")
_ALONG_A_DIMENSION = ("aten::index_copy_", "aten::index_fill_")


def places_written(
    kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any], region: ByteRegion
) -> Places | None:
    """Where a call is about to write. `region`: the bytes of its first argument. None if that takes too long to find
    out, or the memory is a device's."""
    target = args[0]
    if target.device.type != "cpu":
        return None
    given = {kernel.arguments[index].name: value for index, value in enumerate(args)} | kwargs
    if target.numel() <= _ELEMENTS:
        return call_undispatched(_by_trial, kernel, given)
    along = _along(kernel.name, given)
    return None if along is None else call_undispatched(_parts, region, *along)


def _by_trial(kernel: CapturedKernel, given: dict[str, Any]) -> np.ndarray:
    """Have the operator write True where nothing is true."""
    written = torch.zeros(given["self"].shape, dtype=torch.bool)
    values = {
        name: torch.ones(value.shape, dtype=torch.bool) if isinstance(value, torch.Tensor) else True
        for name, value in given.items()
        if name in _VALUES
    }
    kernel.func(**(given | values | {"self": written}))
    return written.numpy()


def _along(name: str, given: dict[str, Any]) -> tuple[int, torch.Tensor] | None:
    """The dimension and the indices of a call that writes whole slices."""
    if name in _ALONG_A_DIMENSION:
        return given["dim"] % given["self"].dim(), given["index"]
    indices = given.get("indices")
    if name not in ("aten::index_put_", "aten::_index_put_impl_") or not isinstance(indices, list | tuple):
        return None
    used = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    return used[0] if len(used) == 1 and used[0][1].dtype in (torch.int64, torch.int32) else None


def _parts(region: ByteRegion, dim: int, index: torch.Tensor) -> list[ByteRegion] | None:
    """The slices at these indices."""
    size, stride = region.sizes[dim], region.strides[dim]
    places = np.unique((index.cpu().reshape(-1).to(torch.int64) % size).numpy())
    parts = []
    for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1) if len(places) else ():
        sizes = (*region.sizes[:dim], len(run), *region.sizes[dim + 1 :])
        parts.append(ByteRegion(region.start + int(run[0]) * stride, sizes, region.strides, region.item))
    return parts if len(parts) <= _RUNS else None
