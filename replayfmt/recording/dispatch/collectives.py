"""Describes a collective in a capture: its process group, by name, ranks and this rank.

Collectives are not replayed, because they need all their ranks at once. Their records name the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from replayfmt.pytorch.operators import COLLECTIVES

_MOST_RANKS = 16


def describe_collective(name: str, args: Iterable[Any]) -> str:
    """The detail of the record of a collective: its group, as far as it is known from the arguments, and what a replay
    would need."""
    if name.partition("::")[0] not in COLLECTIVES:
        return (
            "it talks to other processes through state that other operators made in all of them; collectives are not "
            "replayed yet"
        )
    group = next((found for value in args if (found := _group(value)) is not None), None)
    if group is None:
        return "collectives are not replayed yet; its process group is not known"
    size, ranks = group.size(), _ranks(group)
    shown = ", ".join(map(str, ranks[:_MOST_RANKS])) + (", ..." if len(ranks) > _MOST_RANKS else "")
    return (
        f"group {group.group_name!r} of {size} {'ranks' if size > 1 else 'rank'} ({shown}), this is rank "
        f"{group.rank()} of it; collectives are not replayed yet: it would take all of its ranks, launched "
        f"together (torchrun --nproc-per-node={size})"
    )


def _group(value: Any) -> Any:
    """The process group that an argument is, or names; None for any other argument."""
    if not torch.distributed.is_available():
        return None
    from torch.distributed import distributed_c10d as c10d

    if isinstance(value, torch.ScriptObject):
        try:
            return c10d.ProcessGroup.unbox(value)
        except (RuntimeError, TypeError):
            return None  # another class, a reduction for instance
    if isinstance(value, str):
        try:
            return c10d._resolve_process_group(c10d.GroupName(value))
        except (RuntimeError, ValueError):
            return None  # not the name of a group: that of the reduction, for instance
    return None


def _ranks(group: Any) -> list[int]:
    """The global ranks of a group's members; their ranks within the group if those are unknown."""
    from torch.distributed import distributed_c10d as c10d

    known = c10d._world.pg_group_ranks.get(group)
    return list(known) if known else list(range(group.size()))
