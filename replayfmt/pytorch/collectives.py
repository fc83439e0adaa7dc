"""Collectives as a capture holds them: two operators of our own, which are PyTorch's to everything else.

`opreplay::collective` is the launch: what was called, on which group, with which tensors. `opreplay::collective_wait`
stands where the program waited, or first used what arrived, and holds what that was. Without a group (`Recorded`, the
default) a launch does nothing and a wait copies the recorded results to where the program had them; with groups
(`replayfmt.ranks`) both are what they were in the program.
"""

from __future__ import annotations

import functools
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from replayfmt.format.rank_files import LAUNCH, WAIT, come_in_pairs

from .tensors.composites import is_composite
from .tensors.memory import tensors_in

__all__ = ["LAUNCH", "WAIT"]
NAMESPACE = LAUNCH.partition("::")[0]


@dataclass(frozen=True)
class Group:
    """A process group. Ranks and order of creation identify it; names differ from run to run."""

    name: str
    ranks: tuple[int, ...]  # global ranks, in the group's order
    instance: int  # among the groups of the same ranks, in order of creation
    backend: str

    @functools.cached_property
    def ranks_text(self) -> str:
        return ",".join(map(str, self.ranks))


class Call(NamedTuple):
    """One collective: the arguments of `opreplay::collective`, without its tensors."""

    operator: str
    group: str
    ranks: str
    instance: int
    backend: str
    reduction: str
    peer: int  # the root, source or destination, as a rank of the group; -1: none
    tag: int
    input_splits: Sequence[int]
    output_splits: Sequence[int]
    number: int  # among the collectives of its group; of sends and receives, among those with the same peer and tag
    work: int  # among all of the capture
    run: str  # of the first: the same for all ranks that ran together; "": not known, and of all others

    @property
    def pairs(self) -> bool:
        """Whether it is one of a pair, of a sender and a receiver."""
        return come_in_pairs(self.operator)


class Numbering:
    """Numbers the collectives of one rank, in the order in which they are launched."""

    def __init__(self) -> None:
        self.count = 0
        self._numbers: Counter[tuple[Any, ...]] = Counter()

    def call(self, operator: str, group: Group, reduction: str, parts: Parts, run: str = "") -> Call:
        ranks = group.ranks_text
        pair = (operator, parts.peer, parts.tag) if come_in_pairs(operator) else ()
        key = ranks, group.instance, *pair
        number, self._numbers[key], self.count = self._numbers[key], self._numbers[key] + 1, self.count + 1
        identity = operator, group.name, ranks, group.instance, group.backend
        splits = list(parts.input_splits), list(parts.output_splits)
        return Call(*identity, reduction, parts.peer, parts.tag, *splits, number, self.count - 1, run)


class Player(Protocol):
    """What a replay does at launches and waits."""

    def launch(self, call: Call, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None: ...
    def wait(self, work: int, outputs: list[torch.Tensor], results: list[torch.Tensor]) -> None: ...


class Recorded:
    """No group: results are the recorded ones."""

    def launch(self, call: Call, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        pass

    def wait(self, work: int, outputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        for output, result in zip(outputs, results, strict=False):
            output.copy_(result)


class LeftOut:
    """No communication, for timing alone. Results that may be indices are the recorded ones, or zeros."""

    def launch(self, call: Call, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        pass

    def wait(self, work: int, outputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        for place, output in enumerate(outputs):
            if not output.is_floating_point():
                output.copy_(results[place]) if results else output.zero_()


LEFT_OUT = "the collectives were left out (--collectives=none)"
_player: Player = Recorded()


@contextmanager
def played_by(player: Player) -> Iterator[None]:
    """Inside, launches and waits are what `player` makes of them."""
    global _player
    before, _player = _player, player
    try:
        yield
    finally:
        _player = before


def plays_ranks() -> bool:
    """Whether collectives are done rather than copied from the capture."""
    return not isinstance(_player, Recorded)


def reads_results() -> bool:
    """Whether a replay uses the results that the capture has of its collectives."""
    return isinstance(_player, Recorded | LeftOut)


def are_left_out() -> bool:
    """Whether collectives do nothing, so that nothing can be verified."""
    return isinstance(_player, LeftOut)


_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(
    "collective(str operator, str group, str ranks, int instance, str backend, str reduction, int peer, int tag, "
    "int[] input_splits, int[] output_splits, int number, int work, str run, Tensor[] inputs, Tensor[] outputs) -> ()"
)
_library.define("collective_wait(int work, Tensor(a!)[] outputs, Tensor[] results) -> ()")


def _launch(*arguments: Any) -> None:
    *call, inputs, outputs = arguments
    _player.launch(Call(*call), inputs, outputs)


def _wait(work: int, outputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
    _player.wait(work, outputs, results)


_library.impl("collective", _launch, "CompositeExplicitAutograd")
_library.impl("collective_wait", _wait, "CompositeExplicitAutograd")


def played_directly(operator: str) -> Callable[..., None] | None:
    """The function that a replay by several ranks calls for an operator of ours: without the dispatcher, which takes as
    long as launching a small collective."""
    return {LAUNCH: _launch, WAIT: _wait}.get(operator) if plays_ranks() else None


class Unknown(Exception):
    """A collective whose meaning is not known, with the reason."""


class Parts(NamedTuple):
    """What the arguments of a call say, whatever stands for tensors. `outputs`: those that it is given; it may return
    others."""

    peer: int
    tag: int
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]
    inputs: list[Any]
    outputs: list[Any]


class Meaning(NamedTuple):
    """What a call of one of PyTorch's operators asks for."""

    operator: str
    group: Any
    reduction: str
    parts: Parts


_KNOWN = frozenset(
    f"c10d::{base}"
    for base in (
        *("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "gather_", "scatter_", "alltoall_"),
        *("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
        *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "alltoall_base_"),
        *("send", "recv_", "recv_any_source_", "barrier", "monitored_barrier_"),
    )
) | {"_dtensor::shard_dim_alltoall"}
_FUNCTIONAL = "_c10d_functional"
_UNKNOWN_FUNCTIONAL = ("batch_p2p_ops",)
_GROUPS = ("process_group", "group_name")
_PEERS = ("root_rank", "src", "dst")


class _Roles:
    """What the arguments of one operator are for."""

    def __init__(self, name: str, arguments: tuple[str, ...]) -> None:
        """Raises Unknown."""
        namespace, _, base = name.partition("::")
        if name not in _KNOWN and (namespace != _FUNCTIONAL or base in _UNKNOWN_FUNCTIONAL):
            raise Unknown(f"what {name} does is not known")
        sends = base in ("send", "isend")
        receives = base in ("recv_", "recv_any_source_", "irecv")
        both = [each for each in arguments if each == "tensors" and not (sends or receives)]
        self.inputs = [each for each in arguments if each.startswith("input") or sends or each in both]
        self.outputs = [each for each in arguments if each.startswith("out") or receives or each in both]
        self.broadcasts = base == "broadcast_" and bool(both)  # one rank reads them, the others write them
        self.peer = next((each for each in _PEERS if each in arguments), "")
        self.group = next((each for each in _GROUPS if each in arguments), "")
        self.splits = [f"{way}_split_sizes" for way in ("input", "output")]
        if base == "shard_dim_alltoall":
            self.splits = ["gather_dim", "shard_dim"]


_roles = functools.cache(_Roles)


def meaning_of(name: str, given: Mapping[str, Any]) -> Meaning:
    """What a call means; `given` are its arguments by name. Raises Unknown."""
    roles = _roles(name, tuple(given))
    group = group_of(given.get(roles.group))
    if group is None:
        raise Unknown("its process group is not known")
    if "sparse_indices" in given:
        raise Unknown("it reduces sparse tensors")
    parts = parts_of(name, given, group.rank(), tensors_in)
    tensors = parts.inputs if parts.outputs is parts.inputs else parts.inputs + parts.outputs
    if any(map(is_composite, tensors)):
        raise Unknown("its tensors are not strided")
    reduction = given.get("reduce_op", "")
    if not isinstance(reduction, str):
        reduction = _reduction_named(_call(reduction.op))
    return Meaning(name, group, reduction, parts)


def parts_of(name: str, given: Mapping[str, Any], rank: int, tensors: Callable[[list[Any]], list[Any]]) -> Parts:
    """What a call's arguments by name say to the member `rank` of the group; `tensors` finds those among values. Raises
    Unknown."""
    roles = _roles(name, tuple(given))
    inputs = tensors([given[each] for each in roles.inputs])
    outputs = inputs if roles.outputs == roles.inputs else tensors([given[each] for each in roles.outputs])
    peer = int(given[roles.peer]) if roles.peer else -1
    if roles.broadcasts and rank == peer:
        outputs = []
    elif roles.broadcasts:
        inputs = []
    splits = [_integers(given[each]) if each in given else () for each in roles.splits]
    return Parts(peer, int(given.get("tag", 0)), splits[0], splits[1], inputs, outputs)


_call = torch._C.ScriptMethod.__call__  # past what a capture puts in its place


@functools.cache
def _reduction_named(number: int) -> str:
    return str(torch.distributed.ReduceOp.RedOpType(number)).rpartition(".")[2]


def _integers(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(int(each) for each in value or ())


def group_of(value: Any) -> Any:
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
    return value if isinstance(value, c10d.ProcessGroup) else None


def ranks_of(group: Any) -> tuple[int, ...]:
    """The global ranks of a group's members, in its order; their ranks within the group if those are unknown."""
    from torch.distributed import distributed_c10d as c10d

    return tuple(c10d._world.pg_group_ranks.get(group) or range(group.size()))


def describe_group(group: Any) -> Group:
    """What a capture says of a process group."""
    from torch.distributed import distributed_c10d as c10d

    ranks, instance = ranks_of(group), 0
    for other in c10d._world.pg_map:
        if other is group:
            break
        instance += ranks_of(other) == ranks
    return Group(str(group.group_name), ranks, instance, str(group.name()))


def run_identity() -> str:
    """A text that all ranks of this run share, through the store with which they found each other; "" if there is none.
    Nobody waits for anybody."""
    from torch.distributed import distributed_c10d as c10d

    try:
        # A connection of its own: on that of the program another thread may wait for a key, and nobody else is served.
        store: Any = c10d._get_default_store()
        agreed = store.clone().compare_set("opreplay/run", "", uuid.uuid4().hex)
    except (RuntimeError, ValueError, NotImplementedError):
        return ""
    return agreed.decode(errors="replace") if isinstance(agreed, bytes) else ""
