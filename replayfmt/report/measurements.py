"""The files of measurements that a report is made of, and what they say of each signature and of each kernel.

A file is refused in one line where it is damaged, of another schema, or of another capture. What was measured of a
kernel is that of its call sites, as often as the capture calls them, or its row of a benchmark by kernel.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

from replayfmt.benchmark.baseline import MOST_NUMBER, Document, figure_of, read_baseline
from replayfmt.benchmark.energy.energy_report import SCHEMA_VERSION as ENERGY_SCHEMA
from replayfmt.benchmark.result_files import require_same_capture
from replayfmt.errors import UsageError
from replayfmt.format.reader import CaptureReader
from replayfmt.format.signature_text import parse_signature, without_values
from replayfmt.format.validation import parse_json, read_json, require_regular_file

from .ops import CapturedCallSite, KernelTotals

_LONGEST_ROW = 64 << 20


@dataclass(frozen=True)
class Fields:
    """A JSON object whose fields are asked for by name and type. `where` is said in errors."""

    content: Mapping[str, Any]
    where: str

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.content.get(name) is not None

    def text(self, name: str, default: str | None = None) -> str:
        """With a default the field may be null or missing."""
        return default if default is not None and not self.has(name) else self._typed(name, str, "a text")

    def count(self, name: str) -> int:
        value: int = self._typed(name, int, "a whole number")
        if isinstance(value, bool) or not 0 <= value < 1 << 63:
            raise self._wrong(name, "a whole number from 0 to 2^63 - 1")
        return value

    def number(self, name: str) -> float | None:
        """A number of a size that can be calculated with; None if it is null or missing."""
        value = self.content.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST_NUMBER:
            raise self._wrong(name, f"a number of at most {MOST_NUMBER:g} or null")
        return float(value) if abs(value) >= 1 / MOST_NUMBER else 0.0

    def amount(self, name: str) -> float | None:
        """A number from 0: a time, bytes, a rate. None if it is null or missing."""
        value = self.number(name)
        if value is not None and value < 0:
            raise self._wrong(name, "a number from 0 or null")
        return value

    def amounts(self, name: str) -> list[float]:
        """A list of numbers from 0, without null."""
        values = {f"{name}[{place}]": each for place, each in enumerate(self._typed(name, list, "a list of numbers"))}
        inside, found = Fields(values, self.where), []
        for each in values:
            if (value := inside.amount(each)) is None:
                raise inside._wrong(each, "a number from 0")
            found.append(value)
        return found

    def texts(self, name: str) -> list[str]:
        values = self._typed(name, list, "a list of texts")
        if not all(isinstance(value, str) for value in values):
            raise self._wrong(name, "a list of texts")
        return list(values)

    def fields(self, name: str) -> Fields:
        return Fields(self._typed(name, dict, "an object"), f"{self.where}: {name}")

    def rows(self, name: str) -> Iterator[Fields]:
        for place, row in enumerate(self._typed(name, list, "a list of objects")):
            if not isinstance(row, dict):
                raise self._wrong(f"{name}[{place}]", "an object")
            yield Fields(row, f"{self.where}: {name}[{place}]")

    def _typed(self, name: str, kind: type, expected: str) -> Any:
        if not isinstance(self.content.get(name), kind):
            raise self._wrong(name, expected)
        return self.content[name]

    def _wrong(self, name: str, expected: str) -> UsageError:
        found = json.dumps(self.content.get(name), default=str)[:60] if name in self.content else "nothing"
        return UsageError(f"{self.where}: {name}: expected {expected}, got {found}; the file is damaged")


def read_benchmark(path: str | PathLike[str], reader: CaptureReader) -> Document:
    """A document that opreplay-benchmark --benchmark-out wrote for this capture. Raises UsageError for another one."""
    document = read_baseline(path, "--benchmark")
    require_same_capture(f"--benchmark={path}", document["context"].get("capture_session"), reader)
    if "comparisons" in document:
        raise UsageError(
            f"--benchmark={path}: is a comparison of kernels (--compare), which the report does not show; expected a "
            "file that opreplay-benchmark --benchmark-out wrote without --compare"
        )
    return document


def read_energy(path: str | PathLike[str], reader: CaptureReader) -> Fields:
    """A report that opreplay-energy wrote for this capture. Raises UsageError for another one."""
    wanted = f"expected a report that opreplay-energy wrote (schema version {ENERGY_SCHEMA})"
    content = read_json(path, f"--energy={path}", wanted)
    if not isinstance(content, dict) or "isolated_kernels" not in content:
        raise UsageError(f"--energy={path}: is not an energy report; {wanted}")
    if content.get("schema_version") != ENERGY_SCHEMA:
        raise UsageError(f"--energy={path}: has the schema version {content.get('schema_version')!r:.40}; {wanted}")
    found = Fields(content, f"--energy={path}")
    require_same_capture(found.where, found.fields("context").content.get("capture_session"), reader)
    return found


def read_run(path: str | PathLike[str], reader: CaptureReader) -> Fields:
    """The first row that opreplay-run --format=jsonl printed for this capture. Raises UsageError for another one."""
    wanted = "expected what opreplay-run --format=jsonl printed, whose first row has the kind replay"
    try:
        require_regular_file(path)
        with open(path, "rb") as file:
            line = file.readline(_LONGEST_ROW + 1)
    except OSError as error:
        raise UsageError(f"--run={path}: cannot be read: {error.strerror}") from None
    try:
        content = parse_json(line) if len(line) <= _LONGEST_ROW else None
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("kind") != "replay":
        raise UsageError(
            f"--run={path}: its first line is not such a row; {wanted}: a replay that was refused has none"
        )
    require_same_capture(f"--run={path}", content.get("capture_session"), reader)
    return Fields(content, f"--run={path}")


_OP, _WHOLE = "BM_op/", "BM_replay"


@dataclass
class MeasuredCalls:
    """Isolated calls of a signature or a kernel: sums over the `calls` that were measured, by a benchmark or, of joules
    alone, by an energy report. `missing_calls` were not, and `reasons["missing"]` says why. Another sum is None, and
    `reasons` has the reason by the name of the field, where one of the measured rows does not know its part. Times are
    nanoseconds.

    `share_of_roof`, `bound` and the peaks are of the row with most calls.
    """

    calls: int = 0
    missing_calls: int = 0
    total_ns: float | None = 0.0
    low_ns: float | None = 0.0
    high_ns: float | None = 0.0
    bytes_moved: float | None = 0.0
    flops: float | None = 0.0
    joules: float | None = 0.0
    share_of_roof: float | None = None
    bound: str = ""
    peak_flops: float | None = None
    peak_bandwidth: float | None = None
    kernel_class: str = ""
    reasons: dict[str, str] = field(default_factory=dict)
    most_calls: int = 0

    @property
    def call_ns(self) -> float | None:
        return self.a_call(self.total_ns)

    def a_call(self, total: float | None) -> float | None:
        """A call's part of a sum."""
        return None if total is None or not self.calls else total / self.calls

    @property
    def share(self) -> float:
        return self.calls / (self.calls + self.missing_calls) if self.calls else 0.0

    @property
    def known_part(self) -> str:
        """Which part of the calls the figures hold; empty if they hold all."""
        known, every = self.calls, self.calls + self.missing_calls
        if not known or not self.missing_calls:
            return ""
        return f"of {known:,} of {every:,} calls ({self.share:.1%}); the others: {self.reasons.get('missing', '')}"

    def miss(self, calls: int, reason: str) -> None:
        self.missing_calls += calls
        self.reasons.setdefault("missing", reason)

    def add(self, name: str, value: float | None, calls: int, reason: str) -> None:
        """Add `value` for each of `calls` to a sum."""
        before = getattr(self, name)
        if value is None:
            self.reasons.setdefault(name, reason)
        setattr(self, name, None if value is None or before is None else before + value * calls)


@dataclass(frozen=True)
class WholeTime:
    """Replays of the whole capture or of a scope (`name`), in nanoseconds. `captured_ns` is the time that it took
    during capture. What is None has its reason in `reasons`."""

    name: str
    median_ns: float | None
    low_ns: float | None
    high_ns: float | None
    captured_ns: float | None
    reasons: dict[str, str]


@dataclass
class Measurements:
    """Everything that was measured, by signature (without numbers) or by kernel (qualified name). `kernels`: those of
    which a call was measured."""

    by_signature: dict[str, MeasuredCalls] = field(default_factory=dict)
    by_kernel: dict[str, MeasuredCalls] = field(default_factory=dict)
    kernels: set[str] = field(default_factory=set)
    wholes: list[WholeTime] = field(default_factory=list)
    energy_by_signature: dict[str, MeasuredCalls] = field(default_factory=dict)

    @property
    def any_calls(self) -> bool:
        """Whether single ops were measured."""
        return bool(self.by_signature or self.by_kernel)


def read_measurements(benchmarks: Iterable[tuple[str, Document]], energy: Fields | None) -> Measurements:
    """The rows of benchmarks, each with what to call it in errors, and of an energy report. Raises UsageError for rows
    that are damaged, or measured twice."""
    found = Measurements()
    for where, document in benchmarks:
        _add_benchmark(found, where, document)
    if energy is not None:
        for row in energy.rows("kernels"):
            count, reason = row.count("count"), row.text("reason", "no reason is given")
            joules = row.amount("joules_per_call")
            # Unsupported work has a row without a kernel, and no signature.
            name = _without_values(row, row.text("name")) if row.text("kernel") else row.text("name")
            sums = found.energy_by_signature.setdefault(name, MeasuredCalls())
            if joules is None:
                sums.miss(count, reason)
                continue
            sums.calls += count
            sums.add("joules", joules, count, "")
    return found


def _add_benchmark(found: Measurements, where: str, document: Document) -> None:
    by_signature: dict[str, MeasuredCalls] = {}
    by_kernel: dict[str, MeasuredCalls] = {}
    called: set[str] = set()
    wholes: dict[str, list[Fields]] = {}
    for row in Fields(document, where).rows("benchmarks"):
        name = row.text("name")
        if row.content.get("run_type") == "aggregate":
            continue
        if name == _WHOLE or name.startswith(f"{_WHOLE}/"):
            wholes.setdefault(name, []).append(row)
        elif name.startswith(f"{_OP}scope:"):
            continue  # the same ops once more, by scope
        elif name.startswith(f"{_OP}kernel:"):
            _add_calls(by_kernel, kernel := name.removeprefix(f"{_OP}kernel:"), row)
            called.add(kernel)
        elif name.startswith(_OP):
            signature = name.removeprefix(_OP).removeprefix("signature:")
            _add_calls(by_signature, _without_values(row, signature), row)
            called.add(row.text("op", "") or parse_signature(signature).kernel)  # what the signature begins with
    for name, rows in wholes.items():
        whole = _whole(rows, name)
        if any(whole.name == each.name for each in found.wholes):
            raise UsageError(f"{where}: {name} is in several of the files; name one that has it")
        found.wholes.append(whole)
    twice = next(iter((found.by_signature.keys() & by_signature.keys()) or (found.kernels & called)), None)
    if twice is not None:
        raise UsageError(f"{where}: {twice:.200} is in several of the files; name one that has it")
    found.by_signature.update(by_signature)
    found.by_kernel.update(by_kernel)
    found.kernels |= called


def _add_calls(by: dict[str, MeasuredCalls], key: str, row: Fields) -> None:
    sums = by.setdefault(key, MeasuredCalls())
    count = row.count("count")
    calls = count - (row.count("not_measured") if row.has("not_measured") else 0)
    if row.content.get("error_occurred") or calls <= 0:
        sums.miss(count, row.text("error_message", "it has no times"))
        return
    sums.calls += calls
    if count > calls:
        sums.miss(count - calls, row.text("reason", "it has no times"))

    def total(name: str) -> float | None:
        value = row.amount(name)
        return None if value is None else value * 1e3 / calls

    def reason(*names: str) -> str:
        said = (row.text(f"{name}_reason", "") for name in names)
        return next(filter(None, said), "the benchmark does not say")

    sums.add("total_ns", total("estimated_us"), calls, "the benchmark does not say")
    sums.add("low_ns", total("estimated_us_low"), calls, reason("estimated_us_low"))
    sums.add("high_ns", total("estimated_us_high"), calls, reason("estimated_us_low"))
    if "total_bytes" in row.content:  # of a row that has several ops, the sum
        for name, of_all in (("bytes_moved", "total_bytes"), ("flops", "total_flops")):
            known = None if row.count(f"{of_all}_unknown_calls") else row.amount(of_all)
            why = reason(of_all) if not row.content.get(of_all) else "it is not known of all of its calls"
            sums.add(name, None if known is None else known / calls, calls, why)
    else:
        read, written = row.amount("bytes_read"), row.amount("bytes_written")
        moved = None if read is None or written is None else read + written
        sums.add("bytes_moved", moved, calls, reason("bytes_read", "bytes_written"))
        sums.add("flops", row.amount("flops"), calls, reason("flops"))
    if calls > sums.most_calls:
        sums.most_calls = calls
        sums.share_of_roof = row.amount("share_of_roof")
        sums.bound = row.text("bound", "")
        sums.peak_flops, sums.peak_bandwidth = row.amount("peak_flops"), row.amount("peak_bandwidth")
        sums.kernel_class = row.text("kernel_class", "")


def _whole(rows: Sequence[Fields], name: str) -> WholeTime:
    """`rows` are the repetitions: their times are taken together."""
    reasons = {}
    row = rows[0]
    median, low, high = (row.amount(f"median_real_time{end}") for end in ("", "_low", "_high"))
    if median is None:
        reasons["median"] = row.text("unmeasurable", "the benchmark does not say")
    for each in rows:
        if each.has("samples"):
            each.fields("samples").amounts("real_time")
    if len(rows) > 1:
        all_times = figure_of([each.content for each in rows])
        median, low, high = all_times.value, all_times.low, all_times.high
        reasons = {"median": all_times.reason} if median is None else {}
    captured = row.amount("captured_time")
    if captured is None:
        reasons["captured"] = row.text("captured_time_reason", "the benchmark does not say")
    scope = name.removeprefix(_WHOLE).removeprefix("/scope:")
    return WholeTime(scope, median, low, high, captured, reasons)


def _without_values(row: Fields, signature: str) -> str:
    try:
        return str(without_values(parse_signature(signature)))
    except UsageError as error:
        raise UsageError(f"{row.where}: its name is not a signature: {error}") from None


class IsolatedTimes:
    """Nanoseconds of a call, by its signature (without numbers); from a benchmark that was summed by kernel, the mean
    of all of the kernel's calls."""

    def __init__(self, measured: Measurements) -> None:
        self._by_signature = {
            name: None if each.missing_calls else each.call_ns for name, each in measured.by_signature.items()
        }
        self._by_kernel = {name: (each.call_ns, each.calls) for name, each in measured.by_kernel.items()}

    def __bool__(self) -> bool:
        """Whether the time of any call is known."""
        return any(each is not None for each in self._by_signature.values()) or any(
            each is not None for each, _calls in self._by_kernel.values()
        )

    def call_ns(self, signature: str, kernel: str, calls: int) -> float | None:
        """None if no such call was measured. `calls`: how many of the kernel the capture has. A mean of some of them is
        not the time of the others."""
        if signature in self._by_signature:
            return self._by_signature[signature]
        mean, measured = self._by_kernel.get(kernel, (None, 0))
        return mean if measured == calls else None


def read_isolated(where: str, document: Document) -> IsolatedTimes:
    """The times in a benchmark's document, which `where` names. Raises UsageError if it has none of single ops."""
    found = IsolatedTimes(read_measurements([(where, document)], None))
    if not found:
        raise UsageError(
            f"{where}: has no times of single ops; expected a file that opreplay-benchmark --per-op --benchmark-out "
            "wrote, not with --group-by=scope"
        )
    return found


NO_ROW = "the benchmark has no row of these calls"
_SUMS = ("total_ns", "low_ns", "high_ns", "bytes_moved", "flops", "joules")
_OF_THE_MOST = ("share_of_roof", "bound", "peak_flops", "peak_bandwidth", "kernel_class")


def calls_of_kernels(
    sites: Iterable[CapturedCallSite],
    kernels: Sequence[KernelTotals],
    name_of: Callable[[int], str],
    measured: Measurements,
) -> dict[int, MeasuredCalls]:
    """By the kernel's id; only those of which a call was measured."""
    found = sums_of_kernels(sites, measured.by_signature)
    for each in kernels:
        row = measured.by_kernel.get(name_of(each.kernel))
        if row is not None and each.kernel not in found:
            missing = max(each.calls - row.calls, 0)  # it may hold some of the kernel's calls
            reasons = {"missing": NO_ROW, **row.reasons} if missing else row.reasons
            found[each.kernel] = replace(row, missing_calls=missing, reasons=reasons)
    return found


def sums_of_kernels(
    sites: Iterable[CapturedCallSite], by_signature: Mapping[str, MeasuredCalls]
) -> dict[int, MeasuredCalls]:
    """What was measured of the sites of each kernel added up, by its id; only of kernels of which a call was
    measured."""
    by_kernel: defaultdict[int, list[tuple[CapturedCallSite, MeasuredCalls | None]]] = defaultdict(list)
    for site in sites:
        by_kernel[site.kernel].append((site, by_signature.get(site.signature)))
    return {
        kernel: _added_up(parts)
        for kernel, parts in by_kernel.items()
        if any(calls is not None for _site, calls in parts)
    }


def _added_up(parts: Iterable[tuple[CapturedCallSite, MeasuredCalls | None]]) -> MeasuredCalls:
    added = MeasuredCalls()
    for site, calls in parts:
        if calls is None:
            added.miss(site.calls, NO_ROW)
            continue
        known = round(site.calls * calls.share)
        added.calls += known
        if known < site.calls:
            added.miss(site.calls - known, calls.reasons.get("missing", NO_ROW))
        for name in _SUMS if known else ():
            added.add(name, calls.a_call(getattr(calls, name)), known, calls.reasons.get(name, "it is not known"))
        if known > added.most_calls:
            added.most_calls = known
            for name in _OF_THE_MOST:
                setattr(added, name, getattr(calls, name))
    return added
