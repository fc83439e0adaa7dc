"""What measuring ops one by one finds: the options it was done with, and each op's verdict, times and work."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from replayfmt.errors import UsageError
from replayfmt.replay.results import Verdict, VerifyMode

from ..device_graphs import FLAG
from ..inputs import Inputs
from ..meters.meter import NotMeasured, Quantity
from ..min_time import MinTime
from ..precision import Precision
from ..statistics import TimeStatistics
from .groups import Chosen, OpGroup
from .work import CallWork

FAILURES = ("failed", "mismatched")
SEVERITY: tuple[Verdict, ...] = ("ok", "skipped", "refused", "mismatched", "failed")
STATUSES = ("ok", "unmeasurable", *SEVERITY[1:])  # of `MeasuredOp.status`, the worst last


@dataclass(frozen=True)
class OpOptions:
    """What to measure and how: `min_time` is per op, in calls or seconds, and is extended if it is too short to rank
    ops by; with `precision` until the median is known that well, or its time is up. `inputs` is None for the default of
    the devices; see `choose` for the selection. With `cuda_graph` calls are launched in device graphs where they can
    be."""

    min_time: MinTime = field(default_factory=lambda: MinTime(seconds=0.05))
    verify: VerifyMode = "auto"
    pattern: str | None = None
    limit: int | None = None
    every: bool = False
    scopes: tuple[str, ...] = ()
    stop_on_error: bool = False
    precision: Precision | None = None
    inputs: Inputs | None = None
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        if self.cuda_graph and self.inputs == "cold":
            raise UsageError(
                f"{FLAG} launches many calls at once, which find the same inputs in the caches: leave --inputs=cold out"
            )


@dataclass
class MeasuredOp:
    """One group of ops with its verdict. `times` are nanoseconds per call, None if no call was measured, or if
    `unmeasurable` says why the `samples` are no measurement.

    `verdict` is the worst of the group's ops; `reason` is that op's, and `ordinal` where it was measured.
    """

    group: OpGroup
    verdict: Verdict = "ok"
    reason: str = ""
    ordinal: int | None = None
    calls: int = 0
    times: TimeStatistics | None = None
    cpu_ns: float | None = None  # mean per call, of the whole process
    host_ns: float | None = None  # per call, if `times` are the devices'
    further: dict[Quantity, float | NotMeasured] = field(default_factory=dict)  # of other meters, per call
    returned: tuple[str, ...] | None = None  # what a call returned here, a text per result
    samples: tuple[float, ...] = ()  # nanoseconds per call, in order
    unmeasurable: str = ""
    work: CallWork | None = None  # of one call
    graph_calls: int | None = None  # in each graph, if `times` are those of calls in graphs
    no_graph: str = ""  # why it was asked for and could not be
    exposed: str = ""  # why `times` hold waiting of the device for the host
    on_device: bool | None = None  # whether a call gives the device anything to do; None: it is work of the host
    eager_ns: float | None = None  # the median of calls one by one, if `times` are those of calls in graphs

    @property
    def status(self) -> str:
        """The verdict; `unmeasurable` for an op that ran as captured and has no time."""
        return "unmeasurable" if self.unmeasurable and self.verdict == "ok" else self.verdict

    @property
    def why(self) -> str:
        """The reason for the status; empty for an op that was measured."""
        return self.unmeasurable if self.status == "unmeasurable" else self.reason

    @property
    def estimated_ns(self) -> float | None:
        """Count times the median: its share of the workload, in nanoseconds."""
        return None if self.times is None else self.group.count * self.times.median


@dataclass
class PerOpRun:
    """All chosen groups, in order of appearance; `stopped` if an error ended the run before the last.

    `verified` says how results were compared, `differs` whether any did, also of ops that the chosen ones depend on;
    `overhead_ns` is the measured time of a call that does nothing. `inputs` says what was in the caches, `meters`
    describes every meter (`Stopwatch.describe`), `gpus` the states of the GPUs (`GpuWatch.rows`). `event_pair_ns` lies
    between two events of a device with nothing between them, and was subtracted.
    """

    options: OpOptions
    chosen: Chosen
    ops: list[MeasuredOp]
    verified: str
    overhead_ns: float
    stopped: bool = False
    differs: bool = False
    inputs: str = ""
    meters: list[dict[str, Any]] = field(default_factory=list)
    gpus: list[dict[str, Any]] = field(default_factory=list)
    event_pair_ns: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether everything requested was measured, and nothing differed from the capture."""
        return not (self.differs or self.chosen.unsupported.calls or any(op.verdict != "ok" for op in self.ops))

    @property
    def successful(self) -> int:
        return sum(op.verdict == "ok" for op in self.ops)

    @property
    def failed(self) -> int:
        """Ops that were attempted and raised, or returned other results than captured."""
        return sum(op.verdict in FAILURES for op in self.ops)

    @property
    def refused(self) -> Counter[str]:
        """Ops that were not attempted, by reason."""
        return Counter(op.reason for op in self.ops if op.verdict in ("refused", "skipped"))

    @property
    def not_measured(self) -> Counter[str]:
        """Calls of ops that have no times, by status."""
        found: Counter[str] = Counter()
        for op in self.ops:
            if op.times is None:
                found[op.status] += op.group.count
        return found

    @property
    def measured_device_ns(self) -> int:
        """The captured device time of the measured ops' calls."""
        return sum(op.group.device_ns for op in self.ops if op.times is not None)

    @property
    def estimated_ns(self) -> float | None:
        """The sum over all measured ops, in nanoseconds; None if there are none."""
        known = [op.estimated_ns for op in self.ops if op.estimated_ns is not None]
        return sum(known) if known else None
