"""Content for operators of serving engines: `attention` decides on the requests of a step and fills what says where
each one's tokens are, `experts` where they go, `cpu_engines` what vLLM on CPUs reads.

The registry takes them from here if this package is there; nothing else knows it.
"""

from __future__ import annotations

from collections.abc import Callable

from ..initializer import Initializer
from .attention import CACHE_INDICES, PACKED_ATTENTION, PAGED_ATTENTION, POSITIONS, SLOT_MAPPING
from .cpu_engines import CPU_ENGINES
from .experts import EXPERT_IDS, EXPERT_WEIGHTS, OPTION, SORTED_EXPERTS, parse_routing

INITIALIZERS: tuple[Initializer, ...] = (
    PAGED_ATTENTION,
    *CPU_ENGINES,
    PACKED_ATTENTION,
    SLOT_MAPPING,
    CACHE_INDICES,
    *POSITIONS,
    SORTED_EXPERTS,
    EXPERT_IDS,
    EXPERT_WEIGHTS,
)
# Each raises UsageError for a value that its option cannot have.
OPTIONS: dict[str, Callable[[str], object]] = {OPTION: parse_routing}
