"""Call sites: the places where a replay's code calls a kernel, as a replacement sees them.

If there are replacements, lowering makes a site for every op and asks what to call there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

from replayfmt.errors import SubstitutionFailed
from replayfmt.format.slots import SlotLayout

from ..planning.effects import Effects
from ..planning.kernels import ResolvedKernel


@dataclass(frozen=True)
class CallSite:
    """One op of a capture while its call is being generated.

    `metas` are the metadata ids of its argument tensors, `original` is the function that would be called, `wrap` gives
    a function the same surroundings as the original, `fills` is False if the op leaves the memory it returns unwritten,
    `once` is True if the op must not run twice.
    """

    ordinal: int
    signature_id: int
    metas: tuple[int, ...]
    kernel_id: int
    kernel: ResolvedKernel
    layout: SlotLayout
    effects: Effects
    original: Callable[..., Any]
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    fills: bool
    once: bool


class KernelStandIn(Protocol):
    """Chooses what is called instead of the kernels."""

    @property
    def reason(self) -> str:
        """Why results may differ from the captured ones bit for bit."""
        ...

    def call(self, site: CallSite) -> tuple[Hashable | None, Callable[..., Any]] | None:
        """What to call at a site, with a key that equal calls share (None: for this site only); None for the
        original."""
        ...

    def failure(self, ordinal: int, error: BaseException) -> SubstitutionFailed | None:
        """The error to raise for an exception at an ordinal if one of its own calls raised it, else None."""
        ...
