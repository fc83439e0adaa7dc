"""Call sites: the places where a replay's code calls a kernel, as a replacement sees them.

While there are replacements, lowering makes a site for every op and asks what to call there.
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
    """One op of a capture while its call is written.

    `metas` are the metadata ids of its argument tensors, `original` is what would be called, `wrap` puts a function
    into the surroundings that the original is called in, `fills` is False if the op leaves the memory it returns
    unwritten, `once` is True if what it does cannot be done twice.
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
    """Chooses what is called in place of kernels."""

    @property
    def reason(self) -> str:
        """Why results need not be the captured ones bit for bit."""
        ...

    def call(self, site: CallSite) -> tuple[Hashable | None, Callable[..., Any]] | None:
        """What to call at a site, with a key that equal calls share (None: it is for this site alone); None for the
        original."""
        ...

    def failure(self, ordinal: int, error: BaseException) -> SubstitutionFailed | None:
        """What an exception at an ordinal becomes, where a call of its own raised it; None for any other."""
        ...
