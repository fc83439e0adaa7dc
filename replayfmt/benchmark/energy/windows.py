"""The windows of a measurement of energy, their file, and the energy of each.

The file has one JSON object a line: a header (`kind: header`), a line for each window, and `kind: end` with their
number, so that a file that was cut off is recognized. Times are UTC in nanoseconds since 1970, and monotonic ones: the
length of a window is by the latter, and a window whose two lengths differ was measured while the clock was being set.

The energy of a window is what an energy counter rose by in it, or the trapezoid rule over sampled power; both are
interpolated linearly at the window's edges.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Literal, NoReturn, get_args

import numpy as np

from replayfmt.errors import UsageError
from replayfmt.format.attachments import kernel_tier
from replayfmt.format.validation import parse_json, require_regular_file

from ..machine import are_gpu_rows
from .power_log import CounterSeries, PowerLog, Series, is_header

FORMAT = "opreplay-energy-windows"
VERSION = 1
Role = Literal["idle", "whole", "scope", "op", "restore", "program"]
_MOST_DRIFT_NS = 50_000_000
_HEAD = 4096
_DAY_S = 24 * 60 * 60
_MOST = 2**63 - 1


@dataclass(frozen=True)
class EnergyWindow:
    """`runs` times the same work (idle: 0). `count` is how often the model calls it; `restore` is the work that puts
    back what the op of the same name writes, whose energy is in the op's window, too."""

    role: Role
    name: str
    runs: int
    start_utc_ns: int
    end_utc_ns: int
    start_monotonic_ns: int
    end_monotonic_ns: int
    count: int = 1
    kernel: str = ""
    kernel_class: str = ""

    @property
    def seconds(self) -> float:
        return (self.end_monotonic_ns - self.start_monotonic_ns) / 1e9

    @property
    def start_s(self) -> float:
        return self.start_utc_ns / 1e9

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds


@dataclass(frozen=True)
class WindowsFile:
    """The content of a file. `context` says what was measured and where; `utc_offset_s` is the zone of the machine;
    `not_run` are the ops without a window, each with its calls and the reason."""

    context: dict[str, Any]
    utc_offset_s: int
    windows: list[EnergyWindow]
    not_run: list[dict[str, Any]]

    def lines(self) -> Iterable[str]:
        yield json.dumps(
            {
                "kind": "header",
                "format": FORMAT,
                "version": VERSION,
                "utc_offset_s": self.utc_offset_s,
                "context": self.context,
                "not_run": self.not_run,
            }
        )
        yield from (json.dumps({"kind": "window", **asdict(window)}) for window in self.windows)
        yield json.dumps({"kind": "end", "windows": len(self.windows)})

    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines())


def read_windows(path: str | os.PathLike[str], zone: tzinfo = UTC) -> WindowsFile:
    """Read a file of windows, or timings of the energy system that we follow, whose times are in `zone`. Raises
    UsageError for one that is damaged, cut off, or something else, and for windows during which the clock was set."""
    text = _text_of(path)
    if FORMAT not in text[:_HEAD]:
        timings = _whole_json(text)
        if isinstance(timings, dict) and (_are_timings(timings.get("kernels")) or "num_runs" in timings):
            return _timings(str(path), timings, zone)
        raise UsageError(f"{path}: is not a file of windows: {_content(text, timings)}; {_EXPECTED}")
    try:
        rows = [parse_json(line, parse_constant=_no_number) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise UsageError(f"{path}: is damaged: not every line of it is JSON; measure again") from error
    if not all(isinstance(row, dict) for row in rows) or rows[0].get("format") != FORMAT:
        raise UsageError(f"{path}: is not a file of windows: its first line is not their header; {_EXPECTED}")
    head, *body = rows
    if head.get("version") != VERSION:
        raise UsageError(f"{path}: has version {head.get('version')!r} of windows; this reader knows {VERSION}")
    if not body or body[-1].get("kind") != "end" or body[-1].get("windows") != len(body) - 1:
        raise UsageError(f"{path}: is cut off: measure again with --energy-windows")
    context, not_run = head.get("context"), head.get("not_run")
    offset_s = head.get("utc_offset_s")
    if not isinstance(context, dict) or not isinstance(offset_s, int) or abs(offset_s) >= _DAY_S:
        raise UsageError(f"{path}: its header is damaged")
    if not isinstance(not_run, list) or not all(isinstance(each, dict) and _is_not_run(each) for each in not_run):
        raise UsageError(f"{path}: its header is damaged: the work that was not run")
    if not are_gpu_rows(context.get("gpus", [])):
        raise UsageError(f"{path}: its header is damaged: the states of the GPUs")
    windows = [_window(row, str(path)) for row in body[:-1]]
    _require_forward(windows, str(path))
    return WindowsFile(context, offset_s, windows, not_run)


def _text_of(path: str | os.PathLike[str]) -> str:
    try:
        require_regular_file(path)
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path}: is not a file of windows: it is not text") from error


_WHOLE, _ISOLATED = "full_model_timing.json", "isolated_kernels_timing.json"
_EXPECTED = f"expected what opreplay-benchmark --energy-windows wrote, or {_ISOLATED} with {_WHOLE} beside it"
_SHOWN_KEYS = 6


def _whole_json(text: str) -> Any:
    """The value of a text that is JSON, None for another."""
    try:
        return parse_json(text, parse_constant=_no_number)
    except ValueError:
        return None


def _are_timings(kernels: object) -> bool:
    """Whether a list of kernels says when each was timed."""
    return isinstance(kernels, list) and any(isinstance(each, dict) and "start_timestamp" in each for each in kernels)


def _content(text: str, value: Any) -> str:
    """What a text is that is no file of windows, as a clause. `value` is its JSON, None if it has none."""
    if not text.strip():
        return "it is empty"
    first = text.lstrip("\ufeff \t\r\n").split("\n", 1)[0]
    rows = value is None
    value = _whole_json(first) if rows else value
    if isinstance(value, dict):
        where = "its first line has" if rows else "it has"
        keys = list(value)[:_SHOWN_KEYS]
        return f"{where} {', '.join(json.dumps(key)[:40] for key in keys) or 'nothing'}, and no times to integrate over"
    if value is not None:
        return f"it is JSON, but not of an object: {first[:40]!r}"
    if is_header([cell.strip() for cell in first.split(",")]):
        return f"it has the columns of a power log ({first[:60].strip()}), which is the second argument"
    return f"it begins with {first[:40]!r}, which is not JSON"


def _timings(path: str, given: dict[str, Any], zone: tzinfo) -> WindowsFile:
    """The timings that kernel_benchmark of piep_kernel_execution_graph writes: one file for the whole model, and one
    for its kernels, of which the other is taken from beside the given one. The classes of kernels are its tiers."""
    name = _WHOLE if "kernels" in given else _ISOLATED
    other = os.path.join(os.path.dirname(path), name)
    if not os.path.exists(other):
        raise UsageError(f"{path}: {name} is not beside it: both were written by one measurement")
    try:
        beside = parse_json(_text_of(other), parse_constant=_no_number)
        whole, isolated = (beside, given) if "kernels" in given else (given, beside)
        windows = [_timed("whole", "whole model", whole, whole["num_runs"], zone)]
        not_run = []
        for each in isolated["kernels"]:
            if not isinstance(each["name"], str):
                raise ValueError
            if each["start_timestamp"] and each["end_timestamp"]:
                windows.append(_timed("op", each["name"], each, each["benchmark_runs"], zone))
            else:
                count = {"role": "op", "name": each["name"], "count": each["invocation_count"]}
                not_run.append(count | {"reason": "its timing has no times"})
        rows = [_window(asdict(window), path) for window in windows]
        if not all(_is_count(each["count"]) for each in not_run):
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"{path}: it or {name} is damaged: {_missing(error) or 'a kernel without a name or a count'}"
        ) from error
    _require_forward(rows, path)
    return WindowsFile({"timings": [os.path.basename(path), name]}, 0, rows, not_run)


def _missing(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _timed(role: Role, name: str, timing: dict[str, Any], runs: int, zone: tzinfo) -> EnergyWindow:
    def at(key: str) -> int:
        moment = datetime.fromisoformat(timing[key])
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=zone)
        return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1000

    start, end = at("start_timestamp"), at("end_timestamp")
    tier = kernel_tier(name) if role == "op" else ""
    return EnergyWindow(role, name, runs, start, end, start, end, timing.get("invocation_count", 1), name, tier)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _is_not_run(each: dict[str, Any]) -> bool:
    named = all(isinstance(each.get(name, ""), str) for name in ("role", "name", "kernel"))
    return named and isinstance(each.get("reason"), str) and _is_count(each.get("count", 0))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST


def _require_forward(windows: list[EnergyWindow], path: str) -> None:
    """Raises UsageError if a window begins before the one that ran before it ended."""
    ordered = sorted(windows, key=lambda each: each.start_monotonic_ns)
    for before, after in zip(ordered, ordered[1:], strict=False):
        early_s = max(
            (before.end_monotonic_ns - after.start_monotonic_ns) / 1e9,
            (before.end_utc_ns - after.start_utc_ns - _MOST_DRIFT_NS) / 1e9,
        )
        if early_s > 0:
            raise UsageError(
                f"{path}: the window of {after.name} begins {early_s:.3f} s before that of {before.name} ends: the "
                "clock was set back between them; measure again"
            )


def _window(row: dict[str, Any], path: str) -> EnergyWindow:
    kinds = {field.name: str if field.type == "str" else int for field in fields(EnergyWindow) if field.name != "role"}
    values = {name: row.get(name) for name in kinds}
    right = all(
        isinstance(values[name], str) if kind is str else _is_count(values[name]) for name, kind in kinds.items()
    )
    if not right or row.get("role") not in get_args(Role):
        raise UsageError(f"{path}: a window of it is damaged: {json.dumps(row)[:120]}")
    window = EnergyWindow(role=row["role"], **{name: values[name] for name in kinds})  # type: ignore[arg-type]
    utc, monotonic = window.end_utc_ns - window.start_utc_ns, window.end_monotonic_ns - window.start_monotonic_ns
    if monotonic <= 0:
        raise UsageError(f"{path}: the window of {window.name} does not end after it begins")
    if abs(utc - monotonic) > _MOST_DRIFT_NS:
        raise UsageError(
            f"{path}: the clock was set during the window of {window.name}: it took {utc / 1e9:.3f} s by the time of "
            f"day and {monotonic / 1e9:.3f} s by the monotonic clock; measure again"
        )
    return window


LEAST_SAMPLES = 10
TRAPEZOID = "trapezoid rule, linear interpolation at the edges"
COUNTER = "energy counter, linear interpolation at the edges"
# Two samples farther apart than so many intervals have a gap between them.
GAP_INTERVALS = 3.0
# Load has to be that much above idle for its edge to be found, which is where that part of the rise is over.
_CLEAR_EDGE = 1.2
_RISE = 0.25


@dataclass(frozen=True)
class Energy:
    """Joules of one window. `joules` is None if they cannot be known, and `reason` says why.

    `error` bounds them on either side: power between two samples lies between these, and each sample is right to half
    the log's resolution, and as far from its time as the log's times may be; a counter may be one step late at either
    edge. `samples` are those inside the window, or the changes of the counter, of the GPU that has the fewest; `gaps`
    the pairs of samples that are too far apart.
    """

    joules: float | None
    error: float | None
    seconds: float
    samples: int
    gaps: int
    reason: str = ""

    @property
    def watts(self) -> float | None:
        """The mean power."""
        return None if self.joules is None else self.joules / self.seconds


def method_of(log: PowerLog) -> str:
    """How energy is found from a log."""
    trapezoid = log.series.keys() - log.counters.keys()
    return "; ".join([*([COUNTER] if log.counters else []), *([TRAPEZOID] if trapezoid else [])])


def integrate(log: PowerLog, start_s: float, end_s: float, least: int = LEAST_SAMPLES) -> Energy:
    """The energy of all GPUs of a log from one moment to another (seconds since 1970): by its counter where a GPU has
    one. GPUs are taken one by one and added: their samples need not be of the same moments. With fewer than `least`
    samples in between there is none."""
    seconds = end_s - start_s
    joules = error = 0.0
    fewest: tuple[int, str] | None = None
    gaps = 0
    for gpu in log.gpus:
        counter = log.counters.get(gpu)
        times = log.series[gpu].times_s if counter is None else counter.times_s
        begins, ends = float(times[0]), float(times[-1])
        if start_s < begins or end_s > ends:
            late, early = max(0.0, begins - start_s), max(0.0, end_s - ends)
            what = f"begins {late:.3f} s after" if late else f"ends {early:.3f} s before"
            return Energy(None, None, seconds, 0, 0, f"the power log of GPU {gpu} {what} the window does")
        if counter is None:
            found, wrong, samples = _trapezoid(log.series[gpu], start_s, end_s)
            gaps += _gaps(log.series[gpu], start_s, end_s)
            what = "samples"
        else:
            told = _counted(counter, start_s, end_s)
            if told is None:
                return Energy(None, None, seconds, 0, 0, f"the energy counter of GPU {gpu} ran backwards in the window")
            found, wrong, samples = told
            what = "changes of the energy counter"
        joules, error = joules + found, error + wrong
        if fewest is None or samples < fewest[0]:
            fewest = samples, what
    samples, what = fewest or (0, "samples")
    if samples < least:
        reason = f"{samples} {what} in the window; {least} are needed"
        return Energy(None, None, seconds, samples, gaps, reason)
    return Energy(joules, error, seconds, samples, gaps)


def _trapezoid(series: Series, start_s: float, end_s: float) -> tuple[float, float, int]:
    """Joules, their error, and the samples inside."""
    times, watts = _cut(series, start_s, end_s)
    rises = np.abs(np.diff(watts))
    error = float((rises * np.diff(times)).sum() / 2) + series.resolution_w / 2 * (end_s - start_s)
    if series.time_error_s:
        _, near = _cut(series, start_s - series.time_error_s, end_s + series.time_error_s)
        error += series.time_error_s * float(np.abs(np.diff(near)).sum())
    return float(np.trapezoid(watts, times)), error, times.size - 2


def _counted(series: CounterSeries, start_s: float, end_s: float) -> tuple[float, float, int] | None:
    """Joules, their error, and the changes inside; None if the counter fell between the sample before the window and
    the one behind it."""
    first = int(np.searchsorted(series.times_s, start_s, "right")) - 1
    steps = np.diff(series.joules[first : int(np.searchsorted(series.times_s, end_s, "left")) + 1])
    if (steps < 0).any():
        return None
    before, after = np.interp([start_s, end_s], series.times_s, series.joules)
    return float(after - before), 2 * float(steps.max(initial=0.0)), int((steps[:-1] > 0).sum())


def _cut(series: Series, start_s: float, end_s: float) -> tuple[np.ndarray, np.ndarray]:
    """The samples inside a window, with interpolated ones at its edges."""
    inside = (series.times_s > start_s) & (series.times_s < end_s)
    edges = np.interp([start_s, end_s], series.times_s, series.watts)
    times = np.concatenate(([start_s], series.times_s[inside], [end_s]))
    return times, np.concatenate(([edges[0]], series.watts[inside], [edges[1]]))


def _gaps(series: Series, start_s: float, end_s: float) -> int:
    """Pairs of neighbouring samples, at least partly in the window, that are too far apart."""
    interval_s = series.interval_s
    if interval_s is None:
        return 0  # a single sample has no neighbour
    before, after = series.times_s[:-1], series.times_s[1:]
    touching = (after > start_s) & (before < end_s)
    return int(((after - before)[touching] > GAP_INTERVALS * interval_s).sum())


def find_clock_offset(log: PowerLog, idle: tuple[float, float], load: tuple[float, float]) -> float:
    """Seconds to add to the log's times so that power rises where work began: at the end of the idle window.

    A rise is where power exceeds a quarter of the way from idle (the 5th percentile) to the most (the 95th). Of those
    after which the window of `load` has clearly more power than that of `idle`, the one is taken that needs the
    smallest offset. Raises UsageError if there is none.
    """
    if not log.series:
        raise UsageError(f"{log.path}: holds no power, so a rise of it cannot be found: give --clock-offset=SECONDS")
    grid = np.unique(np.concatenate([series.times_s for series in log.series.values()]))
    total = np.sum([np.interp(grid, series.times_s, series.watts) for series in log.series.values()], axis=0)
    low, high = np.percentile(total, (5, 95))
    level = low + _RISE * (high - low)
    rises = np.flatnonzero((total[:-1] <= level) & (total[1:] > level))
    fitting = []
    for index in rises:
        share = (level - total[index]) / (total[index + 1] - total[index])
        offset = idle[1] - float(grid[index] + share * (grid[index + 1] - grid[index]))
        if _mean(grid + offset, total, load) > _CLEAR_EDGE * _mean(grid + offset, total, idle):
            fitting.append(offset)
    best = min(fitting, key=abs, default=None)
    if best is None:
        raise UsageError(
            f"{log.path}: no rise from idle to load in it fits the windows (from {low:.4g} to {high:.4g} W), so the "
            "offset of its clock cannot be found: give --clock-offset=SECONDS"
        )
    return best


def _mean(times: np.ndarray, watts: np.ndarray, window: tuple[float, float]) -> float:
    """The mean power in a window; NaN, which compares with nothing, if the log does not cover it."""
    if window[0] < times[0] or window[1] > times[-1]:
        return float("nan")
    return float(np.interp(np.linspace(*window, 100), times, watts).mean())
