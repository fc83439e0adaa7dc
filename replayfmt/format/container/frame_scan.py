"""A capture's contents found frame by frame, from the first to the last whole one.

This needs neither index nor trailer: it is how a capture is read that was never closed, and the fallback where the
index is damaged. The hash of every frame is verified on the way, the bytes of payloads are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from replayfmt.errors import InvalidCapture

from ..codes import FrameKind
from ..records.record_frames import first_and_storages
from .frames import (
    FRAME_ROW,
    PAYLOAD_ROW,
    PREAMBLE_BYTES,
    TRAILER_BYTES,
    BadHeader,
    FrameHeader,
    Trailer,
    pack_frame_row,
)
from .index import check_payload_rows
from .source import DamagedBody, Source


@dataclass(frozen=True)
class ScannedFrames:
    """What a scan found. `end` is where the last whole frame ends; `stopped` says why it ended there, "" where the
    file ends as a closed capture does, or does but for what is in its index and trailer. `closed` says whether there
    is an index, or was one."""

    frames: np.ndarray
    payloads: np.ndarray
    records: int
    storages: int
    end: int
    stopped: str
    closed: bool


def scan_frames(source: Source, trailer: Trailer | None = None) -> ScannedFrames:
    """Scan a file whose preamble is good, to its end or to the index that a good `trailer` points to.

    A torn tail ends the scan. What contradicts itself behind a valid check raises InvalidCapture, and so does a file
    without a single whole frame.
    """
    return _FrameScan(source, trailer).run()


class _Torn(InvalidCapture):
    """The scan ends before this frame."""


class _FrameScan:
    def __init__(self, source: Source, trailer: Trailer | None) -> None:
        self._source = source
        self._trailer = trailer
        self._frames = bytearray()
        self._payloads = bytearray()
        self._offset = PREAMBLE_BYTES
        self._records = 0
        self._storages = 1  # the next storage's id
        self._summary = False
        self._closed = trailer is not None

    def run(self) -> ScannedFrames:
        path = self._source.path
        stopped = self._scan().removeprefix(f"{path}: ")
        if not self._frames:
            raise InvalidCapture(f"{path}: no whole frame follows the preamble, so nothing can be read: {stopped}")
        frames = np.frombuffer(bytes(self._frames), FRAME_ROW)
        payloads = np.frombuffer(bytes(self._payloads), PAYLOAD_ROW)
        if self._trailer is not None and not stopped:
            found = (self._records, len(frames), len(payloads))
            listed = (self._trailer.records, self._trailer.frames, self._trailer.payloads)
            if found != listed:
                raise InvalidCapture(f"{path}: records, frames and payloads are {found}, the trailer counts {listed}")
        return ScannedFrames(frames, payloads, self._records, self._storages - 1, self._offset, stopped, self._closed)

    def _scan(self) -> str:
        """Take frames until something ends the scan: what did, "" for the index in its place."""
        source = self._source
        while True:
            offset = self._offset
            if self._trailer is not None and offset == self._trailer.index_offset:
                return ""
            if offset >= source.length:
                return "the file ends after its last whole frame, without an index and a trailer"
            try:
                header = source.header(offset)
                end = source.frame_end(offset, header)
                if end > source.length:
                    return (
                        f"frame {header.sequence} ({header.name}) at {offset:#x} needs {end - offset} bytes, "
                        f"{source.length - offset} are left"
                    )
                self._check_order(header, offset)
                if header.kind == FrameKind.index:
                    return self._after_index(end)
                body = source.body(offset, header)
            except (BadHeader, DamagedBody, _Torn) as error:
                return str(error)
            self._take(header, offset, body)
            self._offset = end

    def _after_index(self, end: int) -> str:
        self._closed = True
        left = self._source.length - end
        if left == TRAILER_BYTES:
            return ""
        if left < TRAILER_BYTES:
            return f"the file was truncated inside its trailer: {left} bytes follow the index, expected {TRAILER_BYTES}"
        return f"{left - TRAILER_BYTES} bytes follow the end of the capture at {end + TRAILER_BYTES:#x}"

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
            before = len(self._payloads) // PAYLOAD_ROW.itemsize
            frame = np.frombuffer(self._frames[-FRAME_ROW.itemsize :], FRAME_ROW)
            check_payload_rows(np.frombuffer(body, PAYLOAD_ROW), frame, where, before + 1)
            self._payloads += body
