"""Higher-order operators under the recorder: their bodies are recorded as ordinary operators.

Some eager implementations assert that no mode is active. Of these, `cond` and `scan` are reimplemented here, because
they issue operators of their own besides their bodies. The others only call their body, so the recorder is reactivated
for the body alone. All the rest run their eager implementation with the recorder active inside.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch._C import DispatchKey

_ONLY_CALL_THEIR_BODY = ("invoke_subgraph", "strict_mode")


class Mode(Protocol):
    """Runs functions with their operators recorded."""

    def run_inside(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


def run_higher_order(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one higher-order operator with its inner operators recorded."""
    name = func.name()
    if name == "cond":
        return mode.run_inside(_cond, args, kwargs)
    if name == "scan":
        from torch._higher_order_ops.scan import generic_scan

        return mode.run_inside(_scan, (generic_scan, *args), kwargs)
    eager = func.py_kernels.get(DispatchKey.CompositeExplicitAutograd)
    if eager is None:
        return mode.run_inside(func, args, kwargs)
    if name in _ONLY_CALL_THEIR_BODY or _is_base(func):
        recorded = [
            _with_recorder(mode, arg) if callable(arg) and not isinstance(arg, torch.Tensor) else arg for arg in args
        ]
        return eager(*recorded, **kwargs)
    return mode.run_inside(eager, args, kwargs)


def _is_base(func: Any) -> bool:
    from torch._higher_order_ops.base_hop import BaseHOP

    return isinstance(func, BaseHOP)


def _with_recorder(mode: Mode, body: Any) -> Any:
    @functools.wraps(body, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        return mode.run_inside(body, args, kwargs)

    if getattr(body, "_boxed_call", False):
        run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _cond(predicate: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    taken = predicate.item() if isinstance(predicate, torch.Tensor) else predicate
    return (true_fn if taken else false_fn)(*operands)


def _scan(generic_scan: Any, combine_fn: Any, init: Any, xs: Any, additional_inputs: Any = ()) -> Any:
    return generic_scan(combine_fn, init, xs, additional_inputs=additional_inputs)
