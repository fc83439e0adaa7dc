"""Ragged batches: offsets of bags and of jagged rows, in operators that PyTorch's own roles do not know.

Row lengths differ, as they do in recommendation models: they are drawn from a geometric distribution around the mean
and add up to the number of values.
"""

from __future__ import annotations

import numpy as np
import torch

from ..initializer import Initializer
from ..request import Request, TensorInfo

_VALUES = ("values", "indices", "x_values")
_OFFSETS = ("offsets", "x_offsets", "lengths_offsets")


def _values(request: Request) -> TensorInfo | None:
    return next((info for name in _VALUES if (info := request.call.tensor(name)) is not None and info.sizes), None)


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


def _level(request: Request) -> int:
    """The depth of the rows that these offsets delimit: in a list, each level's rows are the values of the last."""
    _, bracket, number = request.label.partition("[")
    return int(number.rstrip("]")) if bracket else 0


def _longest(request: Request) -> int | None:
    """The longest row that the result has room for."""
    given = request.call.arguments.get("max_lengths", request.call.arguments.get("max_sequence_length"))
    if isinstance(given, tuple):
        level = _level(request)
        given = given[level] if level < len(given) else None
    return given if isinstance(given, int) and not isinstance(given, bool) else None


def _total(request: Request) -> int | None:
    """How many values, or rows of the next level, the rows have together."""
    below = request.call.tensor(request.label.partition("[")[0], _level(request) + 1)
    if below is not None:
        return below.elements - 1
    values = _values(request)
    return None if values is None else values.sizes[0]


def _lengths(request: Request) -> np.ndarray | None:
    total, info = _total(request), request.tensor
    if total is None or total < 0 or len(info.sizes) != 1 or info.dtype not in (torch.int32, torch.int64):
        return None
    random = np.random.Generator(np.random.SFC64(np.random.SeedSequence([request.seed])))
    return row_lengths(info.elements - 1, total, _longest(request), random)


def _fill(request: Request) -> torch.Tensor:
    lengths = _lengths(request)
    assert lengths is not None
    total = int(lengths.sum())
    request.note(
        f"{request.call.name}: {len(lengths)} rows of {lengths.min(initial=total)} to "
        f"{lengths.max(initial=0)} values, {total} together"
    )
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lengths)))).to(request.tensor.dtype)


def _accepts(request: Request) -> bool:
    return _lengths(request) is not None


RAGGED = tuple(
    Initializer(
        f"ragged offsets {number}",
        _fill,
        op=pattern,
        arguments=_OFFSETS,
        accepts=_accepts,
        description="where each row begins: lengths differ and add up to the number of values",
    )
    for number, pattern in enumerate(("fbgemm::*", "torchrec::*", "*jagged*"), 1)
)
