"""The fixed parts of a capture: preamble, frame headers, index rows, trailer, and the limits that bound a reader.

Everything here is a struct at a known place, read with bounds checks and verified by its own check value before any
field of it is believed. It owns no file: `source.py` reads, `output.py` writes. schema/opreplay.fbs defines the
structs, schema/FORMAT.md says why they are as they are.
"""

from __future__ import annotations

import struct
import uuid
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from replayfmt.errors import InvalidCapture, UnsupportedVersion

from .codes import MAJOR_VERSION, MINOR_VERSION, Codec, FrameKind

ALIGNMENT = 64
PREAMBLE_BYTES = HEADER_BYTES = TRAILER_BYTES = 64

PREAMBLE_MAGIC = b"OPREPLAY"
FRAME_MAGIC = 0x4D52464F  # "OFRM"
TRAILER_MAGIC = 0x4C4941525452504F  # "OPRTRAIL"

FLAG_REQUIRED = 1
FLAG_CONSOLIDATED = 2

PREAMBLE = struct.Struct("<8sHHIQ16s16sQ")
HEADER = struct.Struct("<IHHIIQQQIHHQQ")
TRAILER = struct.Struct("<QQQQQIIQQ")

FRAME_ROW = np.dtype(
    [
        ("offset", "<u8"),
        ("stored_bytes", "<u8"),
        ("raw_bytes", "<u8"),
        ("first_ordinal", "<u8"),
        ("first_storage", "<u8"),
        ("count", "<u4"),
        ("kind", "<u2"),
        ("flags", "<u2"),
    ]
)
PAYLOAD_ROW = np.dtype(
    [
        ("hash_low", "<u8"),
        ("hash_high", "<u8"),
        ("offset", "<u8"),
        ("stored_bytes", "<u8"),
        ("raw_bytes", "<u8"),
        ("id", "<u4"),
        ("codec", "<u2"),
        ("reserved", "<u2"),
    ]
)

# Limits (FORMAT.md, "Limits"). They bound what a reader allocates for a hostile file, and are far from what real
# captures need.
MAX_BODY_BYTES = 256 << 20  # raw length of a frame that holds a FlatBuffer
MAX_COMPRESSED_PAYLOAD_BYTES = 256 << 20  # raw length of a payload with codec zstd; larger ones are stored as they are
MAX_EXPANSION = 64  # how much longer than stored a frame, or all definitions together, may become
FREE_FRAME_BYTES = 64 << 20  # … beyond so many bytes for a frame,
FREE_DEFINITION_BYTES = 16 << 20  # … and for all definitions, of each of which a reader makes objects
MAX_FRAME_RECORDS = 1 << 20  # records in one frame, of each of which a reader makes some 100 bytes
MAX_STRING_BYTES = 16 << 20  # one string, so that a few always fit a frame
MAX_NESTING = 64  # depth of lists in a record's values
MAX_ATTACHMENTS = 1024  # of one kernel, which a reader makes one object of
MAX_LENGTH = 1 << 60  # any length, offset, ordinal, time or id: so that sums fit 64 signed bits

REQUIRED_KINDS = frozenset({FrameKind.head, FrameKind.tables, FrameKind.records, FrameKind.payload})


def align(n: int) -> int:
    """The next multiple of 64."""
    return (n + ALIGNMENT - 1) & -ALIGNMENT


def halves(digest: int) -> tuple[int, int]:
    """A 128-bit hash as its low and high 64 bits."""
    return digest & 0xFFFFFFFFFFFFFFFF, digest >> 64


def pack_preamble(session_id: str) -> bytes:
    """The 64 bytes that begin a capture of this session."""
    head = PREAMBLE.pack(
        PREAMBLE_MAGIC,
        MAJOR_VERSION,
        MINOR_VERSION,
        PREAMBLE_BYTES,
        PREAMBLE_BYTES,
        uuid.UUID(session_id).bytes,
        bytes(16),
        0,
    )[:56]
    return head + xxh3_64_intdigest(head).to_bytes(8, "little")


@dataclass(frozen=True)
class Preamble:
    major: int
    minor: int
    head_offset: int
    session_id: str


def parse_preamble(raw: bytes, path: str) -> Preamble:
    """Check the first 64 bytes of a file. Raises InvalidCapture, or UnsupportedVersion for another major version."""
    if not raw:
        raise InvalidCapture(f"{path}: the file is empty; expected a capture, which begins with {PREAMBLE_BYTES} bytes")
    if raw[:8] != PREAMBLE_MAGIC[: len(raw)]:
        raise InvalidCapture(
            f"{path}: not an OpReplay capture: it begins with {raw[:8]!r}, expected {PREAMBLE_MAGIC!r}"
        )
    if len(raw) < PREAMBLE_BYTES:
        raise InvalidCapture(
            f"{path}: the file ends after {len(raw)} bytes, inside the preamble of {PREAMBLE_BYTES}; "
            "nothing can be recovered from it"
        )
    _magic, major, minor, preamble_bytes, head_offset, session, reserved, check = PREAMBLE.unpack(raw)
    if check != xxh3_64_intdigest(raw[:56]):
        raise InvalidCapture(
            f"{path}: the preamble is damaged: its check is {check:#018x}, expected {xxh3_64_intdigest(raw[:56]):#018x}"
        )
    if major != MAJOR_VERSION:
        raise UnsupportedVersion(
            f"{path}: format version {major}.{minor}; this reader knows {MAJOR_VERSION}.x, "
            "so a version of opreplay that knows the file's is needed"
        )
    if preamble_bytes != PREAMBLE_BYTES or head_offset != PREAMBLE_BYTES or reserved != bytes(16):
        raise InvalidCapture(
            f"{path}: the preamble is not one of version {major}: length {preamble_bytes}, first "
            f"frame at {head_offset:#x}, reserved bytes {reserved.hex()}; expected 64, 0x40 and zeros"
        )
    return Preamble(major, minor, head_offset, str(uuid.UUID(bytes=session)))


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """A frame's header, verified against its own check. `hash` is XXH3-128 as an integer."""

    kind: int
    flags: int
    sequence: int
    stored_bytes: int
    raw_bytes: int
    first_ordinal: int
    count: int
    minor: int
    codec: int
    hash: int

    @property
    def name(self) -> str:
        return FrameKind(self.kind).name if self.kind in FrameKind._value2member_map_ else f"kind {self.kind}"

    @property
    def required(self) -> bool:
        return bool(self.flags & FLAG_REQUIRED)

    @property
    def consolidated(self) -> bool:
        return bool(self.flags & FLAG_CONSOLIDATED)

    def pack(self) -> bytes:
        fields = [
            FRAME_MAGIC,
            self.kind,
            self.flags,
            self.sequence,
            0,
            self.stored_bytes,
            self.raw_bytes,
            self.first_ordinal,
            self.count,
            self.minor,
            self.codec,
            *halves(self.hash),
        ]
        raw = HEADER.pack(*fields)
        fields[4] = xxh3_64_intdigest(raw[:12] + raw[16:]) & 0xFFFFFFFF
        return HEADER.pack(*fields)


_FRAME_ROW = struct.Struct("<QQQQQIHH")


def pack_frame_row(offset: int, header: FrameHeader, first_storage: int) -> bytes:
    """A FrameRow for the index."""
    return _FRAME_ROW.pack(
        offset,
        header.stored_bytes,
        header.raw_bytes,
        header.first_ordinal,
        first_storage,
        header.count,
        header.kind,
        header.flags,
    )


class BadHeader(InvalidCapture):
    """There is no whole frame header at this place: what a scan takes for the end of what was written."""


def parse_header(raw: bytes, where: str) -> FrameHeader:
    """Check 64 bytes as a frame header. Raises BadHeader; UnsupportedVersion for what only a newer reader knows."""
    if len(raw) < HEADER_BYTES:
        raise BadHeader(f"{where}: {len(raw)} bytes are left, fewer than a frame header's {HEADER_BYTES}")
    (magic, kind, flags, sequence, check, stored, raw_bytes, first_ordinal, count, minor, codec, low, high) = (
        HEADER.unpack(raw)
    )
    if magic != FRAME_MAGIC:
        raise BadHeader(f"{where}: no frame begins here: magic {magic:#010x}, expected {FRAME_MAGIC:#010x}")
    expected = xxh3_64_intdigest(raw[:12] + raw[16:]) & 0xFFFFFFFF
    if check != expected:
        raise BadHeader(f"{where}: the frame header is damaged: its check is {check:#010x}, expected {expected:#010x}")
    header = FrameHeader(kind, flags, sequence, stored, raw_bytes, first_ordinal, count, minor, codec, high << 64 | low)
    # From here on the header was written deliberately: a fault in it is not the accident of a torn tail.
    known = kind in FrameKind._value2member_map_ and kind != FrameKind.none
    if max(stored, raw_bytes, first_ordinal) > MAX_LENGTH:
        raise InvalidCapture(f"{where}: lengths {stored} and {raw_bytes} or first ordinal {first_ordinal} above 2^60")
    if known:
        _check_known(header, where)
    elif header.required:
        raise UnsupportedVersion(
            f"{where}: required frame of unknown kind {kind}, of format version "
            f"{MAJOR_VERSION}.{minor}; this reader knows {MAJOR_VERSION}.{MINOR_VERSION}"
        )
    return header


def _check_known(header: FrameHeader, where: str) -> None:
    """The rules for frames of known kinds."""
    kind, flags, codec, name = header.kind, header.flags, header.codec, header.name
    newer = header.minor > MINOR_VERSION
    if header.required != (kind in REQUIRED_KINDS):
        raise InvalidCapture(f"{where}: a {name} frame has flags {flags:#x}")
    if flags & ~(FLAG_REQUIRED | (FLAG_CONSOLIDATED if kind == FrameKind.tables else 0)):
        _newer_or_invalid(newer, header.minor, f"{where}: {name} frame with unknown flags {flags:#x}")
    if codec not in (Codec.none, Codec.zstd):
        _newer_or_invalid(newer, header.minor, f"{where}: {name} frame with unknown codec {codec}")
    if codec == Codec.none and header.stored_bytes != header.raw_bytes or header.stored_bytes > header.raw_bytes:
        raise InvalidCapture(
            f"{where}: {name} frame of codec {codec} declares {header.stored_bytes} stored and "
            f"{header.raw_bytes} raw bytes"
        )
    if kind in (FrameKind.payload, FrameKind.index):
        if codec != Codec.none:
            raise InvalidCapture(f"{where}: a {name} frame is never compressed as a whole")
    elif header.raw_bytes > MAX_BODY_BYTES:
        raise InvalidCapture(
            f"{where}: {name} frame declares {header.raw_bytes} raw bytes; the limit is {MAX_BODY_BYTES}"
        )
    elif header.raw_bytes > FREE_FRAME_BYTES + MAX_EXPANSION * header.stored_bytes:
        raise InvalidCapture(
            f"{where}: {name} frame of {header.stored_bytes} bytes declares {header.raw_bytes} raw "
            f"bytes; the limit is {FREE_FRAME_BYTES} and {MAX_EXPANSION} for each stored one"
        )
    if kind == FrameKind.records and header.count > MAX_FRAME_RECORDS:
        raise InvalidCapture(f"{where}: a frame of {header.count} records; the limit is {MAX_FRAME_RECORDS}")
    if (header.count != 0) != (kind in (FrameKind.records, FrameKind.payload)):
        raise InvalidCapture(f"{where}: {name} frame with a count of {header.count}")


def _newer_or_invalid(newer: bool, minor: int, message: str) -> None:
    if newer:
        raise UnsupportedVersion(
            f"{message}, written by format version {MAJOR_VERSION}.{minor}; this reader knows "
            f"{MAJOR_VERSION}.{MINOR_VERSION}"
        )
    raise InvalidCapture(message)


def body_hash(body: bytes | bytearray | memoryview) -> int:
    """XXH3-128 of a frame's body, as its header carries it."""
    return xxh3_128_intdigest(body)


@dataclass(frozen=True)
class Trailer:
    index_offset: int
    index_bytes: int
    file_bytes: int
    records: int
    frames: int
    payloads: int

    def pack(self) -> bytes:
        head = TRAILER.pack(
            TRAILER_MAGIC,
            self.index_offset,
            self.index_bytes,
            self.file_bytes,
            self.records,
            self.frames,
            self.payloads,
            0,
            0,
        )[:56]
        return head + xxh3_64_intdigest(head).to_bytes(8, "little")


def parse_trailer(raw: bytes, file_bytes: int, where: str) -> Trailer:
    """The trailer in the last 64 bytes of a file. Raises InvalidCapture if there is none or it is wrong."""
    magic, index_offset, index_bytes, length, records, frames, payloads, reserved, check = TRAILER.unpack(raw)
    if magic != TRAILER_MAGIC:
        raise InvalidCapture(f"{where}: no trailer ends the file: magic {magic:#018x}, expected {TRAILER_MAGIC:#018x}")
    if check != xxh3_64_intdigest(raw[:56]):
        raise InvalidCapture(
            f"{where}: the trailer is damaged: its check is {check:#018x}, expected {xxh3_64_intdigest(raw[:56]):#018x}"
        )
    trailer = Trailer(index_offset, index_bytes, length, records, frames, payloads)
    if length != file_bytes:
        raise InvalidCapture(f"{where}: the trailer is of a file of {length} bytes, this one has {file_bytes}")
    if (
        reserved
        or index_offset % ALIGNMENT
        or records > MAX_LENGTH
        or index_offset < PREAMBLE_BYTES
        or index_offset + index_bytes != file_bytes - TRAILER_BYTES
    ):
        raise InvalidCapture(
            f"{where}: the trailer points to an index of {index_bytes} bytes at {index_offset:#x}, "
            "which is not what lies before it"
        )
    return trailer
