"""What is in a capture and where: its frames and payloads, found through the index or by walking from the first frame;
its Head and its Summary, with totals over all of it and how those are counted.

The index is fast, and trusted only if it is consistent with itself and with the file. Without one, frames are found one
by one up to the last whole one.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from replayfmt.errors import InvalidCapture, UnsupportedVersion

from . import flatbuffer_tables
from .codes import Codec, FrameKind, RecordKind, StorageOrigin
from .flatbuffer_tables import HEAD, SUMMARY, build
from .frames import (
    ALIGNMENT,
    FLAG_CONSOLIDATED,
    FLAG_REQUIRED,
    FRAME_ROW,
    FREE_DEFINITION_BYTES,
    HEADER_BYTES,
    MAX_COMPRESSED_PAYLOAD_BYTES,
    MAX_EXPANSION,
    MAX_LENGTH,
    PAYLOAD_ROW,
    PREAMBLE_BYTES,
    TRAILER_BYTES,
    BadHeader,
    FrameHeader,
    Preamble,
    Trailer,
    pack_frame_row,
    parse_preamble,
    parse_trailer,
)
from .model import CaptureInfo, Summary
from .record_frames import RecordFrame, first_and_storages
from .source import DamagedBody, Source
from .validation import parse_json

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_TEXTS = ("torch_version", "python_version", "platform", "host", "cpu", "cpu_capability", "working_directory")
_PAIRS = ("libraries", "settings", "policies")


def encode_session(session: CaptureInfo) -> memoryview:
    """The Head body. Raises ValueError if the session cannot be stored."""
    if not _UUID.fullmatch(session.session_id):
        raise ValueError(f"session_id {session.session_id!r} is not a lower-case UUID with dashes")

    def text(value: str) -> bytes:
        return value.encode(errors="backslashreplace")

    def pair(key: str, value: Any) -> tuple[bytes, bytes]:
        if not (value is None or isinstance(value, bool | int | float | str)):
            raise ValueError(f"session value {key!r} is {value!r}; only JSON scalars can be stored")
        return text(key), text(json.dumps(value))

    return build(
        HEAD,
        {
            "session_id": text(session.session_id),
            "producer": text(session.producer),
            "producer_version": text(session.producer_version),
            "created_unix_ns": session.created_unix_ns,
            **{name: text(getattr(session, name)) for name in _TEXTS if getattr(session, name) is not None},
            **{name: [pair(*each) for each in getattr(session, name).items()] for name in _PAIRS},
            "argv": [text(argument) for argument in session.argv],
            "rank": session.rank,
            "world_size": session.world_size,
        },
    )


def decode_session(body: bytes, where: str) -> CaptureInfo:
    """The session of a Head body. Raises InvalidCapture."""
    table = flatbuffer_tables.root(body, HEAD, where)
    session_id = table.string("session_id") or ""
    if not _UUID.fullmatch(session_id):
        raise InvalidCapture(f"{where}: session_id {session_id[:80]!r} is not a lower-case UUID with dashes")
    return CaptureInfo(
        session_id=session_id,
        producer=table.string("producer") or "",
        producer_version=table.string("producer_version") or "",
        created_unix_ns=table.scalar("created_unix_ns"),
        argv=tuple(table.strings("argv")),
        rank=table.scalar("rank"),
        world_size=table.scalar("world_size"),
        **{name: table.string(name) for name in _TEXTS},  # type: ignore[arg-type]
        **{name: _decode_pairs(table.pairs(name), f"{where}: {name}") for name in _PAIRS},  # type: ignore[arg-type]
    )


def _decode_pairs(pairs: list[tuple[str, str]], where: str) -> dict[str, Any]:
    decoded: dict[str, Any] = {}
    for key, text in pairs:
        try:
            value = parse_json(text)
        except ValueError:
            raise InvalidCapture(f"{where}: {key!r} is {text[:80]!r}, which is not JSON") from None
        if isinstance(value, list | dict) or key in decoded:
            raise InvalidCapture(f"{where}: {key!r} is not one scalar")
        if isinstance(value, float) and math.isinf(value) and "Infinity" not in text:
            raise InvalidCapture(f"{where}: {key!r} is {text[:80]!r}, beyond the range of a double")
        decoded[key] = value
    return decoded


_ORIGINS = max(StorageOrigin) + 1


class Counted(Protocol):
    """The definitions that a tally is turned into totals with: the writer's or a reader's."""

    def column(self, name: str) -> np.ndarray: ...

    def unsupported_reasons(self) -> dict[int, str]: ...


class Tally:
    """Counts that grow frame by frame: how often each signature occurred, and what storages were allocated."""

    def __init__(self) -> None:
        self._signatures = np.zeros(64, np.int64)
        self.records = 0
        self.storages = 0
        self.annotated = 0
        self._origins = np.zeros(_ORIGINS, np.int64)
        self._origin_bytes = np.zeros(_ORIGINS, np.uint64)

    def add(
        self,
        signature: np.ndarray,
        storage_origin: np.ndarray,
        storage_bytes: np.ndarray,
        annotation: np.ndarray | None,
    ) -> None:
        """Count one frame, given columns of it."""
        counts = np.bincount(signature)
        if len(counts) > len(self._signatures):
            grown = np.zeros(2 * len(counts), np.int64)
            grown[: len(self._signatures)] = self._signatures
            self._signatures = grown
        self._signatures[: len(counts)] += counts
        self.records += len(signature)
        self.storages += len(storage_origin)
        if len(storage_origin):
            self._origins += np.bincount(storage_origin, minlength=_ORIGINS)
            np.add.at(self._origin_bytes, storage_origin, storage_bytes)
        if annotation is not None:
            self.annotated += int(np.count_nonzero(annotation))

    def add_frame(self, frame: RecordFrame) -> None:
        self.add(frame.signature, frame.storage_origin, frame.storage_bytes, frame.annotation)

    def summary(
        self, definitions: Counted, payload_bytes: int, ended_ns: int | None = None, recovered: bool = False
    ) -> Summary:
        """The totals, with `payload_bytes` of content in all payloads."""
        kinds, kernels = definitions.column("signature_kind"), definitions.column("signature_kernel")
        counts = np.zeros(len(kinds), np.int64)
        seen = self._signatures[1 : len(kinds) + 1]
        counts[: len(seen)] = seen
        by_kind = np.bincount(kinds, weights=counts, minlength=max(RecordKind) + 1)
        calls = np.bincount(kernels, weights=np.where(kinds == RecordKind.op, counts, 0), minlength=1)
        reasons: dict[str, int] = {}
        for signature, reason in definitions.unsupported_reasons().items():
            count = int(counts[signature - 1])
            if count:
                reasons[reason] = reasons.get(reason, 0) + count
        return Summary(
            ended_ns=ended_ns or None,
            recovered=recovered,
            records={kind: int(by_kind[kind]) for kind in RecordKind if by_kind[kind]},
            kernel_calls={kernel: int(calls[kernel]) for kernel in np.flatnonzero(calls).tolist()},
            storages=self.storages,
            storage_payload_bytes=payload_bytes,
            absent_storages=int(self._origins[StorageOrigin.absent]),
            unsupported=dict(sorted(reasons.items())),
            origins=_by_origin(self._origins.tolist()),
            annotated=self.annotated,
            origin_bytes=_by_origin(self._origin_bytes.tolist()),
        )


def _by_origin(counts: list[int]) -> dict[StorageOrigin, int]:
    return {StorageOrigin(origin): count for origin, count in enumerate(counts) if count}


def encode_summary(summary: Summary) -> memoryview:
    kinds = np.zeros(max(RecordKind) + 1, np.uint64)
    calls = np.zeros(max(summary.kernel_calls, default=0) + 1, np.uint64)
    for kind, count in summary.records.items():
        kinds[kind] = count
    for kernel, count in summary.kernel_calls.items():
        calls[kernel] = count
    by_origin = {
        name: np.array([counts.get(StorageOrigin(origin), 0) for origin in range(_ORIGINS)], np.uint64)
        for name, counts in (("storage_origins", summary.origins), ("storage_origin_bytes", summary.origin_bytes))
    }
    return build(
        SUMMARY,
        {
            "record_counts": kinds,
            "kernel_calls": calls,
            "unsupported_reason": [reason.encode() for reason in summary.unsupported],
            "unsupported_count": np.array(list(summary.unsupported.values()), np.uint64),
            **by_origin,
            "ended_ns": summary.ended_ns or 0,
            "recovered": summary.recovered,
            "storages": summary.storages,
            "storage_payload_bytes": summary.storage_payload_bytes,
            "absent_storages": summary.absent_storages,
            "annotated_records": summary.annotated,
        },
    )


def decode_summary(body: bytes, kernel_count: int, records: int, where: str) -> Summary:
    """The summary of a Summary body. Raises InvalidCapture if it cannot be one of this capture."""
    table = flatbuffer_tables.root(body, SUMMARY, where)
    empty = np.zeros(0, np.uint64)

    def column(name: str) -> list[int]:
        values = table.column(name)
        return (empty if values is None else values).tolist()

    kinds, calls = column("record_counts"), column("kernel_calls")
    reasons, counts = table.strings("unsupported_reason"), column("unsupported_count")
    if len(reasons) != len(counts) or len(set(reasons)) != len(reasons):
        raise InvalidCapture(f"{where}: {len(reasons)} reasons with {len(counts)} counts, or a reason twice")
    if any(kinds[max(RecordKind) + 1 :]) or any(calls[kernel_count + 1 :]) or any(kinds[:1]) or any(calls[:1]):
        raise InvalidCapture(f"{where}: counts of record kinds or kernels that the capture does not have")
    if sum(kinds) != records or sum(calls) != (kinds[RecordKind.op] if len(kinds) > RecordKind.op else 0):
        raise InvalidCapture(
            f"{where}: counts {sum(kinds)} records and {sum(calls)} kernel calls; the capture has {records} records"
        )
    annotated = table.scalar("annotated_records")
    if annotated > records:
        raise InvalidCapture(f"{where}: counts {annotated} annotated records; the capture has {records} records")
    return Summary(
        ended_ns=table.scalar("ended_ns") or None,
        recovered=bool(table.scalar("recovered")),
        records={RecordKind(kind): count for kind, count in enumerate(kinds) if count},
        kernel_calls={kernel: count for kernel, count in enumerate(calls) if count},
        storages=table.scalar("storages"),
        storage_payload_bytes=table.scalar("storage_payload_bytes"),
        absent_storages=table.scalar("absent_storages"),
        unsupported=dict(zip(reasons, counts, strict=True)),
        origins=_decode_origins(column("storage_origins"), where),
        origin_bytes=_decode_origins(column("storage_origin_bytes"), where),
        annotated=annotated,
    )


def _decode_origins(counts: list[int], where: str) -> dict[StorageOrigin, int]:
    if any(counts[_ORIGINS:]):
        raise InvalidCapture(f"{where}: counts of storage origins that the capture does not have")
    return _by_origin(counts[:_ORIGINS])


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


class _Torn(InvalidCapture):
    """The scan ends before this frame."""


class _FrameScan:
    """Scans a file whose preamble is good, to its end or to the index that a good `trailer` points to.

    A torn tail ends the scan. What contradicts itself behind a valid check raises InvalidCapture, and so does a file
    without a single whole frame. `closed` says whether there is an index, or was one.
    """

    def __init__(self, source: Source, trailer: Trailer | None) -> None:
        self._source = source
        self._trailer = trailer
        self._frames = bytearray()
        self._payloads = bytearray()
        self._offset = PREAMBLE_BYTES
        self._records = 0
        self._storages = 1  # the next storage's id
        self._summary = False
        self.closed = trailer is not None

    def run(self) -> tuple[Contents, str]:
        """What was found, and why the scan ended there: "" where the file ends as a closed capture does, or does but
        for what is in its index and trailer."""
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
        return Contents(frames, payloads, self._records, self._storages - 1, self._offset, not stopped), stopped

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
        self.closed = True
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


_LAST_KIND = int(max(FrameKind))  # codes have no gaps


@dataclass
class Contents:
    """Rows of every frame but the index, and of every payload by id.

    `end` is where the last whole frame ends, index and trailer apart; `storages` is None if they have not been counted.
    `index_problem` says why the index was not believed, though the frames are whole.
    """

    frames: np.ndarray
    payloads: np.ndarray
    records: int
    storages: int | None
    end: int
    complete: bool
    incomplete_reason: str = ""
    index_problem: str = ""
    warnings: list[str] = field(default_factory=list)

    def of_kind(self, kind: FrameKind) -> np.ndarray:
        """Which frames are of a kind, as positions."""
        return np.flatnonzero(self.frames["kind"] == kind)


def read_preamble(source: Source) -> Preamble:
    """The verified preamble of a file. Raises InvalidCapture, or UnsupportedVersion."""
    return parse_preamble(source.read(0, min(PREAMBLE_BYTES, source.length), "preamble"), source.path)


def find_contents(source: Source) -> Contents:
    """The contents of a file whose preamble is good. Raises InvalidCapture if not even its head can be read, and
    UnsupportedVersion if only a newer reader can."""
    trailer: Trailer | None = None
    try:
        trailer = _trailer(source)
        frames, payloads = read_index(source, trailer)
        contents = Contents(frames, payloads, trailer.records, None, trailer.index_offset, True)
        _refuse_unknown_required(source, contents)
    except UnsupportedVersion:
        raise
    except InvalidCapture as error:
        contents = walk_contents(source, trailer, str(error))
    _count_unknown(contents)
    bound_definitions(source, contents)
    return contents


def bound_definitions(source: Source, contents: Contents) -> None:
    """Refuse definitions that became too much: they are read all at once, however many frames they are in, and objects
    are made of them. Raises InvalidCapture."""
    tables = contents.frames[contents.frames["kind"] == FrameKind.tables]
    consolidated = (tables["flags"] & FLAG_CONSOLIDATED) != 0
    for group in (tables[~consolidated], tables[consolidated]):
        stored, raw = int(group["stored_bytes"].sum()), int(group["raw_bytes"].sum())
        if raw > FREE_DEFINITION_BYTES + MAX_EXPANSION * stored:
            raise InvalidCapture(
                f"{source.path}: {stored} bytes of definitions in {len(group)} frames declare {raw} "
                f"raw bytes; the limit is {FREE_DEFINITION_BYTES} and {MAX_EXPANSION} for each "
                "stored one"
            )


def walk_contents(source: Source, trailer: Trailer | None, problem: str) -> Contents:
    """The contents without the index, of which `problem` says what is wrong with it."""
    scan = _FrameScan(source, trailer)
    contents, stopped = scan.run()
    if contents.complete:
        contents.index_problem = problem
        contents.warnings.append(f"{problem}; every frame before it is whole, so they were read one by one instead")
    else:
        what = "is damaged" if scan.closed else "was never closed, or is still being written"
        contents.incomplete_reason = (
            f"the capture {what}: {stopped}; its {contents.records} records before {contents.end:#x} can be read"
        )
    return contents


def read_frame(source: Source, frames: np.ndarray, position: int) -> tuple[FrameHeader, bytes, str]:
    """Header, verified body and place of a frame. Raises InvalidCapture if it is not what its row says."""
    row = frames[position]
    offset = int(row["offset"])
    header = source.header(offset)
    where = source.where(offset, header)
    found = (
        header.sequence,
        header.kind,
        header.flags,
        header.stored_bytes,
        header.raw_bytes,
        header.first_ordinal,
        header.count,
    )
    names = ("kind", "flags", "stored_bytes", "raw_bytes", "first_ordinal", "count")
    listed = (position, *(int(row[name]) for name in names))
    if found != listed:
        raise InvalidCapture(
            f"{where}: sequence, kind, flags, lengths, first ordinal and count are {found}, the index says {listed}"
        )
    return header, source.body(offset, header), where


def read_session(source: Source, contents: Contents, preamble: Preamble) -> CaptureInfo:
    """The session in the head frame, which is the preamble's. Raises InvalidCapture."""
    _header, body, where = read_frame(source, contents.frames, 0)
    session = decode_session(body, where)
    if session.session_id != preamble.session_id:
        raise InvalidCapture(f"{where}: session {session.session_id}, the preamble says {preamble.session_id}")
    return session


def _trailer(source: Source) -> Trailer:
    if source.length < PREAMBLE_BYTES + TRAILER_BYTES:
        raise InvalidCapture(f"{source.path}: too short for a trailer")
    offset = source.length - TRAILER_BYTES
    return parse_trailer(source.read(offset, TRAILER_BYTES, "trailer"), source.length, source.where(offset))


def _unknown(kinds: np.ndarray) -> np.ndarray:
    return (kinds == FrameKind.none) | (kinds > _LAST_KIND)


def _refuse_unknown_required(source: Source, contents: Contents) -> None:
    """Reading through the index must refuse what walking refuses."""
    frames = contents.frames
    unknown = _unknown(frames["kind"])
    for position in np.flatnonzero(unknown & ((frames["flags"] & FLAG_REQUIRED) != 0)).tolist():
        source.header(int(frames["offset"][position]))  # raises UnsupportedVersion with the frame's version
        raise InvalidCapture(
            f"{source.where(int(frames['offset'][position]))}: the index calls this a required frame "
            f"of unknown kind {int(frames['kind'][position])}, which it is not"
        )


def _count_unknown(contents: Contents) -> None:
    kinds = contents.frames["kind"]
    unknown = kinds[_unknown(kinds)]
    if len(unknown):
        names = ", ".join(str(kind) for kind in sorted(set(unknown.tolist())))
        contents.warnings.append(
            f"{len(unknown)} optional frames of unknown kind ({names}) were skipped; "
            "a newer version of opreplay wrote them"
        )
