"""The outcome for each call of a trace: exact, inferred or incomplete, and why; as text and as JSON lines.

`exact`: the trace has everything that the call needs. `inferred`: something is missing, and `assumed` says what was
used instead and where that comes from. `incomplete`: something is missing that cannot be inferred, or the operator is
not available: the call becomes an unsupported record, with `reason` and `detail`.

Traces have no tensor contents; this is noted once per import, not for every call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from replayfmt.format.validation import counted
from replayfmt.pytorch.traced_names import Guess

Status = Literal["exact", "inferred", "incomplete"]
STATUSES: tuple[Status, ...] = ("exact", "inferred", "incomplete")


@dataclass
class ReportEntry:
    """All calls of one kind: the same operator, overload and arguments.

    `found` says where the operator was found. Times are in nanoseconds over all calls, None if the trace has none.
    """

    op: str
    overload: str
    status: Status
    signature: str  # its arguments, for people
    found: str = ""
    assumed: tuple[str, ...] = ()
    reason: str = ""
    detail: str = ""
    rewritten: bool = False  # replaced by other operators
    calls: int = 0
    first_ordinal: int | None = None
    host_ns: int | None = None
    device_ns: int | None = None

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "kind": "op",
            "op": self.op,
            "overload": self.overload or None,
            "status": self.status,
            "signature": self.signature,
            "calls": self.calls,
            "first_ordinal": self.first_ordinal,
            "host_ns": self.host_ns,
            "device_ns": self.device_ns,
        }
        if self.status == "incomplete":
            row |= {"reason": self.reason, "detail": self.detail}
        else:
            row["found"] = self.found
        if self.rewritten:
            row["rewritten"] = True
        if self.assumed:
            row["assumed"] = list(self.assumed)
        return row


_STATUS_MEANINGS: dict[Status, str] = {
    "exact": "everything is in the trace",
    "inferred": "something was missing and is assumed, as listed below",
    "incomplete": "cannot be reconstructed, so recorded as unsupported",
}
_REST = {
    "cuda_graph": "graph launches",
    "collective": "collectives",
    "triton_launch": "Triton kernels",
    "outside_operator": "kernels without an operator",
    "no_schema": "operators unknown here",
    "import_incomplete": "incomplete calls",
    "lost": "launches that the trace does not show",
    "untimed": "calls with work of unknown duration",
    "not selected": "outside of what was selected",
}


# What the importers' counts mean.
_COUNTED = {
    "events": "on the host: operators, wrappers and annotations",
    "operators": "calls of operators in it: the sum of the next four, and of those not selected",
    "taken": "those that became calls of the capture",
    "inside taken": "those that a call of the capture makes itself",
    "around taken": "those whose own calls became calls of the capture",
    "no work": "those with nothing to replay",
    "not selected": "those outside of the steps, scopes or time that were asked for",
    "wrappers": "events around operators, such as autograd's",
    "annotations": "ranges that the program named",
    "device work": "kernels, copies and fills on devices",
    "nodes": "in the trace, of all kinds",
    "without one": "pieces of work that no operator stands for; with those taken they are the calls above",
}


@dataclass
class DeviceTime:
    """Total duration of the device work in a trace, over all streams. `lost_ns` is that of work which nothing in the
    trace launched, and which is not in the capture. `untimed` is the number of pieces without a duration; no figure
    includes them. `untimed_ns` is the duration of the others of the same calls, `left_out_ns` that of what
    was not to be imported."""

    total_ns: int
    lost_ns: int = 0
    untimed: int = 0
    untimed_ns: int = 0
    left_out_ns: int = 0


@dataclass
class ImportReport:
    """The report of one import. `rank` is the one chosen among several, None if there was no choice. `notes` are
    sentences about the whole trace, `problems` about the file, `unused` about unneeded entries of the user's name
    tables. `device_time` is None if the trace has no device work.
    """

    source: str
    kind: str
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    device_time: DeviceTime | None = None
    rank: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    entries: dict[Any, ReportEntry] = field(default_factory=dict)

    def add(
        self,
        key: Any,
        make: Any,
        ordinal: int | None,
        calls: int = 1,
        host_ns: int | None = None,
        device_ns: int | None = None,
    ) -> ReportEntry:
        """Count calls under `key`; `make()` returns its entry if it is new."""
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = make()
            entry.first_ordinal = ordinal
        entry.calls += calls
        entry.host_ns = _sum(entry.host_ns, host_ns)
        entry.device_ns = _sum(entry.device_ns, device_ns)
        return entry

    def note(self, sentence: str) -> None:
        """Add a sentence about the whole trace, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def unique(self) -> dict[Status, int]:
        found = Counter(entry.status for entry in self.entries.values())
        return {status: found[status] for status in STATUSES}

    def calls(self) -> dict[Status, int]:
        found: Counter[Status] = Counter()
        for entry in self.entries.values():
            found[entry.status] += entry.calls
        return {status: found[status] for status in STATUSES}

    def rows(self) -> Iterator[dict[str, Any]]:
        """JSON objects: one `import` row, then one `op` row for each entry, in order of first appearance."""
        yield {
            "kind": "import",
            "source": self.source,
            "format": self.kind,
            "rank": self.rank,
            "unique": self.unique(),
            "calls": self.calls(),
            "counts": self.counts,
            "notes": self.notes,
            "problems": self.problems,
            "warnings": self.warnings(),
            "device_time": self._device_row(),
        }
        for entry in self.entries.values():
            yield entry.row()

    def device_shares(self) -> tuple[int, dict[str, int]]:
        """Device time in nanoseconds: that of the calls that can be replayed, and the rest by reason."""
        if self.device_time is None:
            return 0, {}
        calls = 0
        rest: Counter[str] = Counter(lost=self.device_time.lost_ns, untimed=self.device_time.untimed_ns)
        rest["not selected"] = self.device_time.left_out_ns
        for entry in self.entries.values():
            if entry.status == "incomplete":
                rest[entry.reason] += entry.device_ns or 0
            else:
                calls += entry.device_ns or 0
        return calls, {reason: nanoseconds for reason, nanoseconds in rest.most_common() if nanoseconds}

    def _device_row(self) -> dict[str, Any] | None:
        if self.device_time is None:
            return None
        calls, rest = self.device_shares()
        return {
            "total_ns": self.device_time.total_ns,
            "calls_ns": calls,
            "rewritten_ns": self._rewritten_ns(),
            "rest_ns": rest,
            "untimed": self.device_time.untimed,
        }

    def _rewritten_ns(self) -> int:
        """The device time, in the trace, of the calls that other operators replace."""
        return sum(entry.device_ns or 0 for entry in self.entries.values() if entry.rewritten)

    def _device_lines(self) -> Iterator[str]:
        if self.device_time is None:
            yield "device time   the trace has none"
            return
        total = self.device_time.total_ns
        calls, rest = self.device_shares()

        yield f"device time   {total / 1000:.1f} us in the trace; the calls account for {self._share(calls)}"
        rewritten = self._rewritten_ns()
        if rewritten:
            own = f"{self._share(calls - rewritten)} by the traced operators"
            yield f"device ways   {own}, {self._share(rewritten)} by replacements"
        for reason, nanoseconds in rest.items():
            yield f"device rest   {self._share(nanoseconds)}: {_REST.get(reason, reason)}"
        if self.device_time.untimed:
            yield f"device rest   {self.device_time.untimed} kernels and copies without a duration, counted nowhere"

    def _share(self, nanoseconds: int) -> str:
        total = self.device_time.total_ns if self.device_time is not None else 0
        return f"{nanoseconds / 1000:.1f} us" + (f" ({nanoseconds / total:.1%})" if total else "")

    def warnings(self) -> list[str]:
        """What may well be wrong and must be checked: guesses, and options that had no effect."""
        guessed: Counter[tuple[str, str]] = Counter()
        for entry in self.entries.values():
            for sentence in entry.assumed:
                if isinstance(sentence, Guess):
                    guessed[entry.op, sentence] += entry.calls
        return [
            f"{op}, {counted(count, 'time')}: {sentence}" for (op, sentence), count in guessed.most_common()
        ] + self.unused

    def lines(self) -> Iterator[str]:
        """The same as text: totals, then what was assumed and what is missing, grouped."""
        unique, calls = self.unique(), self.calls()
        of_rank = "" if self.rank is None else f", rank {self.rank}"
        yield f"source        {self.source} ({self.kind}{of_rank})"
        for status in STATUSES:
            number = f"{counted(calls[status], 'call')}, {unique[status]} distinct"
            yield f"{status:<13} {number}: {_STATUS_MEANINGS[status]}"
        yield from self._device_lines()
        found: Counter[str] = Counter()
        for entry in self.entries.values():
            if entry.status != "incomplete" and entry.found:
                found[entry.found] += entry.calls
        for where, count in found.most_common():
            yield f"found         {counted(count, 'call')}: operators of {where}"
        for name, count in self.counts.items():
            meaning = f" ({_COUNTED[name]})" if name in _COUNTED else ""
            yield f"{name:<13} {count}{meaning}"
        for note in self.notes:
            yield f"note          {note}"
        for problem in self.problems:
            yield f"problem       {problem}"
        for warning in self.warnings():
            yield f"warning       {warning}"
        yield from self._grouped()

    def _grouped(self) -> Iterator[str]:
        assumed: Counter[tuple[str, str]] = Counter()
        missing: Counter[tuple[str, str, str]] = Counter()
        took: Counter[tuple[str, str, str]] = Counter()
        for entry in self.entries.values():
            for sentence in entry.assumed:
                if isinstance(sentence, Guess):
                    continue  # already a warning
                assumed[entry.op, sentence] += entry.calls
            if entry.status == "incomplete":
                missing[entry.op, entry.reason, entry.detail] += entry.calls
                took[entry.op, entry.reason, entry.detail] += entry.device_ns or 0
        for (op, sentence), count in assumed.most_common():
            yield f"assumed       {op}, {counted(count, 'time')}: {sentence}"
        # Those with the most device time first: what is missing matters as much as that.
        for (op, reason, detail), count in sorted(missing.most_common(), key=lambda each: -took[each[0]]):
            time = took[op, reason, detail]
            on_device = f", {self._share(time)} on the device" if time else ""
            yield f"incomplete    {op}, {counted(count, 'time')}{on_device}: {reason}: {detail}"


def most(counted: Counter[str], shown: int = 6) -> str:
    """The most frequent names, cut where they are long, with their counts, and how many others there are."""
    named = ", ".join(f"{count} {name:.80}" for name, count in counted.most_common(shown))
    more = len(counted) - shown
    return named + (f" and {more} more" if more > 0 else "")


def _sum(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
