"""Tolerances that come from the ops themselves, by a replay of capture a: how far a result may be off by rounding.

Each op with differing results runs again on its inputs: in float64, as a reference, and on inputs that are perturbed by
one unit in the last place. How far that moves its results is the spread it has by itself. Where the inputs differ
between the captures, they are perturbed by as much as they differ, which moves the results by what the inputs explain
(`replayfmt.pytorch.rounding`). An op is to blame if its results are off by more than `MARGIN` times all that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload

from replayfmt.pytorch.overloads import find_overload
from replayfmt.pytorch.rounding import MARGIN, rounding_runs, spread_of
from replayfmt.pytorch.tensors.memory import undispatched
from replayfmt.replay.plan import Plan
from replayfmt.replay.run.copies import Clones
from replayfmt.replay.run.steps import IsolatedOp

from .distances import FLOATS
from .divergence import EQUAL, Root
from .results import Comparison, digest_of, dtype_of, observed_distance
from .tolerances import Tolerance

_EXACT = Tolerance("exact")


def explain(made: Comparison, options: Mapping[str, Any], on_progress: Callable[[str, int, int], None]) -> None:
    """Clear the differences that rounding and the inputs' own differences explain; the others are roots."""
    found = made.divergence
    spreads = _spreads(made, options, on_progress)
    blamed: dict[int, tuple[int, int]] = {}
    unknown: list[int] = []
    for one, other in found.observed:
        op = int(made.a.trace.observed_op[one])
        verdict = _is_explained(made, one, other, spreads.get(op))
        if verdict is None and found.inputs[op] == EQUAL:
            verdict = False
        if verdict is None:
            unknown.append(op)
        elif not verdict:
            blamed.setdefault(op, (one, other))
    kept = [pair for pair in found.observed if int(made.a.trace.observed_op[pair[0]]) in blamed]
    found.within = found.different - len(kept)
    found.observed = kept
    limit = min((x for x, _y in made.alignment.doubts), default=made.a.trace.ops)
    others = [root for root in found.roots if root.kind in ("block", "input", "randomness")]
    roots = [
        Root(
            "op" if made.alignment.exact[op] else "arguments",
            (op,),
            (int(made.alignment.partner_of_a[op]),),
            pair,
            op >= limit,
        )
        for op, pair in blamed.items()
    ]
    found.roots = sorted([*others, *roots], key=lambda root: (root.doubtful, root.a or root.b))
    found.unknown = []
    found.consequence_of = {op: root for op, root in found.consequence_of.items() if op in blamed}
    if unknown and blamed:
        made.notes.append(
            f"of {len(set(unknown)):,} ops with another result no spread can be derived (they cannot run in isolation, "
            f"or return no floating-point numbers); their differences are taken for consequences"
        )


def _is_explained(made: Comparison, one: int, other: int, spread: dict[int, float] | None) -> bool | None:
    """Whether a difference is within what its op explains; None where nothing is known of that."""
    far = observed_distance(made.a, made.b, one, other, _EXACT)
    if far.nan and far.nan[0] != far.nan[1] or far.inf and far.inf[0] != far.inf[1]:
        return False
    allowed = None if spread is None else spread.get(int(made.a.trace.observed_as[one]))
    if allowed is None or dtype_of(made.a, one) not in FLOATS:
        return None
    if far.absolute is None:  # no sampled element differs
        return True
    return far.absolute <= MARGIN * allowed


def _spreads(
    made: Comparison, options: Mapping[str, Any], on_progress: Callable[[str, int, int], None]
) -> dict[int, dict[int, float]]:
    """For each op with differing results: how far it explains each of them to be off, by place."""
    a = made.a
    ops = {int(a.trace.observed_op[one]) for one, _other in made.divergence.observed} - {-1}
    if not ops:
        return {}
    ordinals = {a.ordinal(op): op for op in ops}
    found: dict[int, dict[int, float]] = {}
    done = 0

    def on_op(isolated: IsolatedOp) -> None:
        nonlocal done
        op = ordinals.get(isolated.ordinal)
        if op is None:
            return
        done += 1
        on_progress("deriving tolerances", done, len(ordinals))
        kernel = a.reader.kernels[a.record(op).signature.kernel]
        overload = find_overload(kernel.name, kernel.overload)
        if overload is None or a.trace.draws[op]:
            return
        try:
            call = isolated.called()
        except Exception:
            return
        finally:
            isolated.restore()
        found[op] = _spread(overload, call.arguments, call.named, _input_errors(made, op))

    with Plan(a.reader, keep_going=True, **options) as plan:
        plan.examine(on_op, plan.slice(list(ordinals)))
    return found


def _input_errors(made: Comparison, op: int) -> list[float]:
    """How far each tensor argument is off between the captures, relative to its size; NaN where that is not known."""
    a, b = made.a, made.b
    other = int(made.alignment.partner_of_a[op])
    reads = range(int(a.trace.read_first[op]), int(a.trace.read_first[op + 1]))
    errors = []
    for place, read in enumerate(reads):
        its = int(b.trace.read_first[other]) + place
        if its >= int(b.trace.read_first[other + 1]):
            errors.append(float("nan"))
            continue
        same = any(
            x and x == y
            for x, y in ((a.trace.direct[read], b.trace.direct[its]), (a.trace.derived[read], b.trace.derived[its]))
        )
        seen = int(a.trace.read_observed[read]), int(b.trace.read_observed[its])
        errors.append(0.0 if same else _relative(made, *seen) if min(seen) >= 0 else float("nan"))
    return errors


def _relative(made: Comparison, one: int, other: int) -> float:
    digests = digest_of(made.a, one), digest_of(made.b, other)
    if digests[0] is None or digests[1] is None or len(digests[0].sample) != len(digests[1].sample):
        return float("nan")
    x, y = np.array(digests[0].sample, np.complex128), np.array(digests[1].sample, np.complex128)
    keep = np.isfinite(x) & np.isfinite(y)
    size = float(np.linalg.norm(x[keep]))
    return float(np.linalg.norm(x[keep] - y[keep])) / size if size else float("nan")


def _spread(
    overload: OpOverload, arguments: tuple[Any, ...], named: dict[str, Any], errors: list[float]
) -> dict[int, float]:
    """The largest distance, by place among the results, that rounding and these errors of the inputs explain."""

    def outputs(taken: tuple[Any, ...], by_name: dict[str, Any]) -> list[torch.Tensor] | None:
        return _outputs(overload, taken, by_name)

    with undispatched():
        return spread_of(outputs(arguments, named), rounding_runs(outputs, arguments, named, errors))


def _outputs(overload: OpOverload, arguments: tuple[Any, ...], named: dict[str, Any]) -> list[torch.Tensor] | None:
    """What an op returns, and then what it wrote without returning it, on copies; None if it fails."""
    clones = Clones()
    taken, by_name = clones.of(list(arguments)), clones.of(named)
    try:
        returned = overload(*taken, **by_name)
    except Exception:
        return None
    found = _tensors(returned)
    kept = {tensor.untyped_storage()._cdata for tensor in found}
    for place, argument in enumerate(overload._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = taken[place] if place < len(taken) else by_name.get(argument.name)
            found += [each for each in _tensors(value) if each.untyped_storage()._cdata not in kept]
    return found


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [each for part in value for each in _tensors(part)] if isinstance(value, list | tuple) else []
