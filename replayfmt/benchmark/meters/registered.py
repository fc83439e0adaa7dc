"""The meters of a benchmark."""

from __future__ import annotations

from .clocks import CLOCKS
from .meter import MakeMeter

# In starting order; they stop in reverse order. The clocks come last, so their times exclude the cost of starting and
# stopping other meters.
METERS: tuple[MakeMeter, ...] = (*CLOCKS,)
