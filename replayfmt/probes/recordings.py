"""Files of a probe's run, as Neutrino writes them: recordings, access maps, logs, the folder. All little-endian.

A result file (`result/<seconds>.bin`) has the records that the probes of one launch saved, by block and then by warp or
thread: eight 32-bit values (grid x, y, z; block x, y, z; bytes of dynamic shared memory; number of probes), a section
of 16 bytes for each probe, then the records. There are three kinds of section:

- newer: 32-bit size of a row, 32-bit divisor (1: a row for each thread, 32 or 64: one for each warp), 64-bit offset;
- of the artifact: 64-bit size of a row and 64-bit offset. The half of the size where newer files have the divisor is 0,
  which tells them apart. Whether a row is a thread's or a warp's follows from the length of the section;
- of the artifact's first version: the same, with the size of the whole section.

A row is what one thread or warp saved: one record, or several where a probe saves each time it is reached.

A `.dmat` file says how often each page of memory was accessed at each clock: the number P of pages and C of clocks as
64-bit values, P page addresses, then C times: the clock, a count n, and n pairs of a page and how often it was accessed
(64 and 32 bits). Pages are those of 64 KiB; clocks come in any order.

The text beside them is `event.log`, what ptxas printed, a program's `stdout.log`, and lists of tensors. Lines that are
not understood are passed over, as these logs hold much else; a line that begins like one of those below and goes on
differently is an error. `TraceFolder` is the folder: `event.log`, `kernel/<n>_<hash>/` for each kernel,
`result/<seconds>.bin` for each launch. Result files are mapped, not read.
"""

from __future__ import annotations

import os
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from replayfmt.errors import CaptureNotFound, InvalidRecording, UsageError
from replayfmt.format.output import new_file

MOST_LINE_BYTES = 1 << 20


def damaged(path: str | os.PathLike[str], offset: int, expected: str, got: str) -> InvalidRecording:
    """The error for a file that does not hold what it has to."""
    return InvalidRecording(f"{os.fspath(path)}: at byte {offset}: expected {expected}, got {got}")


def check_readable(path: str | os.PathLike[str]) -> None:
    """Raise CaptureNotFound unless `path` is a regular file that can be read."""
    name = os.fspath(path)
    if not os.path.lexists(name):
        raise CaptureNotFound(f"{name}: no such file or directory; expected a file of a recording")
    if not os.path.isfile(name):
        what = "is a directory" if os.path.isdir(name) else "is not a regular file"
        raise CaptureNotFound(f"{name}: {what}; expected a file of a recording")
    if not os.access(name, os.R_OK):
        raise CaptureNotFound(f"{name}: permission denied")


def mapped(path: str | os.PathLike[str], at_least: int, what: str) -> memoryview:
    """The bytes of a file of `at_least` so many, mapped for reading. Raises CaptureNotFound or InvalidRecording."""
    check_readable(path)
    size = os.path.getsize(path)
    if size < at_least:
        raise damaged(path, 0, f"{what} of at least {at_least} bytes", f"a file of {size} bytes")
    try:
        return np.memmap(path, np.uint8, "r").data
    except OSError as error:
        raise CaptureNotFound(f"{os.fspath(path)}: cannot be read: {error.strerror}") from None


def lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """The lines of a log, without their ends; bytes that are not UTF-8 are replaced. Raises CaptureNotFound, and
    InvalidRecording for a line longer than a mebibyte."""
    check_readable(path)
    offset = 0
    with open(path, "rb") as file:
        while line := file.readline(MOST_LINE_BYTES + 1):
            if len(line) > MOST_LINE_BYTES:
                raise damaged(path, offset, f"lines of at most {MOST_LINE_BYTES} bytes", "a longer one")
            offset += len(line)
            yield line.decode("utf-8", "replace").rstrip("\r\n")


Level = Literal["thread", "warp"]
Structured = np.ndarray[Any, np.dtype[np.void]]

HEADER = struct.Struct("<8I")
NEWER = struct.Struct("<IIQ")
OLDER = struct.Struct("<QQ")
FIELDS = ("grid x", "grid y", "grid z", "block x", "block y", "block z", "shared bytes", "number of probes")
WARP_SIZE = 32
DIVISORS = (1, 32, 64)
MOST_THREADS = 1024
MOST_PROBES = 1024
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class RecordLayout:
    """What a record of one kind of probe holds. `single`: a row is one record; else a row has as many as fit."""

    name: str
    dtype: np.dtype[np.void]
    level: Level
    single: bool


BLOCK_SCHED = RecordLayout(
    "block_sched", np.dtype([("start", "<u8"), ("elapsed", "<u4"), ("sm", "<u4")]), "warp", single=True
)
DMAT = RecordLayout("dmat", np.dtype([("clock", "<u8"), ("address", "<u8")]), "thread", single=False)


@dataclass(frozen=True)
class LaunchShape:
    """The grid and block of a launch, each x, y, z, and its dynamic shared memory."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0

    @property
    def blocks(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    def rows(self, divisor: int) -> int:
        """Rows of one block, of `divisor` threads each, rounded up."""
        return -(-self.threads // divisor)

    def position(self, block: int) -> tuple[int, int, int]:
        """x, y, z of a block's number; x changes fastest."""
        x, y, _ = self.grid
        return block % x, block // x % y, block // (x * y)


@dataclass(frozen=True)
class ProbeSection:
    """The records of one probe. `divisor` and `row_bytes` are None where the file does not tell (see the module)."""

    path: str
    index: int
    launch: LaunchShape
    offset: int
    length: int
    divisor: int | None
    row_bytes: int | None
    _bytes: memoryview

    def records(self, layout: RecordLayout) -> Structured:
        """The records, mapped: an array of `layout.dtype` with the shape (blocks, rows of a block, records of a row).
        Raises InvalidRecording where the section cannot hold such records."""
        rows, row_bytes = self._rows(layout)
        count, rest = divmod(row_bytes, layout.dtype.itemsize)
        if rest or not count or (layout.single and count != 1):
            wanted = "one record" if layout.single else "whole records"
            raise damaged(
                self.path,
                self.offset,
                f"rows of {wanted} of {layout.dtype.itemsize} bytes ({layout.name}) in section {self.index}",
                f"rows of {row_bytes} bytes; these are the records of another probe",
            )
        shape = (self.launch.blocks, rows, count)
        found: Structured = np.ndarray(shape, layout.dtype, self._bytes, self.offset)
        return found

    def _rows(self, layout: RecordLayout) -> tuple[int, int]:
        """How many rows a block has, and how many bytes a row."""
        launch = self.launch
        if self.divisor is not None and self.row_bytes is not None:
            return launch.rows(self.divisor), self.row_bytes
        in_block = self.length // launch.blocks
        by = {"warp": launch.rows(WARP_SIZE), "thread": launch.threads}
        if layout.single:
            for rows in by.values():
                if in_block == rows * layout.dtype.itemsize:
                    return rows, layout.dtype.itemsize
        elif in_block % by[layout.level] == 0:
            return by[layout.level], in_block // by[layout.level]
        raise damaged(
            self.path,
            self.offset,
            f"a section of {layout.dtype.itemsize} bytes ({layout.name}) for each of the {launch.blocks} × "
            f"{by['warp']} warps or {launch.threads} threads",
            f"{self.length} bytes; these are the records of another probe",
        )


@dataclass(frozen=True)
class ProbeRecording:
    """A result file: the launch and the section of each probe."""

    path: str
    launch: LaunchShape
    sections: tuple[ProbeSection, ...]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ProbeRecording:
        """Map a result file. Raises CaptureNotFound, or InvalidRecording with the place, what was expected and
        found."""
        content = mapped(path, HEADER.size, "a result file with a header")
        numbers = HEADER.unpack_from(content)
        name = os.fspath(path)
        for place, (what, number) in enumerate(zip(FIELDS, numbers, strict=True)):
            if number == 0 and what != "shared bytes":
                raise damaged(name, 4 * place, f"a {what} of at least 1", "0")
        launch = LaunchShape(numbers[0:3], numbers[3:6], numbers[6])
        if launch.threads > MOST_THREADS:
            raise damaged(name, 12, f"a block of at most {MOST_THREADS} threads", f"{launch.threads}")
        probes = numbers[7]
        begin = HEADER.size + probes * NEWER.size
        most = min(MOST_PROBES, (len(content) - HEADER.size) // NEWER.size)
        if probes > most:
            raise damaged(name, 28, f"at most {most} probes in {len(content)} bytes", f"{probes}")
        return cls(name, launch, tuple(_sections(name, content, launch, probes, begin)))

    def section(self, index: int) -> ProbeSection:
        """The section of one probe, from 0. Raises UsageError."""
        if not 0 <= index < len(self.sections):
            raise UsageError(f"{self.path}: has {len(self.sections)} sections, from 0; there is no section {index}")
        return self.sections[index]


def _sections(path: str, content: memoryview, launch: LaunchShape, probes: int, begin: int) -> Iterator[ProbeSection]:
    places = [HEADER.size + index * NEWER.size for index in range(probes)]
    newer = any(NEWER.unpack_from(content, place)[1] for place in places)
    offsets = [NEWER.unpack_from(content, place)[2] for place in places]
    for index, place in enumerate(places):
        # In the order of their probes and one after the other: the end of one is the beginning of the next.
        first = begin if index == 0 else offsets[index - 1]
        end = offsets[index + 1] if index + 1 < probes else len(content)
        offset = offsets[index]
        if not first <= offset <= len(content) or (index == 0 and offset != begin):
            wanted = f"{begin}" if index == 0 else f"from {first} to {len(content)}"
            raise damaged(path, place + 8, f"the offset of section {index} to be {wanted}", f"{offset}")
        length = end - offset
        if newer:
            row_bytes, divisor, _ = NEWER.unpack_from(content, place)
            if divisor not in DIVISORS:
                raise damaged(path, place + 4, "a divisor of 1 (by thread), 32 or 64 (by warp)", f"{divisor}")
            needed = launch.blocks * launch.rows(divisor) * row_bytes
            if not row_bytes or needed != length:
                raise damaged(
                    path,
                    place,
                    f"section {index} to hold {launch.blocks} blocks × {launch.rows(divisor)} rows × {row_bytes} bytes"
                    f" = {needed} bytes",
                    f"{length} bytes",
                )
            yield ProbeSection(path, index, launch, offset, length, divisor, row_bytes, content)
        else:
            yield _older(path, content, launch, index, place, length)


def _older(path: str, content: memoryview, launch: LaunchShape, index: int, place: int, length: int) -> ProbeSection:
    size, offset = OLDER.unpack_from(content, place)
    for divisor in (WARP_SIZE, 1):
        if size and launch.blocks * launch.rows(divisor) * size == length:
            return ProbeSection(path, index, launch, offset, length, divisor, size, content)
    if not size or size != length or length % launch.blocks:
        raise damaged(
            path,
            place,
            f"section {index} to hold {size} bytes for each of the {launch.blocks} blocks' {launch.rows(WARP_SIZE)} "
            f"warps or {launch.threads} threads, or in all",
            f"{length} bytes",
        )
    return ProbeSection(path, index, launch, offset, length, None, None, content)


def write_recording(
    path: str | os.PathLike[str],
    launch: LaunchShape,
    sections: Sequence[Structured],
    *,
    artifact: bool = False,
    force: bool = False,
) -> None:
    """Write a result file of newer sections, or of those of the artifact.

    `sections`: for each probe its records, with the shape (blocks, rows of a block, records of a row); a block has a
    row for each thread or for each warp. Raises UsageError for another shape, OutputExists, CaptureFailed.
    """
    offset = HEADER.size + len(sections) * NEWER.size
    head = [HEADER.pack(*launch.grid, *launch.block, launch.shared_bytes, len(sections))]
    divisors = {launch.threads: 1, launch.rows(WARP_SIZE): WARP_SIZE}
    for index, records in enumerate(sections):
        if (
            records.ndim != 3
            or records.shape[0] != launch.blocks
            or records.shape[1] not in divisors
            or not records.size
        ):
            raise UsageError(
                f"section {index}: expected the shape ({launch.blocks}, {launch.threads} or "
                f"{launch.rows(WARP_SIZE)}, records of a row), got {records.shape}"
            )
        row_bytes = records.shape[2] * records.dtype.itemsize
        divisor = divisors[records.shape[1]]
        head.append(OLDER.pack(row_bytes, offset) if artifact else NEWER.pack(row_bytes, divisor, offset))
        offset += records.nbytes
    with new_file(path, force) as file:
        file.write(b"".join(head))
        for records in sections:
            for chunk in chunks(records):
                file.write(np.ascontiguousarray(chunk).tobytes())


def chunks(records: Structured) -> Iterator[Structured]:
    """Whole blocks of mapped records, about 16 MiB at a time."""
    step = max(1, _CHUNK_BYTES // max(1, records[0].nbytes))
    for first in range(0, len(records), step):
        yield records[first : first + step]


PAGE_BYTES = 1 << 16
_HEAD = struct.Struct("<QQ")
_PAIR_BYTES = 12
_PAIRS_AT_ONCE = 1 << 18

ACCESSES = np.dtype([("clock", "<u8"), ("page", "<u8"), ("count", "<u8")])
Accesses = np.ndarray[Any, np.dtype[np.void]]


@dataclass(frozen=True)
class AccessMap:
    """A mapped `.dmat` file. `pages`: the addresses it lists, ascending."""

    path: str
    pages: np.ndarray[Any, np.dtype[np.uint64]]
    clocks: int
    _content: memoryview

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> AccessMap:
        """Map a file. Raises CaptureNotFound, InvalidRecording; what follows the pages is checked as it is read."""
        content = mapped(path, _HEAD.size, "an access map")
        pages, clocks = _HEAD.unpack_from(content)
        room = len(content) - _HEAD.size
        if not 0 < pages <= room // 8:
            raise damaged(path, 0, f"from 1 to {room // 8} pages in {len(content)} bytes", f"{pages}")
        if not 0 < clocks <= (room - 8 * pages) // 16:
            raise damaged(path, 8, f"from 1 to {(room - 8 * pages) // 16} clocks after {pages} pages", f"{clocks}")
        listed = np.sort(np.ndarray(pages, "<u8", content, _HEAD.size))
        if (twice := np.flatnonzero(listed[1:] == listed[:-1])).size:
            raise damaged(path, _HEAD.size, "different pages", f"{int(listed[twice[0]]):#x} twice")
        return cls(os.fspath(path), listed, clocks, content)

    @property
    def nbytes(self) -> int:
        return len(self._content)

    def accesses(self, progress: Callable[[int], None] = lambda _done: None) -> Iterator[Accesses]:
        """Everything in it, a part at a time, as rows of ACCESSES. `progress` is told the bytes read so far."""
        content = self._content
        words = np.ndarray(len(content) // 4, "<u4", content)  # every field begins at a multiple of four bytes
        spans: list[tuple[int, int, int]] = []
        pairs = 0
        for span in self._spans():
            spans.append(span)
            pairs += span[2]
            if pairs >= _PAIRS_AT_ONCE or len(spans) >= _PAIRS_AT_ONCE:
                yield self._gathered(words, spans)
                progress(span[1])
                spans, pairs = [], 0
        yield self._gathered(words, spans)
        progress(len(content))

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        """Where the pairs are: the byte at which their clock is, that of the first pair, and how many pairs, at most
        _PAIRS_AT_ONCE."""
        content, size = self._content, len(self._content)
        place = _HEAD.size + 8 * len(self.pages)
        for number in range(self.clocks):
            if place + _HEAD.size > size:
                raise damaged(self.path, place, f"clock {number} of {self.clocks}", "the end of the file")
            clock, count = _HEAD.unpack_from(content, place)
            most = (size - place - _HEAD.size) // _PAIR_BYTES
            if count > most:
                raise damaged(self.path, place + 8, f"at most {most} pages at clock {clock}", f"{count}")
            at = place + _HEAD.size
            for first in range(0, count, _PAIRS_AT_ONCE):
                yield place, at + _PAIR_BYTES * first, min(_PAIRS_AT_ONCE, count - first)
            place = at + _PAIR_BYTES * count
        if place != size:
            raise damaged(self.path, place, f"the end of the file after {self.clocks} clocks", f"{size - place} bytes")

    def _gathered(self, words: np.ndarray, spans: list[tuple[int, int, int]]) -> Accesses:
        places, pairs, counts = np.array(spans, np.int64).reshape(-1, 3).T
        within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
        at = np.repeat(pairs // 4, counts) + 3 * within
        clock_at = np.repeat(places // 4, counts)
        found = np.empty(len(at), ACCESSES)
        found["clock"] = words[clock_at] | words[clock_at + 1].astype(np.uint64) << np.uint64(32)
        found["page"] = words[at] | words[at + 1].astype(np.uint64) << np.uint64(32)
        found["count"] = words[at + 2]
        known = self.pages[np.minimum(np.searchsorted(self.pages, found["page"]), len(self.pages) - 1)]
        if (other := np.flatnonzero(known != found["page"])).size:
            raise damaged(
                self.path, 4 * int(at[other[0]]), "a page of the file's list", f"{int(found['page'][other[0]]):#x}"
            )
        return found


_KERNEL = re.compile(r"(\d+)_(\w+)$")
_RESULT = re.compile(r"\d+\.\d+\.bin$")


@dataclass(frozen=True)
class TraceFolder:
    """What a run's folder has. `kernels` by number; `results` by time, the earliest first. Unknown names are left
    out."""

    path: Path
    event_log: Path | None
    tensors: Path | None
    kernels: tuple[Path, ...]
    results: tuple[Path, ...]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> TraceFolder:
        """Look into a folder. Raises CaptureNotFound where it is none, or has none of these files."""
        folder = Path(path)
        if not folder.is_dir():
            raise CaptureNotFound(f"{folder}: is not a directory; expected the folder of a run")
        try:
            kernels = [each for each in _inside(folder / "kernel") if _KERNEL.match(each.name) and each.is_dir()]
            results = [each for each in _inside(folder / "result") if _RESULT.match(each.name)]
        except PermissionError as error:
            raise CaptureNotFound(f"{error.filename}: {error.strerror}") from None
        log, tensors = folder / "event.log", folder / "tensor.trace"
        found = cls(
            folder,
            log if log.is_file() else None,
            tensors if tensors.is_file() else None,
            tuple(sorted(kernels, key=lambda each: int(each.name.partition("_")[0]))),
            tuple(sorted(results, key=lambda each: float(each.stem))),
        )
        if not (found.event_log or found.kernels or found.results):
            raise CaptureNotFound(f"{folder}: has no event.log, kernel/ or result/; expected the folder of a run")
        return found


def _inside(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


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
