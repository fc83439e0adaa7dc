"""What files of measurements say of each signature, with numbers in calls taken for their types, and of each kernel.

A benchmark's rows and an energy report name an op by its signature with the numbers it was called with, call sites do
without; so several rows may be of one call site, and are added up. Rows of kernels are only those of a benchmark that
was summed by kernel: what single signatures say of a kernel depends on how often the capture calls each of them
(`kernel_sections`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from replayfmt.benchmark.comparison.baseline import Document, figure_of
from replayfmt.errors import UsageError
from replayfmt.format.signatures.text import parse_signature, without_values

from .documents import Fields

_OP, _WHOLE = "BM_op/", "BM_replay"


@dataclass
class MeasuredCalls:
    """Isolated calls of a signature or a kernel: sums over `calls` of them. Sums are None, and `reasons` says why by
    the name of the field, where one of the rows does not know its part. Times are nanoseconds.

    `share_of_roof`, `bound` and the peaks are of the row with most calls.
    """

    calls: int = 0
    total_ns: float | None = 0.0
    low_ns: float | None = 0.0
    high_ns: float | None = 0.0
    bytes_moved: float | None = 0.0
    flops: float | None = 0.0
    share_of_roof: float | None = None
    bound: str = ""
    peak_flops: float | None = None
    peak_bandwidth: float | None = None
    kernel_class: str = ""
    reasons: dict[str, str] = field(default_factory=dict)
    most_calls: int = 0

    @property
    def call_ns(self) -> float | None:
        return None if self.total_ns is None or not self.calls else self.total_ns / self.calls

    def add(self, name: str, value: float | None, calls: int, reason: str) -> None:
        """Add `value` for each of `calls` to a sum."""
        before = getattr(self, name)
        if value is None:
            self.reasons.setdefault(name, reason)
        setattr(self, name, None if value is None or before is None else before + value * calls)


@dataclass
class MeasuredEnergy:
    """Joules of one run's calls of a signature or a kernel; None, with the reason, if a part is not known."""

    calls: int = 0
    joules: float | None = 0.0
    error_joules: float | None = 0.0
    reason: str = ""

    @property
    def joules_per_call(self) -> float | None:
        return None if self.joules is None or not self.calls else self.joules / self.calls

    def add(self, count: int, per_call: float | None, error: float | None, reason: str) -> None:
        self.calls += count
        if per_call is None or self.joules is None:
            self.joules = self.error_joules = None
            self.reason = self.reason or reason
            return
        self.joules += per_call * count
        unknown = error is None or self.error_joules is None
        self.error_joules = None if unknown else (self.error_joules or 0.0) + (error or 0.0) * count


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
    energy_by_signature: dict[str, MeasuredEnergy] = field(default_factory=dict)

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
            count, reason = row.count("count"), row.text("reason") if row.has("reason") else "no reason is given"
            figures = row.amount("joules_per_call"), row.amount("error_joules_per_call")
            # Unsupported work has a row without a kernel, and no signature.
            name = _without_values(row, row.text("name")) if row.text("kernel") else row.text("name")
            found.energy_by_signature.setdefault(name, MeasuredEnergy()).add(count, *figures, reason)
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
            called.add(_kernel(row, signature))  # what the signature begins with
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
        message = row.text("error_message") if row.has("error_message") else "it has no times"
        for name in ("total_ns", "low_ns", "high_ns", "bytes_moved", "flops"):
            sums.add(name, None, count, message)
        return
    sums.calls += calls

    def total(name: str) -> float | None:
        value = row.amount(name)
        return None if value is None else value * 1e3 / calls

    def reason(*names: str) -> str:
        said = [row.text(f"{name}_reason") for name in names if row.has(f"{name}_reason")]
        return said[0] if said else "the benchmark does not say"

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
        sums.bound = row.text("bound") if row.has("bound") else ""
        sums.peak_flops, sums.peak_bandwidth = row.amount("peak_flops"), row.amount("peak_bandwidth")
        sums.kernel_class = row.text("kernel_class") if row.has("kernel_class") else ""


def _whole(rows: Sequence[Fields], name: str) -> WholeTime:
    """`rows` are the repetitions: their times are taken together."""
    reasons = {}
    row = rows[0]
    median, low, high = (row.amount(f"median_real_time{end}") for end in ("", "_low", "_high"))
    if median is None:
        reasons["median"] = row.text("unmeasurable") if row.has("unmeasurable") else "the benchmark does not say"
    for each in rows:
        if each.has("samples"):
            each.fields("samples").amounts("real_time")
    if len(rows) > 1:
        all_times = figure_of([each.content for each in rows])
        median, low, high = all_times.value, all_times.low, all_times.high
        reasons = {"median": all_times.reason} if median is None else {}
    captured = row.amount("captured_time")
    if captured is None:
        has = row.has("captured_time_reason")
        reasons["captured"] = row.text("captured_time_reason") if has else "the benchmark does not say"
    scope = name.removeprefix(_WHOLE).removeprefix("/scope:")
    return WholeTime(scope, median, low, high, captured, reasons)


def _kernel(row: Fields, signature: str) -> str:
    return parse_signature(signature).kernel if not row.has("op") else row.text("op")


def _without_values(row: Fields, signature: str) -> str:
    try:
        return str(without_values(parse_signature(signature)))
    except UsageError as error:
        raise UsageError(f"{row.where}: its name is not a signature: {error}") from None
