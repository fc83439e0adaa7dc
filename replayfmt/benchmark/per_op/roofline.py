"""Rooflines: what a device can do at most, and where measured calls lie below that.

The peaks are floating-point operations and bytes a second. They are given by flags, or measured: the rate of a large
matrix product of the dtype, and that of a large copy, of random values (devices clock higher on trivial ones). They are
measured once for a device, dtype, PyTorch and number of threads, and kept in the user's cache for a month. A peak that
was measured while the device was slowed down, or its machine did other work, is used with a warning, and not kept.

A call of F operations that moves B bytes has the intensity F / B. At best it runs at the lower of the peak of
operations and of intensity times the peak of bandwidth, its roof; which one is lower says what bounds it. Calls without
known operations are placed by bandwidth alone.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import torch

from replayfmt.errors import UsageError
from replayfmt.format.validation import counted, parse_json
from replayfmt.pytorch.accelerators import is_accelerator
from replayfmt.pytorch.environment import describe_device

from ..machine import BackgroundLoad, GpuWatch, Open, gpu_caveats, gpu_lines, power_capped
from ..meters import Clock
from ..statistics import rate
from .groups import CallWork
from .results import OpRow

_RATE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)(?:[eE]\+?(\d{1,2}))?([kMGTP]?)\s*", re.ASCII)
_SCALE = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
# Large enough to keep the whole device busy, small enough to take milliseconds.
_WIDTH = {True: 8192, False: 1024}  # of the matrices: on accelerators, and on the host
_COPIED_BYTES = {True: 1 << 30, False: 1 << 28}
_RUNS_TOGETHER = {True: 10, False: 1}  # between two waits for an accelerator, which take their time too
_AT_LEAST_NS = 0.2e9
_AT_LEAST_RUNS = 3
_RANDOM_BYTES = 1 << 20
_KEPT_FOR = timedelta(days=30)  # drivers, clocks and power limits change
# A peak is doubtful if others had more than this share of the processors, or if half of the runs took so much longer
# than the fastest.
_MOST_OTHERS = 0.10
_MOST_SPREAD = 0.10


def parse_rate(flag: str, text: str) -> float:
    """The number that `19.5T` or `2e12` is. Raises UsageError for anything else and for 0."""
    matched = _RATE.fullmatch(text)
    value = float(matched[1]) * 10.0 ** int(matched[2] or 0) * _SCALE[matched[3]] if matched else 0.0
    if not 0 < value < math.inf:
        raise UsageError(f"{flag}={text}: expected a number a second, more than 0, for instance 19.5T or 2e12")
    return value


@dataclass(frozen=True)
class Peak:
    """A rate, and where it comes from. A measured one has when that was, and the `conditions` as text; `doubts` are the
    reasons not to believe it."""

    per_second: float
    source: Literal["given", "measured"]
    measured: datetime | None = None
    conditions: str = ""
    doubts: tuple[str, ...] = ()

    def row(self, device: torch.device, what: str) -> dict[str, Any]:
        found = {"device": str(device), "what": what, "per_second": self.per_second, "source": self.source}
        if self.measured is None:
            return found
        when = self.measured.isoformat(timespec="seconds")
        return found | {"measured": when, "conditions": self.conditions, "doubts": list(self.doubts)}


def peak_line(row: dict[str, Any]) -> str:
    text = f"{row['device']}: {row['what']} {rate(row['per_second'])}, {row['source']}"
    if "measured" not in row:
        return text
    age = datetime.now().astimezone() - datetime.fromisoformat(row["measured"])
    doubts = f"; doubtful, so not kept: {'; '.join(row['doubts'])}" if row["doubts"] else ""
    return f"{text} {_age(age)} ago ({row['conditions']}){doubts}"


def peak_caveats(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"the peak of {row['device']} ({row['what']}) is doubtful, and so are shares of it: {'; '.join(row['doubts'])}"
        for row in rows
        if row.get("doubts")
    ]


def _age(age: timedelta) -> str:
    minutes = max(int(age.total_seconds()) // 60, 0)
    for size, unit in ((24 * 60, "day"), (60, "hour")):
        if minutes >= size:
            return counted(minutes // size, unit)
    return counted(minutes, "minute") if minutes else "less than a minute"


@dataclass
class Peaks:
    """The peaks of one device; of the host, with `threads`. `flops` and `bandwidth` are given, None to measure;
    `precision` is that of products of float32 (`torch.set_float32_matmul_precision`). `cache` is the file of what was
    measured before. `root` is where proc is."""

    device: torch.device
    threads: int
    flops: float | None = None
    bandwidth: float | None = None
    precision: str = "highest"
    cache: Path = field(default_factory=lambda: cache_file())
    clock: Clock = field(default_factory=Clock)
    root: Path = Path("/")
    open_gpu: Open | None = None
    _found: dict[str, Peak | None] = field(default_factory=dict)

    def of_flops(self, dtype: torch.dtype) -> Peak | None:
        """Operations a second with a dtype; None if the device cannot multiply matrices of it."""
        name = str(dtype).removeprefix("torch.")
        if dtype is torch.float32 and self.precision != "highest":
            name += f" ({self.precision} precision)"
        return self._known(f"products of {name}", self.flops, lambda: self._matrix_product(dtype))

    def of_bandwidth(self) -> Peak | None:
        """Bytes a second, read and written together."""
        return self._known("bandwidth", self.bandwidth, self._copy)

    def rows(self) -> list[dict[str, Any]]:
        """The peaks that were asked for."""
        return [peak.row(self.device, what) for what, peak in self._found.items() if peak is not None]

    def _known(self, what: str, given: float | None, measure: Callable[[], Peak | None]) -> Peak | None:
        if what not in self._found:
            self._found[what] = Peak(given, "given") if given is not None else self._kept_or_measured(what, measure)
        return self._found[what]

    def _kept_or_measured(self, what: str, measure: Callable[[], Peak | None]) -> Peak | None:
        name = describe_device(self.device).name or str(self.device)
        threads = "" if is_accelerator(self.device) else f", {self.threads} threads"
        key = f"{name}, torch {torch.__version__}{threads}, {what}"
        kept = _read(self.cache).get(key)
        if kept is not None:
            return kept
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            found = measure()
        finally:
            torch.set_num_threads(before)
        if found is not None and not found.doubts:
            _write(self.cache, {**_read(self.cache), key: found})
        return found

    def _matrix_product(self, dtype: torch.dtype) -> Peak | None:
        width = _WIDTH[is_accelerator(self.device)]
        before = torch.get_float32_matmul_precision()
        changes = dtype is torch.float32 and before != self.precision
        try:
            if changes:
                torch.set_float32_matmul_precision(self.precision)
            left = self._random((width, width)).to(dtype)
            right, out = left.t().contiguous(), torch.empty_like(left)
            torch.mm(left, right, out=out)
            return self._measured(lambda: torch.mm(left, right, out=out), 2 * width**3)
        except RuntimeError:
            return None
        finally:
            if changes:
                torch.set_float32_matmul_precision(before)

    def _copy(self) -> Peak | None:
        size = _COPIED_BYTES[is_accelerator(self.device)]
        once = self._random((min(size, _RANDOM_BYTES),)).mul_(32).to(torch.int8)
        try:
            source = once.repeat(-(-size // len(once)))[:size]
            target = torch.empty_like(source)
            return self._measured(lambda: target.copy_(source), 2 * size)
        except RuntimeError:  # too little memory
            return None

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(0)
        return torch.randn(shape, device=self.device, generator=generator)

    def _measured(self, run: Callable[[], object], amount: float) -> Peak:
        """The rate of the fastest of several runs of `amount`: a peak is what the device can do."""
        together = _RUNS_TOGETHER[is_accelerator(self.device)]

        def several() -> None:
            for _ in range(together):
                run()

        gpus = GpuWatch([self.device], self.open_gpu)
        several()
        gpus.begin()  # while the device is busy: an idle one has other clocks
        times: list[int] = []
        spent = 0
        others = BackgroundLoad(self.root)
        while spent < _AT_LEAST_NS or len(times) < _AT_LEAST_RUNS:
            self._synchronize()
            began = self.clock.real()
            several()
            self._synchronize()
            times.append(self.clock.real() - began)
            spent += times[-1]
        share = others.end()
        several()
        gpus.end()
        self._synchronize()
        fastest, spread = min(times), statistics.median(times) / min(times) - 1
        conditions = [f"{len(times)} times, half within {spread:.0%} of the fastest"]
        doubts = gpu_caveats(gpus.rows(), hardest=True)
        if share is not None:
            conditions.append(f"others had {share:.0%} of the processors")
        conditions += gpu_lines(gpus.rows())
        if spread > _MOST_SPREAD and not power_capped(gpus.rows()):
            doubts.append(f"half of its runs took {spread:.0%} longer than the fastest")
        if share is not None and share > _MOST_OTHERS and not is_accelerator(self.device):
            doubts.append(f"other work had {share:.0%} of the processors")
        per_second = amount * together / (fastest / 1e9)
        return Peak(per_second, "measured", datetime.now().astimezone(), "; ".join(conditions), tuple(doubts))

    def _synchronize(self) -> None:
        if is_accelerator(self.device):
            torch.accelerator.synchronize(self.device)


def cache_file() -> Path:
    """Where measured peaks are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "opreplay" / "peaks.json"


def _read(path: Path) -> dict[str, Peak]:
    """What was measured before and is not too old; a file that cannot be read, or is damaged, holds nothing."""
    try:
        kept: Any = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    items = kept.items() if isinstance(kept, Mapping) else ()
    peaks = {str(key): _peak(value) for key, value in items}
    return {key: peak for key, peak in peaks.items() if peak is not None}


def _peak(value: Any) -> Peak | None:
    try:
        rate, when, conditions = value["per_second"], datetime.fromisoformat(value["measured"]), value["conditions"]
        age = datetime.now().astimezone() - when
    except (TypeError, KeyError, ValueError):
        return None
    number = isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate <= sys.float_info.max
    return Peak(float(rate), "measured", when, str(conditions)) if number and age < _KEPT_FOR else None


def _write(path: Path, kept: Mapping[str, Peak]) -> None:
    """Keep them for later. Where the cache cannot be written, they are measured again next time."""
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    rows = {
        key: {"per_second": peak.per_second, "measured": peak.measured.isoformat(), "conditions": peak.conditions}
        for key, peak in sorted(kept.items())
        if peak.measured is not None
    }
    try:
        for each in reversed((path.parent, *path.parent.parents)):
            each.mkdir(mode=0o700, exist_ok=True)  # for this user alone, whatever the umask
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(rows, indent=1) + "\n")
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)


# The peaks of a device: of the host with a number of threads, and with a precision of float32 products.
PeaksOf = Callable[[torch.device, int, str], Peaks]
# A share of the roof that rounding and noise do not explain.
_ABOVE_THE_ROOF = 1.05


@dataclass(frozen=True)
class RooflinePlace:
    """`of_roof` is the achieved share of what the call could reach, by the resource that bounds it."""

    bound: Literal["compute", "memory"]
    of_roof: float
    intensity: float | None
    peak_flops: Peak | None
    peak_bandwidth: Peak

    def fields(self) -> dict[str, Any]:
        """For a row."""
        peaks = [peak for peak in (self.peak_flops, self.peak_bandwidth) if peak is not None]
        doubtful = {"peaks_doubtful": True} if any(peak.doubts for peak in peaks) else {}
        return {
            "bound": self.bound,
            "share_of_roof": self.of_roof,
            "peak_flops": None if self.peak_flops is None else self.peak_flops.per_second,
            "peak_flops_source": None if self.peak_flops is None else self.peak_flops.source,
            "peak_bandwidth": self.peak_bandwidth.per_second,
            "peak_bandwidth_source": self.peak_bandwidth.source,
            **doubtful,
        }


def place(work: CallWork, call_ns: float, peaks: Peaks) -> RooflinePlace | None:
    """Where a call of `call_ns` nanoseconds lies; None if too little is known of its work or of the device."""
    if not work.bytes_moved or call_ns <= 0:
        return None
    bandwidth = peaks.of_bandwidth()
    if bandwidth is None:
        return None
    seconds = call_ns / 1e9
    by_memory = work.bytes_moved / bandwidth.per_second / seconds
    if not work.flops or work.dtype is None:
        return RooflinePlace("memory", by_memory, None, None, bandwidth)
    flops = peaks.of_flops(work.dtype)
    intensity = work.flops / work.bytes_moved
    if flops is None:
        return RooflinePlace("memory", by_memory, intensity, None, bandwidth)
    by_compute = work.flops / flops.per_second / seconds
    if by_compute > by_memory:
        return RooflinePlace("compute", by_compute, intensity, flops, bandwidth)
    return RooflinePlace("memory", by_memory, intensity, flops, bandwidth)


def work_fields(work: CallWork, call_ns: float | None) -> dict[str, Any]:
    """Fields for the work of one call and, with its time, the rates; what is not known is None with a reason."""
    found: dict[str, Any] = {
        "kernel_class": work.kernel_class,
        "kernel_class_rule": work.rule,
        "flops": work.flops,
        "bytes_read": work.bytes_read,
        "bytes_written": work.bytes_written,
    }
    if work.flops is None:
        found["flops_reason"] = work.flops_reason
    if work.bytes_moved is None:
        found["bytes_read_reason"] = found["bytes_written_reason"] = work.bytes_reason
    if call_ns:
        if work.flops is not None:
            found["flops_per_second"] = work.flops / call_ns * 1e9
        if work.bytes_moved:
            found["bytes_per_second"] = work.bytes_moved / call_ns * 1e9
        if work.flops is not None and work.bytes_moved:
            found["flops_per_byte"] = work.flops / work.bytes_moved
    return found


def row_work(row: OpRow, single: bool, peaks: Callable[[torch.device], Peaks] | None) -> dict[str, Any]:
    """A report's fields for the work of a row's calls: of a `single` op that of one call, with its place on the
    roofline; of several the sums of what is known, and the calls of which it is not."""
    works = [(op.work, calls) for op, calls in row.members if op.work is not None]
    if single:
        if not works or row.members[0][0].times is None:
            return {}
        work, call_ns = works[0][0], row.members[0][0].times.median
        fields = work_fields(work, call_ns)
        placed = None if peaks is None else place(work, call_ns, peaks(work.device))
        return fields if placed is None else fields | placed.fields()
    classes: dict[str, int] = {}
    for work, calls in works:
        classes[work.kernel_class] = classes.get(work.kernel_class, 0) + calls
    found: dict[str, Any] = {"kernel_classes": classes}
    for name, amounts in (
        ("total_flops", [(work.flops, calls) for work, calls in works]),
        ("total_bytes", [(work.bytes_moved, calls) for work, calls in works]),
    ):
        known = [amount * calls for amount, calls in amounts if amount is not None]
        found[name] = sum(known) if known else None
        found[f"{name}_unknown_calls"] = sum(calls for amount, calls in amounts if amount is None)
        if not known:
            found[f"{name}_reason"] = "not known of any of its calls"
    return found


def above_the_roof(rows: list[dict[str, Any]]) -> list[str]:
    """A warning if ops seem to be faster than their device can be."""
    above = [row for row in rows if row.get("share_of_roof", 0.0) > _ABOVE_THE_ROOF]
    if not above:
        return []
    peaks = "the given peaks are too low"
    if "measured" in {row.get(f"{peak}_source") for row in above for peak in ("peak_flops", "peak_bandwidth")}:
        peaks = (
            "the peaks are too low, although the machine seemed quiet when they were measured: give --peak-flops and "
            f"--peak-bandwidth, or remove {cache_file()}, and they are measured again"
        )
    return [
        f"faster than the peak that it is compared with: {counted(len(above), 'op')} ({above[0]['name']}: "
        f"{above[0]['share_of_roof']:.0%}): their data is in the caches, or {peaks}"
    ]
