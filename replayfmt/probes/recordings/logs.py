"""The text beside recordings: `event.log`, what ptxas printed, a program's `stdout.log`, and lists of tensors.

Lines that are not understood are passed over, as these logs hold much else; a line that begins like one of those below
and goes on differently is an error.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

from .files import damaged, lines
from .results import LaunchShape

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|nan|-nan|inf)"
_FINISHED = re.compile(r"\[(?:jit|probe)\] finish (\S+) name (.*) n_param \d+")
_RENAMED = re.compile(r"\[(?:jit|probe)\] rename (.*) (\d+_\S+)$")
_FOUND = re.compile(r"\[exec\] funcmap-find (\S+) (success|fail)")
_SHAPE = re.compile(r"\[exec\] grid (\d+) (\d+) (\d+) block (\d+) (\d+) (\d+) shared (\d+)$")
_MEMORY = re.compile(r"\[exec\] probe-mem (\d+) \(bytes\)$")
_BENCHMARK = re.compile(
    rf"\[benchmark\] prologue ({_NUMBER}) kernel ({_NUMBER}) epilogue ({_NUMBER}) original ({_NUMBER}) "
    rf"impact {_NUMBER}(?: (-?\d+))?$"
)
# What a command line of ptxas assembles; its warnings name a file with a line.
_PTXAS_FILE = re.compile(r"(?<![\w-])([\w-]+)\.ptx(?![\w,])")
_ENTRY = re.compile(r"(?:Compiling entry function|Function properties for) '?([^'\s]+)'?")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(?<!\d)(\d+) bytes spill stores, (\d+) bytes spill loads")
_PEAK = re.compile(r"max memory:\s*([-+\d.,eE]+)\s*([A-Za-z]*)")
_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1} | {
    name: factor
    for power, letter in enumerate("kmgt", 1)
    for name, factor in ((f"{letter}b", 1000**power), (f"{letter}ib", 1024**power))
}


@dataclass(frozen=True)
class BenchmarkTimes:
    """What one launch took with its probe and without, in milliseconds."""

    prologue_ms: float
    kernel_ms: float
    epilogue_ms: float
    original_ms: float


@dataclass(frozen=True)
class LoggedLaunch:
    """One launch in an event log. `kernel` is None where the log does not name it; so are the others where it does not
    tell them. `failed`: the benchmark's original launch gave an error code."""

    kernel: str | None = None
    shape: LaunchShape | None = None
    probe_bytes: int | None = None
    times: BenchmarkTimes | None = None
    failed: bool = False


@dataclass
class EventLog:
    """An event log: its launches, and the folder under `kernel/` of each kernel's name."""

    path: str
    launches: list[LoggedLaunch] = field(default_factory=list)
    folders: dict[str, str] = field(default_factory=dict)


def read_event_log(path: str | os.PathLike[str]) -> EventLog:
    """Read an event log. Raises CaptureNotFound, InvalidRecording."""
    log = EventLog(os.fspath(path))
    names: dict[str, str] = {}
    number = 0
    for number, line in enumerate(lines(path), 1):
        if found := _FINISHED.match(line):
            names[found[1]] = found[2]
        elif found := _RENAMED.match(line):
            log.folders[found[2]] = found[1]
        elif found := _FOUND.match(line):
            log.launches.append(LoggedLaunch(names.get(found[1])))
        elif found := _SHAPE.match(line):
            x, y, z, i, j, k, shared = map(int, found.groups())
            _amend(log, shape=LaunchShape((x, y, z), (i, j, k), shared))
        elif line.startswith("[exec] probe-mem"):
            if not (found := _MEMORY.match(line)):
                raise _misread(path, number, "[exec] probe-mem N (bytes)", line)
            _amend(log, probe_bytes=int(found[1]))
        elif line.startswith("[benchmark] prologue"):
            if not (found := _BENCHMARK.match(line)):
                raise _misread(path, number, "[benchmark] prologue … kernel … epilogue … original … impact …", line)
            times = BenchmarkTimes(*map(float, found.groups()[:4]))
            _amend(log, times=times, failed=found[5] not in (None, "0"))
    return log


def _amend(log: EventLog, **known: object) -> None:
    """Add to what is known of the latest launch; begin another where it has that already or there is none."""
    (name,) = {"shape", "probe_bytes", "times"} & set(known)
    if not log.launches or getattr(log.launches[-1], name) is not None:
        log.launches.append(LoggedLaunch())
    log.launches[-1] = replace(log.launches[-1], **known)  # type: ignore[arg-type]


def _misread(path: str | os.PathLike[str], number: int, expected: str, line: str) -> Exception:
    return damaged(f"{os.fspath(path)}: line {number}", 0, f"`{expected}`", f"`{line[:200]}`")


@dataclass(frozen=True)
class PtxasFigures:
    """What ptxas says of one kernel: registers of a thread, bytes spilled. None: it did not say."""

    registers: int | None = None
    spill_stores_bytes: int | None = None
    spill_loads_bytes: int | None = None


def read_ptxas_log(path: str | os.PathLike[str]) -> dict[str, dict[str, PtxasFigures]]:
    """What ptxas printed, by file (`original`, `pruned`, `probed`, or another) and kernel. The file is that of the
    command line before it in the log, or the one that the log's own name begins with. Raises CaptureNotFound,
    InvalidRecording where figures belong to no file."""
    found: dict[str, dict[str, PtxasFigures]] = defaultdict(dict)
    file = next((each for each in ("original", "pruned", "probed") if Path(path).name.startswith(each)), None)
    entry: str | None = None
    for number, line in enumerate(lines(path), 1):
        if command := "ptxas" in line and _PTXAS_FILE.search(line):
            file, entry = re.split("[-_]", command[1])[-1], None
        elif named := _ENTRY.search(line):
            entry = named[1]
        else:
            registers, spills = _REGISTERS.search(line), _SPILLS.search(line)
            if not (registers or spills):
                continue
            if file is None or entry is None:
                what = "the command line of ptxas" if file is None else "the name of an entry function"
                raise _misread(path, number, f"{what} before its figures", line)
            known = found[file].get(entry, PtxasFigures())
            if registers:
                known = replace(known, registers=int(registers[1]))
            if spills:
                known = replace(known, spill_stores_bytes=int(spills[1]), spill_loads_bytes=int(spills[2]))
            found[file][entry] = known
    return dict(found)


def read_peak_memory(path: str | os.PathLike[str]) -> int | None:
    """The largest `max memory: …` of a program's output, in bytes; None if there is none. A number without a unit
    counts bytes. Raises CaptureNotFound, InvalidRecording."""
    most: int | None = None
    for number, line in enumerate(lines(path), 1):
        if "max memory:" not in line:
            continue
        found = _PEAK.search(line)
        factor = _UNITS.get(found[2].lower()) if found else None
        try:
            amount = float(found[1].replace(",", "")) if found else -1.0
        except ValueError:
            amount = -1.0
        if factor is None or not 0 <= amount < 1e18:
            raise _misread(path, number, "max memory: NUMBER [B, kB, KiB, MB, MiB, GB, GiB, TB or TiB]", line)
        most = max(most or 0, round(amount * factor))
    return most


@dataclass(frozen=True)
class TensorAddresses:
    """Where a tensor lies in the memory of the device."""

    name: str
    shape: str
    begin: int
    nbytes: int


def read_tensors(path: str | os.PathLike[str]) -> list[TensorAddresses]:
    """The tensors of a `tensor.trace`, each memory once, as the latest line names it.

    A line has fields between two spaces: `[call]`, time in nanoseconds, shape, bytes of the storage, address, name, and
    more. Raises CaptureNotFound, InvalidRecording.
    """
    latest: dict[int, TensorAddresses] = {}
    for number, line in enumerate(lines(path), 1):
        if not line.startswith(("[call]", "[ret]")):
            continue
        fields = line.split("  ")
        try:
            shape, nbytes, begin, name = fields[2], int(fields[3]), int(fields[4]), fields[5]
            if nbytes < 0 or not 0 <= begin < 1 << 64:
                raise ValueError
        except (ValueError, IndexError):
            raise _misread(path, number, "[call]  TIME  SHAPE  BYTES  ADDRESS  NAME", line) from None
        latest[begin] = TensorAddresses(name, shape, begin, nbytes)
    return sorted(latest.values(), key=lambda each: each.begin)
