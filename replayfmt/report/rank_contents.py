"""What the page of a job's folder says: what each rank did, which rank came late to which collective, and all ranks in
one timeline. The measurements are those of `opreplay-benchmark` on the folder."""

from __future__ import annotations

import os
import shlex
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from replayfmt.benchmark.baseline import Document
from replayfmt.errors import OpReplayError, UsageError
from replayfmt.format.model import Record, TensorValue
from replayfmt.format.rank_files import LAUNCH, WAIT, describe_all, judge, meeting_of, rank_file, work_of, world_size
from replayfmt.format.reader import CaptureReader, open_capture
from replayfmt.format.validation import counted, printable

from .contents import ReportContents, Tile, most_time, verification_notes
from .findings import Finding
from .kernel_sections import MOST_ROWS, Section
from .measurements import Fields
from .ops import captured_ops
from .pictures import (
    LONGEST_TEXT,
    Axis,
    BarPicture,
    BarSeries,
    MissingPicture,
    Picture,
    ReportTable,
    TableRow,
    TimelinePicture,
    count_cell,
    figure_cell,
    seconds,
    si,
    table_columns,
    text_cell,
    time_cell,
)
from .timelines import Lane, NameTable, captured_lanes, timeline_of

_MOST_RANKS = 16  # have lanes in the timeline
_TABLE = "collectives"  # also of the row that a bar leads to: site-NUMBER
_NO_WAIT = "the program waited for none, or the capture does not know how long"


@dataclass
class _Meeting:
    """One collective, the `number`th of the job: when each rank launched it, in nanoseconds since the first rank's
    capture began, and how long its waits for it took."""

    number: int
    operator: str
    members: str
    bytes: int = 0
    launched_ns: dict[int, int] = field(default_factory=dict)
    waited_ns: dict[int, int] = field(default_factory=dict)

    @property
    def skew_ns(self) -> int:
        return max(self.launched_ns.values()) - min(self.launched_ns.values())

    def came(self, *, last: bool) -> int:
        """The rank that launched it first, or last."""
        return (max if last else min)(self.launched_ns, key=lambda rank: self.launched_ns[rank])


@dataclass(frozen=True)
class _Rank:
    """What one rank's file says. Times are nanoseconds, None where the capture has none."""

    rank: int
    ops: int
    collectives: int
    span_ns: int
    in_ops_ns: int | None
    waited_ns: int | None
    unsupported: int


class _Job:
    def __init__(self, folder: str) -> None:
        """Raises CaptureNotFound for a folder without captures of ranks, InvalidCapture for a damaged frame."""
        self.folder, self.world = folder, world_size(folder)
        self.warnings = judge(describe_all(folder, self.world, checked=False))
        self.ranks: list[_Rank] = []
        self.meetings: dict[Any, _Meeting] = {}
        self.names = NameTable()
        self.lanes: list[Lane] = []
        self.launches: set[int] = set()  # the names of launches
        with ExitStack() as stack:
            readers: dict[int, CaptureReader] = {}
            for rank in range(self.world):
                with suppress(OpReplayError):  # a warning names it
                    readers[rank] = stack.enter_context(open_capture(rank_file(folder, rank)))
            began = {rank: reader.session.created_unix_ns or 0 for rank, reader in readers.items()}
            for rank, reader in readers.items():
                self._read(reader, rank, began[rank] - min(began.values()))

    def _read(self, reader: CaptureReader, rank: int, later_ns: int) -> None:
        ops = captured_ops(reader)
        kernels = {number: each.name for number, each in enumerate(reader.kernels) if each}
        site_of = np.zeros(len(ops), np.int64)
        by_work: dict[object, _Meeting] = {}
        for place in np.flatnonzero([kernels.get(each) in (LAUNCH, WAIT) for each in ops.kernel.tolist()]).tolist():
            record = reader.record(int(ops.ordinal[place]))
            work, taken_ns = work_of(record), int(ops.duration_ns[place])
            if kernels[int(ops.kernel[place])] == LAUNCH:
                met = by_work[work] = self._meeting(rank, record)
                met.launched_ns[rank] = int(ops.start_ns[place]) + later_ns
            elif (waits := by_work.get(work)) is not None:
                met = waits
                if taken_ns >= 0:
                    met.waited_ns[rank] = met.waited_ns.get(rank, 0) + taken_ns
            else:
                continue  # launched before the capture began
            site_of[place] = met.number
        waited = [met.waited_ns[rank] for met in by_work.values() if rank in met.waited_ns]
        known = ops.duration_ns[ops.duration_ns >= 0]
        ends = ops.start_ns + np.maximum(ops.duration_ns, 0)
        self.ranks.append(
            _Rank(
                rank,
                len(ops),
                len(by_work),
                int(ends.max() - ops.start_ns.min()) if len(ops) else 0,
                int(known.sum()) if len(known) else None,
                sum(waited) if waited else None,
                sum(reader.summary.unsupported.values()),
            )
        )
        if len(self.ranks) <= _MOST_RANKS:
            outermost = [each for each in ops.scope_passes if not each.depth]
            for lane in captured_lanes(replace(ops, scope_passes=outermost), site_of, reader, self.names):
                self.lanes.append(replace(lane, label=f"rank {rank}, {lane.label}", start=lane.start + later_ns))
            self.launches.update(
                self.names.number(each.qualified_name) for each in reader.kernels if each and each.name == LAUNCH
            )

    def _meeting(self, rank: int, launch: Record) -> _Meeting:
        key = meeting_of(rank, launch)
        met = self.meetings.get(key)
        if met is None:
            operator, members = str(launch.argument("operator")), str(launch.argument("ranks"))
            met = self.meetings[key] = _Meeting(len(self.meetings) + 1, operator, members)
        met.bytes = max(met.bytes, _bytes(launch.argument("inputs")), _bytes(launch.argument("outputs")))
        return met

    def met_by_several(self) -> list[_Meeting]:
        """The collectives that several ranks launched."""
        return [each for each in self.meetings.values() if len(each.launched_ns) > 1]


def _bytes(tensors: object) -> int:
    found = [each for each in tensors if isinstance(each, TensorValue)] if isinstance(tensors, Sequence) else []
    return sum(each.meta.bytes for each in found)


def make_rank_contents(folder: str, benchmark: tuple[str, Document] | None) -> ReportContents:
    """Everything to say of a job. `benchmark` is of its folder. Raises CaptureNotFound, InvalidCapture for a damaged
    frame, and UsageError for measurements that are damaged."""
    job = _Job(folder)
    together = None if benchmark is None else _together(*benchmark)
    command = f"torchrun --nproc-per-node={job.world} opreplay-run {shlex.quote(printable(folder))}"
    warnings = job.warnings + [
        f"rank {each.rank}: {counted(each.unsupported, 'part')} of the work are recorded as unsupported, and are in "
        "none of the figures here."
        for each in job.ranks
        if each.unsupported
    ]
    if benchmark is not None:
        said = benchmark[1]["context"].get("warnings")
        warnings += [each for each in said if isinstance(each, str)] if isinstance(said, list) else []
    return ReportContents(
        printable(os.path.basename(os.path.abspath(folder)), 80),
        verification_notes([] if benchmark is None else [benchmark], [], command),
        [each for each in (_late(job), _blocked(job)) if each is not None],
        _tiles(job, together),
        [("folder", printable(folder, LONGEST_TEXT)), ("ranks", f"{len(job.ranks)} of {job.world} can be read")],
        [printable(each, LONGEST_TEXT) for each in dict.fromkeys(warnings)],
        [_rank_section(job, together), _together_section(job, together), _collectives_section(job), _timeline(job)],
    )


def _together(where: str, document: Document) -> Fields:
    """What a benchmark of the folder says of all ranks."""
    whole = Fields(document, where)
    if not whole.has("ranks"):
        raise UsageError(
            f"{where}: was measured on one rank alone; expected what opreplay-benchmark --benchmark-out wrote for the "
            "folder, under torchrun"
        )
    return whole.fields("ranks")


def _tiles(job: _Job, together: Fields | None) -> list[Tile]:
    met = job.met_by_several()
    skew = figure_cell(seconds(max((each.skew_ns for each in met), default=None)), "s", "no two ranks met")
    found = [
        Tile("ranks", f"{len(job.ranks):,}", f"of {job.world:,}"),
        Tile("ops", f"{sum(each.ops for each in job.ranks):,}", "on all ranks"),
        Tile("collectives", f"{len(job.meetings):,}", "each once, however many ranks it has"),
        Tile("latest rank, captured", skew.text, "behind the first one, at most"),
    ]
    if together is None:
        return [*found, Tile("a replay together", "not measured", "no --benchmark of the folder")]
    slowest = time_cell(together.amount("slowest_ns"), "the benchmark does not say")
    return [*found, Tile("a replay together", slowest.text, "median, of the slowest rank")]


def _late(job: _Job) -> Finding | None:
    """The rank that the others have to wait for."""
    met = job.met_by_several()
    late: dict[int, list[_Meeting]] = defaultdict(list)
    for each in met:
        late[each.came(last=True)].append(each)
    if not met:
        return None
    rank = max(late, key=lambda each: sum(met.skew_ns for met in late[each]))
    behind = sum(each.skew_ns for each in late[rank]) / 1e9
    most = max(late[rank], key=lambda each: each.skew_ns)
    return Finding(
        "late_rank",
        f"rank {rank} came last to {len(late[rank]):,} of {counted(len(met), 'collective')}, {si(behind, 's')} behind "
        f"the first in all; most at collective {most.number} ({most.operator}), {si(most.skew_ns / 1e9, 's')}",
        f"opreplay-report {shlex.quote(printable(rank_file(job.folder, rank)))} -o rank{rank}.html",
        _TABLE,
        {"rank": rank, "collectives": len(late[rank]), "behind_s": behind},
    )


def _blocked(job: _Job) -> Finding | None:
    """The rank that waited most."""
    waited = [each for each in job.ranks if each.waited_ns and each.span_ns]
    if not waited:
        return None
    most = max(waited, key=lambda each: (each.waited_ns or 0) / each.span_ns)
    share = (most.waited_ns or 0) / most.span_ns
    return Finding(
        "waiting_rank",
        f"rank {most.rank} spent {share:.0%} of its captured time waiting for collectives "
        f"({si((most.waited_ns or 0) / 1e9, 's')})",
        f"torchrun --nproc-per-node={job.world} opreplay-benchmark --benchmark-out=whole.json "
        f"{shlex.quote(printable(job.folder))}",
        "ranks",
        {"rank": most.rank, "share": share},
    )


def _rank_section(job: _Job, together: Fields | None) -> Section:
    replayed = {} if together is None else {each.count("rank"): each for each in together.rows("by_rank")}
    not_measured = "no --benchmark of the folder was given"
    rows = []
    for each in job.ranks:
        of = replayed.get(each.rank)
        why = not_measured if of is None else of.text("blocked_ns_reason", "")
        rows.append(
            TableRow(
                count_cell(each.rank),
                count_cell(each.ops),
                count_cell(each.collectives),
                time_cell(each.span_ns, ""),
                time_cell(each.in_ops_ns, "the capture holds no times of ops"),
                time_cell(each.waited_ns, _NO_WAIT),
                time_cell(None if of is None else of.amount("median_real_time"), not_measured),
                time_cell(None if of is None else of.amount("blocked_ns"), why),
                time_cell(None if of is None else of.amount("waited_for_ns"), why),
            )
        )
    titles = ("rank", "ops", "collectives", "captured", "in ops", "waits", "replayed", "blocked", "others wait for it")
    about = [
        "Captured, from the first op to the last: in ops, and of that in waits for collectives, with the recorder's "
        "own work. Replayed by all ranks together, without the program: the median of a replay, how long it is blocked "
        "in collectives, and how long all others together wait for this rank."
    ]
    return Section(
        "ranks", "Ranks", about, [], [ReportTable("by-rank", "Ranks", table_columns(titles, texts=()), rows)]
    )


def _together_section(job: _Job, together: Fields | None) -> Section:
    title = "Replayed together"
    if together is None:
        command = (
            f"torchrun --nproc-per-node={job.world} opreplay-benchmark --benchmark-out=whole.json "
            f"{shlex.quote(printable(job.folder))}"
        )
        reason = f"no benchmark of the folder was given. Measure it with {command}, then add --benchmark=whole.json"
        return Section("together", title, [], [MissingPicture("together", title, reason)])
    by_rank = list(together.rows("by_rank"))
    series = [
        BarSeries(name, [seconds(each.amount(field)) for each in by_rank])
        for name, field in (
            ("a replay, median", "median_real_time"),
            ("blocked in collectives", "blocked_ns"),
            ("the others wait for it", "waited_for_ns"),
        )
    ]
    series = [each for each in series if any(value is not None for value in each.values)]
    labels = [f"rank {each.count('rank')}" for each in by_rank]
    picture: Picture = BarPicture("together", title, Axis("", "s"), labels, series)
    rows = [
        TableRow(
            text_cell(each.text("operator")),
            text_cell(", ".join(f"{rank:g}" for rank in each.amounts("ranks"))),
            figure_cell(each.amount("bytes"), "B", ""),
            count_cell(each.count("calls")),
            time_cell(each.amount("median_ns"), ""),
            time_cell(each.amount("total_ns"), ""),
            figure_cell(each.amount("bus_bytes_per_second"), "B/s", "nothing travels"),
        )
        for each in list(together.rows("collectives"))[:MOST_ROWS]
    ]
    titles = ("collective", "ranks", "bytes", "calls", "a call, median", "all calls", "bus bandwidth")
    reason = together.text("collectives_reason", "")
    return Section(
        "together",
        title,
        [
            "A collective takes as long as the rank sees that comes to it last. Bus bandwidth is as nccl-tests define "
            "it."
        ],
        [picture],
        [ReportTable("kinds", "Collectives by kind", table_columns(titles, texts=(0, 1)), rows, 5)],
        [f"Collectives: not measured: {reason}."] if reason else [],
    )


def _collectives_section(job: _Job) -> Section:
    met = sorted(job.meetings.values(), key=lambda each: -each.skew_ns)
    rows = [
        TableRow(
            count_cell(each.number),
            text_cell(each.operator),
            text_cell(each.members),
            figure_cell(float(each.bytes), "B", ""),
            count_cell(each.came(last=False)),
            count_cell(each.came(last=True)),
            time_cell(each.skew_ns if len(each.launched_ns) > 1 else None, "one rank launched it"),
            figure_cell(seconds(max(each.waited_ns.values(), default=None)), "s", _NO_WAIT),
            name=f"site-{each.number}",
        )
        for each in met[:MOST_ROWS]
    ]
    titles = ("number", "collective", "ranks", "bytes", "first rank", "last rank", "last behind first", "longest wait")
    notes = [f"{len(met) - MOST_ROWS:,} more collectives are left out of the page."] if len(met) > MOST_ROWS else []
    table = ReportTable(_TABLE + "-table", "Collectives", table_columns(titles, texts=(1, 2)), rows, 6, notes)
    about = [
        "As captured, in the order in which the first rank launched them. Ranks of several hosts are as far apart as "
        "their clocks are."
    ]
    return Section(_TABLE, "Collectives", about, [], [table])


def _timeline(job: _Job) -> Section:
    about = [
        "All ranks as captured. Lines lead from the first launch of a collective to the last one. Drag to zoom, "
        "double-click to see everything, click a collective for its row."
    ]
    if not job.lanes:
        return Section("timeline", "Timeline", about, [MissingPicture("timeline", "Timeline", "no capture has times")])
    timeline = timeline_of(job.lanes, job.names)
    picture = TimelinePicture("timeline", "Timeline", timeline, most_time(job.lanes), sorted(job.launches))
    notes = []
    if len(job.ranks) > _MOST_RANKS:
        notes.append(f"{len(job.ranks) - _MOST_RANKS:,} more ranks are left out.")
    if timeline.lanes_left_out:
        notes.append(f"{timeline.lanes_left_out:,} more lanes of threads and streams are left out.")
    return Section("timeline", "Timeline", about, [picture], [], notes)
