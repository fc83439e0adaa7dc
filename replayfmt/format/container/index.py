"""A capture's contents through its index: fast, and trusted only if it is consistent with itself and the file.

The rules for rows of frames and payloads are here too; walking a file frame by frame applies the same ones.
"""

from __future__ import annotations

import numpy as np

from replayfmt.errors import InvalidCapture

from ..codes import Codec, FrameKind
from .frames import (
    ALIGNMENT,
    FRAME_ROW,
    HEADER_BYTES,
    MAX_COMPRESSED_PAYLOAD_BYTES,
    MAX_LENGTH,
    PAYLOAD_ROW,
    PREAMBLE_BYTES,
    Trailer,
)
from .source import Source


def read_index(source: Source, trailer: Trailer) -> tuple[np.ndarray, np.ndarray]:
    """The rows of every frame and payload. Raises InvalidCapture if the index contradicts itself or the file."""
    offset = trailer.index_offset
    header = source.header(offset)
    where = source.where(offset, header)
    expected = trailer.frames * FRAME_ROW.itemsize + trailer.payloads * PAYLOAD_ROW.itemsize
    if header.kind != FrameKind.index or header.stored_bytes != expected:
        raise InvalidCapture(
            f"{where}: expected an index of {expected} bytes, found a {header.name} frame of {header.stored_bytes}"
        )
    if source.frame_end(offset, header) != offset + trailer.index_bytes:
        raise InvalidCapture(
            f"{where}: the index ends at {source.frame_end(offset, header):#x}, "
            f"the trailer says {offset + trailer.index_bytes:#x}"
        )
    if header.sequence != trailer.frames or header.first_ordinal != trailer.records:
        raise InvalidCapture(
            f"{where}: the index is frame {header.sequence} after {header.first_ordinal} records, the "
            f"trailer says {trailer.frames} and {trailer.records}"
        )
    body = source.body(offset, header)
    frames = np.frombuffer(body, FRAME_ROW, trailer.frames)
    payloads = np.frombuffer(body, PAYLOAD_ROW, trailer.payloads, trailer.frames * FRAME_ROW.itemsize)
    check_frame_rows(frames, offset, trailer.records, where)
    check_payload_rows(payloads, frames, where)
    return frames, payloads


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


def check_payload_rows(payloads: np.ndarray, frames: np.ndarray, where: str, first_id: int = 1) -> None:
    """Raise InvalidCapture unless the rows have ids from `first_id` on in file order and fill the payload frames."""

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
    if (payloads["id"] != np.arange(first_id, first_id + len(payloads))).any():
        raise fail(f"ids do not count on from {first_id}")
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
        raise fail(
            f"a compressed payload of {int(raw[~plain].max())} bytes; the limit is {MAX_COMPRESSED_PAYLOAD_BYTES}"
        )
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
