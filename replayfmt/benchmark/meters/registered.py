"""The meters of a benchmark."""

from __future__ import annotations

from .clocks import CLOCKS
from .meter import MakeMeter

# In the order in which they start; they stop in the opposite one. The clocks come last, so that what another meter does
# to start and stop is in no time.
METERS: tuple[MakeMeter, ...] = (*CLOCKS,)
