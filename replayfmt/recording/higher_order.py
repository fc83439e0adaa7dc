"""Higher-order operators under the recorder: their bodies run as ordinary operators, which are recorded.

`cond` and `scan` assert that no mode is active, so their eager meaning is spelled out here; the others run their eager
implementation with the recorder active inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C import DispatchKey

if TYPE_CHECKING:
    from .mode import RecordingMode


def run_higher_order(mode: RecordingMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one higher-order operator with its inner operators recorded."""
    name = getattr(func, "_name", str(func))
    if name == "cond":
        return mode.run_inside(_cond, args, kwargs)
    eager = getattr(func, "py_kernels", {}).get(DispatchKey.CompositeExplicitAutograd)
    if eager is None:
        return mode.run_inside(func, args, kwargs)
    return mode.run_inside(eager, args, kwargs)


def _cond(predicate: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    taken = predicate.item() if isinstance(predicate, torch.Tensor) else predicate
    return (true_fn if taken else false_fn)(*operands)
