"""All ranks of a job replayed together: what is checked before the first op, and the collectives done for real.

Every rank says through the store of the process group which collectives its file holds; rank 0 judges them, and all
ranks hear the same findings. Only if there are none are groups made and ops issued, so that a folder whose files do not
belong together is refused rather than waited for. Collectives are launched and waited for where they were in the
program.
"""

from __future__ import annotations

import base64
import json
import os
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from replayfmt.errors import ReplayFailed, ReplayRefused, UsageError, first_line
from replayfmt.format.rank_files import describe, group_of, judge, listed, members_of, rank_file, world_size
from replayfmt.pytorch.collectives import Call, are_left_out, played_by

_KEY = "opreplay"
_FAILED = f"{_KEY}/failed"
_LONGEST_PAUSE_S = 0.05  # between two looks at the store
_FUNCTIONAL = {
    "all_reduce": "allreduce_",
    "all_reduce_coalesced": "allreduce_coalesced_",
    "all_gather_into_tensor": "_allgather_base_",
    "all_gather_into_tensor_out": "_allgather_base_",
    "all_gather_into_tensor_coalesced": "allgather_into_tensor_coalesced_",
    "reduce_scatter_tensor": "_reduce_scatter_base_",
    "reduce_scatter_tensor_out": "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced_",
    "broadcast": "broadcast_",
    "all_to_all_single": "alltoall_base_",
    "isend": "send",
    "irecv": "recv_",
}
_IN_PLACE = ("allreduce_", "allreduce_coalesced_", "broadcast_")  # of functional ones: on a copy of the input


class Ranks:
    """The processes that torchrun started, which say things to each other through the store of their process group."""

    def __init__(self, what: str, timeout_s: float) -> None:
        """Meets the other ranks, to work on `what`. Raises ReplayFailed if they do not come."""
        self._timeout = timedelta(seconds=timeout_s)
        backend = None if torch.cuda.is_available() else "gloo"
        try:
            dist.init_process_group(backend, timeout=self._timeout)
        except (RuntimeError, ValueError) as error:
            raise ReplayFailed(f"{what}: the ranks did not find each other ({first_line(error)})") from None
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._store = dist.distributed_c10d._get_default_store()
        self.turns = 0

    def _stored(self, do: str, key: Any, *values: str) -> Any:
        """What the store does. Raises ReplayFailed if it is gone, with the rank that held it, or does not answer."""
        try:
            return getattr(self._store, do)(key, *values)
        except RuntimeError as error:
            why = f"the store of all ranks does not answer ({first_line(error)})"
            raise ReplayFailed(f"rank {self.rank}: {why}") from None

    def say(self, what: str, value: Any) -> None:
        self._stored("set", f"{_KEY}/{what}", base64.b64encode(zlib.compress(json.dumps(value).encode())).decode())

    def _said(self, what: str) -> Any:
        return json.loads(zlib.decompress(base64.b64decode(self._stored("get", f"{_KEY}/{what}"))))

    def _who_failed(self) -> str:
        return self._stored("get", _FAILED).decode() if self._stored("check", [_FAILED]) else ""

    def hear(self, what: str, *, end_by: float | None = None) -> Any:
        """What a rank says. Raises ReplayFailed if it says nothing in time, or if a rank has failed meanwhile.
        `end_by`: at the end, when some may have failed: until then."""
        pause_s = 0.001
        until = self._deadline() if end_by is None else end_by
        while not self._stored("check", [f"{_KEY}/{what}"]):
            if end_by is None and (failed := self._who_failed()):
                raise ReplayFailed(f"rank {self.rank}: nothing more was run: {failed} failed")
            if time.monotonic() > until:
                raise ReplayFailed(f"no answer within {self._timeout.total_seconds():g} s ({what})")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return self._said(what)

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout.total_seconds()

    def gather(self, what: str, value: Any) -> list[Any]:
        """What all ranks say, on rank 0; nothing on the others."""
        self.say(f"{what}/{self.rank}", value)
        return [self.hear(f"{what}/{rank}") for rank in range(self.world)] if self.rank == 0 else []

    def next(self, more: bool = False) -> bool:
        """Whether there is `more` to do, which rank 0 says to all."""
        self.turns += 1
        if self.rank == 0:
            self.say(f"turn/{self.turns}", more)
        return bool(self.hear(f"turn/{self.turns}"))

    def fail(self) -> None:
        """Nobody need wait for this rank any more."""
        with suppress(ReplayFailed):  # no store: the others hear that, too
            self._stored("compare_set", _FAILED, "", f"rank {self.rank}")  # the first one: others follow from it

    def playing(self) -> AbstractContextManager[None]:
        """Inside, collectives are what they are with these ranks."""
        return nullcontext()

    def finish(self) -> None:
        """This rank has done its part."""

    def end(self, code: int) -> int:
        """Returns the exit code of all ranks; that of one that does not say it is 1."""
        codes, end_by = [code], self._deadline()
        with suppress(ReplayFailed):  # then nobody can be heard, either
            self.say(f"code/{self.rank}", code)
        for rank in range(self.world):
            try:
                codes.append(self.hear(f"code/{rank}", end_by=end_by))
            except ReplayFailed:
                codes.append(1)
        with suppress(ReplayFailed):  # whoever is gone does not say so
            self.say(f"left/{self.rank}", None)
            for rank in range(self.world if self.rank == 0 else 0):  # it may hold the store: it leaves last
                self.hear(f"left/{rank}", end_by=end_by)
        return max(codes)


class Together(Ranks):
    """This rank's part of a replay by all ranks: a `Player` (pytorch/collectives.py)."""

    tool = "opreplay-run"

    def __init__(self, folder: str, timeout_s: float) -> None:
        """Meets the other ranks. Raises CaptureNotFound for a folder without captures, UsageError outside of
        torchrun, ReplayRefused with the findings of all."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            world_size(folder)
            raise UsageError(
                f"{folder}: a folder is replayed by all ranks together: torchrun --nproc-per-node=N {self.tool} "
                f"{folder}; one rank alone: {self.tool} {rank_file(folder, 0)}"
            )
        super().__init__(folder, timeout_s)
        self._groups: dict[tuple[tuple[int, ...], int], Any] = {}
        self._works: dict[int, tuple[Call, int, Any, Any]] = {}
        self._launched: Counter[str] = Counter()  # of each group; of sends and receives, of each pair and tag
        self._over = threading.Event()
        self._begun = False
        self._closing: threading.Thread | None = None
        heard = self.gather("says", describe(folder, self.rank, self.world))
        if heard:
            groups = sorted({group_of(event) for each in heard for event in each["events"] if "wait" not in event})
            self.say("verdict", {"findings": judge(heard), "groups": groups})
        verdict = self.hear("verdict")
        if verdict["findings"]:
            raise ReplayRefused(
                f"{folder}: these files cannot be replayed together; nothing was run", verdict["findings"]
            )
        self.path = rank_file(folder, self.rank)
        everyone = tuple(range(self.world))
        for members, instance in verdict["groups"]:
            group = (
                dist.group.WORLD
                if tuple(members) == everyone and instance == 0
                else dist.new_group(members, timeout=self._timeout)
            )
            self._groups[tuple(members), instance] = group
        self._period_s = min(timeout_s / 8, 1.0)
        self._telling = threading.Thread(target=self._tell, daemon=True)
        self._telling.start()

    def _tell(self) -> None:
        """Say now and then what this rank has launched: a rank that waits in vain hears who did not come, even if that
        one can say nothing any more."""
        told = 0
        with suppress(ReplayFailed):
            while not self._over.wait(self._period_s):
                launched = dict(self._launched)
                if sum(launched.values()) != told:
                    self.say(f"launched/{self.rank}", launched)
                    told = sum(launched.values())

    def _absent(self, call: Call, count: int) -> str:
        """The ranks that have not launched what is the `count`th of its kind here."""
        members = members_of(call.ranks)
        others, kind = [rank for rank in members if rank != self.rank], self._kinds(call)[1]
        if call.pairs:
            others = [members[call.peer]] if call.peer >= 0 else []
        time.sleep(2 * self._period_s)  # until all that can have told
        absent = []
        for rank in others:
            said = f"launched/{rank}"
            told = self._said(said) if self._stored("check", [f"{_KEY}/{said}"]) else {}
            if told.get(kind, 0) < count:
                absent.append(rank)
        return f"; not launched by {'rank' if len(absent) == 1 else 'ranks'} {listed(absent)}" if absent else ""

    def _kinds(self, call: Call) -> tuple[str, str]:
        """What launches such as this one are counted by on this rank, and on those that it meets."""
        name = str(self.group(call).group_name)
        if not call.pairs:
            return name, name
        peer = members_of(call.ranks)[call.peer] if call.peer >= 0 else -1
        sends = "send" in call.operator
        ends = (self.rank, peer) if sends else (peer, self.rank)
        sent, received = (f"{name} {word} {ends} {call.tag}" for word in ("sent", "received"))
        return (sent, received) if sends else (received, sent)

    def fail(self) -> None:
        """Likewise; whoever waits for it in a collective is told by the connection, which is closed."""
        super().fail()
        self._works.clear()
        self._groups.clear()
        # It waits for what this rank has in flight, which ends at the latest when the other ranks have.
        self._closing = threading.Thread(target=dist.destroy_process_group, daemon=True)
        self._closing.start()

    def end(self, code: int) -> int:
        of_all = super().end(code)
        self._over.set()
        self._telling.join(self._timeout.total_seconds())
        if self._closing is not None:
            self._closing.join(self._timeout.total_seconds())
        return of_all

    def playing(self) -> AbstractContextManager[None]:
        return nullcontext() if are_left_out() else played_by(self)

    def group(self, call: Call) -> Any:
        """The group that a collective is on."""
        return self._groups[members_of(call.ranks), call.instance]

    def begin(self) -> None:
        """This rank is about to launch its first collective, or ends without one. Raises ReplayFailed if another rank
        has failed before its first one: nobody waits for it."""
        if not self._begun:
            self._begun = True
            if self.gather("begins", None):
                self.say("begun", None)
            self.hear("begun")

    def launch(self, call: Call, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        self.begin()
        kind = self._kinds(call)[0]
        count = self._launched[kind] = self._launched[kind] + 1
        try:
            self._works[call.work] = call, count, issue(self.group(call), call, inputs, outputs), (inputs, outputs)
        except RuntimeError as error:
            raise self._failure(call, count, error) from None

    def wait(self, work: int, outputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        call, count, waiting, _kept = self._works.pop(work, (None, 0, None, None))
        if waiting is not None and call is not None:
            try:
                waiting.wait()
            except RuntimeError as error:
                raise self._failure(call, count, error) from None

    def _failure(self, call: Call, count: int, error: Exception) -> ReplayFailed:
        try:
            why = self._absent(call, count)
            if failed := self._who_failed():
                why += f"; {failed} failed"
        except ReplayFailed as gone:
            why = f"; {gone}"
        return ReplayFailed(
            f"rank {self.rank}: {call.operator}, collective {call.number} of the group of ranks {call.ranks}, did not "
            f"end ({first_line(error)}){why}"
        )

    def finish(self) -> None:
        """Wait for what the program did not."""
        self.begin()
        for work in list(self._works):
            self.wait(work, [], [])


def _reduction(call: Call, options: Any) -> Any:
    options.reduceOp = getattr(dist.ReduceOp, call.reduction.upper())
    return options


def _rooted(call: Call, options: Any) -> Any:
    options.rootRank = call.peer
    return options


def issue(group: Any, call: Call, given: list[torch.Tensor], out: list[torch.Tensor]) -> Any:
    """Launch a collective as it was launched. Returns its Work; None if it is done."""
    namespace, _, base = call.operator.partition("::")
    if namespace == "_dtensor":
        dims = call.input_splits[0], call.output_splits[0]
        out[0].copy_(torch.ops._dtensor.shard_dim_alltoall(given[0], *dims, group.group_name))
        return None
    if namespace != "c10d":
        base = _FUNCTIONAL[base.removesuffix("_")]
        if base in _IN_PLACE:
            for source, target in zip(given, out, strict=True):
                if source.data_ptr() != target.data_ptr():
                    target.copy_(source)
    return _LAUNCHES[base](group, call, given, out)


_Launch = Callable[[Any, Call, list[torch.Tensor], list[torch.Tensor]], Any]
_LAUNCHES: Mapping[str, _Launch] = {
    "allreduce_": lambda group, call, given, out: group.allreduce(out, _reduction(call, dist.AllreduceOptions())),
    "allreduce_coalesced_": lambda group, call, given, out: group.allreduce_coalesced(
        out, _reduction(call, dist.AllreduceCoalescedOptions())
    ),
    "broadcast_": lambda group, call, given, out: group.broadcast(out or given, _rooted(call, dist.BroadcastOptions())),
    "reduce_": lambda group, call, given, out: group.reduce(out, _rooted(call, _reduction(call, dist.ReduceOptions()))),
    "allgather_": lambda group, call, given, out: group.allgather([out], given),
    "_allgather_base_": lambda group, call, given, out: group._allgather_base(out[0], given[0]),
    "allgather_coalesced_": lambda group, call, given, out: group.allgather_coalesced(
        [out[at : at + len(given)] for at in range(0, len(out), len(given))], given
    ),
    "allgather_into_tensor_coalesced_": lambda group, call, given, out: group.allgather_into_tensor_coalesced(
        out, given
    ),
    "reduce_scatter_": lambda group, call, given, out: group.reduce_scatter(
        out, [given], _reduction(call, dist.ReduceScatterOptions())
    ),
    "_reduce_scatter_base_": lambda group, call, given, out: group._reduce_scatter_base(
        out[0], given[0], _reduction(call, dist.ReduceScatterOptions())
    ),
    "reduce_scatter_tensor_coalesced_": lambda group, call, given, out: group.reduce_scatter_tensor_coalesced(
        out, given, _reduction(call, dist.ReduceScatterOptions())
    ),
    "gather_": lambda group, call, given, out: group.gather(
        [out] if call.peer == group.rank() else [], given, _rooted(call, dist.GatherOptions())
    ),
    "scatter_": lambda group, call, given, out: group.scatter(
        out, [given] if call.peer == group.rank() else [], _rooted(call, dist.ScatterOptions())
    ),
    "alltoall_": lambda group, call, given, out: group.alltoall(out, given),
    "alltoall_base_": lambda group, call, given, out: group.alltoall_base(
        out[0], given[0], list(call.output_splits), list(call.input_splits)
    ),
    "send": lambda group, call, given, out: group.send(given, call.peer, call.tag),
    "recv_": lambda group, call, given, out: group.recv(out, call.peer, call.tag),
    "recv_any_source_": lambda group, call, given, out: group.recv_anysource(out, call.tag),
    "barrier": lambda group, call, given, out: group.barrier(),
    "monitored_barrier_": lambda group, call, given, out: group.barrier().wait() and None,
}
