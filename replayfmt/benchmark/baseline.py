"""A benchmark against an earlier one: rows paired by name, verdicts by their intervals, differences of the machines.

Works on the JSON documents alone (no torch). A row's name holds its scope, kernel or signature, so rows of one name
measured the same work; all times of a name are taken together. The ratio of two medians lies between the quotients of
the ends of their intervals. Each encloses its median with 95% confidence, so two runs of the same speed get the verdict
that they differ in fewer than one of ten cases, in practice far fewer: both intervals have to miss. That of a run of
several processes is where another run's median lies, so the quotients are with the other's median. Where neighbours on
the machine slowed so many processes down that these quotients decide nothing, the processes that they left alone do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from typing import Any, Literal

import numpy as np

from replayfmt.errors import UsageError
from replayfmt.format.validation import aligned, counted, printable, read_json

from .machine import BUSY, others_had
from .statistics import CONFIDENCE, NOISY, contradicted, duration, low_quantile, summarize, undisturbed

FLAG = "--baseline"
MOST_NUMBER = 1e30  # in a file: sums and ratios of such numbers are finite
Document = Mapping[str, Any]
BaselineVerdict = Literal["faster", "slower", "no measurable difference", "too noisy to tell", "not known"]
# What has to be the same for two times to be comparable: machine, software, work and settings.
_CONTEXT = {
    "host_name": "host",
    "processor": "processor",
    "num_cpus": "CPUs",
    "cpu_scaling_enabled": "CPU frequency scaling",
    "devices": "devices",
    "torch_version": "torch",
    "torch_num_threads": "threads",
    "library_version": "OpReplay",
    "library_build_type": "build",
    "capture_session": "capture",
    "inputs": "inputs",
    "cuda_graph": "use of graphs",
}
_SCHEMA_VERSION = 1
_MOST_LISTED = 20
# A gate does not judge a measurement of which more than this share has no partner in the other.
MOST_UNMATCHED = 0.1
# On the host, medians of the same work differ by this much from one process to the next: by where memory lies, and by
# what other virtual machines do (benchmarks/honest_intervals.py). The interval of one process knows nothing of it.
BETWEEN_PROCESSES = 0.05
TOTAL = "BM_op/total"
GateVerdict = Literal["passed", "slower", "cannot be judged"]
# What a tool exits with. A row that is slower outweighs rows that nobody can judge.
EXIT_CODES: dict[GateVerdict, int] = {"passed": 0, "slower": 1, "cannot be judged": 4}


@dataclass(frozen=True)
class GateFailure:
    """Why a gate does not open: a row that is slower, or one that cannot be judged."""

    name: str
    verdict: GateVerdict
    reason: str
    ratio: float | None = None
    interval: tuple[float, float] | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def gate_verdict(failures: Sequence[GateFailure]) -> GateVerdict:
    """That of all rows together."""
    return min((each.verdict for each in failures), key=EXIT_CODES.__getitem__, default="passed")


@dataclass(frozen=True)
class Figure:
    """A time in nanoseconds with the ends of its interval; what is unknown is None, and `reason` says why. `shortest`
    is the low quantile of its times, or of several processes what is `undisturbed`."""

    value: float | None
    low: float | None = None
    high: float | None = None
    reason: str = ""
    shortest: float | None = None


@dataclass(frozen=True)
class PairedRow:
    """One name in both documents. `ratio` is the new time over the old one: above 1 is slower.

    A difference smaller than the share `noise_floor` is none: what two measurements of the same work differed by
    (--noise-floor), and on the host at least BETWEEN_PROCESSES, unless both were made in several processes. A row that
    is judged by the processes that nothing disturbed has their times and ratio.
    """

    name: str
    before: Figure
    after: Figure
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    noise_floor: float
    verdict: BaselineVerdict
    reason: str = ""

    def failure(self, above: float) -> GateFailure | None:
        """Why the row fails a gate that allows it to be slower by the share `above`; None if it passes. What is not
        known fails, and so does what is too noisy to tell where it looks slower by more: a gate that sees nothing must
        not be open."""
        ends = None if self.ratio_low is None or self.ratio_high is None else (self.ratio_low, self.ratio_high)
        if self.ratio is None:
            return GateFailure(self.name, "cannot be judged", f"cannot be judged: {self.reason}")
        if self.ratio <= 1 + above:
            return None
        if self.verdict == "too noisy to tell":
            reason = f"cannot be judged, and looks slower ({self.ratio:.3f} x): {self.reason}"
            return GateFailure(self.name, "cannot be judged", reason, self.ratio, ends)
        if self.verdict == "slower":
            reason = f"{self.ratio:.3f} x the baseline's time, more than {1 + above:.4g} x"
            return GateFailure(self.name, "slower", reason, self.ratio, ends)
        return None

    def hides(self, above: float) -> str:
        """How a row that looks slower by more than a gate allows passes it; empty if it fails, or does not look so."""
        if self.ratio is None or self.ratio <= 1 + above or self.failure(above):
            return ""
        floor = f", noise floor {self.noise_floor:.1%}" if self.noise_floor else ""
        return f"{self.ratio:.3f} x, between {self.ratio_low:.3f} and {self.ratio_high:.3f}{floor}"

    @property
    def apart(self) -> float | None:
        """Of two measurements of the same work: the share below which a difference is none."""
        if self.ratio_low is None or self.ratio_high is None:
            return None
        return max(self.ratio_high, 1 / self.ratio_low) - 1


@dataclass(frozen=True)
class BaselineComparison:
    """Two documents. `only_before` and `only_after` are the names without a partner, which hold `unmatched_share` of
    the time of ops (else of the rows) of their document; `differences` has one sentence for each thing that should be
    the same and is not."""

    path: str
    rows: list[PairedRow]
    only_before: list[str]
    only_after: list[str]
    differences: list[str]
    unmatched_share: float = 0.0

    def failures(self, above: float) -> list[GateFailure]:
        """The rows that are slower by more than a share, or cannot be judged."""
        return [found for row in self.rows if (found := row.failure(above)) is not None]

    def unmatched(self) -> list[GateFailure]:
        """A failure if too much has no partner to be judged by."""
        if self.unmatched_share <= MOST_UNMATCHED:
            return []
        count = len(self.only_before) + len(self.only_after)
        reason = (
            f"cannot be judged: {counted(count, 'row')} without a partner, {self.unmatched_share:.1%} of the "
            f"measurement, more than {MOST_UNMATCHED:.0%}; measure the baseline with the same flags"
        )
        return [GateFailure("rows without a partner", "cannot be judged", reason)]

    def hidden(self, above: float, again: BaselineComparison | None) -> list[str]:
        """What a gate that allows rows to be slower by a share does not see: those that pass and look slower by more,
        also when measured `again`, and noise floors above that share, below which any row passes."""
        second = {} if again is None else {row.name: row.ratio for row in again.rows}
        found = []
        for row in self.rows:
            how, then = row.hides(above), second.get(row.name)
            if how and (then is None or then > 1 + above):
                after = "" if then is None else f"; then {then:.3f} x"
                found.append(f"passed, though it looks slower: {row.name}: {how}{after}")
        found = found[:_MOST_LISTED] + [f"and {len(found) - _MOST_LISTED} more"] * (len(found) > _MOST_LISTED)
        floors = [row for row in self.rows if row.noise_floor > above]
        if floors:
            most = max(floors, key=lambda row: row.noise_floor)
            found.append(
                f"{len(floors)} of {counted(len(self.rows), 'row')} could be slower by more than {above * 100:.4g}% "
                f"and pass: their noise floor is higher, at most {most.noise_floor:.1%} ({most.name}); measure longer, "
                "or on a quieter machine"
            )
        return found

    def as_json(self) -> dict[str, Any]:
        rows = [asdict(row) for row in self.rows]
        return {
            "path": self.path,
            "confidence": CONFIDENCE,
            "rows": rows,
            "only_in_baseline": self.only_before,
            "not_in_baseline": self.only_after,
            "unmatched_share": self.unmatched_share,
            "differences": self.differences,
        }

    def lines(self) -> Iterator[str]:
        yield f"baseline  {printable(self.path)}"
        yield from (printable(f"  another {difference}") for difference in self.differences)
        yield from _table(self.rows)
        for title, names in (("only in the baseline", self.only_before), ("not in the baseline", self.only_after)):
            yield from (printable(f"{title}: {name}") for name in names[:_MOST_LISTED])
            if len(names) > _MOST_LISTED:
                yield f"{title}: and {len(names) - _MOST_LISTED} more"
        yield self.summary()

    def summary(self) -> str:
        """The verdicts counted, in one line."""
        counts = {verdict: sum(row.verdict == verdict for row in self.rows) for verdict in _VERDICTS}
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count or verdict in _DECIDED)
        unmatched = len(self.only_before) + len(self.only_after)
        share = f" ({self.unmatched_share:.1%})" if unmatched else ""
        rows = counted(len(self.rows), "row")
        return f"compared with the baseline: {rows}: {told}; {unmatched} without a partner{share}"


_DECIDED: tuple[BaselineVerdict, ...] = ("slower", "faster")
_VERDICTS: tuple[BaselineVerdict, ...] = (*_DECIDED, "no measurable difference", "too noisy to tell", "not known")


def confirmed(
    alone: BaselineComparison, first: BaselineComparison, again: BaselineComparison, above: float
) -> tuple[list[GateFailure], list[str]]:
    """The rows that failed a gate and fail it again, and those that then pass: the speed of a machine that others use
    changes for seconds, in which the times of an op are steady and too long. `first` is `alone` with what the two
    differ by as the noise floor; a row that failed both times by less is in neither list."""
    with_floor, second = ({row.name: row for row in each.rows} for each in (first, again))
    failures, passed = [], []
    for row in alone.rows:
        then, why = second.get(row.name), row.failure(above)
        if why is None:
            continue
        if then is not None and then.ratio is not None and not then.failure(above):
            passed.append(f"{why}; then {then.ratio:.3f} x")
        elif with_floor[row.name].failure(above):
            failures.append(why)
    return failures, passed


def read_baseline(path: str | PathLike[str], flag: str = FLAG) -> Document:
    """A document that --benchmark-out wrote; `flag` named it. Raises UsageError for anything else."""
    wanted = "expected a file that opreplay-benchmark --benchmark-out wrote"
    document = read_json(path, f"{flag}={path}", wanted)
    wrong = _what_is_wrong(document)
    if wrong:
        raise UsageError(f"{flag}={path}: {wrong}; {wanted}")
    return dict(document)


def _what_is_wrong(document: Any) -> str:
    if not isinstance(document, dict) or not isinstance(document.get("context"), dict):
        return "has no context"
    version = document["context"].get("json_schema_version")
    if version != _SCHEMA_VERSION:
        return f"has the schema version {version!r}, not {_SCHEMA_VERSION}"
    if "capture_session" not in document["context"]:
        return "is of another benchmark: its context names no capture"
    rows = document.get("benchmarks")
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and isinstance(row.get("name"), str) for row in rows
    ):
        return "has no list of named rows"
    return ""


def compare_with_baseline(
    path: str, before: Document, after: Document, named: tuple[str, str] = ("in the baseline", "here")
) -> BaselineComparison:
    """Pair two documents' rows; `named` is how reasons call the two. Raises UsageError if they have none in common."""
    old, new = _by_name(before), _by_name(after)
    paired = [name for name in new if name in old]
    if not paired:
        known = ", ".join(list(old)[:3]) or "no rows"
        raise UsageError(
            f"{FLAG}={path}: none of its rows was measured here (it has {known}): measure it with the same flags"
        )
    on_host = any(_on_host(each["context"]) for each in (before, after))
    rows = [_pair(name, old[name], new[name], named, on_host) for name in paired]
    rows += _total(rows, old, new)
    reason, most = _disturbed(before["context"], after["context"], named)
    rows = [
        replace(row, verdict="too noisy to tell", reason=reason)
        if row.verdict in _DECIDED and row.ratio is not None and 1 / most < row.ratio < most
        else row
        for row in rows
    ]
    only_before, only_after = [name for name in old if name not in new], [name for name in new if name not in old]
    return BaselineComparison(
        path,
        rows,
        only_before,
        only_after,
        _differences(before["context"], after["context"]),
        max(_share_of(only_before, old), _share_of(only_after, new)),
    )


def _disturbed(before: Mapping[str, Any], after: Mapping[str, Any], named: tuple[str, str]) -> tuple[str, float]:
    """Why times of the host decide little, and the ratio that this explains: other programs computed during one of the
    measurements. What they leave is the least that it had, and a core that is shared with them is half as fast."""
    reason, most = "", 1.0
    for when, context in zip(named, (before, after), strict=True):
        share = _number(context.get("others_share"))
        if share is not None and BUSY < share <= 1 and _on_host(context):
            reason, most = f"{when}, {others_had(share)}", max(most, 2 / (1 - min(share, 0.95)))
    return reason, most


def _on_host(context: Mapping[str, Any]) -> bool:
    """Whether the times are the host's."""
    return context.get("devices") in (["cpu"], ["meta"], [])


def _by_name(document: Document) -> dict[str, list[dict[str, Any]]]:
    """The measured rows by name: several if it was measured repeatedly. Aggregates are made of them."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in document["benchmarks"]:
        if row.get("run_type") != "aggregate":
            found.setdefault(row["name"], []).append(row)
    return found


def _share_of(names: Sequence[str], rows: Mapping[str, list[dict[str, Any]]]) -> float:
    """Which part of the time of ops these names have; of the rows, where they are not ops or none has a time."""
    time = {name: sum(_number(row.get("estimated_us")) or 0.0 for row in of) for name, of in rows.items()}
    total = sum(time.values())
    return sum(time[name] for name in names) / total if total else len(names) / max(len(rows), 1)


def _total(
    pairs: Sequence[PairedRow], old: Mapping[str, list[dict[str, Any]]], new: Mapping[str, list[dict[str, Any]]]
) -> list[PairedRow]:
    """The sum over the ops that both have a time of: many small changes are a large one. None for fewer than two."""
    named = {pair.name: pair for pair in pairs if pair.name.startswith("BM_op/") and pair.ratio is not None}
    sums = {
        name: [
            [_number(row.get(f"estimated_us{end}")) for end in ("", "_low", "_high")]
            for row in (*old[name], *new[name])
        ]
        for name in named
    }
    known = {name: np.array(found, float) for name, found in sums.items() if len(found) == 2}
    known = {name: found for name, found in known.items() if np.isfinite(found).all()}
    if len(known) < 2:
        return []
    before, after = (np.sum([found[place] for found in known.values()], axis=0) * 1e3 for place in (0, 1))
    # The sums differ by at most the sum of what their parts differ by.
    floor = sum(named[name].noise_floor * float(found[0][0]) for name, found in known.items()) * 1e3 / before[0]
    old_sum, new_sum = (Figure(float(of[0]), float(of[1]), float(of[2])) for of in (before, after))
    of_runs = all("processes" in row for name in known for row in (*old[name], *new[name]))
    return [_judged(TOTAL, old_sum, new_sum, float(floor), of_runs)]


def _pair(
    name: str, before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]], named: tuple[str, str], on_host: bool
) -> PairedRow:
    old, new = figure_of(before), figure_of(after)
    floor = max((_number(row.get("noise_floor")) or 0.0 for row in (*before, *after)), default=0.0)
    of_runs = all("processes" in row for row in (*before, *after))
    if on_host and not of_runs:
        floor = max(floor, BETWEEN_PROCESSES)
    if _in_graphs(before) != _in_graphs(after):
        reason = "one of the two was launched in a graph, and the other was not"
        return PairedRow(name, old, new, None, None, None, floor, "not known", reason)
    for when, figure in zip(named, (old, new), strict=True):
        if figure.value is None or figure.low is None or figure.high is None:
            return PairedRow(name, old, new, None, None, None, floor, "not known", f"{when}: {figure.reason}")
    return _judged(name, old, new, floor, of_runs)


def _judged(name: str, old: Figure, new: Figure, floor: float, of_runs: bool) -> PairedRow:
    """The verdict on two figures that are known. `of_runs`: the interval of each is where the other's median would lie
    if they were of the same speed, so it is compared with that median."""
    assert old.value and old.low and old.high and new.value and new.low and new.high
    ratio, low, high = new.value / old.value, new.low / old.high, new.high / old.low
    if of_runs:
        low, high = min(new.value / old.high, new.low / old.value), max(new.value / old.low, new.high / old.value)
    verdict, reason = _verdict(low, high, floor), ""
    if verdict == "too noisy to tell":
        reason = f"the ratio lies between {low:.3g} and {high:.3g}"
    if old.shortest and new.shortest:
        shortest, most = new.shortest / old.shortest, 1 + BETWEEN_PROCESSES
        if verdict in _DECIDED:
            reason = contradicted(ratio, shortest)
            verdict = "too noisy to tell" if reason else verdict
        elif of_runs and _verdict(shortest / most, shortest * most, floor) in _DECIDED:
            old, new = Figure(old.shortest), Figure(new.shortest)
            ratio, low, high = shortest, shortest / most, shortest * most
            verdict, reason = _verdict(low, high, floor), _OF_UNDISTURBED
    return PairedRow(name, old, new, ratio, low, high, floor, verdict, reason)


_OF_UNDISTURBED = (
    "the shortest times, which two processes on each side agree on; others on the machine disturbed the rest"
)


def _verdict(low: float, high: float, floor: float) -> BaselineVerdict:
    """What the bounds of a ratio say."""
    if low > 1 + floor:
        return "slower"
    if high < 1 / (1 + floor):
        return "faster"
    return "too noisy to tell" if high > NOISY * low else "no measurable difference"


def _in_graphs(rows: Sequence[dict[str, Any]]) -> set[str]:
    """How many of the times of a name are of launches of graphs: of whole replays (`graph`), of ops (`graphs`)."""
    return {str(row.get("graphs") or int(row.get("graph") is True)) for row in rows}


def figure_of(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """The median of all times of a name; for a sum over ops, the sum."""
    for row in rows:
        if row.get("error_occurred"):
            return Figure(None, reason=str(row.get("error_message", "it has no times")))
    if len(rows) == 1 and "samples" not in rows[0]:
        value, low, high = (
            _number(rows[0].get(key)) for key in ("estimated_us", "estimated_us_low", "estimated_us_high")
        )
        if value is None or low is None or high is None:
            return Figure(None, reason=str(rows[0].get("estimated_us_low_reason", "it has no interval")))
        return Figure(value * 1e3, low * 1e3, high * 1e3, shortest=_undisturbed(rows))
    times: list[float] = []
    for row in rows:
        samples = row.get("samples")
        column = samples.get("real_time") if isinstance(samples, dict) else None
        numbers = [_number(each) for each in column] if isinstance(column, list | tuple) else []
        times += [each for each in numbers if each is not None]
        if not numbers or None in numbers:
            return Figure(None, reason="its single times are missing, or are no positive numbers")
    found = summarize(times, of_processes=any("processes" in row for row in rows))
    if found.interval is None:
        return Figure(found.median, reason=found.reasons["interval"])
    shortest = _undisturbed(rows) if "processes" in rows[0] else low_quantile(times)
    return Figure(found.median, found.interval.low, found.interval.high, shortest=shortest)


def _undisturbed(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """What the work of rows of several processes takes where nothing disturbs it; None if that is not known."""
    lists = [row.get("shortest_times_ns") for row in rows]
    times = [_number(each) for some in lists for each in (some if isinstance(some, list) else [None])]
    return None if None in times else undisturbed([each for each in times if each is not None])


def _number(value: Any) -> float | None:
    """A positive number of a size that can be calculated with; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 1 / MOST_NUMBER <= value <= MOST_NUMBER else None


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What is not the same of machine, software, work and settings."""
    return [
        f"{what}: {_said(before.get(key))} then, {_said(after.get(key))} now"
        for key, what in _CONTEXT.items()
        if before.get(key) != after.get(key)
    ]


def _said(value: Any) -> str:
    return "not known" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(rows: Sequence[PairedRow]) -> Iterator[str]:
    heads = ("before", "now", "ratio", "between", "verdict", "row")
    cells = [
        (
            duration(row.before.value),
            duration(row.after.value),
            "-" if row.ratio is None else f"{row.ratio:.3f}",
            "-" if row.ratio_low is None else f"{row.ratio_low:.3f} and {row.ratio_high:.3f}",
            row.verdict,
            row.name + (f": {row.reason}" if row.reason else ""),
        )
        for row in rows
    ]
    yield from aligned((heads, *cells))


def noise_floor(first: Document, second: Document) -> BaselineComparison:
    """Two measurements of the same work, one after the other (A/A): `apart` of a row is its noise floor."""
    named = ("in the first measurement", "in the second one")
    return compare_with_baseline("(the same work, measured again)", first, second, named)


def noise_lines(found: BaselineComparison) -> Iterator[str]:
    """One line a row of `noise_floor`: what difference is none."""
    for row in found.rows:
        if row.apart is None:
            yield printable(f"noise     {row.name}: not known: {row.reason}")
        else:
            measured = f"measured twice: {duration(row.before.value)} and {duration(row.after.value)}"
            yield printable(f"noise     {row.name}: a difference of less than {row.apart:.1%} is none ({measured})")
