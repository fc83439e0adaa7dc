"""A result file: the records that the probes of one launch saved, by block and then by warp or thread.

Eight 32-bit values (grid x, y, z; block x, y, z; bytes of dynamic shared memory; number of probes), a section of 16
bytes for each probe, then the records. There are three kinds of section:

- newer: 32-bit size of a row, 32-bit divisor (1: a row for each thread, 32 or 64: one for each warp), 64-bit offset;
- of the artifact: 64-bit size of a row and 64-bit offset. The half of the size where newer files have the divisor is 0,
  which tells them apart. Whether a row is a thread's or a warp's follows from the length of the section;
- of the artifact's first version: the same, with the size of the whole section.

A row is what one thread or warp saved: one record, or several where a probe saves each time it is reached.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from replayfmt.errors import UsageError

from .files import damaged, mapped, new_file

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
        """Threads of one block."""
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
        for place, (field, number) in enumerate(zip(FIELDS, numbers, strict=True)):
            if number == 0 and field != "shared bytes":
                raise damaged(name, 4 * place, f"a {field} of at least 1", "0")
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
