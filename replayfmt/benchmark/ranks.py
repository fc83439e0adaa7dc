"""A benchmark by all ranks of a job: every rank measures its own file, and they begin each replay together.

What a collective takes is known where waiting for it blocks the host, as gloo's does: from the launch to the end of the
wait on the rank that came last, since the others also wait for that one. Bus bandwidth is defined as in NVIDIA's
nccl-tests: bytes over that time, times what a ring moves for each byte.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from replayfmt.errors import ReplayFailed
from replayfmt.format.rank_files import meeting
from replayfmt.format.validation import counted
from replayfmt.pytorch.collectives import LEFT_OUT, Call, are_left_out
from replayfmt.replay.plan import Plan
from replayfmt.replay.ranks import Together

from .measure import Options, Progress, measure
from .run_report import Report, make_report
from .statistics import MOST_ITERATIONS, MinTime, duration, rate, size, summarize

_MOST_LINES = 10
_ASYNCHRONOUS = "a wait for it does not block the host, so the host's clock does not see it"


@dataclass
class _Span:
    """One collective of one replay, in ns of this rank's clock."""

    call: Call
    size_bytes: int  # of what it reads or writes on this rank, whichever is more
    begin_ns: int
    end_ns: int
    blocked_ns: int  # inside the launch and the wait


class TimedRanks(Together):
    """A replay by all ranks that begins each measured replay together, and times the collectives in it."""

    tool = "opreplay-benchmark"

    def __init__(self, folder: str, timeout_s: float) -> None:
        super().__init__(folder, timeout_s)
        # Where the job's own group meets on the host, not another one: its threads would take turns with the first's.
        meets = dist.get_backend() == "gloo"
        self._host_group = dist.group.WORLD if meets else dist.new_group(backend="gloo", timeout=self._timeout)
        self._running: dict[int, _Span] = {}
        self.replays: list[dict[int, _Span]] = []  # of each measured one, by the number of the work

    def align(self) -> None:
        """A measured replay begins, on all ranks."""
        self._meet()
        self.replays.append({})

    def _meet(self) -> None:
        self.finish()
        try:
            dist.barrier(self._host_group)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ReplayFailed(f"rank {self.rank}: the others did not begin the replay ({reason})") from None

    def agreed_iterations(self, plan: Plan, seconds: float) -> int:
        """How many replays take so long on the slowest rank."""
        plan.execute(verify="none")
        self._meet()
        begin = time.perf_counter()
        plan.execute(verify="none")
        heard = self.gather("trial", time.perf_counter() - begin)
        if self.rank == 0:
            self.say("iterations", min(max(math.ceil(seconds / max(heard)), 1), MOST_ITERATIONS))
        return int(self.hear("iterations"))

    def launch(self, call: Call, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        begin = time.perf_counter_ns()
        super().launch(call, inputs, outputs)
        end = time.perf_counter_ns()
        length = max(sum(each.nbytes for each in tensors) for tensors in (inputs, outputs))
        span = self._running[call.work] = _Span(call, length, begin, end, end - begin)
        if self.replays:
            self.replays[-1].setdefault(call.work, span)  # a verified replay afterwards belongs to none

    def wait(self, work: int, outputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        begin = time.perf_counter_ns()
        super().wait(work, outputs, results)
        end = time.perf_counter_ns()
        span = self._running.pop(work, None)
        if span is not None:
            span.end_ns, span.blocked_ns = end, span.blocked_ns + end - begin

    def finish(self) -> None:
        self._running.clear()  # the program did not wait for these: nor is it measured
        super().finish()

    def blocks(self, call: Call) -> bool:
        """Whether waiting for a collective blocks the host."""
        return bool(dist.get_backend(self.group(call)) == "gloo")


def measure_ranks(plan: Plan, ranks: TimedRanks, options: Options, progress: Progress | None) -> Report | None:
    """Measure this rank's plan while the others measure theirs. Returns the report of all on rank 0, None elsewhere."""
    iterations = options.min_time.iterations
    if iterations is None:
        iterations = ranks.agreed_iterations(plan, options.min_time.seconds or 0.0)
    # Without a precision, which each rank would reach after another number of replays.
    options = replace(options, min_time=MinTime(iterations=iterations), precision=None)
    run = measure(plan, options, progress=progress, align=ranks.align)
    report = make_report(run, plan)
    in_repetition = options.warmup + len(run.whole.samples[0].real)
    timed = [each for at, each in enumerate(ranks.replays) if at % in_repetition >= options.warmup]
    why_not = LEFT_OUT if are_left_out() else ""
    if not all(ranks.blocks(span.call) for span in timed[0].values()):
        why_not = _ASYNCHRONOUS
    heard = ranks.gather(
        "times",
        {
            "rows": report.rows,
            "real_ns": [float(each) for sample in run.whole.samples for each in sample.real],
            "blocked_ns": None if why_not else [sum(span.blocked_ns for span in each.values()) for each in timed],
            "collectives": None if why_not else [_said(work, timed) for work in timed[0]],
            "why_not": why_not,
        },
    )
    if not heard:
        return None
    rows = [
        row | {"name": f"{row['name']}/rank:{rank}", "run_name": f"{row['run_name']}/rank:{rank}"}
        for rank, each in enumerate(heard)
        for row in each["rows"]
    ]
    return replace(report, rows=rows, sections={"ranks": combined(heard)})


def _said(work: int, timed: Sequence[dict[int, _Span]]) -> dict[str, Any]:
    """What a rank says of one of its collectives: the medians over the replays."""
    spans = [each[work] for each in timed]
    call = spans[0].call
    members = list(map(int, call.ranks.split(",")))
    told = {"operator": call.operator, "ranks": members, "instance": call.instance, "number": call.number}
    return told | {
        "peer": members[call.peer] if call.pairs and call.peer >= 0 else None,
        "tag": call.tag,
        "bytes": spans[0].size_bytes,
        "time_ns": summarize([float(each.end_ns - each.begin_ns) for each in spans]).median,
    }


def combined(heard: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The section on ranks. `heard`: of each rank, `real_ns` and `blocked_ns` of each replay, and its `collectives`, or
    `why_not`.

    Of each replay the slowest rank counts, and `skew_ns` is how much sooner the fastest one was done. `waited_for_ns`
    of a rank is what all others together waited for it in one replay, at collectives that it reached last.
    """
    replays = list(zip(*(each["real_ns"] for each in heard), strict=True))
    slowest = Counter(times.index(max(times)) for times in replays)
    why_not = next((each["why_not"] for each in heard if each["why_not"]), "")
    collectives, waited_for = _collectives(heard) if not why_not else ([], [{} for _ in heard])
    found: list[dict[str, Any]] = []
    for rank, each in enumerate(heard):
        median = summarize(each["real_ns"]).median
        row: dict[str, Any] = {"rank": rank, "median_real_time": median, "slowest_of_replays": slowest[rank]}
        if not why_not:
            behind = waited_for[rank]
            row["blocked_ns"] = summarize([float(ns) for ns in each["blocked_ns"]]).median
            row["waited_for_ns"] = sum(behind.values())
            row["waited_for_at"] = max(behind, key=lambda at: behind[at]) if behind else None
        else:
            row |= {"blocked_ns": None, "blocked_ns_reason": why_not, "waited_for_ns": None}
        found.append(row)
    return {
        "world_size": len(heard),
        "replays": len(replays),
        "slowest_ns": summarize([max(times) for times in replays]).median,
        "skew_ns": summarize([max(times) - min(times) for times in replays]).median,
        "by_rank": found,
        "collectives": collectives,
        **({"collectives_reason": why_not} if why_not else {}),
    }


def _collectives(heard: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """The collectives of one replay by operator, group and size; and of each rank, by collective, how long the others
    waited for it."""
    met: dict[Any, dict[int, dict[str, Any]]] = defaultdict(dict)
    for rank, each in enumerate(heard):
        for said in each["collectives"]:
            where = {name: said[name] for name in ("operator", "instance", "peer", "tag", "number")}
            met[meeting(rank, members=said["ranks"], **where)][rank] = said
    kinds: dict[Any, list[float]] = defaultdict(list)
    waited_for: list[dict[str, float]] = [defaultdict(float) for _ in heard]
    for by_rank in met.values():
        last = min(by_rank, key=lambda rank: by_rank[rank]["time_ns"])
        first = by_rank[min(by_rank)]
        least = by_rank[last]["time_ns"]
        length = max(said["bytes"] for said in by_rank.values())
        kinds[first["operator"], tuple(first["ranks"]), length].append(least)
        waited = sum(said["time_ns"] - least for said in by_rank.values())
        if len(by_rank) > 1:
            waited_for[last][f"{first['operator']}, collective {first['number']}"] += waited
    rows = []
    for (operator, ranks, length), times in kinds.items():
        median = summarize(times).median
        moved = length * bus_factor(operator, len(ranks))
        row = {"operator": operator, "ranks": list(ranks), "bytes": length, "calls": len(times), "total_ns": sum(times)}
        rows.append(row | {"median_ns": median, "bus_bytes_per_second": moved / median * 1e9 if moved else None})
    return sorted(rows, key=lambda row: -row["total_ns"]), waited_for


def bus_factor(operator: str, members: int) -> float:
    """What a ring moves over its slowest link for each byte of a collective, as nccl-tests count it."""
    if "all_reduce" in operator or "allreduce" in operator:
        return 2 * (members - 1) / members
    if any(each in operator for each in ("gather", "scatter", "alltoall", "all_to_all")):
        return (members - 1) / members
    return 1.0


def lines(section: dict[str, Any]) -> list[str]:
    found = [
        f"slowest   {duration(section['slowest_ns'])}, the median over {counted(section['replays'], 'replay')} of the "
        f"slowest of {section['world_size']} ranks; the fastest is {duration(section['skew_ns'])} sooner"
    ]
    for row in section["by_rank"]:
        text = f"rank {row['rank']:<4} {duration(row['median_real_time'])}, slowest in {row['slowest_of_replays']}"
        if row["blocked_ns"] is not None:
            share = row["blocked_ns"] / row["median_real_time"]
            text += f"; {duration(row['blocked_ns'])} ({share:.0%}) blocked in collectives"
        if row["waited_for_ns"]:
            text += f"; the others wait {duration(row['waited_for_ns'])} for it, most at {row['waited_for_at']}"
        found.append(text)
    for row in section["collectives"][:_MOST_LINES]:
        ranks = ",".join(map(str, row["ranks"]))
        bus = rate(row["bus_bytes_per_second"]).replace("/s", "B/s")
        found.append(
            f"{row['operator']} of ranks {ranks}, {size(row['bytes'])}: {counted(row['calls'], 'call')}, "
            f"{duration(row['median_ns'])} each; bus bandwidth {bus}"
        )
    if len(section["collectives"]) > _MOST_LINES:
        found.append(f"and {len(section['collectives']) - _MOST_LINES} more kinds of collectives, in the JSON")
    if "collectives_reason" in section:
        found.append(f"collectives: not measured: {section['collectives_reason']}")
    return found
