"""What is in a capture and where: its frames and payloads, found through the index, or by walking from the first frame.

Both ways end in the same `Contents`, with rows that obey the same rules, so everything above does not care which way it
was. The index is a hint: whatever is wrong with it or the trailer, the scan decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from replayfmt.errors import InvalidCapture, UnsupportedVersion

from ..codes import FrameKind
from ..model import Session
from ..session import decode_session
from .frame_scan import scan_frames
from .frames import (
    FLAG_CONSOLIDATED,
    FLAG_REQUIRED,
    FREE_DEFINITION_BYTES,
    MAX_EXPANSION,
    PREAMBLE_BYTES,
    TRAILER_BYTES,
    FrameHeader,
    Preamble,
    Trailer,
    parse_preamble,
    parse_trailer,
)
from .index import read_index
from .source import Source

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
    scanned = scan_frames(source, trailer)
    contents = Contents(
        scanned.frames, scanned.payloads, scanned.records, scanned.storages, scanned.end, not scanned.stopped
    )
    if contents.complete:
        contents.index_problem = problem
        contents.warnings.append(f"{problem}; every frame before it is whole, so they were read one by one instead")
    else:
        what = "is damaged" if scanned.closed else "was never closed, or is still being written"
        contents.incomplete_reason = (
            f"the capture {what}: {scanned.stopped}; its {scanned.records} records before {scanned.end:#x} can be read"
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


def read_session(source: Source, contents: Contents, preamble: Preamble) -> Session:
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
