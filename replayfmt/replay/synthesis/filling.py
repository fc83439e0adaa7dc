"""Calls one initializer, and checks its result before anything uses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from replayfmt.initializers import Demand, Initializer, Request, TensorInfo
from replayfmt.initializers.demands import Conflict
from replayfmt.initializers.integers import Unsatisfiable
from replayfmt.initializers.roles import is_integral


class Wrong(Exception):
    """An initializer returned something that cannot be used; the message is a phrase."""


def called(initializer: Initializer, request: Request) -> Any:
    """The result of an initializer. Raises Wrong if it raises."""
    # Draws from PyTorch's generator are the same every time, and do not advance the replay's generators.
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(request.seed & (1 << 63) - 1)
    try:
        return initializer.fill(request)
    except Unsatisfiable as error:
        raise Wrong(str(error)) from error
    except Exception as error:
        message = str(error).strip().partition("\n")[0]
        raise Wrong(f"initializer {initializer.name} failed: {type(error).__name__}: {message}") from error
    finally:
        generator.set_state(state)


def by_label(initializer: Initializer, request: Request, content: Any) -> dict[str, torch.Tensor]:
    """The result of an initializer, by label. Raises Wrong if it is not what was requested."""
    if not initializer.joint:
        content = {request.label: content}
    if not isinstance(content, Mapping) or set(content) != set(request.wanted):
        got = sorted(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
        raise Wrong(
            f"initializer {initializer.name} gave {got}; a joint one returns a mapping with exactly "
            f"{sorted(request.wanted)}"
        )
    return dict(content)


def check(
    initializer: Initializer,
    request: Request,
    label: str,
    info: TensorInfo,
    content: Any,
    demand: Demand | Conflict | None,
) -> None:
    """Check that content is what was requested. Raises Wrong."""
    name = f"initializer {initializer.name} for {label} of {request.call.name}"
    if not isinstance(content, torch.Tensor) or content.layout is not torch.strided:
        raise Wrong(f"{name} gave {type(content).__name__}, expected a tensor")
    if content.dtype is not info.dtype or tuple(content.shape) != info.sizes:
        raise Wrong(f"{name} gave {content.dtype}{list(content.shape)}, expected {info.dtype}{list(info.sizes)}")
    if not isinstance(demand, Demand) or not is_integral(content.dtype) or not content.numel():
        return
    values = content.numpy(force=True)  # torch has no min for uint16, uint32 and uint64
    low, high = int(values.min()), int(values.max())
    if (demand.low is not None and low < demand.low) or (demand.high is not None and high > demand.high):
        raise Wrong(
            f"{name} gave values from {low} to {high}, but it is {demand.why}: expected {demand.low} to {demand.high}"
        )
