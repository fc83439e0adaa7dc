"""The built-in initializers: by recipe, by role, by dtype. Tried after all others, in this order."""

from __future__ import annotations

import math

import numpy as np
import torch

from replayfmt.errors import UsageError
from replayfmt.pytorch.tensors.dtypes import INTEGERS

from .demands import Role
from .floats import DEFAULT_MEAN, DEFAULT_STD, FLOATS, float_bounds, synthesize
from .initializer import Initializer
from .integers import fill_integers
from .request import Request
from .roles import positive_definite_views
from .serving.attention import PAGED_ATTENTION
from .serving.caches import CACHE_INDICES, POSITIONS, SLOT_MAPPING
from .serving.cpu_engines import CPU_ENGINES
from .serving.experts import EXPERT_IDS, EXPERT_WEIGHTS, OPTION, SORTED_EXPERTS, parse_routing
from .serving.packed import PACKED_ATTENTION
from .serving.ragged import RAGGED


def _empty(request: Request) -> torch.Tensor:
    return torch.empty(request.tensor.sizes, dtype=request.tensor.dtype)


def _recipe(request: Request) -> torch.Tensor:
    assert request.recipe is not None
    content = _empty(request)
    synthesize(content, request.seed, request.recipe.statistics)
    return content


def _recorded_range(request: Request) -> torch.Tensor:
    """Drawn evenly from the part of the recipe's range that suits every use."""
    assert request.recipe is not None and request.recipe.statistics is not None
    low, high = int(request.recipe.statistics.min), int(request.recipe.statistics.max)
    demand = request.demand
    if demand is not None:
        low = low if demand.low is None else max(low, int(demand.low))
        high = high if demand.high is None else min(high, int(demand.high))
        if low > high:
            return fill_integers(request.tensor.dtype, request.tensor.elements, demand, request.seed)
    random = np.random.Generator(np.random.SFC64(np.random.SeedSequence([request.seed])))
    values = random.integers(low, high, size=request.tensor.sizes, endpoint=True)
    return torch.from_numpy(values).to(request.tensor.dtype)


def _has_range(request: Request) -> bool:
    known = None if request.recipe is None else request.recipe.statistics
    if known is None or not (math.isfinite(known.min) and math.isfinite(known.max)):
        return False
    # More than a range is asked for: the role decides.
    return request.demand is None or request.demand.role < Role.mask


def _float(request: Request) -> torch.Tensor:
    content = _empty(request)
    synthesize(content, request.seed)
    return content


def _bounded_float(request: Request) -> torch.Tensor:
    assert request.demand is not None
    if request.tensor.dtype.is_complex:
        return _float(request)
    values = torch.empty(request.tensor.sizes, dtype=torch.float32)
    values.uniform_(*float_bounds(request.demand), generator=request.generator)
    return values.to(request.tensor.dtype)


def _positive_definite(request: Request) -> torch.Tensor:
    """Where ops want such matrices the identity and a little that is symmetric; elsewhere as usual."""
    content = _float(request)
    for each in positive_definite_views(request):
        matrices = content.as_strided(each.sizes, each.strides, each.offset)
        matrices.copy_((matrices + matrices.mH) / (10 + each.sizes[-1]))
        matrices.diagonal(dim1=-2, dim2=-1).add_(1)
    return content


def _integers(request: Request) -> torch.Tensor:
    """In floating point too, where the program makes integers of it."""
    assert request.demand is not None
    dtype = request.tensor.dtype if request.tensor.dtype in INTEGERS else torch.int64
    return fill_integers(dtype, request.tensor.elements, request.demand, request.seed).to(request.tensor.dtype)


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


# fmt: off
BUILT_IN: tuple[Initializer, ...] = (
    PAGED_ATTENTION,
    *CPU_ENGINES,
    PACKED_ATTENTION,
    SLOT_MAPPING,
    CACHE_INDICES,
    *POSITIONS,
    SORTED_EXPERTS,
    EXPERT_IDS,
    EXPERT_WEIGHTS,
    *RAGGED,
    Initializer("positive definite", _positive_definite, dtypes=FLOATS, roles=frozenset({Role.positive_definite}),
                description="where an op factors it, matrices near the identity"),
    Initializer("recipe", _recipe, dtypes=FLOATS, accepts=_has_recipe,
                description="with a recipe in the capture, by its seed and statistics"),
    Initializer("recorded range", _recorded_range, dtypes=INTEGERS, accepts=_has_range,
                description="with a recipe in the capture, evenly between its smallest and largest"),
    Initializer("unread", _bytes, accepts=_is_unread, description="never read before it is written; any bytes"),
    Initializer("index", _integers, dtypes=INTEGERS | FLOATS,
                roles=frozenset({Role.index, Role.highest, Role.distinct}),
                description="uniform among the values in range for every use"),
    Initializer("mask", _integers, dtypes=INTEGERS | FLOATS, roles=frozenset({Role.mask}),
                description="as many true elements as captured results have, else all or none, whichever keeps "
                "data alive"),
    Initializer("offsets", _integers, dtypes=INTEGERS | FLOATS, roles=frozenset({Role.offsets}),
                description="from 0 in even steps to the end of what they point into"),
    Initializer("lengths", _integers, dtypes=INTEGERS | FLOATS, roles=frozenset({Role.lengths}),
                description="decreasing, with the captured sum"),
    Initializer("bounded", _integers, dtypes=INTEGERS, roles=frozenset({Role.bounded}),
                description="ones, or the nearest value in range"),
    Initializer("number", _integers, dtypes=INTEGERS, roles=frozenset({Role.number}), description="ones"),
    Initializer("bounded float", _bounded_float, dtypes=FLOATS, roles=frozenset({Role.bounded}),
                description="uniform within the bounds: variances, scales, probabilities"),
    Initializer("float", _float, dtypes=FLOATS,
                description=f"normal, mean {DEFAULT_MEAN:g}, standard deviation {DEFAULT_STD:g}"),
    Initializer("bytes", _bytes, accepts=lambda request: request.tensor.dtype not in FLOATS | INTEGERS,
                description="packed and quantized elements: any bits"),
)
# fmt: on
