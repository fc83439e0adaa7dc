"""How elements pass from one tensor to the next: copied, moved, shifted, scaled, summed up.

For each op that reads content, this module says how its results depend on it. Integers that cannot be followed further
may still decide which memory is read, so that is said too (`followed`). Floating-point numbers are let go there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from .demands import DemandStep
from .request import Call, TensorInfo
from .roles import base_name, is_integral


@dataclass(frozen=True)
class Passed:
    """What becomes of an argument's elements: they are in result `result` (in the argument `written`, if that is not
    empty), after `steps`; `whole` where the result has exactly these elements in the same order. `followed` is False if
    the result depends on them in another way."""

    result: int | None
    written: str = ""
    steps: tuple[DemandStep, ...] = ()
    whole: bool = False
    followed: bool = True


# Results hold some of the elements unchanged; those of _WHOLE hold all of them, in order.
_WHOLE = {
    "clone",
    "_to_copy",
    "to",
    "contiguous",
    "lift_fresh",
    "_pin_memory",
    "resolve_neg",
    "resolve_conj",
    "view_copy",
    "_reshape_copy",
    "reshape",
    "detach_copy",
    "alias_copy",
}
# fmt: off
_MOVING = {
    "cat": ("tensors",), "stack": ("tensors",), "repeat": ("self",), "roll": ("self",), "flip": ("self",),
    "tile": ("self",), "constant_pad_nd": ("self",), "expand_copy": ("self",), "permute_copy": ("self",),
    "index_select": ("self",), "gather": ("self",), "take": ("self",), "index": ("self",), "_unsafe_index": ("self",),
    "masked_select": ("self",), "slice_scatter": ("self", "src"), "select_scatter": ("self", "src"),
    "scatter": ("self", "src"), "index_copy": ("self", "source"), "index_put": ("self", "values"),
    "index_fill": ("self",), "masked_fill": ("self",), "masked_scatter": ("self", "source"), "where": ("self", "other"),
    "tril": ("self",), "triu": ("self",), "clamp": ("self",), "clamp_min": ("self",), "clamp_max": ("self",),
    "maximum": ("self", "other"), "minimum": ("self", "other"), "sort": ("self",), "msort": ("self",),
    "topk": ("self",), "max": ("self", "other"), "min": ("self", "other"), "amax": ("self",), "amin": ("self",),
    "cummax": ("self",), "cummin": ("self",), "kthvalue": ("self",), "median": ("self",), "mode": ("self",),
    "_unique": ("self",), "_unique2": ("self",), "unique_consecutive": ("self",), "repeat_interleave": ("self",),
    "floor": ("self",), "ceil": ("self",), "round": ("self",), "trunc": ("self",),
    "diag_embed": ("self",), "unfold_copy": ("self",), "take_along_dim": ("self",), "copy": ("src",),
    "nan_to_num": ("self",), "embedding": ("weight",),
}
# fmt: on
# Results that depend on an argument's shape alone, are truth values, or are in range whatever is read.
# fmt: off
_SEALED = {
    "_embedding_bag", "_embedding_bag_forward_only", "_pack_padded_sequence",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros",
    "new_ones", "new_empty", "new_full", "new_empty_strided", "_shape_as_tensor", "argmax", "argmin", "argsort",
    "nonzero", "argwhere", "searchsorted", "bucketize", "count_nonzero", "_local_scalar_dense", "item", "equal",
    "fill", "zero", "one_hot", "nonzero_static",
}
# fmt: on


def passed_on(call: Call, argument: str, tensor: TensorInfo) -> Iterator[Passed]:
    """Where the elements go that `call` reads as `argument`. This excludes views, which share the storage."""
    base = base_name(call.name)
    if base in _SEALED:
        return
    in_place = call.name.endswith("_") and not call.name.endswith("__")
    places: list[tuple[int | None, str]] = [
        (index, "")
        for index, each in enumerate(call.results)
        if isinstance(each, TensorInfo) and _carries(tensor, each)
    ]
    if in_place:
        target = call.tensor("self")
        places = [(None, "self")] if target is not None and _carries(tensor, target) else []
    if base in _WHOLE and argument == "self" or base == "copy" and argument == "src":
        yield from (Passed(result, written, whole=_all_of(call, tensor, result, written)) for result, written in places)
    elif argument in _MOVING.get(base, ()):
        # Of several results the first holds the values, the others say where they were.
        yield from (Passed(result, written) for result, written in places[:1])
    elif base in _MOVING or (base == "copy" and argument == "self"):
        return
    elif is_integral(tensor.dtype):
        step = _step(call, base, argument, tensor)
        for result, written in places:
            yield Passed(result, written, (step,) if step is not None else (), followed=step is not None)
    elif not in_place:  # what an optimizer does to its state, step after step, leaves it what it was
        steps = _scaled(call, base, argument)
        yield from (Passed(result, written, steps) for result, written in places if steps)


def _carries(tensor: TensorInfo, result: TensorInfo) -> bool:
    """Whether a result can hold a tensor's elements: numbers made of integers and truth values are safe anyway."""
    return result.dtype is not torch.bool and (is_integral(result.dtype) or not is_integral(tensor.dtype))


def _all_of(call: Call, tensor: TensorInfo, result: int | None, written: str) -> bool:
    other = call.tensor(written) if result is None else call.result(result)
    return other is not None and other.sizes == tensor.sizes


def _step(call: Call, base: str, argument: str, tensor: TensorInfo) -> DemandStep | None:
    """The step that turns an argument's elements into the result's; None if there is no single one."""
    other, alpha = call.integer("other"), call.integer("alpha", 1)
    if argument == "self" and base in ("sum", "cumsum"):
        return DemandStep("running_sum", _summed(call, base, tensor))
    if base in ("add", "sub", "mul", "rsub") and isinstance(other, bool):
        return None
    match base:
        case "add" if other is not None and alpha is not None:
            return DemandStep("add", other * alpha)
        case "sub" if other is not None and alpha is not None and argument == "self":
            return DemandStep("add", -other * alpha)
        case "mul" if other:
            return DemandStep("multiply", other)
        case "neg":
            return DemandStep("multiply", -1)
        case "floor_divide" | "div" | "__rshift__" if other and argument == "self":
            if base == "floor_divide" or call.arguments.get("rounding_mode") == "floor":
                return DemandStep("floor_divide", other)
        case "remainder" if other and argument == "self":
            return DemandStep("remainder", other)
    return None


def _scaled(call: Call, base: str, argument: str) -> tuple[DemandStep, ...]:
    """The steps that turn floating-point elements into the result's; none if they are not known."""
    other, alpha = call.number("other"), call.number("alpha", 1)
    if argument != "self" or alpha is None or call.arguments.get("rounding_mode") is not None:
        return ()
    match base:
        case "add" if other is not None:
            return (DemandStep("add", other * alpha),)
        case "sub" if other is not None:
            return (DemandStep("add", -other * alpha),)
        case "rsub" if other is not None and alpha:
            return (DemandStep("multiply", -alpha), DemandStep("add", other))
        case "mul" if other:
            return (DemandStep("multiply", other),)
        case "div" if other:
            return (DemandStep("multiply", 1 / other),)
        case "neg":
            return (DemandStep("multiply", -1),)
    return ()


def _summed(call: Call, base: str, tensor: TensorInfo) -> int:
    """How many elements are added up to one of the result's, at most."""
    dims = call.arguments.get("dim")
    if isinstance(dims, int):
        dims = (dims,)
    if not isinstance(dims, tuple) or not dims or not tensor.sizes:
        return max(1, tensor.elements)
    return max(1, prod(tensor.sizes[dim] for dim in dims if isinstance(dim, int)))
