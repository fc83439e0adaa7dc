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
import zlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from replayfmt.errors import ReplayFailed, ReplayRefused, UsageError
from replayfmt.format.rank_files import describe, group_of, judge, rank_file, world_size
from replayfmt.pytorch.collectives import Call

_KEY = "opreplay"
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


class Together:
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
        self._timeout = timedelta(seconds=timeout_s)
        backend = None if torch.cuda.is_available() else "gloo"
        try:
            dist.init_process_group(backend, timeout=self._timeout)
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise ReplayFailed(f"{folder}: the ranks did not find each other ({reason})") from None
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.path = rank_file(folder, self.rank)
        self._store = dist.distributed_c10d._get_default_store()
        self._groups: dict[tuple[tuple[int, ...], int], Any] = {}
        self._works: dict[int, tuple[Call, Any, Any]] = {}
        self._begun = False
        self._say(f"says/{self.rank}", describe(folder, self.rank, self.world))
        if self.rank == 0:
            heard = [self._hear(f"says/{rank}") for rank in range(self.world)]
            groups = sorted({group_of(event) for each in heard for event in each["events"] if "wait" not in event})
            self._say("verdict", {"findings": judge(heard), "groups": groups})
        verdict = self._hear("verdict")
        if verdict["findings"]:
            raise ReplayRefused(
                f"{folder}: these files cannot be replayed together; nothing was run", verdict["findings"]
            )
        everyone = tuple(range(self.world))
        for members, instance in verdict["groups"]:
            group = (
                dist.group.WORLD
                if tuple(members) == everyone and instance == 0
                else dist.new_group(members, timeout=self._timeout)
            )
            self._groups[tuple(members), instance] = group

    def _say(self, what: str, value: Any) -> None:
        self._store.set(f"{_KEY}/{what}", base64.b64encode(zlib.compress(json.dumps(value).encode())).decode())

    def _hear(self, what: str) -> Any:
        key = f"{_KEY}/{what}"
        try:
            self._store.wait([key], self._timeout)
        except RuntimeError:
            raise ReplayFailed(f"no answer within {self._timeout.total_seconds():g} s ({what})") from None
        return json.loads(zlib.decompress(base64.b64decode(self._store.get(key))))

    def group(self, call: Call) -> Any:
        """The group that a collective is on."""
        return self._groups[tuple(map(int, call.ranks.split(","))), call.instance]

    def begin(self, code: int = 0) -> None:
        """This rank is about to launch its first collective, or has ended without one, with this exit code. Raises
        ReplayFailed if another rank has failed before its first one: nobody waits for it."""
        if self._begun:
            return
        self._begun = True
        self._say(f"begins/{self.rank}", code)
        if self.rank == 0:
            self._say("begun", [self._hear(f"begins/{rank}") for rank in range(self.world)])
        failed = [rank for rank, of_rank in enumerate(self._hear("begun")) if of_rank] if not code else []
        if failed:
            said = f"rank {failed[0]} failed before its first collective, and says why"
            raise ReplayFailed(f"rank {self.rank}: nothing more was run: {said}")

    def launch(self, call: Call, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        self.begin()
        try:
            self._works[call.work] = call, issue(self.group(call), call, inputs, outputs), (inputs, outputs)
        except RuntimeError as error:
            raise self._failure(call, error) from None

    def wait(self, work: int, outputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        call, waiting, _kept = self._works.pop(work, (None, None, None))
        if waiting is not None and call is not None:
            try:
                waiting.wait()
            except RuntimeError as error:
                raise self._failure(call, error) from None

    def _failure(self, call: Call, error: Exception) -> ReplayFailed:
        ended = [rank for rank in range(self.world) if self._store.check([f"{_KEY}/code/{rank}"])]
        gone = f"; ranks that have ended: {', '.join(map(str, ended))}" if ended else ""
        reason = str(error).partition("\n")[0]
        return ReplayFailed(
            f"rank {self.rank}: {call.operator}, collective {call.number} of the group of ranks {call.ranks}, did not "
            f"end ({reason}){gone}"
        )

    def finish(self) -> None:
        """Wait for what the program did not."""
        for work in list(self._works):
            self.wait(work, [], [])

    def end(self, code: int) -> int:
        """Returns the exit code of all ranks."""
        self._say(f"code/{self.rank}", code)
        codes = []
        for rank in range(self.world):
            try:
                codes.append(self._hear(f"code/{rank}"))
            except ReplayFailed:
                codes.append(1)
        # Rank 0 may hold the store: it leaves last.
        self._say(f"left/{self.rank}", None)
        if self.rank == 0:
            for rank in range(self.world):
                try:
                    self._hear(f"left/{rank}")
                except ReplayFailed:
                    break
        return max(codes)


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
    root = call.peer == group.rank()
    c10d = torch._C._distributed_c10d
    kinds: Mapping[str, Any] = {
        "allreduce_": lambda: group.allreduce(out, _reduction(call, c10d.AllreduceOptions())),
        "allreduce_coalesced_": lambda: group.allreduce_coalesced(
            out, _reduction(call, c10d.AllreduceCoalescedOptions())
        ),
        "broadcast_": lambda: group.broadcast(out or given, _rooted(call, c10d.BroadcastOptions())),
        "reduce_": lambda: group.reduce(out, _rooted(call, _reduction(call, c10d.ReduceOptions()))),
        "allgather_": lambda: group.allgather([out], given),
        "_allgather_base_": lambda: group._allgather_base(out[0], given[0]),
        "allgather_coalesced_": lambda: group.allgather_coalesced(
            [out[at : at + len(given)] for at in range(0, len(out), len(given))], given
        ),
        "allgather_into_tensor_coalesced_": lambda: group.allgather_into_tensor_coalesced(out, given),
        "reduce_scatter_": lambda: group.reduce_scatter(out, [given], _reduction(call, c10d.ReduceScatterOptions())),
        "_reduce_scatter_base_": lambda: group._reduce_scatter_base(
            out[0], given[0], _reduction(call, c10d.ReduceScatterOptions())
        ),
        "reduce_scatter_tensor_coalesced_": lambda: group.reduce_scatter_tensor_coalesced(
            out, given, _reduction(call, c10d.ReduceScatterOptions())
        ),
        "gather_": lambda: group.gather([out] if root else [], given, _rooted(call, c10d.GatherOptions())),
        "scatter_": lambda: group.scatter(out, [given] if root else [], _rooted(call, c10d.ScatterOptions())),
        "alltoall_": lambda: group.alltoall(out, given),
        "alltoall_base_": lambda: group.alltoall_base(
            out[0], given[0], list(call.output_splits), list(call.input_splits)
        ),
        "send": lambda: group.send(given, call.peer, call.tag),
        "recv_": lambda: group.recv(out, call.peer, call.tag),
        "recv_any_source_": lambda: group.recv_anysource(out, call.tag),
        "barrier": lambda: group.barrier(),
        "monitored_barrier_": lambda: group.barrier().wait() and None,
    }
    return kinds[base]()
