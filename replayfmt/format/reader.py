"""Reading a capture: opening it in milliseconds, any record by touching one frame, payloads straight from the file.

Opening reads the preamble, the trailer, the index, the head and the definitions; frames are read, verified and decoded
when they are requested, and a few are kept. Nothing a file says is used before it was checked: see frames.py,
flatbuffer_tables.py, definition_families.py and record_frames.py. Not safe for use from several
threads at once.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from replayfmt.errors import InvalidCapture

from .codes import MINOR_VERSION, FrameKind, RecordKind, StorageOrigin
from .contents import Contents, Tally, decode_summary, find_contents, read_frame, read_preamble, read_session
from .definition_tables import Definitions, DefinitionTables
from .frames import FLAG_CONSOLIDATED, FrameHeader
from .model import Record, Storage, Summary
from .record_frames import RecordFrame, RecordFrameDecoder, decode_record
from .source import Closing, PayloadInfo, PayloadInput, Source

_CACHED_FRAMES = 4


@dataclass(frozen=True, slots=True)
class FrameInfo:
    """Where a frame of records is and what it begins with."""

    offset: int
    stored_bytes: int
    raw_bytes: int
    first_ordinal: int
    first_storage: int
    count: int


def open_capture(path: str | os.PathLike[str]) -> CaptureReader:
    """Open a capture. Raises CaptureNotFound, InvalidCapture, or UnsupportedVersion."""
    return CaptureReader(path)


class CaptureReader(Closing):
    """An open capture; close it, or use it in a `with` statement.

    A capture that was never closed opens too, with `complete` False and `incomplete_reason`, and is readable up to its
    last whole frame. `warnings` are sentences about what was wrong or skipped without making anything unreadable.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.source = Source(path)
        try:
            self._open()
        except BaseException:
            self.source.close()
            raise

    def _open(self) -> None:
        source = self.source
        self.path = source.path
        self.length = source.length
        preamble = read_preamble(source)
        self.version = (preamble.major, preamble.minor)
        contents = find_contents(source)
        self.contents: Contents = contents
        self.complete = contents.complete
        self.incomplete_reason = contents.incomplete_reason
        self.warnings = list(contents.warnings)
        if preamble.minor > MINOR_VERSION:
            self.warnings.append(
                f"written by format version {preamble.major}.{preamble.minor}; this reader knows "
                f"{preamble.major}.{MINOR_VERSION} and skips what is newer"
            )
        self.record_count = contents.records
        self.session = read_session(source, contents, preamble)
        self.definitions = self._read_definitions()
        self.strings = self.definitions.strings
        self.devices = self.definitions.devices
        self.kernels = self.definitions.kernels
        self.generators = self.definitions.generators
        self.scopes = self.definitions.scopes
        self.metas = self.definitions.metas
        self.signatures = self.definitions.signatures
        self.layouts = self.definitions.layouts
        self.files = self.definitions.files
        self.file_ranges = self.definitions.file_ranges
        self.recipes = self.definitions.recipes
        self.attachments = self.definitions.attachments
        self.placements = self.definitions.placements
        self._positions = contents.of_kind(FrameKind.records)
        self._first_ordinals = contents.frames["first_ordinal"][self._positions].astype(np.int64)
        self._first_storages = contents.frames["first_storage"][self._positions].astype(np.int64)
        self._decoder = RecordFrameDecoder(self.definitions)
        self._counts = {**self.definitions.counts, "payload": len(contents.payloads)}
        self._cache: OrderedDict[int, RecordFrame] = OrderedDict()
        self._payloads = PayloadInput(source, contents.payloads)

    def _read_definitions(self) -> DefinitionTables:
        contents = self.contents
        tables = contents.of_kind(FrameKind.tables)
        consolidated = (contents.frames["flags"][tables] & FLAG_CONSOLIDATED) != 0
        chosen = tables[~consolidated]
        if consolidated.any():
            if np.count_nonzero(consolidated) > 1 or not consolidated[-1]:
                raise InvalidCapture(f"{self.path}: consolidated definitions are not the last ones")
            chosen = tables[consolidated]
        definitions = Definitions()
        for position in chosen.tolist():
            header, body, where = self.read_frame(position)
            definitions.add(body, header.minor, where, contents.payloads["raw_bytes"])
        return DefinitionTables(definitions, self.path)

    def read_frame(self, position: int) -> tuple[FrameHeader, bytes, str]:
        """Header, verified body and place of any frame, by its position among all frames."""
        return read_frame(self.source, self.contents.frames, position)

    @cached_property
    def accelerators(self) -> frozenset[int]:
        """The ids of the devices that are neither the host nor without memory."""
        return frozenset(n for n, device in enumerate(self.devices[1:], start=1) if device.is_accelerator)

    @cached_property
    def signature_kinds(self) -> np.ndarray:
        """The kind of each signature's records, by signature id: uint8[signatures + 1], 0 unused."""
        return np.concatenate(([RecordKind.none], self.definitions.column("signature_kind"))).astype(np.uint8)

    @cached_property
    def record_frames(self) -> list[FrameInfo]:
        names = ("offset", "stored_bytes", "raw_bytes", "first_ordinal", "first_storage", "count")
        rows = self.contents.frames[self._positions]
        return [FrameInfo(*values) for values in zip(*(rows[name].tolist() for name in names), strict=True)]

    def frame(self, index: int) -> RecordFrame:
        """The `index`-th frame of records, verified and decoded. Raises InvalidCapture if it is damaged."""
        cached = self._cache.get(index)
        if cached is not None:
            self._cache.move_to_end(index)
            return cached
        if not 0 <= index < len(self._positions):
            raise IndexError(f"{self.path}: frame {index} of {len(self._positions)}")
        header, body, where = self.read_frame(int(self._positions[index]))
        offset = int(self.contents.frames["offset"][self._positions[index]])
        frame = self._decoder.decode(body, header, offset, where, self._counts)
        if frame.first_storage != self._first_storages[index]:
            raise InvalidCapture(
                f"{where}: first_storage is {frame.first_storage}, the index says {int(self._first_storages[index])}"
            )
        if index + 1 < len(self._positions):
            after = frame.first_storage + len(frame.storage_bytes)
            if after != self._first_storages[index + 1]:
                raise InvalidCapture(
                    f"{where}: its storages end with {after - 1}, the index says the next is "
                    f"{int(self._first_storages[index + 1])}"
                )
        self._cache[index] = frame
        if len(self._cache) > _CACHED_FRAMES:
            self._cache.popitem(last=False)
        return frame

    def frame_of(self, ordinal: int) -> int:
        """Which frame holds a record. Raises IndexError if the capture has no such record."""
        if not 0 <= ordinal < self.record_count:
            raise IndexError(f"{self.path}: record {ordinal} of {self.record_count}")
        return int(np.searchsorted(self._first_ordinals, ordinal, side="right")) - 1

    def op_ordinals(self) -> np.ndarray:
        """The ordinals of the records that are ops."""
        is_op = self.signature_kinds == RecordKind.op
        frames = map(self.frame, range(len(self.record_frames)))
        found = [np.flatnonzero(is_op[frame.signature]) + frame.first_ordinal for frame in frames]
        return np.concatenate([np.zeros(0, np.int64), *found])

    def record(self, ordinal: int) -> Record:
        frame = self.frame(self.frame_of(ordinal))
        return decode_record(frame, ordinal - frame.first_ordinal, self.definitions)

    def records(self, start: int = 0, stop: int | None = None) -> Iterator[Record]:
        """Records `start` to `stop`, decoded one after the other."""
        stop = self.record_count if stop is None else min(stop, self.record_count)
        if start >= stop:
            return
        for index in range(self.frame_of(start), self.frame_of(stop - 1) + 1):
            frame = self.frame(index)
            first = max(start - frame.first_ordinal, 0)
            last = min(stop - frame.first_ordinal, frame.count)
            for row in range(first, last):
                yield decode_record(frame, row, self.definitions)

    @cached_property
    def storage_count(self) -> int:
        """How many storages the capture has: the largest id."""
        if self.contents.storages is not None:
            return self.contents.storages
        if not len(self._positions):
            return 0
        last = self.frame(len(self._positions) - 1)
        return last.first_storage + len(last.storage_bytes) - 1

    def storage(self, number: int) -> Storage:
        """A storage by id. Raises IndexError if the capture has no such storage."""
        if not 1 <= number <= self.storage_count:
            raise IndexError(f"{self.path}: storage {number} of {self.storage_count}")
        frame = self.frame(bisect_right(self._first_storages, number) - 1)
        row = number - frame.first_storage
        return Storage(
            number,
            int(frame.storage_bytes[row]),
            int(frame.storage_device[row]),
            StorageOrigin(int(frame.storage_origin[row])),
            int(frame.storage_payload[row]),
        )

    def scope_path(self, number: int) -> str:
        """A scope's names from the outermost inwards, joined by slashes; "" for 0."""
        return self.definitions.scope_path(number)

    def annotation(self, number: int) -> dict[str, Any] | None:
        """What is said about one record, by a RecordFrame's annotation id; None for 0. Do not change it. Raises
        InvalidCapture if it is no JSON object."""
        return self.definitions.annotation(number)

    @cached_property
    def summary(self) -> Summary:
        """The stored totals, or a recount of what can be read where the capture has none."""
        stored = self.contents.of_kind(FrameKind.summary)
        if not len(stored):
            return self.recount()
        _header, body, where = self.read_frame(int(stored[0]))
        return decode_summary(body, len(self.kernels) - 1, self.record_count, where)

    def recount(self) -> Summary:
        """The totals, counted by reading every frame of records; when the capture ended is unknown."""
        tally = Tally()
        for index in range(len(self._positions)):
            tally.add_frame(self.frame(index))
        return tally.summary(self.definitions, self._payloads.raw_bytes)

    @property
    def payloads(self) -> PayloadInput:
        """Every payload's PayloadInfo, in file order: a sequence that begins with id 1."""
        return self._payloads

    def payload_info(self, number: int) -> PayloadInfo:
        """A payload by id. Raises IndexError if the capture has no such payload."""
        return self._payloads.info(number)

    def embedded_range(self, number: int) -> tuple[int, int] | None:
        """Where the capture itself has the bytes of a range of a file: payload id and offset in it; None if only the
        file has them."""
        given = self.file_ranges[number]
        if given.payload:
            return given.payload, 0
        whole = self.files[given.file].payload
        return (whole, given.offset) if whole else None

    def payload(self, number: int) -> bytes | memoryview:
        """A payload's content, verified against its hash. Large uncompressed ones are a map of the file: the result is
        valid until the reader is closed, and reading it while someone truncates the file ends the process."""
        return self._payloads.content(number)

    def read_payload_into(self, number: int, buffer: bytearray | memoryview) -> None:
        """Fill `buffer`, of exactly the payload's raw length, with its content and verify that. Raises
        InvalidCapture; the buffer's content is then undefined."""
        self._payloads.read_into(number, buffer)

    def close(self) -> None:
        """Release the file. Closing twice does nothing."""
        self._payloads.close()
        self.source.close()


__all__ = ["CaptureReader", "FrameInfo", "RecordFrame", "open_capture"]


def uncompared_signatures(reader: CaptureReader) -> set[int]:
    """The signatures of digests and host reads, in a capture that has digests, that hold nothing to compare with."""
    if reader.session.policies.get("digests", "none") == "none":
        return set()
    return {number for number, each in enumerate(reader.signatures) if each is not None and each.compares_nothing}


def count_uncompared(reader: CaptureReader) -> int:
    """How many records have these signatures."""
    wanted = list(uncompared_signatures(reader))
    frames = range(len(reader.record_frames) if wanted else 0)
    return sum(int(np.isin(reader.frame(index).signature, wanted).sum()) for index in frames)
