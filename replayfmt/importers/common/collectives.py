"""The collectives of one rank's trace as a capture holds them: launches, and waits (pytorch/collectives.py).

Traces have neither the results of collectives nor all waits: a wait stands before the first call that uses memory which
is in flight, or after the last one. All ranks replay such records together, with the captured sizes on the groups that
are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from replayfmt.format.codes import ITEM_BYTES
from replayfmt.format.model import Kernel
from replayfmt.format.writer import Moment
from replayfmt.pytorch.collectives import LAUNCH, WAIT, Group, Numbering, Parts, Unknown, parts_of
from replayfmt.pytorch.overloads import printed_schema

from .arguments import TensorSpec
from .synthesis import ImportedSession, Tensor

_MOST_IN_FLIGHT = 128
OBJECT = "<Object>"  # what execution traces have for a value that they do not record
NO_WAIT = "the trace does not say where the program waited for it:"


class Bytes(NamedTuple):
    """A part of some memory."""

    memory: Any
    begin: int
    end: int

    def meets(self, others: Iterable[Bytes]) -> bool:
        return any(
            self.memory == other.memory and self.begin < other.end and other.begin < self.end for other in others
        )


def bytes_of(memory: Any, item_bytes: int, sizes: Sequence[int], strides: Sequence[int], offset: int) -> Bytes:
    """Those that a tensor of such elements is on."""
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return Bytes(memory, offset * item_bytes, (last + 1) * item_bytes if 0 not in sizes else 0)


@dataclass(eq=False)
class InFlight:
    """A collective that was launched and not waited for; `kept` is what its writer needs when it is over."""

    work: int
    outputs: list[Tensor]
    reads: list[Bytes]
    writes: list[Bytes]
    kept: Any


def traced_groups(listed: Any, world_size: int) -> dict[str, Group]:
    """The process groups that a trace lists, by name, in order of creation."""
    found: dict[str, Group] = {}
    for each in listed if isinstance(listed, list) else ():
        if not isinstance(each, dict):
            continue
        ranks = each.get("ranks")
        if not ranks and each.get("group_size", each.get("pg_size")) == world_size:
            ranks = list(range(world_size))
        if not isinstance(ranks, list) or not ranks or not all(type(rank) is int for rank in ranks):
            continue
        if min(ranks) >= 0 and max(ranks) < world_size and len(set(ranks)) == len(ranks):
            members = tuple(ranks)
            instance = sum(other.ranks == members for other in found.values())
            name = str(each.get("pg_name"))
            backends = {pair.rpartition(":")[2] for pair in str(each.get("backend_config", "")).split(",")}
            found.setdefault(name, Group(name, members, instance, ",".join(sorted(backends))))
    return found


Said = tuple[Group, Parts, str]  # with the reduction


@dataclass
class TracedCollectives:
    """Those of one rank, in order. `groups` are the trace's."""

    session: ImportedSession
    rank: int
    world_size: int
    groups: Mapping[str, Group]
    _numbering: Numbering = field(default_factory=Numbering)
    _flying: dict[int, InFlight] = field(default_factory=dict)
    _held: Counter[Any] = field(default_factory=Counter)  # memory in flight

    def __post_init__(self) -> None:
        self._launch, self._wait = (
            Kernel(name, "default", printed_schema(overload._schema))
            for name, overload in (
                (LAUNCH, torch.ops.opreplay.collective.default),
                (WAIT, torch.ops.opreplay.collective_wait.default),
            )
        )

    def group(self, named: str | None, assumed: list[str]) -> Group:
        """The group of a collective, by its name if the trace has it. Raises Unknown."""
        known = self.groups.get(named) if named else None
        if known is None and named and self.groups:
            raise Unknown(f"its group {named!r} is not among those that the trace lists")
        if known is None and not self.groups:
            assumed.append(f"the trace lists no process groups: that of all {self.world_size} ranks is used")
            return Group(named or "0", tuple(range(self.world_size)), 0, "")
        mine = [each for each in self.groups.values() if self.rank in each.ranks]
        if known is None and len({each.ranks for each in mine}) > 1:
            raise Unknown(f"the trace does not say on which of its {len(mine)} groups it is")
        if known is None and len(mine) > 1:
            assumed.append(f"the trace does not say on which of {len(mine)} groups of the same ranks it is: the first")
        known = known or next(iter(mine), None)
        if known is None or self.rank not in known.ranks:
            raise Unknown(f"rank {self.rank} is in no group that the trace lists")
        return known

    def parts(self, operator: str, given: Mapping[str, Any], named: str | None) -> tuple[Said, list[str]]:
        """What a call's arguments by name say, with its tensors in lists: the group, the parts and the reduction; and
        what was assumed. Raises Unknown."""
        assumed: list[str] = []
        group = self.group(named, assumed)
        try:
            parts = parts_of(operator, given, group.ranks.index(self.rank), _tensors_in)
        except (TypeError, ValueError):
            raise Unknown("its arguments are not what the operator takes") from None
        if not -1 <= parts.peer < len(group.ranks):
            raise Unknown(f"its peer {parts.peer} is none of the {len(group.ranks)} ranks of its group")
        reduction = given.get("reduce_op", "")
        if not isinstance(reduction, str) or reduction == OBJECT:
            reduction = "SUM"
            assumed.append("reduction=SUM: the trace does not record it")
        return (group, parts, reduction), assumed

    def launch(self, operator: str, said: Said, moment: Moment, annotation: Mapping[str, Any], kept: Any = None) -> int:
        """Record a launch; its ordinal. Raises ValueError for what a record cannot hold."""
        group, parts, reduction = said
        call = self._numbering.call(operator, group, reduction, parts)
        arguments = [*call._asdict().items(), ("inputs", parts.inputs), ("outputs", parts.outputs)]
        ordinal = self.session.op(self._launch, arguments, [], moment, annotation)
        reads, writes = ([_bytes_of(each) for each in tensors] for tensors in (parts.inputs, parts.outputs))
        self._flying[call.work] = flight = InFlight(call.work, parts.outputs, reads, writes, kept)
        self._held.update(each.memory for each in (*flight.reads, *flight.writes))
        return ordinal

    def crowded(self) -> list[InFlight]:
        """The first ones, where too many are in flight."""
        return list(self._flying.values())[: max(0, len(self._flying) - _MOST_IN_FLIGHT)]

    def used(self, reads: Sequence[Bytes], writes: Sequence[Bytes]) -> Iterator[InFlight]:
        """Those in flight whose memory is about to be used."""
        if any(each.memory in self._held for each in (*reads, *writes)):
            for flight in list(self._flying.values()):
                if any(each.meets((*reads, *writes)) for each in flight.writes) or any(
                    each.meets(writes) for each in flight.reads
                ):
                    yield flight

    def meeting(self, parts: Parts) -> Iterator[InFlight]:
        """Those in flight whose memory a collective is about to use."""
        return self.used([_bytes_of(each) for each in parts.inputs], [_bytes_of(each) for each in parts.outputs])

    def in_flight(self) -> list[InFlight]:
        return list(self._flying.values())

    def holds(self, memory: Any) -> bool:
        """Whether a collective in flight uses this memory."""
        return memory in self._held

    def wait(self, flight: InFlight, moment: Moment, assumed: str) -> int:
        """Record a wait, with what was `assumed` of its place; its ordinal."""
        del self._flying[flight.work]
        for each in (*flight.reads, *flight.writes):
            self._held[each.memory] -= 1
            if not self._held[each.memory]:
                del self._held[each.memory]
        arguments = [("work", flight.work), ("outputs", flight.outputs), ("results", [])]
        note: dict[str, Any] = {"import": "inferred", "assumed": [assumed]} if assumed else {"import": "exact"}
        return self.session.op(self._wait, arguments, [], moment, note)


def _tensors_in(lists: list[Any]) -> list[Any]:
    return [each for one in lists if isinstance(one, list) for each in one if isinstance(each, Tensor | TensorSpec)]


def _bytes_of(tensor: Tensor) -> Bytes:
    meta = tensor.meta
    return bytes_of(tensor.storage, ITEM_BYTES[meta.dtype], meta.sizes, meta.strides, tensor.offset)
