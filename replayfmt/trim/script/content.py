"""What a script without data fills its inputs with: what a replay of the same ops without content fills them with,
written as expressions of `n`, the number of elements, and `g`, a seeded generator.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass

import torch

from replayfmt.format.reader import CaptureReader
from replayfmt.format.slots import SlotLayout
from replayfmt.initializers import Demand, Registry, Role
from replayfmt.initializers.floats import DEFAULT_STD, FLOATS, float_bounds
from replayfmt.initializers.roles import positive_definite_views
from replayfmt.replay.planning.effects import Effects, effects_of_missing
from replayfmt.replay.planning.kernels import ResolvedKernel
from replayfmt.replay.planning.resolve import resolve
from replayfmt.replay.planning.scan import Scan
from replayfmt.replay.planning.window_cuts import WindowSize
from replayfmt.replay.synthesis.assignment import Chosen, Synthesis

from ..copying import Copier
from ..schedule import Schedule
from ..selection import Kept
from ..stripping import write_stripped
from ..trimming import writer_of

_FEW = 16  # elements or runs that are written out


@dataclass(frozen=True)
class Made:
    """How a script makes an input: elements of `dtype` by an expression, "" for zeros; `why` they are these."""

    dtype: torch.dtype
    expression: str
    why: str


def made_inputs(reader: CaptureReader, kept: Kept, schedule: Schedule) -> dict[int, Made]:
    """How inputs of ops are made, by storage. Those that no rule fills are missing."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "ops.opreplay")
        with writer_of(path, reader.session) as writer:
            copier = Copier(reader, writer)
            write_stripped(copier, schedule, kept, annotate=False)
            writer.close(0)
        with CaptureReader(path) as stripped:
            synthesis = _synthesis(stripped)
            chosen = {storage: synthesis.chosen(there) for storage, there in copier.storages.items()}
    return {storage: _made(each) for storage, each in chosen.items() if each is not None}


def _synthesis(reader: CaptureReader) -> Synthesis:
    kernels = tuple(None if each is None else resolve(each, reader.session.torch_version) for each in reader.kernels)

    def effects(_signature: int, layout: SlotLayout) -> Effects:
        kernel, captured = kernels[layout.signature.kernel], reader.kernels[layout.signature.kernel]
        assert captured is not None
        if isinstance(kernel, ResolvedKernel):
            return kernel.effects(layout)
        return effects_of_missing(layout, captured.schema)

    return Synthesis(
        reader, Scan(reader, effects, checks=False, window=WindowSize()), kernels, Registry(), lambda info: None
    )


def _made(chosen: Chosen) -> Made:
    dtype = chosen.request.tensor.dtype
    demand = chosen.request.demand or Demand(Role.number)
    if not chosen.request.uses:
        expression = ""
    elif chosen.content is not None:
        expression = _integers(chosen.content, demand)
    elif dtype not in FLOATS:
        expression = ""
    elif demand.role is Role.positive_definite:
        views = [(each.sizes, each.strides, each.offset) for each in positive_definite_views(chosen.request)]
        expression = f"positive_definite(n, g, {views})"
    elif demand.low is None and demand.high is None:
        expression = f"torch.randn(n, generator=g) * {DEFAULT_STD}"
    else:
        low, high = float_bounds(demand)
        expression = f"torch.rand(n, generator=g) * {high - low!r} + {low!r}"
    return Made(dtype, expression, demand.why if demand.role is not Role.number else "")


def _integers(content: torch.Tensor, demand: Demand) -> str:
    """An expression for integers like these, which satisfy a demand."""
    values = content.to(torch.int64)
    kinds, counts = values.unique_consecutive(return_counts=True)
    if len(kinds) == 1:
        return f"torch.full((n,), {int(kinds[0])})"
    if len(values) <= _FEW:
        return f"torch.tensor({values.tolist()})"
    if len(kinds) <= _FEW:
        return f"torch.tensor({kinds.tolist()}).repeat_interleave(torch.tensor({counts.tolist()}))"
    low, high = int(values.min()), int(values.max())
    match demand.role:
        case Role.mask:
            return f"torch.randperm(n, generator=g) < {int(values.sum())}"
        case Role.offsets:
            end, steps = (demand.total, len(values) - 1) if demand.total is not None else (demand.high, len(values))
            return f"torch.arange(n) * {int(end or 0)} // {steps}"
        case Role.distinct:
            return f"{low} + torch.randperm(n, generator=g) % {len(values.unique())}"
        case Role.highest:
            return f"torch.randint({low}, {high + 1}, (n,), generator=g).index_fill_(0, torch.tensor([0]), {high})"
        case Role.index:
            low, high = max(int(demand.low or 0), 0), high if demand.high is None else int(demand.high)
    return f"torch.randint({low}, {high + 1}, (n,), generator=g)"
