"""Verifying every frame of a capture, in order: what opreplay-check does, and recovery before it keeps a frame.

Beyond what reading a frame checks: definitions and payloads come before the records that use them, payloads have the
content that their hashes name, padding is zero everywhere, a tensor has one id within a frame, digests name ops that
came before, scope markers name their scope, and consolidated definitions and summary agree with everything before them.
Memory does not grow with the number of records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from replayfmt.errors import InvalidCapture

from ..codes import FrameKind, RecordKind
from ..container.contents import Contents, read_frame
from ..container.frames import FLAG_CONSOLIDATED, FrameHeader
from ..container.payload_input import PayloadInput
from ..container.source import Source
from ..definitions.reading import Definitions, Frozen
from ..definitions.scopes import SCOPES
from ..definitions.signature_rules import members
from ..model import Summary
from ..records.record_frames import RecordFrame, RecordFrameDecoder
from ..summary import Tally, decode_summary

_IS_DIGEST = members({RecordKind.digest}, RecordKind)
_IS_SCOPE = members({RecordKind.scope_begin, RecordKind.scope_end}, RecordKind)
Progress = Callable[[int], None]


class Verifier:
    """Verifies the frames of a capture one after the other, from the first."""

    def __init__(self, source: Source, contents: Contents, progress: Progress) -> None:
        """`progress` is called with numbers of bytes that were read since it was called last."""
        self._source = source
        self._frames = contents.frames
        self._progress = progress
        self._payloads = PayloadInput(source, contents.payloads)
        self._lengths = PayloadLengths(contents)
        self._definitions, self._counts = self._read_definitions()
        self.definitions = Frozen(self._definitions, source.path)
        self._decoder = RecordFrameDecoder(self.definitions)
        self.tally = Tally()
        self.payload_bytes = 0
        self.payloads = 0
        self.summary: Summary | None = None  # the stored one, once it was verified
        self._kind_of = self.definitions.column("signature_kind")
        # The frame of records before: its first ordinal and signatures.
        self._before: tuple[int, np.ndarray] = (0, np.zeros(0, np.uint32))

    def _read_definitions(self) -> tuple[Definitions, list[dict[str, int]]]:
        """All definitions, and how many of each family there are before each frame."""
        definitions = Definitions()
        counts = []
        for position, row in enumerate(self._frames):
            counts.append(definitions.counts)
            if row["kind"] == FrameKind.tables and not row["flags"] & FLAG_CONSOLIDATED:
                header, body, where = read_frame(self._source, self._frames, position)
                definitions.add(body, header.minor, where, self._lengths.before(position))
        return definitions, counts

    def verify_definitions(self) -> None:
        """A scope is a path: the same name under the same parent has one id."""
        if SCOPES.repeats(self.definitions.column):
            raise InvalidCapture(f"{self._source.path}: two scopes have the same name and parent")

    def verify(self, position: int) -> FrameHeader:
        """Verify the next frame. Raises InvalidCapture with what is wrong with it."""
        header, body, where = read_frame(self._source, self._frames, position)
        if header.kind == FrameKind.payload:
            self._verify_payloads(header)
        elif header.kind == FrameKind.records:
            self._verify_records(position, header, body, where)
        elif header.kind == FrameKind.tables and header.consolidated:
            self._verify_consolidated(position, header, body, where)
        elif header.kind == FrameKind.summary:
            self._verify_summary(header, body, where)
        if header.kind != FrameKind.payload:
            self._progress(len(body))
        return header

    def _verify_payloads(self, header: FrameHeader) -> None:
        for number in range(self.payloads + 1, self.payloads + header.count + 1):
            self._payloads.verify(number)
            info = self._payloads.info(number)
            self.payload_bytes += info.raw_bytes
            self._progress(info.stored_bytes)
        self.payloads += header.count

    def _verify_records(self, position: int, header: FrameHeader, body: bytes, where: str) -> None:
        counts = {**self._counts[position], "payload": self.payloads}
        frame = self._decoder.decode(body, header, int(self._frames["offset"][position]), where, counts)
        if frame.first_storage != self.tally.storages + 1:
            raise InvalidCapture(f"{where}: first_storage is {frame.first_storage}, expected {self.tally.storages + 1}")
        if len(frame.tensor_id) > 1:
            rows = np.zeros(len(frame.tensor_id), np.dtype([("a", "<u8"), ("b", "<i8"), ("c", "<u4")]))
            rows["a"], rows["b"], rows["c"] = frame.tensor_storage, frame.tensor_offset, frame.tensor_meta
            if len(np.unique(rows)) != len(rows):
                raise InvalidCapture(f"{where}: the same storage, offset and metadata have two tensor ids")
        self._verify_digests(frame, where)
        self._verify_scopes(frame, where)
        if frame.annotation is not None:
            for number in np.unique(frame.annotation).tolist():
                self.definitions.annotation(number)
        self._before = (frame.first_ordinal, frame.signature)
        self.tally.add_frame(frame)

    def _rows_of(self, frame: RecordFrame, wanted: np.ndarray) -> np.ndarray:
        return np.flatnonzero(wanted[self._kind_of[frame.signature.astype(np.int64) - 1]])

    def _verify_digests(self, frame: RecordFrame, where: str) -> None:
        """`of` is an op that came before and `result` one of its results, or -1 for something it wrote; or of a live
        tensor both are -1."""
        rows = self._rows_of(frame, _IS_DIGEST)
        if not len(rows):
            return
        of, result = frame.ints[frame.int_first[rows]], frame.ints[frame.int_first[rows] + 1]
        if (
            (of < -1).any()
            or (result < -1).any()
            or ((of == -1) & (result != -1)).any()
            or (of >= frame.first_ordinal + rows).any()
        ):
            raise InvalidCapture(f"{where}: a digest is of a record that does not come before it")
        # An op's digests follow it at once. One that names an op further back than the frame before is not followed:
        # reading frames again and again is what a hostile file would ask for.
        first, before = self._before
        near = of >= first
        of, result = of[near], result[near]
        signatures = np.concatenate((before, frame.signature))[of - first].astype(np.int64) - 1
        results = self.definitions.column("signature_results")[signatures]
        wrong = (self._kind_of[signatures] != RecordKind.op) | (result >= results)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise InvalidCapture(
                f"{where}: a digest is of result {int(result[at])} of record {int(of[at])}, which has no such result"
            )

    def _verify_scopes(self, frame: RecordFrame, where: str) -> None:
        """A scope marker's record is in the scope it names."""
        rows = self._rows_of(frame, _IS_SCOPE)
        if not len(rows):
            return
        scopes = frame.scope[rows].astype(np.int64)
        named = self.definitions.column("node_constant")[
            self.definitions.first_nodes[frame.signature[rows].astype(np.int64) - 1]
        ]
        names = np.concatenate(([0], self.definitions.column("scope_name")))
        if (scopes == 0).any() or (names[scopes] != named).any():
            raise InvalidCapture(f"{where}: a scope marker names another scope than its record's")

    def _verify_consolidated(self, position: int, header: FrameHeader, body: bytes, where: str) -> None:
        consolidated = Definitions()
        consolidated.add(body, header.minor, where, self._lengths.before(position))
        if self._counts[position] != self._definitions.counts or not consolidated.consolidates(self._definitions):
            raise InvalidCapture(f"{where}: the consolidated definitions differ from those of the frames before it")

    def _verify_summary(self, header: FrameHeader, body: bytes, where: str) -> None:
        stored = decode_summary(body, len(self.definitions.kernels) - 1, header.first_ordinal, where)
        counted = self.tally.summary(self.definitions, self.payload_bytes, stored.ended_ns, stored.recovered)
        if stored != counted:
            fields = [name for name in vars(stored) if getattr(stored, name) != getattr(counted, name)]
            raise InvalidCapture(
                f"{where}: the summary is wrong: {', '.join(fields)}: stored "
                f"{[getattr(stored, name) for name in fields]}, counted "
                f"{[getattr(counted, name) for name in fields]}"
            )
        self.summary = stored


class PayloadLengths:
    """The raw lengths of a capture's payloads."""

    def __init__(self, contents: Contents) -> None:
        frames = contents.frames
        self._lengths = contents.payloads["raw_bytes"]
        self._after = np.cumsum(np.where(frames["kind"] == FrameKind.payload, frames["count"], 0), dtype=np.int64)

    def before(self, position: int) -> np.ndarray:
        """Those of the payloads before a frame, in order of their ids."""
        return self._lengths[: int(self._after[position - 1]) if position else 0]


def kept(contents: Contents, whole: int) -> Contents:
    """The first `whole` frames of a capture, up to the definitions and totals that close it."""
    frames = contents.frames[:whole]
    closing = np.flatnonzero((frames["kind"] == FrameKind.summary) | ((frames["flags"] & FLAG_CONSOLIDATED) != 0))
    frames = frames[: int(closing[0])] if len(closing) else frames
    payloads = int(frames["count"][frames["kind"] == FrameKind.payload].sum(dtype=np.int64))
    records = int(frames["count"][frames["kind"] == FrameKind.records].sum(dtype=np.int64))
    end = contents.end if len(frames) == len(contents.frames) else int(contents.frames["offset"][len(frames)])
    return replace(contents, frames=frames, payloads=contents.payloads[:payloads], records=records, end=end)
