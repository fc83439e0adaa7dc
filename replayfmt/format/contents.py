"""What is in a capture and where: its frames and payloads, found through the index, or by walking from the first frame.

Both ways end in the same `Contents`, with rows that obey the same rules, so everything above does not care which way it
was; opreplay-check compares the two. The index is a hint: whatever is wrong with it or the trailer, the walk decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..errors import InvalidCapture, UnsupportedVersion
from .codes import MAJOR_VERSION, Codec, FrameKind
from .frames import (
    ALIGNMENT,
    FLAG_REQUIRED,
    FRAME_ROW,
    HEADER_BYTES,
    MAX_COMPRESSED_PAYLOAD_BYTES,
    MAX_LENGTH,
    PAYLOAD_ROW,
    PREAMBLE_BYTES,
    TRAILER_BYTES,
    BadHeader,
    FrameHeader,
    Trailer,
    pack_frame_row,
    parse_trailer,
)
from .record_frames import first_and_storages
from .source import Source

_KNOWN_KINDS = np.array([int(kind) for kind in FrameKind if kind != FrameKind.none])


@dataclass
class Contents:
    """Rows of every frame but the index, and of every payload by id. `end` is where the last whole frame ends."""

    frames: np.ndarray
    payloads: np.ndarray
    records: int
    storages: int | None
    end: int
    complete: bool
    incomplete_reason: str = ""
    warnings: list[str] = field(default_factory=list)

    def of_kind(self, kind: FrameKind) -> np.ndarray:
        """Which frames are of a kind, as positions."""
        return np.flatnonzero(self.frames["kind"] == kind)


def find_contents(source: Source) -> Contents:
    """The contents of a file whose preamble is good. Raises InvalidCapture where not even its head can be read."""
    try:
        trailer = parse_trailer(source.read(source.length - TRAILER_BYTES, TRAILER_BYTES, "trailer")
                                if source.length >= PREAMBLE_BYTES + TRAILER_BYTES else b"",
                                source.length, source.where(max(0, source.length - TRAILER_BYTES)))
        if trailer is not None:
            contents = read_index(source, trailer)
            _refuse_unknown_required(source, contents)
            _count_unknown(contents)
            return contents
        problem = ""
    except UnsupportedVersion:
        raise
    except InvalidCapture as error:
        trailer, problem = None, str(error)
    contents = walk(source)
    if problem and contents.complete:
        contents.warnings.insert(0, f"{problem}; the frames before it are whole and were read one by one instead")
    elif problem:
        contents.incomplete_reason += f" ({problem})"
    _count_unknown(contents)
    return contents


# -------------------------------------------------------------------------------------------------- through the index


def read_index(source: Source, trailer: Trailer) -> Contents:
    """The contents as the index lists them. Raises InvalidCapture where the index contradicts itself or the file."""
    offset = trailer.index_offset
    header = source.header(offset)
    where = source.where(offset, header)
    expected = trailer.frames * FRAME_ROW.itemsize + trailer.payloads * PAYLOAD_ROW.itemsize
    if header.kind != FrameKind.index or header.stored_bytes != expected:
        raise InvalidCapture(f"{where}: expected an index of {expected} bytes, found a {header.name} frame of "
                             f"{header.stored_bytes}")
    if source.frame_end(offset, header) != offset + trailer.index_bytes:
        raise InvalidCapture(f"{where}: the index ends at {source.frame_end(offset, header):#x}, "
                             f"the trailer says {offset + trailer.index_bytes:#x}")
    if header.sequence != trailer.frames or header.first_ordinal != trailer.records:
        raise InvalidCapture(f"{where}: the index is frame {header.sequence} after {header.first_ordinal} records, the "
                             f"trailer says {trailer.frames} and {trailer.records}")
    body = source.body(offset, header)
    frames = np.frombuffer(body, FRAME_ROW, trailer.frames)
    payloads = np.frombuffer(body, PAYLOAD_ROW, trailer.payloads, trailer.frames * FRAME_ROW.itemsize)
    check_frame_rows(frames, offset, trailer.records, where)
    check_payload_rows(payloads, frames, where)
    return Contents(frames, payloads, trailer.records, None, offset, True)


def check_frame_rows(frames: np.ndarray, end: int, records: int, where: str) -> None:
    """Raise InvalidCapture unless the rows tile the file from the preamble to `end` and count `records` in order."""

    def fail(what: str) -> InvalidCapture:
        return InvalidCapture(f"{where}: the index is inconsistent: {what}")

    if not len(frames):
        raise fail("it lists no frames")
    for name in ("offset", "stored_bytes", "raw_bytes", "first_ordinal", "first_storage"):
        if int(frames[name].max()) > MAX_LENGTH:
            raise fail(f"{name} above 2^60")
    offsets, stored = frames["offset"].astype(np.int64), frames["stored_bytes"].astype(np.int64)
    if int(stored.max()) > end:
        raise fail("a frame is longer than the file")
    ends = offsets + HEADER_BYTES + (stored + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    if offsets[0] != PREAMBLE_BYTES or int(ends[-1]) != end or (offsets[1:] != ends[:-1]).any():
        raise fail("its frames leave holes or overlap")
    kinds = frames["kind"]
    if kinds[0] != FrameKind.head or np.count_nonzero(kinds == FrameKind.head) != 1:
        raise fail("it does not begin with the only head")
    if (kinds == FrameKind.index).any() or np.count_nonzero(kinds == FrameKind.summary) > 1:
        raise fail("it lists an index, or more than one summary")
    is_records = kinds == FrameKind.records
    counts = np.where(is_records, frames["count"], 0).astype(np.int64)
    before = np.cumsum(counts) - counts
    if (frames["first_ordinal"].astype(np.int64) != before).any() or int(counts.sum()) != records:
        raise fail(f"its records do not add up to {records}")
    if (frames["count"][is_records | (kinds == FrameKind.payload)] == 0).any():
        raise fail("it lists a frame of no records or payloads")
    storages = frames["first_storage"].astype(np.int64)
    if storages[0] != 1 or (np.diff(storages) < 0).any() or (np.diff(storages)[~is_records[:-1]] != 0).any():
        raise fail("first_storage does not count on from 1")


def check_payload_rows(payloads: np.ndarray, frames: np.ndarray, where: str) -> None:
    """Raise InvalidCapture unless the rows are ids 1, 2, ... in file order, each inside a payload frame."""

    def fail(what: str) -> InvalidCapture:
        return InvalidCapture(f"{where}: payload rows are inconsistent: {what}")

    holders = frames[frames["kind"] == FrameKind.payload]
    if int(holders["count"].sum(dtype=np.int64)) != len(payloads):
        raise fail(f"{len(payloads)} rows, the payload frames have {int(holders['count'].sum(dtype=np.int64))}")
    if not len(payloads):
        return
    for name in ("offset", "stored_bytes", "raw_bytes"):
        if int(payloads[name].max()) > MAX_LENGTH:
            raise fail(f"{name} above 2^60")
    if (payloads["id"] != np.arange(1, len(payloads) + 1)).any():
        raise fail("ids do not count 1, 2, ...")
    if payloads["reserved"].any():
        raise fail("a reserved field is not zero")
    if (payloads["codec"] > Codec.zstd).any():
        raise fail(f"unknown codec {int(payloads['codec'].max())}")
    offset, stored = payloads["offset"].astype(np.int64), payloads["stored_bytes"].astype(np.int64)
    raw = payloads["raw_bytes"].astype(np.int64)
    plain = payloads["codec"] == Codec.none
    if (stored[plain] != raw[plain]).any():
        raise fail("an uncompressed payload has two lengths")
    if (stored > raw).any():
        raise fail("a compressed payload is longer than its content")
    if (~plain).any() and int(raw[~plain].max()) > MAX_COMPRESSED_PAYLOAD_BYTES:
        raise fail(f"a compressed payload of {int(raw[~plain].max())} bytes; the limit is {MAX_COMPRESSED_PAYLOAD_BYTES}")
    # Where each payload must begin: after its frame's header and rows, or where the payload before it ends.
    counts = holders["count"].astype(np.int64)
    starts = holders["offset"].astype(np.int64) + HEADER_BYTES + _aligned(counts * PAYLOAD_ROW.itemsize)
    ends = offset + _aligned(stored)
    first = np.cumsum(counts) - counts
    expected = np.concatenate(([0], ends[:-1]))
    expected[first] = starts
    if (offset != expected).any():
        raise fail("payloads do not lie one after the other in their frames")
    last = first + counts - 1
    body_ends = holders["offset"].astype(np.int64) + HEADER_BYTES + holders["stored_bytes"].astype(np.int64)
    if (offset[last] + stored[last] != body_ends).any():
        raise fail("payloads do not fill their frames")


def _aligned(lengths: np.ndarray) -> np.ndarray:
    return (lengths + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


# --------------------------------------------------------------------------------------------------------- by walking


def walk(source: Source) -> Contents:
    """The contents found frame by frame, up to the last whole frame: what a capture that was never closed has.

    Verifies the hash of every frame but the bytes of payloads. A torn tail ends the walk; what contradicts itself
    behind a valid check raises InvalidCapture.
    """
    return _Walk(source).run()


class _Walk:
    def __init__(self, source: Source) -> None:
        self._source = source
        self._frames = bytearray()
        self._payloads = bytearray()
        self._offset = PREAMBLE_BYTES
        self._records = 0
        self._storages = 1  # the next storage's id
        self._summary = False

    def run(self) -> Contents:
        source = self._source
        reason = ""
        index: FrameHeader | None = None
        while not reason and index is None:
            offset = self._offset
            if offset >= source.length:
                reason = "the file ends after its last whole frame, without an index and a trailer"
                break
            try:
                header = source.header(offset)
                if source.frame_end(offset, header) > source.length:
                    reason = (f"frame {header.sequence} ({header.name}) at {offset:#x} needs "
                              f"{source.frame_end(offset, header) - offset} bytes, {source.length - offset} are left")
                    break
                self._check_order(header, offset)
                body = self._body(header, offset)
            except (BadHeader, _Torn) as error:
                reason = str(error)
                break
            if header.kind == FrameKind.index:
                index = header
                break
            self._take(header, offset, body)
            self._offset = source.frame_end(offset, header)
        if not self._frames:
            raise InvalidCapture(f"{source.path}: no whole frame follows the preamble, so nothing can be read: {reason}")
        frames = np.frombuffer(bytes(self._frames), FRAME_ROW)
        payloads = np.frombuffer(bytes(self._payloads), PAYLOAD_ROW)
        complete = False
        if index is not None:
            complete, reason = self._closed(index)
        else:
            reason = (f"the capture was never closed, or is still being written; it can be read up to {self._offset:#x}: "
                      f"{_unprefixed(reason, source.path)}")
        return Contents(frames, payloads, self._records, self._storages - 1, self._offset, complete, reason)

    def _closed(self, index: FrameHeader) -> tuple[bool, str]:
        """Whether the file ends as a closed one does, and what is wrong if not."""
        end = self._source.frame_end(self._offset, index)
        if self._source.length == end + TRAILER_BYTES:
            return True, ""
        if self._source.length < end + TRAILER_BYTES:
            return False, f"the file was truncated inside its trailer: {self._source.length - end} bytes after the index"
        return False, (f"{self._source.length - end - TRAILER_BYTES} bytes follow the end of the capture "
                       f"at {end + TRAILER_BYTES:#x}")

    def _check_order(self, header: FrameHeader, offset: int) -> None:
        where = self._source.where(offset, header)
        position = len(self._frames) // FRAME_ROW.itemsize
        if header.sequence != position:
            raise _Torn(f"{where}: is frame {header.sequence}, expected {position}")
        if header.first_ordinal != self._records:
            raise InvalidCapture(f"{where}: begins with record {header.first_ordinal}, expected {self._records}")
        if (header.kind == FrameKind.head) != (position == 0):
            raise InvalidCapture(f"{where}: the head is the first frame, and the only one of its kind")
        if header.kind == FrameKind.summary:
            if self._summary:
                raise InvalidCapture(f"{where}: a second summary")
            self._summary = True

    def _body(self, header: FrameHeader, offset: int) -> bytes:
        """The verified body. In the last frame of the file damage counts as a torn tail, elsewhere as damage."""
        try:
            return self._source.body(offset, header)
        except InvalidCapture as error:
            raise _Torn(str(error)) from None

    def _take(self, header: FrameHeader, offset: int, body: bytes) -> None:
        where = self._source.where(offset, header)
        self._frames += pack_frame_row(offset, header, self._storages)
        if header.kind == FrameKind.records:
            first, born = first_and_storages(body, where)
            if first != self._storages:
                raise InvalidCapture(f"{where}: first_storage is {first}, expected {self._storages}")
            self._storages += born
            self._records += header.count
        elif header.kind == FrameKind.payload:
            rows = np.frombuffer(body, PAYLOAD_ROW).copy()
            before = len(self._payloads) // PAYLOAD_ROW.itemsize
            if (rows["id"] != np.arange(before + 1, before + 1 + len(rows))).any():
                raise InvalidCapture(f"{where}: payload ids do not continue from {before + 1}")
            rows["id"] -= np.uint32(before)
            row = np.frombuffer(bytes(self._frames[-FRAME_ROW.itemsize:]), FRAME_ROW)
            check_payload_rows(rows, row, where)
            self._payloads += body


class _Torn(InvalidCapture):
    """The walk ends here."""


def _unprefixed(text: str, path: str) -> str:
    return text.removeprefix(f"{path}: ")


# ------------------------------------------------------------------------------------------------------ unknown frames


def _refuse_unknown_required(source: Source, contents: Contents) -> None:
    frames = contents.frames
    unknown = ~np.isin(frames["kind"], _KNOWN_KINDS)
    refused = np.flatnonzero(unknown & ((frames["flags"] & FLAG_REQUIRED) != 0))
    for position in refused.tolist():
        source.header(int(frames["offset"][position]))  # raises UnsupportedVersion with the frame's own minor version
        raise UnsupportedVersion(f"{source.where(int(frames['offset'][position]))}: required frame of unknown kind "
                                 f"{int(frames['kind'][position])}; this reader knows version {MAJOR_VERSION}")


def _count_unknown(contents: Contents) -> None:
    kinds = contents.frames["kind"]
    unknown = kinds[~np.isin(kinds, _KNOWN_KINDS)]
    if len(unknown):
        names = ", ".join(str(kind) for kind in sorted(set(unknown.tolist())))
        contents.warnings.append(f"{len(unknown)} optional frames of unknown kind ({names}) were skipped; "
                                 "a newer version of opreplay wrote them")
