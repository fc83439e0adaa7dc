"""Which initializer fills which storage: the first that matches, the user's before the built-in ones.

The built-in ones go by operator, by recipe, by role, by dtype, in this order. `load_initializers` loads the user's from
a Python file. The file is executed: naming it is the permission.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from replayfmt.errors import OpReplayError, UsageError
from replayfmt.format.validation import check_kind, items_of, require_regular_file, text_of
from replayfmt.pytorch.op_libraries import printing_aside
from replayfmt.pytorch.tensors.memory import INTEGERS

from .demands import DEFAULT_MEAN, DEFAULT_STD, FLOATS, Role, fill_integers, float_bounds, random_of, synthesize
from .initializer import Fill, Initializer, Request
from .operator_rules import positive_definite_views

_SERVING = f"{__package__}.serving"
try:
    from .serving import INITIALIZERS, OPTIONS
except ModuleNotFoundError as missing:
    if missing.name != _SERVING:
        raise
    INITIALIZERS, OPTIONS = (), {}

_RAGGED_VALUES = ("values", "indices", "x_values")
_RAGGED_OFFSETS = ("offsets", "x_offsets", "lengths_offsets")


def row_lengths(rows: int, total: int, longest: int | None, random: np.random.Generator) -> np.ndarray | None:
    """`rows` lengths of at most `longest` that add up to `total`; None if that cannot be."""
    if rows < 1 or (longest is not None and rows * longest < total):
        return None if rows or total else np.zeros(0, np.int64)
    weights = random.geometric(min(1.0, rows / max(total, 1)), size=rows).astype(np.float64)
    lengths = np.floor(weights / weights.sum() * total).astype(np.int64)
    limit = total if longest is None else longest
    lengths = np.minimum(lengths, limit)
    while (left := total - int(lengths.sum())) > 0:
        open_rows = np.flatnonzero(lengths < limit)
        lengths[random.choice(open_rows, size=min(left, len(open_rows)), replace=False)] += 1
    return lengths


def _ragged_level(request: Request) -> int:
    """The depth of the rows that these offsets delimit: in a list, each level's rows are the values of the last."""
    _, bracket, number = request.label.partition("[")
    return int(number.rstrip("]")) if bracket else 0


def _longest_row(request: Request) -> int | None:
    """The longest row that the result has room for."""
    given = request.call.arguments.get("max_lengths", request.call.arguments.get("max_sequence_length"))
    if isinstance(given, tuple):
        level = _ragged_level(request)
        given = given[level] if level < len(given) else None
    return given if isinstance(given, int) and not isinstance(given, bool) else None


def _ragged_total(request: Request) -> int | None:
    """How many values, or rows of the next level, the rows have together."""
    below = request.call.tensor(request.label.partition("[")[0], _ragged_level(request) + 1)
    if below is not None:
        return below.elements - 1
    values = (info for name in _RAGGED_VALUES if (info := request.call.tensor(name)) is not None and info.sizes)
    return next((info.sizes[0] for info in values), None)


def _ragged_lengths(request: Request) -> np.ndarray | None:
    total, info = _ragged_total(request), request.tensor
    if total is None or total < 0 or len(info.sizes) != 1 or info.dtype not in (torch.int32, torch.int64):
        return None
    random = random_of(request.seed)
    return row_lengths(info.elements - 1, total, _longest_row(request), random)


def _fill_ragged(request: Request) -> torch.Tensor:
    lengths = _ragged_lengths(request)
    assert lengths is not None
    total = int(lengths.sum())
    request.note(
        f"{request.call.name}: {len(lengths)} rows of {lengths.min(initial=total)} to "
        f"{lengths.max(initial=0)} values, {total} together"
    )
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lengths)))).to(request.tensor.dtype)


RAGGED = tuple(
    Initializer(
        f"ragged offsets {number}",
        _fill_ragged,
        op=pattern,
        arguments=_RAGGED_OFFSETS,
        accepts=lambda request: _ragged_lengths(request) is not None,
        description="where each row begins: lengths differ and add up to the number of values",
    )
    for number, pattern in enumerate(("fbgemm::*", "torchrec::*", "*jagged*"), 1)
)


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
    random = random_of(request.seed)
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


def check_option(name: str, value: str) -> None:
    """Raises UsageError for an option that no initializer knows, or a value that it cannot have."""
    if name not in OPTIONS:
        known = f"there is only {', '.join(map(repr, OPTIONS))}" if OPTIONS else "there is none here"
        raise UsageError(f"initializer option {name!r}: {known}")
    OPTIONS[name](value)


# fmt: off
BUILT_IN: tuple[Initializer, ...] = (
    *INITIALIZERS,
    *RAGGED,
    Initializer("positive definite", _positive_definite, dtypes=FLOATS, roles=frozenset({Role.positive_definite}),
                description="where an op factors it, matrices near the identity"),
    Initializer("recipe", _recipe, dtypes=FLOATS, accepts=lambda request: request.recipe is not None,
                description="with a recipe in the capture, by its seed and statistics"),
    Initializer("recorded range", _recorded_range, dtypes=INTEGERS, accepts=_has_range,
                description="with a recipe in the capture, evenly between its smallest and largest"),
    Initializer("unread", _bytes, accepts=lambda request: not request.uses,
                description="never read before it is written; any bytes"),
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


_registered: list[Initializer] = []
_collecting: list[list[Initializer]] = []


def register(
    op: str | None = None,
    *,
    argument: str | Sequence[str] = (),
    dtype: torch.dtype | Iterable[torch.dtype] = (),
    role: Role | Iterable[Role] = (),
    joint: bool = False,
    name: str = "",
    description: str = "",
    accepts: Callable[[Request], bool] | None = None,
) -> Callable[[Fill], Fill]:
    """Decorator: from now on plans use the function as an initializer, after those that were registered before.

    In a file given to --replay-initializer only the plans of that command do. See Initializer for what the arguments
    mean; the name is the function's unless it is given, the description the first line of its docstring.
    Raises UsageError if they contradict each other.
    """

    def decorate(function: Fill) -> Fill:
        text = description or (function.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        made = Initializer(
            name or getattr(function, "__name__", ""),
            function,
            op,
            (argument,) if isinstance(argument, str) else tuple(argument),
            frozenset({dtype} if isinstance(dtype, torch.dtype) else dtype),
            frozenset({role} if isinstance(role, Role) else role),
            joint,
            accepts,
            text,
            origin=getattr(function, "__module__", "") or "registered",
        )
        into = _collecting[-1] if _collecting else _registered
        if any(other.name == made.name for other in into):
            raise UsageError(f"an initializer called {made.name} is registered already; give it another name")
        into.append(made)
        return function

    return decorate


def unregister(name: str) -> None:
    """Forget an initializer that was registered in this process. Raises UsageError if there is none of that name."""
    for index, each in enumerate(_registered):
        if each.name == name:
            del _registered[index]
            return
    raise UsageError(f"no initializer called {name} is registered")


@contextmanager
def collecting() -> Iterator[list[Initializer]]:
    """While it is open, registrations go to the list that it yields, and nowhere else."""
    found: list[Initializer] = []
    _collecting.append(found)
    try:
        yield found
    finally:
        _collecting.pop()


class Registry:
    """The initializers of one plan, in the order in which they are tried."""

    def __init__(self, given: Sequence[Initializer] = (), options: Mapping[str, str] | None = None) -> None:
        """`given` come first, then those registered in this process, then the built-in ones. `options` are handed to
        every initializer. Raises UsageError for an option that no initializer knows, or a wrong value."""
        if options is not None:
            check_kind("initializer_options", options, Mapping)
        self.options = dict(options or {})
        for name, value in self.options.items():
            check_option(name, text_of(f"initializer_options[{name!r}]", value))
        given = items_of("initializers", given, "a list of Initializer objects")
        for each in given:
            if not isinstance(each, Initializer):
                raise UsageError(f"initializers are Initializer objects, not {type(each).__name__}")
        self.users = (*given, *_registered)
        self.initializers = (*self.users, *BUILT_IN)

    def __iter__(self) -> Iterator[Initializer]:
        return iter(self.initializers)

    def lines(self) -> list[str]:
        """Every initializer in order: where it comes from, its name, what it matches."""
        width = max(len(each.name) for each in self.initializers)
        return [
            f"{number:3}  {each.name:{width}}  {each}" + (f"  ({each.origin})" if each.origin != "built-in" else "")
            for number, each in enumerate(self.initializers, 1)
        ]


FLAG = "--replay-initializer"

_numbers = count(1)


def load_initializers(path: str) -> tuple[Initializer, ...]:
    """What a file registers, in order. Raises UsageError if it cannot be read or run, or registers nothing."""
    try:
        require_regular_file(path)
        source = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{FLAG}={path}: cannot be read: {reason}") from None
    # Its classes look up their module by name; no import can collide with this name.
    module = ModuleType(f"replayfmt initializers {next(_numbers)}: {path}")
    module.__file__ = path
    sys.modules[module.__name__] = module
    with collecting() as found, printing_aside():
        try:
            exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
        except OpReplayError as error:
            raise UsageError(f"{FLAG}={path}: {error}") from None
        except (Exception, SystemExit) as error:
            raise UsageError(f"{FLAG}={path}: {_where(error, path)}{type(error).__name__}: {error}") from error
    if not found:
        raise UsageError(
            f"{FLAG}={path}: it registers no initializer; decorate functions with @replayfmt.initializers.register(...)"
        )
    return tuple(replace(each, origin=path) for each in found)


def _where(error: BaseException, path: str) -> str:
    """`line 7: `, the line of the file at which the error was raised or passed through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError):
        return ""
    return f"line {lines[-1]}: " if lines else ""
