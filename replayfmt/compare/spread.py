"""Tolerances that come from the ops themselves, by a replay of capture a: how far a result may be off by rounding.

Each op with differing results runs again on its inputs: in float64, as a reference, and on inputs that are perturbed by
one unit in the last place. How far that moves its results is the spread it has by itself. Where the inputs differ
between the captures, they are perturbed by as much as they differ, which moves the results by what the inputs explain.
This follows TTrace (arXiv 2506.09280), which perturbs inputs to learn what error a component may show. An op is to
blame if its results are off by more than `_MARGIN` times all that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload

from replayfmt.pytorch.overloads import find_overload
from replayfmt.pytorch.tensors.memory import undispatched
from replayfmt.replay.plan import Plan
from replayfmt.replay.run.copies import Clones
from replayfmt.replay.run.steps import IsolatedOp

from .distances import FLOATS
from .divergence import EQUAL, Root
from .results import Comparison, digest_of, dtype_of, observed_distance
from .tolerances import Tolerance

_MARGIN = 8.0
_PERTURBED = 3  # times: with random signs twice, and once with one sign
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
    return far.absolute <= _MARGIN * allowed


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
    with undispatched():
        before = _outputs(overload, arguments, named)
        runs = [_outputs(overload, *_changed(arguments, named, _widened))]
        generator = torch.Generator().manual_seed(0)
        for number in range(_PERTURBED):
            waiting = iter(errors)

            def perturbed(tensor: torch.Tensor, number: int = number, waiting: Any = waiting) -> torch.Tensor:
                error = next(waiting, float("nan"))
                return _perturbed(tensor, error, generator, one_sign=number == _PERTURBED - 1)

            runs.append(_outputs(overload, *_changed(arguments, named, perturbed)))
        found: dict[int, float] = {}
        for place, result in enumerate(before or ()):
            if not (result.is_floating_point() or result.is_complex()):
                continue
            wide = _wide(result)
            apart = [_apart(wide, run[place]) for run in runs if run is not None and place < len(run)]
            known = [each for each in apart if each is not None]
            if len(known) > 1:  # not by the reference alone
                ulp = float(torch.finfo(result.dtype).eps) * _largest(wide)
                found[place] = max(*known, ulp)
        return found


def _apart(wide: torch.Tensor, other: torch.Tensor) -> float | None:
    if other.shape != wide.shape:
        return None
    return _largest(wide - _wide(other))


def _largest(values: torch.Tensor) -> float:
    size = values.abs()
    size = size[size.isfinite()]
    return float(size.max()) if size.numel() else 0.0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    narrow = tensor.float() if tensor.element_size() == 1 else tensor
    return narrow.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _widened(value: torch.Tensor) -> torch.Tensor:
    return _wide(value) if value.is_floating_point() or value.is_complex() else value.clone()


def _perturbed(tensor: torch.Tensor, error: float, generator: torch.Generator, *, one_sign: bool) -> torch.Tensor:
    """The tensor off by its known error, or else by one unit in the last place, in random directions."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.clone()
    eps = float(torch.finfo(tensor.dtype).eps)
    size = max(eps, error) if error == error else eps
    sign = torch.ones(tensor.shape, dtype=torch.float64)
    if not one_sign:
        sign = torch.randint(0, 2, tensor.shape, generator=generator).to(torch.float64) * 2 - 1
    wide = _wide(tensor)
    reach = wide.abs()
    if error > 0:  # small elements are off as much as others, and zeros are
        finite = wide[wide.isfinite()]
        reach = reach + (float(finite.abs().square().mean().sqrt()) if finite.numel() else 0.0)
    moved = wide + size * reach * sign.to(wide.device)
    return torch.where(wide.isfinite(), moved, wide).to(tensor.dtype)


def _changed(
    arguments: tuple[Any, ...], named: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with each tensor changed, in order; dtypes are widened with the tensors."""
    widen = change is _widened

    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        if isinstance(value, list | tuple):
            return type(value)(map(of, value))
        if isinstance(value, torch.dtype) and widen and value.is_floating_point:
            return torch.float64
        return value

    return tuple(map(of, arguments)), {name: of(value) for name, value in named.items()}


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
