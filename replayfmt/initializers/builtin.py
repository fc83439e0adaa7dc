"""The initializers that are always there: by recipe, by role, by dtype. Tried after all others, in this order."""

from __future__ import annotations

import torch

from replayfmt.errors import UsageError

from .attention import PAGED_ATTENTION
from .caches import CACHE_INDICES, POSITIONS, SLOT_MAPPING
from .demands import Role
from .experts import EXPERT_IDS, OPTION, SORTED_EXPERTS, parse_routing
from .floats import DEFAULT_MEAN, DEFAULT_STD, synthesize
from .integers import fill_integers
from .ragged import RAGGED
from .registry import Initializer
from .request import Request

_FLOATS = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
})
_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
                       torch.uint32, torch.uint64})


def _empty(request: Request) -> torch.Tensor:
    return torch.empty(request.tensor.sizes, dtype=request.tensor.dtype)


def _recipe(request: Request) -> torch.Tensor:
    assert request.recipe is not None
    content = _empty(request)
    synthesize(content, request.seed, request.recipe.statistics)
    return content


def _float(request: Request) -> torch.Tensor:
    content = _empty(request)
    synthesize(content, request.seed)
    return content


def _bounded_float(request: Request) -> torch.Tensor:
    assert request.demand is not None
    low, high = request.demand.low or 0.0, 1.0 if request.demand.high is None else request.demand.high
    if request.tensor.dtype.is_complex:
        return _float(request)
    values = torch.empty(request.tensor.sizes, dtype=torch.float32)
    values.uniform_(low, high, generator=request.generator)
    return values.to(request.tensor.dtype)


def _integers(request: Request) -> torch.Tensor:
    assert request.demand is not None
    return fill_integers(request.tensor.dtype, request.tensor.elements, request.demand, request.seed)



def _bytes(request: Request) -> torch.Tensor:
    length = request.tensor.elements * request.tensor.dtype.itemsize
    return torch.randint(256, (length,), dtype=torch.uint8, generator=request.generator).view(request.tensor.dtype)


def _has_recipe(request: Request) -> bool:
    return request.recipe is not None


def _is_unread(request: Request) -> bool:
    return not request.uses


def check_option(name: str, value: str) -> None:
    """Raises UsageError for an option that no initializer knows, or a value that it cannot have."""
    if name != OPTION:
        raise UsageError(f"initializer option {name!r}: there is only {OPTION!r}")
    parse_routing(value)


BUILT_IN: tuple[Initializer, ...] = (
    PAGED_ATTENTION,
    SLOT_MAPPING,
    CACHE_INDICES,
    POSITIONS,
    SORTED_EXPERTS,
    EXPERT_IDS,
    *RAGGED,
    Initializer("recipe", _recipe, dtypes=_FLOATS, accepts=_has_recipe,
                description="with a recipe in the capture, by its seed and statistics"),
    Initializer("unread", _bytes, accepts=_is_unread, description="never read before it is written; any bytes"),
    Initializer("index", _integers, dtypes=_INTEGERS, roles=frozenset({Role.index, Role.highest, Role.distinct}),
                description="uniform among the values that are in range for every use"),
    Initializer("mask", _integers, dtypes=_INTEGERS, roles=frozenset({Role.mask}),
                description="as many true elements as captured results have, else all or none, as keeps data alive"),
    Initializer("offsets", _integers, dtypes=_INTEGERS, roles=frozenset({Role.offsets}),
                description="from 0 in even steps to the end of what they point into"),
    Initializer("lengths", _integers, dtypes=_INTEGERS, roles=frozenset({Role.lengths}),
                description="adding up to what was captured, falling"),
    Initializer("bounded", _integers, dtypes=_INTEGERS, roles=frozenset({Role.bounded}),
                description="ones, or the nearest value in range"),
    Initializer("number", _integers, dtypes=_INTEGERS, roles=frozenset({Role.number}), description="ones"),
    Initializer("bounded float", _bounded_float, dtypes=_FLOATS, roles=frozenset({Role.bounded}),
                description="uniform within the bounds: variances, scales, probabilities"),
    Initializer("float", _float, dtypes=_FLOATS,
                description=f"normal, mean {DEFAULT_MEAN:g}, standard deviation {DEFAULT_STD:g}"),
    Initializer("bytes", _bytes, accepts=lambda request: request.tensor.dtype not in _FLOATS | _INTEGERS,
                description="packed and quantized elements: any bits"),
)
