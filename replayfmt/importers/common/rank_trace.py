"""One rank's trace among those of a distributed program: where it is, and how its capture records that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from replayfmt.errors import InvalidCapture

MOST_RANKS = 1 << 24


@dataclass(frozen=True)
class RankTrace:
    """The trace of `rank`: the file `path`, or the file `member` in that archive. `told` says how the rank is known,
    `world_size` is the minimum number of ranks."""

    path: str
    member: str
    rank: int
    told: str
    world_size: int

    @property
    def name(self) -> str:
        """The file's name, for people."""
        return f"{self.path}: {self.member}" if self.member else self.path


def rank_fields(rank: int | None, world_size: int, place: RankTrace | None) -> dict[str, Any]:
    """The session's rank and world size: from the trace itself, or from its place; None if neither says. Raises
    InvalidCapture if the two differ."""
    if place is not None:
        if rank is not None and rank != place.rank:
            raise InvalidCapture(
                f"{place.name}: is assumed to be rank {place.rank} ({place.told}), but contains rank {rank}; "
                f"rename it, or import it alone without --rank"
            )
        rank, world_size = place.rank, max(world_size, place.world_size)
    return {"rank": rank or 0, "world_size": max(world_size, (rank or 0) + 1)}
