"""How far rounding moves the results of a function, found by running it on inputs that are changed a little.

It runs in float64, as a reference, and on inputs that are perturbed by one unit in the last place, or by a known error.
This follows TTrace (arXiv 2506.09280), which perturbs inputs to learn what error a component may show. A result is off
by more than rounding explains if it is off by more than `MARGIN` times the largest of these distances.

Imports torch alone: kernel tasks have this text in a file that runs without OpReplay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

MARGIN = 8.0
PERTURBED = 3  # times: with random signs twice, and once with one sign

# Runs the function on changed arguments, by position and by name; what it returns and writes, None if it fails.
Outputs = Callable[[tuple[Any, ...], dict[str, Any]], "list[torch.Tensor] | None"]


def rounding_runs(
    outputs: Outputs,
    arguments: tuple[Any, ...],
    named: dict[str, Any],
    errors: Sequence[float] = (),
    *,
    widen: bool = True,
) -> list[list[torch.Tensor] | None]:
    """The function's outputs in float64 (with `widen`), and on perturbed inputs. `errors` are known relative errors of
    the tensors, in order; NaN where only rounding is known."""
    runs = [outputs(*changed(arguments, named, widened, widen=True))] if widen else []
    generator = torch.Generator().manual_seed(0)
    for number in range(PERTURBED):
        waiting = iter(errors)

        def off(tensor: torch.Tensor, number: int = number, waiting: Any = waiting) -> torch.Tensor:
            error = next(waiting, float("nan"))
            return perturbed(tensor, error, generator, one_sign=number == PERTURBED - 1)

        runs.append(outputs(*changed(arguments, named, off)))
    return runs


def spread_of(before: list[torch.Tensor] | None, runs: Sequence[list[torch.Tensor] | None]) -> dict[int, float]:
    """The largest distance of each floating-point output from its counterparts in the runs, by place; at least one unit
    in the last place of its largest element. Without two runs to compare with nothing is known."""
    found: dict[int, float] = {}
    for place, result in enumerate(before or ()):
        if not (result.is_floating_point() or result.is_complex()):
            continue
        exact = wide(result)
        apart = [_apart(exact, run[place]) for run in runs if run is not None and place < len(run)]
        known = [each for each in apart if each is not None]
        if len(known) > 1:  # not by the reference alone
            found[place] = max(*known, float(torch.finfo(result.dtype).eps) * largest(exact))
    return found


def _apart(exact: torch.Tensor, other: torch.Tensor) -> float | None:
    return largest(exact - wide(other)) if other.shape == exact.shape else None


def largest(values: torch.Tensor) -> float:
    """The largest finite absolute value, 0 if there is none."""
    size = values.abs()
    size = size[size.isfinite()]
    return float(size.max()) if size.numel() else 0.0


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers in double precision."""
    narrow = tensor.float() if tensor.element_size() == 1 else tensor
    return narrow.to(torch.complex128 if tensor.is_complex() else torch.float64)


def widened(value: torch.Tensor) -> torch.Tensor:
    """A copy, of numbers in double precision."""
    return wide(value) if value.is_floating_point() or value.is_complex() else value.clone()


def perturbed(tensor: torch.Tensor, error: float, generator: torch.Generator, *, one_sign: bool) -> torch.Tensor:
    """The tensor off by its known error, or else by one unit in the last place, in random directions."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.clone()
    eps = float(torch.finfo(tensor.dtype).eps)
    size = max(eps, error) if error == error else eps
    sign = torch.ones(tensor.shape, dtype=torch.float64)
    if not one_sign:
        sign = torch.randint(0, 2, tensor.shape, generator=generator).to(torch.float64) * 2 - 1
    numbers = wide(tensor)
    reach = numbers.abs()
    if error > 0:  # small elements are off as much as others, and zeros are
        finite = numbers[numbers.isfinite()]
        reach = reach + (float(finite.abs().square().mean().sqrt()) if finite.numel() else 0.0)
    moved = numbers + size * reach * sign.to(numbers.device)
    return torch.where(numbers.isfinite(), moved, numbers).to(tensor.dtype)


def changed(
    arguments: tuple[Any, ...],
    named: dict[str, Any],
    change: Callable[[torch.Tensor], torch.Tensor],
    *,
    widen: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with each tensor changed, in order; with `widen` dtypes are those of double precision."""

    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        if isinstance(value, list | tuple):
            return type(value)(map(of, value))
        if isinstance(value, torch.dtype) and widen and value.is_floating_point:
            return torch.float64
        return value

    return tuple(map(of, arguments)), {name: of(value) for name, value in named.items()}
